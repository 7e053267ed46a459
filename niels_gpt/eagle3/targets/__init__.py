"""Target models.

loading.py  a model by folder or hub id: what its config says, and its weights; which models are refused
probe.py    what a model does to its last hidden state, found by running a few tokens: its norm, its logits
small.py    the sample's target: a small Llama of random weights, the same bytes on any machine
"""
