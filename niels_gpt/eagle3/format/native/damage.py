"""What a native shard's receipt reveals: every byte of the file is under its header's checksum or a sample's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.eagle3.format.layout import PathLike, shard_path
from niels_gpt.eagle3.format.manifest import read_manifest
from niels_gpt.eagle3.format.native.layout import native_layout_of
from niels_gpt.eagle3.format.native.shard_reader import MappedShard, map_shard
from niels_gpt.eagle3.format.native.shard_writer import ROW_TENSORS, sample_digest
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
    for row, digest, size in _digests(shard):
        if digest != receipt["xxh3_128"][row]:
            what = "its bytes do not give the checksum in its receipt" if digest else "its starts are damaged"
            damage.append((row, f"{path}: sample {row} of the shard: {what}, by {its_receipt}"))
        if progress is not None:
            progress(size)
    tokens = len(shard.tensors["input_ids"])
    if not damage and shard.loss_mask(tokens, -(-tokens // 8) * 8).any():
        damage.append((None, f"{path}: its loss bits behind the last token are damaged"))
    return damage


def _digests(shard: MappedShard) -> Iterator[tuple[int, str, int]]:
    """Yield of each sample the row, the XXH3-128 of its bytes, empty where its starts name no rows, and its bytes."""
    limits = [len(shard.tensors[name]) for name in ("input_ids", "aux_hidden_states", "argmax_ids")]
    for row, (begins, ends) in enumerate(zip(shard.starts[:-1], shard.starts[1:], strict=True)):
        if bool((begins < 0).any() or (ends < begins).any() or (ends > limits).any()):
            yield row, "", 0
            continue
        pieces = {
            name: _bytes_of(shard.tensors[name][begins[which] : ends[which]])
            for name, which in ROW_TENSORS.items()
            if name in shard.tensors
        }
        loss = shard.loss_mask(int(begins[0]), int(ends[0])).view(np.uint8)
        yield row, sample_digest(ends - begins, loss, pieces), sum(piece.size for piece in pieces.values())


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy().reshape(-1) if tensor.numel() else np.empty(0, np.uint8)
