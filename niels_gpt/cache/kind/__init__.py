"""The kinds of token caches, pretrain and sft: their contents, and whether they are good. Nothing here loads torch.

tokens.py   the two kinds: what readers open, checks, figures, and the pieces that the modules below make
sums.py     which sums and sizes of meta.json must agree
scans.py    what a valid token stream is: ids, sentinels, offsets, source ids
show.py     decoded text with the supervised tokens marked; where printed text is cut
locate.py   the document at a position of the token stream
plot.py     lengths of documents and shares of supervised tokens as a picture
"""
