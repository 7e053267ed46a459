"""Where the samples of a tree end, read from their last terms alone, as a row of TRL has them.

A row says for each term the row that predicts it and its sample, but not where a sample ends: the tokens after its last
term are in no term. What is known: every leaf is the end of a sample, and so is a node with one child, or the two would
be one. So each such node gets a sample whose last term is above it, the most constrained samples first.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from niels_gpt.prefix_tree.layout.radix import Ints, Layout

Span = tuple[int, int]  # nodes of a pre-order, [first, end)


def sample_ends(layout: Layout, ids: Ints, samples: Ints, rows: Ints, labels: Ints) -> Ints:
    """Return the last node of each sample: [S]. Samples that no term names get a node that is left, or node 0.

    Nodes that are left are further samples, which come last. Samples with equal last terms whose ends differ get them
    in the order of the tree.

    Args:
        ids: [T]
        samples: the samples that have terms, rising.
        rows, labels: the row that predicts the last term of each of them, and that term.

    Raises:
        ValueError: a last term is not a token after its row.
    """
    parents = layout.parents
    children = np.bincount(parents[parents >= 0], minlength=len(parents))
    spans = _spans(layout, ids, samples, rows, labels)
    left = np.flatnonzero(children <= 1).tolist()
    reach = (2 * (layout.depths[layout.starts] + layout.lengths) + (children > 0)).tolist()  # leaves before others
    ends = np.zeros(1 + int(samples[-1]) if len(samples) else 0, dtype=np.int64)
    sizes = [sum(b - a for a, b in each) for each in spans]
    for index in np.argsort(sizes, kind="stable").tolist():
        found = [place for a, b in spans[index] if (place := bisect_left(left, a)) < len(left) and left[place] < b]
        # With none left, it ends where its last term does, or with the rest of that node.
        other = min((node for node, _ in spans[index]), key=reach.__getitem__)
        ends[samples[index]] = left.pop(found[0]) if found else other
    unnamed = np.setdiff1d(np.arange(len(ends)), samples)[: len(left)]
    ends[unnamed] = left[: len(unnamed)]
    return np.concatenate([ends, np.array(left[len(unnamed) :], dtype=np.int64)])


def _spans(layout: Layout, ids: Ints, samples: Ints, rows: Ints, labels: Ints) -> list[list[Span]]:
    """Return for each sample the nodes below its last term: those whose first node holds it, with their subtrees."""
    starts, ends = layout.starts, layout.starts + layout.lengths
    subtrees = np.searchsorted(starts, layout.subtree_end[starts])
    by_parent = np.argsort(layout.parents, kind="stable")
    bounds = np.searchsorted(layout.parents[by_parent], np.arange(len(starts) + 1))
    nodes = np.searchsorted(starts, rows, side="right") - 1
    found: list[list[Span]] = []
    for sample, row, label, node in zip(*(x.tolist() for x in (samples, rows, labels, nodes)), strict=True):
        inside = row + 1 < ends[node]
        below = np.array([node]) if inside else by_parent[bounds[node] : bounds[node + 1]]
        first = np.array([row + 1]) if inside else starts[below]
        below = below[ids[first] == label]
        if not len(below):
            raise ValueError(
                f"the last term of sample {sample} is the token {label} after row {row}; expected one of "
                f"{sorted(set(ids[first].tolist()))[:8]}, the tokens below that row"
            )
        found.append(list(zip(below.tolist(), subtrees[below].tolist(), strict=True)))
    return found
