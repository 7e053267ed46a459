"""The build engine: an iterable of documents or chats in, a committed cache out. It knows no source and no network.

pretrain.py   builds a pretrain cache: documents -> shards; the keys that only its meta.json has
shards.py     where a shard ends, which document is truncated or dropped, and the counts of both for meta.json
sft.py        builds an sft cache: chats -> one token file a split; which chats go to val or are dropped; its own keys
split.py      which document of a pretrain cache goes to val (D5), the splits' token budgets, what is a duplicate
losses.py     what an encoding loses (no training loss): changed texts, unknown ids, empty replies, counted
meta_keys.py  the keys of meta.json that every cache has, what identifies a build, and the commit
source.py     the stream that is read: its shuffled order, its state at each document, where a batch to encode ends
pipeline.py   batches encoded in parallel and returned in order; what happens when a worker dies
resume.py     starts or resumes a build: the lock, and which documents a resumed build reads again to compare them
build.py      the files of one build: when a checkpoint is taken, and how they are cut back to the last one
journal.py    the format of checkpoints on disk, and which unfinished builds there are
writer.py     the bytes of a file: hashed token files, .npy headers, lines of source ids
"""
