"""Recipes that move caches to and from other tools.

imports.py   decides the place and tokenizer of an imported cache
outputs.py   exports or pushes caches by lines of sources.toml, unless they are up to date
"""
