"""Ragged fields: values per sample, or per sample and token, in the order of the supervised tokens.

`LossEdges.field` is the public call. A field is one axis of values, sample by sample; or a list of rows; or one padded
tensor. Its form, one of PER, says whether a value belongs to a sample, a token, a token of a completion, or a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from niels_gpt.storage.errors import TreeError, TreeTypeError

PER = ("sample", "token", "completion", "target")

# A form: the values of each sample [S], and the index of each supervised token among the values of all samples [M].
Form = tuple[Tensor, Tensor]


def samples_of(offsets: Tensor) -> Tensor:
    """Return the sample of each value of a ragged field: offsets [0, 2, 3] give [0, 0, 1]."""
    lengths = lengths_of(offsets)
    if lengths.is_cpu:
        return torch.from_numpy(np.arange(len(lengths)).repeat(lengths.numpy()))
    return torch.arange(len(lengths), device=offsets.device).repeat_interleave(lengths)


def lengths_of(offsets: Tensor) -> Tensor:
    """Return the lengths of the rows of a ragged field: offsets [0, 2, 3] give [2, 1]."""
    if not offsets.is_cpu:
        return offsets.diff()
    bounds = offsets.numpy()  # a fold of a small group is made of calls, and NumPy's take less time than torch's
    return torch.from_numpy(bounds[1:] - bounds[:-1])


def places(offsets: Tensor) -> Tensor:
    """Return the index of each value of a ragged field in its sample: offsets [0, 2, 3] give [0, 1, 0]."""
    return torch.arange(int(offsets[-1]), device=offsets.device) - offsets[samples_of(offsets)]


def right_padded(ragged: Tensor, offsets: Tensor, pad: float) -> Tensor:
    """Return [S, longest, ...] for a ragged field [sum of lengths, ...], padded with `pad`."""
    longest = int(lengths_of(offsets).max())
    out = ragged.new_full((len(offsets) - 1, longest, *ragged.shape[1:]), pad)
    return out.index_put((samples_of(offsets), places(offsets)), ragged)


def forms_of(
    token_offsets: Tensor, target_offsets: Tensor, tokens: Tensor, starts: Tensor, sample: Tensor
) -> dict[str, Form]:
    """Return the possible forms of a field of S samples, by the names of PER.

    Args:
        token_offsets, target_offsets: int64 [S + 1], where a sample begins among all tokens, and among targets.
        tokens: int64 [M], the index of each target among all tokens.
        starts: int64 [S], tokens of a sample before its completion; -1: not known.
        sample: int64 [M], the sample of each target.
    """
    lengths = lengths_of(token_offsets)
    forms = {"sample": (torch.ones_like(lengths), sample), "token": (lengths, tokens)}
    if bool((starts.numpy(force=True) >= 0).all()):
        place = tokens - (token_offsets[:-1] + starts)[sample]
        if bool((place >= 0).all()):
            forms["completion"] = (lengths - starts, place + _begins(lengths - starts)[sample])
    forms["target"] = (lengths_of(target_offsets), torch.arange(len(sample), device=sample.device))
    return forms


def _begins(lengths: Tensor) -> Tensor:
    """Return where each row begins among the values of all rows: [S]."""
    return lengths.cumsum(0) - lengths


def by_target(values: Any, sample: Tensor, forms: Mapping[str, Form]) -> Tensor:
    """Return the values of each supervised token: [M], differentiable, on the device of `sample`.

    Args:
        values: as in `LossEdges.field`.
        sample: int64 [M], the sample of each supervised token.
        forms: the possible forms of the values; not empty.

    Raises:
        TreeError (E801): the sizes fit no form, or several that differ.
        TreeTypeError (E801): a mapping, a text, or values that are no numbers.
    """
    if not isinstance(values, Tensor | np.ndarray):
        values = _listed(values)
        if isinstance(values, list):
            return _of_rows([row.to(sample.device) for row in values], forms)
    tensor = torch.as_tensor(values, device=sample.device)
    if tensor.ndim == 2 and len(tensor) == len(next(iter(forms.values()))[0]):
        return _of_padded(tensor, sample, forms)
    return _of_flat(tensor, forms)


def _listed(values: Any) -> Tensor | list[Tensor]:
    """Return a list of numbers as one tensor, and a list of rows as rows."""
    if values is None or isinstance(values, Mapping | str):
        raise TreeTypeError(
            f"a field is a {type(values).__name__}; expected values or rows in the order of the samples"
        )
    values = list(values)
    if not any(hasattr(value, "__len__") and getattr(value, "shape", None) != () for value in values):
        return _tensor(values)
    rows = [_tensor(value) for value in values]
    for sample, row in enumerate(rows):
        if row.ndim != 1:
            raise TreeError(f"the field of sample {sample} has shape {list(row.shape)}; expected one axis")
    return rows


def _tensor(values: Any) -> Tensor:
    """Return values as a tensor. Python's floats become float64; tensors and arrays keep their dtype."""
    if isinstance(values, Tensor | np.ndarray):
        return torch.as_tensor(values)
    if isinstance(values, list | tuple) and values and all(isinstance(value, Tensor) for value in values):
        return torch.stack(list(values))
    try:
        made = torch.as_tensor(values)
    except (TypeError, RuntimeError) as error:
        raise TreeTypeError(f"a field has {values!r:.100}; expected numbers ({error})") from error
    return torch.as_tensor(values, dtype=torch.float64) if made.is_floating_point() else made


def _of_flat(values: Tensor, forms: Mapping[str, Form]) -> Tensor:
    totals = {name: int(lengths.numpy(force=True).sum()) for name, (lengths, _) in forms.items()}
    sizes = ", ".join(f"{total} (per {name})" for name, total in totals.items())
    fitting = {name: index for name, (_, index) in forms.items() if values.shape == (totals[name],)}
    if not fitting:
        samples = len(next(iter(forms.values()))[0])
        raise TreeError(f"a field has shape {list(values.shape)}; expected {samples} rows, or one axis of {sizes}")
    first, *others = fitting.values()
    if not all(torch.equal(first, index) for index in others):
        named = " or ".join(f"per={name!r}" for name in fitting)
        raise TreeError(
            f"a field has {len(values)} values, which in this batch may be several of {sizes}: say which by {named}. "
            "Give `per` always: sizes that differ in one batch may be equal in the next"
        )
    return values.index_select(0, first)


def _of_rows(rows: list[Tensor], forms: Mapping[str, Form]) -> Tensor:
    wanted_sizes = next(iter(forms.values()))[0]
    samples = len(wanted_sizes)
    if len(rows) != samples:
        raise TreeError(f"a field has {len(rows)} rows; expected one for each of {samples} samples")
    sizes = torch.tensor([row.shape[0] for row in rows], device=wanted_sizes.device)
    for form in forms.values():
        if torch.equal(sizes, form[0]):
            whole = torch.cat([row for row in rows if row.shape[0]] or rows)  # an empty list has no dtype to keep
            return whole.index_select(0, form[1])
    # The form that fits the most samples was probably meant: report the first sample that breaks it.
    wrong = max(int((sizes != lengths).nonzero()[0]) for lengths, _ in forms.values())
    wanted = ", ".join(f"{int(lengths[wrong])} (per {name})" for name, (lengths, _) in forms.items())
    raise TreeError(f"the field of sample {wrong} has {len(rows[wrong])} values; expected one of: {wanted}")


def _of_padded(values: Tensor, sample: Tensor, forms: Mapping[str, Form]) -> Tensor:
    if len(forms) > 1:  # the width does not tell: a batch is padded to the longest of all its groups
        raise TreeError(
            f"a field has shape {list(values.shape)}: a column may be a token of the sample, of the completion or a "
            'target; say which, as in per="completion", or pass a list of rows'
        )
    ((name, (lengths, index)),) = forms.items()
    if name == "sample" and values.shape[1] != 1:
        raise TreeError(f"a field has shape {list(values.shape)}; expected one value for each sample (per sample)")
    if values.shape[1] < int(lengths.max()):
        longest = int(lengths.max())
        raise TreeError(f"a field has shape {list(values.shape)}; expected {longest} columns or more (per {name})")
    return values[sample, index - _begins(lengths)[sample]]
