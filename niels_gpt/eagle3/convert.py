"""A dense cache of version 1 becomes one of version 2, and back, by its manifest alone."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.layout import PathLike
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
from niels_gpt.fileio import META_NAME, CacheError, canonical_json, sha256_file, write_bytes
from niels_gpt.records import meta_bytes, parse_object, read_regular
from niels_gpt.versions import VERSIONS_DIR


def convert(cache_dir: PathLike, format_version: int) -> bool:
    """Make a dense cache one of version 1 or of version 2, by its manifest alone; returns whether anything changed.

    `target_probs_topk` comes (0) or goes with the version; all other keys stay. A meta.json of this project that
    describes the cache is brought up to date.
    Raises: ValueError for another version; CacheError for a top-k cache, whose shards version 1 cannot hold, and for a
    committed version below .versions/, which never changes.
    """
    if format_version not in VERSIONS:
        raise ValueError(f"format_version {format_version}, expected 1 or 2")
    manifest = read_manifest(cache_dir)
    if VERSIONS_DIR in Path(cache_dir).resolve().parts:
        raise CacheError(f"{os.fspath(cache_dir)}: a committed version is never changed. Convert a copy: cp -rL")
    if is_compressed(manifest.get("target_probs_topk"), number_in(manifest, "draft_vocab_size", cache_dir)):
        if format_version == manifest["format_version"]:
            return False
        raise CacheError(
            f"{manifest_path(cache_dir)}: target_probs_topk is {manifest['target_probs_topk']}, and version 1 holds "
            "all probabilities, which are not there any more. Produce the cache again with --target-probs-topk 0"
        )
    changed = manifest["format_version"] != format_version
    manifest["format_version"] = format_version
    manifest.pop("target_probs_topk", None)
    if format_version == 2:
        manifest["target_probs_topk"] = 0
    if changed:
        write_manifest(cache_dir, manifest)
    return _describe_again(Path(cache_dir), manifest) or changed


def content_sha256(cache_dir: PathLike) -> str:
    """Return the sha256 over those of the manifest, the embeddings and the receipts, which stand for the shards."""
    names = [MANIFEST_NAME, EMBEDDINGS_NAME]
    names += [os.path.relpath(receipt_path(".", index)) for index in sorted(existing_shard_indices(cache_dir))]
    sums = {name: sha256_file(Path(cache_dir) / name) for name in names}
    return hashlib.sha256(canonical_json(sums)).hexdigest()


def _describe_again(cache_dir: Path, manifest: dict[str, Any]) -> bool:
    """Make a meta.json say what the manifest now is; returns whether there was one that did not."""
    path = cache_dir / META_NAME
    if not path.is_file():
        return False
    meta, raw = parse_object(read_regular(path)), read_regular(cache_dir / MANIFEST_NAME)
    record = {"name": MANIFEST_NAME, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    meta["files"] = [record if entry["name"] == MANIFEST_NAME else entry for entry in meta["files"]]
    meta["manifest"] = {key: value for key, value in manifest.items() if key != "selected_token_ids"}
    meta["content_sha256"] = content_sha256(cache_dir)
    changed = meta_bytes(meta) != read_regular(path)
    if changed:
        write_bytes(path, meta_bytes(meta))
    return changed
