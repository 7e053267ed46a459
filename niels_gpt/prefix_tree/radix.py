"""Sequences -> radix tree -> depth-first pre-order: decides where nodes are split, and the order of the rows.

Integers only; `PrefixForest` makes tensors of them. The time is linear in the tokens: each is compared at most twice,
as bytes, one comparison for a node on the path of a sequence; only nodes are sorted. No function recurses: a tree of
chats is as deep as its longest thread has turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
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


def radix_tree(ids: Ints, offsets: Ints) -> Tree:
    """Return the radix tree of the sequences ids[offsets[i]:offsets[i + 1]], none of them empty, ids below 2**32.

    A node is split at the first mismatch, so siblings differ in their first token. Siblings are in the order of the
    sequences that created them. A sequence that ends inside a node splits it too: a sample ends where a node ends.
    """
    # Four bytes a token: two runs are compared by one memcmp of slices, and not token by token.
    narrow = ids.astype("<u4")
    data, view = narrow.tobytes(), memoryview(narrow.data)
    starts: list[int] = []
    lengths: list[int] = []
    parents: list[int] = []
    ranks: list[int] = []
    ends: list[int] = []
    below: list[dict[int, int]] = []  # for each node, its children by their first token

    def add(start: int, length: int, parent: int, rank: int) -> int:
        starts.append(start)
        lengths.append(length)
        parents.append(parent)
        ranks.append(rank)
        below.append({})
        return len(starts) - 1

    roots: dict[int, int] = {}
    for sample, (at, end) in enumerate(pairwise(offsets.tolist())):
        node, children = -1, roots
        while at < end:
            child = children.get(view[at])
            if child is None:
                node = children[view[at]] = add(at, end - at, node, sample)
                break
            start, length = starts[child], lengths[child]
            same = min(length, end - at)
            here, there = data[4 * at : 4 * (at + same)], data[4 * start : 4 * (start + same)]
            if here != there:  # as little-endian integers: the lowest bit that differs is in the first such token
                bits = int.from_bytes(here, "little") ^ int.from_bytes(there, "little")
                same = ((bits & -bits).bit_length() - 1) // 32
            if same < length:
                # Split. The new node is the first part, so that the child keeps its number, and `ends` stay right.
                upper = children[view[at]] = add(start, same, node, ranks[child])
                starts[child], lengths[child], parents[child] = start + same, length - same, upper
                below[upper][view[start + same]] = child
                child = upper
            node, at, children = child, at + same, below[child]
        ends.append(node)
    return Tree(*(np.array(column, dtype=np.int64) for column in (starts, lengths, parents, ranks, ends)))


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
    order = np.fromiter(_walk(tree), dtype=np.int64, count=len(tree.starts))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    lengths = tree.lengths[order]
    above = tree.parents[order]
    parents = np.where(above < 0, -1, place[above])
    ends = np.cumsum(lengths)
    starts = ends - lengths
    depths, subtree_ends = _depths_and_ends(parents, lengths, ends)
    row = np.arange(int(lengths.sum()))
    source = np.repeat(tree.starts[order] - starts, lengths)
    source += row
    position = np.repeat(depths - starts, lengths)
    position += row
    subtree_end = np.repeat(subtree_ends, lengths)
    return Layout(source, position, subtree_end, starts, lengths, parents, place[tree.ends])


def _walk(tree: Tree) -> Iterator[int]:
    """Yield the nodes in pre-order."""
    by_parent = np.lexsort((tree.ranks, tree.parents))
    bounds = np.searchsorted(tree.parents[by_parent], np.arange(-1, len(tree.parents) + 1)).tolist()
    nodes = by_parent.tolist()
    waiting = nodes[: bounds[1]][::-1]
    while waiting:
        node = waiting.pop()
        yield node
        begin, end = bounds[node + 1], bounds[node + 2]
        if begin < end:
            waiting += nodes[begin:end][::-1]


def _depths_and_ends(parents: Ints, lengths: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return for each node of a pre-order the tokens above it, and the flat end of its subtree."""
    above, size, end = parents.tolist(), lengths.tolist(), ends.tolist()
    depths = [0] * len(above)
    for node, parent in enumerate(above):  # parents come first
        if parent >= 0:
            depths[node] = depths[parent] + size[parent]
    for node in range(len(above) - 1, -1, -1):
        parent = above[node]
        if parent >= 0 and end[parent] < end[node]:
            end[parent] = end[node]
    return np.array(depths, dtype=np.int64), np.array(end, dtype=np.int64)


def rows_of_samples(starts: Ints, lengths: Ints, parents: Ints, ends: Ints, offsets: Ints) -> Ints:
    """Return the flat row of every token of every sample, sample by sample: [sum of sample lengths].

    starts, lengths, parents: [N], of the nodes of a layout. ends: [S], the last node of each sample. offsets: [S + 1].
    """
    nodes, places = ends, offsets[1:]
    runs: list[tuple[Ints, Ints, Ints]] = []  # for each node of each sample: place in the result, flat start, length
    while len(nodes):  # from the samples' last nodes up to their roots
        places = places - lengths[nodes]
        runs.append((places, starts[nodes], lengths[nodes]))
        nodes = parents[nodes]
        places, nodes = places[nodes >= 0], nodes[nodes >= 0]
    place, start, length = (np.concatenate(column) for column in zip(*runs, strict=True))
    order = place.argsort()
    place, start, length = place[order], start[order], length[order]
    rows = np.ones(int(offsets[-1]), dtype=np.int64)  # steps from row to row: 1 but where a node begins
    rows[0] = start[0]
    rows[place[1:]] = start[1:] - (start + length - 1)[:-1]
    return np.cumsum(rows, out=rows)


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
