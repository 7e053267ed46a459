"""A finished EAGLE-3 cache: is it good, does the target agree, and what is in it? For `python -m niels_gpt.eagle3`.

    checks.py       the checks by name and what each asks; which of them there are
    verify.py       runs the checks, reading each file and row once; which function makes which check
    report.py       the functions of one check, and what they found
    file_checks.py  `complete` and `checksums`: which files must exist, and in which form
    recompute.py    `recomputed`: runs samples through the target again
    compare.py      how its numbers are compared; the tolerance in another environment, and without a plan
    opening.py      opens a cache of any form; reads a sample of each shard, as a training run does
    open_cache.py   what all forms share: plan, samples, receipts; errors that say how to repair a cache
    show.py         `inspect`: what a cache was made from, and the slots of one sample
    stats.py        `stats`: a cache in numbers
    figures.py      these numbers: tokens, lengths, probability mass, entropy and norms
    plot.py         `stats --plot`: lengths, entropy and probability mass as a picture
    published/      the shards of versions 1 and 2, and what is asked of them
    native/         the same of the native form

A new check needs a row in checks.py, its functions, and a row in verify.py.
"""
