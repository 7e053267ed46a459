"""Which pieces share a row: best-fit decreasing over the lengths of all pieces.

The pieces are taken by falling length. Each goes into the fullest row that has room for it, of equally full ones into
the one that has been so for the longest time; if none has room, into a new row. Pieces of one length are placed
together: the smallest room r >= s takes r // s pieces of length s in each of its rows, one row after the other, which
is what happens if they come one by one. So the work grows with the pairs of (length, room), not with the pieces.

The plan depends only on the lengths and holds for every epoch. It has slots: slot i is for some piece of the i-th
length. Which piece of that length stands there is decided by the seed and the epoch: slot f + i of n slots from f on
gets piece (a * i + b) mod n of its length, by its number, with the a and b of `Turn`. So the next epoch costs nothing,
and pieces of a length that is frequent meet others in each epoch. If only one piece has a length, it stands in
the same slot in every epoch: pieces of rare lengths keep their company. Attention keeps them apart anyway.

This is a format: if it changes, a saved position means other rows, and PLAN_VERSION must be raised.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.sampling.permutation import mix

PLAN_VERSION = 1
"""Version of the rows: increased when the same seed gives other rows."""
MAX_PIECES = 2**31 - 1
"""Most pieces of a split: their numbers are int32."""
_TRIES = 64  # for a factor without a common divisor: below 2**31 at least 15 % of the numbers have none


class Plan:
    """Rows of pieces; a row holds at most T tokens. Piece: its number, 0 .. P - 1. Slots: 0 .. P - 1, longest first."""

    def __init__(self, lengths: NDArray[Any], T: int) -> None:
        """lengths: of each piece, 1 to T: int [P], at most MAX_PIECES. Keeps about 11 bytes of each."""
        narrow = np.uint16 if T < 2**16 else np.int32
        self.pieces: NDArray[np.int32] = np.argsort((T - lengths).astype(narrow), kind="stable").astype(np.int32)
        """The pieces by falling length, equal lengths by number: int32 [P]."""
        self.counts: NDArray[np.int64] = np.bincount(lengths)
        """How many pieces of each length there are, up to the longest: int64 [L + 1]."""
        self.firsts: NDArray[np.int64] = len(lengths) - np.cumsum(self.counts)
        """The first slot of each length: int64 [L + 1]."""
        rows, runs = _best_fit(self.counts, T)
        self.ends: NDArray[np.int32] = np.cumsum(np.bincount(rows)).astype(np.int32)
        """Where the slots of each row end in `slots`: int32 [rows]."""
        self.slots: NDArray[np.int32] = _by_row(rows, runs, self.ends)
        """The slots of each row, row after row, longest first: int32 [P]."""
        falling = np.arange(len(self.counts) - 1, -1, -1, dtype=narrow)
        self.lengths: NDArray[Any] = np.repeat(falling, self.counts[::-1])[self.slots]
        """The tokens of each of `slots`: uint16 or int32 [P]."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ends)

    def located(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many pieces each row has, int64 [n], and where they are in `slots` and `lengths`: int64 [sum]."""
        ends = self.ends.take(rows).astype(np.int64)
        counts = ends - self.ends.take(rows - 1) * (rows > 0)
        stops = np.cumsum(counts)
        return counts, np.repeat(ends - stops, counts) + np.arange(stops[-1] if len(stops) else 0)

    def pieces_at(self, places: NDArray[np.int64], turn: Turn) -> NDArray[np.int64]:
        """Return which piece is in each place of `slots` in an epoch: int64 [n]."""
        lengths = self.lengths.take(places)
        firsts = self.firsts.take(lengths)
        turned = (self.slots.take(places) - firsts) * turn.factors.take(lengths) + turn.offsets.take(lengths)
        pieces: NDArray[np.int64] = self.pieces.take(firsts + turned % self.counts.take(lengths)).astype(np.int64)
        return pieces


class Turn(NamedTuple):
    """Where the pieces of each length stand in an epoch."""

    factors: NDArray[np.int64]
    """int64 [L + 1]: a, from 1 to n, without a common divisor with n, the number of pieces of that length."""
    offsets: NDArray[np.int64]
    """int64 [L + 1]: b, from 0 to n - 1."""

    @classmethod
    def of(cls, epoch: int, counts: NDArray[np.int64], key: NDArray[np.uint64]) -> Turn:
        """Return the turn of an epoch. counts: of pieces of each length, int64 [L + 1]; key: uint64 [1].

        With h = mix(mix(key + epoch) + length): b is mix(h) mod n, and a is 1 + mix(h + j) mod n for the smallest
        j = 1, 2, ... 64 for which that has no common divisor with n; 1 if none has, and for n of 1 and 2.
        """
        sizes = np.maximum(counts, 1).astype(np.uint64)
        lengths: NDArray[np.uint64] = np.arange(len(counts), dtype=np.uint64)
        hashes = mix(mix(key + np.uint64(epoch)) + lengths)
        factors, open_ = np.ones(len(counts), dtype=np.uint64), np.flatnonzero(counts > 2)
        for number in range(1, _TRIES + 1):
            tried = mix(hashes[open_] + np.uint64(number)) % sizes[open_] + np.uint64(1)
            fits = np.gcd(tried, sizes[open_]) == 1
            factors[open_[fits]] = tried[fits]
            open_ = open_[~fits]
            if not len(open_):
                break
        return cls(factors.astype(np.int64), (mix(hashes) % sizes).astype(np.int64))


class _Run(NamedTuple):
    """Slots from `first` on, in `rows` rows of `each` slots, which follow each other."""

    first: int
    rows: int
    each: int


def _best_fit(counts: NDArray[np.int64], T: int) -> tuple[NDArray[np.int32], list[_Run]]:
    """Return the row of each slot, int32 [P], and the slots as runs. counts: of each length, int64 [L + 1]."""
    # All pieces of a length at once: ten million pieces have at most T lengths, and Python walks only these.
    row_of: NDArray[np.int32] = np.empty(int(counts.sum()), dtype=np.int32)
    runs: list[_Run] = []
    rooms: list[int] = []  # ascending; of each the rows that have just that room, longest waiting first
    waiting: dict[int, deque[NDArray[np.int32]]] = {}
    slot = num_rows = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else T
            each = min(room // length, left)
            if at < len(rooms):
                rows = _taken(waiting[room], left // each)
                if not waiting[room]:
                    del waiting[room], rooms[at]
            else:
                rows = np.arange(num_rows, num_rows + left // each, dtype=np.int32)
                num_rows += len(rows)
            placed = len(rows) * each
            row_of[slot : slot + placed] = rows if each == 1 else rows.repeat(each)
            runs.append(_Run(slot, len(rows), each))
            slot, left, rest = slot + placed, left - placed, room - each * length
            if rest and rest not in waiting:
                insort(rooms, rest)
                waiting[rest] = deque()
            if rest:
                waiting[rest].append(rows)
    return row_of, runs


def _taken(queue: deque[NDArray[np.int32]], most: int) -> NDArray[np.int32]:
    """Remove and return the first rows of a queue, at most `most` of them."""
    parts: list[NDArray[np.int32]] = []
    while queue and most:
        part = queue.popleft()
        if len(part) > most:
            queue.appendleft(part[most:])
            part = part[:most]
        most -= len(part)
        parts.append(part)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _by_row(row_of: NDArray[np.int32], runs: list[_Run], ends: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the slots by row, in each row ascending: int32 [P]. row_of: of each slot; ends: of each row's slots."""
    slots: NDArray[np.int32] = np.empty(len(row_of), dtype=np.int32)
    following = np.concatenate((np.zeros(1, dtype=np.int32), ends[:-1]))
    for first, rows, each in runs:
        last = first + rows * each
        numbers = row_of[first:last:each]
        begins = following[numbers]
        for step in range(each) if rows > each else ():
            slots[begins + step] = np.arange(first + step, last, each, dtype=np.int32)
        if rows <= each:
            for row, begin in enumerate(begins.tolist()):
                slots[begin : begin + each] = np.arange(first + row * each, first + (row + 1) * each, dtype=np.int32)
        following[numbers] += each
    return slots
