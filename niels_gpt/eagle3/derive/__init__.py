"""A finished native cache -> another cache, without the target.

redraft.py    another draft vocabulary: a new manifest.json and meta.json, and hard links to the rest
published.py  version 1 or 2, with distributions, for tools that read these
"""
