"""Move caches between folders and buckets through fsspec: push, pull and stage.

described.py  checks the meta.json of a cache before any file of it is sent or fetched
jobs.py       runs several transfers at once, counts bytes, stops all at the first error
push.py       sends a cache to a URL: a note first, then data, meta.json last; one commit on the hub
fetch.py      pulls or stages a cache, or whole shards of one: in ranges, resumed, compared with their sha256
"""
