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
import numpy.typing as npt
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
    first_targets: Tensor  # int64 [S], the sample's first target, predictable or not; its length if it has none
    num_rows: int  # T without padding
    unpredictable: int  # targets that are the first token of their sample: no row predicts them
    weighting: str  # one of WEIGHTINGS, or "given"

    @classmethod
    def from_forest(cls, forest: PrefixForest, *, weighting: str | Tensor = "per_sample") -> LossEdges:
        """Return an edge for each flat token that is a target of some sample, and the tokens that use it.

        Args:
            forest: its `loss_mask` says which tokens are targets.
            weighting: "per_sample": each supervised token of each sample counts 1, as in a batch that is not folded.
                "sample_mean": 1 / (targets of the sample) / (samples with targets), the mean of means. "unique": each
                edge counts 1 however many samples use it, the natural choice for trees of messages. Or a tensor of
                weights, in any form that `field` takes.

        Raises:
            ValueError: another weighting.
        """
        rows, offsets, ids = (
            x.numpy(force=True) for x in (forest.sample_rows, forest.sample_offsets, forest.input_ids)
        )
        wanted = forest.loss_mask.numpy(force=True).copy()
        unpredictable = int(wanted[offsets[:-1]].sum())
        first_targets = _first_targets(wanted, offsets)
        wanted[offsets[:-1]] = False
        sample_token = np.flatnonzero(wanted)
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
            weight=torch.ones(len(targets), dtype=torch.float64),
            sample_edge=torch.from_numpy(edge.take(tokens)),
            sample_offsets=torch.from_numpy(sample_token.searchsorted(offsets)),
            sample_token=torch.from_numpy(sample_token),
            field_offsets=torch.from_numpy(offsets),
            first_targets=torch.from_numpy(first_targets),
            num_rows=forest.num_tokens,
            unpredictable=unpredictable,
            weighting=weighting if isinstance(weighting, str) else "given",
        ).to(forest.input_ids.device)
        return edges if edges.weighting == "unique" else edges._weighted(weighting)

    def _weighted(self, weighting: str | Tensor) -> LossEdges:
        counts = self.sample_offsets.diff()
        if isinstance(weighting, Tensor):
            shares = self.field(weighting).to(self.weight)
        elif weighting == "per_sample":
            return replace(self, weight=self.sample_edge.bincount(minlength=self.num_edges).double())
        elif weighting == "sample_mean":
            shares = 1 / (counts[self.sample] * (counts > 0).sum()).double()
        else:
            raise ValueError(f"weighting is {weighting!r}; expected one of {', '.join(WEIGHTINGS)}, or a tensor")
        return replace(self, weight=torch.zeros_like(self.weight).index_add(0, self.sample_edge, shares))

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
        """Return the distinct rows that predict something, int64, rising: all that an lm_head has to see."""
        rows: Tensor = torch.unique_consecutive(self.row)
        return rows

    def __repr__(self) -> str:
        """Name the sizes: `LossEdges(5 edges for 5 supervised tokens, per_sample)`."""
        return f"LossEdges({self.num_edges} edges for {self.num_loss_tokens} supervised tokens, {self.weighting})"

    def to(self, device: torch.device | str) -> LossEdges:
        """Return the edges with every tensor on a device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return LossEdges(**{**vars(self), **moved})

    def field(self, values: Any) -> Tensor:
        """Return values per sample, or per sample and token, in the order of `sample_edge`: [M], differentiable.

        `values` is one of

        * [S]: a value per sample, such as a group-normalised advantage;
        * [S] rows, as a list of lists or tensors, each with a value for every token of the sample, or for its tokens
          from the first target on (a completion's), or for its targets alone;
        * the same as one tensor padded on the right, as wide as the longest of such rows;
        * [sum of sample lengths] or [M], ragged.

        Raises:
            ValueError: the sizes fit none of these, or more than one that differ.
        """
        return in_order(values, self)


def _first_targets(targets: npt.NDArray[np.bool_], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the place of each sample's first target, its length where it has none."""
    found = np.append(np.flatnonzero(targets), offsets[-1])
    first: npt.NDArray[np.int64] = np.minimum(found[found.searchsorted(offsets[:-1])], offsets[1:])
    return first - offsets[:-1]


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
        lm_head: applied to the rows of edges only, each once, however many targets it has.
        temperature: divides the logits.
        chunk: rows whose logits are in memory at a time, in the backward pass too: a chunk is computed again there.

    Raises:
        ValueError: there are fewer rows than the forest had, or more than one batch row.
    """
    flat = _flat(hidden_or_logits, edges.num_rows)
    rows, uses = torch.unique_consecutive(edges.row, return_counts=True)

    def logprobs(picked: Tensor, row: Tensor, target: Tensor) -> Tensor:
        logits = picked if lm_head is None else lm_head(picked)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        return logits[row, target] - logits.logsumexp(-1)[row]

    parts = [flat.new_zeros(0, dtype=torch.promote_types(flat.dtype, torch.float32))]
    again = torch.is_grad_enabled() and len(rows) > chunk
    bounds = torch.cat([uses.new_zeros(1), uses.cumsum(0)])[::chunk].tolist()
    for begin, first in zip(range(0, len(rows), chunk), bounds, strict=False):
        count = uses[begin : begin + chunk]
        row = owners(torch.cat([count.new_zeros(1), count.cumsum(0)]))
        target = edges.target[first : first + len(row)]
        picked = flat[rows[begin : begin + chunk]]
        if again:
            parts.append(checkpoint(logprobs, picked, row, target, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(logprobs(picked, row, target))
    return torch.cat(parts)


def sample_logprobs(edge_logp: Tensor, edges: LossEdges, *, pad: float | None = None) -> Tensor:
    """Return the log-prob of each supervised token by sample: [M], or [S, most targets] filled up with `pad`."""
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
        normalizer: default: the sum of weights, so that "per_sample" is the mean over all supervised tokens. Give the
            number of the global batch where a batch has several rows or ranks. Needed for weights of one's own: the sum
            of advantages is no number to divide by.

    The other arguments are those of `edge_logprobs`.

    Raises:
        ValueError: nothing is supervised, or weights are given without a normalizer.
    """
    if normalizer is None and edges.weighting == "given":
        raise ValueError(
            "the weights are your own: say what the sum is divided by, normalizer=edges.num_loss_tokens or 1"
        )
    if not edges.num_edges:
        raise ValueError(
            "no token is supervised: the loss_mask of the forest has no target behind the first token of a sample"
        )
    logp = edge_logprobs(hidden_or_logits, edges, lm_head, temperature=temperature, chunk=chunk)
    weight = edges.weight.to(logp)
    return -(weight * logp).sum() / (weight.sum() if normalizer is None else normalizer)


def unfold(x: Tensor, forest: PrefixForest, *, pad: float | None = None) -> Tensor:
    """Return what a folded row has for every token of every sample, differentiable.

    Args:
        x: [T, ...] or [1, T, ...], such as hidden states, logits, or values of a critic.
        pad: None gives them ragged, [sum of sample lengths, ...]; a number gives [S, longest sample, ...], filled up.
    """
    ragged = _flat(x, forest.num_tokens)[forest.sample_rows]
    return ragged if pad is None else right_padded(ragged, forest.sample_offsets, pad)


def _flat(x: Tensor, rows: int) -> Tensor:
    """Return [T, ...] for [T, ...] or [1, T, ...] of at least so many rows."""
    flat = x[0] if x.ndim > 1 and x.shape[0] == 1 and (rows != 1 or x.ndim > 2) else x
    if flat.ndim == 0 or flat.shape[0] < rows:
        raise ValueError(
            f"got a tensor of shape {list(x.shape)}; expected [1, T, ...] or [T, ...] with T of {rows} or more"
        )
    return flat
