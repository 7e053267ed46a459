"""What verify_fold found, as numbers and in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# What may be wrong, causes before what follows from them, and what to do about it.
ADVICE = {
    "samples": "Fold the sequences as they are and in their order, none left out; cut padding off before.",
    "determinism": "Switch dropout off (model.eval()); until two equal runs agree nothing else can be compared.",
    "finite logits": "Let every row attend at least to itself, padding too (softmax over nothing is NaN), and look for "
    "overflow in half precision.",
    "positions": "Number the tokens of a node on from the end of its parent: every branch restarts at its depth.",
    "leaks": "Give the model the tree's mask in the form that its attention reads, as "
    "niels_gpt.prefix_tree.attention.model_inputs(forest, model) does; an attention that ignores masks cannot be used.",
    "blind probes": "See that the forward uses its ids, and that a token may attend to the ones before it.",
    "log-probs": "Compare the mask and the positions that reach the attention with the given ones: a branch sees all "
    "its ancestors, at its depth. An error near 1e-8 in float64 comes from norms and rotary angles that the model "
    "computes in float32: pass tolerance=1e-6. Half precision inside (autocast too) costs about 1e-2: pass "
    "tolerance=5e-2. In a mixture of experts, rounding can send a token to another expert: compare in float64.",
    "wrong targets": "Shift labels once: the row of token t has the id of token t + 1 of the same sample.",
    "lost targets": "Use (row, target) pairs instead of a label per row: with LossEdges.from_forest a branch row "
    "predicts the first token of every child.",
    "extra targets": "Take them out of the loss, or pass loss_mask= if they are targets.",
    "weights": "Weigh a pair that samples share by the sum of their tokens' weights, as LossEdges does, or pass "
    "weighting= if another one is meant.",
    "gradients": "Where all else is ok, the backward pass is not that of the forward pass: look for detached tensors, "
    "and for an attention whose backward ignores the mask. An error near 1e-7 in float64 comes from norms and rotary "
    "angles that the model computes in float32: pass tolerance=1e-6; one near 1e-2 from half precision inside: pass "
    "tolerance=5e-2.",
}


@dataclass
class FoldReport:
    """What verify_fold found; str() is the same in words, and ends with what to do. None: was not compared.

    A place is (sample, token), counted from 0 in the unfolded samples, or a flat row of the fold.
    """

    samples: int = 0
    tokens_before: int = 0  # of all samples
    tokens_after: int = 0  # rows that belong to samples: without padding
    padding: int = 0  # rows that belong to none
    given_samples: int = 0  # sequences that the samples of the fold were compared with
    changed_samples: int | None = None  # samples that are not the given one of their number, lost and added ones too
    sample_where: tuple[int, int] | None = None  # the first token that differs
    dtype: torch.dtype = torch.float32  # the coarsest of those of the logits and the parameters
    tolerance: float = 0.0  # absolute for log-probabilities, relative for gradients
    noise: float = 0.0  # largest difference between the logits of two equal runs
    nonfinite_rows: int = 0
    wrong_positions: int = 0  # tokens of samples whose position is not their index in the sample
    position_where: tuple[int, int] | None = None  # the first of them
    probes: int = 0  # tokens that were changed
    blind_probes: int = 0  # probes that moved nothing inside the subtree either, and prove nothing
    leak: float = 0.0  # largest movement of a logit outside the subtree of a changed token
    rounding: float = 0.0  # a leak up to this is none: a few units in the last place of the largest logit
    leak_where: tuple[int, int] | None = None  # the changed row, the row that moved most
    logprob_error: float | None = None  # largest absolute difference from the samples run alone
    logprob_where: tuple[int, int] | None = None
    targets: int = 0  # supervised tokens of the samples that a row can predict
    unpredictable: int = 0  # supervised tokens that are the first of their sample: no row predicts them
    lost_targets: int = 0  # of `targets`, those without a loss
    lost_first_tokens: int = 0  # of the lost ones, those behind a branch point or at the start of a completion
    wrong_targets: int = 0  # (row, target) pairs in the loss that follow in no sample
    extra_targets: int = 0  # pairs in the loss that follow in a sample, but are not supervised
    weight_errors: int = 0  # pairs with a wrong weight
    weight_error: float = 0.0  # the largest, relative to the weights that make the right one, without their signs
    gradient_error: float | None = None  # |folded - unfolded| / |unfolded|, norms over all parameters
    worst_parameter: tuple[str, float] | None = None  # relative to its own norm, or 1 % of the whole if that is more
    not_compared: str = ""  # why something was not

    @property
    def findings(self) -> list[str]:
        """Return the keys of ADVICE that apply, the most important first. What was not compared is none."""
        return [name for name, (failed, _) in self._checks().items() if failed]

    @property
    def ok(self) -> bool:
        """Return whether there is no finding."""
        return not self.findings

    def _checks(self) -> dict[str, tuple[bool | None, str]]:
        """Return for every key of ADVICE whether it applies, None for not compared, and what was found."""
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
            return None, "not compared: they are taken from the fold; pass samples=, the sequences that were folded"
        counts = f"{self.changed_samples} differ of {self.samples} in the fold and {self.given_samples} given ones"
        return self.changed_samples > 0, f"{counts}{_at(self.sample_where)}"

    def _probe_checks(self) -> dict[str, tuple[bool | None, str]]:
        untried = (None, "no token was changed")
        uncompared = (None, f"not compared: {self.not_compared}")
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
        checks, found = self._checks(), self.findings
        missing = ", ".join(name for name, (failed, _) in checks.items() if failed is None)
        verdict = f"{len(found)} of {len(checks)} checks failed" if found else "ok"
        verdict += f", but not compared: {missing}" if missing and not found else ""
        advice = f"What to do: {ADVICE[found[0]]}" if found else "Nothing to do."
        if missing and not found:
            advice = "Nothing to mend in what was compared."
        precision = "" if self.changed_samples else f"; {self.dtype}, tolerance {self.tolerance:g}"
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
