"""Tokenizers of any kind behind one protocol. The spec's public path for SentencePiece is niels_gpt/tokenizer.py.

protocol.py            what builders and readers need of a tokenizer; what identifies it
huggingface.py         the adapter of a tokenizer.json; that of SentencePiece is niels_gpt/tokenizer.py
kind.py                the kind tokenizer: whether its folder is good, and its content
files.py               which files a tokenizer has, and how they are read
inputs.py              what both adapters check of their arguments
sentencepiece_proto.py the pieces in the bytes of a SentencePiece model
sentinels.py           gives an existing tokenizer the four sentinels
document_tokens.py     the tokens that begin and end a document
gigatoken/             the fast engine for BPE
engine.py              what computes the ids of many texts at once; its comparison with the reference
training_texts.py      the texts that a tokenizer is trained on
bpe_training.py        trains a byte-level BPE tokenizer.json; SentencePiece: niels_gpt/tokenizer_training.py
roundtrip.py           whether a tokenizer is lossless, measured on probe texts
vocabulary.py          the keys of a cache's meta.json about ids: vocabulary, dtype, special ids, ends of documents
"""
