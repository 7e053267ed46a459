"""How people look at data: as text with its loss mask, as small tables, behind a progress bar.

decoded.py   what `dataset[i]` returns: ids, loss mask, text; how sentinels and supervised tokens are marked
tables.py    tables of text that fit 100 columns, small HTML tables for notebooks
pictures.py  PNG pictures: their figure, axes and bytes
numbers.py   counts and sizes with units
bar.py       a progress bar that works in notebooks, for builds from Python
"""
