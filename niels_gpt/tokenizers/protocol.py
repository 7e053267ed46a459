"""What a cache needs of a tokenizer, whatever made it, and the keys of meta.json that record it.

SentencePieceTokenizer (niels_gpt/tokenizer.py) and HuggingFaceTokenizer (huggingface.py) have all members of
`FullTokenizer`. A caller's own object needs the members of `Tokenizer` only; the functions below give defaults for the
others. Where a function takes a meta, `where` names the meta.json in errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import PathLike, sha256_file
from niels_gpt.storage.meta_json import checked_sha256, wrong_value

KINDS: Final = ("sentencepiece", "huggingface")
PROBE = "The quick brown fox jumps over 13 lazy dogs; (naïve) {code} = [0x7F]\n\tДа, 漢字 🦊!"
NARROW_IDS: Final = 1 << 16
"""Ids that fit uint16. A cache of a larger vocabulary has tokens of 32 bits (D18)."""
MAX_IDS: Final = 1 << 31
"""The most ids of a cache's vocabulary: they fit int32, which every device can cast."""
TOKEN_DTYPES: Final[dict[str, np.dtype[Any]]] = {"uint16-le": np.dtype("<u2"), "uint32-le": np.dtype("<u4")}
"""The dtype of the token files by `token_dtype` in meta.json."""

Ids = NDArray[np.unsignedinteger[Any]]
"""Tokens of a cache: uint16 or uint32, by its meta.json."""


class Tokenizer(Protocol):
    """The members that a builder cannot do without."""

    @property
    def vocab_size(self) -> int:
        """The largest id plus 1, added tokens included."""

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text, without BOS or EOS."""

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of the four sentinels by sys, usr, asst and eot; {} for a tokenizer without them."""


class FullTokenizer(Tokenizer, Protocol):
    """The members of both adapters."""

    kind: str
    """One of KINDS."""
    model_path: str
    """The file that decides the ids: spm.model or tokenizer.json."""

    @property
    def sha256(self) -> str:
        """The hex sha256 of the file when it was opened; `tokenizer_sha256` in meta.json."""

    @property
    def unk_id(self) -> int | None:
        """The id of unknown characters; None without one."""

    @property
    def eos_id(self) -> int | None:
        """The id of the tokenizer's own EOS; None without one."""

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids that no text may give: special tokens and the sentinels, without the unknown id.

        `encode` may give one for its literal in a text; builders find it (D26).
        """

    def encode_batch(self, texts: Sequence[str], /, *, num_threads: int = 1) -> list[NDArray[Any]]:
        """Return the ids of each text as an integer array [tokens]; threads change the speed only."""

    def encode_plain(self, texts: Sequence[str], /) -> list[NDArray[Any]]:
        """Return the ids of each text, with the literals of control tokens as plain text.

        Raises: SourceError E305 for a text without such an encoding.
        """

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of ids, special tokens included."""

    def token_id(self, literal: str, /) -> int | None:
        """Return the id of a token by its literal, such as "<|endoftext|>"; None without such a token."""

    def token(self, token_id: int, /) -> str:
        """Return the printable name of an id: its literal, or a form such as "<0x0A>" for a byte."""


def ids_before(ids: Sequence[int], of_text: Sequence[int]) -> tuple[int, ...]:
    """Return the part of `ids` before `of_text`, the ids of a text; () if `of_text` is not in `ids`."""
    count = next((at for at in range(len(ids)) if [*ids[at : at + len(of_text)]] == [*of_text]), 0)
    return tuple(ids[:count])


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of a cache's tokens: uint16 little-endian, or uint32 for ids of 65,536 and more (D18)."""
    return np.dtype("<u2" if vocab_size <= NARROW_IDS else "<u4")


def token_dtype_name(vocab_size: int) -> str:
    """Return the same dtype's name in meta.json: "uint16-le" or "uint32-le" (D18)."""
    dtype = token_dtype(vocab_size)
    return next(name for name, each in TOKEN_DTYPES.items() if each == dtype)


def control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return a tokenizer's control ids; its sentinels if it lacks the member `control_ids`."""
    known: frozenset[int] | None = getattr(tokenizer, "control_ids", None)
    return frozenset(tokenizer.special_token_ids().values()) if known is None else known


def tokenizer_sha256(tokenizer: Tokenizer) -> str | None:
    """Return the sha256 of the tokenizer's model; None without a model.

    Call it before a build, since the file may be replaced later.
    """
    known: str | None = getattr(tokenizer, "sha256", None)
    path = getattr(tokenizer, "model_path", None)
    return known if known is not None or path is None else sha256_file(path)


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """Return the sha256 that identifies a tokenizer: of its model, or without a model of PROBE's ids."""
    known = tokenizer_sha256(tokenizer)
    if known is not None:
        return known
    try:
        identity = repr(list(tokenizer.encode(PROBE)))
    except Exception as error:  # it cannot encode PROBE: its type and error identify it
        identity = f"{type(tokenizer)} {type(error)}"
    return sha256(identity.encode()).hexdigest()


TokenDtype = Literal["uint16", "uint32"]
"""The dtype of token files without a meta.json, as callers name it."""
NARROW: Final[np.dtype[Any]] = TOKEN_DTYPES["uint16-le"]
"""The default dtype of token files: the spec's, and most other tools'."""


def token_dtype_of(
    meta: Mapping[str, Any] | None, where: PathLike, given: TokenDtype | None = None
) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the dtype of a cache's tokens: by its meta.json, else `given`, else uint16.

    Raises: ValueError for an unknown `given`; CacheError E202 for an unknown token_dtype, E208 if it is not `given`.
    """
    if given is not None and given not in get_args(TokenDtype):
        raise ValueError(f"dtype={given!r}: expected one of {', '.join(get_args(TokenDtype))}")
    asked = NARROW if given is None else np.dtype(given).newbyteorder("<")
    if meta is None or "token_dtype" not in meta:
        return asked
    name = meta["token_dtype"]
    if not isinstance(name, str) or name not in TOKEN_DTYPES:
        raise wrong_value(str(where), "token_dtype", name, " or ".join(map(repr, TOKEN_DTYPES)))
    if given is not None and asked != TOKEN_DTYPES[name]:
        remedy = "Leave dtype out: it is for token files without a meta.json"
        raise CacheError(where, f"token_dtype is {name!r}, but dtype={given!r} was given", remedy=remedy, code="E208")
    return TOKEN_DTYPES[name]


def check_vocab_size(meta: Mapping[str, Any], where: str) -> None:
    """Raise CacheError E202 unless `vocab_size` is a number of ids and `token_dtype` is the dtype for it (D18)."""
    value, dtype, most = meta.get("vocab_size"), token_dtype_of(meta, where), most_ids(meta, where)
    if value is not None and integer(value, 1, most + 1) is None:
        raise wrong_value(where, "vocab_size", value, f"an integer from 1 to {most}")
    if value is not None and dtype != NARROW and value <= NARROW_IDS:
        raise wrong_value(where, "token_dtype", meta["token_dtype"], f"'uint16-le' for vocab_size {value}")


def most_ids(meta: Mapping[str, Any], where: str) -> int:
    """Return the largest valid `vocab_size`, by `token_dtype`. Raises: CacheError E202 for an unknown dtype."""
    has_tokens = meta.get("kind") != "tokenizer"
    return NARROW_IDS if has_tokens and token_dtype_of(meta, where) == NARROW else MAX_IDS


def tokenizer_sha256_in(meta: Mapping[str, Any], where: str) -> str | None:
    """Return the sha256 of the tokenizer's model; None if it is absent. Raises: CacheError E202 for a wrong value."""
    sha256 = meta.get("tokenizer_sha256")
    return None if sha256 is None else checked_sha256(sha256, "tokenizer_sha256", where)


def special_id_in(meta: Mapping[str, Any], name: str, where: str) -> int | None:
    """Return the id of the sentinel `name`; None if it is absent. Raises: CacheError E202 for a wrong value."""
    ids = meta.get("special_token_ids")
    if ids is None:
        return None
    if not isinstance(ids, dict):
        raise wrong_value(where, "special_token_ids", ids, "an object")
    return id_in(meta, ids[name], f"special_token_ids.{name}", where) if name in ids else None


def id_in(meta: Mapping[str, Any], value: Any, key: str, where: str) -> int:
    """Return the id at `key` of a meta.json. Raises: CacheError E202 unless it is below `vocab_size`."""
    size = integer(meta.get("vocab_size"), 1, MAX_IDS + 1) or MAX_IDS
    if integer(value, 0, size) is None:
        raise wrong_value(where, key, value, f"an integer from 0 to {size - 1}")
    return int(value)


def integer(value: Any, start: int, end: int) -> int | None:
    """Return `value` if it is an integer, not a bool, from start to end - 1; else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and start <= value < end else None
