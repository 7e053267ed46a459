"""The mask of a folded row, whatever attends by it: as rectangles, or dense.

A token of a tree sees its ancestors and, in its own node, itself and what comes before it. Nothing here depends on a
model; how a model takes a mask is in attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from niels_gpt.prefix_tree.forest import PrefixForest


@dataclass
class AttnMaskSpec:
    """A mask as rectangles of queries and keys, in the form that MagiAttention and nemo-automodel take.

    q_ranges, k_ranges: [start, end) of each rectangle. mask_types: "full", or "causal", where the last query sees the
    last key and each one before it a key less. total_seqlen: tokens of the row. A token sees what any rectangle allows.
    """

    q_ranges: list[list[int]]
    k_ranges: list[list[int]]
    mask_types: list[str]
    total_seqlen: int

    @classmethod
    def causal(cls, seqlen: int) -> AttnMaskSpec:
        """Return the mask of one sequence."""
        return cls.varlen([seqlen])

    @classmethod
    def varlen(cls, seqlens: Sequence[int], causal: bool = True) -> AttnMaskSpec:
        """Return the mask of sequences one after another that do not see each other."""
        ranges = _ranges(seqlens)
        kinds = ["causal" if causal else "full"] * len(ranges)
        return cls([list(r) for r in ranges], [list(r) for r in ranges], kinds, sum(seqlens))

    @classmethod
    def prefix_tree(
        cls, node_lengths: Sequence[int], sample_paths: Sequence[Sequence[int]]
    ) -> tuple[AttnMaskSpec, list[list[list[int]]]]:
        """Return the mask of a tree, and the [start, end) ranges of each sample's nodes from its root.

        Node after node of every path: a causal rectangle for itself, then a full one for each ancestor from the root;
        one that is there already is left out. Arguments as in `FoldedRollouts`.

        Raises: ValueError for a path with a node that is not there or is there twice, and for a node with two parents.
        """
        ranges = _ranges(node_lengths)
        parents: dict[int, int] = {}
        for sample, path in enumerate(sample_paths):
            found = f"sample_paths[{sample}] is {list(path)}"
            if not all(0 <= node < len(ranges) for node in path):
                raise ValueError(f"{found}; expected nodes from 0 to {len(ranges) - 1}")
            if len(set(path)) < len(path):
                raise ValueError(f"{found}; expected each node once, or a token would see what comes after it")
            for parent, node in pairwise([-1, *path]):
                if parents.setdefault(node, parent) != parent:
                    raise ValueError(
                        f"{found}, with node {node} below node {parent}, and an earlier path has it below node "
                        f"{parents[node]} (-1: it is a root); expected one parent of each node"
                    )
        rectangles: dict[tuple[tuple[int, int], tuple[int, int], str], None] = {}  # in the order of their coming
        for path in sample_paths:
            for depth, node in enumerate(path):
                rectangles[ranges[node], ranges[node], "causal"] = None
                rectangles.update({(ranges[node], ranges[above], "full"): None for above in path[:depth]})
        spec = cls(
            [list(q) for q, _, _ in rectangles],
            [list(k) for _, k, _ in rectangles],
            [kind for _, _, kind in rectangles],
            sum(node_lengths),
        )
        return spec, [[list(ranges[node]) for node in path] for path in sample_paths]

    def fingerprint(self) -> tuple[Any, ...]:
        """Return a hashable value that is equal for equal masks, to keep by what a backend made of one."""
        q_ranges, k_ranges = (tuple(map(tuple, ranges)) for ranges in (self.q_ranges, self.k_ranges))
        return (self.total_seqlen, q_ranges, k_ranges, tuple(self.mask_types))

    def dense(self) -> Tensor:
        """Return the mask as bool [T, T], True where query (row) sees key (column)."""
        mask = torch.zeros(self.total_seqlen, self.total_seqlen, dtype=torch.bool)
        for (q, q_end), (k, k_end), kind in zip(self.q_ranges, self.k_ranges, self.mask_types, strict=True):
            part = torch.ones(q_end - q, k_end - k, dtype=torch.bool)
            mask[q:q_end, k:k_end] |= part.tril((k_end - k) - (q_end - q)) if kind == "causal" else part
        return mask


def _ranges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths are {list(lengths)}; expected none below 0")
    return [(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def dense_mask(forest: PrefixForest, *, window: int | None = None) -> Tensor:
    """Return the mask as bool [T, T] on the forest's device, True where query (row) sees key (column).

    A query q sees a key k where k <= q < subtree_end[k], and, with a window of W, where position[q] - position[k] < W:
    a token sees itself and the W - 1 tokens before it in its samples, as in transformers.
    """
    rows = torch.arange(len(forest.subtree_end), device=forest.subtree_end.device)
    allowed = (rows <= rows[:, None]) & (rows[:, None] < forest.subtree_end)
    return allowed if window is None else allowed & near(forest.position_ids, window)


def near(positions: Tensor, window: int) -> Tensor:
    """Return bool [T, T]: whether a key's position is less than `window` below the query's."""
    return positions[:, None] < positions + window  # not the difference, which would be int64 [T, T]
