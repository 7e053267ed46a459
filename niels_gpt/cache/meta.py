"""meta.json: the last file of a build, so a folder that has one is complete (D10)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from niels_gpt.fileio import META_NAME, CacheError, canonical_json, sha256_file, write_bytes

__all__ = [
    "META_NAME",
    "check_tokenizer",
    "find_meta",
    "read_meta",
    "sha256_file",
    "special_id",
    "tokenizer_above",
    "write_meta",
]

_REBUILD = "Rebuild it: python -m niels_gpt.cache.cli build-all"
_LEVELS_TO_CACHE_DIR = 4  # above a version: NAME, .versions, pretrain, and the folder of the caches


def write_meta(path: str, meta: dict[str, Any]) -> None:
    """Write a meta.json atomically, as canonical JSON: equal dicts give equal bytes."""
    write_bytes(path, canonical_json(meta))


def read_meta(path: str) -> dict[str, Any]:
    """Return a meta.json as a dict.

    Raises: FileNotFoundError if there is none; CacheError if it is not a JSON object.
    """
    try:
        meta = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file. A cache is complete when it has one. {_REBUILD}") from None
    except (ValueError, RecursionError) as error:
        raise CacheError(f"{path}: not JSON ({error}), expected a cache's meta.json. {_REBUILD}") from error
    if not isinstance(meta, dict):
        raise CacheError(f"{path}: a JSON {type(meta).__name__}, expected an object. {_REBUILD}")
    return meta


def find_meta(folder: Path) -> dict[str, Any] | None:
    """Return the meta.json of a folder; None where there is none, as in a folder that another tool wrote."""
    path = folder / META_NAME
    return read_meta(str(path)) if path.is_file() else None


def check_tokenizer(folder: Path, meta: dict[str, Any] | None, expected_sha256: str | None = None) -> None:
    """Raise CacheError if a cache's ids are of another tokenizer than the expected one.

    expected_sha256: the model that the caller uses; without it, that of tokenizer/ beside the cache, if there is one.
    """
    found = (meta or {}).get("tokenizer_sha256")
    if expected_sha256 is None:
        expected_sha256 = _tokenizer_meta_above(folder).get("tokenizer_sha256")
    if found is not None and expected_sha256 is not None and found != expected_sha256:
        raise CacheError(
            f"{folder / META_NAME}: ids of tokenizer {str(found)[:12]}, expected tokenizer {expected_sha256[:12]}. "
            + _REBUILD
        )


def special_id(folder: Path, meta: dict[str, Any] | None, name: str) -> int:
    """Return the id of the sentinel `name` (sys, usr, asst, eot), from the cache's meta or its tokenizer's (D1).

    Raises: CacheError naming the places looked at.
    """
    for candidate in (meta or {}, _tokenizer_meta_above(folder)):
        ids = candidate.get("special_token_ids")
        value = ids.get(name) if isinstance(ids, dict) else None
        if isinstance(value, int):
            return value
    raise CacheError(
        f"{folder}: no id of the {name} sentinel is known. Pass {name}_id=..., or put special_token_ids into "
        f"{folder / META_NAME} or into the cache's tokenizer/{META_NAME}"
    )


def tokenizer_above(folder: Path) -> Path | None:
    """Return the nearest tokenizer/ with a meta.json beside or above a version; None where there is none."""
    candidates = (parent / "tokenizer" for parent in list(folder.parents)[:_LEVELS_TO_CACHE_DIR])
    return next((path for path in candidates if (path / META_NAME).is_file()), None)


def _tokenizer_meta_above(folder: Path) -> dict[str, Any]:
    tokenizer = tokenizer_above(folder)
    return {} if tokenizer is None else find_meta(tokenizer) or {}
