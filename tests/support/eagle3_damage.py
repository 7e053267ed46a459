"""Copies of a finished EAGLE-3 cache with single values, bits or files changed."""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from niels_gpt.eagle3.format.layout import read_header, read_tensors_header, row_bytes_of, shard_path
from niels_gpt.eagle3.format.shards import NativeShards
from support import eagle3_runs

FORMS = {"dense": {}, "topk": eagle3_runs.TOPK}
"""The forms of a cache of version 1 or 2, as `eagle3_runs.plan` takes them."""
NATIVE_FORMS = {
    "native": eagle3_runs.NATIVE,
    "fp8": eagle3_runs.FP8,
    "reply": eagle3_runs.REPLY,
    "all": eagle3_runs.ALL,
}
ALL_FORMS = {**FORMS, **NATIVE_FORMS}


def copy_of(cache, folder):
    """Return a copy of a cache in a folder."""
    return Path(shutil.copytree(cache, folder / "cache"))


def stored(cache, shard, field):
    """Return a field of a shard as it stands in the file, to be written to: uint8 [n, S, bytes]."""
    path = shard_path(cache, shard)
    fields, rows, header = read_header(path)
    begin = len(header)
    for name, form in fields.items():
        size = rows * row_bytes_of(form)
        if name == field:
            return np.memmap(path, np.uint8, "r+", begin, (rows, form[1][0], size // rows // form[1][0]))
        begin += size
    raise KeyError(field)


def native_rows(cache, shard, tensor):
    """Return a tensor of a native shard as it stands in the file, to be written to: uint8 [rows, bytes]."""
    path = shard_path(cache, shard)
    tensors, header = read_tensors_header(path)
    begin = len(header)
    for name, (dtype, shape) in tensors.items():
        size = row_bytes_of((dtype, shape))
        if name == tensor:
            return np.memmap(path, np.uint8, "r+", begin, (shape[0], size // shape[0]))
        begin += size
    raise KeyError(tensor)


def put(cache, field, sample, slot, column, value):
    """Write one number into a cache of four samples a shard."""
    form = read_header(shard_path(cache, sample // 4))[0][field]
    raw = torch.tensor([value], dtype=form[0]).view(torch.uint8).numpy()
    stored(cache, sample // 4, field)[sample % 4, slot, column * len(raw) : (column + 1) * len(raw)] = raw


def flip_bit(path, offset):
    """Change the last bit of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def native_put(cache, sample, tensor, row, column, value):
    """Write one number into a row of a sample of a native cache."""
    shards = NativeShards.of_cache(cache)
    shard, place = shards.place(sample)
    which = {"input_ids": 0, "aux_hidden_states": 1, "aux_scales": 1}.get(tensor, 2)
    begin = int(shards.counts[sample - place : sample, which].sum())
    raw = torch.tensor([value]).to(load_file(shard_path(cache, shard))[tensor].dtype).view(torch.uint8).numpy()
    native_rows(cache, shard, tensor)[begin + row, column * len(raw) : (column + 1) * len(raw)] = raw
