"""Rows and texts of files of any format: a mirror's, the sample's or the user's.

mirrors.py        which files of a mirror folder belong to a source and a split
walk.py           files below a folder: their order, the links that are followed, and their fingerprint
rows.py           rows of a .jsonl, .json, .parquet or .txt file, as columns where they are usual
text.py           text of a file: encoding, size limit, compression, and the counters of repaired and dropped documents
part.py           which files and rows of a source a partition has
rollouts.py       token ids of a row of recorded rollouts: its forms and limits
json_stream.py    items of a JSON array of any length, in bounded memory
parquet.py        rows of a parquet file, in bounded memory; refuses pages and values that are too large
snapshot.py       rows of a hub dataset as files of a mirror: how a snapshot is written, resumed and checked
"""
