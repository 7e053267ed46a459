"""A pretrain cache in P partitions: each is built alone, by any process on any machine; all are sealed to one cache.

run.py        prepare, build_partition, seal_cache: what every machine calls
prepared.py   what every call needs: tokenizer, source, plan; builds a partition, and seals
planned.py    which plan is that of the settings, without reading the text again; how another one differs
documents.py  a source's documents -> the builder of a whole cache, or of one partition
"""
