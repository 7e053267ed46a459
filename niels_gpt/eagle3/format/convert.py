"""Convert a dense cache between versions 1 and 2, which differ in the manifest alone; and a cache's content_sha256."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.format.layout import (
    EMBEDDINGS_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    SIDECAR,
    SPARSE,
    PathLike,
    open_file,
    read_file,
    read_meta_bytes,
    refuse_links,
    refuse_sparse,
)
from niels_gpt.eagle3.format.manifest import (
    VERSIONS,
    existing_shard_indices,
    is_compressed,
    is_native,
    manifest_path,
    number_in,
    read_manifest,
    write_manifest,
)
from niels_gpt.eagle3.format.native.weights import WEIGHTS_NAME
from niels_gpt.eagle3.format.shard_writer import receipt_path
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, canonical_json, remove, write_bytes
from niels_gpt.storage.locks import file_lock
from niels_gpt.storage.meta_json import file_records, meta_bytes, parse_object
from niels_gpt.storage.versions import VERSIONS_DIR


def convert(cache_dir: PathLike, format_version: int, *, follow_links: bool = False) -> bool:
    """Convert a dense cache to version 1 or 2 by changing its manifest; return whether anything changed.

    Version 2 has the key `target_probs_topk`, 0; all other keys stay. A meta.json of this project is updated.
    follow_links: as `open_file`. A file that is written replaces a link; nothing is written through one.
    Raises: ValueError for another version; CacheError for a top-k cache, whose shards version 1 cannot hold, for a
        committed version below .versions/, which never changes, and while another process writes the cache.
    """
    if type(format_version) is not int or format_version not in VERSIONS:
        raise ValueError(f"format_version {format_version}, expected 1 or 2")
    folder = Path(cache_dir)
    if VERSIONS_DIR in folder.resolve().parts:
        raise CacheError(folder, "a committed version is never changed", remedy="Convert a copy: cp -rL", code="E710")
    if not follow_links or (folder / SIDECAR).is_symlink():
        refuse_links(folder)
    if not (folder / SIDECAR).is_dir():
        return _convert(folder, format_version, follow_links)
    if (folder / SIDECAR / LOCK_NAME).is_symlink():  # of a snapshot: the link is removed, its file stays
        remove(folder / SIDECAR / LOCK_NAME)
    with file_lock(folder / SIDECAR / LOCK_NAME, folder, "is being written", wait=False):
        return _convert(folder, format_version, follow_links)


def _convert(folder: Path, format_version: int, follow_links: bool) -> bool:
    manifest = read_manifest(folder, follow_links=follow_links)
    meta = eagle3_meta(folder, follow_links)
    if manifest["format_version"] != format_version:
        topk = manifest.get("target_probs_topk")
        if topk and is_compressed(topk, number_in(manifest, "draft_vocab_size", folder)):
            raise CacheError(
                manifest_path(folder),
                f"target_probs_topk is {topk}, and version 1 holds all probabilities",
                remedy="Produce the cache again with --target-probs-topk 0",
                code="E710",
            )
        manifest["format_version"] = format_version
        manifest.pop("target_probs_topk", None)
        if format_version == 2:
            manifest["target_probs_topk"] = 0
        write_manifest(folder, manifest)
        _update_meta(folder, meta, manifest, follow_links)
        return True
    return _update_meta(folder, meta, manifest, follow_links)  # an earlier call may have been killed in between


def content_sha256(cache_dir: PathLike, *, follow_links: bool = False) -> str:
    """Return the sha256 of the checksums of the manifest, the target's weights and the receipts (of the shards).

    Raises: CacheError where one of them is missing or no regular file.
    """
    native = False
    with suppress(FileNotFoundError):  # reported below
        native = is_native(read_manifest(cache_dir, follow_links=follow_links))
    names = [MANIFEST_NAME, WEIGHTS_NAME if native else EMBEDDINGS_NAME]
    names += [os.path.relpath(receipt_path(".", index)) for index in sorted(existing_shard_indices(cache_dir))]
    checksums = {name: file_sha256(Path(cache_dir) / name, follow_links=follow_links) for name in names}
    return hashlib.sha256(canonical_json(checksums)).hexdigest()


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
    if meta.get("kind") != "eagle3":
        return None
    file_records(meta, str(path))
    return meta


def _update_meta(folder: Path, meta: dict[str, Any] | None, manifest: dict[str, Any], follow_links: bool) -> bool:
    """Write the manifest's values and checksums into meta.json; return whether it changed."""
    if meta is None:
        return False
    raw = read_file(folder / MANIFEST_NAME, follow_links=follow_links)
    record = {"name": MANIFEST_NAME, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    files = [record if entry["name"] == MANIFEST_NAME else entry for entry in meta["files"]]
    short = {key: value for key, value in manifest.items() if key != "selected_token_ids"}
    content = content_sha256(folder, follow_links=follow_links)
    updated = meta_bytes({**meta, "files": files, "manifest": short, "content_sha256": content})
    if updated == meta_bytes(meta):
        return False
    write_bytes(folder / META_NAME, updated)
    return True
