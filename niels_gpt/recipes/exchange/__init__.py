"""Caches from and to other tools: what `import` makes of a folder, and exports as recipes.

imports.py   import: which place and tokenizer a folder of another tool gets
outputs.py   lines of sources.toml: caches that are exported, or pushed to a bucket, unless that is up to date
"""
