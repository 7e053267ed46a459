"""A cache by its meta.json, checked before anything is sent or fetched: nothing in it is trusted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.cache.meta import checked_meta
from niels_gpt.kinds.kind import Kind, kind_named, unknown_kind
from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import (
    MAX_JSON_BYTES,
    checked_sha256,
    file_records,
    meta_crc32,
    parse_object,
    path_inside,
    sha256_regular,
    wrong_value,
)

MARK_NAME = "niels_gpt-push.json"
"""In a bucket while a cache is pushed to it: whose files these are."""


@dataclass(frozen=True)
class Described:
    """What a meta.json says."""

    raw: bytes
    """The meta.json itself."""
    meta: dict[str, Any]
    records: dict[str, dict[str, Any]]
    """The record (name, bytes, sha256) of every file but meta.json, by its name."""
    content_sha256: str
    kind: Kind

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but meta.json."""
        return sum(int(record["bytes"]) for record in self.records.values())


@dataclass(frozen=True)
class Pushed:
    """What a push did."""

    url: str
    files: int
    """Of the cache, meta.json included."""
    num_bytes: int
    """Of these files."""
    sent_bytes: int
    skipped_files: int
    """That were there already."""


def described(raw: bytes, where: str) -> Described:
    """Check the bytes of a meta.json; where: its path or URL, for messages.

    Raises: CacheError where this is no meta.json of a known kind, or contradicts itself; for a stub.
    """
    if len(raw) > MAX_JSON_BYTES:
        raise CacheError(where, f"{len(raw):,} bytes", f"at most {MAX_JSON_BYTES:,}", _PUBLISHER, code="E206")
    try:
        meta = parse_object(raw)
    except ValueError as error:
        raise CacheError(where, str(error), "a cache's meta.json", _PUBLISHER, code="E202") from error
    stored, computed = meta_crc32(raw)
    if stored != computed and (stored is not None or "meta_crc32" in meta or "checksums" in meta):
        found = f"damaged: its bytes have the CRC-32 {computed:08x}"
        raise CacheError(where, found, "its meta_crc32", _PUBLISHER, code="E202")
    kind = kind_named(meta.get("kind"))
    if kind is None:
        raise CacheError(where, *unknown_kind(meta), code="E208")
    if meta.get("built") is False:
        raise CacheError(where, "built is false, so there is nothing to transfer", code="E207")
    checked_meta(meta, where)
    records = {str(record["name"]): record for record in file_records(meta, where)}
    if MARK_NAME in records:
        raise wrong_value(where, "a file's name", MARK_NAME, "another one")
    content = checked_sha256(meta.get("content_sha256"), "content_sha256", where)
    if (actual := kind.content_sha256([*records.values()])) != content:
        found = f"content_sha256 is {content[:12]}, but the files it names give {actual[:12]}"
        raise CacheError(where, found, remedy=_PUBLISHER, code="E202")
    if remedy := kind.unnamed(meta, records):
        found = "it does not name all files of the cache, as in earlier builds"
        raise CacheError(where, found, "the name, size and sha256 of each", remedy, code="E208")
    return Described(raw, meta, records, content, kind)


_PUBLISHER = "Take another copy, or have it pushed again with --replace"


def may_replace(replace: bool | Collection[str], content: str) -> bool:
    """Whether a push may take the place of the cache of this content_sha256. replace: as of `push`."""
    return replace if isinstance(replace, bool) else content in replace


def refuse_foreign_files(where: str, foreign: Collection[str]) -> None:
    """Raise CacheError E610 where a URL has files that are not of a cache."""
    if foreign:
        some = ", ".join(sorted(foreign)[:3])
        found = f"holds {len(foreign):,} files that are not of a cache ({some}). Nothing was changed"
        raise CacheError(where, found, remedy="Push to an empty folder", code="E610")


def other_cache(where: str, content: str, own: str) -> CacheError:
    """Return the error of a URL that has another cache, by the content_sha256 of both."""
    return CacheError(where, f"holds another cache ({content[:12]})", own[:12], REPLACE, code="E610")


REPLACE = "Push to another URL, or replace what is there: --replace"


def whole(folder: Path, local: Described, record: dict[str, Any]) -> Path:
    """Return the path of a file of a cache. Raises: CacheError E611 where its sha256 is not that of its record."""
    path = path_inside(folder, str(record["name"]))
    if (actual := sha256_regular(path, least_share=local.kind.least_share)) != record["sha256"]:
        found = f"its sha256 is {actual[:12]}"
        raise CacheError(path, found, f"{record['sha256'][:12]} by its {META_NAME}", REBUILD, code="E611")
    return path
