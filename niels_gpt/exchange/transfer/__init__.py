"""Caches in buckets and on other disks: push, pull and stage, through fsspec.

described.py  a cache by its meta.json, checked before anything is sent or fetched
patience.py   a line where a server does not answer, and an end
remote.py     a folder at a URL: reads, writes, retries; no credentials in what it says
answers.py    no answer of s3:// or gs:// longer than what was asked for, no redirect of s3://
jobs.py       several files at once, progress, and the end of all at the first error
push.py       a cache -> a URL: data first, meta.json last; to the hub in one commit
arrival.py    the files of a cache -> the folder of a build: in ranges, resumed, compared with their sha256
fetch.py      a URL -> a committed cache: pull and stage
parts.py      whole shards of a pretrain cache as a cache: a stage of a part
"""
