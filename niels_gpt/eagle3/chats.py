"""Chats, or rows of ids and masks, -> rows for the target, and a look at them before anything is computed.

    tokenizer = open_tokenizer("meta-llama/Llama-3.1-8B-Instruct")
    rows = chat_rows([("a", [{"role": "user", "content": "Hi"}, ...])], tokenizer, seq_length=2048, counters=Counter())

What is left out is counted: see chat_rows. How the supervised tokens are found: see templates.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.eagle3.templates import EMPTY_REPLY, LEADING_REPLY, REFUSED_BY_TEMPLATE, RefusedChat
from niels_gpt.eagle3.tokenizers import SPECIAL_TEXT, ChatTokenizer, open_tokenizer

__all__ = [
    "EMPTY",
    "EMPTY_REPLY",
    "GIVEN_FIELDS",
    "LEADING_REPLY",
    "MERGED",
    "NOT_DROPPED",
    "NO_SUPERVISED",
    "REFUSED_BY_TEMPLATE",
    "ROWS",
    "SPECIAL_TEXT",
    "TOKENS_CUT",
    "TRUNCATED",
    "ChatTokenizer",
    "Row",
    "chat_rows",
    "given_rows",
    "open_tokenizer",
    "show_rows",
]

ROWS = "rows"
EMPTY, NO_SUPERVISED = "empty", "no_supervised"
TRUNCATED, TOKENS_CUT, MERGED = "truncated", "tokens_cut", "merged_at_reply_edge"
NOT_DROPPED = (TRUNCATED, TOKENS_CUT, MERGED, LEADING_REPLY, EMPTY_REPLY)
"""Counters of what happened to rows that are there; every other one but ROWS is of what is not."""
GIVEN_FIELDS = ("input_ids", "loss_mask")
"""What a row that is taken as it is has."""
_BATCH = 256  # chats encoded at once
_GREEN, _DIM, _PLAIN = "\x1b[42;30m", "\x1b[2m", "\x1b[0m"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0, DEL and C1


@dataclass(frozen=True)
class Row:
    """One sample: neither shifted nor padded, cut to the sequence length. L: its tokens."""

    id: str
    """The id that its source has for it."""
    input_ids: NDArray[np.int32]
    """int32 [L]."""
    loss_mask: NDArray[np.uint8]
    """uint8 [L]: 1 at each token that carries loss."""
    cut: int = 0
    """How many tokens it had behind these."""


def chat_rows(
    chats: Iterable[tuple[str, Sequence[Mapping[str, str]]]],
    tokenizer: ChatTokenizer,
    *,
    seq_length: int,
    counters: Counter[str],
    vocab_size: int | None = None,
    on_special: str = "drop",
) -> Iterator[Row]:
    """Yield the rows of chats, id and messages, in order; only those that supervise something.

    vocab_size: of the target; None: of the tokenizer.
    on_special: what to do with a chat in which a message holds the literal of a special token, which the tokenizer
        would turn into that token: "drop", or "raise" ValueError.
    counters receives the rows yielded as "rows", of them "truncated" to seq_length, and by "tokens_cut" tokens,
    with a supervised token that also holds characters outside of a reply, "merged_at_reply_edge"; and what is dropped:
    "empty" chats without a message, "no_supervised" without an assistant's turn or with all of it behind seq_length,
    "special_text", and "refused_by_template" for those that the template raises an error for.
    Raises: ValueError if no row is left, for an id outside the vocabulary, and as tokenizer.encode_chats.
    """
    if on_special not in ("drop", "raise"):
        raise ValueError(f"on_special={on_special!r}: expected 'drop' or 'raise'")
    account = _Account(counters, seq_length, tokenizer.vocab_size if vocab_size is None else vocab_size, "chat")
    tokenizer.encode_chats([])  # finds a template that cannot be used
    stream = iter(chats)
    while batch := list(islice(stream, _BATCH)):
        wanted = [(name, turns) for name, turns in batch if account.is_wanted(turns)]
        for (name, _), found in zip(wanted, tokenizer.encode_chats(wanted), strict=True):
            if isinstance(found, RefusedChat):
                if found.reason == SPECIAL_TEXT and on_special == "raise":
                    raise ValueError(f"{found.found}. Remove it from the source, or have such chats dropped")
                account.drop(found.reason, found.found)
                continue
            row = account.row(name, np.asarray(found.ids, dtype=np.int64), np.asarray(found.mask, dtype=np.uint8))
            if row is not None:
                for what in (MERGED, *found.unsupervised) if found.merged else found.unsupervised:
                    account.count(what, 1)
                yield row
    account.end()


def given_rows(
    rows: Iterable[tuple[str, Mapping[str, Any]]], *, vocab_size: int, seq_length: int, counters: Counter[str]
) -> Iterator[Row]:
    """Yield rows, id and fields, that have ids and mask already, as they are; only those that supervise something.

    input_ids: integers below vocab_size; loss_mask: as many 0, 1 or bools; both lists or 1-D arrays.
    counters: as `chat_rows` has them, as far as they apply.
    Raises: ValueError naming row and field for anything else, and if no row is left.
    """
    account = _Account(counters, seq_length, vocab_size, "row")
    for name, fields in rows:
        ids, mask = (_array(name, fields, field) for field in GIVEN_FIELDS)
        if len(ids) != len(mask):
            raise ValueError(f"row {name!r}: loss_mask has {len(mask)} values, expected {len(ids)} as input_ids has")
        if ((mask != 0) & (mask != 1)).any():
            wrong = int(np.argmax((mask != 0) & (mask != 1)))
            raise ValueError(f"row {name!r}: loss_mask is {mask[wrong]} at token {wrong}, expected 0 or 1")
        row = account.row(name, ids, mask.astype(np.uint8))
        if row is not None:
            yield row
    account.end()


def _array(name: str, fields: Mapping[str, Any], field: str) -> NDArray[Any]:
    value = fields.get(field)
    if value is None:
        raise ValueError(f"row {name!r}: has no {field}, expected a list of integers")
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths in it
        array = np.empty((0, 0))
    if array.shape == (0,):
        return array.astype(np.int64)
    kinds, expected = ("iu", "integers") if field == "input_ids" else ("iub", "0 and 1")
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise ValueError(f"row {name!r}: {field} is {_printable(repr(value)[:60])}, expected a list of {expected}")
    return array


class _Account:
    """Makes rows, and counts what becomes of what was read."""

    def __init__(self, counters: Counter[str], seq_length: int, vocab_size: int, kind: str) -> None:
        if seq_length < 2:
            raise ValueError(f"seq_length={seq_length}: expected at least 2 tokens, one to see and one to predict")
        self._counters, self._seq_length, self._vocab_size, self._kind = counters, seq_length, vocab_size, kind
        self._dropped: Counter[str] = Counter()
        self._kept = 0
        self._first = ""  # what was found in the first one that was dropped for more than its shape

    def count(self, what: str, number: int) -> None:
        """Add to a counter; what never happened gets no entry."""
        if number:
            self._counters[what] += number

    def is_wanted(self, turns: Sequence[Mapping[str, str]]) -> bool:
        """Whether a chat has an assistant's turn; one that has none is counted."""
        if not turns:
            self.drop(EMPTY)
        elif all(turn["role"] != "assistant" for turn in turns):
            self.drop(NO_SUPERVISED)
        else:
            return True
        return False

    def drop(self, reason: str, found: str = "") -> None:
        """Count one that is dropped."""
        self.count(reason, 1)
        self._dropped[reason] += 1
        self._first = self._first or found

    def row(self, name: str, ids: NDArray[Any], mask: NDArray[np.uint8]) -> Row | None:
        """Cut ids and mask to a row; None for one that is dropped.

        The first token is never predicted, so it supervises nothing.
        """
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if len(wrong):
            raise ValueError(
                f"{self._kind} {name!r}: token {wrong[0]} of input_ids has id {ids[wrong[0]]}, expected 0 <= id < "
                f"{self._vocab_size}, the target's vocabulary. Use the target's own tokenizer"
            )
        cut = max(0, len(ids) - self._seq_length)
        ids, mask = ids[: self._seq_length], mask[: self._seq_length]
        if not mask[1:].any():
            self.drop(NO_SUPERVISED if len(ids) else EMPTY)
            return None
        self._kept += 1
        for what, number in ((ROWS, 1), (TRUNCATED, cut > 0), (TOKENS_CUT, cut)):
            self.count(what, number)
        return Row(name, ids.astype(np.int32), mask, cut)

    def end(self) -> None:
        """Raise ValueError unless a row is left."""
        if self._kept:
            return
        lost = ", ".join(f"{number} {reason}" for reason, number in sorted(self._dropped.items()))
        why = f"all {self._dropped.total()} were dropped: {lost}" if lost else "none was read"
        first = f". The first: {self._first}" if self._first else ""
        raise ValueError(
            f"not one {self._kind} is left for the target; {why}{first}. Expected at least one with a token of an "
            f"assistant's reply among its first {self._seq_length}"
        )


def show_rows(rows: Iterable[Row], tokenizer: ChatTokenizer, *, color: bool) -> str:
    """Return each row for a terminal: a heading, then its text, in which the supervised tokens are marked.

    They have a green background and the others are dim; without color they stand in [[ ]].
    """
    return "\n\n".join(f"{_heading(row)}\n{_marked(row, tokenizer, color)}" for row in rows)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _heading(row: Row) -> str:
    cut = f", {row.cut} more cut" if row.cut else ""
    return f"{_printable(row.id)}: {len(row.input_ids)} tokens, {int(row.loss_mask.sum())} supervised{cut}"


def _marked(row: Row, tokenizer: ChatTokenizer, color: bool) -> str:
    edges = [0, *(np.flatnonzero(np.diff(row.loss_mask)) + 1).tolist(), len(row.loss_mask)]
    parts = []
    for start, end in pairwise(edges):
        # Text that somebody wrote must not command the terminal.
        text = _CONTROLS.sub(
            lambda found: ascii(found.group())[1:-1], tokenizer.decode(row.input_ids[start:end].tolist())
        )
        if color:
            parts.append(f"{_GREEN if row.loss_mask[start] else _DIM}{text}{_PLAIN}")
        else:
            parts.append(f"[[{text}]]" if row.loss_mask[start] else text)
    return "".join(parts)
