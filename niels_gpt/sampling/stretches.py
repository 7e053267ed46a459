"""The order "shards" of an epoch: stretches of a split in a random order, and random units of a few of them at a time.

For caches in a bucket whose split does not fit the local folder: an epoch then fetches each byte about once. This is a
format, as the order of permutation.py is; docs/formats.md describes both.

A stretch is the units of one shard whose first token lies in the same STRETCH_TOKENS tokens of it, so a shard of at
most that many tokens is one stretch. Of an EAGLE-3 cache each shard is one stretch. Let the stretches of a split, in
order, be 0 to P - 1. In epoch e

1. stretch `permute(i, P)` with the keys of `purpose + STRETCHES` and tweak e is the i-th one,
2. each `open_shards` of these, in this order, are a group; the last group may have fewer; group g of G,
3. the units of a group are numbered stretch by stretch, and `permute(j, units of the group)` with the keys of the
   stream and tweak e * G + g is the j-th one that is served.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.sampling.permutation import ROUNDS, permute, random_keys
from niels_gpt.storage.meta_json import checked_int

Order = Literal["all", "shards"]
"""How an epoch is shuffled: over the whole split, or over a few shards at a time."""
STRETCH_TOKENS = 1 << 22
STRETCHES = 1 << 16
OPEN_SHARDS = 16

Numbers = NDArray[np.int64]


class _Epoch(NamedTuple):
    """The stretches of an epoch in its order: int64 [P] each."""

    firsts: Numbers
    """The first unit of each."""
    begins: Numbers
    """The position of the epoch at which each would begin, if its group were not shuffled."""
    ends: Numbers


class Stretches:
    """Which unit of a split is served at a position of an epoch."""

    def __init__(self, counts: Numbers, open_shards: int, seed: int, purpose: int) -> None:
        """counts: units of each stretch, none of them 0: int64 [P]. purpose: of the units."""
        self.open_shards = checked_int("open_shards", open_shards, 1)
        self._counts, self._firsts = counts, np.cumsum(counts) - counts
        self._keys = random_keys(seed, ROUNDS, purpose=purpose + STRETCHES)
        self._num_groups = -(-len(counts) // self.open_shards)
        self._lasts = np.minimum(np.arange(1, self._num_groups + 1) * self.open_shards, len(counts)) - 1
        self._kept: dict[int, _Epoch] = {}  # the last two epochs

    def units(self, epochs: Numbers, positions: Numbers, keys: NDArray[np.uint64]) -> Numbers:
        """Return the unit at each position of its epoch: int64 [n]. keys: of the stream."""
        units = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            some = (epochs == epoch).nonzero()[0]
            units[some] = self._of_epoch(epoch, positions[some], keys)
        return units

    def _of_epoch(self, epoch: int, positions: Numbers, keys: NDArray[np.uint64]) -> Numbers:
        order = self._epoch(epoch)
        group_ends, places = order.ends[self._lasts], np.empty_like(positions)
        groups = group_ends.searchsorted(positions, side="right")
        for group in np.unique(groups).tolist():
            some = (groups == group).nonzero()[0]
            begin, end = (int(group_ends[group - 1]) if group else 0), int(group_ends[group])
            tweak = np.array([epoch * self._num_groups + group])
            places[some] = begin + permute(positions[some] - begin, end - begin, keys, tweak)
        stretches = order.ends.searchsorted(places, side="right")
        return order.firsts[stretches] + places - order.begins[stretches]

    def _epoch(self, epoch: int) -> _Epoch:
        found = self._kept.get(epoch)
        if found is None:
            order = permute(np.arange(len(self._counts)), len(self._counts), self._keys, np.array([epoch]))
            ends = self._counts[order].cumsum()
            found = _Epoch(self._firsts[order], ends - self._counts[order], ends)
            self._kept = dict([*self._kept.items(), (epoch, found)][-2:])
        return found
