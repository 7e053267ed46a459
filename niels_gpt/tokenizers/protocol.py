"""What builders and readers need of a tokenizer, whatever made it, and what identifies it.

Both adapters have all members of `Tokenizer`: SentencePieceTokenizer (niels_gpt/tokenizer.py) and HuggingFaceTokenizer
(huggingface.py). A caller's own object needs the first three only; the functions below give the others their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from niels_gpt.storage.errors import CacheError, SourceError, TokenizerError
from niels_gpt.storage.fileio import PathLike, sha256_file
from niels_gpt.storage.meta_json import checked_sha256, wrong_value

KINDS: Final = ("sentencepiece", "huggingface")
PROBE = "The quick brown fox jumps over 13 lazy dogs; (naïve) {code} = [0x7F]\n\tДа, 漢字 🦊!"
NARROW_IDS: Final = 1 << 16
"""Ids that fit uint16. A cache of a larger vocabulary has tokens of 32 bits (D18)."""
MAX_IDS: Final = 1 << 31
"""The most ids of a cache's vocabulary: each then fits int32 too, which every device can cast."""
TOKEN_DTYPES: Final[dict[str, np.dtype[Any]]] = {"uint16-le": np.dtype("<u2"), "uint32-le": np.dtype("<u4")}
"""`token_dtype` in meta.json, and the dtype of the token files."""

Ids = NDArray[np.unsignedinteger[Any]]
"""Tokens of a cache: uint16 or uint32, as its meta.json says."""


class Tokenizer(Protocol):
    """The members that a builder cannot do without."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: the largest one and 1, added tokens included."""

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text, without BOS or EOS."""

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of the four sentinels by sys, usr, asst and eot; {} for a tokenizer without them."""


class FullTokenizer(Tokenizer, Protocol):
    """The members of both adapters."""

    kind: str
    """One of KINDS."""
    model_path: str
    """The file that the ids come from: spm.model or tokenizer.json."""

    @property
    def sha256(self) -> str:
        """The hex sha256 of the file at `model_path` when it was opened; `tokenizer_sha256` in meta.json."""

    @property
    def unk_id(self) -> int | None:
        """The id of characters without a piece; None if there is no such id."""

    @property
    def eos_id(self) -> int | None:
        """The id that the tokenizer's makers end a text with; None if it names none."""

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that no text may give: special tokens and the sentinels, without the unknown id.

        Where the literal of one is in a text, `encode` may give the id itself; builders find it (D26).
        """

    def encode_batch(self, texts: Sequence[str], /, *, num_threads: int = 1) -> list[NDArray[Any]]:
        """Return the ids of each text as an integer array [tokens]; threads change the speed only."""

    def encode_plain(self, texts: Sequence[str], /) -> list[NDArray[Any]]:
        """Return the ids of each text with the literals of control tokens as plain text: no control id.

        Raises: ValueError for a tokenizer that cannot.
        """

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of ids, special tokens included."""

    def token_id(self, literal: str, /) -> int | None:
        """Return the id of one token by its literal, such as "<|endoftext|>"; None if there is none."""

    def token(self, token_id: int, /) -> str:
        """Return the literal of an id, for people: of a byte piece, what the vocabulary calls it."""


def ids_before(ids: Sequence[int], of_text: Sequence[int]) -> tuple[int, ...]:
    """Return the ids before the ids of a text, which are among `ids`; () where they are not."""
    count = next((at for at in range(len(ids)) if [*ids[at : at + len(of_text)]] == [*of_text]), 0)
    return tuple(ids[:count])


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of a cache's tokens: uint16 little-endian, or uint32 for ids of 65,536 and more (D18)."""
    return np.dtype("<u2" if vocab_size <= NARROW_IDS else "<u4")


def token_dtype_name(vocab_size: int) -> str:
    """Return `token_dtype` of a cache's meta.json: "uint16-le", or "uint32-le" for ids of 65,536 and more (D18)."""
    dtype = token_dtype(vocab_size)
    return next(name for name, each in TOKEN_DTYPES.items() if each == dtype)


def control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return `control_ids` of a tokenizer; the sentinels of one that does not have the member."""
    known: frozenset[int] | None = getattr(tokenizer, "control_ids", None)
    return frozenset(tokenizer.special_token_ids().values()) if known is None else known


def tokenizer_sha256(tokenizer: Tokenizer) -> str | None:
    """Return the sha256 of the model that a tokenizer opened; None for a tokenizer without a model.

    Call it before a build: the file at `model_path` may be replaced later.
    """
    known: str | None = getattr(tokenizer, "sha256", None)
    path = getattr(tokenizer, "model_path", None)
    return known if known is not None or path is None else sha256_file(path)


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """Return what identifies a tokenizer: its model's sha256, or without a model the sha256 of PROBE's ids."""
    known = tokenizer_sha256(tokenizer)
    if known is not None:
        return known
    try:
        identity = repr(list(tokenizer.encode(PROBE)))
    except Exception as error:  # a tokenizer that cannot encode PROBE is identified by its type
        identity = f"{type(tokenizer)} {type(error)}"
    return sha256(identity.encode()).hexdigest()


TokenDtype = Literal["uint16", "uint32"]
"""How callers name the dtype of token files without a meta.json."""
NARROW: Final[np.dtype[Any]] = TOKEN_DTYPES["uint16-le"]
"""The dtype of token files of which nothing is known: what the spec and most other tools write."""


def token_dtype_of(
    meta: Mapping[str, Any] | None, where: PathLike, given: TokenDtype | None = None
) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the dtype of a cache's tokens: `token_dtype` of its meta.json, else `given`, else uint16.

    where: the meta.json, for errors. given: what the caller expects; None: nothing.
    Raises: ValueError for another `given`; CacheError for another token_dtype, and where it contradicts `given`.
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
    """Raise CacheError unless `vocab_size` is a number of ids, and `token_dtype` is the one for so many (D18)."""
    value, dtype, most = meta.get("vocab_size"), token_dtype_of(meta, where), most_ids(meta, where)
    if value is not None and integer(value, 1, most + 1) is None:
        raise wrong_value(where, "vocab_size", value, f"an integer from 1 to {most}")
    if value is not None and dtype != NARROW and value <= NARROW_IDS:
        raise wrong_value(where, "token_dtype", meta["token_dtype"], f"'uint16-le' for vocab_size {value}")


def most_ids(meta: Mapping[str, Any], where: str) -> int:
    """Return the largest `vocab_size` that a meta.json may have: ids fit the tokens. Raises: as `token_dtype_of`."""
    has_tokens = meta.get("kind") != "tokenizer"
    return NARROW_IDS if has_tokens and token_dtype_of(meta, where) == NARROW else MAX_IDS


def tokenizer_sha256_in(meta: Mapping[str, Any], where: str) -> str | None:
    """Return the sha256 of the model that the ids are of; None without one. Raises: CacheError for a wrong value."""
    sha256 = meta.get("tokenizer_sha256")
    return None if sha256 is None else checked_sha256(sha256, "tokenizer_sha256", where)


def special_id_in(meta: Mapping[str, Any], name: str, where: str) -> int | None:
    """Return the id of the sentinel `name` in a meta; None without one. Raises: CacheError for a wrong value."""
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
    """Return `value` if it is an integer from start to end - 1, and no bool; None otherwise."""
    return value if isinstance(value, int) and not isinstance(value, bool) and start <= value < end else None


def checked_ids(ids: Any, vocab_size: int, where: str) -> list[int]:
    """Return a sequence, array or tensor of ids as a list.

    where: names the model in errors.
    Raises: ValueError for an id outside the vocabulary, or for more than one dimension.
    """
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(values, list) or any(isinstance(value, list) for value in values):
        raise ValueError(f"ids of shape {tuple(getattr(ids, 'shape', ()))}: expected one dimension")
    wrong = next((value for value in values if not 0 <= value < vocab_size), None)
    if wrong is not None:
        raise TokenizerError(f"id {wrong}: expected 0 <= id < vocab_size={vocab_size} of {where}", code="E409")
    return [int(value) for value in values]


def refuse_surrogates(texts: Sequence[str], error: Exception) -> None:
    """Raise ValueError for the first lone surrogate in some texts, which a library refused with `error`."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as bad:
            raise SourceError(
                f"text {index}, character {bad.start}: lone surrogate {text[bad.start]!a}, which utf-8 cannot "
                "hold. Replace it first, for instance by U+FFFD",
                code="E304",
            ) from error
