"""Names and dtypes of a cache's files; none of them can be changed by a setting. docs/formats.md has the bytes.

A pretrain cache:  train/shard_00000.bin ... val/shard_00000.bin ... index/{train,val}_docs.npy meta.json
An sft cache:      train_tokens.bin train_idx.npy val_tokens.bin val_idx.npy meta.json
"""

from __future__ import annotations

from niels_gpt.build.describe import FORMAT_VERSION
from niels_gpt.build.split import SPLITS
from niels_gpt.build.writer import OFFSET_DTYPE, TOKEN_BYTES, TOKEN_DTYPE_NAME
from niels_gpt.build.writer import TOKEN_DTYPE as TOKEN_NUMPY_DTYPE

TOKEN_DTYPE = TOKEN_DTYPE_NAME
"""`token_dtype` in meta.json (PR-03)."""

DEFAULT_SHARD_BYTES = 2**27
"""Bytes of a pretrain shard where nobody says otherwise: "128 MB" (PR-03)."""

SHARD_GLOB = "shard_*.bin"
IGNORE_INDEX = -100
"""The target that torch's cross entropy leaves out (PR-03)."""

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "FORMAT_VERSION",
    "IGNORE_INDEX",
    "OFFSET_DTYPE",
    "SHARD_GLOB",
    "SPLITS",
    "TOKEN_BYTES",
    "TOKEN_DTYPE",
    "TOKEN_NUMPY_DTYPE",
]
