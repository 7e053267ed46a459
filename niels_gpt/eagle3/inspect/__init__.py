"""A finished EAGLE-3 cache: is it good, does the target agree, and what is in it? For `python -m niels_gpt.eagle3`.

    checks.py       the checks by name and what each asks; which of them there are
    verify.py       runs the checks, reading each file and row once; which function makes which check
    file_checks.py  `complete` and `checksums`: which files must exist, and in which form
    row_checks.py   `finite`, `ids_match` and `distribution`: what must hold of one stored sample
    recompute.py    `recomputed`: runs samples through the target again; the tolerance in another environment
    unplanned.py    `recomputed` for a cache without a plan, as other tools write it
    open_cache.py   opens a cache with its plan, samples and shards; errors say how to repair it
    show.py         `inspect`: what a cache was made from, and the slots of one sample
    stats.py        `stats`: tokens, lengths, probability mass, entropy and norms in numbers
    plot.py         `stats --plot`: lengths, entropy and probability mass as a picture

A new check needs a row in checks.py, its functions, and a row in verify.py.
"""
