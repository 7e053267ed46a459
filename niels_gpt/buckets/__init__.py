"""Files in buckets, and a bounded folder for parts of them. niels_gpt.cache.mounts reads a cache through both.

bucket.py     reads and writes files at a URL: retries, bounds on each wait, no credentials in messages
answers.py    bounds what a server of s3:// or gs:// may answer, and follows no redirect
folder.py     a bounded folder of pieces of files, which all processes of a machine share
"""
