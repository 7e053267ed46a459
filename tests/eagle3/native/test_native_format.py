"""The native form's files: which rows, which bytes, as safetensors writes them; what a receipt reveals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from support.eagle3_native import write_native

from niels_gpt.eagle3.format.layout import shard_path
from niels_gpt.eagle3.format.native.damage import native_shard_damage
from niels_gpt.eagle3.format.native.rows import target_positions
from niels_gpt.eagle3.format.native.shard_reader import NativeShards

MASKS = [[0, 0, 1, 1, 0, 0, 1, 0, 0, 0], [0, 0, 0], [1], [1, 0, 0], [0, 1, 1, 1, 1]]
POSITIONS = [[2, 3, 4, 6, 7], [], [], [1], [1, 2, 3, 4]]  # on paper: t >= 1 with m[t] = 1 or m[t - 1] = 1
AUX_ROWS = [7, 0, 0, 1, 4]  # the last of the positions


def test_rows_are_those_that_a_loss_can_need() -> None:
    assert [target_positions(np.array(mask)).tolist() for mask in MASKS] == POSITIONS


@pytest.mark.parametrize("form", [{}, {"aux_dtype": "fp8"}, {"aux_dtype": "fp16", "dtype": "fp32"}], ids=str)
def test_a_shard_is_read_as_written_and_equals_safetensors_own(tmp_path: Path, form: dict[str, str]) -> None:
    written = write_native(tmp_path, MASKS, cuts=[3], **form)
    shards = NativeShards(tmp_path)
    assert shards.counts.tolist() == [
        [len(mask), aux, len(rows)] for mask, aux, rows in zip(MASKS, AUX_ROWS, POSITIONS, strict=True)
    ]
    names = ("aux_hidden_states", "aux_scales", "last_hidden_states", "log_normalizers", "argmax_ids")
    for index, sample in enumerate(written):
        read = shards.sample(index)
        assert read.input_ids.tolist() == sample.input_ids.tolist() and read.loss_mask.tolist() == [
            *map(bool, MASKS[index])
        ]
        assert read.positions.tolist() == POSITIONS[index]
        for name in names:
            ours, theirs = getattr(read, name), getattr(sample, name)
            assert (ours is None) == (theirs is None)
            assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours.float(), theirs.float())), name
    first = written[:3]
    tensors = {
        name: torch.cat([getattr(each, name) for each in first])
        for name in names
        if form.get("aux_dtype") == "fp8" or name != "aux_scales"
    }
    tensors["argmax_ids"] = tensors["argmax_ids"].to(torch.uint32)
    tensors["input_ids"] = torch.from_numpy(np.concatenate([each.input_ids for each in first]))
    tensors["loss_bits"] = torch.tensor([0b01001100, 0b00100000], dtype=torch.uint8)
    for name, ends in {"token_starts": [10, 13, 14], "aux_starts": [7, 7, 7], "row_starts": [5, 5, 5]}.items():
        tensors[name] = torch.tensor([0, *ends])
    assert Path(shard_path(tmp_path, 0)).read_bytes() == save(tensors)
    assert native_shard_damage(tmp_path, 0) == native_shard_damage(tmp_path, 1) == []
