"""Caches of other tools: read into a native cache, and written from one.

foreign.py       a sample as other tools store it, whole and unshifted; which one is refused, and why
specforge.py     SpecForge's folder: one file of torch.save a sample
speculators.py   speculators' folder: a dataset, and one safetensors file a row
proof.py         which blocks a tool's states are of, and before or after the final norm, found by running the target
importing.py     such a folder -> a native cache
describe.py      the draft's tokens and meta.json of an imported cache
exporting.py     a native cache -> such a folder
"""
