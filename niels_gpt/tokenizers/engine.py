"""Engines: what computes the ids of many texts at once. The ids do not depend on which one does.

engine = open_engine(tokenizer)                     # the fastest one that is installed and knows the model
ids, lengths = engine.encode(texts, first=0)        # texts: UTF-8

The reference is the library that the tokenizer was made for. Another engine is compared with it while it works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from niels_gpt.storage.errors import CacheError
from niels_gpt.tokenizers.protocol import Tokenizer

CHOICES: Final = ("auto", "gigatoken", "reference")
"""Of the setting `engine`."""
_NAMES: Final = {"sentencepiece": "sentencepiece", "huggingface": "tokenizers"}


class Engine(Protocol):
    """Encodes texts. Several threads may call one engine at once. It can be pickled, and used after a fork."""

    name: str
    """gigatoken, tokenizers, sentencepiece, or encode for a caller's own tokenizer."""

    def encode(self, texts: Sequence[bytes], *, first: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the ids of all texts in order, integers [tokens], and the number of ids of each text, int64 [texts].

        texts: valid UTF-8. The literal of a control token in a text may give its id, as with Tokenizer.encode.
        first: the number of the first text in the stream of the build.
        Raises: EngineDifference.
        """


class EngineDifference(CacheError):
    """An engine gave other ids than the reference."""

    def __init__(self, path: str, number: int, difference: str, document: str = "") -> None:
        """path: of the tokenizer. number: of the document in the stream. document: what else is known of it."""
        named = f"document {number} of the source{f' ({document})' if document else ''}: {difference}"
        remedy = "Build with the reference: --engine reference. A report to the engine's makers helps others"
        super().__init__(path, named, remedy=remedy, code="E410")
        self.number, self.difference, self.document = number, difference, document

    def named(self, document: str) -> EngineDifference:
        """Return the same error with more about the document: its id and the beginning of its text."""
        return EngineDifference(self.path, self.number, self.difference, document)

    def __reduce__(self) -> tuple[Any, ...]:
        return EngineDifference, (self.path, self.number, self.difference, self.document)


class ReferenceEngine:
    """The library that a tokenizer was made for, through the tokenizer itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Take a tokenizer with the methods of FullTokenizer, or a caller's own object with `encode` alone."""
        self._tokenizer = tokenizer
        self._batch = getattr(tokenizer, "encode_batch", None)
        self.name = _NAMES.get(getattr(tokenizer, "kind", ""), "encode")

    def encode(self, texts: Sequence[bytes], *, first: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return ids and lengths; see Engine."""
        # SentencePiece takes UTF-8 as it is, and would encode a str again.
        batch = texts if self.name == "sentencepiece" else [str(text, "utf-8") for text in texts]
        if self._batch is not None:
            arrays: list[NDArray[Any]] = self._batch(batch, num_threads=1)
        else:
            arrays = [np.asarray(self._tokenizer.encode(cast(str, text)), dtype=np.int64) for text in batch]
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        return (np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)), lengths

    def __reduce__(self) -> tuple[Any, ...]:
        return ReferenceEngine, (self._tokenizer,)


def open_engine(tokenizer: Tokenizer, choice: str = "auto") -> Engine:
    """Return the engine that encodes with a tokenizer.

    choice: auto, gigatoken or reference. Raises: ValueError for another choice.
    """
    if choice not in CHOICES:
        raise ValueError(f"engine={choice!r}: expected one of {', '.join(CHOICES)}")
    return ReferenceEngine(tokenizer)
