"""Looking into a finished cache. Nothing here loads torch.

show.py      a decoded window, an example with its loss mask, a short table of decoded pieces
stats.py     the length of every document, and how many of its tokens carry loss
plot.py      both as a picture
verify.py    is a cache good: the checks behind Dagster's asset checks and the warnings of a build
"""
