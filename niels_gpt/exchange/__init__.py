"""Token caches as files of other tools, files of other tools as token caches, and caches in buckets.

output.py       a token cache as an export reads it: shards, borders, loss; the folder that it writes: links, copies
exporting.py    export: a cache -> a folder of another tool, with a manifest
foreign.py      a folder of another tool as an import reads it
names.py        the names of the formats, and how their own tools read them; --help needs no more
card.py         the card of a cache: README.md of a hub dataset repository
assembling.py   files of tokens -> all files of a cache
texts.py        the bytes of text in an assembled cache; whether its ids come back
importing.py    import: a folder of another tool -> a version of a cache
formats/        one module a format: what it writes of a cache, and what it reads of a folder
transfer/       push, pull and stage: caches in buckets
"""
