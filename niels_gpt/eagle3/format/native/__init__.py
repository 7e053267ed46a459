"""The native form of a cache: ragged, with hidden states in place of distributions.

weights.py  target_weights.safetensors: embeddings, lm_head and final norm, once; files with a receipt
"""
