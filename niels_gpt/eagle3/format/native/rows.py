"""Which rows of a sample the native form stores, in raw positions; all follow from the loss mask.

A target row is what the target says at a position: last hidden state, log-normalizer, argmax. It is stored for each
position t >= 1 with m[t] = 1, where a draft is trained whose mask is shifted with the ids, or m[t - 1] = 1, for tools
that do not shift the mask. Auxiliary states are stored for the positions before the last target row: a draft is causal,
so nothing after them reaches a loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def target_positions(loss_mask: NDArray[Any]) -> NDArray[np.int64]:
    """Return the positions of a sample's target rows, rising: int64 [R].

    loss_mask: [L], raw; 0 or False where no loss is.
    """
    length = len(loss_mask)
    return np.flatnonzero(has_target_row(np.array([0, length] if length else [0]), loss_mask))


def row_counts(starts: NDArray[np.int64], loss_mask: NDArray[Any]) -> NDArray[np.int64]:
    """Return what is stored of each sample: int64 [n, 3], tokens, auxiliary rows, target rows.

    starts: int64 [n + 1], from 0 to T: where each sample begins; each has a token or more. loss_mask: [T], raw.
    """
    begins, ends = starts[:-1], starts[1:]
    positions = np.flatnonzero(has_target_row(starts, loss_mask))
    first, behind = np.searchsorted(positions, begins), np.searchsorted(positions, ends)
    target_rows = behind - first
    last = np.zeros(len(begins), np.int64)
    some = target_rows > 0
    last[some] = positions[behind[some] - 1] - begins[some]
    return np.stack([ends - begins, last, target_rows], axis=1)


def has_target_row(starts: NDArray[np.int64], loss_mask: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which tokens of samples end to end have a target row: bool [T]. starts, loss_mask: as `row_counts`."""
    loss: NDArray[np.bool_] = np.asarray(loss_mask) != 0
    stored = loss.copy()
    stored[1:] |= loss[:-1]
    stored[starts[:-1]] = False  # position 0 of each sample
    return stored
