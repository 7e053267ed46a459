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

One label a row: TRL's loss reads the log-prob of a row's label, so a row can predict one token. TRL's own rows fork one
token before samples differ, everywhere. Here only the rows fork early that have several targets, which is never more
tokens; a loss that reads its targets from LossEdges needs no fork at all (one_label=False).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.fold import CROSS_ENTROPY_IGNORE_IDX
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.layout import radix
from niels_gpt.prefix_tree.layout.early_forks import at_the_token, forked_early
from niels_gpt.prefix_tree.layout.radix import Ints, Layout


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
        fork_early: TRL's own layout: the row is equal to `TreeRow().add(...)...pack()` of the same samples in order,
            also for a forest of `joined`, whose trees share nothing: the row shares every prefix.
        one_label: False: the forest's own rows, none more. The row then has no `shift_labels`, without which TRL's loss
            stops: rows at branches have several targets, which `edge_logprobs(hidden, edges, head)` reads from edges.
        old_logprobs, advantages: in any form that `edges.field` takes. Default: the row has no such key.
        segment_parents: add `tree_segment_parents` and `tree_segment_depths`, int64 [S], which tree-recurrence would
            otherwise derive: a segment's parent, -1 for a root, and how many segments are above it.

    Raises:
        ValueError: the edges are not the forest's, a field does not fit, or fork_early is asked for without one_label.
    """
    if fork_early and not one_label:
        raise ValueError("fork_early=True is a layout with one label a row; expected one_label=True with it")
    if edges.num_rows != len(forest.input_ids) or not torch.equal(edges.field_offsets, forest.sample_offsets):
        raise ValueError(f"{edges!r} has other rows or samples than {forest!r}; expected LossEdges.from_forest(forest)")
    offsets, token = (x.numpy(force=True) for x in (forest.sample_offsets, edges.sample_token))
    ids = forest.input_ids[forest.sample_rows].numpy(force=True)
    layout = _layout(forest, edges, ids, offsets, fork_early, one_label)
    rows = radix.rows_of_samples(layout.starts, layout.lengths, layout.parents, layout.ends, offsets)
    row = {"input_ids": ids[layout.source], "position_ids": layout.depths}
    index = rows[token - 1]
    if one_label:
        row["shift_labels"] = np.full(len(layout.source), CROSS_ENTROPY_IGNORE_IDX, dtype=np.int64)
        row["shift_labels"][index] = ids[token]
    row |= _attention_keys(layout)
    row["token_index"] = index
    for name, values in {"old_log_probs": old_logprobs, "advantages": advantages}.items():
        if values is not None:
            row[name] = edges.field(values).detach().float().numpy(force=True)
    row["segment_id"] = edges.sample.numpy(force=True)
    if segment_parents:
        row |= {"tree_segment_parents": layout.parents, "tree_segment_depths": _levels(layout.parents)}
    return {name: torch.from_numpy(column).to(forest.input_ids.device) for name, column in row.items()}


def _layout(
    forest: PrefixForest, edges: LossEdges, ids: Ints, offsets: Ints, fork_early: bool, one_label: bool
) -> Layout:
    """Return the layout of a row, whose `source` refers to ids, those of the samples."""
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
    """Return for each node whether its last row has several targets: bool [N]."""
    row, target = edges.row.numpy(force=True), edges.target.numpy(force=True)
    again = np.flatnonzero(row[1:] == row[:-1])  # edges are in the order of their rows
    found = np.zeros(len(starts), dtype=np.bool_)
    # Siblings with equal first tokens, of a forest that forks early, are several edges with one target.
    differ = again[target[again] != target[again + 1]]
    found[np.searchsorted(starts, row[differ], side="right") - 1] = True
    return found


def _attention_keys(layout: Layout) -> dict[str, Any]:
    """Return the keys that attention reads."""
    paths = layout.depths[layout.starts] + layout.lengths
    bounds = np.concatenate([[0], np.cumsum(paths)])
    nodes = np.arange(len(paths))
    return {
        "tree_kv_index": radix.rows_of_samples(layout.starts, layout.lengths, layout.parents, nodes, bounds),
        "tree_cu_seqlens_q": np.append(layout.starts, len(layout.source)).astype(np.int32),
        "tree_cu_seqlens_k": bounds.astype(np.int32),
        "tree_max_seqlens": np.array([layout.lengths.max(), paths.max()]),
    }


def _levels(parents: Ints) -> Ints:
    """Return how many nodes are above each node of a pre-order."""
    levels: list[int] = []
    for parent in parents.tolist():
        levels.append(0 if parent < 0 else levels[parent] + 1)
    return np.array(levels, dtype=np.int64)
