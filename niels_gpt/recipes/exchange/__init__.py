"""Caches from and to other tools: what `import` makes of a folder, and exports as recipes.

imports.py   import: which place and tokenizer a folder of another tool gets
"""
