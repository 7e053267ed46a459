"""meta.json of an EAGLE-3 cache: writes it, records all files in it, and compares files with it.

A reader compares manifest.json, plan.json and receipts with their sha256 in meta.json, once a process. Caches of other
tools have no meta.json.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.format.layout import (
    EMBEDDINGS_NAME,
    MANIFEST_NAME,
    SHARD_NAME,
    SIDECAR,
    SPARSE,
    WEIGHTS_NAME,
    PathLike,
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
from niels_gpt.storage.meta_json import file_records, meta_bytes, parse_object, resolved

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
    """Write meta.json of a folder that has all other files; return its content.

    check: called after all files were read; an error of it prevents the write.
    keys, known, follow_links: see `meta_of`.
    Raises: CacheError if a file is missing or not regular; the errors of `check`.
    """
    meta = meta_of(folder, keys, known=known, follow_links=follow_links)
    if check is not None:
        check()
    write_bytes(folder / META_NAME, meta_bytes(meta))
    return meta


def meta_of(
    folder: Path, keys: Mapping[str, Any], *, known: Iterable[Mapping[str, Any]] = (), follow_links: bool = False
) -> dict[str, Any]:
    """Return the content of meta.json for a folder that has all other files.

    keys: all keys that do not follow from the files; the old meta.json if only the manifest changed.
    known: records of unchanged files, which are not read again. follow_links: see `open_file`.
    Raises: CacheError if a file is missing or not regular.
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
    """Return the record (name, bytes, sha256) of every file of a cache except meta.json and locks.

    Order: the manifest, the target's weights, the sidecar by name, the shards by number. Files are hashed in parallel.

    known: records to take over for files of the recorded size.
    Raises: CacheError if a file is missing or not regular.
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
    """Return the sha256 over the digests of manifest, weights and receipts, which decide all other files."""
    digests = {str(record["name"]): record["sha256"] for record in records}
    deciding = {name: digest for name, digest in digests.items() if _DECIDES.fullmatch(name)}
    return hashlib.sha256(canonical_json(deciding)).hexdigest()


def unchanged_shards(folder: Path, meta: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the shard records of an earlier meta.json whose receipts still have the recorded sha256.

    A receipt decides the bytes of its shard, so such a shard is not hashed again.

    meta: None gives no records.
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
    """Return whether a meta.json lists every shard; earlier builds listed the other files only."""
    try:
        named = sum(SHARD_NAME.match(record["name"]) is not None for record in file_records(meta))
        return bool(named == meta["totals"]["shards"])
    except (CacheError, LookupError, TypeError):
        return False


def file_sha256(path: Path, *, follow_links: bool = False) -> str:
    """Return the sha256 of a cache file. Raises: CacheError if it is missing or not a regular file."""
    try:
        with open(open_file(path, follow_links=follow_links), "rb") as file:
            refuse_sparse(file.fileno(), str(path), *SPARSE)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise CacheError(path, "no such file", "one of the cache", "Run: precompute --resume", code="E702") from error


def eagle3_meta(folder: Path, follow_links: bool) -> dict[str, Any] | None:
    """Return the meta.json of this project's cache; None if there is none or another tool's.

    Raises: CacheError E704 for a damaged one.
    """
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


# --- what readers do with it ------------------------------------------------------------------------------------------

compared: set[tuple[int, ...]] = set()
"""Keys of files that this process, or the one it was forked from, has compared."""


def version_of(cache_dir: PathLike) -> str:
    """Return the version folder that a cache's public link points to now; any other path unchanged."""
    path = Path(cache_dir)
    return os.fspath(resolved(path) if path.is_symlink() else cache_dir)


def fingerprint(cache_dir: PathLike, num_samples: int, *, follow_links: bool) -> dict[str, Any]:
    """Return a cache's identity for a checkpoint: samples, manifest_sha256, content_sha256, tokenizer_sha256.

    The last two are None without a meta.json of this project. Raises: CacheError for a damaged one.
    """
    meta = eagle3_meta(Path(cache_dir), follow_links) or {}
    return {
        "samples": num_samples,
        "manifest_sha256": file_sha256(Path(cache_dir) / MANIFEST_NAME, follow_links=follow_links),
        "content_sha256": meta.get("content_sha256"),
        "tokenizer_sha256": meta.get("tokenizer_sha256"),
    }


def compare_once(
    cache_dir: PathLike,
    name: str,
    *,
    follow_links: bool = False,
    remedy: str = "Remove the file and run the same precompute command with --resume, or produce the cache again",
    code: str = "E701",
) -> None:
    """Compare a small cache file with its sha256 in meta.json, once a process. Does nothing if either is missing.

    A file that cannot be opened is left to its reader's error. remedy, code: for the error.
    Raises: CacheError for another sha256; CacheError E205 for a link.
    """
    path = Path(cache_dir, name)
    try:
        key = key_of(os.stat(path))
    except OSError:
        return
    named = None if key in compared else _digests_in(cache_dir, follow_links).get(name)
    if named is None:
        return
    if (actual := file_sha256(path, follow_links=follow_links)) != named:
        raise CacheError(path, f"sha256 {actual[:12]}", f"{named[:12]} by {META_NAME}", remedy, code=code)
    compared.add(key)


def _digests_in(cache_dir: PathLike, follow_links: bool) -> dict[str, str]:
    """Return sha256 by file name; {} without a readable meta.json of this project."""
    with suppress(ValueError, OSError):
        return _read_digests(os.fspath(cache_dir), follow_links, key_of(os.stat(Path(cache_dir, META_NAME))))
    return {}


@functools.lru_cache(maxsize=4)
def _read_digests(cache_dir: str, follow_links: bool, _key: tuple[int, ...]) -> dict[str, str]:
    """Return sha256 by file name. _key: identifies the meta.json, which may be replaced."""
    meta = parse_object(read_meta_bytes(Path(cache_dir), follow_links=follow_links))
    return {str(record["name"]): str(record["sha256"]) for record in file_records(meta)}


def key_of(about: os.stat_result) -> tuple[int, ...]:
    """Return a key that changes when the file does: device, inode, size and modification time."""
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
