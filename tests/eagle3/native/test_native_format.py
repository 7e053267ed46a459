"""The native form's files: which rows, which bytes, as safetensors writes them; what a receipt reveals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from support.eagle3_native import damaged_samples, write_native

from niels_gpt.eagle3.cache import shard_path, verify
from niels_gpt.eagle3.native import NativeEagle3Dataset

MASKS = [[0, 0, 1, 1, 0, 0, 1, 0, 0, 0], [0, 0, 0], [1], [1, 0, 0], [0, 1, 1, 1, 1]]
POSITIONS = [[2, 3, 4, 6, 7], [], [], [1], [1, 2, 3, 4]]  # on paper: t >= 1 with m[t] = 1 or m[t - 1] = 1
AUX_ROWS = [7, 0, 0, 1, 4]  # the last of the positions


@pytest.mark.parametrize("form", [{}, {"aux_dtype": "fp8"}, {"aux_dtype": "fp16", "dtype": "fp32"}], ids=str)
def test_a_shard_is_read_as_written_and_equals_safetensors_own(tmp_path, form):
    written = write_native(tmp_path, MASKS, cuts=[3], **form)
    shards = NativeEagle3Dataset(tmp_path)
    assert shards.counts.tolist() == [
        [len(mask), aux, len(rows)] for mask, aux, rows in zip(MASKS, AUX_ROWS, POSITIONS, strict=True)
    ]
    names = ("aux_hidden_states", "aux_scales", "last_hidden_states", "log_normalizers", "argmax_ids")
    for index, sample in enumerate(written):
        read = shards[index]
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
    assert verify(tmp_path) == []


@pytest.mark.parametrize("form", [{}, {"aux_dtype": "fp8"}], ids=str)
def test_a_flipped_bit_of_each_tensor_is_found_in_its_sample(tmp_path, form):
    write_native(tmp_path, MASKS, **form)
    path = Path(shard_path(tmp_path, 0))
    whole = path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    places = {name: entry["data_offsets"] for name, entry in json.loads(whole[8:size]).items()}
    for name, offsets in places.items():
        begin, end = (size + offset for offset in offsets)
        for offset, samples in ((begin, {0}), (end - 1, {4})):
            if (name, offset) == ("loss_bits", end - 1):  # tokens 16 to 21: of samples 3 and 4
                samples = {3}
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
            found = {*damaged_samples(tmp_path)}
            assert samples <= found and len(found) <= 2, (name, offset)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 0x80]))  # behind the last of 22 tokens
    assert damaged_samples(tmp_path) == [None]
    path.write_bytes(whole[:9] + b" " + whole[10:])
    assert damaged_samples(tmp_path) == [None]
