"""A pretrain cache in partitions: each is built alone, as a cache of its own; `seal` makes the one cache of all.

plan.py       plan.json: what all partitions of a cache share; where a partition lies; which plans there are
receipts.py   the state of every partition by its receipt, which is its meta.json, and by its files
refusal.py    the error of a seal: which partitions are not finished, and the command that mends each
sums.py       the counts of the cache: sums of those in the receipts; the warnings about all partitions
seal.py       checks all partitions and commits the cache: shards linked, index, ids and checksums streamed together
"""
