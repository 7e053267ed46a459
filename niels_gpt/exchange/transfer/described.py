"""Check a cache by its meta.json before any file is sent or fetched. Nothing in the meta.json is trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from niels_gpt.buckets.bucket import NOTE_NAME
from niels_gpt.cache.meta import checked_meta
from niels_gpt.display.numbers import many, size_text
from niels_gpt.kinds.kind import Kind, kind_named, unknown_kind
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import (
    MAX_JSON_BYTES,
    checked_sha256,
    file_records,
    meta_crc32,
    parse_object,
    wrong_value,
)

_PUBLISHER = "Take another copy, or have it pushed again with --replace"


@dataclass(frozen=True)
class Described:
    """A checked meta.json."""

    raw: bytes
    """The bytes of meta.json."""
    meta: dict[str, Any]
    records: dict[str, dict[str, Any]]
    """Record (name, bytes, sha256) of every file but meta.json, by name."""
    content_sha256: str
    kind: Kind

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but meta.json."""
        return sum(int(record["bytes"]) for record in self.records.values())

    @property
    def whole(self) -> tuple[int, int]:
        """Number and bytes of all files, meta.json included."""
        return len(self.records) + 1, self.num_bytes + len(self.raw)


@dataclass(frozen=True)
class Pushed:
    """Result of a push."""

    url: str
    files: int
    """Files of the cache, meta.json included."""
    num_bytes: int
    """Bytes of these files."""
    sent_bytes: int
    skipped_files: int
    """Files that were at the URL already."""

    def __str__(self) -> str:
        """Return the URL, files and bytes."""
        sizes = f"{size_text(self.num_bytes)}, {size_text(self.sent_bytes)} of them sent"
        return f"{self.url}: {many(self.files, 'file')}, {sizes}"


def described(raw: bytes, where: str) -> Described:
    """Check the bytes of a meta.json. where: its path or URL, for messages.

    Raises: CacheError E206 if it is too large; E202 if it is malformed, damaged, or contradicts itself; E208 for an
        unknown kind, or if it does not name all files; E207 for a stub.
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
    if NOTE_NAME in records:
        raise wrong_value(where, "a file's name", NOTE_NAME, "another one")
    content = checked_sha256(meta.get("content_sha256"), "content_sha256", where)
    if (actual := kind.content_sha256([*records.values()])) != content:
        found = f"content_sha256 is {content[:12]}, but the files it names give {actual[:12]}"
        raise CacheError(where, found, remedy=_PUBLISHER, code="E202")
    if remedy := kind.unnamed(meta, records):
        found = "it does not name all files of the cache, as in earlier builds"
        raise CacheError(where, found, "the name, size and sha256 of each", remedy, code="E208")
    return Described(raw, meta, records, content, kind)
