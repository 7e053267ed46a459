"""The kinds pretrain and sft: operations on finished token caches. Nothing here loads torch.

tokens.py    defines both kinds: what readers open, checks, figures; calls the modules below
validity.py  decides what a valid cache is: sums in meta.json; ids, sentinels, offsets and source ids in its files
show.py      prints decoded text with the supervised tokens marked, and the document at a position
plot.py      draws lengths of documents and shares of supervised tokens
"""
