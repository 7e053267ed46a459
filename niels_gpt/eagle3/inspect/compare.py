"""How numbers that the target gives again are compared with stored ones: by their bits, or within a tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from niels_gpt.storage.errors import CacheError

TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""Allowed in another environment, by the dtype that the target runs in: for a hidden state as a share of its layer's
largest in the sample, for a probability in absolute terms, for a log-normalizer as a share of the sample's largest. The
rounding to the stored dtype comes on top."""
MASK_SHARE = 0.02
"""Of the slots with loss: where two tokens are nearly as likely, the first choice may change."""
MEDIAN, WRONG, WRONG_SHARE = 0.05, 0.2, 0.02
"""Without a plan a field is another one if the median of its slots' differences is above MEDIAN, or if more than
WRONG_SHARE of the slots differ by more than WRONG. The difference of two vectors is divided by their length; that of
two distributions is half the sum over the tokens. Arithmetic in bf16 moves a slot by some hundredths, the next layer by
several tenths."""
_CHUNK_TOKENS = 1024  # of a table of weights, compared at a time


class Named(Protocol):
    """A stored sample that can name itself."""

    def problem(self, found: str, expected: str = "") -> CacheError:
        """Return an error that names the shard's file, the sample's number and its id."""


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes [rows, bytes]: NaN is equal to itself, and zeros of two signs are not."""
    flat = tensor.contiguous().view(torch.uint8)
    return flat.view(len(tensor), flat.numel() // max(1, len(tensor)))


def vector_length(vectors: Tensor) -> Tensor:
    """Return the length of vectors [..., n]: [...], above 0."""
    return vectors.square().sum(dim=-1).sqrt().clamp_min(torch.finfo(torch.float32).tiny)


def differing(
    row: Named,
    name: str,
    apart: Tensor,
    *,
    what: str = "slot",
    places: Sequence[int] | None = None,
    rounding: float = 0.0,
) -> Iterator[CacheError]:
    """Yield that a field is another one, by the difference of each slot [slots].

    what: a slot is called so. places: the number of each; None: from 0. rounding: what the stored dtype adds.
    """
    if not len(apart):
        return
    apart = apart.nan_to_num(torch.inf)
    median, most, wrong = float(apart.median()), MEDIAN + rounding, apart > WRONG
    if median > most or int(wrong.sum()) > WRONG_SHARE * len(apart):
        first, count = int(wrong.nonzero()[0]) if wrong.any() else int(apart.argmax()), int(wrong.sum())
        yield row.problem(
            f"{name} is not what the target gives: the median difference of a {what} is {median:.2g}",
            f"{most:g} at most; {count:,} {what}{'' if count == 1 else 's'} of {len(apart):,} differ by more than "
            f"{WRONG}, the first at {first if places is None else places[first]}",
        )


def other_rows(stored: Tensor, weight: Tensor, *, is_rounded: bool) -> list[int]:
    """Return the rows of a stored table of weights [rows, n] whose values are not those of a loaded one.

    is_rounded: whether the table may be that of a target that was loaded in another dtype.
    """
    wrong: list[int] = []
    for start in range(0, len(stored), _CHUNK_TOKENS):
        part = slice(start, start + _CHUNK_TOKENS)
        found, expected = stored[part].float(), weight[part].detach().float().cpu()
        differs = (bits(found) != bits(expected)).any(dim=-1)
        for dtype in (torch.bfloat16, torch.float16) if is_rounded else ():
            differs &= (found.to(dtype) != expected.to(dtype)).any(dim=-1)
        wrong += (start + differs.nonzero()[:, 0]).tolist()
    return wrong


def largest_difference(stored: Tensor, computed: Tensor, differs: Tensor) -> tuple[int, int]:
    """Return slot and column where two fields [slots, ...] differ most. differs: bool [slots], where bits do."""
    one, other = (tensor.reshape(len(tensor), -1).double() for tensor in (stored, computed))
    apart = (one - other).abs().nan_to_num(torch.inf)
    apart[~differs] = -1  # the difference may be no more than the sign of a zero
    slot, column = divmod(int(apart.argmax()), apart.shape[-1])
    return slot, column
