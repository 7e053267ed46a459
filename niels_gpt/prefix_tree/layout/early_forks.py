"""Early forks: a tree that branches one token before its samples differ, so that a row predicts one token.

    samples 1 2 10, 1 2 20      at the token: 1 2 (10, 20)      early: 1 (2 10, 2 20)

Where a node forks early, its last token moves into each of its children, and a sample that ends at the node gets a
leaf with that token. Integers only, and linear in nodes: tokens are not touched.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from niels_gpt.prefix_tree.layout.radix import Ints, Layout, Tree, pre_order, radix_tree

Bools = npt.NDArray[np.bool_]


def first_samples(parents: Ints, ends: Ints) -> Ints:
    """Return for each node of a pre-order the first sample through it: [N]; the number of samples where none is."""
    first = np.full(len(parents), len(ends), dtype=np.int64)
    np.minimum.at(first, ends, np.arange(len(ends)))
    found, above = first.tolist(), parents.tolist()
    for node in range(len(above) - 1, -1, -1):  # children come after their parents
        parent = above[node]
        if parent >= 0 and found[node] < found[parent]:
            found[parent] = found[node]
    return np.array(found, dtype=np.int64)


def forked_early(layout: Layout, forks: Bools, offsets: Ints, *, by_sample: bool) -> Tree:
    """Return the tree in which some nodes fork early, as runs of the samples' ids.

    Args:
        layout: each node is on the path of a sample.
        forks: [N] the nodes that fork early, none a leaf.
        offsets: [S + 1] where the ids of each sample begin in the array that the result's `starts` refer to.
        by_sample: siblings are in the order of the samples that add them; else in that of the layout, a leaf first.
    """
    parents, first, depths = layout.parents, first_samples(layout.parents, layout.ends), layout.depths[layout.starts]
    moved = np.append(forks, False)[parents]  # nodes that get the last token of their parent; -1 is the appended one
    lengths = layout.lengths - forks + moved
    kept = lengths > 0
    parents = np.where(np.append(kept, True)[parents], parents, np.append(parents, -1)[parents])
    of_forks = np.flatnonzero(forks[layout.ends])  # samples that end at a node that forks
    nodes, samples, leaf = np.unique(layout.ends[of_forks], return_index=True, return_inverse=True)
    samples = of_forks[samples]
    number = np.append(np.cumsum(kept) - 1, -1)
    ends = number[layout.ends]
    ends[of_forks] = int(kept.sum()) + leaf
    below = np.where(kept[nodes], nodes, parents[nodes])
    ranks = (first[kept], samples) if by_sample else (np.flatnonzero(kept), nodes)
    return Tree(
        np.concatenate(
            [(offsets[first] + depths - moved)[kept], offsets[samples] + (depths + layout.lengths)[nodes] - 1]
        ),
        np.concatenate([lengths[kept], np.ones_like(nodes)]),
        np.concatenate([number[parents[kept]], number[below]]),
        np.concatenate(ranks),
        ends,
    )


def at_the_token(layout: Layout, first_ids: Ints, ids: Ints, offsets: Ints) -> Layout:
    """Return the layout if it forks at the token, shares all that can be shared and splits nothing else; or such a one.

    first_ids: [N] the first token of each node. ids: those of the samples, one after another, which begin at offsets.
    """
    siblings = len(np.unique(layout.parents * (int(first_ids.max()) + 1) + first_ids))
    children = np.bincount(layout.parents[layout.parents >= 0], minlength=len(layout.parents))
    ends = np.bincount(layout.ends, minlength=len(layout.parents))
    if siblings == len(layout.parents) and not bool(((children == 1) & (ends == 0)).any()):
        return layout
    return pre_order(radix_tree(ids, offsets))
