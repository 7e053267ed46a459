"""The Hugging Face hub: the only package that uses the network.

datasets.py       a dataset's rows and its card, at one commit
checked_files.py  bytes of a dataset's files: each read returns the bytes asked for, or raises
models.py         files of a model, by its id
retries.py        which failures are retried, how often and how long; remedies for the others
"""
