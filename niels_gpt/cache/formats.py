"""Names and dtypes of the files of a token cache, and which tokens carry loss; docs/formats.md has the bytes.

A pretrain cache:  train/shard_00000.bin ... val/shard_00000.bin ... index/{train,val}_docs.npy meta.json
An sft cache:      train_tokens.bin train_idx.npy val_tokens.bin val_idx.npy meta.json
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.builders.meta_keys import FORMAT_VERSION
from niels_gpt.builders.split import SPLITS
from niels_gpt.builders.writer import OFFSET_DTYPE
from niels_gpt.tokenizers.protocol import Ids
from niels_gpt.tokenizers.vocabulary import NARROW, TokenDtype, token_dtype_of

DEFAULT_SHARD_BYTES = 2**27
"""Default bytes of a pretrain shard: "128 MB" (PR-03)."""

SHARD_GLOB = "shard_*.bin"
IGNORE_INDEX = -100
"""The target that torch's cross entropy ignores (PR-03)."""

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "FORMAT_VERSION",
    "IGNORE_INDEX",
    "NARROW",
    "OFFSET_DTYPE",
    "SHARD_GLOB",
    "SPLITS",
    "Ids",
    "TokenDtype",
    "example_targets",
    "masked_targets",
    "reply_edges",
    "reply_runs",
    "target_mask",
    "targets_by_t",
    "targets_of_pieces",
    "token_dtype_of",
]


def target_mask(ids: Ids, lengths: NDArray[np.int64], *, asst_id: int, eot_id: int) -> NDArray[np.bool_]:
    """Return which tokens carry loss: those after an assistant sentinel, up to and including the next EOT.

    ids [B, S], lengths [B]: tokens of each row before padding; returns bool [B, S].

        sys a eot usr b eot asst A B eot pad
         0  0  0   0  0  0   0   1 1  1   0

    A token is inside a reply if, among the tokens before it, the last sentinel is later than the last EOT.
    """
    width = ids.shape[1]
    if not ids.size:
        return np.zeros(ids.shape, dtype=np.bool_)
    last = np.arange(1, len(ids) + 1) * width - 1
    places, opens = reply_edges(ids.reshape(-1), last, asst_id=asst_id, eot_id=eot_id)
    has_loss = np.zeros(len(places), dtype=np.bool_)  # of the tokens up to and including each place
    has_loss[1:] = opens[:-1]
    runs = places + 1
    runs[1:] -= places[:-1] + 1
    is_target = has_loss.repeat(runs).reshape(ids.shape)
    is_target &= np.arange(width) < lengths[:, None]
    return is_target


def reply_edges(
    ids: Ids, last: NDArray[np.int64], *, asst_id: int, eot_id: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where loss may begin or end in examples end to end: a sparse form of `target_mask`.

    ids [N]: the examples' tokens; last [examples]: the index of the last token of each, ascending.
    Returns places, int64 [K], ascending, and opens, bool [K]: the tokens after places[k], up to and including
    places[k + 1], carry loss exactly if opens[k]. The last token of an example is a place that opens nothing, so
    places[-1] is last[-1], and no reply continues in the next example.
    """
    # One id for both opens nothing: no sentinel is then later than the last EOT.
    is_asst = ids == asst_id if asst_id != eot_id else np.zeros(ids.shape, dtype=np.bool_)
    is_asst[last] = False
    is_edge = ids == eot_id
    is_edge |= is_asst
    is_edge[last] = True
    places = is_edge.nonzero()[0]
    return places, is_asst[places]


def reply_runs(
    rows: Ids, lengths: NDArray[np.int64], *, asst_id: int, eot_id: int
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which targets of padded rows carry loss, run-length encoded.

    rows [B, T + 1]: an example each, from its first token on, padded with eot_id; lengths [B]: tokens before padding.
    Returns has_loss, bool [runs], and runs, int64 [runs]: has_loss.repeat(runs) is bool [B * T], of rows[:, 1:].
    """
    ids, width = rows.reshape(-1), rows.shape[1]
    last = np.arange(-1, ids.size - 1, width) + lengths
    is_eot = ids == eot_id
    # One id for both opens nothing, as in `reply_edges`.
    is_asst = ids == asst_id if asst_id != eot_id else np.zeros(ids.shape, dtype=np.bool_)
    is_asst[last] = False
    is_edge = is_asst.copy()
    is_edge[1:] |= is_eot[1:] > is_eot[:-1]  # an EOT after an EOT ends nothing: padding has no edges
    is_edge[last] = is_edge[-1:] = True
    places = is_edge.nonzero()[0]
    # After a place p of row r the next run begins: at p - r of y, which lacks the first column.
    runs, has_loss = places - places // width, np.zeros(len(places), dtype=np.bool_)
    has_loss[1:] = is_asst[places[:-1]]
    runs[1:] -= runs[:-1].copy()
    return has_loss, runs


def masked_targets(rows: Ids, has_loss: NDArray[np.bool_], runs: NDArray[np.int64]) -> NDArray[Any]:
    """Return rows[:, 1:] with -100 where there is no loss, by the runs of `reply_runs`: [B, T].

    int32 of rows of uint32, which have no id of 2 ** 31 or more; else int64.
    """
    # A minimum takes half the time of a choice by a mask, and less of 32 bits than of 64.
    signed = np.int32 if rows.itemsize == 4 else np.int64
    y: NDArray[Any] = rows[:, 1:].view(np.int32) if rows.itemsize == 4 else rows[:, 1:]
    limits = np.array((IGNORE_INDEX, np.iinfo(np.int32).max), dtype=signed)
    masked: NDArray[Any] = limits.take(has_loss).repeat(runs).reshape(y.shape)
    np.minimum(y, masked, out=masked)
    return masked


def example_targets(
    ids: Ids, ends: NDArray[np.int64], width: int, *, asst_id: int, eot_id: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return, for examples end to end, how many supervised tokens remain when they are truncated to `width` tokens.

    ids [N]; ends [examples]: the index after the last token of each, ascending.
    Returns targets, int64 [examples]: supervised tokens; left, int64 [examples]: those among the first `width` tokens;
    lost_eot, bool [examples]: the last EOT is truncated.
    """
    count = len(ends)
    last = np.minimum(ends, np.concatenate(([0], ends[:-1])) + width) - 1  # of the truncated examples
    places, opens = reply_edges(ids, ends - 1, asst_id=asst_id, eot_id=eot_id)
    example = ends.searchsorted(places, side="right")
    begins = opens.nonzero()[0]
    of, before, until = example[begins], places[begins], places[begins + 1]
    targets = np.bincount(of, until - before, count)
    left = np.bincount(of, np.maximum(np.minimum(until, last[of]) - before, 0), count)
    behind = example[(places > last[example]) & (ids[places] == eot_id)]
    return targets.astype(np.int64), left.astype(np.int64), np.bincount(behind, minlength=count) > 0


def targets_of_pieces(
    pieces: Iterable[Ids], width: int, *, asst_id: int, eot_id: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return `example_targets` of one example in pieces, of which one at a time is in memory."""
    targets, left, lost_eot = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.bool_)
    latest: Any = [eot_id]
    for piece in pieces:
        # The latest sentinel before a piece tells whether it begins inside a reply. It is not a target, nor truncated.
        ids = np.concatenate((np.asarray(latest, dtype=piece.dtype), piece))
        end, rest = np.array([len(ids)]), max(width, 0) + 1
        in_piece = example_targets(ids, end, rest, asst_id=asst_id, eot_id=eot_id)
        targets, left, lost_eot = targets + in_piece[0], left + in_piece[1], lost_eot | in_piece[2]
        latest = ids[((ids == asst_id) | (ids == eot_id)).nonzero()[0][-1:]]
        width -= len(piece)
    return targets, left, lost_eot


def targets_by_t(
    ids: Ids, ends: NDArray[np.int64], size: int, *, drop: bool, asst_id: int, eot_id: int
) -> NDArray[np.int64]:
    """Return how many supervised tokens need T = t to be in a row of T + 1 tokens, for t below `size`: int64 [size].

    ids [N]; ends [examples]: as for `example_targets`, of at most `size` tokens each. drop: rows are whole examples.
    """
    places, opens = reply_edges(ids, ends - 1, asst_id=asst_id, eot_id=eot_id)
    begins = opens.nonzero()[0]
    example = ends.searchsorted(places[begins], side="right")
    starts = np.concatenate(([0], ends[:-1]))
    before, last = (places[edges] - starts[example] for edges in (begins, begins + 1))
    if drop:
        lengths = (ends - starts)[example]
        return np.bincount(lengths - 1, last - before, size).astype(np.int64)
    # A run of targets begins after one place and ends with the next.
    changes = np.bincount(before + 1, minlength=size + 1) - np.bincount(last + 1, minlength=size + 1)
    return np.cumsum(changes)[:size]
