"""SentencePiece behind a small face: text to ids and back, with sentinels that are checked when a model is opened.

tokenizer = load_tokenizer("artifacts/tokenizer")
ids = tokenizer.encode("a text")        # no BOS, no EOS
tokenizer.decode(ids) == "a text"       # for a lossless model (see tokenizer_training)
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.fileio import CacheError
from niels_gpt.paths import DEFAULT_TOKENIZER_PATH
from niels_gpt.records import open_regular
from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = [
    "DEFAULT_TOKENIZER_PATH",
    "SPECIAL_TOKENS",
    "SentencePieceTokenizer",
    "TokenizerPaths",
    "decode",
    "encode",
    "get_default_tokenizer",
    "load_tokenizer",
    "sentinel_ids",
]

MODEL_NAME = "spm.model"
META_NAME = "tokenizer_meta.json"
TRAIN_COMMAND = "python -m niels_gpt.train_tokenizer --input_glob 'FOLDER/**/*.txt'"

MAX_MODEL_BYTES = 1 << 24
"""A larger file is not opened as a model: 16 MiB. A vocabulary of 262,144 pieces takes 4.7 MB."""

_SPACE = "\u2581"  # SentencePiece's mark for a space; as a piece of its own it is the dummy prefix


@dataclass(frozen=True, slots=True)
class TokenizerPaths:
    """Where a trained tokenizer lies (PR-01)."""

    model_path: Path
    meta_path: Path

    @classmethod
    def in_folder(cls, folder: str | os.PathLike[str]) -> TokenizerPaths:
        """Name the two files of the tokenizer in a folder, whether they exist or not."""
        return cls(Path(folder) / MODEL_NAME, Path(folder) / META_NAME)


class SentencePieceTokenizer:
    """A SentencePiece model together with the ids of the four sentinels.

    May be pickled, for worker processes: the copy opens the same file, and refuses it if it has changed.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        special_tokens: Sequence[str] | None = None,
        expected_special_token_ids: Mapping[str, int] | None = None,
        follow_links: bool = True,
    ) -> None:
        """Open a model.

        special_tokens: four literals in the order sys, usr, asst, eot; default SPECIAL_TOKENS.
        expected_special_token_ids: what a cache was written with, keys sys, usr, asst, eot.
        follow_links: False for a model inside a cache, where a symlink is refused.
        Raises: FileNotFoundError without the file; CacheError where it is no SentencePiece model, where a sentinel is
        missing, is no single id or does not decode to itself, or where ids differ from the expected ones.
        """
        self.model_path: str = os.path.abspath(model_path)
        self.special_tokens: tuple[str, ...] = tuple(SPECIAL_TOKENS if special_tokens is None else special_tokens)
        self._follow_links = follow_links
        model = read_model(self.model_path, follow_links=follow_links)
        self._sha256 = hashlib.sha256(model).hexdigest()
        self._processor = _open_model(model, where=self.model_path)
        self._special_ids = sentinel_ids(self._processor, special_tokens=self.special_tokens, where=self.model_path)
        expected = None if expected_special_token_ids is None else dict(expected_special_token_ids)
        if expected is not None and expected != self._special_ids:
            raise CacheError(
                f"{self.model_path}: its special ids are {self._special_ids}, expected {expected}. "
                "Use the model that the data was encoded with"
            )

    @property
    def sha256(self) -> str:
        """Return the hex sha256 of the model as it was opened."""
        return self._sha256

    @property
    def vocab_size(self) -> int:
        """Number of ids, the sentinels, control pieces and byte pieces included."""
        return int(self._processor.vocab_size())

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of the sentinels under sys, usr, asst and eot."""
        return dict(self._special_ids)

    @property
    def unk_id(self) -> int | None:
        """The id of what the model has no piece for; None where it has no such id."""
        found = int(self._processor.unk_id())
        return found if found >= 0 else None

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text, without BOS or EOS.

        A sentinel's literal in the text becomes the sentinel's id; whoever encodes foreign text has to guard against it
        (`special_tokens.find_reserved_literal`).
        Raises: ValueError for a lone surrogate, which utf-8 cannot hold.
        """
        try:
            ids: list[int] = self._processor.encode(text)
        except (RuntimeError, TypeError) as error:  # one text, a list
            _refuse_surrogates([text], error)
            raise
        return ids

    def encode_batch(self, texts: Sequence[str], /, *, num_threads: int = 1) -> list[NDArray[np.int32]]:
        """Return the ids of each text as int32 [tokens]; the threads change the speed only. Raises as `encode`."""
        batch = list(texts)
        try:
            # Without a pool of threads that is kept: a forked child has the object, none of its threads, and hangs.
            arrays: list[NDArray[np.int32]] = self._processor.encode(
                batch, return_type="numpy", num_threads=num_threads
            )
        except (RuntimeError, TypeError) as error:  # one text, a list
            _refuse_surrogates(batch, error)
            raise
        return arrays

    def encode_torch(self, text: str, /, *, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the ids of a text as int64 [tokens]. Raises as `encode`."""
        import torch

        return torch.tensor(self.encode(text), dtype=torch.int64, device=device)

    def decode(self, ids: Sequence[int] | NDArray[Any] | torch.Tensor, /) -> str:
        """Return the text of a 1-D sequence of ids; the unknown id becomes " \u2047 ", as SentencePiece has it.

        Raises: ValueError for an id outside the vocabulary, or for more than one dimension.
        """
        values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if not isinstance(values, list) or any(isinstance(value, list) for value in values):
            raise ValueError(f"ids of shape {tuple(getattr(ids, 'shape', ()))}: expected one dimension")
        size = self.vocab_size
        wrong = next((value for value in values if not 0 <= value < size), None)
        if wrong is not None:
            raise ValueError(f"id {wrong}: expected 0 <= id < vocab_size={size} of {self.model_path}")
        return str(self._processor.decode([int(value) for value in values]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a path and the checks to repeat; the processor itself does not travel."""
        return _reopen, (self.model_path, self.special_tokens, self._special_ids, self._sha256, self._follow_links)

    def __repr__(self) -> str:
        """Name the model, its size and the start of its sha256."""
        return f"SentencePieceTokenizer({self.model_path!r}, vocab_size={self.vocab_size}, sha256={self._sha256[:12]})"


def sentinel_ids(processor: Any, *, special_tokens: Sequence[str], where: str) -> dict[str, int]:
    """Look up the sentinels in a SentencePieceProcessor and check each: known, one id, decoding to itself (PR-01).

    Raises: ValueError unless four different literals are asked for, CacheError for a model that fails a check; `where`
    names the model.
    """
    if len(special_tokens) != 4 or len(set(special_tokens)) != 4:
        raise ValueError(f"special_tokens={tuple(special_tokens)!r}: expected four different ones: sys, usr, asst, eot")
    return {
        name: _sentinel_id(processor, token, where=where)
        for name, token in zip(SPECIAL_TOKEN_NAMES, special_tokens, strict=True)
    }


def _sentinel_id(processor: Any, token: str, *, where: str) -> int:
    advice = f"Train a tokenizer that has it as a user-defined symbol: {TRAIN_COMMAND}"
    token_id = int(processor.piece_to_id(token))
    if token_id == processor.unk_id():
        raise CacheError(f"{where}: has no piece {token!r}. {advice}")
    found = list(processor.encode(token))
    # A model with a dummy prefix, SentencePiece's default, puts a space piece before any text.
    alone = found[1:] if found and processor.id_to_piece(found[0]) == _SPACE else found
    if alone != [token_id]:
        raise CacheError(f"{where}: {token!r} encodes to {found}, expected the one id {token_id}. {advice}")
    text = processor.decode([token_id])
    if text != token:
        raise CacheError(f"{where}: id {token_id} decodes to {text!r}, expected {token!r}. {advice}")
    return token_id


def read_model(path: str | os.PathLike[str], *, follow_links: bool = True) -> bytes:
    """Return the bytes of a model file; it is not waited for, and no more than MAX_MODEL_BYTES are read.

    Raises: FileNotFoundError; CacheError for a folder, a FIFO or a device, for a JSON file such as a Hugging Face
        tokenizer.json, for a file that is too large, and for a symlink unless `follow_links`.
    """
    name = os.fspath(path)
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if follow_links else open_regular(name)
    except FileNotFoundError:
        raise FileNotFoundError(f"{name}: there is no tokenizer model. Train one: {TRAIN_COMMAND}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CacheError(f"{name}: is no regular file, {_EXPECTED}")
    with open(handle, "rb") as file:
        beginning, size = file.read(_BEGINNING), os.fstat(file.fileno()).st_size
        if beginning.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
            kind = "a Hugging Face tokenizer (JSON)" if any(key in beginning for key in _JSON_KEYS) else "a JSON file"
            raise CacheError(f"{name}: is {kind}, {_EXPECTED}")
        if size > MAX_MODEL_BYTES:
            raise CacheError(f"{name}: {size:,} bytes, expected a SentencePiece model of {MAX_MODEL_BYTES:,} at most")
        return beginning + file.read(size)


_BEGINNING = 4096  # bytes of a file that tell JSON from a model
_JSON_KEYS = (b'"added_tokens"', b'"truncation"', b'"tokenizer_class"', b'"model"')
_EXPECTED = f"expected a SentencePiece model ({MODEL_NAME}) that has the sentinels. Train one: {TRAIN_COMMAND}"


def _open_model(model: bytes, *, where: str) -> Any:
    import sentencepiece

    # An empty proto makes SentencePiece build a processor without a model, which fails at the first use only.
    if not model:
        raise CacheError(f"{where}: is empty, {_EXPECTED}")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, UnicodeDecodeError) as error:  # its text names a line of C++ and no reason
        raise CacheError(f"{where}: is no SentencePiece model, or a damaged one; {_EXPECTED}") from error


def _reopen(
    path: str, special_tokens: tuple[str, ...], ids: dict[str, int], sha256: str, follow_links: bool
) -> SentencePieceTokenizer:
    tokenizer = SentencePieceTokenizer(
        path, special_tokens=special_tokens, expected_special_token_ids=ids, follow_links=follow_links
    )
    if tokenizer.sha256 != sha256:
        raise CacheError(
            f"{path}: its sha256 is {tokenizer.sha256[:12]}..., expected {sha256[:12]}... as when this tokenizer was "
            "pickled. Leave the model alone while work is running, and start again"
        )
    return tokenizer


def _refuse_surrogates(texts: list[str], error: Exception) -> None:
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as bad:
            raise ValueError(
                f"text {index}, character {bad.start}: lone surrogate {text[bad.start]!a}, which utf-8 cannot hold. "
                "Replace it first, for instance by U+FFFD"
            ) from error


def load_tokenizer(path: str | os.PathLike[str], *, follow_links: bool = True) -> SentencePieceTokenizer:
    """Open the tokenizer in a file, or in a folder that holds spm.model. Raises as SentencePieceTokenizer.

    follow_links: whether the file may be a link, as in a snapshot of the hub; inside a folder, which may be anybody's
        cache, it never may.
    """
    if os.path.isdir(path):
        return SentencePieceTokenizer(os.path.join(path, MODEL_NAME), follow_links=False)
    return SentencePieceTokenizer(path, follow_links=follow_links)


@functools.cache
def get_default_tokenizer() -> SentencePieceTokenizer:
    """Open the model at DEFAULT_TOKENIZER_PATH on the first call; later calls return the same object.

    Raises: FileNotFoundError saying what to run.
    """
    return load_tokenizer(DEFAULT_TOKENIZER_PATH)


def encode(text: str, /) -> list[int]:
    """Encode with the default tokenizer; see SentencePieceTokenizer.encode."""
    return get_default_tokenizer().encode(text)


def decode(ids: Sequence[int] | NDArray[Any] | torch.Tensor, /) -> str:
    """Decode with the default tokenizer; see SentencePieceTokenizer.decode."""
    return get_default_tokenizer().decode(ids)
