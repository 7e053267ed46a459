"""The build engine: iterables in, a committed cache out. It knows no source, no network, and no kind of cache.

build.py      one build on disk: start, resumption, checkpoints, comparison, commit; `run_build` by a Writer of a kind
journal.py    hashed files that only grow; the format of checkpoints on disk, and which unfinished builds there are
stream.py     the stream of items in chunks: their shuffled order, the state to resume from, batches encoded in parallel
split.py      which item goes to val (D5), token budgets, what is a duplicate
losses.py     what an encoding loses (no training loss): changed texts, unknown ids, empty replies, counted
meta.py       the keys of meta.json that every cache has; what must be equal for a build to resume
"""
