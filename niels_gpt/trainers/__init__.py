"""Streams inside the trainers that users have: the same global batches on any number of ranks, resumed in mid-epoch.

    automodel.py    StreamDataset: a `_target_` for the dataset of NeMo Automodel's recipes
    grain.py        StreamSource, StreamDataset: rows by number, and batches whose state is the stream's; maxtext
    lightning.py    StreamDataModule: a data module whose position is in Lightning's checkpoints
    speculators.py  DraftRows: the dataset of its loaders, for drafts of every kind, over a native cache
    torchtitan.py   StreamDataLoader: torchtitan's data loader
    transformers.py as_rows: what transformers' Trainer takes, and the callback that writes its checkpoints' state
    trl.py          as_rows: the same for TRL's SFTTrainer, with the borders of packed rows

A module imports its trainer when it is imported, and nothing else of niels_gpt imports it. docs/trainers.md shows their
use. Rollouts for verl and NeMo-RL: `PrefixForest.from_padded` of niels_gpt.prefix_tree.
"""
