"""The keys of meta.json about ids: of which tokenizer they are, how many there are, and which of them are special.

Nothing is opened here; `where` names the meta.json in errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import numpy as np

from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import PathLike
from niels_gpt.storage.meta_json import checked_sha256, wrong_value
from niels_gpt.tokenizers.protocol import MAX_IDS, NARROW_IDS, TOKEN_DTYPES

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
    return _id(meta, ids[name], f"special_token_ids.{name}", where) if name in ids else None


def end_of_documents(meta: Mapping[str, Any] | None, where: str) -> tuple[int, str] | None:
    """Return id and literal of the token after each document of a pretrain cache; None where there is none.

    A cache of an earlier version has the key `append_eot`, for the end-of-text sentinel.
    Raises: CacheError for a wrong value.
    """
    keys = meta or {}
    if keys.get("document_end") is None:
        eot = special_id_in(keys, "eot", where) if keys.get("append_eot") is True else None
        return None if eot is None else (eot, SPECIAL_TOKENS[SPECIAL_TOKEN_NAMES.index("eot")])
    return _document_token(keys, "document_end", where)


def start_of_documents(meta: Mapping[str, Any] | None, where: str) -> tuple[int, str] | None:
    """Return id and literal of the token before each document of a pretrain cache; None where there is none.

    Raises: CacheError for a wrong value.
    """
    return _document_token(meta or {}, "document_start", where)


def _document_token(keys: Mapping[str, Any], key: str, where: str) -> tuple[int, str] | None:
    known = keys.get(key)
    if known is None:
        return None
    if not isinstance(known, dict) or not isinstance(known.get("token"), str):
        verb = key.removeprefix("document_")
        raise wrong_value(where, key, known, f"null, or the id and the token that {verb} a document")
    return _id(keys, known.get("id"), f"{key}.id", where), known["token"]


def _id(meta: Mapping[str, Any], value: Any, key: str, where: str) -> int:
    size = integer(meta.get("vocab_size"), 1, MAX_IDS + 1) or MAX_IDS
    if integer(value, 0, size) is None:
        raise wrong_value(where, key, value, f"an integer from 0 to {size - 1}")
    return int(value)


def integer(value: Any, start: int, end: int) -> int | None:
    """Return `value` if it is an integer from start to end - 1, and no bool; None otherwise."""
    return value if isinstance(value, int) and not isinstance(value, bool) and start <= value < end else None
