"""Losses of policies and critics on folded rows: clipped ratios with a KL penalty and entropy, and clipped values.

    policy_loss = PolicyLoss("dapo", clip_high=0.28)
    loss, metrics = policy_loss(logp, edges, old_logprobs=old, advantages=advantages, normalizer=total)

Values are per supervised token of each sample, [M], in the order of `sample_logprobs`. Two samples that share a token
have their own old log-prob and advantage for it, so it may be clipped in one of them only. Autograd sums the gradients
of both at the shared row.

A loss is a sum, divided by a `normalizer`. Where a step has several micro-batches or ranks, pass the total of all of
them: their losses then add up to the loss of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.storage.errors import TreeError

LOSS_TYPES = ("grpo", "dapo", "dr_grpo")
Metrics = dict[str, Tensor]
"""Detached scalars: "tokens", which is M, and means over these tokens. Over several forests: weighted by "tokens"."""


@dataclass(frozen=True)
class PolicyLoss:
    """A clipped policy loss. A token with the ratio r and the advantage A has

        -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) * weight + kl_coef * KL - entropy_coef * H

    The loss is a sum of them, divided by a normalizer. The types have TRL's names:

        loss_type       sum                                       normalizer
        "grpo"          over samples, of the mean over tokens     samples
        "dapo"          over tokens                               supervised tokens
        "dr_grpo"       over tokens                               samples * max_completion_length

    "bnpo" of TRL is "dapo" divided by the tokens of the micro-batch, which is the default. TRL's entropy bonus is a
    mean over tokens in all types; here it is summed as the rest is, as in verl.

    Raises: TreeError (E801): another loss_type, or ratio_max below 1 + clip_high.
    """

    loss_type: str  # one of LOSS_TYPES
    clip_low: float = 0.2  # how far r may be below 1
    clip_high: float = 0.2  # how far above 1; 0.28 in DAPO
    ratio_max: float | None = None  # of r, also where A is below 0: TRL's `delta`, verl's `clip_ratio_c`
    sequence_ratio: bool = False  # r is exp of the mean of log ratios over the sample (GSPO), not the token's own
    kl_coef: float = 0.0  # of exp(d) - d - 1, with d = ref_logprobs - logprobs: TRL's `beta`, the estimator k3
    kl_times_ratio: bool = False  # KL times r: its gradient is unbiased. TRL's `use_bias_correction_kl`, True there
    entropy_coef: float = 0.0  # of the entropy H

    def __post_init__(self) -> None:
        _check_type(self.loss_type)
        if self.ratio_max is not None and self.ratio_max < 1 + self.clip_high:
            raise TreeError(f"ratio_max is {self.ratio_max}; expected 1 + clip_high, {1 + self.clip_high}, or more")

    def __call__(
        self,
        logprobs: Tensor,
        edges: LossEdges,
        *,
        old_logprobs: Tensor | None,
        advantages: Tensor,
        ref_logprobs: Tensor | None = None,
        entropies: Tensor | None = None,
        weights: Tensor | None = None,
        normalizer: float | Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Return the loss, a scalar with the dtype of logprobs, but float32 at least, and its metrics.

        Args:
            logprobs: [M], of `sample_logprobs`.
            old_logprobs: [M], of the policy that drew the samples; None: of this one, so that r is 1, with a gradient.
            advantages: [M]; from one for each sample by `edges.field(..., per="sample")` or `PaddedRollouts.fold`.
            ref_logprobs: [M], of the reference. Required where kl_coef is not 0.
            entropies: [M], of `edge_logprobs(..., entropies=True)`. Required where entropy_coef is not 0.
            weights: [M], factors of the clipped term alone, such as corrections for the sampler's own log-probs; 0
                leaves a token out. They do not change the normalizer.
            normalizer: default: the samples of the forest for "grpo", its supervised tokens for "dapo". Required for
                "dr_grpo". DistributedDataParallel and FSDP2 average over ranks: divide the total by their number.

        The metrics: "clip_low", the share of tokens with r below the range and A below 0; "clip_high", with r above it
        and A above 0; "kl" and "entropy" where ref_logprobs and entropies are given.

        Raises:
            TreeError (E801): a shape other than [M], a coefficient without its values, or no normalizer where it is
                required or the forest has no supervised token.
        """
        given = {"old_logprobs": old_logprobs, "advantages": advantages, "ref_logprobs": ref_logprobs}
        given |= {"entropies": entropies, "weights": weights}
        logprobs, old, gain, ref, entropy, factor = _columns(logprobs, edges, given)
        if (self.kl_coef and ref is None) or (self.entropy_coef and entropy is None):
            raise TreeError("kl_coef needs ref_logprobs, and entropy_coef needs entropies")
        change = logprobs - (logprobs.detach() if old is None else old)
        ratio = (_sample_means(change, edges)[edges.sample] if self.sequence_ratio else change).exp()
        loss, means = self._clipped(ratio, gain)
        loss = loss if factor is None else loss * factor
        if ref is not None:
            kl = (ref - logprobs).expm1() - (ref - logprobs)
            means["kl"] = kl * ratio if self.kl_times_ratio else kl
            loss = loss + self.kl_coef * means["kl"] if self.kl_coef else loss
        if entropy is not None:
            means["entropy"] = entropy
            loss = loss - self.entropy_coef * entropy if self.entropy_coef else loss
        return _reduced(loss, edges, self.loss_type, normalizer), _metrics(means, logprobs)

    def _clipped(self, ratio: Tensor, gain: Tensor) -> tuple[Tensor, Metrics]:
        """Return the clipped term of each token [M], and which tokens are clipped."""
        least, most = 1 - self.clip_low, 1 + self.clip_high
        clips = {"clip_low": (ratio < least) & (gain < 0), "clip_high": (ratio > most) & (gain > 0)}
        limited = ratio if self.ratio_max is None else ratio.clamp(max=self.ratio_max)
        return -torch.minimum(limited * gain, ratio.clamp(least, most) * gain), clips


def value_loss(
    values: Tensor,
    edges: LossEdges,
    *,
    old_values: Tensor,
    returns: Tensor,
    loss_type: str,
    normalizer: float | Tensor | None = None,
    clip: float | None = 0.2,
) -> tuple[Tensor, Metrics]:
    """Return the clipped loss of a critic, a scalar with the dtype of values, but float32 at least, and its metrics.

    A token's loss is max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2, as in PPO of TRL and verl.

    Args:
        values: [M], the values of the rows that predict the tokens: `at_predictions(value_head(hidden)[..., 0], edges)`
            with hidden states [T, D]. The value head sees each row once.
        old_values, returns: [M].
        loss_type, normalizer: as in `PolicyLoss`.
        clip: None does not clip.

    The metrics: "clip_share", the share of tokens whose clipped loss is the larger one; "value", the mean of values.

    Raises: TreeError (E801): another loss_type, and as `PolicyLoss` does.
    """
    _check_type(loss_type)
    values, old, target = _columns(values, edges, {"old_values": old_values, "returns": returns})
    loss = (values - target).square()
    means = {"value": values}
    if clip is not None:
        clipped = (old + (values - old).clamp(-clip, clip) - target).square()
        means["clip_share"] = clipped > loss
        loss = torch.maximum(loss, clipped)
    return _reduced(loss / 2, edges, loss_type, normalizer), _metrics(means, values)


def _check_type(loss_type: str) -> None:
    if loss_type not in LOSS_TYPES:
        raise TreeError(f"loss_type is {loss_type!r}; expected one of {', '.join(LOSS_TYPES)}")


def _columns(mine: Tensor, edges: LossEdges, given: dict[str, Tensor | None]) -> list[Any]:
    """Return mine and the given columns with its dtype, but float32 at least, on its device; and None for None."""
    columns = {"the first argument": mine, **given}
    for name, column in columns.items():
        if column is not None and column.shape != edges.sample_edge.shape:
            raise TreeError(
                f"{name} has shape {list(column.shape)}; expected [{edges.num_loss_tokens}], a value for each "
                "supervised token, as of sample_logprobs. edges.field and PaddedRollouts.fold bring values there"
            )
    dtype = torch.promote_types(mine.dtype, torch.float32)  # a sum, and a count of tokens, needs more than bfloat16
    return [column if column is None else column.to(mine.device, dtype) for column in columns.values()]


def _sample_means(values: Tensor, edges: LossEdges) -> Tensor:
    """Return the mean over the supervised tokens of each sample: [S]; 0 for a sample without one."""
    counts = edges.sample_offsets.diff()
    return values.new_zeros(len(counts)).index_add(0, edges.sample, values) / counts.clamp(min=1)


def _reduced(loss: Tensor, edges: LossEdges, loss_type: str, normalizer: float | Tensor | None) -> Tensor:
    if normalizer is None and (loss_type == "dr_grpo" or not len(loss)):
        raise TreeError(
            "pass what the sum is divided by as `normalizer`: samples * max_completion_length for dr_grpo; the total "
            "of the step where these samples have no supervised token"
        )
    parts = _sample_means(loss, edges) if loss_type == "grpo" else loss
    return (parts.sum() / (len(parts) if normalizer is None else normalizer)).to(loss)


@torch.no_grad()
def _metrics(means: dict[str, Tensor], like: Tensor) -> Metrics:
    tokens = like.new_tensor(float(len(like)))
    return {"tokens": tokens} | {name: column.to(like).sum() / tokens.clamp(min=1) for name, column in means.items()}
