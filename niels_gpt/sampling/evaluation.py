"""Evaluation: every token of a split once, in order, and the sum of their losses as bits per byte of text."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from niels_gpt.cache.formats import IGNORE_INDEX
from niels_gpt.cache.meta import reader_meta, text_bytes
from niels_gpt.cache.pretrain_dataset import PretrainSplit, as_int64, gathered, resolved_split, split_rows
from niels_gpt.cache.reader import OpeningTokens, named_split
from niels_gpt.storage.errors import CacheError, CacheNotFound
from niels_gpt.storage.meta_json import checked_int
from niels_gpt.storage.mounted import is_url
from niels_gpt.storage.remedies import build_again

_LEAST_BITS = 0.001  # per byte; a mean of 10 nats stays undetected for texts under 14,427 bytes


def iter_eval(
    shards_dir: str | os.PathLike[str],
    *,
    split: str | None = None,
    B: int,
    T: int,
    rank: int = 0,
    world_size: int = 1,
    device: str = "cpu",
    **opening: Unpack[OpeningTokens],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return an iterator over x, y: int64 [b, T], b <= B, contiguous: the windows at stride T of a split's tokens.

    shards_dir, split, opening: see `PretrainSplit`.
    Windows cross shards, so that the result does not depend on the size of the shards, and every token but the first is
    a target exactly once. The last window is padded with x = 0 and y = -100, which cross entropy ignores. For a mean
    over tokens divide the summed loss by `(y != -100).sum()`, not by the number of batches.
    rank, world_size: rank r yields the batches r, r + world_size, ... of one process, so that each batch is on one
        rank. All ranks yield equally many, because forward passes of sharded models wait for each other: ranks without
        a batch in the last round yield one window of x = 0, y = -100. Add up the losses (reduction="sum": a mean of
        such a window is nan) and the numbers of targets, and reduce both over ranks with a sum.
    Raises, at the call: FileNotFoundError, CacheError, ValueError for B or T below 1 and for a rank that is not below
        world_size; others as for `PretrainSplit`.
    """
    B, T = checked_int("B", B, 1), checked_int("T", T, 1)
    rank, world_size = checked_int("rank", rank, 0), checked_int("world_size", world_size, 1)
    if rank >= world_size:
        raise ValueError(f"rank={rank}, world_size={world_size}: expected 0 <= rank < world_size")
    opened = PretrainSplit(shards_dir, split=split, in_order=True, **opening)
    ends = np.cumsum(opened.lengths)
    total = int(ends[-1])
    if total < 2:
        raise CacheError(opened.folder, "1 token", "at least 2, one to predict the other", code="E107")
    rounds = -(-(total - 1) // (world_size * B * T))
    begins = (np.arange(rounds) * world_size + rank) * (B * T)
    with_targets = begins[begins < total - 1]
    opened.will_read(with_targets, with_targets + (B * T + 1))
    return (
        _window_batch(opened, ends, first, B, T, device) if first < total - 1 else _without_targets(T, device)
        for first in begins.tolist()
    )


def _without_targets(T: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a window without a target."""
    x = torch.zeros(1, T, dtype=torch.int64, device=device)
    return x, torch.full_like(x, IGNORE_INDEX)


def _window_batch(
    split: PretrainSplit, ends: NDArray[np.int64], first: int, B: int, T: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return at most B windows from token `first` of the split on; ends: of the shards, in tokens of the split."""
    shard = int(ends.searchsorted(first, side="right"))
    if first + B * T < ends[shard]:  # most batches: whole rows of one shard, which are read as one row
        place = first - int(ends[shard] - split.lengths[shard] - split.files.first_tokens[shard])
        tokens = gathered(split.files, split.vocab_size, np.array([shard]), np.array([place]), B * T + 1)
        if str(device) != "cpu":
            x, y = split_rows(tokens, device)
            return x.view(B, T), y.view(B, T)
        both = as_int64(tokens[0, :-1]), as_int64(tokens[0, 1:])
        return torch.from_numpy(both[0].reshape(B, T)), torch.from_numpy(both[1].reshape(B, T))
    targets = min(B * T, int(ends[-1]) - 1 - first)
    rows = -(-targets // T)
    stream = np.zeros(rows * T + 1, dtype=split.files.dtype)
    place, last = first, first + targets + 1
    while place < last:
        shards = np.searchsorted(ends, [place], side="right")
        width = min(int(ends[shards[0]]), last) - place
        begin = place - ends[shards] + split.lengths[shards]
        stream[place - first : place - first + width] = split.rows(shards, begin, width)[0]
        place += width
    windows = as_strided(stream, (rows, T + 1), (T * stream.itemsize, stream.itemsize))
    x, y = split_rows(np.ascontiguousarray(windows), device)
    y.view(-1)[targets:] = IGNORE_INDEX
    return x, y


def bits_per_byte(
    loss_sum: float | torch.Tensor,
    shards_dir: str | os.PathLike[str],
    *,
    split: str | None = None,
    check: bool = True,
) -> float:
    """Return the loss of a split in bits per byte of its text, comparable between models of different tokenizers.

    loss_sum: cross entropy in nats, summed over all targets of `iter_eval`, of all ranks. It is divided by ln 2 and by
        the UTF-8 length of the split's texts, from meta.json. (The first token is not a target, but its bytes count;
        end-of-texts are targets without bytes.)
    shards_dir, split: see `iter_eval`. Of a cache at a URL only its meta.json is read: it needs no `local`.
    check: refuse a result below 0.001 bits per byte, which no model of text reaches: a mean was passed, not the sum.
    Raises: ValueError for a sum that is negative or not finite, and by `check`; FileNotFoundError; CacheError for an
        sft cache and where meta.json has no byte count.
    """
    nats = float(loss_sum.detach() if isinstance(loss_sum, torch.Tensor) else loss_sum)
    if not 0 <= nats < math.inf:
        raise ValueError(f"loss_sum={nats}: expected a sum of cross entropies, 0 or more")
    num_bytes = text_bytes(*_meta_of(os.fspath(shards_dir), split))  # it checks the kind, and says what chats lack
    bits = nats / math.log(2) / num_bytes
    if check and bits < _LEAST_BITS:
        raise ValueError(
            f"loss_sum={nats}: {bits:.2g} bits for each of {num_bytes:,} bytes, expected {_LEAST_BITS} or more. Pass "
            "the sum over all targets of iter_eval (reduction='sum'), not a mean; check=False accepts any"
        )
    return bits


def _meta_of(path: str, split: str | None) -> tuple[Path | str, dict[str, Any] | None, str]:
    """Return the folder or URL of a cache, its meta.json, and the name of a split, as `iter_eval` finds them."""
    if is_url(path):
        from niels_gpt.cache.mounts import meta_at

        return meta_at(path, split)
    cache, name = named_split(path, split)
    folder = resolved_split(cache if name is None else cache / name)
    if not folder.parent.is_dir():
        raise CacheNotFound(f"{path}: no such folder. {build_again(path)}")
    return folder.parent, reader_meta(folder.parent), folder.name
