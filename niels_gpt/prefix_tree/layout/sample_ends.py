"""Where the samples of a tree end, read from their last terms alone, as a row of TRL has them.

A row says for each term the row that predicts it and its sample, but not where a sample ends: the tokens after its last
term are in no term. What is known: every leaf is the end of a sample, and so is a node with one child, or the two would
be one. So each such node gets a sample whose last term is above it, the most constrained samples first.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from niels_gpt.prefix_tree.layout.radix import Ints, Layout
from niels_gpt.storage.errors import TreeError

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
    terms, of_sample = np.unique(np.stack([rows, labels]), axis=1, return_inverse=True)
    first = dict(zip(of_sample[::-1].tolist(), samples[::-1].tolist(), strict=True))
    named = np.array([first[term] for term in range(terms.shape[1])], dtype=np.int64)
    spans = _spans(layout, ids, named, *terms)  # samples with equal last terms share them
    left = np.flatnonzero(children <= 1).tolist()
    reach = (2 * (layout.depths[layout.starts] + layout.lengths) + (children > 0)).tolist()  # leaves before others
    # Where no node is left, a sample ends where its last term does, or with the rest of that node.
    others = [min((node for node, _ in each), key=reach.__getitem__) for each in spans]
    sizes = np.array([sum(b - a for a, b in each) for each in spans], dtype=np.int64)
    open_spans = [each[::-1] for each in spans]
    ends = np.zeros(1 + int(samples[-1]) if len(samples) else 0, dtype=np.int64)
    for index in np.argsort(sizes[of_sample], kind="stable").tolist():
        term = of_sample[index]
        ends[samples[index]] = _next_left(open_spans[term], left, others[term])
    unnamed = np.setdiff1d(np.arange(len(ends)), samples)[: len(left)]
    ends[unnamed] = left[: len(unnamed)]
    return np.concatenate([ends, np.array(left[len(unnamed) :], dtype=np.int64)])


def _next_left(spans: list[Span], left: list[int], other: int) -> int:
    """Take the first node that is left in some spans, the first of which is last in the list; else return `other`."""
    while spans:
        place = bisect_left(left, spans[-1][0])
        if place < len(left) and left[place] < spans[-1][1]:
            return left.pop(place)
        spans.pop()  # nothing comes back
    return other


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
            raise TreeError(
                f"the last term of sample {sample} is the token {label} after row {row}; expected one of "
                f"{sorted(set(ids[first].tolist()))[:8]}, the tokens below that row"
            )
        found.append(list(zip(below.tolist(), subtrees[below].tolist(), strict=True)))
    return found
