"""Rows without padding: which pieces share a row, and how attention keeps them apart.

masks.py     the attention mask of a batch's segments, for models of transformers
"""
