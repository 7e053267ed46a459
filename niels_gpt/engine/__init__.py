"""The build engine: iterables in, a committed cache out. It knows no source, no network, and no kind of cache.

build.py        builds a cache by the Writer of its kind: start, resumption, comparison, commit
checkpoints.py  the files and the journal of one build on disk: when a checkpoint is taken, what a resumed one truncates
journal.py      hashed files that only grow; the format of checkpoints on disk, and which unfinished builds there are
stream.py       the stream of items in chunks: shuffled order, the state to resume from, batches encoded in parallel
split.py        which item goes to val (D5), token budgets, what is a duplicate
losses.py       what an encoding loses (no training loss): changed texts, unknown ids, empty replies, counted
units.py        a cache in units: the plan that all share, the state of each by its receipt, the seal
meta.py         the keys of meta.json that every cache has; what must be equal for a build to resume
"""
