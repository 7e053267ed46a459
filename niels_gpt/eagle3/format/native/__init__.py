"""The files of a cache in the native form: ragged, and target rows only where a loss can need them.

rows.py          which target rows and auxiliary rows a sample has, by its loss mask
sample.py        one sample as it is stored
fp8.py           auxiliary states in eight bits, with a scale for each token and layer
layout.py        a shard's tensors, sizes and cuts; the layout that a manifest states
shard_writer.py  one shard and its receipt: a sample at its own place, in any order
weights.py       target_weights.safetensors: embeddings, lm_head and final norm, once; files with a receipt
"""
