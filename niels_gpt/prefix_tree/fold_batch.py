"""A folded batch of any origin: its layout, what should be supervised, what is; and what is wrong with it on paper."""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.fields import places
from niels_gpt.prefix_tree.fold import FoldedRollouts
from niels_gpt.prefix_tree.fold_report import FoldReport
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.ids import concatenated, masks
from niels_gpt.prefix_tree.masks import AttnMaskSpec, dense_mask

Batch = PrefixForest | FoldedRollouts | Mapping[str, Any]
WEIGHT_TOLERANCE = 1e-6  # of the weights that are summed; they may have passed through float32


class Fold(NamedTuple):
    """The layout of a batch as it is, and its samples. "sum L": the tokens of all samples, sample after sample."""

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    mask: Tensor  # bool [T, T]
    labels: Tensor | None  # int64 [T], none in a forest, nor where edges are given instead
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


def read_fold(batch: Batch, device: torch.device | None, *, needs_labels: bool = True) -> Fold:
    """Return the layout of a batch; nothing is reordered. The targets of a foreign one are those of its contract."""
    if isinstance(batch, PrefixForest):
        forest = batch if device is None else batch.to(device)
        mask = dense_mask(forest)
        return Fold(forest.input_ids, forest.position_ids, mask, None, forest.node_starts, forest.sample_rows, forest)
    given, lengths, paths = _columns(batch, needs_labels)
    columns = {name: torch.as_tensor(column, device=device).reshape(-1).long() for name, column in given.items()}
    ids, used = columns["input_ids"], sum(lengths)
    if {len(column) for column in columns.values()} != {len(ids)} or len(ids) < used:
        raise ValueError(
            f"there are {', '.join(f'{len(column)} {name}' for name, column in columns.items())}; expected {used} "
            "of each, the sum of node_lengths, or as many more of each as there is padding"
        )
    forest = PrefixForest.from_node_paths(lengths, paths, ids[:used])
    spec, ranges = AttnMaskSpec.prefix_tree(lengths, paths)
    mask = torch.eye(len(ids), dtype=torch.bool)  # what padding sees
    mask[:used, :used] = spec.dense()
    starts = torch.tensor([0, *accumulate(lengths)][:-1])
    rows = torch.cat([torch.arange(*part) for sample in ranges for part in sample])
    targets = (rows >= lengths[0]).index_fill(0, forest.sample_offsets[:-1], False)
    samples = replace(forest, loss_mask=targets).to(ids.device)
    mask, starts, rows = (tensor.to(ids.device) for tensor in (mask, starts, rows))
    return Fold(ids, columns["position_ids"], mask, columns.get("labels"), starts, rows, samples)


def _columns(
    batch: FoldedRollouts | Mapping[str, Any], needs_labels: bool
) -> tuple[dict[str, Any], list[int], list[list[int]]]:
    """Return the columns of a foreign batch by name, node_lengths, and sample_paths; arrays become lists."""
    fields = batch if isinstance(batch, Mapping) else vars(batch)
    names = ["input_ids", "position_ids", *(["labels"] if needs_labels else [])]
    needed = [*names, *(["prefix_tree"] if isinstance(batch, Mapping) else [])]
    missing = [name for name in needed if name not in fields]
    if missing:
        raise ValueError(
            f"the batch, a {type(batch).__name__}, has no {', '.join(missing)}; expected a PrefixForest, a "
            "FoldedRollouts, or what prefix_tree_collate_fn returns, before a backend pops prefix_tree from it"
        )
    tree = fields["prefix_tree"] if isinstance(batch, Mapping) else (batch.node_lengths, batch.sample_paths)
    lengths, paths = tree
    columns = {name: fields[name] for name in names}
    return columns, list(map(operator.index, lengths)), [list(map(operator.index, path)) for path in paths]


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
    used = weight != 0  # a pair without a weight is none
    row, target, weight = row[used], target[used], weight[used]
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
    distinct, number = torch.unique(keys, return_inverse=True)
    return distinct, torch.zeros_like(distinct, dtype=torch.float64).index_add(0, number, weights.double())


def check_samples(fold: Fold, given: Sequence[Any], report: FoldReport) -> bool:
    """Note the samples that are not the given ones at their place in the order, and return whether there are none."""
    found = [part.tolist() for part in torch.split(fold.ids[fold.rows], fold.samples.sample_lengths.tolist())]
    ids, offsets = concatenated(given, "sample")
    wanted = [ids[start:end].tolist() for start, end in pairwise(offsets)]
    changed = [i for i, (a, b) in enumerate(zip_longest(found, wanted)) if a != b]
    report.given_samples, report.changed_samples = len(wanted), len(changed)
    if changed:
        first = changed[0]
        tokens = zip_longest(found[first] if first < len(found) else (), wanted[first] if first < len(wanted) else ())
        report.sample_where = (first, next((token for token, (a, b) in enumerate(tokens) if a != b), 0))
        report.not_compared = "the samples are others"
    return not changed


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
    supervised, weight = steps[targets.predicted], targets.weight[targets.predicted]
    wanted, sums = _summed(supervised, weight)
    sizes = _summed(supervised, weight.abs())[1]  # advantages may cancel each other out
    lost = ~torch.isin(supervised, given) & torch.isin(supervised, wanted[~(sums.abs() <= WEIGHT_TOLERANCE * sizes)])
    begins = torch.isin(fold.rows, fold.node_starts) | ~targets.all.roll(1)
    follows, expected = torch.isin(given, steps[inner]), torch.isin(given, wanted)
    report.targets = len(targets.predicted)
    report.unpredictable = int(targets.all.sum()) - report.targets
    report.lost_targets, report.lost_first_tokens = int(lost.sum()), int((lost & begins[targets.predicted]).sum())
    report.wrong_targets, report.extra_targets = int((~follows).sum()), int((follows & ~expected).sum())

    place = torch.searchsorted(wanted, given[expected])
    found, right, size = pairs.weight[expected], sums[place], sizes[place]
    error = ((found - right) / size).abs().masked_fill(found == right, 0).nan_to_num(nan=math.inf, posinf=math.inf)
    report.weight_errors = int((error > WEIGHT_TOLERANCE).sum())
    report.weight_error = max(error.tolist(), default=0.0)
