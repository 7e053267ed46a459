"""Tree rows: a forest as the batch of TRL's AsyncGRPOTrainer (1.16 or newer), and such a batch as a forest.

    row = tree_row(forest, edges, old_logprobs=old, advantages=advantages)   # the keys of TRL's TreeRow.pack()
    forest, edges = from_tree_row(row)

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

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.fold import CROSS_ENTROPY_IGNORE_IDX
from niels_gpt.prefix_tree.forest import MAX_SAMPLE_TOKENS, PrefixForest
from niels_gpt.prefix_tree.layout import radix
from niels_gpt.prefix_tree.layout.early_forks import at_the_token, forked_early
from niels_gpt.prefix_tree.layout.fields import by_target, forms_of
from niels_gpt.prefix_tree.layout.radix import Ints, Layout, Tree
from niels_gpt.prefix_tree.layout.sample_ends import sample_ends
from niels_gpt.prefix_tree.sequences import MAX_ID
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
        raise TreeError("fork_early=True is a layout with one label a row; expected one_label=True with it")
    if edges.num_rows != len(forest.input_ids) or not torch.equal(edges.field_offsets, forest.sample_offsets):
        raise TreeError(f"{edges!r} has other rows or samples than {forest!r}; expected LossEdges.from_forest(forest)")
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


def _parent_keys(parents: Ints) -> dict[str, Any]:
    """Return the keys that name the tree itself: the parent of each segment, and how many segments are above it."""
    levels: list[int] = []
    for parent in parents.tolist():
        levels.append(0 if parent < 0 else levels[parent] + 1)
    return {"tree_segment_parents": parents, "tree_segment_depths": np.array(levels, dtype=np.int64)}


# --- from a row to a forest -------------------------------------------------------------------------------------------

_INTEGERS = ("input_ids", "position_ids", "shift_labels", "tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
_TERMS = ("token_index", "segment_id")
MAX_SAMPLES = 2**20
"""The most samples of a row: a short one can name any number."""


@torch.inference_mode(False)
def from_tree_row(row: Mapping[str, Any]) -> tuple[PrefixForest, LossEdges]:
    """Return the forest and the edges of a row of TRL, or of `tree_row`: its own layout, early forks included.

    `verify_fold(forward, forest, samples=...)` judges whether the row is right for the samples that it should hold.
    The terms of the edges are those of the row in their order, so `row["advantages"]` fits `edges.sample_edge`.

    A row does not say which tokens come after the last supervised one of a sample, and no loss depends on them. The
    samples that may have a tail get those of the row in order; a sample that gets none ends with the segment of its
    last supervised token, and a tail that is left over is a further sample, without a target.

    Args:
        row: as `TreeRow.pack()` returns it, for one rank and without the padding of TRL's collator.

    Raises:
        ValueError: a key is missing, has another form, or contradicts another one: an index is out of bounds, a segment
            does not attend to its ancestors and itself, a position is not a depth, segments are not in depth-first
            order, or a term does not follow its row in its sample.
    """
    columns = {name: _column(row, name) for name in (*_INTEGERS, *_TERMS)}
    layout = _read_layout(columns)
    for name, wanted in {**_attention_keys(layout), **_parent_keys(layout.parents)}.items():
        if name in row and name not in columns:
            _check_equal(name, _column(row, name), wanted)
    _check_terms(columns, layout)
    ids, index, sample, labels = (columns[n] for n in ("input_ids", "token_index", "segment_id", "shift_labels"))
    last = np.flatnonzero(np.append(sample[1:] != sample[:-1], [True] * bool(len(sample))))
    ends = sample_ends(layout, ids, sample[last], index[last], labels[index[last]])
    lengths = (layout.depths[layout.starts] + layout.lengths)[ends]
    if int(lengths.sum()) > MAX_SAMPLE_TOKENS:
        raise TreeError(f"the samples have {int(lengths.sum())} tokens; expected {MAX_SAMPLE_TOKENS} at most")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = radix.rows_of_samples(layout.starts, layout.lengths, layout.parents, ends, offsets)
    place = layout.depths[index] + 1
    token = offsets[sample] + place
    wrong = np.flatnonzero((place >= lengths[sample]) | (rows.take(token - 1, mode="clip") != index))
    wrong = wrong if len(wrong) else np.flatnonzero(ids[rows[token]] != labels[index])
    if len(wrong):
        at = wrong[0]
        raise TreeError(
            f"term {at} is the token {labels[index[at]]} after row {index[at]} of sample {sample[at]}, which is not in "
            "that sample; expected the token that follows the row on the sample's path"
        )
    mask = np.zeros(len(rows), dtype=np.bool_)
    mask[token] = True
    unknown = np.full(len(ends), -1, dtype=np.int64)
    parts = (ids, layout.depths, *layout[2:6], ends, offsets, mask, unknown)
    forest = PrefixForest(*(torch.from_numpy(part) for part in parts))
    return forest, LossEdges.from_forest(forest)


def _column(row: Mapping[str, Any], name: str) -> Ints:
    if name not in row:
        why = ": it names the targets" if name == "shift_labels" else ""
        raise TreeError(f"the row has no {name}{why}; its keys are {sorted(map(str, row))!r:.300}")
    values = row[name]
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise TreeError(
            f"{name} is {array.dtype} of shape {list(array.shape)}; expected integers in one axis, as TreeRow.pack() "
            "returns them: a collated batch has one such row for each rank, and padding"
        )
    return array.astype(np.int64)


def _read_layout(columns: Mapping[str, Ints]) -> Layout:
    """Return the layout of a row whose segments, paths and positions agree."""
    ids, kv, bounds = (columns[name] for name in ("input_ids", "tree_kv_index", "tree_cu_seqlens_q"))
    lengths, paths = (_lengths(columns, name) for name in ("tree_cu_seqlens_q", "tree_cu_seqlens_k"))
    for name, found, wanted in (
        ("tree_cu_seqlens_q", int(bounds[-1]), len(ids)),
        ("tree_cu_seqlens_k", int(columns["tree_cu_seqlens_k"][-1]), len(kv)),
        ("tree_cu_seqlens_k", len(paths), len(lengths)),
        ("position_ids", len(columns["position_ids"]), len(ids)),
        ("shift_labels", len(columns["shift_labels"]), len(ids)),
    ):
        if found != wanted:
            raise TreeError(f"{name} has or ends at {found}; expected {wanted}, as the other keys")
    _check_range("input_ids", ids, 0, MAX_ID)
    _check_range("tree_kv_index", kv, 0, len(ids) - 1)
    parents = _parents(kv, bounds, columns["tree_cu_seqlens_k"], lengths)
    nodes = np.arange(len(lengths))
    layout = radix.pre_order(Tree(bounds[:-1], lengths, parents, nodes, nodes))
    if not np.array_equal(layout.source, np.arange(len(ids))):
        raise TreeError("the segments are not in depth-first order; expected each subtree in one piece")
    _check_equal("position_ids", columns["position_ids"], layout.depths)
    _check_equal("the lengths in tree_cu_seqlens_k", paths, layout.depths[layout.starts] + lengths)
    _check_equal("tree_kv_index", kv, _attention_keys(layout)["tree_kv_index"])
    return layout


def _lengths(columns: Mapping[str, Ints], name: str) -> Ints:
    bounds = columns[name]
    if len(bounds) < 2 or bounds[0] != 0 or bool((bounds[1:] <= bounds[:-1]).any()):
        raise TreeError(f"{name} is {bounds[:8].tolist()}...; expected bounds that begin with 0 and rise")
    return np.diff(bounds)


def _parents(kv: Ints, starts: Ints, bounds: Ints, lengths: Ints) -> Ints:
    """Return the parent of each segment, whose last row is before the segment in its path; -1 for a root."""
    before = bounds[1:] - lengths - 1
    above = np.where(before >= bounds[:-1], kv[np.maximum(before, 0)], -1)
    parents = np.searchsorted(starts[:-1], above, side="right") - 1
    wrong = np.flatnonzero((above >= 0) & ((above >= starts[:-1]) | (starts[parents + 1] != above + 1)))
    if len(wrong):
        raise TreeError(
            f"segment {wrong[0]} continues row {above[wrong[0]]}; expected the last row of an earlier segment"
        )
    return parents


def _check_terms(columns: Mapping[str, Ints], layout: Layout) -> None:
    """Check that terms are sorted by sample and along one path, and that the labelled rows are theirs."""
    index, sample, labels = (columns[name] for name in ("token_index", "segment_id", "shift_labels"))
    if len(index) != len(sample):
        raise TreeError(f"token_index has {len(index)} terms and segment_id {len(sample)}; expected as many")
    _check_range("token_index", index, 0, len(labels) - 1)
    _check_range("segment_id", sample, 0, MAX_SAMPLES - 1)
    same = sample[1:] == sample[:-1]
    follows = (index[1:] > index[:-1]) & (index[1:] < layout.subtree_end[index[:-1]])
    wrong = np.flatnonzero((sample[1:] < sample[:-1]) | (same & ~follows)) + 1
    if len(wrong):
        at = int(wrong[0])
        raise TreeError(
            f"term {at} is row {index[at]} of sample {sample[at]}, after row {index[at - 1]} of sample "
            f"{sample[at - 1]}; expected samples in order, and the rows of each along one path"
        )
    _check_equal("the rows with a label", np.flatnonzero(labels != CROSS_ENTROPY_IGNORE_IDX), np.unique(index))


def _check_range(name: str, values: Ints, low: int, high: int) -> None:
    wrong = np.flatnonzero((values < low) | (values > high))
    if len(wrong):
        raise TreeError(f"{name} has {values[wrong[0]]} at {wrong[0]}; expected {low} to {high}")


def _check_equal(name: str, found: Ints, wanted: Ints) -> None:
    if len(found) != len(wanted):
        raise TreeError(f"{name}: there are {len(found)}; expected {len(wanted)} by the other keys")
    wrong = np.flatnonzero(found != wanted)
    if len(wrong):
        at = wrong[0]
        raise TreeError(f"{name}: {found[at]} at {at}; expected {wanted[at]} by the other keys")
