"""Texts -> uint16 ids, a batch at a time, with the guards that a cache needs (D6, D16, D18)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from niels_gpt.build.writer import TOKEN_DTYPE
from niels_gpt.fileio import sha256_file
from niels_gpt.special_tokens import find_reserved_literal, sentinel_lookup

T = TypeVar("T")

BATCH_CHARS = 1 << 20  # a batch is closed by characters, so that memory does not depend on document lengths ...
BATCH_ITEMS = 1024  # ... nor on their number
SENTINEL_TEXT = "sentinel_in_text"


class Tokenizer(Protocol):
    """What a builder needs of a tokenizer. `encode_batch`, `model_path` and `decode` are used where they exist."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text, without BOS or EOS."""

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of the sentinels by sys, usr, asst and eot."""


def tokenizer_sha256(tokenizer: Tokenizer) -> str | None:
    """Return the sha256 of the model that a tokenizer opened; None where it has none, as a test's fake.

    To be asked before a build, not after: the file behind `model_path` may be replaced in the meantime.
    """
    known: str | None = getattr(tokenizer, "sha256", None)
    path = getattr(tokenizer, "model_path", None)
    return known if known is not None or path is None else sha256_file(path)


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The ids of one text, or the reason why it must not enter a cache."""

    ids: NDArray[np.uint16]
    """uint16 [tokens]; empty where there is a problem."""
    utf8_bytes: int
    """Length of the text in utf-8."""
    problem: str | None = None
    """The counter under which the text is dropped."""
    found: str | None = None
    """What made it a problem, and the beginning of the text."""
    notes: tuple[str, ...] = ()
    """Counters of what was repaired or is odd in a text that is kept."""


class TextEncoder:
    """Encodes batches of texts and checks every id.

    A batch is encoded ahead of its use, so a text is counted, or refused, only when it is taken: `accept`.
    """

    def __init__(self, tokenizer: Tokenizer, *, on_special: str = "drop", num_threads: int = 1) -> None:
        """on_special: what `accept` does with a text that holds a sentinel: "drop" names the counter, "raise" raises.

        Raises: ValueError for a vocabulary whose ids do not fit uint16 (D18), before anything is written.
        """
        if on_special not in ("drop", "raise"):
            raise ValueError(f"on_special={on_special!r}: expected 'drop' or 'raise'")
        self.vocab_size = int(tokenizer.vocab_size)
        if self.vocab_size > 1 << 16:
            raise ValueError(f"a vocabulary of {self.vocab_size} ids does not fit uint16 tokens: at most 65536 do")
        self.tokenizer = tokenizer
        self.tokenizer_sha256 = tokenizer_sha256(tokenizer)
        self.special_token_ids = dict(tokenizer.special_token_ids())
        self.noticed: Counter[str] = Counter()
        self._is_sentinel = sentinel_lookup(self.special_token_ids, self.vocab_size)
        self._on_special = on_special
        self._num_threads = num_threads

    def encode(self, texts: list[str]) -> list[EncodedText]:
        """Encode texts in order; the number of threads does not change the result."""
        repaired = [_repaired(text) for text in texts]
        literals = [find_reserved_literal(text) for text, _ in repaired]
        encoded = self._raw_ids(["" if bad else text for (text, _), bad in zip(repaired, literals, strict=True)])
        return [
            self._checked(text, notes, literal, ids)
            for (text, notes), literal, ids in zip(repaired, literals, encoded, strict=True)
        ]

    def accept(self, encoded: EncodedText) -> str | None:
        """Return the counter under which a text must be dropped; None for one that may be kept: then `note` it.

        Raises: ValueError for a text that holds a sentinel, if on_special is "raise".
        """
        if encoded.problem is not None and self._on_special == "raise":
            raise ValueError(f"{encoded.found}. Remove it from the source, or have such texts dropped")
        return encoded.problem

    def note(self, encoded: EncodedText) -> None:
        """Count what is odd about a text that is kept."""
        self.noticed.update(encoded.notes)

    def _raw_ids(self, texts: list[str]) -> list[NDArray[Any]]:
        batch: Callable[..., list[NDArray[Any]]] | None = getattr(self.tokenizer, "encode_batch", None)
        if batch is not None:
            return batch(texts, num_threads=self._num_threads)
        return [np.asarray(self.tokenizer.encode(text), dtype=np.int64) for text in texts]

    def _checked(self, text: str, notes: tuple[str, ...], literal: str | None, ids: NDArray[Any]) -> EncodedText:
        size = len(text) if text.isascii() else len(text.encode())
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self.vocab_size):
            raise ValueError(f"the tokenizer gave id {int(ids.max())}, expected ids below vocab_size={self.vocab_size}")
        # Also by id: a normalization may turn harmless text into a sentinel's literal.
        if literal is None and not (len(ids) and self._is_sentinel[ids].any()):
            return EncodedText(ids.astype(TOKEN_DTYPE), size, notes=notes)
        found = f"a text holds the reserved {literal or 'sentinel, once it is normalized'}: {text[:80]!r}..."
        return EncodedText(np.empty(0, TOKEN_DTYPE), size, SENTINEL_TEXT, found)


def _repaired(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the text as it can be encoded, and the counters of what is odd about it."""
    if text.isascii():
        return text, ()
    # SentencePiece's own mark for a space is the one character that does not come back (D7).
    notes = ("texts_with_u2581",) if "\u2581" in text else ()
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, utf-8 can not
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        notes = (*notes, "texts_with_lone_surrogates_replaced")
    return text, notes


def batches(items: Iterable[T], *, num_chars: Callable[[T], int]) -> Iterator[list[T]]:
    """Group a stream into lists of at most BATCH_ITEMS items and BATCH_CHARS characters; a longer item goes alone."""
    batch: list[T] = []
    chars = 0
    for item in items:
        size = num_chars(item)
        if batch and (chars + size > BATCH_CHARS or len(batch) >= BATCH_ITEMS):
            yield batch
            batch, chars = [], 0
        batch.append(item)
        chars += size
    if batch:
        yield batch
