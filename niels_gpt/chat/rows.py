"""Turn chats, or given ids and masks, into rows: truncate, check, count the dropped ones. Print rows.

tokenizer = open_tokenizer("meta-llama/Llama-3.1-8B-Instruct")
chats = [Chat("a", [{"role": "user", "content": "Hi"}, ...])]
rows = chat_rows(chats, tokenizer, seq_length=2048, counters=Counter())
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.chat.protocol import (
    CHANGED,
    EMPTY_REPLY,
    LEADING_REPLY,
    NOT_STABLE,
    SPECIAL_TEXT,
    Chat,
    ChatTokenizer,
    Messages,
    RefusedChat,
)
from niels_gpt.chat.template import REMEDY
from niels_gpt.storage.errors import InputError, SourceError, TemplateError

ROWS = "rows"
EMPTY, NO_SUPERVISED = "empty", "no_supervised"
TRUNCATED, TOKENS_CUT, MERGED = "truncated", "tokens_cut", "merged_at_reply_edge"
WITHOUT_LOSS = "turns_without_loss"
NOT_DROPPED = (
    *(TRUNCATED, TOKENS_CUT, MERGED, WITHOUT_LOSS),
    *(LEADING_REPLY, EMPTY_REPLY, *CHANGED),
)
"""Counters of kept rows. Every other counter, except ROWS, counts dropped chats or rows."""
GIVEN_FIELDS = ("input_ids", "loss_mask")
"""The fields of a given row."""
_BATCH = 256  # chats to encode at once
_GREEN, _DIM, _PLAIN = "\x1b[42;30m", "\x1b[2m", "\x1b[0m"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0, DEL and C1


@dataclass(frozen=True)
class Row:
    """One sample of L tokens, at most the sequence length; not shifted or padded."""

    id: str
    """Its id in the source."""
    input_ids: NDArray[np.int32]
    """int32 [L]."""
    loss_mask: NDArray[np.uint8]
    """uint8 [L]: 1 at each token that carries loss."""
    cut: int = 0
    """The number of tokens cut from its end."""


def chat_rows(
    chats: Iterable[Chat],
    tokenizer: ChatTokenizer,
    *,
    seq_length: int,
    counters: Counter[str],
    vocab_size: int | None = None,
    on_special: str = "drop",
) -> Iterator[Row]:
    """Yield the rows of chats, in order. Rows without a supervised token are dropped.

    vocab_size: the target's; None for the tokenizer's.
    on_special: for a chat with the literal of a special token, which the tokenizer would turn into that token: "drop"
        it, or "raise" SourceError E305.
    counters: receives "rows" and, of these, "truncated" to seq_length, their "tokens_cut", and "merged_at_reply_edge"
        for a supervised token that also holds characters outside of the reply. Receives dropped chats as "empty" (no
        message), "no_supervised" (no reply in the first seq_length tokens), "special_text", and "refused_by_template"
        (the template raises an error).
    Raises: InputError E709 for an id outside the vocabulary, and if no row is left; TemplateError E407 if the template
        cannot be used, or is not prefix-stable for a chat; TokenizerError E408 for a chat outside of the project's chat
        format.
    """
    if on_special not in ("drop", "raise"):
        raise InputError(f"on_special={on_special!r}: expected 'drop' or 'raise'")
    builder = _RowBuilder(counters, seq_length, tokenizer.vocab_size if vocab_size is None else vocab_size, "chat")
    tokenizer.encode_chats([])  # fail early if the template cannot be used
    stream = iter(chats)
    while batch := list(islice(stream, _BATCH)):
        kept = [chat for chat in batch if builder.has_reply(chat.messages)]
        for chat, encoded in zip(kept, tokenizer.encode_chats(kept), strict=True):
            if isinstance(encoded, RefusedChat):
                if encoded.reason == NOT_STABLE:
                    raise TemplateError(f"{tokenizer.name}: {encoded.found}. {REMEDY}")
                if encoded.reason == SPECIAL_TEXT and on_special == "raise":
                    raise SourceError(
                        f"{encoded.found}. Remove it from the source, or have such chats dropped", code="E305"
                    )
                builder.drop(encoded.reason, encoded.found)
                continue
            row = builder.row(chat.name, np.asarray(encoded.ids, np.int64), np.asarray(encoded.mask, np.uint8))
            if row is not None:
                counters.update([MERGED] * encoded.merged + list(encoded.unsupervised))
                if encoded.turns_without_loss:
                    counters[WITHOUT_LOSS] += encoded.turns_without_loss
                yield row
    builder.check_not_empty()


def given_rows(
    rows: Iterable[tuple[str, Mapping[str, Any]]], *, vocab_size: int, seq_length: int, counters: Counter[str]
) -> Iterator[Row]:
    """Yield rows from given ids and masks. Rows without a supervised token are dropped.

    rows: an id and two fields, lists or 1-D arrays of equal length: input_ids, integers from 0 to vocab_size - 1, and
        loss_mask, 0, 1 or bool.
    counters: receives "rows", "truncated", "tokens_cut", "empty" and "no_supervised", as in `chat_rows`.
    Raises: InputError E709, naming row and field, for any other value, and if no row is left.
    """
    builder = _RowBuilder(counters, seq_length, vocab_size, "row")
    for name, fields in rows:
        ids, mask = (_array(name, fields, field) for field in GIVEN_FIELDS)
        if len(ids) != len(mask):
            raise InputError(f"row {name!r}: loss_mask has {len(mask)} values, expected {len(ids)} as input_ids has")
        if ((mask != 0) & (mask != 1)).any():
            wrong = int(np.argmax((mask != 0) & (mask != 1)))
            raise InputError(f"row {name!r}: loss_mask is {mask[wrong]} at token {wrong}, expected 0 or 1")
        row = builder.row(name, ids, mask.astype(np.uint8))
        if row is not None:
            yield row
    builder.check_not_empty()


def _array(name: str, fields: Mapping[str, Any], field: str) -> NDArray[Any]:
    value = fields.get(field)
    if value is None:
        raise InputError(f"row {name!r}: has no {field}, expected a list of integers")
    try:
        array = np.asarray(value)
    except ValueError:  # a list of lists of different lengths
        array = np.empty((0, 0))
    if array.shape == (0,):
        return array.astype(np.int64)
    kinds, expected = ("iu", "integers") if field == "input_ids" else ("iub", "0 and 1")
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise InputError(f"row {name!r}: {field} is {_printable(repr(value)[:60])}, expected a list of {expected}")
    return array


class _RowBuilder:
    """Makes rows. Counts the kept and the dropped ones."""

    def __init__(self, counters: Counter[str], seq_length: int, vocab_size: int, kind: str) -> None:
        if seq_length < 2:
            raise InputError(f"seq_length={seq_length}: expected at least 2 tokens, one to see and one to predict")
        self._counters, self._seq_length, self._vocab_size, self._kind = counters, seq_length, vocab_size, kind
        self._dropped: Counter[str] = Counter()
        self._kept = 0
        self._first_problem = ""

    def has_reply(self, messages: Messages) -> bool:
        """Return whether a chat has a message of the assistant; counts a chat without one as dropped."""
        if any(isinstance(each, Mapping) and each.get("role") == "assistant" for each in messages):
            return True
        self.drop(NO_SUPERVISED if messages else EMPTY)
        return False

    def drop(self, reason: str, problem: str = "") -> None:
        """Count a dropped chat or row. problem: for the error that is raised if no row is left."""
        self._counters[reason] += 1
        self._dropped[reason] += 1
        self._first_problem = self._first_problem or problem

    def row(self, name: str, ids: NDArray[Any], mask: NDArray[np.uint8]) -> Row | None:
        """Truncate ids and mask to a row; None for a dropped one."""
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if len(wrong):
            raise InputError(
                f"{self._kind} {name!r}: token {wrong[0]} of input_ids has id {ids[wrong[0]]}, expected 0 <= id < "
                f"{self._vocab_size}, the target's vocabulary. Use the target's own tokenizer"
            )
        cut = max(0, len(ids) - self._seq_length)
        ids, mask = ids[: self._seq_length], mask[: self._seq_length]
        if not mask[1:].any():  # no position predicts the first token
            self.drop(NO_SUPERVISED if len(ids) else EMPTY)
            return None
        self._kept += 1
        self._counters[ROWS] += 1
        if cut:
            self._counters.update({TRUNCATED: 1, TOKENS_CUT: cut})
        return Row(name, ids.astype(np.int32), mask, cut)

    def check_not_empty(self) -> None:
        """Raise InputError E709 unless a row was kept."""
        if self._kept:
            return
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(self._dropped.items()))
        why = f"all {self._dropped.total()} were dropped: {reasons}" if reasons else "none was read"
        first = f". The first: {self._first_problem}" if self._first_problem else ""
        raise InputError(
            f"not one {self._kind} is left for the target; {why}{first}. Expected at least one with a token of an "
            f"assistant's reply among its first {self._seq_length}"
        )


def show_rows(rows: Iterable[Row], tokenizer: ChatTokenizer, *, color: bool) -> str:
    """Return a heading and the text of each row, for a terminal.

    color: supervised tokens on green, the others dim; without color supervised tokens stand in [[ ]].
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
        decoded = tokenizer.decode(row.input_ids[start:end].tolist())
        text = _CONTROLS.sub(lambda found: ascii(found.group())[1:-1], decoded)  # it must not command the terminal
        if color:
            parts.append(f"{_GREEN if row.loss_mask[start] else _DIM}{text}{_PLAIN}")
        else:
            parts.append(f"[[{text}]]" if row.loss_mask[start] else text)
    return "".join(parts)
