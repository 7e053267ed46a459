"""One shard: rows written in any order, padding that takes no disk, and damage found by the receipt."""

import os
import re
from pathlib import Path

import pytest
import torch
from support.small_eagle3 import fields_of, write_cache

from niels_gpt.eagle3 import cache
from niels_gpt.eagle3.cache import shard_path, write_manifest, write_shard
from niels_gpt.eagle3.format.layout import Layout, header_bytes
from niels_gpt.eagle3.format.shard_writer import ShardWriter, read_receipt


def test_rows_in_any_order_and_without_their_padding_give_the_same_bytes(folder: Path) -> None:
    fields = fields_of(4, slots=8)
    used = [3, 8, 1, 5]
    for key in ("aux_hidden_states", "target_probs", "position_mask"):
        for row, slots in enumerate(used):
            fields[key][row, slots:] = 0
    write_shard(folder / "whole", 0, fields)
    layout = {key: (tensor.dtype, tuple(tensor.shape[1:])) for key, tensor in fields.items()}
    writer = ShardWriter(folder / "rows", 0, layout, 4)
    for rows in ([2, 0], [1], [3]):
        width = max(used[row] for row in rows)
        part = {key: fields[key][rows] for key in fields}
        short = {k: t if k in cache._INT_KEYS else t[:, :width] for k, t in part.items()}
        writer.write(rows, [used[row] for row in rows], short)
    receipt = writer.commit({"tokens": 17})
    assert Path(shard_path(folder / "rows", 0)).read_bytes() == Path(shard_path(folder / "whole", 0)).read_bytes()
    assert receipt == read_receipt(folder / "rows", 0)
    assert (receipt["slots"], receipt["facts"]) == (used, {"tokens": 17})
    assert sorted(os.listdir(folder / "rows")) == ["shard-000000.safetensors", "sidecar"]


def test_padding_takes_no_disk_where_files_have_holes_and_a_byte_in_it_is_found(folder: Path) -> None:
    slots, width, used = 1024, 512, 4
    layout = Layout(slots, width, 8, 0, "fp32")
    fields = {
        name: torch.ones(1, slots if name in cache._INT_KEYS else used, *shape[1:], dtype=dtype)
        for name, (dtype, shape) in layout.fields.items()
    }
    writer = ShardWriter(folder, 0, layout.fields, 1)
    writer.write([0], [used], fields)
    writer.commit()
    status = os.stat(shard_path(folder, 0))
    assert status.st_size > 2_000_000 and status.st_blocks * 512 < 200_000
    write_manifest(folder, {"num_samples": 1, "shard_size": 1})
    assert cache.verify(folder) == []
    with open(shard_path(folder, 0), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    assert "position_mask is not zero after its 4 slots" in cache.verify(folder)[0]


def test_a_row_must_be_written_exactly_once(folder: Path) -> None:
    fields = fields_of(2)
    layout = {key: (tensor.dtype, tuple(tensor.shape[1:])) for key, tensor in fields.items()}
    writer = ShardWriter(folder, 0, layout, 2)
    one = {key: tensor[:1] for key, tensor in fields.items()}
    writer.write([1], [4], one)
    with pytest.raises(ValueError, match="row 1 was written already"):
        writer.write([1], [4], one)
    for rows, message in (([0, 0], "written already"), ([-1], "row -1, expected 0 <= row < 2"), ([2], "row 2")):
        with pytest.raises(ValueError, match=message):
            writer.write(rows, [4] * len(rows), {key: tensor[: len(rows)] for key, tensor in fields.items()})
    with pytest.raises(ValueError, match="row 0 was not written"):
        writer.commit()
    writer.discard()
    assert os.listdir(folder) == ["sidecar"]


def test_every_flipped_byte_of_a_shard_is_found_and_the_sample_named(folder: Path) -> None:
    write_cache(folder, samples=3, shard_size=2)
    assert cache.verify(folder) == []
    for index in (0, 1):
        path = Path(shard_path(folder, index))
        content = path.read_bytes()
        fields = {key: (tensor.dtype, tuple(tensor.shape[1:])) for key, tensor in fields_of(1).items()}
        tensors = len(header_bytes(fields, 2 - index))
        for place in range(tensors, len(content), 7):
            path.write_bytes(content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :])
            (said,) = cache.verify(folder)
            assert re.search(rf"shard-00000{index}\.safetensors: sample [01] of the shard", said)
        path.write_bytes(content)
    assert cache.verify(folder) == []
