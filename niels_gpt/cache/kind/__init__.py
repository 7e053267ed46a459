"""The kinds of token caches, pretrain and sft: their contents, and whether they are good. Nothing here loads torch.

tokens.py    the two kinds: what readers open, checks, figures, and the pieces that the modules below make
validity.py  what a valid cache is: sums in meta.json, and in its files ids, sentinels, offsets, source ids
show.py      decoded text with the supervised tokens marked, from a place on or around it; where printed text is cut
plot.py      lengths of documents and shares of supervised tokens as a picture
"""
