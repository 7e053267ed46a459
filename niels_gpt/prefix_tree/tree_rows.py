"""Tree rows: a forest as the batch of TRL's AsyncGRPOTrainer (1.16 or newer).

    row = tree_row(forest, edges, old_logprobs=old, advantages=advantages)   # the keys of TRL's TreeRow.pack()

A row has N tokens in S segments, the nodes of a tree in depth-first order, and M terms, the supervised tokens:

    input_ids, position_ids    int64 [N]
    shift_labels               int64 [N], the token that a row predicts in the loss; -100 for none
    tree_kv_index              int64 [K], for each segment the rows from its root to its end, one after another
    tree_cu_seqlens_q, _k      int32 [S + 1], where each segment begins in the row, and in tree_kv_index
    tree_max_seqlens           int64 [2], the longest segment and the longest path
    token_index, segment_id    int64 [M], the row that predicts each term, and its sample
    old_log_probs, advantages  float32 [M]

Attention by FlashAttention's varlen call (TRL's `tree_fa3`), recurrent layers under tree-recurrence, and the attention
"prefix_tree" of this package read the keys that begin with tree_.

TRL's loss reads the log-prob of one label a row, so a row can predict one token. TRL's own rows therefore fork early,
one token before samples differ:

    samples 1 2 10, 1 2 20      at the token: 1 2 (10, 20)      early: 1 (2 10, 2 20)

Here a row forks early only where it has several targets, which is never more tokens. A loss that reads its targets from
LossEdges needs no early fork (one_label=False).

A row does not say where a sample ends after its last target, so no function turns one into a forest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from niels_gpt.prefix_tree import radix
from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.fields import by_target, forms_of
from niels_gpt.prefix_tree.fold import CROSS_ENTROPY_IGNORE_IDX
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.radix import Ints, Layout, Tree, radix_layout
from niels_gpt.storage.errors import TreeError


@torch.inference_mode(False)
def tree_row(
    forest: PrefixForest,
    edges: LossEdges,
    *,
    fork_early: bool = False,
    one_label: bool = True,
    old_logprobs: Any = None,
    advantages: Any = None,
    segment_parents: bool = False,
) -> dict[str, Tensor]:
    """Return a forest and its supervision as a row of TRL, on the forest's device, without padding.

    Args:
        edges: LossEdges.from_forest(forest). Their weights are not part of a row.
        fork_early: TRL's own layout: the row equals `TreeRow().add(...)...pack()` of the same samples in order. It
            shares every prefix, also between the trees of a `joined` forest, which share nothing.
        one_label: False keeps the rows of the forest. Such a row has no `shift_labels`, which TRL's loss needs: rows at
            branches have several targets, and `edge_logprobs(hidden, edges, head)` reads them from edges.
        old_logprobs, advantages: in any form that `edges.field` takes. Default: the row has no such key.
        segment_parents: add `tree_segment_parents` and `tree_segment_depths`, int64 [S], which tree-recurrence would
            otherwise derive: a segment's parent, -1 for a root, and how many segments are above it.

    Raises:
        TreeError (E801): the edges belong to another forest, a field does not fit, or fork_early without one_label.
    """
    if fork_early and not one_label:
        raise TreeError("fork_early=True is a layout with one label a row; expected one_label=True with it")
    if edges.num_rows != len(forest.input_ids) or not torch.equal(edges.field_offsets, forest.sample_offsets):
        raise TreeError(f"{edges!r} has other rows or samples than {forest!r}; expected LossEdges.from_forest(forest)")
    offsets, token, ids, rows = (
        x.numpy(force=True) for x in (forest.sample_offsets, edges.sample_token, forest.input_ids, forest.sample_rows)
    )
    ids = ids.take(rows)
    layout = _layout(forest, edges, ids, offsets, fork_early, one_label)
    rows = radix.rows_of_samples(layout.starts, layout.lengths, layout.parents, layout.ends, offsets)
    row = {"input_ids": ids[layout.source], "position_ids": layout.depths}
    index = rows[token - 1]
    if one_label:
        row["shift_labels"] = np.full(len(layout.source), CROSS_ENTROPY_IGNORE_IDX, dtype=np.int64)
        row["shift_labels"][index] = ids[token]
    row |= _attention_keys(layout)
    row["token_index"] = index
    sample = edges.sample
    given = {"old_log_probs": old_logprobs, "advantages": advantages}
    if any(values is not None for values in given.values()):  # as edges.field, which would infer the forms for each
        bounds = (edges.field_offsets, edges.sample_offsets)
        forms = forms_of(*bounds, edges.sample_token, edges.completion_starts, sample)
        for name, values in given.items():
            if values is not None:
                row[name] = by_target(values, sample, forms).detach().float().numpy(force=True)
    row["segment_id"] = sample.numpy(force=True)
    if segment_parents:
        row |= _parent_keys(layout.parents)
    device = forest.input_ids.device
    return {name: torch.from_numpy(column).to(device) for name, column in row.items()}


def _layout(
    forest: PrefixForest, edges: LossEdges, ids: Ints, offsets: Ints, fork_early: bool, one_label: bool
) -> Layout:
    """Return the layout of a row. Its `source` is an index into ids, the tokens of all samples."""
    names = ("node_starts", "node_lengths", "node_parents", "sample_ends")
    starts, lengths, parents, ends = (getattr(forest, name).numpy(force=True) for name in names)
    size = forest.num_tokens
    row_ids, depth, end = (
        x[:size].numpy(force=True) for x in (forest.input_ids, forest.position_ids, forest.subtree_end)
    )
    layout = Layout(np.arange(size), depth, end, starts, lengths, parents, ends)
    forks = np.zeros(len(starts), dtype=np.bool_)
    if fork_early:  # every inner node, siblings in the order of the samples that add them
        layout = at_the_token(layout, row_ids[starts], ids, offsets)
        forks = np.zeros(len(layout.starts), dtype=np.bool_)
        forks[layout.parents[layout.parents >= 0]] = True
    elif one_label:
        forks = _several_targets(row_ids, starts, parents, edges)
    return radix.pre_order(forked_early(layout, forks, offsets, by_sample=fork_early))


def _several_targets(ids: Ints, starts: Ints, parents: Ints, edges: LossEdges) -> Any:
    """Return whether the last row of each node has several targets: bool [N]."""
    row, target = edges.row.numpy(force=True), edges.target.numpy(force=True)
    (again,) = (row[1:] == row[:-1]).nonzero()  # edges are in the order of their rows
    found = np.zeros(len(starts), dtype=np.bool_)
    # Siblings with equal first tokens, of a forest that forks early, are several edges with one target.
    differ = again[target[again] != target[again + 1]]
    found[starts.searchsorted(row[differ], side="right") - 1] = True
    return found


def _attention_keys(layout: Layout) -> dict[str, Any]:
    """Return the keys that attention reads."""
    paths = layout.depths[layout.starts] + layout.lengths
    bounds = np.append(0, paths.cumsum())
    nodes = np.arange(len(paths))
    return {
        "tree_kv_index": radix.rows_of_samples(layout.starts, layout.lengths, layout.parents, nodes, bounds),
        "tree_cu_seqlens_q": np.append(layout.starts, len(layout.source)).astype(np.int32),
        "tree_cu_seqlens_k": bounds.astype(np.int32),
        "tree_max_seqlens": np.array([layout.lengths.max(), paths.max()]),
    }


def _parent_keys(parents: Ints) -> dict[str, Any]:
    """Return the keys of the tree itself: the parent of each segment, and the number of segments above it."""
    levels: list[int] = []
    for parent in parents.tolist():
        levels.append(0 if parent < 0 else levels[parent] + 1)
    return {"tree_segment_parents": parents, "tree_segment_depths": np.array(levels, dtype=np.int64)}


# --- early forks ------------------------------------------------------------------------------------------------------


Bools = npt.NDArray[np.bool_]


def first_samples(parents: Ints, ends: Ints) -> Ints:
    """Return the first sample through each node of a pre-order: [N]; S where there is none."""
    first = np.full(len(parents), len(ends), dtype=np.int64)
    np.minimum.at(first, ends, np.arange(len(ends)))
    found, above = first.tolist(), parents.tolist()
    for node in range(len(above) - 1, -1, -1):  # children come after their parents
        parent = above[node]
        if parent >= 0 and found[node] < found[parent]:
            found[parent] = found[node]
    return np.array(found, dtype=np.int64)


def forked_early(layout: Layout, forks: Bools, offsets: Ints, *, by_sample: bool) -> Tree:
    """Return the tree in which some nodes fork early. Its `starts` are indices into the ids of all samples.

    The last token of such a node moves into each of its children; a sample that ends at the node gets a leaf with that
    token. Linear in nodes: tokens are not touched.

    Args:
        layout: each node is on the path of a sample.
        forks: bool [N], the nodes that fork early, none a leaf.
        offsets: [S + 1], where the ids of each sample begin.
        by_sample: order siblings by the samples that add them; otherwise as in the layout, a leaf first.
    """
    parents, first, depths = layout.parents, first_samples(layout.parents, layout.ends), layout.depths[layout.starts]
    moved = np.append(forks, False)[parents]  # nodes that get the last token of their parent; a root reads the False
    lengths = layout.lengths - forks + moved
    kept = lengths > 0
    parents = np.where(np.append(kept, True)[parents], parents, np.append(parents, -1)[parents])
    (of_forks,) = forks[layout.ends].nonzero()  # samples that end at a node that forks
    nodes, samples, leaf = of_forks, of_forks, of_forks
    if len(of_forks):
        nodes, samples, leaf = np.unique(layout.ends[of_forks], return_index=True, return_inverse=True)
        samples = of_forks[samples]
    number = np.append(kept.cumsum() - 1, -1)
    ends = number[layout.ends]
    ends[of_forks] = int(kept.sum()) + leaf
    below = np.where(kept[nodes], nodes, parents[nodes])
    ranks = (first[kept], samples) if by_sample else (kept.nonzero()[0], nodes)
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
    """Return the layout of the samples' radix tree: the given one if it is that, else a new one.

    first_ids: [N], the first token of each node. ids: the tokens of all samples; a sample begins at its offset.
    """
    siblings = len(np.unique(layout.parents * (int(first_ids.max()) + 1) + first_ids))
    children = np.bincount(layout.parents[layout.parents >= 0], minlength=len(layout.parents))
    ends = np.bincount(layout.ends, minlength=len(layout.parents))
    if siblings == len(layout.parents) and not bool(((children == 1) & (ends == 0)).any()):
        return layout
    return radix_layout(ids, offsets)
