"""Assets that lie downstream of the caches: what leaves the folder of caches.

outputs.py  export/NAME, one for each table [export.NAME] of sources.toml, and its check
"""
