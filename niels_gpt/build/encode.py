"""Texts -> uint16 ids, a batch at a time, with the guards that a cache needs (D6, D16, D18)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from niels_gpt.build.writer import TOKEN_DTYPE
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


def tokenizer_path(tokenizer: Tokenizer) -> Path | None:
    """Return the model file behind a tokenizer; None where it has none, as a test's fake."""
    path = getattr(tokenizer, "model_path", None)
    return None if path is None else Path(path)


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The ids of one text, or the reason why it must not enter a cache."""

    ids: NDArray[np.uint16]
    """uint16 [tokens]; empty where there is a problem."""
    utf8_bytes: int
    """Length of the text in utf-8."""
    problem: str | None = None
    """The counter under which the text is dropped."""


class TextEncoder:
    """Encodes batches of texts, checks every id, and counts what it repaired or found odd in `noticed`."""

    def __init__(self, tokenizer: Tokenizer, *, on_special: str = "drop", num_threads: int = 1) -> None:
        """on_special: "drop" marks a text that holds a sentinel as a problem, "raise" raises ValueError.

        Raises: ValueError for a vocabulary whose ids do not fit uint16 (D18), before anything is written.
        """
        if on_special not in ("drop", "raise"):
            raise ValueError(f"on_special={on_special!r}: expected 'drop' or 'raise'")
        self.vocab_size = int(tokenizer.vocab_size)
        if self.vocab_size > 1 << 16:
            raise ValueError(f"a vocabulary of {self.vocab_size} ids does not fit uint16 tokens: at most 65536 do")
        self.tokenizer = tokenizer
        self.special_token_ids = dict(tokenizer.special_token_ids())
        self.noticed: Counter[str] = Counter()
        self._is_sentinel = sentinel_lookup(self.special_token_ids, self.vocab_size)
        self._on_special = on_special
        self._num_threads = num_threads

    def encode(self, texts: list[str]) -> list[EncodedText]:
        """Encode texts in order; the number of threads does not change the result."""
        texts = [self._repaired(text) for text in texts]
        literals = [find_reserved_literal(text) for text in texts]
        encoded = self._raw_ids(["" if literal else text for text, literal in zip(texts, literals, strict=True)])
        return [self._checked(*item) for item in zip(texts, literals, encoded, strict=True)]

    def _raw_ids(self, texts: list[str]) -> list[NDArray[Any]]:
        batch: Callable[..., list[NDArray[Any]]] | None = getattr(self.tokenizer, "encode_batch", None)
        if batch is not None:
            return batch(texts, num_threads=self._num_threads)
        return [np.asarray(self.tokenizer.encode(text), dtype=np.int64) for text in texts]

    def _repaired(self, text: str) -> str:
        if text.isascii():
            return text
        if "\u2581" in text:  # SentencePiece's own mark for a space: the one character that does not come back (D7)
            self.noticed["texts_with_u2581"] += 1
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can spell half a surrogate pair, utf-8 can not
            self.noticed["texts_with_lone_surrogates_replaced"] += 1
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return text

    def _checked(self, text: str, literal: str | None, ids: NDArray[Any]) -> EncodedText:
        size = len(text) if text.isascii() else len(text.encode())
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self.vocab_size):
            raise ValueError(f"the tokenizer gave id {int(ids.max())}, expected ids below vocab_size={self.vocab_size}")
        # Also by id: a normalization may turn harmless text into a sentinel's literal.
        if literal is None and not (len(ids) and self._is_sentinel[ids].any()):
            return EncodedText(ids.astype(TOKEN_DTYPE), size)
        if self._on_special == "raise":
            raise ValueError(
                f"a text holds the reserved {literal or 'sentinel id'}: {text[:80]!r}... Remove it, or drop it"
            )
        return EncodedText(np.empty(0, TOKEN_DTYPE), size, SENTINEL_TEXT)


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
