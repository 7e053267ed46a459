"""gigatoken as an engine for BPE: some seventy times as fast as the libraries that define the ids, and new.

Decides which tokenizers it knows and which tokenizer.json it opens for one; leaves some texts to the reference, since
gigatoken has the tables of Unicode 17, the reference has older ones; opens gigatoken again when its cache of words,
which has no limit, has grown too large.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from niels_gpt.storage.errors import CacheError
from niels_gpt.tokenizers.adapters import changed
from niels_gpt.tokenizers.files import BYTE_ORDER_MARK, MAX_TOKENIZER_JSON_BYTES, read_file
from niels_gpt.tokenizers.library import is_of_library
from niels_gpt.tokenizers.protocol import FullTokenizer
from niels_gpt.tokenizers.sentencepiece_proto import is_bpe as has_bpe

MAX_GROWTH: Final = 64 << 20
"""Growth of the process in bytes at which gigatoken is opened again. An opened GPT-2 takes 35 MB."""
_PADDING, _SMALL_BYTES = 2, 1 << 14
"""Texts of a group have at most twice the bytes of the longest one for each, or so many bytes in all."""
_NEW_LETTERS = re.compile(
    rb"\xe0(?:\xa2\x8f|\xb1\x9c|\xb3\x9c)|\xe1\xab[\x8f-\xab]|\xea\x9f[\x8e\x8f\x92\x94\xb1]"
    rb"|\xf0[\x90\x91\x96\x98\x9e\xab\xac\xb2\xb3]"
)
"""Letters, digits and marks that are new in Unicode 17, in UTF-8; above the first plane, with all 4,096 neighbours."""


class GigatokenEngine:
    """gigatoken with one tokenizer. A call works in the caller's thread; threads may call at once."""

    name = "gigatoken"

    def __init__(self, tokenizer: FullTokenizer, *, max_growth: int = MAX_GROWTH) -> None:
        """Open a tokenizer's model. Raises: UnusableError if gigatoken cannot; CacheError E402 for a changed file."""
        self._tokenizer = tokenizer
        self._model = model_of(tokenizer)
        self._opened = opened(self._model)
        self._memory = Memory(max_growth)
        self._reopening: dict[int, threading.Lock] = {}  # by process id: a fork may copy a lock that is held

    @property
    def literals(self) -> tuple[str, ...]:
        """The literals that are tokens, see Model."""
        return self._model.literals

    @property
    def times_reopened(self) -> int:
        """How often the cache was dropped."""
        return self._memory.times_reopened

    def may_differ(self, text: bytes) -> bool:
        """Return whether the reference must encode a text, since the tables of Unicode may differ on it.

        For a tokenizer that composes characters (NFC), gigatoken is opened without composing, and encodes only texts
        that are composed already. A text that is composed by newer tables is so by the reference's older ones too.
        """
        if text.isascii():
            return False
        has_lead = b"\xf0" in text or b"\xe0" in text or b"\xe1" in text or b"\xea" in text  # of _NEW_LETTERS
        if has_lead and _NEW_LETTERS.search(text):
            return True
        return self._model.composes and not unicodedata.is_normalized("NFC", str(text, "utf-8"))

    def encode(self, texts: Sequence[bytes]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return ids and lengths, see Engine. Raises: CacheError E411 if gigatoken cannot encode a text."""
        from gigatoken import BytesSource

        current = self._opened  # another thread may replace it meanwhile
        parts = [np.empty(0, dtype=np.uint32)] * len(texts)
        try:
            for group in _of_like_length(texts):
                # A BytesSource and rows with padding: for lists, and for rows without, gigatoken imports awkward, which
                # takes longer than the copies. Not with its own threads: a forked child would wait for them for ever.
                source = BytesSource([texts[index] for index in group])
                rows, lengths = current.encode_batch_padded(source, 0, parallel=False)
                for index, row, length in zip(group, rows, lengths.tolist(), strict=True):
                    parts[index] = row[:length]
        except BaseException as error:
            if not is_of_library(error):
                raise
            found = f"gigatoken cannot encode a text ({str(error)[:SHOWN]!a})"
            remedy = "Build with the reference: --engine reference"
            raise CacheError(self._tokenizer.model_path, found, remedy=remedy, code="E411") from error
        del current
        self._bound_cache(sum(map(len, texts)))
        counts = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        return np.concatenate([np.empty(0, dtype=np.uint32), *parts]), counts

    def _bound_cache(self, num_bytes: int) -> None:
        lock = self._reopening.setdefault(os.getpid(), threading.Lock())
        if lock.acquire(blocking=False):  # one thread reopens it; the others keep the old one meanwhile
            try:
                if self._memory.is_full(num_bytes):
                    self._opened = opened(self._model)
            finally:
                lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return GigatokenEngine, (self._tokenizer,)


def _of_like_length(texts: Sequence[bytes]) -> Iterator[list[int]]:
    """Yield the numbers of the texts in groups of about the same length, so that padding takes little memory."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    start, total = 0, 0
    for at, index in enumerate(order):
        longest = len(texts[index])
        if (at + 1 - start) * longest > _PADDING * (total + longest) + _SMALL_BYTES:
            yield order[start:at]
            start, total = at, 0
        total += longest
    if order:
        yield order[start:]


INSTALL: Final = "pip install 'niels-gpt[fast]'"
SHOWN: Final = 200
"""Characters of a library's error in a message."""
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_SPACES = ["Replace"]
_PREFIX_AND_SPACES = ["Prepend", "Replace"]


@dataclass(frozen=True)
class Model:
    """What gigatoken opens for a tokenizer."""

    json: bytes
    """A tokenizer.json."""
    composes: bool
    """Whether the tokenizer composes characters (NFC); `json` has no such step."""
    literals: tuple[str, ...]
    """Literals of the added tokens, or of SentencePiece's control and user-defined pieces."""


class UnusableError(Exception):
    """gigatoken cannot encode with a tokenizer."""

    def __init__(self, reason: str, remedy: str = "", *, code: str = "E411", is_usual: bool = False) -> None:
        """is_usual: it never works for this kind of tokenizer, so a build says nothing."""
        super().__init__(reason)
        self.reason, self.remedy, self.code, self.is_usual = reason, remedy, code, is_usual


def is_bpe(tokenizer: FullTokenizer) -> bool:
    """Guess whether gigatoken knows a tokenizer, without gigatoken; False for SentencePiece."""
    raw = read_file(tokenizer.model_path, MAX_TOKENIZER_JSON_BYTES, "a tokenizer", follow_links=True)
    return tokenizer.kind == "huggingface" and re.search(rb'"type"\s*:\s*"BPE"', raw) is not None


def model_of(tokenizer: FullTokenizer) -> Model:
    """Return a tokenizer's own tokenizer.json, or one made from its SentencePiece model, for gigatoken.

    Raises: UnusableError if it is not BPE, or gigatoken would give other ids; CacheError E402 if its file has changed.
    """
    if find_spec("gigatoken") is None:
        raise UnusableError("gigatoken is not installed", INSTALL, code="E901")
    path = tokenizer.model_path
    raw = read_file(path, MAX_TOKENIZER_JSON_BYTES, "a tokenizer", follow_links=True)
    if sha256(raw).hexdigest() != tokenizer.sha256:
        raise changed(path)
    if tokenizer.kind == "sentencepiece":
        return _of_sentencepiece(raw)
    content = json.loads(raw)  # the library tokenizers has read it, so it has the expected form
    if content["model"].get("type") != "BPE":
        raise UnusableError(f"its model is {content['model'].get('type')!a}, not BPE")
    if any(content["model"].get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        raise UnusableError("its model has dropout, a prefix or a suffix of its pieces")
    added = content.get("added_tokens") or []
    if any(token.get("single_word") for token in added):
        raise UnusableError("it has added tokens that are whole words only (single_word)")
    literals = tuple(token["content"] for token in added)
    parts = _normalizers(content.get("normalizer"))
    unknown = next((each["type"] for each in parts if each["type"] not in ("NFC", "Replace", "Prepend")), None)
    if unknown is not None:
        raise UnusableError(f"it normalizes text by {unknown!a}")
    kept = [each for each in parts if each["type"] != "NFC"]
    if len(kept) == len(parts):
        return Model(raw.removeprefix(BYTE_ORDER_MARK), composes=False, literals=literals)
    content["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    return Model(json.dumps(content).encode(), composes=True, literals=literals)


def _normalizers(normalizer: Any) -> list[Any]:
    if normalizer is None:
        return []
    if normalizer["type"] != "Sequence":
        return [normalizer]
    return [part for each in normalizer["normalizers"] for part in _normalizers(each)]


def _of_sentencepiece(raw: bytes) -> Model:
    try:
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json
    except ImportError:  # a private module
        raise UnusableError("this version of gigatoken is not known here", INSTALL) from None
    try:
        if not has_bpe(raw):  # at once: the call below reads each piece first, a tenth of a second for 16,000
            raise ValueError("only BPE models are supported")
        content = json.loads(sentencepiece_to_tokenizer_json(raw))
    except ValueError as error:  # unigram, or without byte fallback
        raise UnusableError(str(error)[:SHOWN], is_usual=True) from None
    types = [each["type"] for each in _normalizers(content["normalizer"])]
    literals = {each["content"] for each in content["added_tokens"] if not each["special"]}
    if types not in (_SPACES, _PREFIX_AND_SPACES):
        raise UnusableError("its model normalizes text (SentencePiece's rule is not identity)")
    if literals and types == _PREFIX_AND_SPACES:
        raise UnusableError("its model has user-defined pieces and a dummy prefix")
    if any(" " in literal or "\u2581" in literal for literal in literals):
        raise UnusableError("its model has user-defined pieces with spaces")
    # SentencePiece gives control pieces for no text, and merges into pieces that are normal ones only.
    special = {each["content"] for each in content["added_tokens"]}
    content["added_tokens"] = [each for each in content["added_tokens"] if not each["special"]]
    content["model"]["merges"] = [
        [left, right]
        for left, right in content["model"]["merges"]
        if left + right not in special and _BYTE_PIECE.fullmatch(left + right) is None
    ]
    return Model(json.dumps(content).encode(), composes=False, literals=tuple(sorted(special)))


def opened(model: Model) -> Any:
    """Open gigatoken with a model. Raises: UnusableError if it does not know the model."""
    from gigatoken import Tokenizer

    try:
        return Tokenizer.from_json(model.json)
    except BaseException as error:
        if not is_of_library(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise UnusableError(f"gigatoken does not know it ({first_line[:SHOWN]!a})") from error


_LOOK_EVERY: Final = 1 << 20
"""Bytes of text between two looks at the process's size. New words take up to 11 bytes for each byte of text."""
_WITHOUT_SIZE: Final = 256 << 20
"""Bytes of text after which gigatoken is opened again if a process cannot see its size, as outside of Linux."""


class Memory:
    """Decides when to drop gigatoken's cache, by the size of the process.

    A process also grows for other reasons, such as a shuffle buffer. If a drop gave back less than a quarter of the
    growth, the next drop waits for twice the growth, so only a few drops are in vain.
    """

    def __init__(self, max_growth: int) -> None:
        """max_growth: in bytes."""
        self.times_reopened = 0
        self._max_growth = self._allowed = max_growth
        self._encoded = 0  # bytes of text since the last look
        self._lowest = process_size()
        self._at_drop: int | None = None

    def is_full(self, num_bytes: int) -> bool:
        """Count bytes of encoded text; return whether to drop the cache now."""
        self._encoded += num_bytes
        if self._encoded < (_LOOK_EVERY if self._lowest is not None else _WITHOUT_SIZE):
            return False
        self._encoded = 0
        if self._lowest is not None and not self._has_grown(self._lowest):
            return False
        self.times_reopened += 1
        return True

    def _has_grown(self, lowest: int) -> bool:
        if self._at_drop is not None:  # by now no thread uses the dropped cache
            _return_free_memory()
        size = process_size() or lowest
        if self._at_drop is not None:
            is_useful = self._at_drop - size >= (self._at_drop - lowest) // 4
            self._allowed = self._max_growth if is_useful else 2 * self._allowed
            self._at_drop, lowest = None, size
        self._lowest = min(lowest, size)
        if size - self._lowest < self._allowed:
            return False
        self._at_drop = size
        return True


def process_size() -> int | None:
    """Return this process's resident memory in bytes; None if it cannot be read."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def _return_free_memory() -> None:
    """Return glibc's free memory to the system: a third of a dropped cache stays in its arenas."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
