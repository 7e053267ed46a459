"""Which documents two caches have in common, by a hash of each; numpy alone.

At its peak it takes, for each document of each cache, 57 bytes where all are in both and 68 where half of them are, the
16 of the hash included (measured with a million); where source ids are compared too, 81 and 92.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Digests = NDArray[np.uint64]
"""A hash of each document: uint64 [documents, 2]."""
Numbers = NDArray[np.int64]
"""Documents of a split by their numbers, ascending; or a group for each document: equal ones are in one group."""
Pairs = tuple[Numbers, Numbers]
"""Documents of A, ascending, and the document of B that is the counterpart of each."""

_CHUNK = 1 << 16  # numbers that are Python's at a time


class Match(NamedTuple):
    """The documents of A and B: each list is of train and of val. Of equal ones the k-th goes with the k-th."""

    only_a: list[Numbers]
    only_b: list[Numbers]
    moved: list[Pairs]
    """Of A's train and val: the documents that are in B's other split, and where they are there."""
    common: list[Pairs]
    """The documents that are in the same split of both."""

    def reordered(self, split: int) -> Pairs:
        """Return the fewest of the common documents of a split without which the others have one order in A and B."""
        left, right = self.common[split]
        elsewhere = ~longest_ascending(right)
        return left[elsewhere], right[elsewhere]


def match(digests: Digests, sizes: Sequence[int], ids: NDArray[np.uint64] | None = None) -> Match:
    """Compare the documents of two caches.

    digests: of A's train and val and then of B's, in one array. sizes: how many documents each of the four has.
    A document that is there several times needs as many counterparts; its own split's come first.
    ids: a hash of each document's source id, uint64 [documents], in the same order. Of equal documents those go
        together first that have the same source id too.
    """
    if ids is None:
        groups = _groups(digests)
        del digests  # the caller keeps none: 16 bytes a document
        return _match(groups, sizes)
    same_id = _match(_groups(digests + ids[:, None]), sizes)  # 128 bits of both: none meets another's by chance
    begins = np.cumsum([0, *sizes[:-1]])
    left = [*same_id.only_a, *same_id.only_b]
    rest = np.concatenate([part + begin for part, begin in zip(left, begins, strict=True)])
    return _merged(same_id, _match(_groups(digests[rest]), list(map(len, left))))


def _merged(first: Match, rest: Match) -> Match:
    """Return a match with that of the documents that it left alone, which are numbered among themselves."""

    def both(pairs: list[Pairs], more: list[Pairs], crossing: bool) -> list[Pairs]:
        found = []
        for split, (found_left, found_right) in enumerate(more):
            left = first.only_a[split][found_left]
            right = first.only_b[split != crossing][found_right]
            found.append(_by_left(*(np.concatenate(parts) for parts in zip(pairs[split], (left, right), strict=True))))
        return found

    only_a, only_b = (
        [numbers[places] for numbers, places in zip(all_of, left, strict=True)]
        for all_of, left in ((first.only_a, rest.only_a), (first.only_b, rest.only_b))
    )
    moved, common = both(first.moved, rest.moved, True), both(first.common, rest.common, False)
    return Match(only_a, only_b, moved, common)


def _match(groups: Numbers, sizes: Sequence[int]) -> Match:
    """Compare documents by the group of each."""
    num_groups = int(groups.max(initial=-1)) + 1
    at, av, bt, bv = parts = np.split(groups, np.cumsum(sizes)[:-1])
    count_at, count_av, count_bt, count_bv = (np.bincount(part, minlength=num_groups) for part in parts)
    train, val = np.minimum(count_at, count_bt), np.minimum(count_av, count_bv)
    crossing = np.minimum(count_at - train, count_bv - val), np.minimum(count_av - val, count_bt - train)
    del count_at, count_av, count_bt, count_bv
    only_a, moved_left, common_left = zip(*(_three(at, train, crossing[0]), _three(av, val, crossing[1])), strict=True)
    only_b, moved_right, common_right = zip(
        *(_three(bt, train, crossing[1]), _three(bv, val, crossing[0])), strict=True
    )
    moved = [_by_left(moved_left[split], moved_right[1 - split]) for split in (0, 1)]
    common = [_by_left(left, right) for left, right in zip(common_left, common_right, strict=True)]
    return Match([np.sort(part) for part in only_a], [np.sort(part) for part in only_b], moved, common)


def _groups(digests: Digests) -> Numbers:
    """Return the group of each document."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    is_new = np.zeros(len(digests), dtype=np.bool_)
    for half in (0, 1):
        column = digests[order, half]
        is_new[1:] |= column[1:] != column[:-1]
    groups = np.empty(len(digests), dtype=np.int64)
    groups[order] = np.cumsum(is_new)
    return groups


def _three(groups: Numbers, stay: Numbers, cross: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return the documents that have no counterpart, one in the other split, and one in the same.

    stay, cross: how many of each group have it where. The first of the equal ones stay, the next cross; all are sorted
    by their group and then by their number, so that the documents of both sides stand opposite each other.
    """
    order = np.argsort(groups, kind="stable")
    of = groups[order]
    begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(of)), dtype=np.bool_), of[1:] != of[:-1]]))
    ranks = np.arange(len(of)) - np.repeat(begins, np.diff(np.append(begins, len(of))))
    stays = ranks < stay[of]
    goes = ranks >= (stay + cross)[of]
    return order[goes], order[~stays & ~goes], order[stays]


def _by_left(left: Numbers, right: Numbers) -> Pairs:
    order = np.argsort(left)
    return left[order], right[order]


def longest_ascending(numbers: Numbers) -> NDArray[np.bool_]:
    """Return which of some different numbers are in a longest ascending subsequence of theirs: bool [numbers]."""
    if np.all(numbers[1:] > numbers[:-1]):
        return np.ones(len(numbers), dtype=np.bool_)
    ends, places = array("q"), array("q")  # of the best subsequence of each length: its last number, and its place
    before = np.empty(len(numbers), dtype=np.int64)
    for start in range(0, len(numbers), _CHUNK):
        for place, number in enumerate(numbers[start : start + _CHUNK].tolist(), start):
            length = bisect_left(ends, number)
            before[place] = places[length - 1] if length else -1
            if length == len(ends):
                ends.append(number)
                places.append(place)
            else:
                ends[length], places[length] = number, place
    found, place = np.zeros(len(numbers), dtype=np.bool_), places[-1]
    while place >= 0:
        found[place] = True
        place = int(before[place])
    return found


def first(numbers: Sequence[Numbers], limit: int) -> Iterator[tuple[int, int]]:
    """Yield the first `limit` of the documents of train and then val, as split (0, 1) and place in its numbers."""
    places = ((split, place) for split, found in enumerate(numbers) for place in range(len(found)))
    yield from (given for given, _ in zip(places, range(limit), strict=False))
