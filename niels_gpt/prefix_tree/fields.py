"""Values per sample, or per sample and token, in the orders that folding needs: ragged, padded, by supervised token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from niels_gpt.prefix_tree.edges import LossEdges


def owners(offsets: Tensor) -> Tensor:
    """Return the sample of each value of a ragged field: offsets [0, 2, 3] give [0, 0, 1]."""
    lengths = offsets.diff()
    return torch.arange(len(lengths), device=offsets.device).repeat_interleave(lengths)


def places(offsets: Tensor) -> Tensor:
    """Return the place of each value in its sample: offsets [0, 2, 3] give [0, 1, 0]."""
    return torch.arange(int(offsets[-1]), device=offsets.device) - offsets[owners(offsets)]


def right_padded(ragged: Tensor, offsets: Tensor, pad: float) -> Tensor:
    """Return [S, longest, ...] for a ragged field [sum of lengths, ...], filled up with `pad`."""
    longest = int(offsets.diff().max())
    out = ragged.new_full((len(offsets) - 1, longest, *ragged.shape[1:]), pad)
    return out.index_put((owners(offsets), places(offsets)), ragged)


def in_order(values: Any, edges: LossEdges) -> Tensor:
    """Return values in the order of `edges.sample_edge`: [M]. `LossEdges.field` says what they may be."""
    device = edges.row.device
    if not isinstance(values, Tensor):
        rows = [torch.as_tensor(row, device=device) for row in values]
        if rows and rows[0].ndim:
            return _of_rows(rows, edges)
        values = torch.stack(rows) if rows else torch.zeros(0)
    tensor: Tensor = values.to(device)
    if tensor.ndim == 2:
        return _of_padded(tensor, edges)
    samples, tokens, targets = len(edges.first_targets), int(edges.field_offsets[-1]), edges.num_loss_tokens
    forms = {targets: torch.arange(targets, device=device), tokens: edges.sample_token, samples: edges.sample}
    if tensor.ndim != 1 or len(tensor) not in forms:
        raise ValueError(
            f"a field has shape {list(tensor.shape)}; expected [{samples}] (a value per sample), [{tokens}] (per token "
            f"of each sample), [{targets}] (per supervised token), or {samples} rows"
        )
    if samples == targets == len(tensor) and not torch.equal(forms[samples], torch.arange(targets, device=device)):
        raise ValueError(f"{targets} values may be one per sample or one per target; pass a list of rows instead")
    return tensor[forms[len(tensor)]]


def _forms(edges: LossEdges) -> dict[str, tuple[Tensor, Tensor]]:
    """Return for each form of a row its length by sample [S], and the place in it of each supervised token [M]."""
    lengths, sample = edges.field_offsets.diff(), edges.sample
    place = edges.sample_token - edges.field_offsets[sample]
    return {
        "all its tokens": (lengths, place),
        "from its first target on": (lengths - edges.first_targets, place - edges.first_targets[sample]),
        "its supervised tokens": (edges.sample_offsets.diff(), places(edges.sample_offsets)),
    }


def _of_rows(rows: list[Tensor], edges: LossEdges) -> Tensor:
    forms = _forms(edges)
    found = torch.tensor([len(row) for row in rows], device=edges.row.device)
    if len(rows) != len(edges.first_targets):
        raise ValueError(f"a field has {len(rows)} rows; expected one for each of {len(edges.first_targets)} samples")
    for lengths, place in forms.values():
        if torch.equal(found, lengths):
            return torch.cat(rows)[(found.cumsum(0) - found)[edges.sample] + place]
    # The form that fits longest is the one that was meant.
    wrong = max(int((found != lengths).nonzero()[0]) for lengths, _ in forms.values())
    wanted = ", ".join(f"{int(lengths[wrong])} ({name})" for name, (lengths, _) in forms.items())
    raise ValueError(f"the field of sample {wrong} has {len(rows[wrong])} values; expected one of: {wanted}")


def _of_padded(values: Tensor, edges: LossEdges) -> Tensor:
    forms = _forms(edges)
    samples = len(edges.first_targets)
    fitting = [place for lengths, place in forms.values() if values.shape == (samples, int(lengths.max()))]
    if not fitting or not all(torch.equal(fitting[0], place) for place in fitting):
        widths = ", ".join(f"{int(lengths.max())} ({name})" for name, (lengths, _) in forms.items())
        what = "it may be more than one of these: pass a list of rows" if fitting else "expected one of these"
        raise ValueError(
            f"a field has shape {list(values.shape)}; for {samples} samples the widths are {widths}; {what}"
        )
    return values[edges.sample, fitting[0]]
