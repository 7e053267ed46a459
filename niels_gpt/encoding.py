"""Texts -> uint16 ids, a batch at a time, with the guards that a cache needs (D6, D16, D18).

Decides what the ids of a text are, which texts are dropped for a sentinel, and what counts as repaired or odd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from niels_gpt.special_tokens import find_reserved_literal, sentinel_lookup
from niels_gpt.storage.codes import coded
from niels_gpt.tokenizers.protocol import Tokenizer

TOKEN_DTYPE: Final[np.dtype[np.uint16]] = np.dtype("<u2")
DIGEST_BYTES = 8
"""First bytes of a sha256 that stand for a text."""
SENTINEL_TEXT = "sentinel_in_text"
SURROGATES = "texts_with_lone_surrogates_replaced"


def split_keys(texts: Iterable[bytes], seed: int) -> NDArray[np.uint64]:
    """Return the number that decides each text's split: the first 8 bytes, big-endian, of sha256(seed, newline, text).

    texts: utf-8 with the "surrogatepass" error handler. Returns uint64 [texts].
    """
    start = sha256(f"{seed}\n".encode())
    digests = []
    for text in texts:
        state = start.copy()
        state.update(text)
        digests.append(state.digest()[:8])
    return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)


def text_digest(text: str) -> bytes:
    """Return the first 8 bytes of the sha256 of a text's utf-8."""
    return sha256(text.encode(errors="surrogatepass")).digest()[:DIGEST_BYTES]


@dataclass(frozen=True)
class EncodedTexts:
    """The ids of a batch of texts, and the findings that decide whether each may enter a cache."""

    ids: NDArray[np.uint16]
    """uint16 [tokens] of all texts in order; a text with a problem has none."""
    lengths: NDArray[np.int64]
    """int64 [texts]: tokens of each text, the appended id included."""
    utf8_bytes: NDArray[np.int64]
    """int64 [texts]: length of each text in utf-8."""
    digests: list[bytes]
    """`text_digest` of each text, before any repair."""
    keys: NDArray[np.uint64]
    """uint64 [texts], `split_keys`; [0] without a split seed."""
    problems: dict[int, tuple[str, str]]
    """Text number -> (the counter under which it is dropped, a description with the beginning of the text)."""
    notes: dict[int, tuple[str, ...]]
    """Text number -> counters of what was repaired or is odd in it."""


@dataclass(frozen=True)
class TextEncoder:
    """Encodes batches of texts and checks every id. It can be pickled, for the workers of an executor.

    Texts are encoded ahead of their use; only `accept`, called when a text is used, counts or refuses it.
    """

    tokenizer: Tokenizer
    on_special: str = "drop"
    """What `accept` does with a text that holds a sentinel: "drop" names the counter, "raise" raises ValueError."""
    append: int | None = None
    """An id to append to each text that has tokens."""
    split_seed: int | None = None
    """The seed of `split_keys`; None: no keys."""

    def __post_init__(self) -> None:
        """Refuse a vocabulary whose ids do not fit uint16 (D18), before a build writes anything."""
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
        problems: dict[int, tuple[str, str]] = {}
        for number, (text, _) in enumerate(repaired):
            literal = find_reserved_literal(text)
            if literal is not None:
                problems[number] = (SENTINEL_TEXT, _problem_text(text, literal))
        arrays = self._raw_ids(["" if number in problems else text for number, (text, _) in enumerate(repaired)])
        ids, num_ends = self._joined(arrays)
        is_sentinel = _sentinel_test(self.tokenizer.special_token_ids(), self.vocab_size)
        if np.count_nonzero(is_sentinel(ids)) != num_ends:  # normalization produced a sentinel
            for number, of_text in enumerate(arrays):
                if is_sentinel(of_text.astype(TOKEN_DTYPE)).any():
                    problems[number] = (
                        SENTINEL_TEXT,
                        _problem_text(repaired[number][0], "sentinel after normalization"),
                    )
                    arrays[number] = of_text[:0]
            ids, num_ends = self._joined(arrays)
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        return EncodedTexts(
            ids=ids,
            lengths=lengths if self.append is None else lengths + (lengths > 0),
            utf8_bytes=np.fromiter(map(_utf8_length, repaired, raw), dtype=np.int64, count=len(raw)),
            digests=[sha256(text).digest()[:DIGEST_BYTES] for text in raw],
            keys=split_keys([] if self.split_seed is None else raw, self.split_seed or 0),
            problems=problems,
            notes={number: notes for number, (_, notes) in enumerate(repaired) if notes and number not in problems},
        )

    def accept(self, problem: tuple[str, str] | None) -> str | None:
        """Return the counter under which a text is dropped; None for a text that is kept.

        Raises: ValueError for a text with a sentinel if on_special is "raise".
        """
        if problem is not None and self.on_special == "raise":
            raise coded(
                "E305", ValueError(f"{problem[1]}. Remove it from the source, or drop such texts: on_special=drop")
            )
        return None if problem is None else problem[0]

    def _raw_ids(self, texts: list[str]) -> list[NDArray[Any]]:
        batch: Callable[..., list[NDArray[Any]]] | None = getattr(self.tokenizer, "encode_batch", None)
        if batch is not None:
            return batch(texts, num_threads=1)
        return [np.asarray(self.tokenizer.encode(text), dtype=np.int64) for text in texts]

    def _joined(self, arrays: list[NDArray[Any]]) -> tuple[NDArray[np.uint16], int]:
        """Return all ids, each text's followed by `append`, and the number of appended ids.

        Raises: ValueError for an id outside the vocabulary.
        """
        full = [of_text for of_text in arrays if len(of_text)]
        if not full:
            return np.empty(0, dtype=TOKEN_DTYPE), 0
        end = np.array([self.append] if self.append is not None else [], dtype=full[0].dtype)
        ids = np.concatenate([part for of_text in full for part in (of_text, end)] if len(end) else full)
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise coded(
                "E409", ValueError(f"the tokenizer gave id {wrong}, expected ids below vocab_size={self.vocab_size}")
            )
        return ids.astype(TOKEN_DTYPE), len(full) * len(end)


def _sentinel_test(special_ids: Mapping[str, int], vocab_size: int) -> Callable[[NDArray[np.uint16]], Any]:
    """Return a function that finds sentinels among ids; comparing a range is three times as fast as a lookup."""
    first, last = min(special_ids.values()), max(special_ids.values())
    if last - first + 1 == len(set(special_ids.values())):
        return lambda ids: (ids - np.uint16(first)) <= last - first  # uint16: ids below `first` wrap around
    table = sentinel_lookup(special_ids, vocab_size)
    return lambda ids: table[ids]


def _problem_text(text: str, what: str) -> str:
    return f"a text holds the reserved {what}: {text[:80]!r}..."


def _utf8_length(repaired: tuple[str, tuple[str, ...]], raw: bytes) -> int:
    return len(repaired[0].encode()) if SURROGATES in repaired[1] else len(raw)


def _repaired(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the text without lone surrogates, and the counters of what is odd about it."""
    if text.isascii():
        return text, ()
    # U+2581, SentencePiece's mark for a space, is the one character that does not survive a round trip (D7).
    notes = ("texts_with_u2581",) if "\u2581" in text else ()
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can hold half a surrogate pair, utf-8 cannot
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        notes = (*notes, SURROGATES)
    return text, notes
