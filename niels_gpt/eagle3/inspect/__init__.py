"""Looks at a finished EAGLE-3 cache: checks it, compares it with its target, prints it.

    checks.py     the names and questions of the checks; loads no torch
    opened.py     a cache of either form: plan, samples, receipts, shards; adds remedies to errors
    forms.py      opens a cache: the dense form (versions 1 and 2) and the native one
    verify.py     makes the checks, reading each file and sample once
    recompute.py  `recomputed`: runs samples through the target again
    by_head.py    the same by the target's head alone, which needs no more of its checkpoint
    show.py       `inspect`: prints the origin of a cache, and the slots of one sample
    stats.py      `stats`: prints the figures of a cache, and draws them

`python -m niels_gpt.eagle3` offers them as commands. A new check needs a row in checks.py, its functions, and a row in
verify.py.
"""
