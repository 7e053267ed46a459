"""Check a fold against its samples run one by one, ours or another tool's, and say what differs.

What is compared is the definition of folding: every sample has the log-probabilities and causes the gradients that it
has alone, every target of every sample is in the loss with its weight, and nothing moves outside the subtree of a token
that is changed (the leak probe). Samples are read out of the fold; where they are given too, they are compared first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.fold import CROSS_ENTROPY_IGNORE_IDX
from niels_gpt.prefix_tree.fold_batch import (
    Batch,
    Fold,
    Pairs,
    Targets,
    check_positions,
    check_samples,
    check_supervision,
    expected_targets,
    place_of,
    read_fold,
    supervised_pairs,
)
from niels_gpt.prefix_tree.fold_report import FoldReport

__all__ = ["FoldReport", "verify_fold"]

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROUNDING = 4  # ulp of the largest logit: a token that changes experts changes the sizes of their matrix products


def verify_fold(
    forward: Forward,
    batch: Batch,
    *,
    samples: Sequence[Any] | None = None,
    edges: LossEdges | None = None,
    loss_mask: Sequence[Sequence[Any]] | None = None,
    weighting: str | Tensor = "per_sample",
    parameters: Any = None,
    tolerance: float | None = None,
    ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX,
    probes: int = 8,
    seed: int = 0,
) -> FoldReport:
    """Run a fold and its samples one by one through the same forward, and report every difference.

    Args:
        forward: (ids int64 [1, T], positions int64 [1, T], mask bool [1, 1, T, T], True: may see) -> logits [1, T, V]
            or [T, V]. It may ignore what it likes: that is what shall be found. Samples get a plain causal mask. For a
            model of transformers: hf_forward(model).
        batch: our forest; or another tool's fold, whose ids, positions and pre-shifted labels are taken as they are: a
            FoldedRollouts, or a dict with input_ids, labels, position_ids, prefix_tree = (node_lengths, sample_paths).
            Rows behind the last node are padding. With `edges` a dict needs no labels.
        samples: the sequences that were folded, in their order. Without them a fold that lost or changed a sample is
            right here: samples are taken from the fold itself.
        edges: the supervision to check, in rows of the batch. Default: LossEdges.from_forest(batch,
            weighting=weighting), or the batch's labels with a weight of 1.
        loss_mask: which tokens of the samples are targets, one mask per sample. Default: the forest's own; for the
            others all tokens behind node 0, and in samples without it, or where it is empty, all but the first.
        weighting: what the weights should be, as in LossEdges.from_forest.
        parameters: whose gradients are compared: a module, tensors, or pairs of name and tensor. Default: those of
            forward, forward.model or forward.__self__; without any, gradients are not compared. `.grad` is left alone.
        tolerance: default: the loosest of TOLERANCES of the dtypes of logits and parameters. A leak has none but
            ROUNDING, which is said.
        ignore_idx: the label of rows without a loss.
        probes: how many tokens to change, one at a time: chosen by `seed` from different nodes, and where possible such
            that some tokens behind them see them and some do not.

    Memory is that of one forward and backward pass of the fold, and of its gradients twice.

    Raises:
        ValueError: forward does not return floating-point logits of that shape, or the batch contradicts itself.
    """
    everything = _parameters(forward, parameters)
    named = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
    device = next(iter(everything.values())).device if everything else None
    fold = read_fold(batch, device, needs_labels=edges is None)
    report = FoldReport(fold.samples.num_samples, len(fold.rows), len(fold.distinct_rows()))
    report.padding = len(fold.ids) - report.tokens_after
    if samples is not None and not check_samples(fold, samples, report):
        return report
    targets = expected_targets(fold, loss_mask, weighting)
    pairs = supervised_pairs(batch, fold, edges, weighting, ignore_idx)
    check_positions(fold, report)
    check_supervision(fold, targets, pairs, report)
    logits = _probed(forward, fold, pairs, everything, report, tolerance, _probed_rows(fold, probes, seed))
    if not report.not_compared:
        _compare(forward, fold, targets, pairs, logits, named, report)
    return report


def _parameters(forward: Any, given: Any) -> dict[str, Tensor]:
    """Return the parameters by name: given ones, or those that forward is known to have."""
    if getattr(getattr(forward, "config", None), "_attn_implementation", None) is not None:
        raise ValueError(
            f"forward is a {type(forward).__name__} of transformers, which takes other arguments; wrap it: "
            "hf_forward(model) of niels_gpt.prefix_tree.attention"
        )
    if given is None:
        owners = (forward, getattr(forward, "model", None), getattr(forward, "__self__", None))
        given = next((owner for owner in owners if callable(getattr(owner, "parameters", None))), [])
    if isinstance(given, nn.Module):
        named = list(given.named_parameters())
    else:
        listed = given.parameters() if callable(getattr(given, "parameters", None)) else given
        named = [one if isinstance(one, tuple) else (f"parameter {i}", one) for i, one in enumerate(listed)]
    return dict(named)


def _coarsest(logits: Tensor, parameters: dict[str, Tensor]) -> torch.dtype:
    """Return the dtype with the loosest tolerance: logits are often made float32 at the end of a model in bfloat16."""
    dtypes = {logits.dtype, *(each.dtype for each in parameters.values() if each.is_floating_point())}
    return max(dtypes, key=lambda dtype: TOLERANCES.get(dtype, 0.1))


def _run(forward: Forward, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Return logits [T, V] on the device of ids."""
    # A forward may write into what it gets, and the batch is the caller's.
    logits = forward(ids.clone()[None], positions.clone()[None], mask.clone()[None, None])
    if not isinstance(logits, Tensor):
        raise ValueError(f"forward returned a {type(logits).__name__}; expected logits, a tensor [1, T, V] or [T, V]")
    flat = logits[0] if logits.ndim == 3 and logits.shape[0] == 1 else logits
    if flat.ndim != 2 or len(flat) != len(ids) or not flat.is_floating_point():
        raise ValueError(
            f"forward returned {logits.dtype} of shape {list(logits.shape)} for {len(ids)} ids; expected floating-"
            "point logits [1, T, V] or [T, V]"
        )
    return flat.to(ids.device)


def _movement(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|: 0 where both are NaN or the same infinity, and infinity where only one is."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0)


# --- the leak probe ---------------------------------------------------------------------------------------------------


def _probed(
    forward: Forward,
    fold: Fold,
    pairs: Pairs,
    parameters: dict[str, Tensor],
    report: FoldReport,
    tolerance: float | None,
    rows: list[int],
) -> Tensor:
    """Return the logits of the fold, and note what they are like and what changes of rows move."""
    with torch.no_grad():
        logits, again = (_run(forward, fold.ids, fold.positions, fold.mask) for _ in range(2))
        largest = int(torch.cat([fold.ids, pairs.target]).max())
        if largest >= logits.shape[1]:
            raise ValueError(f"forward returned {logits.shape[1]} logits a row; the batch has the id {largest}")
        report.dtype = _coarsest(logits, parameters)
        report.tolerance = TOLERANCES.get(report.dtype, 0.1) if tolerance is None else tolerance
        largest_logit = float(logits.masked_fill(~logits.isfinite(), 0).abs().max())
        report.rounding = ROUNDING * torch.finfo(report.dtype).eps * largest_logit
        report.noise = float(_movement(logits, again).max())
        report.nonfinite_rows = int((~logits.logsumexp(-1).isfinite()).sum())
        if report.noise or report.nonfinite_rows:
            report.not_compared = "the forward is not deterministic" if report.noise else "logits are not finite"
            return logits
        for row in rows:
            _probe(forward, fold, logits, row, report)
    return logits


def _probed_rows(fold: Fold, probes: int, seed: int) -> list[int]:
    """Return rows of different nodes if possible; first come those that some rows behind them see, and some do not."""
    rows = fold.distinct_rows()
    seen = fold.mask[rows][:, rows].sum(0)
    behind = torch.arange(len(rows), 0, -1, device=rows.device)
    useful = ((seen > 1) & (seen < behind)).tolist()
    starts = fold.node_starts.sort().values
    nodes = torch.searchsorted(starts, rows, right=True).tolist()
    drawn: Counter[tuple[bool, int]] = Counter()
    ranked: list[tuple[bool, int, int, int]] = []
    for index in torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist():
        kind = (useful[index], nodes[index])
        ranked.append((not useful[index], drawn[kind], len(ranked), int(rows[index])))
        drawn[kind] += 1
    return [row for *_, row in sorted(ranked)[:probes]]


def _probe(forward: Forward, fold: Fold, logits: Tensor, row: int, report: FoldReport) -> None:
    others = fold.ids[fold.ids != fold.ids[row]]
    ids = fold.ids.clone()
    ids[row] = others[row % len(others)] if len(others) else (ids[row] + 1) % logits.shape[1]
    moved = _movement(_run(forward, ids, fold.positions, fold.mask), logits).amax(-1)
    inside = fold.mask[:, row].clone()
    outside = moved.masked_fill(inside, 0)
    most = int(outside.argmax())
    if outside[most] > report.leak:
        report.leak, report.leak_where = float(outside[most]), (row, most)
    if inside.sum() > 1:
        inside[row] = False  # a token moves its own row in any case; the question is what the others see of it
    report.probes += 1
    report.blind_probes += not bool(moved[inside].any())


# --- against the samples run alone ------------------------------------------------------------------------------------


def _compare(
    forward: Forward,
    fold: Fold,
    targets: Targets,
    pairs: Pairs,
    logits: Tensor,
    named: dict[str, Tensor],
    report: FoldReport,
) -> None:
    folded = _log_softmax(logits)
    with torch.set_grad_enabled(bool(named)):
        logp = _log_softmax(_run(forward, fold.ids, fold.positions, fold.mask))[pairs.row, pairs.target]
    parameters = list(named.values()) if logp.requires_grad else []
    report.not_compared = "" if parameters else "the logits depend on no known parameter; pass parameters="
    of_fold = _gradients(logp, pairs.weight, parameters)
    alone = [torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32)) for part in of_fold]
    report.logprob_error = 0.0
    for a, b in pairwise(fold.samples.sample_offsets.tolist()):
        rows, positions = fold.rows[a:b], torch.arange(b - a, device=fold.rows.device)
        ids, causal = fold.ids[rows], positions[:, None] >= positions
        with torch.set_grad_enabled(bool(parameters)):
            logp = _log_softmax(_run(forward, ids, positions, causal))[positions[:-1], ids[1:]]
        error = _movement(folded[rows[:-1], ids[1:]], logp.detach())
        if len(error) and float(error.max()) > report.logprob_error:
            report.logprob_error = float(error.max())
            report.logprob_where = place_of(fold, a + 1 + int(error.argmax()))
        for total, part in zip(alone, _gradients(logp, targets.weight[a + 1 : b], parameters), strict=True):
            total += part
    if parameters:
        _compare_gradients(list(named), of_fold, alone, report)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _gradients(logp: Tensor, weight: Tensor, parameters: list[Tensor]) -> Sequence[Tensor]:
    """Return the gradients of sum(weight * -logp), without touching `.grad`."""
    if not parameters or not logp.requires_grad:
        return [torch.zeros_like(parameter) for parameter in parameters]
    with torch.enable_grad():
        loss = -(weight.to(logp) * logp).sum()
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


def _compare_gradients(
    names: Sequence[str], of_fold: Sequence[Tensor], alone: Sequence[Tensor], report: FoldReport
) -> None:
    lengths = [float(part.double().norm()) for part in alone]
    errors = [float((part - total).double().norm()) for part, total in zip(of_fold, alone, strict=True)]
    whole = math.hypot(*lengths)
    # Some gradients are zero but for rounding, such as those of key biases: their own length is no measure.
    relative = [_ratio(error, max(length, whole / 100)) for error, length in zip(errors, lengths, strict=True)]
    report.gradient_error = _ratio(math.hypot(*errors), whole)
    report.worst_parameter = max(zip(names, relative, strict=True), key=lambda pair: pair[1])


def _ratio(error: float, length: float) -> float:
    """Return error / length, infinity where that is no number, and 0 for no error."""
    if not error:
        return 0.0
    return error / length if length and math.isfinite(error) else math.inf
