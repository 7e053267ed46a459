"""The engine gigatoken: some seventy times as fast as the libraries that define the ids, and new.

models.py    which tokenizers it knows, and the tokenizer.json that it opens for one
encoder.py   encodes; which texts are left to the reference
memory.py    when its cache of words, which has no limit, has to be dropped
"""
