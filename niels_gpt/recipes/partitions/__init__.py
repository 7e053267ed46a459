"""A pretrain cache in partitions on many machines; niels_gpt/recipes/units.py builds and seals them.

dask.py       build_on_dask: which worker of a Dask cluster builds which partition, and what follows when one dies
documents.py  a source's documents -> the builder of a whole cache, or of one partition
run.py        the earlier names of units.py, for one release
shared.py     what the machines must share: the same program, and a folder whose file system keeps its promises
worker.py     what runs on a worker of Dask
"""
