"""Values per sample, or per sample and token, in the orders that folding needs: ragged, padded, by supervised token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from niels_gpt.prefix_tree.edges import LossEdges

PER = ("sample", "token", "completion", "target")
# How many values a row of a field has by sample [S], and where in its row each supervised token stands [M].
Form = tuple[Tensor, Tensor]


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


def in_order(values: Any, edges: LossEdges, per: str | None) -> Tensor:
    """Return values in the order of `edges.sample_edge`: [M]. `LossEdges.field` says what they may be."""
    if per is not None and per not in PER:
        raise ValueError(f"per is {per!r}; expected one of {', '.join(PER)}")
    device, samples = edges.row.device, len(edges.completion_starts)
    forms = {name: form for name, form in _forms(edges).items() if per in (None, name)}
    if not forms:
        if bool((edges.completion_starts >= 0).all()):
            raise ValueError("per is 'completion', but a target lies before one, in a prompt: give values per='token'")
        raise ValueError(
            "per is 'completion', but where completions begin was not said, and a loss mask does not say it: the first "
            "token of one need not be a target. Make the forest by from_rollout_group, or by from_sequences with "
            "prompt_lengths; or give a value for each token of each sample (per='token')"
        )
    sizes = ", ".join(f"{int(lengths.sum())} (per {name})" for name, (lengths, _) in forms.items())
    if not isinstance(values, Tensor | np.ndarray):
        values = _listed(values)
        if isinstance(values, list):
            return _of_rows([row.to(device) for row in values], edges, forms)
    tensor = torch.as_tensor(values, device=device)
    if tensor.ndim == 2 and len(tensor) == samples:
        return _of_padded(tensor, edges, forms)
    indices = [_index(edges, form) for form in forms.values() if tensor.shape == (int(form[0].sum()),)]
    if not indices:
        raise ValueError(f"a field has shape {list(tensor.shape)}; expected {samples} rows, or one axis of {sizes}")
    if not all(torch.equal(indices[0], index) for index in indices):
        raise ValueError(f"a field of {len(tensor)} values may be several of {sizes}: say which, as in per={PER[0]!r}")
    return tensor[indices[0]]


def _listed(values: Any) -> Tensor | list[Tensor]:
    """Return a list of numbers as one tensor, and a list of rows as rows."""
    if isinstance(values, Mapping | str):
        raise TypeError(f"a field is a {type(values).__name__}; expected values or rows in the order of the samples")
    values = list(values)
    if not any(hasattr(value, "__len__") and getattr(value, "shape", None) != () for value in values):
        return torch.stack(values) if values and isinstance(values[0], Tensor) else torch.as_tensor(values)
    rows = [torch.as_tensor(value) for value in values]
    for sample, row in enumerate(rows):
        if row.ndim != 1:
            raise ValueError(f"the field of sample {sample} has shape {list(row.shape)}; expected one axis")
    return rows


def _forms(edges: LossEdges) -> dict[str, Form]:
    lengths, sample, starts = edges.field_offsets.diff(), edges.sample, edges.completion_starts
    place = edges.sample_token - edges.field_offsets[sample]
    forms = {"sample": (torch.ones_like(lengths), torch.zeros_like(place)), "token": (lengths, place)}
    if bool((starts >= 0).all()) and bool((place >= starts[sample]).all()):
        forms["completion"] = (lengths - starts, place - starts[sample])
    forms["target"] = (edges.sample_offsets.diff(), places(edges.sample_offsets))
    return forms


def _index(edges: LossEdges, form: Form) -> Tensor:
    """Return where each supervised token stands in a ragged field of a form: [M]."""
    lengths, place = form
    return (lengths.cumsum(0) - lengths)[edges.sample] + place


def _of_rows(rows: list[Tensor], edges: LossEdges, forms: Mapping[str, Form]) -> Tensor:
    found = torch.tensor([len(row) for row in rows], device=edges.row.device)
    if len(rows) != len(edges.completion_starts):
        raise ValueError(
            f"a field has {len(rows)} rows; expected one for each of {len(edges.completion_starts)} samples"
        )
    for form in forms.values():
        if torch.equal(found, form[0]):
            return torch.cat(rows)[_index(edges, form)]
    # The form that fits longest is the one that was meant.
    wrong = max(int((found != lengths).nonzero()[0]) for lengths, _ in forms.values())
    wanted = ", ".join(f"{int(lengths[wrong])} (per {name})" for name, (lengths, _) in forms.items())
    raise ValueError(f"the field of sample {wrong} has {len(rows[wrong])} values; expected one of: {wanted}")


def _of_padded(values: Tensor, edges: LossEdges, forms: Mapping[str, Form]) -> Tensor:
    if len(forms) > 1:  # the width says nothing: a batch is padded to the longest of all its groups
        raise ValueError(
            f"a field has shape {list(values.shape)}: a column may be a token of the sample, of the completion or a "
            'target; say which, as in per="completion", or pass a list of rows'
        )
    ((name, (lengths, place)),) = forms.items()
    if values.shape[1] < int(lengths.max()):
        longest = int(lengths.max())
        raise ValueError(f"a field has shape {list(values.shape)}; expected {longest} columns or more (per {name})")
    return values[edges.sample, place]
