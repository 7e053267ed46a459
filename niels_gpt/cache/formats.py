"""Names and dtypes of a cache's files, and the rule that says which tokens carry loss.

None of them can be changed by a setting. docs/formats.md has the bytes.

A pretrain cache:  train/shard_00000.bin ... val/shard_00000.bin ... index/{train,val}_docs.npy meta.json
An sft cache:      train_tokens.bin train_idx.npy val_tokens.bin val_idx.npy meta.json
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
    "target_mask",
]


def target_mask(ids: NDArray[np.uint16], lengths: NDArray[np.int64], *, asst_id: int, eot_id: int) -> NDArray[np.bool_]:
    """Return which tokens carry loss: those after an assistant sentinel, up to and including the next EOT.

    ids [B, S], lengths [B]: tokens of each row before padding; returns bool [B, S].

        sys a eot usr b eot asst A B eot pad
         0  0  0   0  0  0   0   1 1  1   0

    A token is inside a reply if, among the tokens before it, the last sentinel is later than the last EOT.
    """
    position = np.arange(ids.shape[1], dtype=np.int32)
    last_asst = np.maximum.accumulate(np.where(ids == asst_id, position, -1), axis=1)
    last_eot = np.maximum.accumulate(np.where(ids == eot_id, position, -1), axis=1)
    is_target = np.zeros(ids.shape, dtype=np.bool_)
    is_target[:, 1:] = last_asst[:, :-1] > last_eot[:, :-1]
    is_target &= position < lengths[:, None]
    return is_target
