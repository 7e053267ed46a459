"""Proof that a fold is right: verify_fold compares a folded row with its samples, run one by one.

The row may come from this package or another tool. Folding is right if each sample has the log-probs and gradients that
it has alone, each target is in the loss with its weight, and a changed token moves no logit outside its subtree (the
leak probe).
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from niels_gpt.prefix_tree.attention import AttnMaskSpec, dense_mask
from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.fields import places
from niels_gpt.prefix_tree.fold import CROSS_ENTROPY_IGNORE_IDX, FoldedRollouts
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.sequences import concatenated, masks
from niels_gpt.storage.errors import FoldError, errors_as

Batch = PrefixForest | FoldedRollouts | Mapping[str, Any]
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
WEIGHT_TOLERANCE = 1e-6  # relative to the weights that are summed, which may have been float32
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
    """Run a fold, and its samples one by one, through the same forward; report every difference.

    Args:
        forward: (ids int64 [1, T], positions int64 [1, T], mask bool [1, 1, T, T], True: may see) -> logits [1, T, V]
            or [T, V]. Samples get a plain causal mask. A model of transformers needs `hf_forward(model)`.
        batch: a PrefixForest; or another tool's fold with its own ids, positions and pre-shifted labels: a
            FoldedRollouts, or a dict with input_ids, labels, position_ids, prefix_tree = (node_lengths, sample_paths).
            Rows after the last node are padding. With `edges` a dict needs no labels.
        samples: the sequences before folding, in order. Default: read from the fold, so that a lost one is not found.
        edges: the supervision to check, in rows of the batch. Default: LossEdges.from_forest(batch,
            weighting=weighting), or the batch's labels with a weight of 1.
        loss_mask: which tokens of the samples are targets, one mask per sample. Default: the mask of the forest; for
            other batches all tokens after node 0, and all but the first of samples where node 0 is missing or empty.
        weighting: the expected weights, as in LossEdges.from_forest.
        parameters: the gradients to compare: a module, tensors, or pairs of name and tensor. Default: the parameters of
            forward, forward.model or forward.__self__; without any, gradients are not compared. `.grad` is unchanged.
        tolerance: default: the loosest of TOLERANCES for the dtypes of logits and parameters. Leaks are compared with
            ROUNDING.
        ignore_idx: the label of rows without a loss.
        probes: how many tokens to change, one at a time: drawn by `seed` from different nodes, if possible such that
            some later tokens see them and some do not.

    Takes the memory of a forward and backward pass of the fold, its gradients twice, and masks of T x T, about ten
    bytes a pair whatever the attention: 3 GB for 16,384 tokens. Check the rows of a few groups, not a whole bin.

    Raises: FoldError (E803) if forward does not return floating-point logits of that shape, or the columns of a batch
        contradict each other; TreeError (E801) for a tree or masks that cannot be.
    """
    everything = _parameters(forward, parameters)
    named = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
    device = next(iter(everything.values())).device if everything else None
    fold = read_fold(batch, device, needs_labels=edges is None)
    report = FoldReport(fold.samples.num_samples, len(fold.rows), len(fold.distinct_rows()))
    report.padding = len(fold.ids) - report.tokens_after
    if samples is not None:
        check_samples(fold, samples, report)
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
    """Return the given parameters by name; without any, the parameters of forward."""
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


# --- the report -------------------------------------------------------------------------------------------------------

# Each finding and what to do about it; causes come before their consequences.
ADVICE = {
    "samples": "Fold all the sequences unchanged and in order; cut padding off first.",
    "determinism": "Switch dropout off (model.eval()); nothing else can be compared until two equal runs agree.",
    "finite logits": "Let every row attend at least to itself, padding too (softmax over nothing is NaN), and check "
    "for overflow in half precision.",
    "positions": "Continue the positions of a node from the end of its parent: every branch starts at its depth.",
    "leaks": "Pass the tree's mask to the model in the form that its attention reads, as "
    "niels_gpt.prefix_tree.attention.model_inputs(forest, model) does; an attention that ignores masks cannot be used.",
    "blind probes": "Check that the forward uses its ids, and that a token attends to the ones before it.",
    "log-probs": "Check that the mask and the positions reach the attention unchanged: a branch sees all its "
    "ancestors, at its depth. An error near 1e-8 in float64 comes from norms and rotary angles that the model "
    "computes in float32: pass tolerance=1e-6. Half precision inside (autocast too) costs about 1e-2: pass "
    "tolerance=5e-2. In a mixture of experts, rounding can send a token to another expert: compare in float64.",
    "wrong targets": "Shift labels once: the row of token t has the id of token t + 1 of the same sample.",
    "lost targets": "Use (row, target) pairs instead of a label per row: with LossEdges.from_forest a branch row "
    "predicts the first token of every child.",
    "extra targets": "Remove them from the loss, or pass loss_mask= if they are targets.",
    "weights": "Weight a pair that samples share by the sum of their tokens' weights, as LossEdges does, or pass "
    "another weighting=.",
    "gradients": "If all else is ok, the backward pass does not match the forward pass: look for detached tensors, "
    "and for an attention whose backward ignores the mask. An error near 1e-7 in float64 comes from norms and rotary "
    "angles that the model computes in float32: pass tolerance=1e-6; one near 1e-2 from half precision inside: pass "
    "tolerance=5e-2.",
}


@dataclass
class FoldReport:
    """The result of verify_fold; str() says it in words and ends with a remedy. None: not compared.

    A `_where` is (sample, token), counted from 0 in the unfolded samples; `leak_where` is a pair of flat rows.
    """

    samples: int = 0
    tokens_before: int = 0  # of all samples
    tokens_after: int = 0  # rows without padding
    padding: int = 0  # rows of padding
    given_samples: int = 0  # the sequences of samples=
    changed_samples: int | None = None  # samples that differ from the given ones, or are missing
    sample_where: tuple[int, int] | None = None  # the first token that differs
    dtype: torch.dtype = torch.float32  # of logits and parameters, the dtype with the loosest tolerance
    tolerance: float = 0.0  # absolute for log-probabilities, relative for gradients
    noise: float = 0.0  # largest difference between the logits of two equal runs
    nonfinite_rows: int = 0
    wrong_positions: int = 0  # tokens of samples whose position is not their index in the sample
    position_where: tuple[int, int] | None = None  # the first one
    probes: int = 0  # tokens that were changed
    blind_probes: int = 0  # probes that moved nothing inside the subtree either: they prove nothing
    leak: float = 0.0  # largest movement of a logit outside the subtree of a changed token
    rounding: float = 0.0  # tolerance of a leak: a few units in the last place of the largest logit
    leak_where: tuple[int, int] | None = None  # the changed row, the row that moved most
    logprob_error: float | None = None  # largest absolute difference from the samples run alone
    logprob_where: tuple[int, int] | None = None
    targets: int = 0  # supervised tokens of the samples that a row can predict
    unpredictable: int = 0  # supervised first tokens of samples, which no row predicts
    lost_targets: int = 0  # of `targets`, tokens without a loss
    lost_first_tokens: int = 0  # lost targets at a branch point or at the start of a completion
    wrong_targets: int = 0  # (row, target) pairs in the loss that follow in no sample
    extra_targets: int = 0  # pairs in the loss that follow in a sample, but are not supervised
    weight_errors: int = 0  # pairs with a wrong weight
    weight_error: float = 0.0  # the largest, relative to the sum of the absolute weights of the pair
    gradient_error: float | None = None  # |folded - unfolded| / |unfolded|, norms over all parameters
    worst_parameter: tuple[str, float] | None = None  # relative to its norm, at least 1 % of the total norm
    route: str = ""  # how the fold ran, "by segments" or "under a mask", if forward has it as `.route`
    not_compared: str = ""  # the reason if something was not compared

    @property
    def findings(self) -> list[str]:
        """Return the keys of ADVICE that apply, causes first; without checks that were not made."""
        return [name for name, (failed, _) in self._checks().items() if failed]

    @property
    def ok(self) -> bool:
        """Return True if there is no finding."""
        return not self.findings

    def _checks(self) -> dict[str, tuple[bool | None, str]]:
        """Return for each key of ADVICE whether it applies, None if not compared, and the measurement in words."""
        if self.changed_samples:
            others = dict.fromkeys(ADVICE, (None, f"not compared: {self.not_compared}"))
            return {**others, "samples": self._sample_check()}
        first = f"; {self.unpredictable} more are first in their sample, where no row predicts them"
        return {
            "samples": self._sample_check(),
            "determinism": (self.noise > 0, f"logits of two equal runs differ by {self.noise:.3g} at most"),
            "finite logits": (self.nonfinite_rows > 0, f"{self.nonfinite_rows} rows have NaN or infinity"),
            "positions": (
                self.wrong_positions > 0,
                f"{self.wrong_positions} of {self.tokens_before} tokens are not at their index in their sample"
                f"{_at(self.position_where)}",
            ),
            **self._probe_checks(),
            "wrong targets": (self.wrong_targets > 0, f"{self.wrong_targets} that follow their row in no sample"),
            "lost targets": (
                self.lost_targets > 0,
                f"{self.lost_targets} of {self.targets} supervised tokens have no loss, {self.lost_first_tokens} of "
                f"them first in a branch or a completion{first if self.unpredictable else ''}",
            ),
            "extra targets": (self.extra_targets > 0, f"{self.extra_targets} that are supervised in no sample"),
            "weights": (
                self.weight_errors > 0,
                f"{self.weight_errors} pairs of row and target have a wrong one, off by {self.weight_error:.3g} of the "
                "right one at most",
            ),
            "gradients": self._gradient_check(),
        }

    def _sample_check(self) -> tuple[bool | None, str]:
        if self.changed_samples is None:
            return None, "not compared: they were read from the fold; pass samples=, the sequences that were folded"
        counts = f"{self.changed_samples} differ of {self.samples} in the fold and {self.given_samples} given ones"
        return self.changed_samples > 0, f"{counts}{_at(self.sample_where)}"

    def _probe_checks(self) -> dict[str, tuple[bool | None, str]]:
        untried, uncompared = (None, "no token was changed"), (None, f"not compared: {self.not_compared}")
        moved = "" if self.leak_where is None else " (row {1}, by a change of row {0})".format(*self.leak_where)
        outside = f"outside the subtrees of {self.probes} changed tokens logits move by {self.leak:.3g} at most{moved}"
        if 0 < self.leak <= self.rounding:
            outside += ", which is rounding, as of experts that get more or fewer tokens"
        blind = f"{self.blind_probes} of {self.probes} changed tokens move nothing inside their subtree either"
        alone = f"{self.logprob_error or 0:.3g} at most from the samples run alone{_at(self.logprob_where)}"
        return {
            "leaks": (self.leak > self.rounding, outside) if self.probes else untried,
            "blind probes": (self.blind_probes > 0, blind) if self.probes else untried,
            "log-probs": uncompared if self.logprob_error is None else (self.logprob_error > self.tolerance, alone),
        }

    def _gradient_check(self) -> tuple[bool | None, str]:
        if self.gradient_error is None or self.worst_parameter is None:
            return None, f"not compared: {self.not_compared}"
        name, worst = self.worst_parameter
        sentence = f"off by {self.gradient_error:.3g} of their length; worst parameter: {name}, by {worst:.3g}"
        return max(self.gradient_error, worst) > self.tolerance, sentence

    def __str__(self) -> str:
        checks, findings = self._checks(), self.findings
        missing = ", ".join(name for name, (failed, _) in checks.items() if failed is None)
        verdict = f"{len(findings)} of {len(checks)} checks failed" if findings else "ok"
        verdict += f", but not compared: {missing}" if missing and not findings else ""
        nothing = "Nothing to do for what was compared." if missing else "Nothing to do."
        advice = f"What to do: {ADVICE[findings[0]]}" if findings else nothing
        precision = "" if self.changed_samples else f"; {self.dtype}, tolerance {self.tolerance:g}"
        precision += f", {self.route}" if self.route else ""
        padding = f" and {self.padding} of padding" if self.padding else ""
        marks = {True: "FAILED", False: "ok", None: "-"}
        return "\n".join(
            [
                f"{self.samples} samples, {self.tokens_before} tokens folded into {self.tokens_after} rows"
                f"{padding}{precision}: {verdict}",
                *(f"{marks[failed]:8}{name}: {sentence}." for name, (failed, sentence) in checks.items()),
                advice,
            ]
        )


def _at(place: tuple[int, int] | None) -> str:
    return "" if place is None else " (sample {}, token {})".format(*place)


# --- a batch, looked at without a model -------------------------------------------------------------------------------


class Fold(NamedTuple):
    """The layout of a batch as given, and its samples. "sum L": the tokens of all samples, sample by sample."""

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    mask: Tensor  # bool [T, T]
    labels: Tensor | None  # int64 [T]; None for a forest and where edges are given
    node_starts: Tensor  # int64: first rows of nodes
    rows: Tensor  # int64 [sum L]: the row of each token
    samples: PrefixForest  # the same samples with their targets; its layout may differ

    def distinct_rows(self) -> Tensor:
        """Return the rows of samples, all but padding, in rising order."""
        return torch.zeros_like(self.ids).index_fill(0, self.rows, 1).nonzero().squeeze(1)


class Targets(NamedTuple):
    """The supervision that the samples ask for."""

    all: Tensor  # bool [sum L]
    predicted: Tensor  # int64 [M]: targets that a row can predict, as indices into sum L
    weight: Tensor  # float64 [sum L], 0 where nothing is predicted


class Pairs(NamedTuple):
    """The supervision of a batch: its loss is the sum of weight * -logp[row, target] over distinct pairs."""

    row: Tensor  # int64 [E]
    target: Tensor  # int64 [E]
    weight: Tensor  # float64 [E]


def read_fold(batch: Batch, device: torch.device | None, *, needs_labels: bool = True) -> Fold:
    """Return the layout of a batch as given. Another tool's batch gets the targets of its contract."""
    if isinstance(batch, PrefixForest):
        forest = batch if device is None else batch.to(device)
        mask = dense_mask(forest)
        return Fold(forest.input_ids, forest.position_ids, mask, None, forest.node_starts, forest.sample_rows, forest)
    given, lengths, paths = _columns(batch, needs_labels)
    columns = {name: torch.as_tensor(column, device=device).reshape(-1).long() for name, column in given.items()}
    ids, used = columns["input_ids"], sum(lengths)
    if {len(column) for column in columns.values()} != {len(ids)} or len(ids) < used:
        raise FoldError(
            f"there are {', '.join(f'{len(column)} {name}' for name, column in columns.items())}; expected {used} "
            "of each, the sum of node_lengths, or equally many more of each as padding"
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


@errors_as("E801", (TypeError,))
def _columns(
    batch: FoldedRollouts | Mapping[str, Any], needs_labels: bool
) -> tuple[dict[str, Any], list[int], list[list[int]]]:
    """Return the columns of another tool's batch by name, node_lengths, and sample_paths as lists."""
    fields = batch if isinstance(batch, Mapping) else vars(batch)
    names = ["input_ids", "position_ids", *(["labels"] if needs_labels else [])]
    needed = [*names, *(["prefix_tree"] if isinstance(batch, Mapping) else [])]
    missing = [name for name in needed if name not in fields]
    if missing:
        raise FoldError(
            f"the batch, a {type(batch).__name__}, has no {', '.join(missing)}; expected a PrefixForest, a "
            "FoldedRollouts, or what prefix_tree_collate_fn returns, before a backend pops prefix_tree from it"
        )
    lengths, paths = fields["prefix_tree"] if isinstance(batch, Mapping) else (batch.node_lengths, batch.sample_paths)
    columns = {name: fields[name] for name in names}
    return columns, list(map(operator.index, lengths)), [list(map(operator.index, path)) for path in paths]


def expected_targets(fold: Fold, loss_mask: Sequence[Sequence[Any]] | None, weighting: str | Tensor) -> Targets:
    """Return the targets of the samples, or of loss_mask, with the weights of LossEdges.from_forest."""
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
    """Return the pairs in the loss: the given edges, the forest's edges, or the labels with a weight of 1."""
    if edges is None and isinstance(batch, PrefixForest):
        edges = LossEdges.from_forest(batch, weighting=weighting)
    if edges is not None:
        row, target, weight = (column.to(fold.ids.device) for column in (edges.row, edges.target, edges.weight))
    else:
        labels = fold.ids[:0] if fold.labels is None else fold.labels
        row = (labels != ignore_idx).nonzero().squeeze(1)
        target, weight = labels[row], torch.ones_like(row, dtype=torch.float64)
    used = weight != 0
    row, target, weight = row[used], target[used], weight[used]
    if len(row) and (int(row.min()) < 0 or int(row.max()) >= len(fold.ids) or int(target.min()) < 0):
        raise FoldError(
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


def check_samples(fold: Fold, given: Sequence[Any], report: FoldReport) -> None:
    """Compare the samples of the fold with the given ones, in order, and report the first token that differs."""
    folded = [part.tolist() for part in torch.split(fold.ids[fold.rows], fold.samples.sample_lengths.tolist())]
    ids, offsets = concatenated(given, "sample")
    wanted = [ids[start:end].tolist() for start, end in pairwise(offsets)]
    pairs: list[Any] = list(zip_longest(folded, wanted, fillvalue=[]))
    changed = [number for number, (ours, theirs) in enumerate(pairs) if ours != theirs]
    report.given_samples, report.changed_samples = len(wanted), len(changed)
    if changed:
        token = next(at for at, (a, b) in enumerate(zip_longest(*pairs[changed[0]])) if a != b)
        report.sample_where, report.not_compared = (changed[0], token), "the samples differ"


def check_positions(fold: Fold, report: FoldReport) -> None:
    """Count the tokens whose position is not their index in their sample."""
    wrong = (fold.positions[fold.rows] != places(fold.samples.sample_offsets)).nonzero().squeeze(1)
    report.wrong_positions = len(wrong)
    if len(wrong):
        report.position_where = place_of(fold, int(wrong[0]))


def place_of(fold: Fold, index: int) -> tuple[int, int]:
    """Return (sample, token) of an index into sum L."""
    offsets = fold.samples.sample_offsets.tolist()
    sample = bisect_right(offsets, index) - 1
    return sample, index - offsets[sample]


def check_supervision(fold: Fold, targets: Targets, pairs: Pairs, report: FoldReport) -> None:
    """Count lost, wrong and extra targets, and wrong weights."""
    base = 1 + int(torch.cat([pairs.target, fold.ids]).max())
    given = pairs.row * base + pairs.target
    steps = fold.rows.roll(1) * base + fold.ids[fold.rows]  # meaningless at the first token of a sample
    inner = torch.ones_like(targets.all).index_fill(0, fold.samples.sample_offsets[:-1], False)
    supervised, weight = steps[targets.predicted], targets.weight[targets.predicted]
    wanted, sums = _summed(supervised, weight)
    sizes = _summed(supervised, weight.abs())[1]  # advantages may cancel each other
    lost = ~torch.isin(supervised, given) & torch.isin(supervised, wanted[~(sums.abs() <= WEIGHT_TOLERANCE * sizes)])
    begins = torch.isin(fold.rows, fold.node_starts) | ~targets.all.roll(1)
    follows, expected = torch.isin(given, steps[inner]), torch.isin(given, wanted)
    report.targets = len(targets.predicted)
    report.unpredictable = int(targets.all.sum()) - report.targets
    report.lost_targets, report.lost_first_tokens = int(lost.sum()), int((lost & begins[targets.predicted]).sum())
    report.wrong_targets, report.extra_targets = int((~follows).sum()), int((follows & ~expected).sum())
    place = torch.searchsorted(wanted, given[expected])
    weight, right, size = pairs.weight[expected], sums[place], sizes[place]
    error = ((weight - right) / size).abs().masked_fill(weight == right, 0).nan_to_num(nan=math.inf, posinf=math.inf)
    report.weight_errors = int((error > WEIGHT_TOLERANCE).sum())
    report.weight_error = max(error.tolist(), default=0.0)


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
        route = getattr(forward, "route", "")
        report.route = route if isinstance(route, str) else ""
        largest = int(torch.cat([fold.ids, pairs.target]).max())
        if largest >= logits.shape[1]:
            raise FoldError(f"forward returned {logits.shape[1]} logits a row; the batch has the id {largest}")
        # All of them, for a bfloat16 model often converts its logits to float32.
        dtypes = {logits.dtype, *(each.dtype for each in parameters.values() if each.is_floating_point())}
        report.dtype = max(dtypes, key=lambda dtype: TOLERANCES.get(dtype, 0.1))
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
    """Return the rows to change: first rows that some but not all later rows see, from different nodes if possible."""
    rows = fold.distinct_rows()
    seen = fold.mask[rows][:, rows].sum(0)
    later = torch.arange(len(rows), 0, -1, device=rows.device)
    useful = ((seen > 1) & (seen < later)).tolist()
    nodes = torch.searchsorted(fold.node_starts.sort().values, rows, right=True).tolist()
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
        inside[row] = False  # a token always moves its own row, which proves nothing
    report.probes += 1
    report.blind_probes += not bool(moved[inside].any())


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
    # Some gradients are zero up to rounding, such as key biases: compare them with the total norm.
    relative = [_ratio(error, max(length, whole / 100)) for error, length in zip(errors, lengths, strict=True)]
    report.gradient_error = _ratio(math.hypot(*errors), whole)
    report.worst_parameter = max(zip(names, relative, strict=True), key=lambda pair: pair[1])


def _ratio(error: float, length: float) -> float:
    """Return error / length: 0 without an error, infinity if the quotient is not finite."""
    if not error:
        return 0.0
    return error / length if length and math.isfinite(error) else math.inf
