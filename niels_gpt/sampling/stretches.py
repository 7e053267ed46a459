"""The order "shards" of an epoch: stretches of a split in a random order, and random units of a few of them at a time.

For caches in a bucket whose split does not fit the local folder: an epoch then fetches each byte about once. This is a
format, as the order of permutation.py is; docs/reading.md describes both.

A stretch is the units of one shard whose first token lies in the same STRETCH_TOKENS tokens of it, so a shard of at
most that many tokens is one stretch; of an EAGLE-3 cache each shard is one. Of P stretches, in the order of the split,
epoch e has G = ceil(P / open_shards) groups, whose numbers of stretches differ by at most one:

1. stretch `permute(i, P)` with the keys of `purpose + STRETCHES` and tweak e is the i-th one,
2. group g has the i-th ones from g * P div G to (g + 1) * P div G - 1,
3. the units of a group are numbered stretch by stretch, and `permute(j, units of the group)` with the keys of the
   stream and tweak e * G + g is the j-th one that is served.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.sampling.permutation import ROUNDS, permute, random_keys
from niels_gpt.storage.meta_json import checked_int

Order = Literal["all", "shards"]
"""How an epoch is shuffled: over the whole split, or over a few shards at a time."""
STRETCH_TOKENS = 1 << 23
"""Tokens of a stretch. The row at its end needs a token of the next one, so a MiB may be fetched twice: of 16 MiB, with
ids of 16 bits, that is 6 % at most, and half as long ones would have 13 %."""
STRETCHES = 1 << 16
OPEN_SHARDS = 16

Numbers = NDArray[np.int64]


class _Drawn(NamedTuple):
    """The stretches of some epochs in their orders, end to end: int64 [epochs * P] each."""

    epochs: Numbers
    """The numbers of the epochs."""
    firsts: Numbers
    """The first unit of each."""
    begins: Numbers
    """The place at which each would begin, if its group were not shuffled; places count from the first epoch's."""
    ends: Numbers


class Stretches:
    """Which unit of a split is served at a position of an epoch."""

    def __init__(self, counts: Numbers, open_shards: int, seed: int, purpose: int) -> None:
        """counts: units of each stretch, none of them 0: int64 [P]. purpose: of the units."""
        self.open_shards = checked_int("open_shards", open_shards, 1)
        self._counts, self._firsts, self._total = counts, np.cumsum(counts) - counts, int(counts.sum())
        self._keys = random_keys(seed, ROUNDS, purpose=purpose + STRETCHES)
        self._num_groups = -(-len(counts) // self.open_shards)
        self._lasts = np.arange(1, self._num_groups + 1) * len(counts) // self._num_groups - 1
        self._kept: _Drawn | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def largest_share(self) -> float:
        """Return the part of a split's units that the largest group of any epoch may have."""
        most = -(-len(self._counts) // self._num_groups)
        return int(np.sort(self._counts)[-most:].sum()) / self._total

    def units(self, epochs: Numbers, positions: Numbers, keys: NDArray[np.uint64]) -> Numbers:
        """Return the unit at each position of its epoch: int64 [n]. keys: of the stream."""
        numbers, of = np.unique(epochs, return_inverse=True)
        drawn = self._drawn(numbers)
        group_ends = drawn.ends.reshape(len(numbers), len(self._counts))[:, self._lasts].reshape(-1)
        places = of * self._total + positions
        groups = group_ends.searchsorted(places, side="right")
        begins = np.append(0, group_ends)[groups]
        sizes, tweaks = group_ends[groups] - begins, epochs * self._num_groups + groups % self._num_groups
        for size in np.unique(sizes).tolist():  # groups of one size together, however many epochs they are of
            (some,) = (sizes == size).nonzero()
            places[some] = begins[some] + permute(places[some] - begins[some], size, keys, tweaks[some])
        stretches = drawn.ends.searchsorted(places, side="right")
        units: Numbers = drawn.firsts[stretches] + places - drawn.begins[stretches]
        return units

    def _drawn(self, epochs: Numbers) -> _Drawn:
        drawn = self._kept
        if drawn is None or not np.array_equal(drawn.epochs, epochs):
            count = len(self._counts)
            order = permute(np.tile(np.arange(count), len(epochs)), count, self._keys, epochs.repeat(count))
            ends = self._counts[order].cumsum()
            self._kept = drawn = _Drawn(epochs, self._firsts[order], ends - self._counts[order], ends)
        return drawn
