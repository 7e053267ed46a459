"""The files of an EAGLE-3 cache. docs/formats.md describes each of them.

layout.py        decides file names, tensors, dtypes and offsets of a shard; opens files that may be hostile
manifest.py      reads, checks and writes manifest.json; derives the layout from it
native.py        the native form: which rows are stored, a sample, fp8 states, the layout of a shard
drafters.py      the kinds of drafts: which blocks and target rows of a native cache each one reads
weights.py       the stored weights of the target, and their receipt
shard_writer.py  writes one shard and then its receipt, a JSON file with checksums
shards.py        opens all shards of a cache of either form: checks, maps and compares them
fetched.py       reads the samples of shards at a URL by ranges
samples.py       sidecar/samples.safetensors and ids.txt: the tokenized input
plan.py          sidecar/plan.json and batches.jsonl: all that decides the bytes; cuts samples into shards and batches
torch_files.py   reads torch.save files of strangers with bounded memory and without running code
watched.py       watch.json: how far a cache is that is made while another tool still writes its files
meta.py          writes meta.json; compares small files with its checksums
"""
