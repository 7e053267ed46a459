"""Tokenizers of any kind behind one protocol. The spec's public path for SentencePiece is niels_gpt/tokenizer.py.

protocol.py    what builders and readers need of a tokenizer; what identifies it
roundtrip.py   whether a tokenizer is lossless, measured on probe texts
"""
