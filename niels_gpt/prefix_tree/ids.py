"""Token ids as people have them (lists, tuples, arrays, tensors) -> one int64 array, or an error that says where."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_ID = 2**31 - 1  # no vocabulary comes near; the builder compares ids as 32 bits


def concatenated(
    sequences: Iterable[Any], what: str, first: str | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the ids of all sequences one after another, and the offsets [len(sequences) + 1] where each begins.

    `what` names a sequence in errors. `first` names the first one, where it is another thing and may be empty.

    Raises:
        ValueError: there is no sequence, one is empty, or an id is negative.
        TypeError: something is not a sequence of integers.
    """
    sequences, skipped = list(sequences), int(first is not None)
    if len(sequences) <= skipped:
        raise ValueError(f"no {what} was given; expected at least one")

    def name(index: int) -> str:
        return str(first) if index < skipped else f"{what} {index - skipped}"

    lengths = [_length(sequence, name(index)) for index, sequence in enumerate(sequences)]
    if 0 in lengths[skipped:]:
        raise ValueError(f"{name(lengths.index(0, skipped))} is empty; expected at least one id")
    if all(type(sequence) in (list, tuple) for sequence in sequences):
        ids = _of_lists(sequences, sum(lengths), name)
    else:
        ids = np.concatenate([_of_one(sequence, name(index)) for index, sequence in enumerate(sequences)])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() > MAX_ID):
        place = int(np.argmax((ids < 0) | (ids > MAX_ID)))
        index = int(np.searchsorted(offsets, place, side="right")) - 1
        found = f"the id {ids[place]} at {place - offsets[index]}"
        raise ValueError(f"{name(index)} has {found}; expected ids from 0 to {MAX_ID}")
    return ids, offsets


def _length(sequence: Any, name: str) -> int:
    try:
        return len(sequence)
    except TypeError as error:
        raise TypeError(f"{name} is {sequence!r}; expected a list, tuple, array or tensor of ids") from error


def _of_lists(sequences: Sequence[Any], total: int, name: Callable[[int], str]) -> npt.NDArray[np.int64]:
    for index, sequence in enumerate(sequences):
        if sequence and isinstance(sequence[0], bool):  # Python takes them for numbers: a mask in the wrong place
            raise TypeError(f"{name(index)} is of bools; expected ids")
    ids = np.empty(total, dtype=np.int64)
    done = 0
    try:
        for begin in range(0, len(sequences), 256):  # few enough for a cache
            part = array("q", list(chain.from_iterable(sequences[begin : begin + 256])))  # integers only, unlike NumPy
            ids[done : done + len(part)] = np.frombuffer(part, dtype=np.int64)
            done += len(part)
        return ids
    except (TypeError, OverflowError):
        return np.concatenate([_of_one(sequence, name(index)) for index, sequence in enumerate(sequences)])


def _of_one(sequence: Any, name: str) -> npt.NDArray[np.int64]:
    ids = _array(sequence)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        found = f"{ids.dtype} of shape {list(ids.shape)}"
        raise TypeError(f"{name} is {found}; expected integers of shape [tokens]")
    return ids.astype(np.int64)


def _array(values: Any) -> npt.NDArray[Any]:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def masks(loss_mask: Iterable[Any] | None, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return one bool for each token of the sequences that begin at offsets: the masks, or True for all.

    Raises:
        ValueError: there are not as many masks as sequences, one is of another length, or holds something but 0 and 1.
    """
    if loss_mask is None:
        return np.ones(int(offsets[-1]), dtype=np.bool_)
    lengths = np.diff(offsets).tolist()
    arrays = [_array(mask) for mask in loss_mask]
    if len(arrays) != len(lengths):
        raise ValueError(f"there are {len(arrays)} masks for {len(lengths)} sequences")
    for index, (mask, length) in enumerate(zip(arrays, lengths, strict=True)):
        if mask.shape != (length,):
            raise ValueError(
                f"the mask of sequence {index} has shape {list(mask.shape)}; expected [{length}], as its ids"
            )
        wrong = np.flatnonzero((mask != 0) & (mask != 1))
        if len(wrong):
            found = f"has {mask[wrong[0]]!r} at {wrong[0]}"
            raise ValueError(f"the mask of sequence {index} {found}; expected 0 and 1. Of labels, give labels != -100")
    return np.concatenate(arrays).astype(np.bool_)
