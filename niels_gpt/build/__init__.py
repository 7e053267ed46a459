"""The build engine: iterables in, files out. It knows no source and no network.

pretrain.py   documents -> train/ and val/ shards with a document index
  shards.py   the shards of both splits, and the account of every document
  split.py    which document goes to val (D5)
  duplicates.py  how many documents have the text of an earlier one
  shuffle.py  the bounded shuffle buffer
sft.py        chats -> one token file and one offsets file for each split
pipeline.py   a source -> encoded batches, in order; what an earlier run had read is compared and passed over
  stream.py   batches, and the state of the source behind each document
  workers.py  work behind any executor, taken back in order
  encode.py   texts -> uint16 ids; refuses text that holds a sentinel
start.py      the lock, and what a killed run has left
resume.py     a build that may be killed at any moment
  journal.py  its checkpoints
  writer.py   the on-disk primitives: hashed files, .npy headers, lines of ids
describe.py   what meta.json says
"""
