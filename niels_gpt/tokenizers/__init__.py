"""Tokenizers of any kind behind one protocol. The spec's public path for SentencePiece is niels_gpt/tokenizer.py.

protocol.py            what builders and readers need of a tokenizer; its keys in a cache's meta.json
huggingface.py         the adapter of a tokenizer.json; niels_gpt/tokenizer.py is the one of SentencePiece
library.py             the library tokenizers: 0.22 and 0.23, or 1.0
adapters.py            what both adapters share: checks of arguments, pickling
files.py               which files a tokenizer has, and how they are read
document_tokens.py     the tokens that begin and end a document
engine.py              what computes the ids of many texts at once; its comparison with the reference
gigatoken.py           the fast engine for BPE: which tokenizers it knows, which texts it leaves to the reference
probes.py              texts that a tokenizer is tried with; whether a round trip returns them
sentinels.py           gives an existing tokenizer the four sentinels
sentencepiece_proto.py the pieces in the bytes of a SentencePiece model
kind.py                the kind tokenizer: whether its folder is good, and its content
"""
