"""A dense cache of version 1 becomes one of version 2, and back, by its manifest alone."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.layout import (
    LOCK_NAME,
    SIDECAR,
    SPARSE,
    PathLike,
    open_file,
    read_file,
    read_meta_bytes,
    refuse_links,
    refuse_sparse,
)
from niels_gpt.eagle3.manifest import (
    EMBEDDINGS_NAME,
    MANIFEST_NAME,
    VERSIONS,
    existing_shard_indices,
    is_compressed,
    manifest_path,
    number_in,
    read_manifest,
    write_manifest,
)
from niels_gpt.eagle3.shards import receipt_path
from niels_gpt.fileio import META_NAME, CacheError, canonical_json, remove, write_bytes
from niels_gpt.locks import file_lock
from niels_gpt.records import file_records, meta_bytes, parse_object
from niels_gpt.versions import VERSIONS_DIR


def convert(cache_dir: PathLike, format_version: int, *, follow_links: bool = False) -> bool:
    """Make a dense cache one of version 1 or of version 2, by its manifest alone; returns whether anything changed.

    `target_probs_topk` comes (0) or goes with the version; all other keys stay. A meta.json of this project that
    describes the cache is brought up to date.
    follow_links: read files that are links, as in a snapshot of the Hugging Face hub. What is written replaces a link;
        nothing is written through one.
    Raises: ValueError for another version; CacheError for a top-k cache, whose shards version 1 cannot hold, for a
    committed version below .versions/, which never changes, and where somebody else is at work.
    """
    if type(format_version) is not int or format_version not in VERSIONS:
        raise ValueError(f"format_version {format_version}, expected 1 or 2")
    folder = Path(cache_dir)
    if VERSIONS_DIR in folder.resolve().parts:
        raise CacheError(f"{folder}: a committed version is never changed. Convert a copy: cp -rL")
    if not follow_links or (folder / SIDECAR).is_symlink():
        refuse_links(folder)
    if not (folder / SIDECAR).is_dir():
        return _convert(folder, format_version, follow_links)
    if (folder / SIDECAR / LOCK_NAME).is_symlink():  # of a snapshot: the link goes, what it stands for stays
        remove(folder / SIDECAR / LOCK_NAME)
    with file_lock(folder / SIDECAR / LOCK_NAME, f"{folder}: is being written", wait=False):
        return _convert(folder, format_version, follow_links)


def _convert(folder: Path, format_version: int, follow_links: bool) -> bool:
    manifest = read_manifest(folder, follow_links=follow_links)
    meta = _own_meta(folder, follow_links)
    if manifest["format_version"] != format_version:
        topk = manifest.get("target_probs_topk")
        if topk and is_compressed(topk, number_in(manifest, "draft_vocab_size", folder)):
            raise CacheError(
                f"{manifest_path(folder)}: target_probs_topk is {topk}, and version 1 holds all probabilities, which "
                "are not there any more. Produce the cache again with --target-probs-topk 0"
            )
        manifest["format_version"] = format_version
        manifest.pop("target_probs_topk", None)
        if format_version == 2:
            manifest["target_probs_topk"] = 0
        write_manifest(folder, manifest)
        _describe_again(folder, meta, manifest, follow_links)
        return True
    return _describe_again(folder, meta, manifest, follow_links)  # where an earlier call was killed in between


def content_sha256(cache_dir: PathLike, *, follow_links: bool = False) -> str:
    """Return the sha256 over those of the manifest, the embeddings and the receipts, which stand for the shards.

    Raises: CacheError where one of them is missing, or is no regular file.
    """
    names = [MANIFEST_NAME, EMBEDDINGS_NAME]
    names += [os.path.relpath(receipt_path(".", index)) for index in sorted(existing_shard_indices(cache_dir))]
    sums = {name: file_sha256(Path(cache_dir) / name, follow_links=follow_links) for name in names}
    return hashlib.sha256(canonical_json(sums)).hexdigest()


def file_sha256(path: Path, *, follow_links: bool = False) -> str:
    """Return the sha256 of a file of a cache. Raises: CacheError where it is missing, or is no regular file."""
    try:
        with open(open_file(path, follow_links=follow_links), "rb") as file:
            refuse_sparse(file.fileno(), str(path), *SPARSE)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise CacheError(f"{path}: no such file, expected one of the cache. Run: precompute --resume") from error


def _own_meta(folder: Path, follow_links: bool) -> dict[str, Any] | None:
    """Return the meta.json of a cache of this project; None where there is none, or another tool's."""
    path = folder / META_NAME
    if not os.path.lexists(path):
        return None
    raw = read_meta_bytes(folder, follow_links=follow_links)
    try:
        meta = parse_object(raw)
    except ValueError as error:
        raise CacheError(f"{path}: {error}, expected the meta.json of a cache. Move it away") from error
    if meta.get("kind") != "eagle3":
        return None
    file_records(meta, str(path))
    return meta


def _describe_again(folder: Path, meta: dict[str, Any] | None, manifest: dict[str, Any], follow_links: bool) -> bool:
    """Make a meta.json say what the manifest now is; returns whether it did not."""
    if meta is None:
        return False
    raw = read_file(folder / MANIFEST_NAME, follow_links=follow_links)
    record = {"name": MANIFEST_NAME, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    files = [record if entry["name"] == MANIFEST_NAME else entry for entry in meta["files"]]
    said = {key: value for key, value in manifest.items() if key != "selected_token_ids"}
    content = content_sha256(folder, follow_links=follow_links)
    described = meta_bytes({**meta, "files": files, "manifest": said, "content_sha256": content})
    if described == meta_bytes(meta):
        return False
    write_bytes(folder / META_NAME, described)
    return True
