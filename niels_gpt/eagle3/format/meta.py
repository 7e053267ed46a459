"""meta.json of an EAGLE-3 cache: its one writer, and the records of all files that it names."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.format.layout import (
    EMBEDDINGS_NAME,
    MANIFEST_NAME,
    SHARD_NAME,
    SIDECAR,
    SPARSE,
    WEIGHTS_NAME,
    is_lock,
    open_file,
    read_meta_bytes,
    refuse_sparse,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import existing_shard_indices, is_native, read_manifest
from niels_gpt.eagle3.format.plan import BUILDER_VERSION, SIDECAR_VERSION
from niels_gpt.eagle3.format.shard_writer import receipt_path
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, canonical_json, write_bytes
from niels_gpt.storage.meta_json import file_records, meta_bytes, parse_object

KIND = "eagle3"
_DECIDES = re.compile(r"manifest\.json|target_(embeddings|weights)\.safetensors|sidecar/shard-[0-9]{6}\.json")
_MOST_THREADS = 8  # that hash files: a disk serves no more at once


def write_meta(
    folder: Path,
    keys: Mapping[str, Any],
    *,
    known: Iterable[Mapping[str, Any]] = (),
    check: Callable[[], object] | None = None,
    follow_links: bool = False,
) -> dict[str, Any]:
    """Write meta.json of a folder that has all other files, and return its content.

    check: called when all files were read; what it raises prevents the writing. The rest, and what it raises: as
    `meta_of`.
    """
    meta = meta_of(folder, keys, known=known, follow_links=follow_links)
    if check is not None:
        check()
    write_bytes(folder / META_NAME, meta_bytes(meta))
    return meta


def meta_of(
    folder: Path, keys: Mapping[str, Any], *, known: Iterable[Mapping[str, Any]] = (), follow_links: bool = False
) -> dict[str, Any]:
    """Return the content of meta.json of a folder that has all other files.

    keys: all keys but the ones that follow from the files. Where only the manifest has changed: the keys of the old
    meta.json. known: records of files that have not changed, which are not read. follow_links: as `open_file`.
    Raises: CacheError where a file is missing or no regular file.
    """
    manifest = read_manifest(folder, follow_links=follow_links)
    files = records_of(folder, known, follow_links=follow_links)
    meta = {
        "format_version": SIDECAR_VERSION,
        "builder_version": BUILDER_VERSION,
        "built": True,
        **keys,
        "kind": KIND,
        "manifest": {name: value for name, value in manifest.items() if name != "selected_token_ids"},
        "content_sha256": content_sha256(files),
        "disk_bytes": sum(record["bytes"] for record in files),
        "files": files,
    }
    if "bytes_per_token" not in meta:
        tokens, supervised = (meta["totals"][name] for name in ("tokens", "supervised_tokens"))
        shard_bytes = sum(record["bytes"] for record in files if SHARD_NAME.match(record["name"]))
        meta |= {"bytes_per_token": shard_bytes / tokens, "supervised_share": supervised / tokens}
    return parse_object(meta_bytes(meta))


def records_of(
    folder: Path, known: Iterable[Mapping[str, Any]] = (), *, follow_links: bool = False
) -> list[dict[str, Any]]:
    """Return the record (name, bytes, sha256) of every file of a cache but meta.json and locks.

    In this order: the manifest, the target's weights, the sidecar by name, the shards by number. Several files are read
    at once. known: records that are taken as they are where the file has that size.
    Raises: CacheError where a file is missing or no regular file.
    """
    weights = WEIGHTS_NAME if is_native(read_manifest(folder, follow_links=follow_links)) else EMBEDDINGS_NAME
    sidecar = sorted(entry.name for entry in (folder / SIDECAR).iterdir() if not is_lock(entry.name))
    shards = (shard_path("", shard) for shard in sorted(existing_shard_indices(folder)))
    there = {str(record["name"]): dict(record) for record in known}

    def record(name: str) -> dict[str, Any]:
        path = folder / name
        size = path.stat().st_size if path.is_file() else None  # `file_sha256` reports one that is missing
        if size is not None and size == there.get(name, {}).get("bytes"):
            return there[name]
        sha256 = file_sha256(path, follow_links=follow_links)
        return {"name": name, "bytes": size, "sha256": sha256}

    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return list(threads.map(record, [MANIFEST_NAME, weights, *(f"{SIDECAR}/{name}" for name in sidecar), *shards]))


def content_sha256(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the sha256 of the digests of manifest, weights and receipts by name: all other files follow."""
    digests = {str(record["name"]): record["sha256"] for record in records}
    deciding = {name: digest for name, digest in digests.items() if _DECIDES.fullmatch(name)}
    return hashlib.sha256(canonical_json(deciding)).hexdigest()


def unchanged_shards(folder: Path, meta: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the records of shards in an earlier meta.json, None for none, whose receipts are those that it names.

    A receipt decides the bytes of its shard, so such a shard is not read again.
    """
    try:
        records = {str(record["name"]): record for record in file_records(meta or {})}
    except CacheError:
        return []
    shards = ((int(found[1]), record) for name, record in records.items() if (found := SHARD_NAME.match(name)))
    receipts = ((record, receipt_path("", shard).as_posix()) for shard, record in shards)
    return [
        record
        for record, name in receipts
        if name in records and (folder / name).is_file() and file_sha256(folder / name) == records[name]["sha256"]
    ]


def lists_shards(meta: Mapping[str, Any]) -> bool:
    """Return whether a meta.json names every shard; earlier builds named the other files alone."""
    try:
        named = sum(SHARD_NAME.match(record["name"]) is not None for record in file_records(meta))
        return bool(named == meta["totals"]["shards"])
    except (CacheError, LookupError, TypeError):
        return False


def file_sha256(path: Path, *, follow_links: bool = False) -> str:
    """Return the sha256 of a file of a cache. Raises: CacheError where it is missing, or is no regular file."""
    try:
        with open(open_file(path, follow_links=follow_links), "rb") as file:
            refuse_sparse(file.fileno(), str(path), *SPARSE)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise CacheError(path, "no such file", "one of the cache", "Run: precompute --resume", code="E702") from error


def eagle3_meta(folder: Path, follow_links: bool) -> dict[str, Any] | None:
    """Return the meta.json of a cache of this project; None where there is none, or another tool's."""
    path = folder / META_NAME
    if not os.path.lexists(path):
        return None
    raw = read_meta_bytes(folder, follow_links=follow_links)
    try:
        meta = parse_object(raw)
    except ValueError as error:
        raise CacheError(path, str(error), "the meta.json of a cache", "Move it away", code="E704") from error
    if meta.get("kind") != KIND:
        return None
    file_records(meta, str(path))
    return meta
