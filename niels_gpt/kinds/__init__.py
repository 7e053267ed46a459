"""Operations for every kind of cache. Nothing here loads torch.

kind.py      Cache, Kind, and the table of kinds, which other packages may extend
homes.py     the table of packages that may be deleted, with their commands, recipes and assets
files.py     checks files: presence, size, sha256, which 64 KiB blocks differ
folders.py   decides which folders are caches
checks.py    checks that several kinds share; decides when dropped or repaired documents are a warning
verify.py    decides whether a cache is good: named checks, damage with its bytes, refusals of readers
look.py      shows the contents: stats, show, locate, plot; finds the tokenizer of the ids
rows.py      rows of statistics that several kinds share
urls.py      looks at caches at URLs: a folder stands for one; finds caches below a URL, and verifies one
diff.py      compares the settings and documents of two caches

Each kind stands in the package of its readers: cache/kind, prefix_tree/rollouts/kind.py, eagle3/kind.py,
eagle3/draft_kind.py, tokenizers/kind.py.
"""
