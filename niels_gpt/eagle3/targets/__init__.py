"""Target models.

loading.py  a model by folder or hub id: what its config says, and its weights; which models are refused
small.py    the sample's target: a small Llama of random weights, the same bytes on any machine
"""
