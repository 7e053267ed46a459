"""Parts that several machines make in one folder at a time, until the folder is sealed.

folder.py    `.parts` of an unfinished cache: the locks of parts, and what all machines must have in common
progress.py  which shards of which part are there; what a command says of a folder that is not sealed
seal.py      every shard compared with its receipt and the plan, then meta.json

Parts in folders that no disk connects are put together by produce/join.py.
"""
