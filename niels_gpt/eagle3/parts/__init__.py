"""Parts that several machines make in one folder at a time, until the folder is sealed.

folder.py    `.parts` of an unfinished cache: the locks of parts, and what all machines must have in common
units.py     shards as units of niels_gpt/engine/units.py: how one is looked at
seal.py      every shard compared with its receipt and the plan, then meta.json; the error for an unsealed folder

Parts in folders that no disk connects are put together by produce/join.py.
"""
