"""The build engine: iterables in, a committed cache out. It knows no source, no network, and no kind of cache.

build.py        builds a cache by the Writer of its kind: start, resumption, comparison, commit
checkpoints.py  the files and the journal of one build on disk: when a checkpoint is taken, what a resumed one truncates
journal.py      hashed files that only grow; the format of checkpoints on disk, and which unfinished builds there are
stream.py       the stream of items in chunks: shuffled order, the state to resume from, batches encoded in parallel
split.py        which item goes to val (D5), token budgets, how duplicates are counted
losses.py       counts the losses of an encoding (no training loss): changed texts, unknown ids, empty replies
units.py        a cache in units: the file of the plan, the state of each unit by its receipt, the seal
meta.py         the keys of meta.json that every cache has; the identity under which a build resumes
"""
