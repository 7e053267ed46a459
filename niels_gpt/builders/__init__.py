"""The build engine: an iterable of documents or chats in, a committed cache out. It knows no source and no network.

pretrain.py   builds a pretrain cache: documents -> shards; its keys of meta.json, but for files and counts (shards.py)
shards.py     where a shard ends, which document is truncated or dropped; files and counts in meta.json
split.py      which document of a pretrain cache goes to val (D5; chats: sft/), token budgets, what is a duplicate
losses.py     what an encoding loses (no training loss): changed texts, unknown ids, empty replies, counted
meta_keys.py  the keys of meta.json that every cache has; what must be equal for a build to resume; the commit
source.py     the stream of documents in chunks: their shuffled order, the state to resume from, batches to encode
pipeline.py   batches encoded in parallel and returned in order; what happens when a worker dies
resume.py     starts or resumes a build: the lock, and which documents a resumed build reads again to compare them
build.py      the files of one build: when a checkpoint is taken, and what a resumed build truncates
journal.py    the format of checkpoints on disk, and which unfinished builds there are
writer.py     the bytes of a file: hashed token files, .npy headers, lines of source ids
sft/          builds an sft cache: chats -> one token file a split; which chats go to val or are dropped; its own keys
"""
