"""Turns a caller's token ids into one int64 array with offsets, or into an error that names the place.

Ids may be lists, tuples, arrays or tensors. A message tree, such as OASST1's, becomes the sequences of its threads.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from niels_gpt.storage.errors import TreeError, TreeTypeError

Message = Mapping[str, Any]
Encode = Callable[[Message], tuple[Sequence[int], Sequence[int]]]
"""A message -> its ids, role tags included, and a mask with 1 for each id that is a target."""
MAX_ID = 2**31 - 1
"""The largest id: far above any vocabulary, and the radix tree compares ids as 32 bits."""


def concatenated(
    sequences: Iterable[Any], what: str, first: str | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the ids of all sequences in one array, and the offsets [len(sequences) + 1] where each begins.

    what: the name of a sequence in errors. first: another name for the first one, which may then be empty.

    Raises:
        TreeError (E801): there is no sequence, one is empty, or an id is not from 0 to MAX_ID.
        TreeTypeError (E801): something is not a sequence of integers.
    """
    sequences, skipped = list(sequences), int(first is not None)
    if len(sequences) <= skipped:
        raise TreeError(f"no {what} was given; expected at least one")

    def name(index: int) -> str:
        return str(first) if index < skipped else f"{what} {index - skipped}"

    try:
        lengths = list(map(len, sequences))
    except TypeError:
        lengths = [_length(sequence, name(index)) for index, sequence in enumerate(sequences)]
    if 0 in lengths[skipped:]:
        raise TreeError(f"{name(lengths.index(0, skipped))} is empty; expected at least one id")
    if all(type(sequence) in (list, tuple) for sequence in sequences):
        ids = _of_lists(sequences, sum(lengths), name)
    else:
        ids = np.concatenate([_of_one(sequence, name, index) for index, sequence in enumerate(sequences)])
    offsets = np.fromiter(accumulate(lengths, initial=0), dtype=np.int64, count=len(lengths) + 1)
    _check_range(ids, offsets, name)
    return ids, offsets


def _check_range(ids: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], name: Callable[[int], str]) -> None:
    if len(ids) and ids.view(np.uint64).max() > MAX_ID:  # an id below 0 is a large one there
        place = int(np.argmax((ids < 0) | (ids > MAX_ID)))
        index = int(np.searchsorted(offsets, place, side="right")) - 1
        raise TreeError(
            f"{name(index)} has the id {ids[place]} at {place - offsets[index]}; expected ids from 0 to {MAX_ID}"
        )


def _length(sequence: Any, name: str) -> int:
    try:
        return len(sequence)
    except TypeError as error:
        raise TreeTypeError(f"{name} is {sequence!r}; expected a list, tuple, array or tensor of ids") from error


def _of_lists(sequences: Sequence[Any], total: int, name: Callable[[int], str]) -> npt.NDArray[np.int64]:
    for index, sequence in enumerate(sequences):
        if sequence and isinstance(sequence[0], bool):  # bools are integers in Python; here they are a misplaced mask
            raise TreeTypeError(f"{name(index)} has bools; expected ids")
    ids = np.empty(total, dtype=np.int64)
    done = 0
    try:
        for begin in range(0, len(sequences), 256):  # few enough for the CPU's cache
            part = array("q", list(chain.from_iterable(sequences[begin : begin + 256])))  # refuses floats, unlike NumPy
            ids[done : done + len(part)] = np.frombuffer(part, dtype=np.int64)
            done += len(part)
        return ids
    except (TypeError, OverflowError):
        return np.concatenate([_of_one(sequence, name, index) for index, sequence in enumerate(sequences)])


def _of_one(sequence: Any, name: Callable[[int], str], index: int) -> npt.NDArray[np.int64]:
    ids = _array(sequence)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        what = f"{ids.dtype} of shape {list(ids.shape)}"
        raise TreeTypeError(f"{name(index)} is {what}; expected integers of shape [tokens]")
    return ids.astype(np.int64, copy=False)


def _array(values: Any) -> npt.NDArray[Any]:
    return values.numpy(force=True) if hasattr(values, "detach") else np.asarray(values)


def masks(loss_mask: Iterable[Any] | None, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return one bool for each token of the sequences that begin at offsets: the masks, or True for all.

    Raises:
        TreeError (E801): masks and sequences differ in number or length, or a mask has values other than 0 and 1.
    """
    if loss_mask is None:
        return np.ones(int(offsets[-1]), dtype=np.bool_)
    lengths = np.diff(offsets).tolist()
    arrays = [_array(mask) for mask in loss_mask]
    if len(arrays) != len(lengths):
        raise TreeError(f"there are {len(arrays)} masks for {len(lengths)} sequences")
    whole = np.concatenate(arrays) if [mask.shape for mask in arrays] == [(length,) for length in lengths] else None
    if whole is not None and (whole.dtype == np.bool_ or bool(((whole == 0) | (whole == 1)).all())):
        return whole.astype(np.bool_, copy=False)
    for index, (mask, length) in enumerate(zip(arrays, lengths, strict=True)):  # which one is wrong
        if mask.shape != (length,):
            raise TreeError(
                f"the mask of sequence {index} has shape {list(mask.shape)}; expected [{length}], as its ids"
            )
        if mask.dtype != np.bool_ and len(wrong := np.flatnonzero((mask != 0) & (mask != 1))):
            raise TreeError(
                f"the mask of sequence {index} has {mask[wrong[0]]!r} at {wrong[0]}; expected 0 and 1. For labels, "
                "give labels != -100"
            )
    return np.concatenate(arrays).astype(np.bool_, copy=False)


class Unpadded(NamedTuple):
    """The tokens of a padded batch [B, L] without its padding, row after row."""

    ids: npt.NDArray[np.int64]  # [sum of lengths]
    offsets: npt.NDArray[np.int64]  # [B + 1], where a row begins in ids
    targets: npt.NDArray[np.bool_]  # [sum of lengths]
    prompts: npt.NDArray[np.int64]  # [B], tokens before the columns of responses; -1 where these are all columns


def unpadded(input_ids: Any, attention_mask: Any, response_mask: Any) -> Unpadded:
    """Return a padded batch without its padding, on the CPU. `PrefixForest.from_padded` describes the arguments.

    Raises:
        TreeError (E801): there is no row, a shape does not fit, a mask has values other than 0 and 1, a row has no
            token or padding between its tokens, or a target is padding or the first token of its row.
        TreeTypeError (E801): the ids are no integers, or something is no array.
    """
    given = {"input_ids": input_ids, "attention_mask": attention_mask, "response_mask": response_mask}
    ids, seen, targets = _padded(*(_rectangle(values, name) for name, values in given.items()))
    rows, columns, width = *ids.shape, targets.shape[1]
    lengths, firsts = seen.sum(1), seen.argmax(1)
    _refuse(lengths == 0, "has no token: cut rows off that are padding only")
    ends = columns - seen[:, ::-1].argmax(1)
    _refuse(ends - firsts != lengths, "has padding between its tokens: attention_mask must be one run of 1")
    _refuse(np.any(targets & ~seen[:, columns - width :], axis=1), "has a target that is padding")
    starts = firsts - (columns - width)
    at_start = (starts >= 0) & targets[np.arange(rows), starts.clip(0)]
    _refuse(at_start, "begins with a target, which no token predicts: its prompt is empty")
    whole = np.zeros_like(seen)
    whole[:, columns - width :] = targets
    offsets = np.concatenate([[0], lengths.cumsum()])
    flat = ids[seen].astype(np.int64, copy=False)
    _check_range(flat, offsets, "row {}".format)
    prompts = seen[:, : columns - width].sum(1) if width < columns else np.full(rows, -1)
    return Unpadded(flat, offsets, whole[seen], prompts)


def _rectangle(values: Any, name: str) -> npt.NDArray[Any]:
    is_bfloat16 = str(getattr(values, "dtype", None)) == "torch.bfloat16"  # NumPy has no such type
    try:
        return _array(values.float() if is_bfloat16 else values)
    except ValueError as error:
        raise TreeTypeError(f"{name} is {values!r:.100}; expected a tensor, an array, or rows of one length") from error


def _padded(
    ids: npt.NDArray[Any], seen: npt.NDArray[Any], response: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return ids [B, L], attention mask [B, L] and response mask [B, R], or an error where they do not fit."""
    if ids.ndim != 2 or not ids.size:
        raise TreeError(f"input_ids has shape {list(ids.shape)}; expected [B, L], at least one row of one token")
    if ids.dtype.kind not in "iu":
        raise TreeTypeError(f"input_ids is {ids.dtype}; expected integers")
    rows, columns = ids.shape
    if seen.ndim == 1 and seen.dtype.kind in "iu":  # lengths
        if (wrong := (seen < 0) | (seen > columns)).any():
            raise TreeError(f"the length of row {wrong.argmax()} is {seen[wrong][0]}; expected 1 to {columns}")
        seen = np.arange(columns) < seen[:, None]
    seen, targets = _bits(seen, "attention_mask", rows), _bits(response, "response_mask", rows)
    if seen.shape != ids.shape or not 1 <= targets.shape[1] <= columns:
        raise TreeError(
            f"input_ids is [{rows}, {columns}], attention_mask {list(seen.shape)}, response_mask "
            f"{list(targets.shape)}; expected [B, L], [B, L], and [B, R] with R from 1 to L"
        )
    return ids, seen, targets


def _bits(mask: npt.NDArray[Any], name: str, rows: int) -> npt.NDArray[np.bool_]:
    if mask.ndim != 2 or len(mask) != rows:
        raise TreeError(f"{name} has shape {list(mask.shape)}; expected {rows} rows, as input_ids")
    bits = mask.astype(np.bool_, copy=False)
    if mask.dtype != np.bool_ and not np.array_equal(bits, mask):
        raise TreeError(f"{name} has values other than 0 and 1")
    return bits


def _refuse(wrong: Any, what: str) -> None:
    if wrong.any():
        raise TreeError(f"row {int(wrong.argmax())} {what}")


class Thread(NamedTuple):
    """The messages from the root of a tree to one of its messages, encoded."""

    ids: list[int]
    mask: list[int]
    message: Message
    """The last message of the thread."""


class _Encoded(NamedTuple):
    ids: Sequence[int]
    mask: Sequence[int]
    message: Message
    parent: int  # index of the message that it replies to; -1 for the root


def threads(tree: Message, encode: Encode, counters: Counter[str]) -> Iterator[Thread]:
    """Yield the thread to each message with a target but none below it, in the order of the replies.

    So every target is in a thread, and no thread is a part of another. `PrefixForest.from_message_tree` describes the
    arguments. Each message is encoded once.
    """
    messages = list(_encoded(tree, encode))
    has_targets = [False] * len(messages)  # in the message or below it
    last: list[int] = []
    for index in range(len(messages) - 1, -1, -1):  # replies come after their parents
        message = messages[index]
        if not has_targets[index] and any(message.mask):
            last.append(index)
            has_targets[index] = True
        if has_targets[index] and message.parent >= 0:
            has_targets[message.parent] = True
    counters["cut_messages"] += has_targets.count(False)
    for index in reversed(last):
        path = [messages[index]]
        while path[-1].parent >= 0:
            path.append(messages[path[-1].parent])
        ids = [id for message in reversed(path) for id in message.ids]
        yield Thread(ids, [bit for message in reversed(path) for bit in message.mask], messages[index].message)


def _encoded(tree: Message, encode: Encode) -> Iterator[_Encoded]:
    """Yield the messages of a tree, each after the one that it replies to."""
    waiting: list[tuple[Message, int]] = [(tree.get("prompt", tree) if isinstance(tree, Mapping) else tree, -1)]
    number = 0
    while waiting:
        message, parent = waiting.pop()
        if not isinstance(message, Mapping) or not isinstance(message.get("replies"), list | tuple | None):
            raise TreeError(f"{message!r:.200} is no message: expected an object, with its replies as a list")
        ids, mask = encode(message)
        if len(ids) != len(mask):
            raise TreeError(f"encode gave {len(ids)} ids and a mask of {len(mask)} for {dict(message)!r:.200}")
        yield _Encoded(ids, mask, message, parent)
        waiting += [(reply, number) for reply in reversed(message.get("replies") or ())]
        number += 1
