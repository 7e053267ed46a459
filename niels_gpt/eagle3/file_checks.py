"""What must hold of a cache's files: all are there, none too many, in the form that the manifest says, with the sums of
their making."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from niels_gpt.eagle3.convert import content_sha256, file_sha256
from niels_gpt.eagle3.layout import LOCK_NAME, SIDECAR, open_file, read_header, read_meta_bytes, shard_path
from niels_gpt.eagle3.manifest import EMBEDDINGS_NAME, MANIFEST_NAME, existing_shard_indices, number_in
from niels_gpt.eagle3.opened import FOREIGN, PLANNED, NotChecked, Opened, shown, wrong_form
from niels_gpt.eagle3.shards import receipt_path, shard_damage
from niels_gpt.fileio import META_NAME
from niels_gpt.records import checked_name, file_records, meta_crc32, parse_object, shortened

_RECEIPT_SIGNS = ("shard-", ".json")

# --- complete ---------------------------------------------------------------------------------------------------------


def incomplete(cache: Opened) -> Iterator[str]:
    """Yield what is missing, interrupted, too much, or of another form than the manifest says."""
    yield from _missing_parts(cache)
    found = existing_shard_indices(cache.folder)
    for shard in (shard for shard in range(cache.num_shards) if shard not in found):
        yield cache.missing(Path(shard_path(cache.folder, shard)), _declared(cache))
    for shard in sorted(shard for shard in found if shard >= cache.num_shards):
        yield f"{shard_path(cache.folder, shard)}: a shard too many, expected {_declared(cache)}. Move it away"
    yield from _receipts_too_many(cache)
    for shard in cache.shards:
        yield from wrong_form(cache, shard)
    yield from _wrong_vocabulary(cache)
    yield from _wrong_embeddings(cache)
    if cache.is_planned and len(cache.samples) != cache.num_samples:
        where = cache.folder / SIDECAR
        yield f"{where}: {len(cache.samples)} samples, expected {cache.num_samples} by {MANIFEST_NAME}"


def strange_files(cache: Opened) -> Iterator[str]:
    """Yield what lies in a cache and does no harm: files that writers left, and files that nothing reads."""
    for path in _files(cache.folder):
        if _is_left_over(path):
            yield f"{path}: left by a writer that was killed. It is not read; --resume removes it"
    known = {*PLANNED, LOCK_NAME}
    for path in _files(cache.folder / SIDECAR):
        if _is_left_over(path):
            yield f"{path}: left by a writer that was killed. It is not read; --resume removes it"
        elif path.name not in known and not _is_receipt(path):
            yield f"{path}: no file of a cache. It is not read"


def _declared(cache: Opened) -> str:
    return f"{cache.num_shards:,} shards of {cache.num_samples:,} samples by {MANIFEST_NAME}"


def _missing_parts(cache: Opened) -> Iterator[str]:
    if not cache.is_ours:
        return
    if cache.is_planned:
        path = cache.folder / META_NAME
        if not os.path.lexists(path):
            yield f"{path}: no such file: production has not finished. Go on with it: precompute --resume"
        for name in PLANNED:
            path = cache.folder / SIDECAR / name
            if not os.path.lexists(path):
                yield cache.missing(path, "one in every cache that precompute made")
    for shard in range(cache.num_shards):
        if not os.path.lexists(receipt_path(cache.folder, shard)):
            yield cache.receipt_missing(shard)


def _receipts_too_many(cache: Opened) -> Iterator[str]:
    for path in _files(cache.folder / SIDECAR):
        number = path.name.removeprefix(_RECEIPT_SIGNS[0]).removesuffix(_RECEIPT_SIGNS[1])
        is_wanted = number.isascii() and number.isdecimal() and len(number) == 6 and int(number) < cache.num_shards
        if _is_receipt(path) and not is_wanted:
            yield f"{path}: a receipt too many, expected {_declared(cache)}. Move it away"


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_left_over(path: Path) -> bool:
    return path.name.startswith(".") and path.suffix == ".tmp"


def _is_receipt(path: Path) -> bool:
    begin, end = _RECEIPT_SIGNS
    return path.name.startswith(begin) and path.name.endswith(end)


def _wrong_vocabulary(cache: Opened) -> Iterator[str]:
    where, selected = cache.folder / MANIFEST_NAME, cache.manifest.get("selected_token_ids")
    size, vocab = cache.layout.draft_vocab_size, number_in(cache.manifest, "target_vocab_size", cache.folder, 1)
    if not isinstance(selected, list) or not all(type(token) is int for token in selected):
        yield f"{where}: selected_token_ids is {shortened(selected)}, expected a list of {size:,} token ids"
        return
    outside = [token for token in selected if not 0 <= token < vocab]
    if len(selected) != size or len(set(selected)) != size or outside:
        yield (
            f"{where}: selected_token_ids has {len(selected):,} ids, {len(set(selected)):,} different ones and "
            f"{len(outside):,} beyond the target's {vocab:,}, expected {size:,} different ones"
        )


def _wrong_embeddings(cache: Opened) -> Iterator[str]:
    path, vocab = cache.folder / EMBEDDINGS_NAME, cache.manifest.get("target_vocab_size")
    if not os.path.lexists(path):
        yield cache.missing(path, "the target's input embeddings")
        return
    fields, rows, _ = read_header(path, follow_links=cache.follow_links)
    wanted = (torch.float32, (cache.layout.aux_hidden_dim // 3,))
    if fields != {"weight": wanted} or rows != vocab:
        found = ", ".join(f"{name} {shown(form)}" for name, form in fields.items())
        yield f"{path}: {rows:,} rows of {found}, expected {vocab} rows of weight {shown(wanted)}"


# --- checksums --------------------------------------------------------------------------------------------------------


def wrong_sums(cache: Opened) -> Iterator[str]:
    """Yield what is wrong with meta.json and with each file that it names; the shards have `wrong_shard_sums`."""
    if not cache.is_ours:
        raise NotChecked(FOREIGN)
    path = cache.folder / META_NAME
    if not os.path.lexists(path) or not cache.is_planned:
        return  # `incomplete` tells
    raw = read_meta_bytes(cache.folder, follow_links=cache.follow_links)
    said, found = meta_crc32(raw)
    if said != found:
        yield f"{path}: its meta_crc32 is not that of its content: it was changed. {cache.again()}"
    meta = parse_object(raw)
    found_shards = existing_shard_indices(cache.folder)
    whole = len(found_shards) == cache.num_shards == len(cache.shards)
    for record in file_records(meta, str(path)):
        for wrong in _wrong_file(cache, record["name"], record["bytes"], record["sha256"]):
            whole = False
            yield wrong
    # Of files that are not there, or not those of meta.json, it is another one anyway.
    if whole and (content := content_sha256(cache.folder, follow_links=cache.follow_links)) != meta.get(
        "content_sha256"
    ):
        known = shortened(meta.get("content_sha256"))[:14]
        yield f"{path}: content_sha256 is {known}, but the files give {content[:12]}. {cache.again()}"


def _wrong_file(cache: Opened, name: str, size: int, sha256: str) -> Iterator[str]:
    file = cache.folder / checked_name(name, "a file's name", str(cache.folder))
    again = cache.again(file.name)
    if not os.path.lexists(file):
        yield cache.missing(file, f"one of {size:,} bytes by {META_NAME}")
    elif file.is_symlink() and not cache.follow_links:
        os.close(open_file(file))  # raises what there is to say about links
    elif not file.is_file():
        yield f"{file}: not a regular file, expected one of {size:,} bytes by {META_NAME}. {again}"
    elif file.stat().st_size != size:
        yield f"{file}: {file.stat().st_size:,} bytes, expected {size:,} by {META_NAME}. {again}"
    elif (found := file_sha256(file, follow_links=cache.follow_links)) != sha256:
        yield f"{file}: sha256 {found[:12]}, expected {sha256[:12]} by {META_NAME}. {again}"


def wrong_shard_sums(cache: Opened, shard: int) -> Iterator[str]:
    """Yield the damage of a shard, by its receipt: which sample's bytes are not those that were written."""
    if not os.path.lexists(receipt_path(cache.folder, shard)):
        yield cache.receipt_missing(shard)
        return
    for row, said in shard_damage(cache.folder, shard, cache.tick, follow_links=cache.follow_links):
        number = None if row is None else shard * cache.shard_size + row
        yield said if number is None else f"{said}. It is {cache.name(number)}. {cache.again()}"
