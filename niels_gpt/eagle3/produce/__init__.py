"""A plan, its samples and a target -> a finished cache, by any number of processes, resumable after every shard.

producer.py       the order of all writes; what runs in this process and what in workers
resume_checks.py  what a rerun may continue: which plan a folder holds, which shards are finished, what is refused
estimate.py       the disk: whether a folder can be written, what the cache will take, whether it fits
workers.py        the processes: who makes which shard, how they start and end
trial.py          a target's first few tokens, before anything is written: does it run, has it the planned sizes
shards.py         what one worker does: batches through the target, written by a thread; when a shard is finished
forward.py        a batch of version 1 or 2: target's inputs, the shard's rows, the receipt's counts
native_forward.py the same for the native form: which rows are stored, log-normalizers, fp8, what is not finite
supervision.py    the target's outputs -> the stored fields, their padding and counts; numbers that are not finite
host_memory.py    a GPU's tensors brought to the CPU, into memory that is used again
positions.py      counts the supervised slots, which train a draft; refuses a cache with none, warns where they are few
finalize.py       meta.json: where each of its keys comes from
join.py           parts of one plan, each made in a folder of its own -> the finished cache, by links
"""
