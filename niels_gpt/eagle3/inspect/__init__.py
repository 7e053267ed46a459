"""A finished EAGLE-3 cache: is it good, does the target agree, and what is in it? For `python -m niels_gpt.eagle3`.

    checks.py     the checks by name and what each asks; which of them there are
    opened.py     a cache of any form: plan, samples, receipts, shards; errors that say how to repair it
    forms.py      opens a cache: the dense form (versions 1 and 2), and the native one
    verify.py     makes the checks, reading each file and sample once
    recompute.py  `recomputed`: runs samples through the target again
    show.py       `inspect`: what a cache was made from, and the slots of one sample
    stats.py      `stats`: a cache in numbers, and as a picture

A new check needs a row in checks.py, its functions, and a row in verify.py.
"""
