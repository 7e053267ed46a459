"""Export caches to other tools, import from them, and move caches between disks and buckets.

output.py       the cache that an export reads: token files, borders, loss; the folder that it writes: links, copies
exporting.py    export: a cache -> a folder of another tool, with a manifest
foreign.py      the folder that an import reads: which files are val, borders, loss, the manifest of an earlier export
importing.py    import: a folder of another tool -> a version of a cache
assembling.py   writes all files of a cache from files of tokens: for imports, and for a staged part of a cache
texts.py        counts the bytes of text in an assembled cache, and checks that its ids come back
names.py        the names of the formats, and a line of Python that opens each; light, for --help
card.py         the card of a cache: README.md of a dataset repository, from meta.json
formats/        one module for each format: writes a cache to it, reads a folder of it
transfer/       push, pull and stage: caches in buckets
"""
