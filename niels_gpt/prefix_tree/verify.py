"""verify_fold: compare a folded row, of this package or another tool, with its samples run one by one.

It checks the definition of folding: every sample has the same log-probabilities and gradients as alone, every target of
every sample is in the loss with its weight, and a changed token moves nothing outside its subtree (the leak probe).
Samples are read from the fold; if the caller passes them too, they are compared first.
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
from niels_gpt.prefix_tree.fold_checks import (
    Batch,
    Fold,
    FoldReport,
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
from niels_gpt.storage.errors import FoldError

__all__ = ["FoldReport", "verify_fold"]

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROUNDING = 4  # ulp of the largest logit: a token that moves to another expert changes the shapes of matrix products


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
            or [T, V]. It may be wrong; finding that is the point. Samples get a plain causal mask. For a model of
            transformers: hf_forward(model).
        batch: a PrefixForest; or another tool's fold, whose ids, positions and pre-shifted labels are used as they are:
            a FoldedRollouts, or a dict with input_ids, labels, position_ids, prefix_tree = (node_lengths,
            sample_paths). Rows after the last node are padding. With `edges` a dict needs no labels.
        samples: the sequences that were folded, in order. Default: read from the fold, where a lost one is not found.
        edges: the supervision to check, in rows of the batch. Default: LossEdges.from_forest(batch,
            weighting=weighting), or the batch's labels with a weight of 1.
        loss_mask: which tokens of the samples are targets, one mask per sample. Default: that of the forest; for other
            batches all tokens after node 0, and all but the first of samples where node 0 is missing or empty.
        weighting: the expected weights, as in LossEdges.from_forest.
        parameters: whose gradients are compared: a module, tensors, or pairs of name and tensor. Default: those of
            forward, forward.model or forward.__self__; without any, gradients are not compared. `.grad` is not changed.
        tolerance: default: the loosest of TOLERANCES for the dtypes of logits and parameters. Leaks are only allowed
            ROUNDING, which the report states.
        ignore_idx: the label of rows without a loss.
        probes: how many tokens to change, one at a time: drawn by `seed` from different nodes, if possible such that
            some later tokens see them and some do not.

    Needs the memory of a forward and backward pass of the fold, of its gradients twice, and of masks of T x T, about
    ten bytes a pair whatever the attention: 3 GB for 16,384 tokens. Check the rows of a few groups, not of a whole bin.

    Raises: ValueError where forward returns no floating-point logits of that shape, or the batch is inconsistent.
    """
    everything = _parameters(forward, parameters)
    named = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
    device = next(iter(everything.values())).device if everything else None
    fold = read_fold(batch, device, needs_labels=edges is None)
    report = FoldReport(fold.samples.num_samples, len(fold.rows), len(fold.distinct_rows()))
    report.padding = len(fold.ids) - report.tokens_after
    loss_mask = loss_mask if samples is None else check_samples(fold, samples, loss_mask, report)
    if report.changed_samples:
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
    """Return the given parameters by name, or those that belong to forward."""
    if getattr(getattr(forward, "config", None), "_attn_implementation", None) is not None:
        raise FoldError(
            f"forward is a {type(forward).__name__} of transformers, which has other arguments; wrap it: "
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
    """Return the dtype with the loosest tolerance: a bfloat16 model often converts its logits to float32."""
    dtypes = {logits.dtype, *(each.dtype for each in parameters.values() if each.is_floating_point())}
    return max(dtypes, key=lambda dtype: TOLERANCES.get(dtype, 0.1))


def _run(forward: Forward, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Return logits [T, V] on the device of ids."""
    # Clones: a forward may write into its arguments, which belong to the caller.
    logits = forward(ids.clone()[None], positions.clone()[None], mask.clone()[None, None])
    if not isinstance(logits, Tensor):
        raise FoldError(f"forward returned a {type(logits).__name__}; expected logits, a tensor [1, T, V] or [T, V]")
    flat = logits[0] if logits.ndim == 3 and logits.shape[0] == 1 else logits
    if flat.ndim != 2 or len(flat) != len(ids) or not flat.is_floating_point():
        raise FoldError(
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
    """Return the logits of the fold; report whether they are deterministic and finite, and the leaks."""
    with torch.no_grad():
        logits, again = (_run(forward, fold.ids, fold.positions, fold.mask) for _ in range(2))
        largest = int(torch.cat([fold.ids, pairs.target]).max())
        if largest >= logits.shape[1]:
            raise FoldError(f"forward returned {logits.shape[1]} logits a row; the batch has the id {largest}")
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
    """Return the rows to change: first those that some but not all later rows see, from different nodes if possible."""
    rows = fold.distinct_rows()
    seen = fold.mask[rows][:, rows].sum(0)
    later = torch.arange(len(rows), 0, -1, device=rows.device)
    useful = ((seen > 1) & (seen < later)).tolist()
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
        inside[row] = False  # a token always moves its own row; what matters are the others
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
    # Some gradients are zero up to rounding, such as those of key biases: compare them with the total norm.
    relative = [_ratio(error, max(length, whole / 100)) for error, length in zip(errors, lengths, strict=True)]
    report.gradient_error = _ratio(math.hypot(*errors), whole)
    report.worst_parameter = max(zip(names, relative, strict=True), key=lambda pair: pair[1])


def _ratio(error: float, length: float) -> float:
    """Return error / length: 0 without an error, infinity if the quotient is not finite."""
    if not error:
        return 0.0
    return error / length if length and math.isfinite(error) else math.inf
