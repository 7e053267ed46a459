"""What a native shard's receipt reveals: every byte of the file is under its header's checksum or a sample's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from niels_gpt.eagle3.format.layout import PathLike, shard_path
from niels_gpt.eagle3.format.manifest import read_manifest
from niels_gpt.eagle3.format.native.layout import native_layout_of
from niels_gpt.eagle3.format.native.shard_reader import map_shard, row_damage, row_digest
from niels_gpt.eagle3.format.shard_writer import read_receipt, receipt_path
from niels_gpt.storage.errors import CacheError


def native_shard_damage(
    cache_dir: PathLike,
    shard_index: int,
    progress: Callable[[int], None] | None = None,
    *,
    follow_links: bool = False,
) -> list[tuple[int | None, str]]:
    """Compare a shard with its receipt and return its damage: the row within the shard, or None, and a sentence.

    Reads the whole shard, a sample at a time. progress: called with the bytes of each sample.
    Raises: FileNotFoundError; CacheError if the manifest or the receipt is missing or damaged.
    """
    path = shard_path(cache_dir, shard_index)
    receipt = read_receipt(cache_dir, shard_index, follow_links=follow_links)
    its_receipt = receipt_path(cache_dir, shard_index)
    if receipt is None:
        raise CacheError(its_receipt, "no such file: the shard has no checksums", code="E702")
    layout = native_layout_of(read_manifest(cache_dir, follow_links=follow_links), cache_dir)
    try:
        shard, header = map_shard(path, layout, follow_links=follow_links)
    except FileNotFoundError:
        return [(None, f"{path}: no such file")]
    except CacheError as error:
        return [(None, str(error))]
    if hashlib.sha256(header).hexdigest() != receipt["header_sha256"] or len(shard) != receipt["samples"]:
        return [(None, f"{path}: its header is not the one that was written, by {its_receipt}")]
    damage: list[tuple[int | None, str]] = []
    for row, stored in enumerate(receipt["xxh3_128"]):
        digest, size = row_digest(shard, row)
        if what := row_damage(digest, stored):
            damage.append((row, f"{path}: sample {row} of the shard: {what}, by {its_receipt}"))
        if progress is not None:
            progress(size)
    tokens = len(shard.tensors["input_ids"])
    if not damage and shard.loss_mask(tokens, -(-tokens // 8) * 8).any():
        damage.append((None, f"{path}: its loss bits behind the last token are damaged"))
    return damage
