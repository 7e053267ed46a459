"""Plans the attention of a folded row as few calls, none of them T x T.

    square      rows of a node as queries and keys, causal; or a block: up to BLOCK neighbouring rows, with a mask
    rectangle   rows as queries, and keys above them that all of these rows see; no mask

In pre-order the rows that see a row are contiguous, so a node needs one square for its own rows and one rectangle for
the rows below it: `[node's end, subtree's end) x node`. Trees of many short nodes would need as many calls. So nodes
shorter than BLOCK share blocks, and the keys of short nodes above a block are gathered into one rectangle, whatever the
shape of the tree. With a sliding window every row is in a block, and keys outside the window are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from niels_gpt.storage.errors import TreeError

Ints = npt.NDArray[np.int64]

BLOCK = 64  # rows of a block: fewer are more calls, more are more pairs that the block's mask hides
# Rows x rows x width up to which a dense mask takes less time than the calls of a plan, on a CPU: 395 rows of width
# 128, 197 of 512. benchmarks/folded_steps.py measures both around it.
DENSE = 20_000_000
_SHORTEST_RUN = 8  # tokens: neighbouring leaves of equal length, at least this long, are one batched call


class Step(NamedTuple):
    """One call: rows [start, end) as `batch` equal parts, their keys, and which keys a query does not see."""

    start: int
    end: int
    keys: slice | Tensor  # rows; int32 [K] where they are not contiguous
    batch: int = 1
    causal: bool = False
    mask: Tensor | None = None  # bool [end - start, K], True where a query sees a key


@dataclass(frozen=True)
class AttentionPlan:
    """The calls of one attention layer. Together they compute each pair of the mask once, and no other pair."""

    own: list[Step]  # squares: each row once, with itself among the keys
    above: list[Step]  # rectangles, merged into the squares


class _Nodes(NamedTuple):
    """Maximal runs of rows with the same subtree end, in the order of the row."""

    starts: Ints
    stops: Ints
    ends: Ints  # of the subtree


def dense_is_faster(rows: int, width: int) -> bool:
    """Return whether a CPU computes the attention of so few rows faster under a dense mask than by a plan.

    rows: T. width: of the model's hidden states. Both are known before the step, whatever the shape of the tree.
    """
    return rows * rows * width <= DENSE


def depths(subtree_end: Ints) -> Ints:
    """Return how many rows before a row it sees, int64 [T]: its position in every sample through it. 0 for padding."""
    rows = np.arange(len(subtree_end))
    # There are i rows before row i. It does not see those whose subtree ends at or before it.
    return rows - np.cumsum(np.bincount(subtree_end, minlength=len(rows) + 1))[: len(rows)]


def check_laminar(subtree_end: Ints) -> None:
    """Raise TreeError (E801) unless every two subtrees are nested or disjoint, and all lie inside the row."""
    nodes, size = _nodes(subtree_end), len(subtree_end)
    if size and not (bool((subtree_end > np.arange(size)).all()) and int(subtree_end.max()) <= size):
        raise TreeError(f"subtree_end has values before their row or after row {size}; expected ends of subtrees")
    open_ends: list[int] = []
    for start, end in zip(nodes.starts.tolist(), nodes.ends.tolist(), strict=True):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            raise TreeError(
                f"the subtree of row {start} ends at {end}, after that of a row above it, which ends at "
                f"{open_ends[-1]}; expected a forest in depth-first pre-order"
            )
        open_ends.append(end)


def plan_of(subtree_end: Ints, window: int | None, block: int = BLOCK) -> AttentionPlan:
    """Plan the attention of T rows.

    subtree_end: int64 [T]; row k is seen by the rows from k to subtree_end[k]. window: a query sees a key only if its
    position is less than `window` above the key's position. block: rows of a block.
    """
    nodes = _nodes(subtree_end)
    lengths = nodes.stops - nodes.starts
    alone = np.zeros(len(lengths), np.bool_) if window else _alone(nodes, lengths, block)
    result = AttentionPlan([], [])
    made = _Blocks(subtree_end, depths(subtree_end), nodes, ~alone, window, result)
    at, count = 0, len(lengths)
    while at < count:
        to = at + 1
        if alone[at]:
            while to < count and alone[to] and lengths[to] == lengths[at]:
                to += 1
            made.squares(at, to)
        else:
            while to < count and not alone[to]:
                to += 1
            made.blocks(int(nodes.starts[at]), int(nodes.stops[to - 1]), block)
        at = to
    return result


def _nodes(subtree_end: Ints) -> _Nodes:
    rows = np.arange(len(subtree_end))
    first = np.ones(len(rows), np.bool_)
    first[1:] = (subtree_end[1:] != subtree_end[:-1]) | (subtree_end[:-1] <= rows[1:])
    starts = np.flatnonzero(first)
    return _Nodes(starts, np.append(starts[1:], len(rows)), subtree_end[starts])


def _alone(nodes: _Nodes, lengths: Ints, block: int) -> npt.NDArray[np.bool_]:
    """Return which nodes get a square of their own: long nodes, and runs of equally long leaves below long nodes."""
    long = lengths >= block
    # Leaves of a run must have no short node above: its keys would be gathered again for each leaf.
    short_rows = np.where(long, 0, lengths)
    closed = np.zeros(int(nodes.stops[-1]) + 1, np.int64)
    np.add.at(closed, nodes.ends, short_rows)
    above = np.cumsum(short_rows) - short_rows - np.cumsum(closed)[nodes.starts]
    fit = (nodes.stops == nodes.ends) & (above == 0) & (lengths >= _SHORTEST_RUN) & ~long
    same = fit[1:] & fit[:-1] & (lengths[1:] == lengths[:-1])
    in_run = np.append(same, False) | np.insert(same, 0, False)
    return np.asarray(long | in_run)


class _Blocks:
    """Adds the steps of nodes to a plan."""

    def __init__(
        self,
        subtree_end: Ints,
        positions: Ints,
        nodes: _Nodes,
        short: npt.NDArray[np.bool_],
        window: int | None,
        into: AttentionPlan,
    ) -> None:
        self.ends, self.positions, self.nodes, self.window, self.into = subtree_end, positions, nodes, window, into
        self.starts = nodes.starts[short]  # of the nodes whose keys are gathered
        self.stops = nodes.stops[short]
        self.subtrees = nodes.ends[short]
        # State of `_seen_above`, which walks down the row once: the short nodes that the last asked row sees, and how
        # many short nodes begin before it.
        self.open: Ints = np.empty(0, np.int64)
        self.past = 0

    def squares(self, first: int, to: int) -> None:
        """Add nodes of equal length: their squares as one batched step, and their rectangles."""
        start, end = int(self.nodes.starts[first]), int(self.nodes.stops[to - 1])
        self.into.own.append(Step(start, end, slice(start, end), batch=to - first, causal=True))
        for node in range(first, to):
            start, stop, end = (int(column[node]) for column in self.nodes)
            self._add_above(start, stop, self._seen_above(start))
            if end > stop:
                self.into.above.append(Step(stop, end, slice(start, stop)))

    def blocks(self, start: int, end: int, block: int) -> None:
        """Add the rows of neighbouring short nodes in blocks of at most `block` rows."""
        while start < end:
            to = min(start + block, end)
            keys = self._seen_above(start)
            leaving = self.ends[keys][self.ends[keys] < to]
            if len(leaving) > block:  # the mask would be mostly empty: end the block where most keys go out of sight
                values, counts = np.unique(leaving, return_counts=True)
                if counts.max() > block // 2:
                    to = int(values[counts.argmax()])
            if self.window:
                keys = keys[self.positions[keys] > self.positions[start:to].min() - self.window]
            of_all = self.ends[keys] >= to
            if self.window:
                of_all &= self.positions[keys] > self.positions[start:to].max() - self.window
            self._add_above(start, to, keys[of_all])
            own = np.append(keys[~of_all], np.arange(start, to))
            self.into.own.append(Step(start, to, _rows(own), mask=self._mask(np.arange(start, to), own)))
            start = to

    def _seen_above(self, row: int) -> Ints:
        """Return the rows of short nodes above a row that it sees. Must be asked in the order of the rows."""
        past = int(np.searchsorted(self.starts, row))
        near = np.append(self.open, np.arange(self.past, past))
        self.open, self.past = near[self.subtrees[near] > row], past
        starts, stops = self.starts[self.open], np.minimum(self.stops[self.open], row)
        lengths = stops - starts
        rows: Ints = np.arange(int(lengths.sum())) + np.repeat(stops - np.cumsum(lengths), lengths)
        return rows

    def _add_above(self, start: int, end: int, keys: Ints) -> None:
        if len(keys):
            self.into.above.append(Step(start, end, _rows(keys)))

    def _mask(self, rows: Ints, keys: Ints) -> Tensor:
        seen = (keys <= rows[:, None]) & (rows[:, None] < self.ends[keys])
        if self.window:
            seen &= self.positions[rows][:, None] < self.positions[keys] + self.window
        return torch.from_numpy(seen)


def _rows(keys: Ints) -> slice | Tensor:
    first, last = int(keys[0]), int(keys[-1])
    return slice(first, last + 1) if last - first + 1 == len(keys) else torch.from_numpy(keys.astype(np.int32))
