"""Bytes on disk: atomic files, locks, versions, checked reading of untrusted files. Standard library and numpy only.

fileio.py      every write (atomic, synced; tests replay them as a loss of power) and open; canonical JSON, checksums
versions.py    a cache's versions and unfinished builds: commits or resumes one, lists the leftovers for `gc`
fresh_folder.py a folder that is whole or does not exist
locks/         one builder for each cache; readers that keep their version from gc
meta_json.py   meta.json's checksum and file records; refuses links, holes and wrong values in files of a cache
mounted.py     folders that stand for files elsewhere, as of a cache in a bucket
filemaps.py    many files mapped as one array
parquet_pages.py reads the sizes of a parquet file's pages from their headers
arrow_messages.py reads the sizes of an Arrow stream's messages from their headers
errors.py      the classes of errors, each with its code; CacheError: path, found, expected, remedy
codes.py       the code of an error; the texts of codes.txt: meaning, remedy, example
waits.py       the arithmetic of waiting between attempts at any server; which failures are temporary
remedies.py    the command line in error messages that builds a cache again
checks.py      Check and Verdict: one question to a finished cache and its result

Earlier names, for one release:

leftovers.py   `removable`, of versions.py now
"""
