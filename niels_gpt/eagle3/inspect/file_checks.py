"""Checks of a cache's files: `complete` (which files exist, and in which form) and `checksums`.

Each function yields what is wrong. A file that is missing for several checks is reported by `complete` alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from niels_gpt.eagle3.format.layout import (
    MANIFEST_NAME,
    SHARD_NAME,
    SIDECAR,
    is_lock,
    open_file,
    read_meta_bytes,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import existing_shard_indices, number_in
from niels_gpt.eagle3.format.meta import content_of as content_sha256
from niels_gpt.eagle3.format.meta import file_sha256
from niels_gpt.eagle3.format.shard_writer import receipt_path
from niels_gpt.eagle3.inspect.open_cache import FOREIGN, NotChecked, OpenCache
from niels_gpt.storage.checks import PlacedProblem
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import checked_name, file_records, meta_crc32, parse_object, shortened

_RECEIPT = re.compile(r"shard-(.*)\.json", re.DOTALL)
_INDEX = re.compile(r"[0-9]{6}")

# --- complete ---------------------------------------------------------------------------------------------------------


def incomplete(cache: OpenCache) -> Iterator[CacheError]:
    """Yield files that are missing, left over, or of another form than the manifest says."""
    folder, declared = cache.folder, f"{cache.num_shards:,} shards of {cache.num_samples:,} samples by {MANIFEST_NAME}"
    yield from _missing_parts(cache)
    found = existing_shard_indices(folder)
    for shard in (shard for shard in range(cache.num_shards) if shard not in found):
        yield cache.missing(Path(shard_path(folder, shard)), declared)
    for shard in sorted(shard for shard in found if shard >= cache.num_shards):
        yield CacheError(shard_path(folder, shard), "a shard too many", declared, "Move it away", code="E701")
    for path in _files(folder / SIDECAR):
        receipt = _RECEIPT.fullmatch(path.name)
        if receipt and not (_INDEX.fullmatch(receipt[1]) and int(receipt[1]) < cache.num_shards):
            yield CacheError(path, "a receipt too many", declared, "Move it away", code="E701")
    for shard in cache.shards:
        yield from cache.wrong_form(shard)
    yield from _wrong_vocabulary(cache)
    yield from cache.wrong_manifest()
    if cache.is_planned and len(cache.samples) != cache.num_samples:
        expected = f"{cache.num_samples} by {MANIFEST_NAME}"
        yield CacheError(folder / SIDECAR, f"{len(cache.samples)} samples", expected, code="E701")


def _missing_parts(cache: OpenCache) -> Iterator[CacheError]:
    if not cache.is_ours:
        return
    if cache.is_planned:
        path = cache.folder / META_NAME
        if not os.path.lexists(path):
            remedy = "Resume it: precompute --resume"
            yield CacheError(path, "no such file: production has not finished", remedy=remedy, code="E702")
        for name in cache.planned:
            path = cache.folder / SIDECAR / name
            if not os.path.lexists(path):
                yield cache.missing(path, "one in every cache that precompute made")
    for shard in range(cache.num_shards):
        if not os.path.lexists(receipt_path(cache.folder, shard)):
            yield cache.receipt_missing(shard)


def unused_files(cache: OpenCache) -> Iterator[CacheError]:
    """Yield harmless files: temporary ones of killed writers, and files in the sidecar that nothing reads."""
    for folder in (cache.folder, cache.folder / SIDECAR):
        for path in _files(folder):
            if path.name.startswith(".") and path.suffix == ".tmp":
                yield CacheError(
                    path, "left by a writer that was killed. It is not read; --resume removes it", code="E701"
                )
            elif (
                folder != cache.folder
                and path.name not in cache.planned
                and not is_lock(path.name)
                and not _RECEIPT.fullmatch(path.name)
            ):
                yield CacheError(path, "no file of a cache. It is not read", code="E701")


def _files(folder: Path) -> list[Path]:
    try:
        return [] if folder.is_symlink() else sorted(folder.iterdir())
    except OSError:
        return []


def _wrong_vocabulary(cache: OpenCache) -> Iterator[CacheError]:
    where, selected = cache.folder / MANIFEST_NAME, cache.manifest.get("selected_token_ids")
    size, vocab = cache.draft_vocab_size, number_in(cache.manifest, "target_vocab_size", cache.folder, 1)
    if not isinstance(selected, list) or not all(type(token) is int for token in selected):
        yield CacheError(
            where, f"selected_token_ids is {shortened(selected)}", f"a list of {size:,} token ids", code="E701"
        )
        return
    outside, distinct = [token for token in selected if not 0 <= token < vocab], len(set(selected))
    if len(selected) != size or distinct != size or outside:
        yield CacheError(
            where,
            f"selected_token_ids has {len(selected):,} ids, {distinct:,} different ones and {len(outside):,} beyond "
            f"the target's {vocab:,}",
            f"{size:,} different ones",
            code="E701",
        )


# --- checksums --------------------------------------------------------------------------------------------------------


def wrong_checksums(cache: OpenCache) -> Iterator[CacheError]:
    """Yield where meta.json, or a file that it names, has another checksum; the shards have their own function."""
    if not cache.is_ours:
        raise NotChecked(FOREIGN)
    path = cache.folder / META_NAME
    if not cache.has_meta:
        return
    raw = read_meta_bytes(cache.folder, follow_links=cache.follow_links)
    recorded, computed = meta_crc32(raw)
    if recorded != computed:
        yield CacheError(
            path, "meta_crc32 is not that of its content: it was changed", remedy=cache.remedy(), code="E701"
        )
    meta = parse_object(raw)
    is_whole = len(existing_shard_indices(cache.folder)) == cache.num_shards == len(cache.shards)
    others = (record for record in file_records(meta, str(path)) if not SHARD_NAME.match(record["name"]))
    for record in others:  # the receipts have the checksums of shards, by sample
        for wrong in _wrong_file(cache, record["name"], record["bytes"], record["sha256"]):
            is_whole = False
            yield wrong
    # content_sha256 is over all files: a missing or changed one, reported above, always changes it.
    if is_whole and (content := content_sha256(cache.folder, follow_links=cache.follow_links)) != meta.get(
        "content_sha256"
    ):
        found = f"content_sha256 is {shortened(meta.get('content_sha256'))[:14]}, but the files give {content[:12]}"
        yield CacheError(path, found, remedy=cache.remedy(), code="E701")


def _wrong_file(cache: OpenCache, name: str, size: int, sha256: str) -> Iterator[CacheError]:
    path = cache.folder / checked_name(name, "a file's name", str(cache.folder))
    if not os.path.lexists(path):
        yield cache.missing(path, f"one of {size:,} bytes by {META_NAME}")
        return
    if path.is_symlink() and not cache.follow_links:
        os.close(open_file(path))  # raises the error that links get
    found, expected = "", f"{size:,} bytes by {META_NAME}"
    if not path.is_file():
        found, expected = "not a regular file", f"one of {expected}"
    elif path.stat().st_size != size:
        found = f"{path.stat().st_size:,} bytes"
    elif (computed := file_sha256(path, follow_links=cache.follow_links)) != sha256:
        found, expected = f"sha256 {computed[:12]}", f"{sha256[:12]} by {META_NAME}"
    if found:
        yield CacheError(path, found, expected, cache.remedy(path.name), code="E701")


def wrong_shard_checksums(cache: OpenCache, shard: int) -> Iterator[CacheError | PlacedProblem]:
    """Yield the samples of a shard whose bytes differ from its receipt."""
    if not os.path.lexists(receipt_path(cache.folder, shard)):
        yield cache.receipt_missing(shard)
        return
    path = Path(shard_path(cache.folder, shard))
    for row, damage in cache.damage(shard):
        text, spans = damage, [(0, path.stat().st_size)]
        if row is not None:
            text = f"{damage}. It is {cache.name(cache.first_of(shard) + row)}. {cache.remedy()}"
            spans = cache.spans(shard, row)
        yield PlacedProblem(text, [(path.name, *span) for span in spans])
