"""Texts -> uint16 ids, a batch at a time, with the guards that a cache needs (D6, D16, D18)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from niels_gpt.build.stream import DIGEST_BYTES
from niels_gpt.build.writer import TOKEN_DTYPE
from niels_gpt.fileio import sha256_file
from niels_gpt.special_tokens import find_reserved_literal, sentinel_lookup

SENTINEL_TEXT = "sentinel_in_text"
SURROGATES = "texts_with_lone_surrogates_replaced"


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


@dataclass(frozen=True)
class EncodedTexts:
    """The ids of a batch of texts, and what is to be known of each before it may enter a cache."""

    ids: NDArray[np.uint16]
    """uint16 [tokens] of all texts in order; a text that must not enter has none."""
    lengths: NDArray[np.int64]
    """int64 [texts]: tokens of each text, the id at its end included."""
    utf8_bytes: NDArray[np.int64]
    """int64 [texts]: length of each text in utf-8."""
    digests: list[bytes]
    """The beginning of each text's sha256, as its source gave it."""
    problems: dict[int, tuple[str, str]]
    """Text number -> the counter under which it is dropped; what made it a problem, and the beginning of the text."""
    notes: dict[int, tuple[str, ...]]
    """Text number -> counters of what was repaired or is odd in it."""


@dataclass(frozen=True)
class TextEncoder:
    """Encodes batches of texts and checks every id. It may be pickled, for the workers of an executor.

    Texts are encoded ahead of their use, so a text is counted, or refused, only when it is taken: `accept`.
    """

    tokenizer: Tokenizer
    on_special: str = "drop"
    """What `accept` does with a text that holds a sentinel: "drop" names the counter, "raise" raises ValueError."""
    append: int | None = None
    """An id to put behind each text that has one."""

    def __post_init__(self) -> None:
        """Refuse a vocabulary whose ids do not fit uint16 (D18), before anything is written."""
        if self.on_special not in ("drop", "raise"):
            raise ValueError(f"on_special={self.on_special!r}: expected 'drop' or 'raise'")
        if self.vocab_size > 1 << 16:
            raise ValueError(f"a vocabulary of {self.vocab_size} ids does not fit uint16 tokens: at most 65536 do")

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return int(self.tokenizer.vocab_size)

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode texts in order, in the calling thread."""
        raw = [text.encode(errors="surrogatepass") for text in texts]
        repaired = [_repaired(text) for text in texts]
        literals = [find_reserved_literal(text) for text, _ in repaired]
        arrays = self._raw_ids(["" if bad else text for (text, _), bad in zip(repaired, literals, strict=True)])
        problems = {
            number: (SENTINEL_TEXT, _found(repaired[number][0], literal or "sentinel, once it is normalized"))
            for number, literal in enumerate(literals)
            if literal is not None
        }
        for number in self._with_sentinels(arrays):
            found = _found(repaired[number][0], "sentinel, once it is normalized")
            problems[number] = (SENTINEL_TEXT, found)
            arrays[number] = arrays[number][:0]
        end = None if self.append is None else np.array([self.append], dtype=np.int64)
        parts = arrays if end is None else [part for ids in arrays for part in ((ids, end) if len(ids) else (ids,))]
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        return EncodedTexts(
            ids=np.concatenate(parts, dtype=TOKEN_DTYPE, casting="unsafe") if parts else np.empty(0, TOKEN_DTYPE),
            lengths=lengths if end is None else lengths + (lengths > 0),
            utf8_bytes=np.fromiter(map(_utf8_length, repaired, raw), dtype=np.int64, count=len(raw)),
            digests=[sha256(text).digest()[:DIGEST_BYTES] for text in raw],
            problems=problems,
            notes={number: notes for number, (_, notes) in enumerate(repaired) if notes and number not in problems},
        )

    def accept(self, problem: tuple[str, str] | None) -> str | None:
        """Return the counter under which a text must be dropped; None for one that may be kept.

        Raises: ValueError for a text that holds a sentinel, if on_special is "raise".
        """
        if problem is not None and self.on_special == "raise":
            raise ValueError(f"{problem[1]}. Remove it from the source, or have such texts dropped")
        return None if problem is None else problem[0]

    def _raw_ids(self, texts: list[str]) -> list[NDArray[Any]]:
        batch: Callable[..., list[NDArray[Any]]] | None = getattr(self.tokenizer, "encode_batch", None)
        if batch is not None:
            return batch(texts, num_threads=1)
        return [np.asarray(self.tokenizer.encode(text), dtype=np.int64) for text in texts]

    def _with_sentinels(self, arrays: list[NDArray[Any]]) -> list[int]:
        """Return the texts whose ids hold a sentinel: a normalization may turn harmless text into its literal.

        Raises: ValueError for an id outside the vocabulary.
        """
        ids = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
        if not len(ids):
            return []
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"the tokenizer gave id {wrong}, expected ids below vocab_size={self.vocab_size}")
        is_sentinel = sentinel_lookup(self.tokenizer.special_token_ids(), self.vocab_size)
        if not is_sentinel[ids].any():
            return []
        return [number for number, of_text in enumerate(arrays) if is_sentinel[of_text].any()]


def _found(text: str, what: str) -> str:
    return f"a text holds the reserved {what}: {text[:80]!r}..."


def _utf8_length(repaired: tuple[str, tuple[str, ...]], raw: bytes) -> int:
    return len(repaired[0].encode()) if SURROGATES in repaired[1] else len(raw)


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
        notes = (*notes, SURROGATES)
    return text, notes
