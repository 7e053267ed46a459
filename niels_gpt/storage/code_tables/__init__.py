"""The tables of codes. A code is one situation with one remedy, not one place in the code.

A code keeps its number: that of a removed one is not used again.

row.py       a row: code, name, meaning, remedy, example
data.py      errors of usage, caches, sources and tokenizers
runs.py      errors of disk, builds, hub and buckets, EAGLE-3, prefix trees; what is not installed
warnings.py  warnings, with the hundreds of the errors
"""
