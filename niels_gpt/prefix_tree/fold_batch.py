"""A folded batch of any origin: its layout, what should be supervised, what is; and what is wrong with it on paper."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.fields import places
from niels_gpt.prefix_tree.fold import FoldedRollouts
from niels_gpt.prefix_tree.fold_report import FoldReport
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.ids import masks
from niels_gpt.prefix_tree.masks import AttnMaskSpec, dense_mask

Batch = PrefixForest | FoldedRollouts | Mapping[str, Any]
WEIGHT_TOLERANCE = 1e-6  # relative; weights may have passed through float32


class Fold(NamedTuple):
    """The layout of a batch as it is, and its samples. "sum L": the tokens of all samples, sample after sample."""

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    mask: Tensor  # bool [T, T]
    labels: Tensor | None  # int64 [T], none in a forest
    node_starts: Tensor  # int64: first rows of nodes
    rows: Tensor  # int64 [sum L]: the row of each token
    samples: PrefixForest  # the same samples with their targets; its own layout may be another

    def distinct_rows(self) -> Tensor:
        """Return the rows that belong to samples, rising: all but padding."""
        return torch.zeros_like(self.ids).index_fill(0, self.rows, 1).nonzero().squeeze(1)


class Targets(NamedTuple):
    """What should be supervised."""

    all: Tensor  # bool [sum L]
    predicted: Tensor  # int64 [M]: those that a row can predict, as indices of sum L
    weight: Tensor  # float64 [sum L], 0 where nothing is predicted


class Pairs(NamedTuple):
    """What is supervised: the loss is the sum of weight * -logp[row, target], each pair once."""

    row: Tensor  # int64 [E]
    target: Tensor  # int64 [E]
    weight: Tensor  # float64 [E]


def read_fold(batch: Batch, device: torch.device | None) -> Fold:
    """Return the layout of a batch; nothing is reordered. The targets of a foreign one are those of its contract."""
    if isinstance(batch, PrefixForest):
        forest = batch if device is None else batch.to(device)
        mask = dense_mask(forest)
        return Fold(forest.input_ids, forest.position_ids, mask, None, forest.node_starts, forest.sample_rows, forest)
    if isinstance(batch, FoldedRollouts):
        columns: list[Any] = [batch.input_ids, batch.position_ids, batch.labels]
        lengths, paths = batch.node_lengths, batch.sample_paths
    else:
        missing = [name for name in ("input_ids", "position_ids", "labels", "prefix_tree") if name not in batch]
        if missing:
            raise ValueError(
                f"the batch, a {type(batch).__name__}, has no {', '.join(missing)}; expected a PrefixForest, a "
                "FoldedRollouts, or what prefix_tree_collate_fn returns, before a backend pops prefix_tree from it"
            )
        columns = [batch[name] for name in ("input_ids", "position_ids", "labels")]
        lengths, paths = batch["prefix_tree"]
    ids, positions, labels = (torch.as_tensor(column, device=device).reshape(-1).long() for column in columns)
    if {len(ids), len(positions), len(labels)} != {sum(lengths)}:
        raise ValueError(
            f"there are {len(ids)} input_ids, {len(positions)} position_ids and {len(labels)} labels; expected "
            f"{sum(lengths)} of each, the sum of node_lengths"
        )
    forest = PrefixForest.from_node_paths(lengths, paths, ids)
    spec, ranges = AttnMaskSpec.prefix_tree(lengths, paths)
    starts = torch.tensor([end - length for end, length in zip(accumulate(lengths), lengths, strict=True) if length])
    rows = torch.cat([torch.arange(*part) for sample in ranges for part in sample])
    targets = (rows >= lengths[0]).index_fill(0, forest.sample_offsets[:-1], False)
    samples = replace(forest, loss_mask=targets).to(ids.device)
    mask, starts, rows = (tensor.to(ids.device) for tensor in (spec.dense(), starts, rows))
    return Fold(ids, positions, mask, labels, starts, rows, samples)


def expected_targets(fold: Fold, loss_mask: Sequence[Sequence[Any]] | None, weighting: str | Tensor) -> Targets:
    """Return the targets of the samples, or those of loss_mask, with the weights of LossEdges.from_forest."""
    samples, offsets = fold.samples, fold.samples.sample_offsets
    if loss_mask is not None:
        flat = torch.from_numpy(masks(loss_mask, offsets.cpu().numpy())).to(offsets.device)
        samples = replace(samples, loss_mask=flat)
    edges = LossEdges.from_forest(samples)
    everywhere = torch.zeros_like(samples.loss_mask, dtype=torch.float64)
    everywhere[edges.sample_token] = edges.token_weights(weighting)
    return Targets(samples.loss_mask, edges.sample_token, everywhere)


def supervised_pairs(
    batch: Batch, fold: Fold, edges: LossEdges | None, weighting: str | Tensor, ignore_idx: int
) -> Pairs:
    """Return the batch's own supervision: edges, those of the forest, or the labels with a weight of 1."""
    if edges is None and isinstance(batch, PrefixForest):
        edges = LossEdges.from_forest(batch, weighting=weighting)
    if edges is not None:
        row, target, weight = (column.to(fold.ids.device) for column in (edges.row, edges.target, edges.weight))
    else:
        labels = fold.ids[:0] if fold.labels is None else fold.labels
        row = (labels != ignore_idx).nonzero().squeeze(1)
        target, weight = labels[row], torch.ones_like(row, dtype=torch.float64)
    if len(row) and (int(row.min()) < 0 or int(row.max()) >= len(fold.ids) or int(target.min()) < 0):
        raise ValueError(
            f"supervision has rows of {int(row.min())} to {int(row.max())} and targets from {int(target.min())}; "
            f"expected rows of 0 to {len(fold.ids) - 1}, and ids from 0, or the label ignore_idx={ignore_idx}"
        )
    base = 1 + int(torch.cat([target, fold.ids]).max())
    keys, weights = _summed(row * base + target, weight)
    return Pairs(keys // base, keys % base, weights)


def _summed(keys: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct keys, rising, and the sum of the weights of each, float64."""
    keys, order = keys.sort(stable=True)
    distinct, counts = torch.unique_consecutive(keys, return_counts=True)
    number = torch.arange(len(distinct), device=keys.device).repeat_interleave(counts)
    return distinct, torch.zeros_like(distinct, dtype=torch.float64).index_add(0, number, weights[order].double())


def check_positions(fold: Fold, report: FoldReport) -> None:
    """Note the tokens whose position is not their index in their sample."""
    wrong = (fold.positions[fold.rows] != places(fold.samples.sample_offsets)).nonzero().squeeze(1)
    report.wrong_positions = len(wrong)
    if len(wrong):
        report.position_where = place_of(fold, int(wrong[0]))


def place_of(fold: Fold, index: int) -> tuple[int, int]:
    """Return (sample, token) of an index of sum L."""
    offsets = fold.samples.sample_offsets.tolist()
    sample = bisect_right(offsets, index) - 1
    return sample, index - offsets[sample]


def check_supervision(fold: Fold, targets: Targets, pairs: Pairs, report: FoldReport) -> None:
    """Note lost, wrong and additional targets, and wrong weights."""
    base = 1 + int(torch.cat([pairs.target, fold.ids]).max())
    given = pairs.row * base + pairs.target
    steps = fold.rows.roll(1) * base + fold.ids[fold.rows]  # of no meaning at the first token of a sample
    inner = torch.ones_like(targets.all).index_fill(0, fold.samples.sample_offsets[:-1], False)
    wanted, sums = _summed(steps[targets.predicted], targets.weight[targets.predicted])
    lost = ~torch.isin(steps[targets.predicted], given)
    begins = torch.isin(fold.rows, fold.node_starts) | ~targets.all.roll(1)
    follows, expected = torch.isin(given, steps[inner]), torch.isin(given, wanted)
    report.targets = len(targets.predicted)
    report.unpredictable = int(targets.all.sum()) - report.targets
    report.lost_targets, report.lost_first_tokens = int(lost.sum()), int((lost & begins[targets.predicted]).sum())
    report.wrong_targets, report.extra_targets = int((~follows).sum()), int((follows & ~expected).sum())

    found, right = pairs.weight[expected], sums[torch.searchsorted(wanted, given[expected])]
    error = ((found - right) / right).abs().masked_fill(found == right, 0).nan_to_num(nan=math.inf)
    report.weight_errors = int((error > WEIGHT_TOLERANCE).sum())
    report.weight_error = max(error.tolist(), default=0.0)
