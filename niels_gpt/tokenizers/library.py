"""The library `tokenizers`, which computes the ids of a tokenizer.json: releases 0.22 and 0.23, and 1.0.

library = opened(raw, "tokenizer.json")     # of the release that Python imports
library.ids(["A text."])                    # the same ids from both

1.0 is many times as fast, but gives ids and texts only: no offsets of tokens, no vocabulary, no training. So `Fast`
reads the vocabulary from the file. It opens files only: it gets the bytes that were hashed as a file in memory. It
does not open each tokenizer.json that 0.23 opens, and one whose ids differ is refused; `needs_classic` is the error.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from niels_gpt.storage.errors import CacheError
from niels_gpt.tokenizers.files import BYTE_ORDER_MARK, TOKENIZER_JSON
from niels_gpt.tokenizers.protocol import ids_before

MAX_OPENED_IDS: Final = 1 << 24
"""All ids are below it: tables with one entry for each id are made from a file."""
CLASSIC: Final = "pip install 'tokenizers>=0.22,<0.24'"
"""The command that installs a release with everything."""
EXPECTED: Final = f"a {TOKENIZER_JSON} that the library tokenizers reads"
SHOWN: Final = 200
"""Characters of an error of the library in a message."""

_MOST_STEPS, _MOST_GROWTH = 512, 64
"""The most steps of a part such as the normalizer, and the most by which they may lengthen a text."""
_CONSUMES = re.compile(
    r"(?:(?:\[(?:[^\[\]\\]|\\.)+\]|\\p\{\w+\}|\\[sdwSDWnrt]|\\[^\w\s]|[^\\^$|?*+()\[\]{}])(?:\+|\{[1-9]\d*(?:,(?:[1-9]\d*)?)?\})?)+"
)
"""Regular expressions that surely match at least one character, such as ` {2,}` or `[\u201c\u201d]`."""
_MAX_TEMPLATE_BYTES = 1 << 14  # of a post-processor: it writes BOS and EOS
_PARTS = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
_UNK_ID = re.compile(rb'"unk_id"\s*:\s*(\d{1,9})\b')
_LACKS = re.compile("not supported|unsupported|feature")
"""Words of 1.0's errors for a part of a tokenizer.json that it does not know, though 0.23 does."""
_OF_UNICODE = frozenset(("NFC", "NFD", "NFKC", "NFKD", "BertNormalizer", "BertPreTokenizer"))
"""Steps by tables of Unicode, of which 1.0 has newer ones."""


class Library(Protocol):
    """A tokenizer.json as a release of the library opened it: without truncation, padding, dropout, post-processor."""

    name: str
    """The engine's name: "tokenizers", or with its number where the release is another one than usual."""
    added: dict[int, tuple[str, bool]]
    """The added tokens by id: the literal, and whether it is special."""
    vocab_size: int
    """The largest id plus 1."""
    unk_id: int | None
    """The id of characters without a token; None without one."""
    note: str
    """What a build should say of the ids; "" for nothing."""

    def ids(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """Return the ids of each text, int32 [tokens]. Raises: TypeError for a lone surrogate; the library's errors."""

    def with_offsets(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the ids of each text, and start and end of each token in characters. Raises: ImportError with 1.0."""

    def start_ids(self, probe: str) -> tuple[int, ...]:
        """Return the ids that the file's post-processor writes before a text, tried with `probe`."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""

    def token_id(self, literal: str) -> int | None:
        """Return a token's id; None if there is no such token."""

    def token(self, token_id: int) -> str | None:
        """Return the token of an id; None for an id without one."""

    def in_model(self, literal: str) -> bool:
        """Return whether a token is in the model's vocabulary, not an added one alone."""

    def as_plain(self, read: Callable[[], bytes]) -> Library:
        """Return one that encodes the literals of special tokens as text. read: returns the file's bytes again."""


def opened(raw: bytes, where: str, *, plain: bool = False) -> Library:
    """Open the bytes of a tokenizer.json with the release that Python imports.

    where: the file, for messages. plain: encode the literals of special tokens as text.
    Raises: CacheError E403 if the library refuses it, it has ids of MAX_OPENED_IDS or more, two tokens of one id, or
        steps that make a long text of a short one; ImportError for a release that is not known, or if this one lacks
        something that the file needs.
    """
    return (Fast if is_fast() else Classic)(raw, where, plain=plain)


@functools.cache
def is_fast() -> bool:
    """Return whether Python imports 1.0. Raises: ImportError for a release with neither interface."""
    from tokenizers import Encoding, Tokenizer

    if hasattr(Encoding, "ids_array") and hasattr(Tokenizer, "from_file"):
        return True
    if missing := [name for name in ("from_buffer", "encode_batch_fast") if not hasattr(Tokenizer, name)]:
        raise ImportError(
            f"tokenizers {_release()} is not supported: its Tokenizer has no {' and no '.join(missing)}. "
            f"Install one that is: {CLASSIC}"
        )
    return False


def _release() -> str:
    from importlib.metadata import version  # not above: readers of caches import this module

    return version("tokenizers")


def needs_classic(what: str) -> ImportError:
    """Return the error of a step that 1.0 cannot do. what: begins the sentence, such as "training needs a trainer"."""
    return ImportError(f"{what}, which tokenizers {_release()} lacks. Install an earlier release: {CLASSIC}")


def needs_transformers(what: str) -> ImportError:
    """Return the error of a step where transformers cannot be imported. what: such as "running a target"."""
    if is_fast():
        beside = f"tokenizers {_release()}"
        return ImportError(f"{what} needs transformers, which does not import beside {beside}. Install: {CLASSIC}")
    return ImportError(f"{what} needs transformers. Install the extra: pip install 'niels-gpt[eagle3]'")


def is_of_library(error: BaseException) -> bool:
    """Return whether the library raised an error, not the user by Ctrl-C. Its panics are no subclass of Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Classic:
    """Releases 0.22 and 0.23."""

    name, note = "tokenizers", ""

    def __init__(self, raw: bytes, where: str, *, plain: bool) -> None:
        """Open the bytes, see `opened`."""
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_buffer(raw.removeprefix(BYTE_ORDER_MARK))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            if getattr(tokenizer.model, "dropout", None) is not None:
                tokenizer.model.dropout = None
            parts = {name: part.__getstate__() for name in _PARTS if (part := getattr(tokenizer, name)) is not None}
            _refuse_growth(parts, where)
            self._post_processor = tokenizer.post_processor
            tokenizer.post_processor = None  # even without its special tokens, one could leave out or repeat a text
        except BaseException as error:
            _refuse(error, where)
        tokenizer.encode_special_tokens = plain
        self._tokenizer, self._where = tokenizer, where
        self.added = {at: (each.content, each.special) for at, each in tokenizer.get_added_tokens_decoder().items()}
        self.vocab_size = _vocab_size(tokenizer.get_vocab(with_added_tokens=True).values(), where)
        self.unk_id = self._unk_id(raw)

    def _unk_id(self, raw: bytes) -> int | None:
        """Return the id of the unknown token; of a unigram model it is in the file, for the library hides it."""
        if type(self._tokenizer.model).__name__ == "Unigram":
            found = _UNK_ID.search(raw)
            return None if found is None else int(found[1])
        token = getattr(self._tokenizer.model, "unk_token", None)
        return None if token is None else self.token_id(token)

    def ids(self, texts: list[str]) -> list[NDArray[np.int32]]:
        # Unlike `encode`, it lets other threads of Python work meanwhile, and it computes no offsets.
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, np.int32) for each in encoded]

    def with_offsets(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [(each.ids, each.offsets) for each in encoded]

    def start_ids(self, probe: str) -> tuple[int, ...]:
        if self._post_processor is None:
            return ()
        (plain,) = self._tokenizer.encode_batch([probe], add_special_tokens=False)
        return ids_before(self._post_processor.process(plain).ids, plain.ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def token_id(self, literal: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(literal)
        return token_id

    def token(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def in_model(self, literal: str) -> bool:
        return self._tokenizer.model.token_to_id(literal) is not None

    def as_plain(self, read: Callable[[], bytes]) -> Library:
        return Classic(read(), self._where, plain=True)


class Fast:
    """Release 1.0. What the file says is checked before the library reads it."""

    def __init__(self, raw: bytes, where: str, *, plain: bool) -> None:
        """Open the bytes, see `opened`."""
        self.name = f"tokenizers {_release()}"
        self._where, self._plain = where, plain
        try:
            content = _content(raw)
            parts = {name: json.dumps(content[name]) for name in _PARTS if content.get(name) is not None}
            _refuse_growth(parts, where)
            self._model_ids, self._ids, self.added = _vocabulary(content)
            self.vocab_size = _vocab_size(self._ids.values(), where)
            self.unk_id = _unk_id_in(content["model"], self._ids)
            self._post_processor, self._has_decoder = content.get("post_processor"), content.get("decoder") is not None
            self.note = self._note(content)
            self._tokenizer = _from_memory({**content, "post_processor": None})
            known = sorted((at, token) for token, at in self._ids.items())
            same = self._tokenizer.decode_tokens([at for at, _ in known]) == [token for _, token in known]
            self._refuse_others(content, same)
        except BaseException as error:
            _refuse(error, where)

    def _refuse_others(self, content: dict[str, Any], same_vocabulary: bool) -> None:
        """Refuse a file that the release opens, but does not encode with, or whose ids differ from 0.23's."""
        if any(token.get("single_word") for token in content["added_tokens"]):
            raise needs_classic(f"{self._where}: needs 0.23's rule for added tokens that are whole words (single_word)")
        if not same_vocabulary:
            raise needs_classic(f"{self._where}: needs 0.23's names of its added tokens")
        try:
            self._tokenizer.encode("a")  # a pattern is compiled by the first text
        except Exception as error:  # a text without ids is refused when it comes
            if _LACKS.search(str(error)):
                raise

    def _note(self, content: dict[str, Any]) -> str:
        steps = [step for name in _PARTS[:2] for step in _steps_of(content.get(name))]
        named = next((step["type"] for step in steps if step["type"] in _OF_UNICODE), None)
        if named is None:
            return ""
        newer = f"{self.name} has newer tables of Unicode for its {named} than 0.23"
        return (
            f"{self._where}: {newer}: texts with some rare marks or signs get other ids. The ids of before: {CLASSIC}"
        )

    def ids(self, texts: list[str]) -> list[NDArray[np.int32]]:
        how = {"add_special_tokens": False, "encode_special_tokens": self._plain}
        return [each.ids_array.view(np.int32) for each in self._tokenizer.encode_batch(texts, **how)]

    def with_offsets(self, texts: list[str]) -> NoReturn:
        raise needs_classic(f"{self._where}: chats by a template need the offsets of tokens")

    def start_ids(self, probe: str) -> tuple[int, ...]:
        if self._post_processor is None:
            return ()
        # The post-processor names its ids, so it is tried with the smallest model, of one token.
        one = {"type": "WordLevel", "vocab": {"a": self.vocab_size}, "unk_token": "a"}
        tried = _from_memory({"version": "1.0", "model": one, "post_processor": self._post_processor})
        return ids_before(tried.encode("a").ids, [self.vocab_size])

    def decode(self, ids: list[int]) -> str:
        if not self._has_decoder:  # 1.0 takes one that fits the pre-tokenizer
            return " ".join(self._tokenizer.decode_tokens(ids))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def token_id(self, literal: str) -> int | None:
        return self._ids.get(literal)

    def token(self, token_id: int) -> str | None:
        return next(iter(self._tokenizer.decode_tokens([token_id])), None)

    def in_model(self, literal: str) -> bool:
        return literal in self._model_ids

    def as_plain(self, read: Callable[[], bytes]) -> Library:
        other = copy.copy(self)
        other._plain = True
        return other


def _content(raw: bytes) -> dict[str, Any]:
    import orjson

    content = orjson.loads(raw.removeprefix(BYTE_ORDER_MARK))
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError("it is no JSON object with a model")
    if content["model"].get("type", "BPE") not in ("BPE", "Unigram", "WordLevel", "WordPiece"):
        raise ValueError(f"its model is {content['model']['type']}")
    if not isinstance(content.setdefault("added_tokens", []), list):
        raise ValueError("its added_tokens are no list")
    if content["model"].get("dropout") is not None:
        content["model"]["dropout"] = None
    return content


def _from_memory(content: dict[str, Any]) -> Any:
    """Open a tokenizer.json by a file in memory; away from Linux by a temporary one of this user. Raises: OSError."""
    import orjson
    from tokenizers import Tokenizer

    if hasattr(os, "memfd_create"):
        file: Any = open(os.memfd_create(TOKENIZER_JSON), "wb")
        path = f"/proc/self/fd/{file.fileno()}"
    else:
        from tempfile import NamedTemporaryFile

        file = NamedTemporaryFile(suffix=TOKENIZER_JSON)
        path = file.name
    with file:
        file.write(orjson.dumps({**content, "truncation": None, "padding": None}))
        file.flush()
        return Tokenizer.from_file(path)


def _vocabulary(content: dict[str, Any]) -> tuple[dict[str, int], dict[str, int], dict[int, tuple[str, bool]]]:
    """Return the ids of the model's tokens, of all tokens, and the added tokens by id, numbered as the library does."""
    vocab = content["model"]["vocab"]
    pieces = vocab.items() if isinstance(vocab, dict) else ((piece, at) for at, (piece, _) in enumerate(vocab))
    model = {str(token): at for token, at in pieces}
    if not all(type(at) is int for at in model.values()):
        raise ValueError("an id is no integer")
    ids, added = dict(model), dict[int, tuple[str, bool]]()
    following = len(vocab)
    for token in content["added_tokens"]:
        if not (literal := token["content"]):
            continue
        if literal not in ids:
            ids[literal] = following
        following = max(following, ids[literal] + 1)
        added[ids[literal]] = (literal, bool(token.get("special")))
    return model, ids, added


def _unk_id_in(model: dict[str, Any], ids: dict[str, int]) -> int | None:
    if isinstance(model["vocab"], list):
        unk_id: int | None = model.get("unk_id")
        return unk_id
    return ids.get(model.get("unk_token") or "")


def _refuse(error: BaseException, where: str) -> NoReturn:
    """Raise the error for a file that the library refuses; the error itself if it does not tell of the file."""
    if not is_of_library(error) or isinstance(error, (CacheError, ImportError, OSError, MemoryError)):
        raise error
    found, remedy = str(error)[:SHOWN], ""
    if is_fast():
        if _LACKS.search(found):
            raise needs_classic(f"{where}: needs a part of the library ({found!a})") from error
        remedy = f"If the file is whole, an earlier release may read it: {CLASSIC}"
    raise CacheError(where, f"is damaged, or of an unknown form ({found!a})", EXPECTED, remedy, code="E403") from error


def _vocab_size(all_ids: Iterable[int], where: str) -> int:
    ids = list(all_ids)
    largest = max(ids, default=-1)
    if not 0 <= largest < MAX_OPENED_IDS or min(ids) < 0:
        found = f"its largest id is {largest:,}" if largest >= 0 else "has no token"
        raise CacheError(where, found, f"1 to {MAX_OPENED_IDS:,} ids", code="E403")
    if len(set(ids)) < len(ids):
        raise CacheError(where, "two of its tokens have the same id", "another id for each token", code="E403")
    return int(largest) + 1


# --- steps that fill the memory ---------------------------------------------------------------------------------------


def _refuse_growth(parts: dict[str, Any], where: str) -> None:
    """Refuse a file whose steps are too many, or make a long text of a short one and so could fill the memory.

    parts: JSON of the normalizer and so on, by name.
    """
    for name, state in parts.items():
        steps = _steps_of(json.loads(state))
        growth, size = _growth_of(steps), len(state) if name == "post_processor" else 0
        if len(steps) > _MOST_STEPS or growth > _MOST_GROWTH or size > _MAX_TEMPLATE_BYTES:
            found = f"its {name} of {len(state):,} bytes has {len(steps):,} steps, and may make a text "
            found += f"{min(growth, 10**9):,} times as long"
            expected = f"{_MOST_STEPS} steps, {_MOST_GROWTH} times, {_MAX_TEMPLATE_BYTES:,} bytes of a post_processor"
            raise CacheError(where, found, expected, code="E403")


def _steps_of(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a part such as the normalizer, in order, from nested sequences too."""
    steps, waiting = [], [part]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict) and "type" in value and value["type"] != "Sequence":
            steps.append(value)
        waiting += reversed([*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [])
    return steps


def _growth_of(steps: list[dict[str, Any]]) -> int:
    """Return the most characters that steps can make of one character, by replacing and prepending.

    A step can lengthen the output of an earlier one only if it searches for one of its characters. A regular expression
    may match any character, and so may every step after one of another kind, such as NFKC.
    """
    # For each step the characters that it wrote (None: any), and how many of them one character has become.
    written: list[tuple[frozenset[str] | None, int]] = [(None, 1)]
    for step in steps:
        content = {"Replace": step.get("content"), "Prepend": step.get("prepend")}.get(step["type"])
        if not isinstance(content, str):
            written = [(None, max(grown for _, grown in written))]
            continue
        pattern = step.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        each = -(-len(content) // len(literal)) if literal else len(content) + 1  # the pattern may match nothing
        if isinstance(pattern, dict) and _CONSUMES.fullmatch(str(pattern.get("Regex", ""))):
            each = len(content)
        before = max(grown for found, grown in written if not literal or found is None or found & set(literal))
        written.append((frozenset(content), before * max(1, each)))
    return max(grown for _, grown in written)
