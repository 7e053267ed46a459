"""Download datasets and models from the Hugging Face hub. Buckets: niels_gpt/exchange/transfer.

datasets.py       a dataset's rows and its card, at one commit
checked_files.py  bytes of a dataset's files: each read returns the bytes asked for, or raises
models.py         files of a model, by its id
retries.py        which requests to the hub are repeated, how often and how long; remedies for other failures
"""
