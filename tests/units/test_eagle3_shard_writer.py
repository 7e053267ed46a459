"""The writer of a shard of version 1 or 2: rows in any order, each once, and padding that takes no disk."""

import os
from pathlib import Path

import pytest
import torch
from support.errors import refused
from support.small_eagle3 import fields_of

from niels_gpt.eagle3.cache import shard_path, verify, write_manifest, write_shard
from niels_gpt.eagle3.format.layout import Layout
from niels_gpt.eagle3.format.shard_writer import ShardWriter, read_receipt

INT_KEYS = ("input_ids", "attention_mask", "loss_mask")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("topk", [0, 3])
def test_the_bytes_of_a_shard_are_known_before_it_is_written(folder, dtype, topk):
    floats = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    fields = fields_of(4, dtype=floats[dtype], topk=topk)
    write_shard(folder, 0, fields)
    layout = Layout(fields["input_ids"].shape[1], 6, 8, topk, dtype)
    assert layout.shard_bytes(4) == os.path.getsize(shard_path(folder, 0))


def test_rows_in_any_order_and_without_their_padding_give_the_same_bytes(folder):
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
        short = {k: t if k in INT_KEYS else t[:, :width] for k, t in part.items()}
        writer.write(rows, [used[row] for row in rows], short)
    receipt = writer.commit({"tokens": 17})
    assert Path(shard_path(folder / "rows", 0)).read_bytes() == Path(shard_path(folder / "whole", 0)).read_bytes()
    assert receipt == read_receipt(folder / "rows", 0)
    assert (receipt["slots"], receipt["facts"]) == (used, {"tokens": 17})
    assert sorted(os.listdir(folder / "rows")) == ["shard-000000.safetensors", "sidecar"]


def test_padding_takes_no_disk_where_files_have_holes_and_a_byte_in_it_is_found(folder):
    slots, width, used = 1024, 512, 4
    layout = Layout(slots, width, 8, 0, "fp32")
    fields = {
        name: torch.ones(1, slots if name in INT_KEYS else used, *shape[1:], dtype=dtype)
        for name, (dtype, shape) in layout.fields.items()
    }
    writer = ShardWriter(folder, 0, layout.fields, 1)
    writer.write([0], [used], fields)
    writer.commit()
    status = os.stat(shard_path(folder, 0))
    assert status.st_size > 2_000_000 and status.st_blocks * 512 < 200_000
    write_manifest(folder, {"num_samples": 1, "shard_size": 1})
    assert verify(folder) == []
    with open(shard_path(folder, 0), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    assert "position_mask is not zero after its 4 slots" in verify(folder)[0]


def test_a_row_must_be_written_exactly_once(folder):
    fields = fields_of(2)
    layout = {key: (tensor.dtype, tuple(tensor.shape[1:])) for key, tensor in fields.items()}
    writer = ShardWriter(folder, 0, layout, 2)
    one = {key: tensor[:1] for key, tensor in fields.items()}
    writer.write([1], [4], one)
    with refused("E102", "row 1"):
        writer.write([1], [4], one)
    for rows, message in (([0, 0], "row 0"), ([-1], "row -1, expected 0 <= row < 2"), ([2], "row 2")):
        with refused("E102", message):
            writer.write(rows, [4] * len(rows), {key: tensor[: len(rows)] for key, tensor in fields.items()})
    with refused("E102", "row 0"):
        writer.commit()
    writer.discard()
    assert os.listdir(folder) == ["sidecar"]
