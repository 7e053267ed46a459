"""Every operation for every kind of cache. Nothing here loads torch.

kind.py      Cache and Kind, and the table of kinds, which other packages may add to
homes.py     the table of packages that may be deleted: the commands, recipes and assets of each
files.py     files: presence, size, sha256, which 64 KiB blocks differ; how files are read
folders.py   which folders are caches, for commands that are given a folder of caches
checks.py    checks that several kinds share; when dropped or repaired documents are a warning
verify.py    is a cache good: named checks, every damage with its bytes, why readers refuse it
look.py      its contents: stats, show, locate, plot; the tokenizer of its ids
rows.py      rows that several kinds say of themselves
diff.py      which keys of meta.json and which documents differ between two caches

A kind itself stands in the package of its readers: cache/kind, prefix_tree/rollouts/kind.py, eagle3/kind.py,
eagle3/draft_kind.py, tokenizers/kind.py.
"""
