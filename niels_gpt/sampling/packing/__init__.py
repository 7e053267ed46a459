"""Rows without padding: which pieces share a row, and how attention keeps them apart.

    plan.py      decides which pieces share a row, by best-fit decreasing of their lengths; their order in an epoch
    pieces.py    a split's documents or examples -> pieces of at most T tokens; cuts or leaves out longer ones
    stream.py    PackedStream: the rows of a split as batches
    masks.py     the attention mask of a batch's segments, for models of transformers

niels_gpt.sampling passes on the public names.
"""
