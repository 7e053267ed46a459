"""How people look at data: as text with its loss mask, as small tables, behind a progress bar.

decoded.py   what `dataset[i]` returns: ids, loss mask, text; how sentinels and supervised tokens are marked
tables.py    small HTML tables for notebooks
bar.py       a progress bar that works in notebooks, for builds from Python
"""
