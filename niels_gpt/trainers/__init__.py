"""Streams inside the trainers that users have: the same global batches on any number of ranks, resumed in mid-epoch.

A module imports its trainer when it is imported, and nothing else of niels_gpt imports it. docs/trainers.md shows their
use.

    lightning.py      StreamDataModule: a data module whose position is in Lightning's checkpoints
    transformers.py   as_rows: what transformers' Trainer takes, and the callback that writes its checkpoints' state
    trl.py            as_rows: the same for TRL's SFTTrainer, with the borders of packed rows

Rollouts for verl and NeMo-RL: `PrefixForest.from_padded` of niels_gpt.prefix_tree.
"""
