"""Bytes on disk: atomic files, locks, versions, checked reading of untrusted files. Standard library and numpy only.

fileio.py      every write (atomic, synced, recordable) and every open for reading; canonical JSON, checksums
versions.py    the versions of one cache: committed in one step, resumed, and which are safe to remove
locks.py       one builder for each cache; readers that keep their version from gc
meta_json.py   meta.json's checksum and file records; what is refused when a file of a cache is read
filemaps.py    memory maps of many files in one address range
errors.py      CacheError: path, found, expected, remedy
remedies.py    the command in a remedy: which flags build a cache again
checks.py      Check and Verdict: one question to a finished cache and its result
"""
