"""Caches of other tools: read into a native cache, and written from one.

foreign.py  a sample as other tools store it, whole and unshifted; which one is refused, and why
tools.py    SpecForge's folder: one file of torch.save a sample; speculators': a dataset, and one safetensors file a row
proof.py    which blocks a tool's states are of, and before or after the final norm, found by running the target
move.py     such a folder -> a native cache, and back
"""
