"""SentencePiece tokenizers: text to ids and back, and which models are accepted. Open a tokenizer of any kind.

tokenizer = load_tokenizer("artifacts/tokenizer")    # spm.model or tokenizer.json
ids = tokenizer.encode("a text")        # no BOS, no EOS
tokenizer.decode(ids) == "a text"       # for a lossless model (see tokenizer_training)
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from niels_gpt.paths import DEFAULT_TOKENIZER_PATH
from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS
from niels_gpt.storage.errors import CacheError, TokenizerNotFound
from niels_gpt.storage.fileio import NotRegularError
from niels_gpt.tokenizers.adapters import changed, checked_ids, refuse_surrogates, reopened
from niels_gpt.tokenizers.files import (
    FILE_OF,
    MAX_MODEL_BYTES,
    MODEL_NAME,
    TRAIN_COMMAND,
    is_json,
    read_file,
    tokenizer_file,
)
from niels_gpt.tokenizers.sentencepiece_proto import CONTROL, with_types

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from niels_gpt.tokenizers.protocol import FullTokenizer

__all__ = [
    "DEFAULT_TOKENIZER_PATH",
    "MAX_MODEL_BYTES",
    "MODEL_NAME",
    "SPECIAL_TOKENS",
    "TRAIN_COMMAND",
    "SentencePieceTokenizer",
    "TokenizerPaths",
    "decode",
    "encode",
    "get_default_tokenizer",
    "load_tokenizer",
    "sentinel_ids",
]

TOKENIZER_META_NAME = "tokenizer_meta.json"

Sentinels = Literal["required", "optional"]
"""Whether a model without the four sentinels is refused."""

_SPACE = "\u2581"  # SentencePiece's mark for a space; a piece of it alone is the dummy prefix


@dataclass(frozen=True, slots=True)
class TokenizerPaths:
    """The files of a trained tokenizer (PR-01)."""

    model_path: Path
    meta_path: Path

    @classmethod
    def in_folder(cls, folder: str | os.PathLike[str], kind: str = "sentencepiece") -> TokenizerPaths:
        """Return the paths in a folder, which need not exist. kind: sentencepiece or huggingface."""
        return cls(Path(folder) / FILE_OF[kind], Path(folder) / TOKENIZER_META_NAME)


class SentencePieceTokenizer:
    """A SentencePiece model. Opening it checks the ids of the four sentinels.

    A pickled copy, as in a worker process, opens the same file; CacheError E402 if the file has changed.
    """

    kind: str = "sentencepiece"

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        special_tokens: Sequence[str] | None = None,
        expected_special_token_ids: Mapping[str, int] | None = None,
        follow_links: bool = True,
        sentinels: Sentinels = "required",
    ) -> None:
        """Open a model.

        special_tokens: four literals in the order sys, usr, asst, eot; default SPECIAL_TOKENS.
        expected_special_token_ids: the ids in a cache's meta.json, by sys, usr, asst, eot.
        follow_links: False refuses links, as inside a cache.
        sentinels: "optional" also opens a model without sentinels; its special_token_ids() is {}.
        Raises: TokenizerNotFound E401; CacheError E403 if the file is not a SentencePiece model; CacheError E404 if a
            sentinel is missing, is not one id, does not decode to itself, or has another id than expected.
        """
        self.model_path: str = os.path.abspath(model_path)
        self.special_tokens: tuple[str, ...] = tuple(SPECIAL_TOKENS if special_tokens is None else special_tokens)
        self._follow_links = follow_links
        model = _read_model(self.model_path, follow_links=follow_links)
        self._sha256 = hashlib.sha256(model).hexdigest()
        self._processor = _open_model(model, where=self.model_path)
        self._sentinels: Sentinels = sentinels
        self._special_ids = {}
        if any(self.token_id(token) is not None for token in self.special_tokens):
            self._special_ids = sentinel_ids(self._processor, special_tokens=self.special_tokens, where=self.model_path)
        elif sentinels == "required":
            raise _no_sentinels(self.model_path)
        is_control = self._processor.is_control(list(range(self.vocab_size)))
        control = (token_id for token_id, each in enumerate(is_control) if each)
        self._control_ids = frozenset([*control, *self._special_ids.values()])
        self._plain: Any = None
        expected = None if expected_special_token_ids is None else dict(expected_special_token_ids)
        if expected is not None and expected != self._special_ids:
            found, remedy = f"its special ids are {self._special_ids}", "Use the model that the data was encoded with"
            raise CacheError(self.model_path, found, str(expected), remedy, code="E404")

    @property
    def sha256(self) -> str:
        """The hex sha256 of the model file when it was opened."""
        return self._sha256

    @property
    def vocab_size(self) -> int:
        """Number of ids, including the sentinels, control pieces and byte pieces."""
        return int(self._processor.vocab_size())

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of the sentinels by sys, usr, asst and eot; {} without them."""
        return dict(self._special_ids)

    @property
    def unk_id(self) -> int | None:
        """The id of characters without a piece; None if the model has no such id."""
        unk_id = int(self._processor.unk_id())
        return unk_id if unk_id >= 0 else None

    @property
    def eos_id(self) -> int | None:
        """The id of the piece that ends a text; None if the model has no such id."""
        eos_id = int(self._processor.eos_id())
        return eos_id if eos_id >= 0 else None

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids of control pieces, which no text gives, and of the sentinels. User-defined pieces count as text."""
        return self._control_ids

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text, without BOS or EOS.

        A sentinel's literal becomes the sentinel's id, so check untrusted text with `find_reserved_literal` first.
        Raises: SourceError E304 for a lone surrogate, which UTF-8 cannot encode.
        """
        try:
            ids: list[int] = self._processor.encode(text)
        except (RuntimeError, TypeError) as error:  # one text, a list
            refuse_surrogates([text], error)
            raise
        return ids

    def encode_batch(self, texts: Sequence[str], /, *, num_threads: int = 1) -> list[NDArray[np.int32]]:
        """Return the ids of each text as int32 [tokens]. Raises: SourceError E304 for a lone surrogate."""
        return _batch_ids(self._processor, list(texts), num_threads)

    def encode_plain(self, texts: Sequence[str], /) -> list[NDArray[np.int32]]:
        """Return the ids of each text as int32 [tokens], sentinels' literals as text. Raises: SourceError E304."""
        if self._plain is None:
            model = _read_model(self.model_path, follow_links=self._follow_links)
            if hashlib.sha256(model).hexdigest() != self._sha256:
                raise changed(self.model_path)
            plain = with_types(model, dict.fromkeys(self._special_ids.values(), CONTROL))
            self._plain = _open_model(plain, where=self.model_path)
        return _batch_ids(self._plain, list(texts), 1)

    def encode_torch(self, text: str, /, *, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the ids of a text as int64 [tokens]. Raises: SourceError E304 for a lone surrogate."""
        import torch

        return torch.tensor(self.encode(text), dtype=torch.int64, device=device)

    def decode(self, ids: Sequence[int] | NDArray[Any] | torch.Tensor, /) -> str:
        """Return the text of a 1-D sequence of ids; the unknown id becomes " \u2047 ", as in SentencePiece.

        Raises: TokenizerError E409 for an id outside the vocabulary; ValueError for more than one dimension.
        """
        return str(self._processor.decode(checked_ids(ids, self.vocab_size, self.model_path)))

    def token_id(self, literal: str, /) -> int | None:
        """Return the id of a piece by its text; None if there is none."""
        token_id = int(self._processor.piece_to_id(literal))
        return None if self._processor.is_unknown(token_id) and self.token(token_id) != literal else token_id

    def token(self, token_id: int, /) -> str:
        """Return the piece of an id, such as U+2581 for a space and "<0x0A>" for a byte."""
        return str(self._processor.id_to_piece(token_id))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path and the arguments, without the processor."""
        open_again = functools.partial(
            SentencePieceTokenizer,
            self.model_path,
            special_tokens=self.special_tokens,
            expected_special_token_ids=self._special_ids,
            follow_links=self._follow_links,
            sentinels=self._sentinels,
        )
        return reopened, (open_again, self._sha256)

    def __repr__(self) -> str:
        """Name the model, its size and the start of its sha256."""
        return f"SentencePieceTokenizer({self.model_path!r}, vocab_size={self.vocab_size}, sha256={self._sha256[:12]})"


def sentinel_ids(processor: Any, *, special_tokens: Sequence[str], where: str) -> dict[str, int]:
    """Return the ids of the sentinels in a SentencePieceProcessor by sys, usr, asst and eot (PR-01).

    where: the model, for messages.
    Raises: ValueError unless `special_tokens` are four different literals; CacheError E404 unless each has one id that
        decodes to it.
    """
    if len(special_tokens) != 4 or len(set(special_tokens)) != 4:
        raise ValueError(f"special_tokens={tuple(special_tokens)!r}: expected four different ones: sys, usr, asst, eot")
    return {
        name: _sentinel_id(processor, token, where=where)
        for name, token in zip(SPECIAL_TOKEN_NAMES, special_tokens, strict=True)
    }


def _sentinel_id(processor: Any, token: str, *, where: str) -> int:
    remedy = f"Train a tokenizer that has it as a user-defined symbol: {TRAIN_COMMAND}"
    token_id = int(processor.piece_to_id(token))
    if token_id == processor.unk_id():
        raise CacheError(where, f"has no piece {token!r}", remedy=remedy, code="E404")
    ids = list(processor.encode(token))
    # With a dummy prefix, SentencePiece's default, a space piece stands before any text.
    alone = ids[1:] if ids and processor.id_to_piece(ids[0]) == _SPACE else ids
    if alone != [token_id]:
        raise CacheError(where, f"{token!r} encodes to {ids}", f"the one id {token_id}", remedy, code="E404")
    text = processor.decode([token_id])
    if text != token:
        raise CacheError(where, f"id {token_id} decodes to {text!r}", repr(token), remedy, code="E404")
    return token_id


def _no_sentinels(where: str | os.PathLike[str]) -> CacheError:
    remedy = f"Give it the sentinels: niels-gpt add-sentinels {shlex.quote(os.fspath(where))} OUT"
    return CacheError(where, "has none of the four sentinels", "all of them", remedy, code="E404")


def _read_model(path: str, *, follow_links: bool) -> bytes:
    try:
        model = read_file(path, MAX_MODEL_BYTES, "a SentencePiece model", follow_links=follow_links)
    except FileNotFoundError:
        raise TokenizerNotFound(f"{path}: there is no tokenizer model. {_TRAIN}") from None
    except NotRegularError as error:
        raise _no_model(path, "is not a regular file") from error
    if is_json(model[:_BEGINNING]):
        raise _no_model(path, "is JSON, such as a tokenizer.json, which load_tokenizer opens")
    return model


_BEGINNING = 4096  # bytes of a file that tell JSON from a model
_TRAIN = f"Train one: {TRAIN_COMMAND}"


def _no_model(where: str, found: str) -> CacheError:
    return CacheError(where, found, f"a SentencePiece model ({MODEL_NAME})", _TRAIN, code="E403")


def _open_model(model: bytes, *, where: str) -> Any:
    import sentencepiece

    # With an empty proto SentencePiece makes a processor without a model, which fails at its first use.
    if not model:
        raise _no_model(where, "is empty")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, UnicodeDecodeError) as error:  # its text names a line of C++ and no reason
        raise _no_model(where, "is no SentencePiece model, or a damaged one") from error


def _batch_ids(processor: Any, texts: list[str], num_threads: int) -> list[NDArray[np.int32]]:
    try:
        # No persistent thread pool: a forked child would have the object without its threads, and hang.
        arrays: list[NDArray[np.int32]] = processor.encode(texts, return_type="numpy", num_threads=num_threads)
    except (RuntimeError, TypeError) as error:  # one text, a list
        refuse_surrogates(texts, error)
        raise
    return arrays


def load_tokenizer(
    path: str | os.PathLike[str], *, follow_links: bool | None = None, sentinels: Sentinels = "optional"
) -> FullTokenizer:
    """Open a tokenizer of any kind: a SentencePiece model, a tokenizer.json, or a folder with one of them.

    follow_links: whether the files may be links, as in a snapshot of the hub. None: a named file may be one; files in a
        named folder, which may be an untrusted cache, may not.
    sentinels: "required" refuses a tokenizer without the four sentinels.
    Raises: TokenizerNotFound E401; CacheError E403 if the file is damaged, of another form, or one of two kinds in a
        folder without a meta.json; E404 for missing or wrong sentinels; E205 for a link; E206 if it is too large.
    """
    links = not os.path.isdir(path) if follow_links is None else follow_links
    file, kind = tokenizer_file(path)
    if kind == "sentencepiece":
        return SentencePieceTokenizer(file, follow_links=links, sentinels=sentinels)
    from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer  # not above: it imports numpy

    tokenizer = HuggingFaceTokenizer(file, follow_links=links)
    if sentinels == "required" and not tokenizer.special_token_ids():
        raise _no_sentinels(file)
    return tokenizer


@functools.cache
def get_default_tokenizer() -> SentencePieceTokenizer:
    """Return the tokenizer at DEFAULT_TOKENIZER_PATH, opened once.

    Raises: TokenizerNotFound E401, with the command that trains one.
    """
    return SentencePieceTokenizer(DEFAULT_TOKENIZER_PATH)


def encode(text: str, /) -> list[int]:
    """Encode with the default tokenizer; see SentencePieceTokenizer.encode."""
    return get_default_tokenizer().encode(text)


def decode(ids: Sequence[int] | NDArray[Any] | torch.Tensor, /) -> str:
    """Decode with the default tokenizer; see SentencePieceTokenizer.decode."""
    return get_default_tokenizer().decode(ids)
