"""Tokenizers of any kind behind one protocol. The spec's public path for SentencePiece is niels_gpt/tokenizer.py.

protocol.py    what builders and readers need of a tokenizer; what identifies it
engine.py      what computes the ids of many texts at once; its comparison with the reference
roundtrip.py   whether a tokenizer is lossless, measured on probe texts
vocabulary.py  the keys of a cache's meta.json about ids: vocabulary, dtype, special ids, what ends a document
"""
