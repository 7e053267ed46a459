"""The integers that a forest is made of, and values in their order.

radix.py         sequences -> radix tree -> pre-order: where nodes are split, and the order of the tokens
early_forks.py   a tree that branches one token before its samples differ, for one label a row
sample_ends.py   where the samples of a tree end, read from their last supervised tokens
fields.py        ragged fields: values per sample, or per sample and token, in the order of the supervised tokens
"""
