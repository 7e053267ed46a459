"""A plan, its samples and a target -> a finished cache, by any number of processes, resumable after every shard.

producer.py       the order of all writes; what runs in this process and what in workers
resume_checks.py  what a rerun may continue: which plan a folder holds, which shards are finished, what is refused
estimate.py       the disk: whether a folder can be written, what the cache will take, whether it fits
workers.py        the processes: who makes which shard, how they start and end
forward.py        what one worker does: batches through the target, written by a thread; when a shard is finished
supervision.py    the target's outputs -> the stored fields, their padding and counts; numbers that are not finite
positions.py      counts the supervised slots, which train a draft; refuses a cache with none, warns where they are few
finalize.py       meta.json: where each of its keys comes from
"""
