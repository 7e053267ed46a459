"""Looking into a finished cache. Nothing here loads torch.

show.py      a decoded window, an example with its loss mask, a short table of decoded pieces
stats.py     the length of every document, and how many of its tokens carry loss
plot.py      both as a picture
verify.py    is a cache good: the checks behind Dagster's asset checks and the warnings of a build
damage.py    every damage with its file and bytes; contents.py: what bytes must be; accounts.py: what must add up;
             checksums.py: which block of a file differs, and which bit
readers.py   why the readers of a cache would refuse it: the last question of both
diff.py      what differs between two caches; matching.py: which documents they have in common
locate.py    the document at a token; source_ids.py: where it came from
caches.py    the caches below a folder
"""
