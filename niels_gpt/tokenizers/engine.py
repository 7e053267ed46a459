"""Engines: they compute the ids of many texts at once. The ids do not depend on the engine.

engine = open_engine(tokenizer)                     # the fastest engine that is installed and knows the model
ids, lengths = engine.encode(texts, first=0)        # texts: UTF-8
engine.compare(texts, digests, first=0)             # raises E410 where a fast engine gives other ids

The reference is the library that the tokenizer was made for. A fast engine is compared with it during the build, in
pieces of some texts. Their digests choose them, so every build of equal text compares the same ones (D25).
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, cast
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from niels_gpt.storage.errors import CacheError, TokenizerError
from niels_gpt.tokenizers.gigatoken import INSTALL, GigatokenEngine, UnusableError, is_bpe
from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer
from niels_gpt.tokenizers.library import is_fast
from niels_gpt.tokenizers.probes import probe_texts
from niels_gpt.tokenizers.protocol import FullTokenizer, Tokenizer

logger = logging.getLogger(__name__)

CHOICES: Final = ("auto", "gigatoken", "reference")
"""The values of the setting `engine`."""
FIRST_COMPARED: Final = 100
"""The first texts of a stream, which are all compared with the reference, a piece of each."""
PIECE_BYTES: Final = 1 << 10
"""A longer text is compared in such pieces: for equal work, many texts show more faults than a few whole ones."""
ONE_COMPARED_OF: Final = 2000
"""One in this many pieces of all texts is compared. The reference takes 70 to 130 times as long as gigatoken
(benchmarks/build_fast.py), so this share costs about 5 % of gigatoken's time."""
_AROUND = 6  # tokens before and after a difference in its message
_NAMES: Final = {"sentencepiece": "sentencepiece", "huggingface": "tokenizers"}


class Engine(Protocol):
    """Encodes texts. Threads may share an engine. It can be pickled, and used after a fork."""

    name: str
    """gigatoken, tokenizers or sentencepiece; encode for a caller's own tokenizer. 1.0 of tokenizers has its number."""

    def encode(self, texts: Sequence[bytes], *, first: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the ids of all texts in order, integers [tokens], and the length of each text in ids, int64 [texts].

        texts: valid UTF-8. The literal of a control token may give its id, as with Tokenizer.encode.
        first: number of the first text in the build's stream.
        """

    def compare(self, texts: Sequence[bytes], digests: NDArray[np.uint64], *, first: int) -> None:
        """Compare the ids of `compared_pieces` with the reference's. digests: uint64 [texts]. first: see `encode`.

        Raises: EngineDifference E410 if the engine and the reference disagree.
        """


class EngineDifference(CacheError):
    """An engine gave other ids than the reference."""

    def __init__(self, path: str, number: int, difference: str, document: str = "") -> None:
        """path: the tokenizer's file. number: the document's, in the stream. document: its id and start of its text."""
        named = f"document {number} of the source{f' ({document})' if document else ''}: {difference}"
        remedy = "Build with the reference: --engine reference. A report to the engine's makers helps others"
        super().__init__(path, named, remedy=remedy, code="E410")
        self.number, self.difference, self.document = number, difference, document

    def named(self, number: int, document: str) -> EngineDifference:
        """Return the error with the document's number, id and the start of its text."""
        return EngineDifference(self.path, number, self.difference, document)

    def __reduce__(self) -> tuple[Any, ...]:
        return EngineDifference, (self.path, self.number, self.difference, self.document)


class ReferenceEngine:
    """The library that a tokenizer was made for, called through the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """tokenizer: with the methods of FullTokenizer, or a caller's own object with `encode`."""
        self._tokenizer = tokenizer
        self._batch = getattr(tokenizer, "encode_batch", None)
        self.name = _NAMES.get(getattr(tokenizer, "kind", ""), "encode")
        if isinstance(tokenizer, HuggingFaceTokenizer):
            self.name = tokenizer.library.name
        if self.name == "encode" and not _takes_threads(self._batch):  # a method of another meaning
            self._batch = None

    def encode(self, texts: Sequence[bytes], *, first: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return ids and lengths. Raises: TokenizerError E409 if the ids are not integers."""
        # SentencePiece takes UTF-8 as it is, and would encode a str again.
        batch = texts if self.name == "sentencepiece" else [str(text, "utf-8") for text in texts]
        if self._batch is not None:
            arrays: list[NDArray[Any]] = self._batch(batch, num_threads=1)
        else:
            arrays = [np.asarray(self._tokenizer.encode(cast(str, text))) for text in batch]
        if self.name == "encode":
            arrays = list(map(_integers, arrays))
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        return (np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)), lengths

    def compare(self, texts: Sequence[bytes], digests: NDArray[np.uint64], *, first: int) -> None:
        """Do nothing: its ids are the reference's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ReferenceEngine, (self._tokenizer,)


def _takes_threads(method: Any) -> bool:
    try:
        return "num_threads" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # no method, or a built-in one without a signature
        return False


def _integers(ids: Any) -> NDArray[np.int64]:
    array = np.asarray(ids)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        found = f"the tokenizer gave an array of {array.dtype}, shape {array.shape}"
        raise TokenizerError(f"{found}, for a text; expected a list of ids, which are integers", code="E409")
    return array.astype(np.int64, copy=False)


class ComparedEngine:
    """A fast engine that can be compared with the reference."""

    def __init__(self, fast: GigatokenEngine, reference: Engine, tokenizer: FullTokenizer) -> None:
        """fast, reference: engines of the same tokenizer."""
        self.name = fast.name
        self._fast, self._reference, self._tokenizer = fast, reference, tokenizer

    def encode(self, texts: Sequence[bytes], *, first: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return ids and lengths: the fast engine's, but the reference's for the few texts that may differ."""
        ids, lengths = self._fast.encode(texts)
        others = [index for index, text in enumerate(texts) if self._fast.may_differ(text)]
        return self._replaced(texts, ids, lengths, others, first) if others else (ids, lengths)

    def _replaced(
        self, texts: Sequence[bytes], ids: NDArray[Any], lengths: NDArray[np.int64], others: list[int], first: int
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return ids and lengths in which the reference encodes the texts `others`."""
        theirs, their_lengths = self._reference.encode([texts[index] for index in others], first=first)
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for index, part in zip(others, np.split(theirs, np.cumsum(their_lengths)[:-1]), strict=True):
            parts[index] = part.astype(ids.dtype)
        replaced = lengths.copy()
        replaced[others] = their_lengths
        return np.concatenate(parts), replaced

    def compare(self, texts: Sequence[bytes], digests: NDArray[np.uint64], *, first: int) -> None:
        """Compare some pieces, see Engine. Both engines encode the piece: a cut changes ids."""
        sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        counts = num_compared(sizes, digests, np.arange(first, first + len(texts)))
        chosen = [
            (first + index, piece)
            for index in np.flatnonzero(counts).tolist()
            for piece in compared_pieces(texts[index], int(digests[index]), int(counts[index]))
        ]
        if chosen:
            self.compare_all([piece for _, piece in chosen], [number for number, _ in chosen])

    def compare_all(self, texts: list[bytes], numbers: Sequence[int]) -> None:
        """Compare whole texts. numbers: of their documents in the stream. Raises: EngineDifference E410."""
        (ids, lengths), (expected, expected_lengths) = (each.encode(texts, first=0) for each in (self, self._reference))
        if np.array_equal(lengths, expected_lengths) and np.array_equal(ids, expected):
            return
        ends, expected_ends = np.cumsum(lengths)[:-1], np.cumsum(expected_lengths)[:-1]
        pairs = zip(numbers, np.split(ids, ends), np.split(expected, expected_ends), strict=True)
        for number, of_fast, of_reference in pairs:
            if not np.array_equal(of_fast, of_reference):
                names = f"{self.name} and {self._reference.name}"
                difference = _first_difference(self._tokenizer, names, of_fast.tolist(), of_reference.tolist())
                raise EngineDifference(self._tokenizer.model_path, number, difference)

    def __reduce__(self) -> tuple[Any, ...]:
        return ComparedEngine, (self._fast, self._reference, self._tokenizer)


def num_compared(
    sizes: NDArray[np.int64], digests: NDArray[np.uint64], numbers: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many pieces of each text are compared, int64 [texts].

    sizes: bytes of the texts. digests: of the texts, uint64. numbers: of the texts in the stream.
    """
    pieces = -(-sizes // PIECE_BYTES)
    found = (pieces + (digests % np.uint64(ONE_COMPARED_OF)).astype(np.int64)) // ONE_COMPARED_OF
    return np.maximum(found, (numbers < FIRST_COMPARED) & (sizes > 0))


def compared_pieces(text: bytes, digest: int, count: int) -> Iterator[bytes]:
    """Yield `count` pieces of UTF-8 text of at most PIECE_BYTES each, cut between characters. digest: says where."""
    pieces = -(-len(text) // PIECE_BYTES)
    for number in range(count):
        start = (digest // ONE_COMPARED_OF + number * pieces // count) % pieces * PIECE_BYTES
        yield text[_character(text, start) : _character(text, start + PIECE_BYTES)]


def _character(text: bytes, at: int) -> int:
    """Return where the character at byte `at` of UTF-8 text begins."""
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
        at -= 1
    return at


def compared_keys(num_pieces: int) -> dict[str, int | None]:
    """Return the value of `compared` in meta.json.

    So many pieces find, with 95 %, a fault in one of `finds_one_in` pieces: 1 - (1 - 1 / finds_one_in)^n = 0.95.
    """
    found = int(1 / -math.expm1(math.log(0.05) / num_pieces)) if num_pieces else None
    return {"pieces": num_pieces, "finds_one_in": found}


def _first_difference(tokenizer: FullTokenizer, names: str, found: list[int], expected: list[int]) -> str:
    at = next((at for at, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    at = min(len(found), len(expected)) if at is None else at
    a, b = (f"{ids[at]} ({tokenizer.token(ids[at])!a})" if at < len(ids) else "no id" for ids in (found, expected))
    around = tokenizer.decode(expected[max(0, at - _AROUND) : at + _AROUND])
    return f"{names} differ at token {at}: {a} and {b}, in {around!a}"


def open_engine(tokenizer: Tokenizer, choice: str = "auto") -> Engine:
    """Return the engine that encodes with a tokenizer.

    choice: "gigatoken", "reference", or "auto": gigatoken if it is installed and gives the reference's ids for the test
        texts, else the reference.
    Raises: ValueError for another choice; for "gigatoken", CacheError E901 if it is not installed, E411 if it cannot
        encode with this tokenizer, and TokenizerError E411 for a tokenizer of neither SentencePiece nor tokenizer.json;
        CacheError E402 if the tokenizer's file has changed.
    """
    engine = _opened(tokenizer, choice)
    with suppress(TypeError):  # an object without weak references
        _NAMES_BY_CHOICE.setdefault(tokenizer, {})[choice] = engine.name
    return engine


def engine_name(tokenizer: Tokenizer, choice: str = "auto") -> str:
    """Return the name of the engine that `open_engine` returns, from memory if it was called before."""
    with suppress(TypeError):
        if (name := _NAMES_BY_CHOICE.get(tokenizer, {}).get(choice)) is not None:
            return name
    return open_engine(tokenizer, choice).name


_NAMES_BY_CHOICE: WeakKeyDictionary[Tokenizer, dict[str, str]] = WeakKeyDictionary()


def _opened(tokenizer: Tokenizer, choice: str) -> Engine:
    if choice not in CHOICES:
        raise ValueError(f"engine={choice!r}: expected one of {', '.join(CHOICES)}")
    reference = ReferenceEngine(tokenizer)
    is_as_fast = False  # as gigatoken: tokenizers 1.0
    if isinstance(tokenizer, HuggingFaceTokenizer):
        is_as_fast = is_fast()
        if tokenizer.library.note:
            _say(tokenizer.library.note, "W413")
    if choice == "reference" or (choice == "auto" and (reference.name == "encode" or is_as_fast)):
        return reference
    if reference.name == "encode":
        found = f"{type(tokenizer).__name__} is neither a tokenizer.json nor a SentencePiece model"
        raise TokenizerError(f"gigatoken cannot be used: {found}. Leave engine out, or name the reference", code="E411")
    full = cast(FullTokenizer, tokenizer)
    try:
        fast = GigatokenEngine(full)
        engine = ComparedEngine(fast, reference, full)
        probes = probe_texts(fast.literals)
        engine.compare_all(probes, range(len(probes)))
    except (UnusableError, EngineDifference) as error:
        if choice == "gigatoken":
            raise _refusal(full, error) from error
        if isinstance(error, EngineDifference):
            logger.warning("%s; %s encodes", error.difference, reference.name, extra={"code": "W410"})
        elif error.code == "E901" and is_bpe(full):
            logger.info("builds with this tokenizer are many times as fast with gigatoken: %s", INSTALL)
        elif error.code != "E901" and not error.is_usual:
            _say(f"{full.model_path}: {reference.name} encodes, and many times as slowly as gigatoken: {error.reason}")
        return reference
    return engine


@functools.cache
def _say(text: str, code: str = "") -> None:
    """Log a text once: a run opens its tokenizer for each cache. code: of a warning."""
    logger.log(logging.WARNING if code else logging.INFO, text, extra={"code": code} if code else None)


def _refusal(tokenizer: FullTokenizer, error: UnusableError | EngineDifference) -> CacheError:
    if isinstance(error, UnusableError):
        remedy = error.remedy or "Leave --engine out, or name the reference: --engine reference"
        return CacheError(
            tokenizer.model_path, f"gigatoken cannot be used: {error.reason}", remedy=remedy, code=error.code
        )
    found = f"gigatoken cannot be used: on a test text {error.difference}"
    return CacheError(tokenizer.model_path, found, remedy="Use the reference: --engine reference", code="E411")
