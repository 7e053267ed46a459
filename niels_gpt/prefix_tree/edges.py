"""Supervision of a folded row as (row, target) pairs, so that no target is lost where samples part.

    row        0  1  2  3  4  5  6      the last row of the prompt predicts the first token of every completion:
    input_ids  1  2 10 11 20 21 22      edges (1, 10) (1, 20) (2, 11) (4, 21) (5, 22)

One label per row has room for one of them, and `fold_shared_prefix_rollouts` leaves both out. An edge that several
samples share is one row of logits and one log-prob, weighted by how often the samples use it; a loss that is not linear
in log-probs takes them by sample, from `sample_logprobs`, and autograd adds the shares up.

Values per sample and token (advantages, old log-probs, masks) never stand at rows: two samples may have different ones
for one edge. `LossEdges.field` brings them into the order of `sample_edge`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from niels_gpt.prefix_tree.fields import in_order, owners, right_padded
from niels_gpt.prefix_tree.forest import PrefixForest

WEIGHTINGS = ("per_sample", "sample_mean", "unique")


@dataclass(frozen=True, eq=False, repr=False)
class LossEdges:
    """E edges that M supervised tokens of S samples use; ragged fields stand sample after sample."""

    row: Tensor  # int64 [E], rising: the flat row whose logits predict the target
    target: Tensor  # int64 [E]
    weight: Tensor  # float64 [E], the sum of the weights of the tokens that use the edge
    sample_edge: Tensor  # int64 [M], the edge of each supervised token
    sample_offsets: Tensor  # int64 [S + 1], where a sample begins in sample_edge
    sample_token: Tensor  # int64 [M], the token's place in a field with a value for each token of each sample
    field_offsets: Tensor  # int64 [S + 1], where a sample begins in such a field
    completion_starts: Tensor  # int64 [S], tokens of a sample before its completion; -1 where that was not said
    num_rows: int  # T, padding included
    unpredictable: int  # targets that are the first token of their sample: no row predicts them
    weighting: str  # one of WEIGHTINGS, or "given"

    @classmethod
    @torch.inference_mode(False)  # rollouts are made in that mode, and its tensors could not be used in training
    def from_forest(cls, forest: PrefixForest, *, weighting: Any = "per_sample") -> LossEdges:
        """Return an edge for each flat token that is a target of some sample, and the tokens that use it.

        Args:
            forest: its `loss_mask` says which tokens are targets. Pad it before.
            weighting: "per_sample": each supervised token of each sample counts 1, as in a batch that is not folded.
                "sample_mean": 1 / (supervised tokens of its sample), so that each sample counts 1. "unique": each edge
                counts 1, however many samples use it, as fits a tree of messages. Or weights of one's own, in any form
                that `field` takes, for a loss that is linear in log-probs.

        Raises:
            ValueError: another weighting.
        """
        rows, offsets, ids = (
            x.numpy(force=True) for x in (forest.sample_rows, forest.sample_offsets, forest.input_ids)
        )
        wanted = forest.loss_mask.numpy(force=True).copy()
        at_start = wanted[offsets[:-1]]
        wanted[offsets[:-1]] = False
        sample_token = np.flatnonzero(wanted)
        sample_offsets = sample_token.searchsorted(offsets)
        tokens = rows.take(sample_token)
        is_target = np.zeros(len(ids), dtype=np.bool_)
        is_target[tokens] = True
        targets = np.flatnonzero(is_target)
        above = forest.rows_above.numpy(force=True)
        targets = targets[above[targets].argsort(kind="stable")]
        edge = np.empty(len(ids), dtype=np.int64)
        edge[targets] = np.arange(len(targets))
        edges = cls(
            row=torch.from_numpy(above[targets]),
            target=torch.from_numpy(ids[targets]),
            weight=torch.zeros(len(targets), dtype=torch.float64),
            sample_edge=torch.from_numpy(edge.take(tokens)),
            sample_offsets=torch.from_numpy(sample_offsets),
            sample_token=torch.from_numpy(sample_token),
            field_offsets=torch.from_numpy(offsets),
            completion_starts=forest.completion_starts,
            num_rows=len(ids),
            unpredictable=int(at_start.sum()),
            weighting=weighting if isinstance(weighting, str) else "given",
        ).to(forest.input_ids.device)
        if edges.weighting == "per_sample":  # what the lines below come to, in a third of the time
            return replace(edges, weight=edges.sample_edge.bincount(minlength=edges.num_edges).double())
        weights = edges.token_weights(weighting)
        return replace(edges, weight=edges.weight.index_add(0, edges.sample_edge, weights))

    def token_weights(self, weighting: Any) -> Tensor:
        """Return the weight of each supervised token under a weighting, as in `from_forest`: float64 [M]."""
        counts = self.sample_offsets.diff()
        if not isinstance(weighting, str):
            return self.field(weighting).to(self.weight)
        if weighting == "per_sample":
            return self.weight.new_ones(self.num_loss_tokens)
        if weighting == "sample_mean":
            return 1 / counts[self.sample].double()
        if weighting == "unique":
            return 1 / self.sample_edge.bincount().double()[self.sample_edge]
        raise ValueError(f"weighting is {weighting!r}; expected one of {', '.join(WEIGHTINGS)}, or weights")

    @property
    def num_edges(self) -> int:
        """E, the log-probs that are computed."""
        return len(self.row)

    @property
    def num_loss_tokens(self) -> int:
        """M, the supervised tokens of all samples: what a mean over tokens divides by."""
        return len(self.sample_edge)

    @property
    def sample(self) -> Tensor:
        """Return the sample of each supervised token, int64 [M]."""
        return owners(self.sample_offsets)

    @property
    def rows(self) -> Tensor:
        """Return the distinct rows that predict something, int64, rising: all that a head has to see."""
        rows: Tensor = torch.unique_consecutive(self.row)
        return rows

    def __repr__(self) -> str:
        """Name the sizes: `LossEdges(5 edges for 5 supervised tokens, per_sample)`."""
        return f"LossEdges({self.num_edges} edges for {self.num_loss_tokens} supervised tokens, {self.weighting})"

    def to(self, device: torch.device | str) -> LossEdges:
        """Return the edges with every tensor on a device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return LossEdges(**{**vars(self), **moved})

    def field(self, values: Any, *, per: str | None = None) -> Tensor:
        """Return values per sample, or per sample and token, in the order of `sample_edge`: [M], differentiable.

        Args:
            values: numbers in one axis, sample after sample; or [S] rows, as a list; or one tensor of rows [S, W] that
                are padded on the right to any width.
            per: what there is a value for. "sample": each sample, such as a group-normalised advantage. "token": each
                token of each sample. "completion": each token of each completion, from its first one on, be it a
                target or not; a forest of `from_rollout_group` knows where that is, one of `from_sequences` by its
                `prompt_lengths`. "target": each supervised token, as `sample_logprobs` has them. Default: what the
                sizes say; a padded tensor's say nothing.

        Raises:
            ValueError: the sizes fit nothing, or several that differ; per="completion" of a forest that was not told
                where completions begin.
            TypeError: a mapping or text.
        """
        return in_order(values, self, per)


def edge_logprobs(
    hidden_or_logits: Tensor,
    edges: LossEdges,
    lm_head: Callable[[Tensor], Tensor] | None = None,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """Return the log-prob of each edge's target at its row: [E], float32, or float64 for float64 logits.

    Args:
        hidden_or_logits: [T, D] or [1, T, D]: logits, or what `lm_head` turns into logits.
        lm_head: applied to the rows of edges only, each once, however many targets it has. For a model that scales or
            caps its logits, `logits_head(model)` of niels_gpt.prefix_tree.heads.
        temperature: divides the logits.
        chunk: with an lm_head, rows whose logits are in memory at a time, in the backward pass too, which computes each
            chunk again.

    Raises:
        ValueError: the rows are not those of the forest, or chunk or temperature is no number to work with.
    """
    if chunk < 1 or temperature <= 0:
        raise ValueError(f"chunk is {chunk} and temperature {temperature}; expected 1 or more, and a number above 0")
    rows, uses = torch.unique_consecutive(edges.row, return_counts=True)
    picked = _flat(hidden_or_logits, edges.num_rows)[rows]
    again = lm_head is not None and torch.is_grad_enabled() and len(rows) > chunk

    def logprobs(part: Tensor, row: Tensor, target: Tensor) -> Tensor:
        logits = part if lm_head is None else lm_head(part)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if temperature == 1 else logits / temperature
        return logits[row, target] - logits.logsumexp(-1)[row]

    found: list[Tensor] = []
    done = 0
    for part, counts in zip(torch.split(picked, chunk), torch.split(uses, chunk), strict=True):  # one at least
        row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        target = edges.target[done : done + len(row)]
        done += len(row)
        if again:
            found.append(checkpoint(logprobs, part, row, target, use_reentrant=False))
        else:
            found.append(logprobs(part, row, target))
    return torch.cat(found)


def sample_logprobs(edge_logp: Tensor, edges: LossEdges, *, pad: float | None = None) -> Tensor:
    """Return the log-prob of each supervised token by sample: [M], or [S, most targets] filled up with `pad`.

    Args:
        edge_logp: [E], of `edge_logprobs`, or any other value per edge.

    Raises:
        ValueError: another shape.
    """
    if edge_logp.shape != (edges.num_edges,):
        raise ValueError(f"edge_logp has shape {list(edge_logp.shape)}; expected [{edges.num_edges}], of edge_logprobs")
    ragged = edge_logp[edges.sample_edge]
    return ragged if pad is None else right_padded(ragged, edges.sample_offsets, pad)


def folded_cross_entropy(
    hidden_or_logits: Tensor,
    edges: LossEdges,
    lm_head: Callable[[Tensor], Tensor] | None = None,
    *,
    normalizer: float | Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """Return sum(weight * -logp) / normalizer, a scalar: what the samples, not folded, give under the same weights.

    Args:
        normalizer: default: the sum of weights, which is the mean over supervised tokens for "per_sample", over samples
            for "sample_mean", and over edges for "unique". Where a batch has several rows or ranks, give the number of
            all of them (and undo what averages over ranks). Needed for weights of one's own: the sum of advantages is
            no number to divide by.

    The other arguments are those of `edge_logprobs`.

    Raises:
        ValueError: without a normalizer, weights of one's own, or nothing that is supervised: the mean of nothing. With
            one, such a row gives 0 and zero gradients, as a rank with nothing to learn needs.
    """
    if normalizer is None and edges.weighting == "given":
        raise ValueError("the weights are your own: say what the sum is divided by, as in normalizer=len(samples)")
    if normalizer is None and not edges.num_edges:
        raise ValueError("no token is supervised: no sample has a target behind its first token. Give a normalizer")
    logp = edge_logprobs(hidden_or_logits, edges, lm_head, temperature=temperature, chunk=chunk)
    weight = edges.weight.to(logp)
    return -(weight * logp).sum() / (weight.sum() if normalizer is None else normalizer)


def unfold(x: Tensor, forest: PrefixForest, *, pad: float | None = None) -> Tensor:
    """Return what a folded row has for every token of every sample, differentiable.

    The value at a token is what the model makes of the sample up to it. What it says before it, such as a critic's
    value beside a log-prob, is `at_predictions`.

    Args:
        x: [T, ...] or [1, T, ...], such as hidden states, logits, or values of a critic.
        pad: None gives them ragged, [sum of sample lengths, ...]; a number gives [S, longest sample, ...], filled up.
    """
    ragged = _flat(x, len(forest.input_ids))[forest.sample_rows]
    return ragged if pad is None else right_padded(ragged, forest.sample_offsets, pad)


def at_predictions(x: Tensor, edges: LossEdges) -> Tensor:
    """Return what a folded row has at the rows that predict the supervised tokens: [M, ...], beside `sample_logprobs`.

    Args:
        x: [T, ...] or [1, T, ...], such as values of a critic or entropies.
    """
    return _flat(x, edges.num_rows)[edges.row[edges.sample_edge]]


def _flat(x: Tensor, rows: int) -> Tensor:
    """Return [T, ...] for [T, ...] or [1, T, ...], with T rows exactly: edges of another row would fit too."""
    if x.shape[:2] == (1, rows):
        return x[0]
    if x.ndim == 0 or x.shape[0] != rows:
        raise ValueError(f"got a tensor of shape {list(x.shape)}; expected [{rows}, ...] or [1, {rows}, ...]: T rows")
    return x
