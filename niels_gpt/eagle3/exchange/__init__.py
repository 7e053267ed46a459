"""Imports the folders of other tools as native caches, and exports native caches for them.

foreign.py    a sample as other tools store it, whole and unshifted; decides which samples are refused
tools.py      reads and writes SpecForge's folder (torch.save files) and speculators' (a dataset and safetensors files)
automodel.py  reads and writes NeMo Automodel's offline cache for DSpark
proof.py      determines a tool's layers, and the side of the final norm, by running the target
move.py       converts such a folder to a native cache
export.py     writes a native cache as such a folder
watch.py      does so while the tool still writes the folder: waits for files, continues after a kill
"""
