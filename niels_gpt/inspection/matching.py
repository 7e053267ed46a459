"""Which documents two caches have in common, by a hash of each; numpy alone, some 80 bytes a document at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Digests = NDArray[np.uint64]
"""A hash of each document: uint64 [documents, 2]."""
Numbers = NDArray[np.int64]
"""Documents of a split by their numbers, ascending; or a group for each document: equal ones are in one group."""


class Match(NamedTuple):
    """The documents of A and B that have no counterpart in the same place. Each pair is of train and of val."""

    only_a: list[Numbers]
    only_b: list[Numbers]
    moved: list[tuple[Numbers, Numbers]]
    """Of A's train and val: the documents that are in B's other split, and where they are there."""
    reordered: list[tuple[Numbers, Numbers]]
    """Of A's train and val: the documents that stand elsewhere among those common to both, and where B has them."""


def match(a: Sequence[Digests], b: Sequence[Digests]) -> Match:
    """Compare the documents of two caches. a, b: the digests of train and of val.

    A document that is there several times needs as many counterparts; its own split's come first.
    """
    at, av, bt, bv = _groups([*a, *b])
    num_groups = 1 + max(int(part.max(initial=-1)) for part in (at, av, bt, bv))
    counts = [np.bincount(part, minlength=num_groups) for part in (at, av, bt, bv)]
    ranks = [_ranks(part) for part in (at, av, bt, bv)]  # among the equal ones of a split
    surplus = [np.maximum(counts[split] - counts[2 + split], 0) for split in (0, 1)]
    lack = [np.maximum(counts[2 + split] - counts[split], 0) for split in (0, 1)]
    crossing = [np.minimum(surplus[split], lack[1 - split]) for split in (0, 1)]  # from train to val, and back
    only_a, only_b, moved = [], [], []
    for split, (mine, theirs) in enumerate([(at, bt), (av, bv)]):
        kept, gone, came = counts[2 + split], crossing[split], crossing[1 - split]
        only_a.append(np.flatnonzero(ranks[split] >= (kept + gone)[mine]))
        only_b.append(np.flatnonzero(ranks[2 + split] >= (counts[split] + came)[theirs]))
        left = np.flatnonzero((ranks[split] >= kept[mine]) & (ranks[split] < (kept + gone)[mine]))
        moved.append((left, _found_in(mine[left], (bv, bt)[split])))
    return Match(only_a, only_b, moved, [_reordered(at, bt, counts[0], counts[2]), _reordered(av, bv, *counts[1::2])])


def _groups(parts: Sequence[Digests]) -> list[Numbers]:
    """Return the group of each document of each part."""
    keys = np.concatenate(parts)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    is_new = np.any(np.diff(keys[order], axis=0), axis=1)
    groups = np.empty(len(keys), dtype=np.int64)
    groups[order] = np.concatenate([np.zeros(min(1, len(keys)), dtype=np.int64), np.cumsum(is_new)])
    return np.split(groups, np.cumsum([len(part) for part in parts])[:-1])


def _ranks(groups: Numbers) -> Numbers:
    """Return how many documents of the same group stand before each."""
    order = np.argsort(groups, kind="stable")
    place = np.arange(len(groups))
    begins = np.concatenate([np.ones(min(1, len(groups)), dtype=np.bool_), np.diff(groups[order]) != 0])
    ranks = np.empty_like(place)
    ranks[order] = place - np.maximum.accumulate(np.where(begins, place, 0))
    return ranks


def _reordered(mine: Numbers, theirs: Numbers, num_mine: Numbers, num_theirs: Numbers) -> tuple[Numbers, Numbers]:
    common = num_mine == num_theirs
    left, right = np.flatnonzero(common[mine]), np.flatnonzero(common[theirs])
    elsewhere = left[mine[left] != theirs[right]]
    return elsewhere, _found_in(mine[elsewhere], theirs)


def _found_in(wanted: Numbers, groups: Numbers) -> Numbers:
    """Return the first document of each wanted group."""
    order = np.argsort(groups, kind="stable")
    return order[np.searchsorted(groups[order], wanted)]


def first(numbers: Sequence[Numbers], limit: int) -> Iterator[tuple[int, int]]:
    """Yield the first `limit` of the documents of train and then val, as split (0, 1) and place in its numbers."""
    places = ((split, place) for split, found in enumerate(numbers) for place in range(len(found)))
    yield from (given for given, _ in zip(places, range(limit), strict=False))
