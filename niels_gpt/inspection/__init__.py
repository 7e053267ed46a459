"""Looking into a finished cache. Nothing here loads torch.

verify.py        is a cache good: the table of named checks, and which fail a build; a new check is a row here
file_checks.py   files: presence, size, sha256, which 64 KiB blocks differ; how files are read
meta_checks.py   meta.json: its bytes, the sums in it; when dropped or repaired documents are a warning
contents.py      what files hold: which ids, sentinels, offsets and source ids are valid
readers.py       why a reader refuses a cache; the first reason in a few words, for tables
show.py          decoded text with the supervised tokens marked; where printed text is cut
stats.py         how long documents are, how many tokens are supervised; the table that `stats` prints
plot.py          lengths of documents and shares of supervised tokens as a picture
diff.py          which keys of meta.json and which documents differ between two caches; commands/report.py prints it
locate.py        the document at a position of the token stream
source_ids.py    the source id of each document
caches.py        which folders are caches, for commands that are given a folder of caches
"""
