"""The files of an EAGLE-3 cache. docs/formats.md describes every one.

layout.py        a shard's tensors, dtypes and offsets; all file names; opening files that may be hostile
manifest.py      manifest.json: its version, its checked values, the layout that it states
native.py        the native form: which rows are stored, a sample, states in eight bits, the layout of a shard
weights.py       what is kept of the target's weights, and its receipt (a JSON file with size and sha256, written last)
shard_writer.py  one shard and its receipt: when it is complete, which bytes are hashed
shards.py        all shards of a cache of any form: checked when it is opened, mapped when first read, their damage
receipts.py      what a reader compares with receipts; the identity of a cache, and the hold of its version
samples.py       sidecar/samples.safetensors and ids.txt: the tokenized input
run.py           how a target is run: what may change a bit of its outputs
plan.py          sidecar/plan.json and batches.jsonl: all that decides the bytes; where samples are cut into batches
torch_files.py   reads files of torch.save without running anything, their sizes bounded
meta.py          meta.json: its one writer, and the records of all files that it names
convert.py       changes a cache between versions 1 and 2 by its manifest alone
"""
