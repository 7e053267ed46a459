"""Data for people: text with its loss mask, tables, counts with units, progress bars.

decoded.py   the object that `dataset[i]` returns: ids, loss mask, text; marks sentinels and supervised tokens
tables.py    fits tables and lines to a terminal; small HTML tables for notebooks
pictures.py  PNG pictures: their figure, axes and bytes
sketch.py    distributions as a small SVG in Markdown, for Dagster
numbers.py   counts and sizes with units
bar.py       progress bars on terminals and in notebooks; log lines of progress elsewhere
"""
