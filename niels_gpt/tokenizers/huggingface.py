"""Tokenizers of Hugging Face: a tokenizer.json, opened by the library `tokenizers`.

Nothing else of such a tokenizer is used: no class of transformers and no code from the hub. The post-processor, which
adds BOS and EOS, is not applied to a text; `start_ids` says what it writes before one. Truncation, padding and dropout
are switched off: a cache must neither be cut silently nor differ from one build to the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS
from niels_gpt.storage.errors import CacheError, SourceError, TokenizerError, TokenizerNotFound
from niels_gpt.storage.meta_json import parse_object
from niels_gpt.tokenizers.files import (
    BYTE_ORDER_MARK,
    CONFIG_NAME,
    MAX_TOKENIZER_JSON_BYTES,
    TOKENIZER_JSON,
    TOKENS_MAP_NAME,
    companion,
    read_file,
)
from niels_gpt.tokenizers.protocol import PROBE, checked_ids, ids_before, refuse_surrogates

MAX_OPENED_IDS: Final = 1 << 24
"""A file with a larger id is refused: tables of one entry an id are made from it."""
MAX_ADDED_TOKENS: Final = 100_000
"""A file with more added tokens is refused: texts are searched for each of them. Models for speech have some 65,000."""

_MOST_STEPS, _MOST_GROWTH = 512, 64
"""Steps of a part such as the normalizer, and how many times as long its steps may make a text."""
_CONSUMES = re.compile(
    r"(?:(?:\[(?:[^\[\]\\]|\\.)+\]|\\p\{\w+\}|\\[sdwSDWnrt]|\\[^\w\s]|[^\\^$|?*+()\[\]{}])(?:\+|\{[1-9]\d*(?:,(?:[1-9]\d*)?)?\})?)+"
)
"""An expression that matches one character at least, such as ` {2,}` or `[\u201c\u201d]`; some others do too."""
_MAX_TEMPLATE_BYTES = 1 << 14  # of a post-processor: it writes BOS and EOS

_EXPECTED = f"a {TOKENIZER_JSON} that the library tokenizers reads"
_UNK_ID = re.compile(rb'"unk_id"\s*:\s*(\d{1,9})\b')
_UNUSED = "\ufdd0"  # no character, by Unicode: no text should have it
_SHOWN = 200  # characters of an error of the library


class HuggingFaceTokenizer:
    """A tokenizer.json, with the end of a text that the files beside it name.

    Can be pickled, for worker processes: the copy opens the same file, and refuses it if it has changed.
    """

    kind: str = "huggingface"

    def __init__(self, path: str | os.PathLike[str], *, follow_links: bool | None = None) -> None:
        """Open a tokenizer.json.

        path: the file, or its folder. tokenizer_config.json and special_tokens_map.json beside it are read.
        follow_links: whether the files may be links, as in a snapshot of the hub. None: a file that is named may, those
            in a folder that is named may not.
        Raises: FileNotFoundError; CacheError for a file that is too large, that the library refuses, that has ids of
            MAX_OPENED_IDS or more or over MAX_ADDED_TOKENS, or whose added tokens would get other ids than it says.
        """
        in_folder = os.path.isdir(path) and os.path.basename(path) != TOKENIZER_JSON
        self.follow_links: bool = not in_folder if follow_links is None else follow_links
        self.model_path: str = os.path.abspath(os.path.join(path, TOKENIZER_JSON) if in_folder else path)
        raw = self._read()
        self._sha256 = hashlib.sha256(raw).hexdigest()
        said = _said_ids(raw)
        _refuse_many(said or (), self.model_path)  # at once: the library would take its time
        self._tokenizer, self._post_processor = _open(raw, self.model_path)
        added = self._tokenizer.get_added_tokens_decoder()
        _refuse_many(added, self.model_path)
        self._vocab_size = _vocab_size(self._tokenizer, self.model_path)
        _check_added_ids(said, {token.content: token_id for token_id, token in added.items()}, self.model_path)
        special = {token_id for token_id, token in added.items() if token.special}
        self._unk_id = _unk_id(self._tokenizer, raw)
        self.eos_token = self._eos_token()
        self._eos_id = None if self.eos_token is None else self.token_id(self.eos_token)
        self._sentinels = self._sentinel_ids(special)
        ends = set() if self._eos_id is None else {self._eos_id}
        self._control_ids = frozenset((special - {self._unk_id}) | ends | set(self._sentinels.values()))
        self._plain: Any = None  # for encode_plain, when it is needed
        self._renamed: Any = None

    @property
    def sha256(self) -> str:
        """The hex sha256 of the tokenizer.json when it was opened."""
        return self._sha256

    @property
    def vocab_size(self) -> int:
        """The largest id and 1, added tokens included. Ids below it may have no token."""
        return self._vocab_size

    @property
    def unk_id(self) -> int | None:
        """The id of characters without a token; None if the model has none, as byte-level ones."""
        return self._unk_id

    @property
    def eos_id(self) -> int | None:
        """The id of `eos_token` in tokenizer_config.json or special_tokens_map.json; None if none is named there."""
        return self._eos_id

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """The ids that the file's post-processor writes before a text, such as BOS; () for none.

        They are found by running it on PROBE; where PROBE has no ids, it cannot be told, and they are ().
        Raises: ValueError where the model cannot encode PROBE.
        """
        if self._post_processor is None:
            return ()
        plain, *_ = self._encoded([PROBE], self._tokenizer.encode_batch)
        return ids_before(self._post_processor.process(plain).ids, plain.ids)

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids of special tokens, of eos and of the sentinels, without the unknown id.

        Added tokens that are not special, such as <think>, are text.
        """
        return self._control_ids

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of the sentinels under sys, usr, asst and eot; {} without them."""
        return dict(self._sentinels)

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text, without BOS or EOS. The literal of an added token becomes its id.

        Raises: ValueError for a lone surrogate, which utf-8 cannot encode, and for a text that the model cannot encode.
        """
        return self._ids_of([text], self._tokenizer)[0].tolist()  # type: ignore[no-any-return]

    def encode_batch(self, texts: Sequence[str], /, *, num_threads: int = 1) -> list[NDArray[np.int32]]:
        """Return the ids of each text as int32 [tokens]. Raises as `encode`.

        num_threads: has no effect. The library has threads of its own; TOKENIZERS_PARALLELISM=false switches them off.
        """
        return self._ids_of(list(texts), self._tokenizer)

    def encode_with_offsets(self, texts: Sequence[str], /) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the ids of each text, and start and end of each token in its characters. Raises as `encode`."""
        encoded = self._encoded(list(texts), self._tokenizer.encode_batch)
        return [(each.ids, each.offsets) for each in encoded]

    def added_tokens(self) -> dict[str, bool]:
        """Return the literals of the added tokens, and whether each is special."""
        return {token.content: token.special for token in self._tokenizer.get_added_tokens_decoder().values()}

    def encode_plain(self, texts: Sequence[str], /) -> list[NDArray[np.int32]]:
        """Return the ids of each text with the literals of special tokens as text. Raises as `encode`.

        Raises: ValueError also for a text that has no such encoding.
        """
        batch = list(texts)
        if self._plain is None:
            self._plain = _plain(self._read(), self.model_path)
        renamed = self._renamed  # read once: another thread may set it meanwhile, to an equal one
        arrays = self._ids_of(batch, renamed or self._plain)
        if renamed is None and self._first_control_id(arrays) is not None:  # a unigram model's own pieces, such as </s>
            self._renamed = renamed = self._with_other_names()
            arrays = self._ids_of(batch, renamed)
        if (token_id := self._first_control_id(arrays)) is not None:
            raise self._no_plain(token_id)
        return arrays

    def decode(self, ids: Sequence[int] | NDArray[Any], /) -> str:
        """Return the text of a 1-D sequence of ids, special tokens included.

        Raises: ValueError for an id outside the vocabulary, or for more than one dimension.
        """
        values = checked_ids(ids, self._vocab_size, self.model_path)
        return str(self._tokenizer.decode(values, skip_special_tokens=False))

    def token_id(self, literal: str, /) -> int | None:
        """Return the id of one token by its literal, such as "<|endoftext|>"; None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(literal)
        return token_id

    def token(self, token_id: int, /) -> str:
        """Return the token of an id as the vocabulary has it; "" for an id without a token."""
        return str(self._tokenizer.id_to_token(token_id) or "")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a path and the sha256 to compare, without the library's object."""
        return _reopen, (self.model_path, self._sha256, self.follow_links)

    def __repr__(self) -> str:
        """Name the file, its size and the start of its sha256."""
        return f"HuggingFaceTokenizer({self.model_path!r}, vocab_size={self.vocab_size}, sha256={self._sha256[:12]})"

    def _read(self) -> bytes:
        what = f"a {TOKENIZER_JSON}"
        try:
            raw = read_file(self.model_path, MAX_TOKENIZER_JSON_BYTES, what, follow_links=self.follow_links)
        except FileNotFoundError:
            raise TokenizerNotFound(f"{self.model_path}: there is no {TOKENIZER_JSON}") from None
        if getattr(self, "_sha256", None) not in (None, hashlib.sha256(raw).hexdigest()):
            raise _changed(self.model_path)
        return raw

    def _ids_of(self, texts: list[str], tokenizer: Any) -> list[NDArray[np.int32]]:
        # Unlike `encode`, it lets other threads of Python work meanwhile, and it computes no offsets.
        encoded = self._encoded(texts, tokenizer.encode_batch_fast)
        return [np.array(each.ids, np.int32) for each in encoded]

    def _encoded(self, texts: list[str], encode_batch: Callable[..., list[Any]]) -> list[Any]:
        try:
            return encode_batch(texts, add_special_tokens=False)
        except TypeError as error:
            refuse_surrogates(texts, error)
            raise
        except BaseException as error:
            if not is_of_library(error):
                raise
            why = f"{self.model_path}: cannot encode a text ({str(error)[:_SHOWN]!a})"
            raise TokenizerError(why) from error

    def _first_control_id(self, arrays: list[NDArray[np.int32]]) -> int | None:
        control = np.array(sorted(self._control_ids), np.int32)
        for ids in arrays:
            if (found := np.isin(ids, control)).any():
                return int(ids[found][0])
        return None

    def _no_plain(self, token_id: int) -> ValueError:
        of_eos = ", its eos" if token_id == self._eos_id else ""
        text = f"{self.model_path}: has no plain encoding of {self.token(token_id)!a}{of_eos}"
        return SourceError(text, code="E305")

    def _with_other_names(self) -> Any:
        """Return a tokenizer with the ids of this one, but other names for the control tokens in its vocabulary."""
        content = json.loads(self._read())
        vocab = content["model"]["vocab"]
        names = {self.token(token_id): f"{_UNUSED}{token_id}{_UNUSED}" for token_id in self._control_ids}
        if isinstance(vocab, dict):
            content["model"]["vocab"] = {names.get(token, token): token_id for token, token_id in vocab.items()}
        else:
            content["model"]["vocab"] = [[names.get(token, token), score] for token, score in vocab]
        if (unk := content["model"].get("unk_token")) in names:
            content["model"]["unk_token"] = names[unk]
        there = self._tokenizer.model.token_to_id
        content["added_tokens"] = [
            token
            for token in content["added_tokens"]
            if token["content"] not in names or there(token["content"]) is None
        ]
        try:
            plain = _plain(json.dumps(content).encode(), self.model_path)
        except CacheError as error:  # merges make the token, an ordinary word that is named as eos
            made = (each for each in sorted(self._control_ids) if f"`{self.token(each)}`" in str(error.__cause__))
            raise self._no_plain(next(made, min(self._control_ids))) from error
        text = {token.content: token_id for token_id, token in plain.get_added_tokens_decoder().items()}
        if any(self.token_id(token) != token_id for token, token_id in text.items() if token not in names):
            raise SourceError(f"{self.model_path}: has no plain encoding of its special tokens", code="E305")
        return plain

    def _eos_token(self) -> str | None:
        """Return the first named one that is a token, else the first that is named."""
        first = None
        for name in (CONFIG_NAME, TOKENS_MAP_NAME):
            raw = companion(Path(self.model_path), name, follow_links=self.follow_links)
            if raw is None:
                continue
            path = os.path.join(os.path.dirname(self.model_path), name)
            try:
                token = parse_object(raw).get("eos_token")
            except ValueError as error:
                raise CacheError(path, str(error), "a JSON object", code="E403") from error
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and self.token_id(token) is not None:
                return token
            first = token if first is None and isinstance(token, str) else first
        return first

    def _sentinel_ids(self, special: set[int]) -> dict[str, int]:
        ids = {name: self.token_id(token) for name, token in zip(SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS, strict=True)}
        found = {name: token_id for name, token_id in ids.items() if token_id is not None}
        if found and (len(found) < len(ids) or not special.issuperset(found.values())):
            problem = f"has {len(found)} of the four sentinels, {len(special & set(found.values()))} of them special"
            raise CacheError(self.model_path, problem, "four special ones, or none", code="E404")
        return found


def _open(raw: bytes, where: str) -> tuple[Any, Any]:
    """Return the library's tokenizer, without truncation, padding, post-processor and the random merges of dropout;
    and its post-processor, or None."""
    from tokenizers import Tokenizer

    if missing := [name for name in ("from_buffer", "encode_batch_fast") if not hasattr(Tokenizer, name)]:
        raise ImportError(
            f"tokenizers {version('tokenizers')} is not supported: its Tokenizer has no {' and no '.join(missing)}. "
            "Install one that is: pip install 'tokenizers>=0.22,<0.24'"
        )
    try:
        tokenizer = Tokenizer.from_buffer(raw.removeprefix(BYTE_ORDER_MARK))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        _refuse_growth(tokenizer, where)
        post_processor = tokenizer.post_processor
        tokenizer.post_processor = None  # even without its special tokens, one could leave out or repeat a text
    except BaseException as error:
        if not is_of_library(error) or isinstance(error, CacheError):
            raise
        found = f"is damaged, or of an unknown form ({str(error)[:_SHOWN]!a})"
        raise CacheError(where, found, _EXPECTED, code="E403") from error
    return tokenizer, post_processor


def _refuse_growth(tokenizer: Any, where: str) -> None:
    """Refuse a file that makes a long text of a short one, or takes too many steps: it would fill the memory."""
    for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        if (part := getattr(tokenizer, name)) is None:
            continue
        state = part.__getstate__()
        steps = _steps_of(json.loads(state))
        growth, size = _growth_of(steps), len(state) if name == "post_processor" else 0
        if len(steps) > _MOST_STEPS or growth > _MOST_GROWTH or size > _MAX_TEMPLATE_BYTES:
            found = f"its {name} of {len(state):,} bytes has {len(steps):,} steps, and may make a text "
            found += f"{min(growth, 10**9):,} times as long"
            expected = f"{_MOST_STEPS} steps, {_MOST_GROWTH} times, {_MAX_TEMPLATE_BYTES:,} bytes of a post_processor"
            raise CacheError(where, found, expected, code="E403")


def _steps_of(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer and so on, in order: objects with a type, also in sequences of sequences."""
    steps, waiting = [], [part]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict) and "type" in value and value["type"] != "Sequence":
            steps.append(value)
        waiting += reversed([*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [])
    return steps


def _growth_of(steps: list[dict[str, Any]]) -> int:
    """Return how many characters one of a text can become, at most, by steps that replace or prepend.

    What a step writes, a later one can replace only if it looks for one of these characters; an expression, and any
    step after one of another kind, such as NFKC, may look for all of them.
    """
    written: list[tuple[frozenset[str] | None, int]] = [(None, 1)]  # characters (None: any), and of how many they are
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


def _plain(raw: bytes, where: str) -> Any:
    tokenizer, _ = _open(raw, where)
    tokenizer.encode_special_tokens = True
    return tokenizer


def is_of_library(error: BaseException) -> bool:
    """Whether the library raised an error, and not the user by Ctrl-C; its panics are no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _vocab_size(tokenizer: Any, where: str) -> int:
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    largest = max(ids, default=-1)
    if not 0 <= largest < MAX_OPENED_IDS:
        found = f"its largest id is {largest:,}" if largest >= 0 else "has no token"
        raise CacheError(where, found, f"1 to {MAX_OPENED_IDS:,} ids", code="E403")
    if len(set(ids)) < len(ids):
        raise CacheError(where, "two of its tokens have the same id", "another id for each token", code="E403")
    return int(largest) + 1


def _said_ids(raw: bytes) -> dict[str, int] | None:
    """Return the ids of the added tokens as the file says them; None where they cannot be read."""
    at = re.search(rb'"added_tokens"\s*:\s*(?=\[)', raw)
    if at is None:
        return {}
    try:
        tokens, _ = json.JSONDecoder().raw_decode(raw[at.end() :].decode("utf-8", "replace"))
        return {token["content"]: token["id"] for token in tokens}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _refuse_many(added: Collection[Any], where: str) -> None:
    if len(added) > MAX_ADDED_TOKENS:
        found = f"has {len(added):,} added tokens"
        raise CacheError(where, found, f"{MAX_ADDED_TOKENS:,} at most", code="E403")


def _check_added_ids(said: dict[str, int] | None, ids: dict[str, int], where: str) -> None:
    """Refuse a file whose added tokens get other ids from the library than the file says.

    The library numbers added tokens that are not in the model's vocabulary by itself.
    """
    if said is None:
        raise CacheError(where, "its added_tokens cannot be read", _EXPECTED, code="E403")
    for content, token_id in said.items():
        if ids.get(content, token_id) != token_id:
            found = f"says that {content!a} has id {token_id}, but it would get {ids[content]}"
            raise CacheError(
                where, found, "the ids that the library gives; tokens of the vocabulary keep theirs", code="E403"
            )


def _unk_id(tokenizer: Any, raw: bytes) -> int | None:
    """Return the id of the unknown token; the library does not give that of a unigram model."""
    if type(tokenizer.model).__name__ == "Unigram":
        found = _UNK_ID.search(raw)
        return None if found is None else int(found[1])
    token = getattr(tokenizer.model, "unk_token", None)
    return None if token is None else tokenizer.token_to_id(token)


def _reopen(path: str, sha256: str, follow_links: bool) -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(path, follow_links=follow_links)
    if tokenizer.sha256 != sha256:
        raise _changed(path)
    return tokenizer


def _changed(path: str) -> CacheError:
    remedy = "Do not change the tokenizer during a run, and start again"
    return CacheError(path, "has changed since it was opened", remedy=remedy, code="E402")
