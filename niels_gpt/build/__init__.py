"""The build engine: iterables in, files out. It knows no source and no network.

shuffle.py    the bounded shuffle buffer
encode.py     texts -> uint16 ids in batches; refuses text that holds a sentinel
split.py      which document goes to val (D5)
writer.py     the on-disk primitives: token shards, int64 .npy arrays, checksums
describe.py   what meta.json says
pretrain.py   documents -> train/ and val/ shards with a document index
sft.py        chats -> one token file and one offsets file for each split
"""
