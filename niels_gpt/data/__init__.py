"""Loaders of training text: one module per source, `places` for where the files come from, `types` for what they yield.

Importing these modules is cheap: datasets, pyarrow, huggingface_hub and torch load on first use.
"""
