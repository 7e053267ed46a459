"""The keys of meta.json about ids: of which tokenizer they are, how many there are, and which of them are special.

Nothing is opened here; `where` names the meta.json in errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS
from niels_gpt.storage.meta_json import checked_sha256, wrong_value
from niels_gpt.tokenizers.protocol import MAX_VOCAB_SIZE, NARROW_IDS, TOKEN_DTYPES

_IDS_OF_16_BITS = np.dtype("<u2")


def token_dtype_of(meta: Mapping[str, Any] | None) -> np.dtype[Any]:
    """Return the dtype of a cache's tokens by its checked meta; uint16 without a meta or the key `token_dtype`."""
    return TOKEN_DTYPES[(meta or {}).get("token_dtype", "uint16-le")]


def check_vocab_size(meta: Mapping[str, Any], where: str) -> None:
    """Raise CacheError for a `vocab_size` that is no number of ids, or whose ids do not fit the dtype of the tokens."""
    value, has_tokens = meta.get("vocab_size"), meta.get("kind") != "tokenizer"
    most = NARROW_IDS if has_tokens and token_dtype_of(meta) == _IDS_OF_16_BITS else MAX_VOCAB_SIZE
    if value is not None and integer(value, 1, most + 1) is None:
        raise wrong_value(where, "vocab_size", value, f"an integer from 1 to {most}")


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
    end = keys.get("document_end")
    if end is None:
        eot = special_id_in(keys, "eot", where) if keys.get("append_eot") is True else None
        return None if eot is None else (eot, SPECIAL_TOKENS[SPECIAL_TOKEN_NAMES.index("eot")])
    if not isinstance(end, dict) or not isinstance(end.get("token"), str):
        raise wrong_value(where, "document_end", end, "null, or the id and the token that end a document")
    return _id(keys, end.get("id"), "document_end.id", where), end["token"]


def _id(meta: Mapping[str, Any], value: Any, key: str, where: str) -> int:
    size = integer(meta.get("vocab_size"), 1, MAX_VOCAB_SIZE + 1) or MAX_VOCAB_SIZE
    if integer(value, 0, size) is None:
        raise wrong_value(where, key, value, f"an integer from 0 to {size - 1}")
    return int(value)


def integer(value: Any, start: int, end: int) -> int | None:
    """Return `value` if it is an integer from start to end - 1, and no bool; None otherwise."""
    return value if isinstance(value, int) and not isinstance(value, bool) and start <= value < end else None
