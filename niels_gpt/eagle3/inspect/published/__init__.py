"""What the checks ask of versions 1 and 2: rows of a fixed width, with the target's probabilities.

opened.py      the shards of such a cache, and their rows
row_checks.py  `finite`, `ids_match` and `distribution`: what must hold of one stored sample
unplanned.py   `recomputed` for a cache without a plan, as other tools write it
    stats.py       `stats`: padding, and what the receipts say of the probability mass
    show.py        `inspect`: form and sizes, and the slots of one sample
    again.py       `recomputed`: a batch of the plan is run again
"""
