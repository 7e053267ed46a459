"""Caches in buckets and on other disks: push, pull and stage, through fsspec.

described.py  a cache by its meta.json, checked before anything is sent or fetched
remote.py     a folder at a URL: reads, writes, retries, how long an answer is waited for; no credentials in messages
answers.py    no answer of s3:// or gs:// longer than what was asked for, no redirect of s3://
jobs.py       several files at once, progress, and the end of all at the first error
push.py       a cache -> a URL: data first, meta.json last; to the hub in one commit
fetch.py      pull and stage: a URL -> a committed cache, whole or whole shards of it; in ranges, resumed, compared
"""
