"""Tokenizers of Hugging Face: a tokenizer.json, opened by the library `tokenizers`.

Nothing else is used: no class of transformers and no code from the hub. library.py hides which release is installed.
Encoding skips the post-processor, which adds BOS and EOS; `start_ids` has the ids that it writes before a text.
Truncation, padding and dropout are switched off: a cache must be complete, and equal in each build.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS
from niels_gpt.storage.errors import CacheError, SourceError, TokenizerError, TokenizerNotFound
from niels_gpt.storage.meta_json import parse_object
from niels_gpt.tokenizers.adapters import changed, checked_ids, refuse_surrogates, reopened
from niels_gpt.tokenizers.files import (
    CONFIG_NAME,
    MAX_TOKENIZER_JSON_BYTES,
    TOKENIZER_JSON,
    TOKENS_MAP_NAME,
    companion,
    read_file,
)
from niels_gpt.tokenizers.library import EXPECTED, SHOWN, Library, is_of_library, opened
from niels_gpt.tokenizers.protocol import PROBE

T = TypeVar("T")

MAX_ADDED_TOKENS: Final = 100_000
"""The most added tokens: texts are searched for each of them. Models for speech have some 65,000."""

_UNUSED = "\ufdd0"  # a noncharacter of Unicode: no text should have it


class HuggingFaceTokenizer:
    """A tokenizer.json, and the EOS token that the files beside it name.

    A pickled copy, as in a worker process, opens the same file; CacheError E402 if the file has changed.
    """

    kind: str = "huggingface"

    def __init__(self, path: str | os.PathLike[str], *, follow_links: bool | None = None) -> None:
        """Open a tokenizer.json.

        path: the file, or its folder. tokenizer_config.json and special_tokens_map.json beside it are read.
        follow_links: whether the files may be links, as in a snapshot of the hub. None: a named file may be one, files
            in a named folder may not.
        Raises: TokenizerNotFound E401; CacheError E206 if the file is too large; E403 if the library refuses it, it has
            ids of MAX_OPENED_IDS or more, over MAX_ADDED_TOKENS, or added tokens that would get other ids than it says;
            E404 if it has some of the sentinels, but not four special ones.
        """
        in_folder = os.path.isdir(path) and os.path.basename(path) != TOKENIZER_JSON
        self.follow_links: bool = not in_folder if follow_links is None else follow_links
        self.model_path: str = os.path.abspath(os.path.join(path, TOKENIZER_JSON) if in_folder else path)
        raw = self._read()
        self._sha256 = hashlib.sha256(raw).hexdigest()
        said = _said_ids(raw)
        _refuse_many(said or (), self.model_path)  # at once: the library would take its time
        self._library = opened(raw, self.model_path)
        added = self._library.added
        _refuse_many(added, self.model_path)
        self._vocab_size, self._unk_id = self._library.vocab_size, self._library.unk_id
        _check_added_ids(said, {literal: token_id for token_id, (literal, _) in added.items()}, self.model_path)
        special = {token_id for token_id, (_, is_special) in added.items() if is_special}
        self.eos_token = self._eos_token()
        self._eos_id = None if self.eos_token is None else self.token_id(self.eos_token)
        self._sentinels = self._sentinel_ids(special)
        ends = set() if self._eos_id is None else {self._eos_id}
        self._control_ids = frozenset((special - {self._unk_id}) | ends | set(self._sentinels.values()))
        self._plain: Library | None = None  # for encode_plain, when it is needed
        self._renamed: Library | None = None

    @property
    def sha256(self) -> str:
        """The hex sha256 of the tokenizer.json when it was opened."""
        return self._sha256

    @property
    def library(self) -> Library:
        """The library's object: its name and release, and what a build should say of it."""
        return self._library

    @property
    def vocab_size(self) -> int:
        """The largest id plus 1, added tokens included. Ids below it may have no token."""
        return self._vocab_size

    @property
    def unk_id(self) -> int | None:
        """The id of characters without a token; None for a model without it, such as a byte-level one."""
        return self._unk_id

    @property
    def eos_id(self) -> int | None:
        """The id of `eos_token` in tokenizer_config.json or special_tokens_map.json; None without one."""
        return self._eos_id

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """The ids that the file's post-processor writes before a text, such as BOS.

        They are found by processing PROBE; () if it writes none, or if PROBE has no ids.
        Raises: TokenizerError E408 if the model cannot encode PROBE.
        """
        return self._tried(lambda texts: self._library.start_ids(texts[0]), [PROBE])

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids of special tokens, EOS and the sentinels, without the unknown id.

        Added tokens that are not special, such as <think>, count as text.
        """
        return self._control_ids

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of the sentinels by sys, usr, asst and eot; {} without them."""
        return dict(self._sentinels)

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text, without BOS or EOS. The literal of an added token becomes its id.

        Raises: SourceError E304 for a lone surrogate, which UTF-8 cannot encode; TokenizerError E408 for any other text
            that the model cannot encode.
        """
        return self._ids_of([text], self._library)[0].tolist()  # type: ignore[no-any-return]

    def encode_batch(self, texts: Sequence[str], /, *, num_threads: int = 1) -> list[NDArray[np.int32]]:
        """Return the ids of each text as int32 [tokens]. Raises: SourceError E304 and TokenizerError E408.

        num_threads: ignored. The library has threads of its own; TOKENIZERS_PARALLELISM=false switches them off.
        """
        return self._ids_of(list(texts), self._library)

    def encode_with_offsets(self, texts: Sequence[str], /) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the ids of each text, and start and end of each token in its characters.

        Raises: SourceError E304 and TokenizerError E408; ImportError with tokenizers 1.0, which has no offsets.
        """
        return self._tried(self._library.with_offsets, list(texts))

    def added_tokens(self) -> dict[str, bool]:
        """Return the literal of each added token, and whether it is special."""
        return dict(self._library.added.values())

    def encode_plain(self, texts: Sequence[str], /) -> list[NDArray[np.int32]]:
        """Return the ids of each text with the literals of special tokens as plain text.

        Raises: SourceError E304 for a lone surrogate, E305 for a text without such an encoding; TokenizerError E408 for
            a text that the model cannot encode.
        """
        batch = list(texts)
        if self._plain is None:
            self._plain = self._library.as_plain(self._read)
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

        Raises: TokenizerError E409 for an id outside the vocabulary; ValueError for more than one dimension.
        """
        values = checked_ids(ids, self._vocab_size, self.model_path)
        return self._library.decode(values)

    def token_id(self, literal: str, /) -> int | None:
        """Return the id of one token by its literal, such as "<|endoftext|>"; None if there is none."""
        return self._library.token_id(literal)

    def token(self, token_id: int, /) -> str:
        """Return the vocabulary's token for an id; "" for an id without a token."""
        return self._library.token(token_id) or ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path and the sha256 to compare, without the library's object."""
        open_again = partial(HuggingFaceTokenizer, self.model_path, follow_links=self.follow_links)
        return reopened, (open_again, self._sha256)

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
            raise changed(self.model_path)
        return raw

    def _ids_of(self, texts: list[str], library: Library) -> list[NDArray[np.int32]]:
        return self._tried(library.ids, texts)

    def _tried(self, encode: Callable[[list[str]], T], texts: list[str]) -> T:
        try:
            return encode(texts)
        except ImportError:
            raise
        except TypeError as error:
            refuse_surrogates(texts, error)
            raise
        except BaseException as error:
            if not is_of_library(error):
                raise
            why = f"{self.model_path}: cannot encode a text ({str(error)[:SHOWN]!a})"
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

    def _with_other_names(self) -> Library:
        """Return a tokenizer with the same ids, but with other names for the control tokens in its vocabulary."""
        content = json.loads(self._read())
        vocab = content["model"]["vocab"]
        names = {self.token(token_id): f"{_UNUSED}{token_id}{_UNUSED}" for token_id in self._control_ids}
        if isinstance(vocab, dict):
            content["model"]["vocab"] = {names.get(token, token): token_id for token, token_id in vocab.items()}
        else:
            content["model"]["vocab"] = [[names.get(token, token), score] for token, score in vocab]
        if (unk := content["model"].get("unk_token")) in names:
            content["model"]["unk_token"] = names[unk]
        content["added_tokens"] = [
            token
            for token in content["added_tokens"]
            if token["content"] not in names or not self._library.in_model(token["content"])
        ]
        try:
            plain = opened(json.dumps(content).encode(), self.model_path, plain=True)
        except CacheError as error:  # merges make the token: an ordinary word is EOS
            made = (each for each in sorted(self._control_ids) if f"`{self.token(each)}`" in str(error.__cause__))
            raise self._no_plain(next(made, min(self._control_ids))) from error
        text = {literal: token_id for token_id, (literal, _) in plain.added.items()}
        if any(self.token_id(token) != token_id for token, token_id in text.items() if token not in names):
            raise SourceError(f"{self.model_path}: has no plain encoding of its special tokens", code="E305")
        return plain

    def _eos_token(self) -> str | None:
        """Return the first named EOS that is a token, else the first that is named."""
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


def _said_ids(raw: bytes) -> dict[str, int] | None:
    """Return the ids of the added tokens in the file; None if they cannot be read."""
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
    """Refuse a file whose added tokens get other ids from the library than it says.

    The library itself numbers added tokens that are not in the model's vocabulary.
    """
    if said is None:
        raise CacheError(where, "its added_tokens cannot be read", EXPECTED, code="E403")
    for content, token_id in said.items():
        if ids.get(content, token_id) != token_id:
            found = f"says that {content!a} has id {token_id}, but it would get {ids[content]}"
            raise CacheError(
                where, found, "the ids that the library gives; tokens of the vocabulary keep theirs", code="E403"
            )
