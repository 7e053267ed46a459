"""The files of an EAGLE-3 cache. docs/formats.md describes every one.

layout.py        a shard's tensors, dtypes and offsets; all file names; opening files that may be hostile
manifest.py      manifest.json: its version, its checked values, the layout that it states
native.py        the native form: which rows are stored, a sample, states in eight bits, the layout of a shard
weights.py       what is kept of the target's weights, and its receipt (a JSON file with size and sha256, written last)
shard_writer.py  one shard and its receipt: when it is complete, which bytes are hashed
shards.py        all shards of a cache of any form: checked when it is opened, mapped when first read, their damage
samples.py       sidecar/samples.safetensors and ids.txt: the tokenized input
plan.py          sidecar/plan.json and batches.jsonl: all that decides the bytes, how the target is run included; where
                 samples are cut into batches
torch_files.py   reads files of torch.save without running anything, their sizes bounded
meta.py          meta.json: its one writer, and the records of all files that it names, what readers compare with it
"""
