"""Caches from and to other tools: what `import` makes of a folder, and exports as recipes.

imports.py   import: which place and tokenizer a folder of another tool gets
lines.py     the tables [export.NAME] and [published.NAME] of sources.toml
outputs.py   carries out such a line, unless it is up to date
published.py its push to a bucket: what it may replace there, and what is wrong there
"""
