"""Assets that lie downstream of the caches: what leaves the folder of caches.

outputs.py  export/NAME and published/NAME, one for each such table of sources.toml, and its check
"""
