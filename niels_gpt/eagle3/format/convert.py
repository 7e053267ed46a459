"""Convert a dense cache between versions 1 and 2, which differ in the manifest alone; and a cache's content_sha256."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from niels_gpt.eagle3.format.layout import (
    EMBEDDINGS_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    SIDECAR,
    WEIGHTS_NAME,
    PathLike,
    refuse_links,
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
from niels_gpt.eagle3.format.meta import content_sha256 as content_of_records
from niels_gpt.eagle3.format.meta import eagle3_meta, file_sha256, write_meta
from niels_gpt.eagle3.format.shard_writer import receipt_path
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import remove
from niels_gpt.storage.locks import file_lock
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
    manifest, meta = read_manifest(folder, follow_links=follow_links), eagle3_meta(folder, follow_links)
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
    """Return the content_sha256 of a cache, by the bytes of its manifest, the target's weights and the receipts.

    Raises: CacheError where one of them is missing or no regular file.
    """
    native = False
    with suppress(FileNotFoundError):  # reported below
        native = is_native(read_manifest(cache_dir, follow_links=follow_links))
    names = [MANIFEST_NAME, WEIGHTS_NAME if native else EMBEDDINGS_NAME]
    names += [os.path.relpath(receipt_path(".", index)) for index in sorted(existing_shard_indices(cache_dir))]
    sums = ((name, file_sha256(Path(cache_dir) / name, follow_links=follow_links)) for name in names)
    return content_of_records({"name": name, "sha256": sha256} for name, sha256 in sums)


def _update_meta(folder: Path, meta: dict[str, Any] | None, manifest: dict[str, Any], follow_links: bool) -> bool:
    """Write the manifest's values and checksums into meta.json; return whether it changed."""
    if meta is None:
        return False
    sha256 = file_sha256(folder / MANIFEST_NAME, follow_links=follow_links)
    recorded = {record["name"]: record["sha256"] for record in meta["files"]}
    if recorded.get(MANIFEST_NAME) == sha256:
        return False
    known = [record for record in meta["files"] if record["name"] != MANIFEST_NAME]
    write_meta(folder, meta, known=known, follow_links=follow_links)
    return True
