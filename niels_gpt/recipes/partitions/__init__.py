"""A pretrain cache in P partitions: each is built alone, by any process on any machine; all are sealed to one cache.

run.py        prepare, build_partition, seal_cache: what every machine calls
shared.py     what machines must share: the same program, and a folder whose file system keeps its promises
"""
