"""Encode texts as ids in a cache's dtype, a batch at a time, with the checks that a cache needs (D6, D16, D18).

Decides the ids of a text, which texts are dropped for a special token, and which are counted as repaired or odd.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from niels_gpt.signals import odd_in_text
from niels_gpt.special_tokens import find_reserved_literal
from niels_gpt.storage.codes import code_of
from niels_gpt.storage.errors import CodedError, SourceError, TokenizerError
from niels_gpt.tokenizers.engine import Engine, open_engine
from niels_gpt.tokenizers.protocol import Tokenizer, control_ids, token_dtype

DIGEST_BYTES = 8
"""Bytes of a sha256 that stand for a text."""
DIGEST_DTYPE: Final[np.dtype[np.uint64]] = np.dtype("<u8")
ON_SPECIAL = ("drop", "raise", "text")
SENTINEL_TEXT = "sentinel_in_text"
SPECIAL_TEXT = "special_in_text"
AS_TEXT = "special_as_text"
SURROGATES = "texts_with_lone_surrogates_replaced"
U2581 = "texts_with_u2581"
"""U+2581, the mark for a space in SentencePiece and its like: the one character that a round trip changes (D7)."""

_DROP = "Drop such texts: --on-special drop"
_OTHERS = "drop such texts: --on-special drop, or encode them as text: --on-special text"
_SHOWN = 80  # characters of a text in a message


def split_keys(texts: Iterable[bytes], seed: int) -> NDArray[np.uint64]:
    """Return the number that decides each text's split, uint64 [texts].

    It is the first 8 bytes, big-endian, of sha256(seed, newline, text). texts: UTF-8 with "surrogatepass".
    """
    return _hashes(texts, seed)[0]


def _hashes(texts: Iterable[bytes], seed: int | None) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return split keys, uint64 [texts] or [0] without a seed, and digests, uint64 [texts], with one hash a text."""
    if seed is None:
        plain = b"".join([sha256(text).digest() for text in texts])
        return np.empty(0, dtype=np.uint64), np.frombuffer(plain, dtype=DIGEST_DTYPE).reshape(-1, 4)[:, 0].copy()
    copy, digests = sha256(f"{seed}\n".encode()).copy, []
    for text in texts:
        state = copy()
        state.update(text)
        digests.append(state.digest())
    words = np.frombuffer(b"".join(digests), dtype=DIGEST_DTYPE).reshape(-1, 4)
    return words[:, 0].byteswap(), words[:, 1].copy()


class TextError(CodedError, ValueError, code="E102"):
    """A text of a source cannot be encoded."""

    def __init__(self, number: int, problem: str, document: str = "", *, code: str = "") -> None:
        """number: of the text in the stream. document: its id and the start of its text."""
        super().__init__(number, problem, document, code=code)
        self.number, self.problem, self.document = number, problem, document

    def __str__(self) -> str:
        return f"document {self.number} of the source{f' ({self.document})' if self.document else ''}: {self.problem}"

    def named(self, number: int, document: str) -> TextError:
        """Return the error with the document's number, id and the start of its text."""
        return TextError(number, self.problem, document, code=self.code)


@dataclass(frozen=True)
class EncodedTexts:
    """The ids of a batch of texts, and the findings that decide whether each text may enter a cache."""

    ids: NDArray[Any]
    """[tokens] in the cache's dtype, text after text; a text with a problem has none."""
    lengths: NDArray[np.int64]
    """int64 [texts]: ids of each text, `prepend` and `append` included."""
    utf8_bytes: NDArray[np.int64]
    """int64 [texts]: bytes of each text in UTF-8."""
    digests: NDArray[np.uint64]
    """uint64 [texts]: equal for equal texts, before any repair (`TextEncoder.hashes`)."""
    keys: NDArray[np.uint64]
    """uint64 [texts], `split_keys`; [0] without a split seed."""
    problems: dict[int, tuple[str, str]]
    """Text number -> (the counter under which it is dropped, a description with the start of the text)."""
    notes: dict[int, tuple[str, ...]]
    """Text number -> counters of repairs and oddities."""


@dataclass(frozen=True)
class TextEncoder:
    """Encodes batches of texts and checks every id. It can be pickled, for the workers of an executor.

    Texts are encoded ahead of their use; only `accept`, called when a text is used, counts or refuses it.
    """

    tokenizer: Tokenizer
    on_special: str = "drop"
    """For a text that holds a special token: "drop": `accept` names the counter; "raise": `accept` raises ValueError;
    "text": it is encoded as plain text, without the special id."""
    append: int | None = None
    """An id to append to each text that has tokens. No text may give it: it counts as a special token."""
    prepend: int | None = None
    """An id to put before each text that has tokens, as `append`."""
    split_seed: int | None = None
    """The seed of `split_keys`; None: no keys."""
    engine: Engine | None = None
    """The engine; None for the choice of `open_engine`."""
    loses_u2581: bool = field(init=False, repr=False)
    """Whether the tokenizer turns U+2581 into a space."""

    def __post_init__(self) -> None:
        """Refuse settings before a build writes anything."""
        if self.on_special not in ON_SPECIAL:
            raise ValueError(f"on_special={self.on_special!r}: expected 'drop', 'raise' or 'text'")
        if self.on_special == "text" and getattr(self.tokenizer, "encode_plain", None) is None:
            raise ValueError(
                f"on_special='text': the tokenizer ({type(self.tokenizer).__name__}) has no encode_plain, which "
                "encodes special tokens as plain text"
            )
        _is_control(self.tokenizer, self.added_ids)
        if self.engine is None:
            object.__setattr__(self, "engine", open_engine(self.tokenizer))
        object.__setattr__(self, "loses_u2581", _loses(self.tokenizer, "a\u2581b"))

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids `prepend` and `append` that are set."""
        return frozenset(each for each in (self.prepend, self.append) if each is not None)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return int(self.tokenizer.vocab_size)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the ids."""
        return token_dtype(self.vocab_size)

    def hashes(self, texts: Sequence[bytes | str]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the split keys and the digests of texts, before any repair: uint64 [texts] each.

        A digest is bytes 8 to 16 of the sha256 that the key begins; without a split seed it is the first 8 bytes.
        """
        return _hashes([_utf8(text) for text in texts], self.split_seed)

    def encode(self, texts: Sequence[bytes | str], first: int = 0) -> EncodedTexts:
        """Encode texts in order, in the calling thread.

        texts: valid UTF-8, or str, in which lone surrogates are replaced. first: number of the first in the stream.
        Raises: TextError E408 or E305 for a text that the tokenizer cannot encode; TokenizerError E409 for an id
            outside the vocabulary; EngineDifference E410 for one that the reference does not give.
        """
        assert self.engine is not None
        raw = [_utf8(text) for text in texts]
        clean, notes = _repaired(raw, texts, self.loses_u2581)
        problems = self._literals(clean)
        safe = [b"" if number in problems else text for number, text in enumerate(clean)] if problems else clean
        try:
            ids, lengths = self._engine_ids(safe, first)
        except ValueError as error:
            if code_of(error) != "E408":
                raise
            raise _of_one_text(
                error, lambda number: self._engine_ids([safe[number]], first), range(len(safe)), first
            ) from error
        keys, digests = _hashes(raw, self.split_seed)
        self.engine.compare(safe, digests, first=first)
        self._check_range(ids)
        if special := self._with_special(ids, lengths, clean):
            ends = np.cumsum(lengths)
            for number in special:
                of_text = ids[ends[number] - lengths[number] : ends[number]]
                problems[number] = self._problem(clean[number], of_text)
            ids, lengths = _replaced(ids, lengths, {number: ids[:0] for number in problems})
        if problems and self.on_special == "text":
            ids, lengths = self._as_text(ids, lengths, clean, sorted(problems), first)
            for number in problems:
                notes[number] = (*notes.get(number, ()), AS_TEXT)
            problems = {}
        ids, lengths = self._with_added(ids.astype(self.dtype, copy=False), lengths)
        return EncodedTexts(
            ids=ids,
            lengths=lengths,
            utf8_bytes=np.fromiter(map(len, clean), dtype=np.int64, count=len(clean)),
            digests=digests,
            keys=keys,
            problems=problems,
            notes={number: found for number, found in notes.items() if number not in problems},
        )

    def _with_special(self, ids: NDArray[Any], lengths: NDArray[np.int64], texts: list[bytes]) -> list[int]:
        """Return the numbers of the texts with a special id, ascending.

        The unknown id counts only if the text holds its literal; else it stands for an unknown character.
        """
        is_special = _is_control(self.tokenizer, self.added_ids)(ids)
        is_unknown = None if self._unk is None else ids == self._unk[0]
        if not is_special.any() and (is_unknown is None or not is_unknown.any()):
            return []
        ends = np.cumsum(lengths)
        found = set(ends.searchsorted(is_special.nonzero()[0], side="right").tolist())
        if self._unk is not None and is_unknown is not None:
            unknown = set(ends.searchsorted(is_unknown.nonzero()[0], side="right").tolist())
            found |= {number for number in unknown if self._unk[1] in texts[number]}
        return sorted(found)

    @cached_property
    def _unk(self) -> tuple[int, bytes] | None:
        """The unknown id and its literal, where the tokenizer reads the literal as that id."""
        unk_id: int | None = getattr(self.tokenizer, "unk_id", None)
        added: Callable[[], Mapping[str, bool]] | None = getattr(self.tokenizer, "added_tokens", None)
        if unk_id is None or added is None:
            return None
        literal = str(self.tokenizer.token(unk_id))  # type: ignore[attr-defined]
        return (unk_id, literal.encode(errors="replace")) if literal in added() else None

    def accept(self, problem: tuple[str, str] | None, name: str) -> str | None:
        """Return the counter under which a text is dropped; None for a text that is kept.

        name: the id of its document.

        Raises: ValueError for a text with a special token if on_special is "raise".
        """
        if problem is not None and self.on_special == "raise":
            raise SourceError(f"document {name!r}: {problem[1]}. Remove it from the source, or {_OTHERS}", code="E305")
        return None if problem is None else problem[0]

    def drops(self, text: bytes | str) -> bool:
        """Return whether a text is dropped for a special token; only a text that may give one is encoded."""
        raw = _utf8(text)
        if self.on_special == "text":
            return False
        if self._literals([raw]):
            return True
        # A token of ordinary text has no literal that tells where it comes from.
        is_word = not self.added_ids <= control_ids(self.tokenizer)
        return (is_word or bool(self._special.search(raw))) and self._is_problem(text)

    def _is_problem(self, text: bytes | str) -> bool:
        try:
            return bool(self.encode([text]).problems)
        except TextError:  # raised again, with the document, when the text is used
            return True

    def _engine_ids(self, texts: list[bytes], first: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        assert self.engine is not None
        return self.engine.encode(texts, first=first)

    @cached_property
    def _special(self) -> re.Pattern[bytes]:
        """Finds the literals of special tokens."""
        token = getattr(self.tokenizer, "token", None)
        literals = sorted(filter(None, map(token, control_ids(self.tokenizer)))) if token else []
        known = [literal.encode(errors="replace") for literal in literals] + ([self._unk[1]] if self._unk else [])
        return re.compile(b"|".join(map(re.escape, known)) or rb"(?!)")

    def _literals(self, texts: list[bytes]) -> dict[int, tuple[str, str]]:
        """Return the problem of each text with a reserved literal; no literal is reserved without the sentinels."""
        if not self.tokenizer.special_token_ids():
            return {}
        found = {}
        # Nearly no text has one; searching one character is much faster.
        for number in [number for number, text in enumerate(texts) if b"|" in text and b"<|" in text]:
            text = texts[number].decode(errors="replace")
            if (literal := find_reserved_literal(text)) is not None:
                found[number] = (SENTINEL_TEXT, _problem_text(text, f"reserved {literal}"))
        return found

    def _problem(self, text: bytes, ids: NDArray[Any]) -> tuple[str, str]:
        """Describe a text whose ids hold a special one."""
        shown = text.decode(errors="replace")
        if np.isin(ids, list(self.tokenizer.special_token_ids().values())).any():
            return SENTINEL_TEXT, _problem_text(shown, "reserved sentinel after normalization")
        found = ids[_is_control(self.tokenizer, self.added_ids)(ids)]
        special = int(found[0]) if len(found) else self._unk[0] if self._unk else 0
        name = getattr(self.tokenizer, "token", None)
        return SPECIAL_TEXT, _problem_text(shown, f"special token {name(special)!r}" if name else f"id {special}")

    def _as_text(
        self, ids: NDArray[Any], lengths: NDArray[np.int64], texts: list[bytes], numbers: list[int], first: int
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Replace the ids of some texts by their plain encoding. Raises: TextError E305 if it has a special id too."""
        encode_plain: Callable[[list[str]], list[NDArray[Any]]] = self.tokenizer.encode_plain  # type: ignore[attr-defined]
        asked = [texts[number].decode() for number in numbers]
        try:
            plain = encode_plain(asked)
        except ValueError as error:
            if code_of(error) not in ("E305", "E408"):
                raise
            raise _of_one_text(error, lambda at: encode_plain([asked[at]]), numbers, first) from error
        for number, of_text in zip(numbers, plain, strict=True):
            self._check_range(of_text)
            if _is_control(self.tokenizer, self.added_ids)(of_text).any():
                problem = f"{self._problem(texts[number], of_text)[1]}, even as plain text. {_DROP}"
                raise TextError(first + number, problem, code="E305")
        return _replaced(ids, lengths, dict(zip(numbers, plain, strict=True)))

    def _check_range(self, ids: NDArray[Any]) -> None:
        """Raise TokenizerError E409 for an id outside the vocabulary."""
        if not len(ids):
            return
        lowest, highest = int(ids.min()) if ids.dtype.kind == "i" else 0, int(ids.max())
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise TokenizerError(
                f"the tokenizer gave id {wrong}, expected ids below vocab_size={self.vocab_size}", code="E409"
            )

    def _with_added(self, ids: NDArray[Any], lengths: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Put `prepend` before and `append` after each text that has tokens."""
        before, behind = ([] if each is None else [each] for each in (self.prepend, self.append))
        if not (before or behind) or not len(ids):
            return ids, lengths
        between, view = np.array([*behind, *before], dtype=ids.dtype).data, np.ascontiguousarray(ids).data
        parts = [between[len(behind) :]]
        start = 0
        for stop in np.cumsum(lengths[lengths > 0]).tolist():
            parts += (view[start:stop], between)
            start = stop
        parts[-1] = between[: len(behind)]
        added = len(between) * (lengths > 0)
        return np.frombuffer(bytearray().join(parts), dtype=ids.dtype), lengths + added


def _is_control(tokenizer: Tokenizer, more: Collection[int]) -> Callable[[NDArray[Any]], NDArray[np.bool_]]:
    """Return a function that marks the special ids in an array, bool [tokens].

    more: other special ids, such as the token that ends a document.
    Raises: ValueError for a special id outside the vocabulary.
    """
    special = sorted(control_ids(tokenizer).union(more))
    if special and not 0 <= special[0] <= special[-1] < tokenizer.vocab_size:
        wrong = special[0] if special[0] < 0 else special[-1]
        raise ValueError(f"special id {wrong}: expected 0 <= id < vocab_size={tokenizer.vocab_size}")
    if not special:
        return lambda ids: np.zeros(len(ids), dtype=np.bool_)
    # Comparing with a range is faster than looking up a table, and special ids usually are one.
    if special[-1] == tokenizer.vocab_size - 1 and len(special) == special[-1] - special[0] + 1:
        return lambda ids: ids >= special[0]
    if len(special) == special[-1] - special[0] + 1:
        return lambda ids: (ids >= special[0]) & (ids <= special[-1])
    table = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
    table[special] = True
    return lambda ids: table[ids]


def _of_one_text(error: ValueError, encode: Callable[[int], object], numbers: Sequence[int], first: int) -> TextError:
    """Return the error of the first text that cannot be encoded. encode: takes a text's place in `numbers`."""
    for at, number in enumerate(numbers):
        try:
            encode(at)
        except ValueError as alone:
            code = code_of(alone)
            return TextError(first + number, f"{alone}. {_DROP}" if code == "E305" else str(alone), code=code)
    return TextError(first, str(error), code=code_of(error))


def _loses(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text does not come back from its ids; also True if it has none, as for a model without unknown id."""
    decode = getattr(tokenizer, "decode", None)
    try:
        return decode is None or bool(decode(tokenizer.encode(text)) != text)
    except Exception:  # a caller's object raises what it likes, such as KeyError
        return True


def _replaced(
    ids: NDArray[Any], lengths: NDArray[np.int64], by: dict[int, NDArray[Any]]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the ids and lengths with some texts' ids replaced."""
    parts: list[NDArray[Any]] = []
    ends, done = np.cumsum(lengths), 0
    lengths = lengths.copy()
    for number in sorted(by):
        parts += (ids[done : ends[number] - lengths[number]], np.asarray(by[number]).astype(ids.dtype))
        done, lengths[number] = int(ends[number]), len(by[number])
    return np.concatenate([*parts, ids[done:]]), lengths


def _problem_text(text: str, what: str) -> str:
    return f"a text holds the {what}: {text[:_SHOWN]!r}..."


def _utf8(text: bytes | str) -> bytes:
    return text if type(text) is bytes else text.encode(errors="surrogatepass")  # type: ignore[union-attr]


def _repaired(
    raw: list[bytes], texts: Sequence[bytes | str], count_u2581: bool
) -> tuple[list[bytes], dict[int, tuple[str, ...]]]:
    """Return texts without lone surrogates, and by text number the counters of repairs and oddities."""
    notes: dict[int, tuple[str, ...]] = {}
    clean = list(raw)
    for number in [number for number, text in enumerate(raw) if not text.isascii()]:
        data, text = raw[number], texts[number]
        found = odd_in_text(data)
        if count_u2581 and b"\x81" in data and b"\xe2\x96\x81" in data:
            found += (U2581,)
        if isinstance(text, str) and b"\xed" in data:  # it may begin a surrogate
            try:
                data.decode()
            except UnicodeDecodeError:  # JSON can hold half a surrogate pair, utf-8 cannot
                halves = text.encode("utf-16-le", "surrogatepass")
                clean[number] = halves.decode("utf-16-le", "replace").encode()
                found += (SURROGATES,)
        if found:
            notes[number] = found
    return clean, notes
