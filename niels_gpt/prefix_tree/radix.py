"""Sequences -> radix tree -> depth-first pre-order: decides where nodes are split, and the order of the rows.

Integers only; `PrefixForest` makes tensors of them. The time is linear in the tokens: runs of them are compared as
bytes, and no sequence is compared twice with the same tokens. No function recurses: a tree of chats is as deep as its
longest thread has turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from niels_gpt.storage.errors import TreeError

Ints = npt.NDArray[np.int64]


class Tree(NamedTuple):
    """Nodes in any order. The tokens of a node are a run of one common array of ids; a root has the parent -1."""

    starts: Ints  # [N] where the node's tokens begin in that array
    lengths: Ints  # [N] at least 1
    parents: Ints  # [N]
    ranks: Ints  # [N] siblings are ordered by rank
    ends: Ints  # [S] the node whose last token is the sample's last


class Layout(NamedTuple):
    """The same tree in pre-order, a parent before its children and a subtree in one piece."""

    source: Ints  # [T] index into the array of ids
    depths: Ints  # [T] tokens above a token: its position in every sample through it
    subtree_end: Ints  # [T] flat end of the subtree of the token's node
    starts: Ints  # [N]
    lengths: Ints  # [N]
    parents: Ints  # [N]
    ends: Ints  # [S]


def radix_layout(ids: Ints, offsets: Ints, shared: int = 0, groups: Sequence[list[int]] | None = None) -> Layout:
    """Return the radix tree of the sequences ids[offsets[i]:offsets[i + 1]], none of them empty, ids below 2**32.

    shared: ids[:shared] begin every sequence; offsets[0] is `shared`, so that they stand once, before the first.
    groups: numbers of sequences, rising in each group, each number once. Only sequences of one group share tokens.
        Default: all are one group. Not together with `shared`.

    A node is split at the first mismatch, so siblings differ in their first token. Siblings are in the order of the
    sequences that created them. A sequence that ends inside a node splits it too: a sample ends where a node ends.
    """
    data = ids.astype("<u4").tobytes()  # four bytes a token: runs are compared by memcmp, and not token by token
    view, bounds = memoryview(data).cast("I"), offsets.tolist()
    nodes, ends = _Nodes(), [0] * (len(bounds) - 1)
    # Sequences that have the same tokens up to a depth, in their order, and the node above. They are split where they
    # leave the first of them, so only tokens of neighbours are compared, however many sequences there are.
    waiting: list[tuple[list[int], int, int]] = [(g, 0, -1) for g in reversed(groups or [list(range(len(ends)))])]
    done = -shared  # tokens of the first sequence, from that depth, that are in nodes
    while waiting:
        samples, depth, parent = waiting.pop()
        if not samples:
            nodes.ends[parent] = nodes.size
            continue
        first, *others = samples
        at, end = bounds[first] + depth, bounds[first + 1]
        if not others:
            ends[first] = nodes.add(at + done, end - at - done, parent, shared + depth + done)
            done = 0
            continue
        splits: dict[int, dict[int, list[int]]] = {end - at: {}}  # by tokens shared with the first, then by the next
        for sample in others:
            here, stop = bounds[sample] + depth, bounds[sample + 1]
            same = _common(data, view, at, here, min(end - at, stop - here))
            token = view[here + same] if here + same < stop else _END
            splits.setdefault(same, {}).setdefault(token, []).append(sample)
        for point in sorted(splits):
            if point > done:
                parent = nodes.add(at + done, point - done, parent, shared + depth + done)
                done = point
                waiting.append(([], 0, parent))
            below = splits[point]
            for sample in below.pop(_END, ()):
                ends[sample] = parent
            waiting += [(group, depth + point, parent) for group in reversed(below.values())]
        ends[first], done = parent, 0
    return nodes.layout(np.array(ends, dtype=np.int64))


_END = -1  # in place of a token: the sequence ends here


def _common(data: bytes, view: memoryview, there: int, here: int, most: int) -> int:
    """Return how many tokens two runs of at most `most` tokens have in common. The time is linear in them."""
    same, size = 0, 16
    while same < most:
        if view[here + same] != view[there + same]:  # runs that differ mostly do so at once
            return same
        if same and same + 1 < most:
            size = min(4 * size, most - same)
            one, two = 4 * (here + same), 4 * (there + same)
            first, second = data[one : one + 4 * size], data[two : two + 4 * size]
            if first != second:  # as little-endian integers: the lowest bit that differs is in the first such token
                bits = int.from_bytes(first, "little") ^ int.from_bytes(second, "little")
                return same + ((bits & -bits).bit_length() - 1) // 32
            same += size
        else:
            same += 1
    return same


class _Nodes:
    """The nodes of a layout, added in pre-order."""

    def __init__(self) -> None:
        self.starts: list[int] = []  # in the array of ids
        self.lengths: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []  # tokens above
        self.ends: list[int] = []  # flat ends of the subtrees; to be set for a node with nodes below
        self.size = 0  # tokens of all nodes

    def add(self, start: int, length: int, parent: int, depth: int) -> int:
        """Add a node; returns its number."""
        self.size += length
        self.starts.append(start)
        self.lengths.append(length)
        self.parents.append(parent)
        self.depths.append(depth)
        self.ends.append(self.size)
        return len(self.starts) - 1

    def layout(self, ends: Ints) -> Layout:
        """Return the layout. ends: [S], the last node of each sample."""
        columns = (self.starts, self.lengths, self.parents, self.depths, self.ends)
        sources, lengths, parents, depths, subtrees = (np.array(column, dtype=np.int64) for column in columns)
        starts = lengths.cumsum() - lengths
        rows = np.arange(self.size)
        source = (sources - starts).repeat(lengths)
        source += rows
        rows += (depths - starts).repeat(lengths)
        return Layout(source, rows, subtrees.repeat(lengths), starts, lengths, parents, ends)


def tree_of_paths(lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> tuple[Tree, list[list[int]]]:
    """Return the tree in which each sample is the tokens of the nodes on its path, and the paths without empty nodes.

    The tokens of the nodes stand one after another: node i has lengths[i] of them. Siblings are in numerical order.

    Raises:
        TreeError (E801): a path names no node or has no token, a node has two parents, or a node with tokens is on no
            path.
    """
    parents: dict[int, int] = {}
    kept: list[list[int]] = []
    for sample, path in enumerate(paths):
        for node in path:
            if not 0 <= node < len(lengths):
                raise TreeError(f"sample_paths[{sample}] names node {node}; there are {len(lengths)}, from 0")
        nodes = [node for node in path if lengths[node]]
        if not nodes:
            raise TreeError(f"sample_paths[{sample}] is {list(path)}: no token; expected a node of length 1 or more")
        for node, parent in zip(nodes, [-1, *nodes], strict=False):
            if parents.setdefault(node, parent) != parent:
                raise TreeError(
                    f"sample_paths[{sample}] has node {node} below {parent}, but an earlier path has it below "
                    f"{parents[node]} (-1: a root); expected one parent for each node"
                )
        kept.append(nodes)
    for node, length in enumerate(lengths):
        if length < 0 or (length and node not in parents):
            what = "on no path; every node with tokens belongs to a sample" if length > 0 else "shorter than 0"
            raise TreeError(f"node {node} has {length} tokens and is {what}")
    if not kept:
        raise TreeError("sample_paths is empty; expected the nodes of at least one sample")
    numbers = sorted(parents)
    place = {-1: -1} | {node: index for index, node in enumerate(numbers)}
    ends = np.cumsum(lengths)[numbers]
    sizes = np.array(lengths, dtype=np.int64)[numbers]
    above = np.array([place[parents[node]] for node in numbers], dtype=np.int64)
    last = np.array([place[path[-1]] for path in kept], dtype=np.int64)
    return Tree(ends - sizes, sizes, above, np.arange(len(numbers)), last), kept


def pre_order(tree: Tree) -> Layout:
    """Lay a tree out in depth-first pre-order, siblings by rank, roots too."""
    starts, lengths, above = (column.tolist() for column in (tree.starts, tree.lengths, tree.parents))
    below: list[list[int]] = [[] for _ in range(len(above) + 1)]  # the roots are the last: their parent is -1
    for node in tree.ranks.argsort(kind="stable").tolist():
        below[above[node]].append(node)
    nodes, place = _Nodes(), [0] * len(above)
    waiting, parent, depth = below[-1][::-1], -1, 0
    while waiting:
        node = waiting.pop()
        if node < 0:
            nodes.ends[parent] = nodes.size
            depth, parent = nodes.depths[parent], nodes.parents[parent]
            continue
        place[node] = nodes.add(starts[node], lengths[node], parent, depth)
        if below[node]:
            waiting += [-1, *reversed(below[node])]
            parent, depth = place[node], depth + lengths[node]
    return nodes.layout(np.array(place, dtype=np.int64)[tree.ends])


def rows_of_samples(starts: Ints, lengths: Ints, parents: Ints, ends: Ints, offsets: Ints) -> Ints:
    """Return the flat row of every token of every sample, sample by sample: [sum of sample lengths].

    starts, lengths, parents: [N], of the nodes of a layout, in pre-order. ends: [S], the last node of each sample.
    offsets: [S + 1], where a sample begins in the result.
    """
    last = starts + lengths - 1
    steps = starts - last[parents]  # from the row before a node on a path; a root's is set below
    rows = np.ones(int(offsets[-1]), dtype=np.int64)  # steps from row to row: 1 but where a node begins
    nodes, places = ends, offsets[1:]
    while len(nodes):  # from the samples' last nodes up to their roots
        places = places - lengths[nodes]
        rows[places] = steps[nodes]
        nodes = parents[nodes]
        inner = nodes >= 0
        nodes, places = nodes[inner], places[inner]
    (roots,) = (parents < 0).nonzero()
    rows[offsets[:-1]] = starts[roots[roots.searchsorted(ends, side="right") - 1]]
    rows[offsets[1:-1]] -= last[ends[:-1]]
    return rows.cumsum(out=rows)


def rows_above(rows: int, starts: Ints, lengths: Ints, parents: Ints) -> Ints:
    """Return the row that predicts each of `rows` rows, its predecessor in the samples: [T]; -1 for none.

    starts, lengths, parents: [N], of the nodes of a layout. Rows after them are padding.
    """
    above = np.arange(-1, rows - 1)
    above[starts] = np.append(starts + lengths - 1, -1)[parents]  # the parent -1, of a root, is the last
    above[int(starts[-1] + lengths[-1]) :] = -1
    return above


def part_of_samples(starts: Ints, lengths: Ints, parents: Ints, ends: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Cut the layout of some samples out of a larger one.

    starts, lengths, parents: [N], of the nodes of the larger layout. ends: [S], the last node of each sample to keep.

    Returns the nodes of the new layout as starts, lengths and parents; the last node of each sample in it; and its rows
    [T] as rows of the larger layout, ascending. A node that is left with one child is merged with it, unless a sample
    ends there.
    """
    levels = [nodes := np.unique(ends)]
    while len(nodes):  # from the samples' last nodes up to their roots
        above = parents[nodes]
        levels.append(nodes := np.unique(above[above >= 0]))
    kept = np.unique(np.concatenate(levels))
    first, count = starts[kept], lengths[kept]
    above = kept.searchsorted(parents[kept])  # a root's is not used
    root = parents[kept] < 0
    splits = np.bincount(above[~root], minlength=len(kept)) != 1
    last = kept.searchsorted(ends)
    splits[last] = True
    heads = root | splits[above]
    number = np.cumsum(heads) - 1  # an only child follows its parent at once
    sizes = np.add.reduceat(count, np.flatnonzero(heads))
    rows = np.ones(int(sizes.sum()), dtype=np.int64)  # steps from row to row, as in rows_of_samples
    rows[0] = first[0]
    rows[np.cumsum(count)[:-1]] = first[1:] - (first + count - 1)[:-1]
    up = np.where(root, -1, number[above])[heads]
    return np.cumsum(sizes) - sizes, sizes, up, number[last], np.cumsum(rows)
