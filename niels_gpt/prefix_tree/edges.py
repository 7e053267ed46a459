"""LossEdges: the supervision of a folded row as (row, target) pairs, so that no target is lost at a branch point.

    row        0  1  2  3  4  5  6      the last row of the prompt predicts the first token of every completion:
    input_ids  1  2 10 11 20 21 22      edges (1, 10) (1, 20) (2, 11) (4, 21) (5, 22)

One label per row could hold only one of them, and `fold_shared_prefix_rollouts` leaves both out. An edge that several
samples share is one row of logits and one log-prob, weighted by the samples that use it. A loss that is not linear in
log-probs, such as a clipped ratio, takes them per sample from `sample_logprobs`; autograd sums their gradients.

Values per sample and token (advantages, old log-probs, masks) are never stored per row: two samples may have different
values for one edge. `LossEdges.field` puts them into the order of `sample_edge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from niels_gpt.prefix_tree.fields import PER, by_target, forms_of, right_padded, samples_of
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.storage.errors import TreeError

WEIGHTINGS = ("per_sample", "sample_mean", "unique")


@dataclass(frozen=True, eq=False, repr=False)
class LossEdges:
    """E edges that M supervised tokens of S samples use. Ragged fields are stored sample by sample."""

    row: Tensor  # int64 [E], rising: the flat row whose logits predict the target
    target: Tensor  # int64 [E]
    weight: Tensor  # float64 [E], the sum of the weights of the tokens that use the edge
    sample_edge: Tensor  # int64 [M], the edge of each supervised token
    sample_offsets: Tensor  # int64 [S + 1], where a sample begins in sample_edge
    sample_token: Tensor  # int64 [M], the token's index in a field with a value for each token of each sample
    field_offsets: Tensor  # int64 [S + 1], where a sample begins in such a field
    completion_starts: Tensor  # int64 [S], tokens of a sample before its completion; -1 where it is not known
    num_rows: int  # T, padding included
    unpredictable: int  # targets that are the first token of their sample: no row predicts them
    weighting: str  # one of WEIGHTINGS, or "given"

    @classmethod
    @torch.inference_mode(False)  # edges made while rollouts are generated must be usable in training
    def from_forest(cls, forest: PrefixForest, *, weighting: Any = "per_sample") -> LossEdges:
        """Return an edge for each flat token that is a target of some sample, and the tokens that use it.

        Args:
            forest: its `loss_mask` says which tokens are targets. Pad it first.
            weighting: "per_sample": each supervised token of each sample counts 1, as in a batch that is not folded.
                "sample_mean": 1 / (supervised tokens of its sample), so that each sample counts 1. "unique": each edge
                counts 1, however many samples use it, as for a tree of messages. Or weights, in any form that `field`
                takes, for a loss that is linear in log-probs.

        Raises:
            TreeError (E801): another weighting, or weights that do not fit.
        """
        rows, offsets, ids = (
            x.numpy(force=True) for x in (forest.sample_rows, forest.sample_offsets, forest.input_ids)
        )
        wanted = forest.loss_mask.numpy(force=True).copy()
        at_start = wanted[offsets[:-1]]
        wanted[offsets[:-1]] = False
        (sample_token,) = wanted.nonzero()
        sample_offsets = sample_token.searchsorted(offsets)
        tokens = rows.take(sample_token)
        is_target = np.zeros(len(ids), dtype=np.bool_)
        is_target[tokens] = True
        # A flat token is one edge, from the row above it, whatever samples use it. Edges are ordered by row, so that
        # `edge_logprobs` takes the logits of a row once; a stable sort keeps the children of a branch in their order.
        (targets,) = is_target.nonzero()
        above = forest.rows_above.numpy(force=True)
        targets = targets[above.take(targets).argsort(kind="stable")]
        edge = np.empty(len(ids), dtype=np.int64)
        edge[targets] = np.arange(len(targets))
        used = edge.take(tokens)
        uses = np.bincount(used, minlength=len(targets)).astype(np.float64)
        edges = cls(
            row=torch.from_numpy(above.take(targets)),
            target=torch.from_numpy(ids.take(targets)),
            weight=torch.from_numpy(uses),
            sample_edge=torch.from_numpy(used),
            sample_offsets=torch.from_numpy(sample_offsets),
            sample_token=torch.from_numpy(sample_token),
            field_offsets=torch.from_numpy(offsets),
            completion_starts=forest.completion_starts,
            num_rows=len(ids),
            unpredictable=int(at_start.sum()),
            weighting=weighting if isinstance(weighting, str) else "given",
        )
        edges = edges if forest.input_ids.is_cpu else edges.to(forest.input_ids.device)
        if edges.weighting == "per_sample":  # each use counts 1
            return edges
        weights = edges.token_weights(weighting)
        return replace(edges, weight=torch.zeros_like(edges.weight).index_add(0, edges.sample_edge, weights))

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
        raise TreeError(f"weighting is {weighting!r}; expected one of {', '.join(WEIGHTINGS)}, or weights")

    @property
    def num_edges(self) -> int:
        """Return E, the number of log-probs that are computed."""
        return len(self.row)

    @property
    def num_loss_tokens(self) -> int:
        """Return M, the number of supervised tokens of all samples: a mean over tokens divides by it."""
        return len(self.sample_edge)

    @property
    def sample(self) -> Tensor:
        """Return the sample of each supervised token, int64 [M]."""
        return samples_of(self.sample_offsets)

    @property
    def rows(self) -> Tensor:
        """Return the distinct rows that predict a target, int64, rising: the only ones that the head needs."""
        rows: Tensor = torch.unique_consecutive(self.row)
        return rows

    def __repr__(self) -> str:
        """Return the sizes: `LossEdges(5 edges for 5 supervised tokens, per_sample)`."""
        return f"LossEdges({self.num_edges} edges for {self.num_loss_tokens} supervised tokens, {self.weighting})"

    def to(self, device: torch.device | str) -> LossEdges:
        """Return the edges with every tensor on a device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return LossEdges(**{**vars(self), **moved})

    def field(self, values: Any, *, per: str | None = None) -> Tensor:
        """Return values per sample, or per sample and token, in the order of `sample_edge`: [M], differentiable.

        Args:
            values: numbers in one axis, sample by sample; or a list of S rows; or one tensor of rows [S, W], padded on
                the right to any width. Python's floats become float64; tensors and arrays keep their dtype. `.to(logp)`
                brings the result to the dtype of log-probs.
            per: each value belongs to: "sample": a sample, such as a group-normalised advantage. "token": a token of a
                sample. "completion": a token of a completion, target or not; needs a forest of `from_rollout_group`, or
                of `from_sequences` with `prompt_lengths`. "target": a supervised token, as in `sample_logprobs`.
                Default: inferred from the sizes, but not of a padded tensor. Sizes that differ in one batch may be
                equal in another, where inferring is refused: a loss should pass `per`.

        Raises:
            TreeError (E801): the sizes fit none of these, or several that differ; per="completion" with a forest that
                does not know where completions begin.
            TreeTypeError (E801): values is a mapping or text, or holds something other than numbers.
        """
        if per is not None and per not in PER:
            raise TreeError(f"per is {per!r}; expected one of {', '.join(PER)}")
        sample = self.sample
        forms = forms_of(self.field_offsets, self.sample_offsets, self.sample_token, self.completion_starts, sample)
        forms = {name: form for name, form in forms.items() if per in (None, name)}
        if not forms:
            if bool((self.completion_starts >= 0).all()):
                raise TreeError("per is 'completion', but a target lies in a prompt: give values per='token'")
            raise TreeError(
                "per is 'completion', but the forest does not know where completions begin, and a loss mask does not "
                "tell: the first token of one need not be a target. Make the forest by from_rollout_group, or by "
                "from_sequences with prompt_lengths; or give a value for each token of each sample (per='token')"
            )
        return by_target(values, sample, forms)


@overload
def edge_logprobs(
    hidden_or_logits: Tensor,
    edges: LossEdges,
    lm_head: Callable[[Tensor], Tensor] | None = None,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropies: Literal[False] = False,
) -> Tensor: ...


@overload
def edge_logprobs(
    hidden_or_logits: Tensor,
    edges: LossEdges,
    lm_head: Callable[[Tensor], Tensor] | None = None,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropies: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def edge_logprobs(
    hidden_or_logits: Tensor,
    edges: LossEdges,
    lm_head: Callable[[Tensor], Tensor] | None = None,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropies: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-prob of each edge's target at its row: [E], float32, or float64 for float64 logits.

    Args:
        hidden_or_logits: [T, D] or [1, T, D]: logits, or hidden states for `lm_head`.
        lm_head: from hidden states [rows, D] to logits [rows, V]. Runs once on each row that has an edge.
            `body_forward` of niels_gpt.prefix_tree.heads returns it with the hidden states.
        temperature: divides the logits.
        chunk: with an lm_head, how many rows have their logits in memory at a time. The backward pass recomputes each
            chunk.
        entropies: return (log-probs [E], entropies [E]). An entropy, in nats, belongs to the distribution that predicts
            the target, at the same temperature, of the same dtype and with its gradient. A logit of -inf counts 0.
            Edges of one row have equal entropies, and `sample_logprobs` gives them by token.

    Raises:
        TreeError (E801): T differs from the forest's, chunk is below 1, or temperature is not a number above 0.
    """
    if chunk < 1 or not 0 < temperature < math.inf:
        raise TreeError(f"chunk is {chunk} and temperature {temperature}; expected 1 or more, and a number above 0")
    rows, uses = torch.unique_consecutive(edges.row, return_counts=True)
    picked = _flat(hidden_or_logits, edges.num_rows)[rows]
    recompute = lm_head is not None and torch.is_grad_enabled() and len(rows) > chunk

    def values(part: Tensor, row: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = part if lm_head is None else lm_head(part)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if temperature == 1 else logits / temperature
        total = logits.logsumexp(-1)
        logp = logits[row, target] - total[row]
        if not entropies:
            return (logp,)
        # Recomputed in the backward pass, so that no probabilities are kept beside the logits.
        return logp, checkpoint(_entropy, logits, use_reentrant=False, preserve_rng_state=False)[row]

    parts: list[tuple[Tensor, ...]] = []
    done = 0
    for part, counts in zip(torch.split(picked, chunk), torch.split(uses, chunk), strict=True):  # at least one
        row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        target = edges.target[done : done + len(row)]
        done += len(row)
        if recompute:
            parts.append(checkpoint(values, part, row, target, use_reentrant=False))
        else:
            parts.append(values(part, row, target))
    logp, *entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return (logp, entropy[0]) if entropies else logp


def _entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each row [rows] of logits [rows, V]."""
    logp = logits.log_softmax(-1)
    probs = logp.exp()
    return -(probs * logp.masked_fill(probs == 0, 0)).sum(-1)  # 0 log 0 is 0: no NaN for -inf, nor in its gradient


def sample_logprobs(edge_logp: Tensor, edges: LossEdges, *, pad: float | None = None) -> Tensor:
    """Return the log-prob of each supervised token by sample: [M], or [S, most targets] padded with `pad`.

    Args:
        edge_logp: [E], from `edge_logprobs`, or any other value per edge, such as its entropies.

    Raises:
        TreeError (E801): another shape.
    """
    if edge_logp.shape != (edges.num_edges,):
        raise TreeError(f"edge_logp has shape {list(edge_logp.shape)}; expected [{edges.num_edges}], of edge_logprobs")
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
    """Return sum(weight * -logp) / normalizer, a scalar: the loss of the unfolded samples under the same weights.

    Args:
        normalizer: default: the sum of weights, which gives the mean over supervised tokens for "per_sample", over
            samples for "sample_mean", and over edges for "unique". Where a batch has several rows or ranks, pass the
            total of all of them (and undo any averaging over ranks). Required for given weights, such as advantages:
            their sum may be 0.

    Takes the other arguments of `edge_logprobs`.

    Raises:
        TreeError (E801): no normalizer for given weights, or for a row without a supervised token. With one, such a row
            gives 0 and zero gradients, as a rank without targets needs.
    """
    if normalizer is None and edges.weighting == "given":
        raise TreeError("the weights were given: pass what the sum is divided by, as in normalizer=len(samples)")
    if normalizer is None and not edges.num_edges:
        raise TreeError("no token is supervised: no sample has a target after its first token. Pass a normalizer")
    logp = edge_logprobs(hidden_or_logits, edges, lm_head, temperature=temperature, chunk=chunk)
    weight = edges.weight.to(logp)
    return -(weight * logp).sum() / (weight.sum() if normalizer is None else normalizer)


def unfold(x: Tensor, forest: PrefixForest, *, pad: float | None = None) -> Tensor:
    """Return the values of a folded row for every token of every sample, differentiable.

    A token gets the value at its own row, made from the sample up to and including it. For values at the rows that
    predict the tokens, such as a critic's beside log-probs, use `at_predictions`.

    Args:
        x: [T, ...] or [1, T, ...], such as hidden states, logits, or values of a critic.
        pad: None returns [sum of sample lengths, ...]; a number returns [S, longest sample, ...], padded with it.
    """
    ragged = _flat(x, len(forest.input_ids))[forest.sample_rows]
    return ragged if pad is None else right_padded(ragged, forest.sample_offsets, pad)


def at_predictions(x: Tensor, edges: LossEdges) -> Tensor:
    """Return the values of the rows that predict the supervised tokens: [M, ...], in the order of `sample_logprobs`.

    Args:
        x: [T, ...] or [1, T, ...], such as values of a critic or entropies.
    """
    return _flat(x, edges.num_rows)[edges.row[edges.sample_edge]]


def _flat(x: Tensor, rows: int) -> Tensor:
    """Return [T, ...] for [T, ...] or [1, T, ...]. T must be exact: edges of another row would index it too."""
    if x.shape[:2] == (1, rows):
        return x[0]
    if x.ndim == 0 or x.shape[0] != rows:
        raise TreeError(f"got a tensor of shape {list(x.shape)}; expected [{rows}, ...] or [1, {rows}, ...]: T rows")
    return x
