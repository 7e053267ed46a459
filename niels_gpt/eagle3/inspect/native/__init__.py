"""What the checks ask of the native form: ragged samples, with hidden states and the target's head.

opened.py      the shards of such a cache, and their samples
row_checks.py  `finite`, `ids_match` and `distribution`: what must hold of one sample, and of rows by the head
    stats.py       `stats`: rows and bytes by part; mass and entropy by the head
    show.py        `inspect`: form and sizes, and the tokens of one sample
    again.py       `recomputed`: a batch of the plan is run again
    unplanned.py   `recomputed` for a cache without a plan: samples are run one by one
"""
