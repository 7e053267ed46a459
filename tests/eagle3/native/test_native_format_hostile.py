"""Native caches that no writer made: each is refused by its name and reason before a state is read."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eagle3_native import manifest_of, write_native

from niels_gpt.eagle3.format.layout import shard_path
from niels_gpt.eagle3.format.manifest import write_manifest
from niels_gpt.eagle3.native import NativeEagle3Dataset
from niels_gpt.storage.errors import CacheError

MASKS = [[0, 1, 1], [1, 0], [0, 1, 0, 1]]  # tokens 3, 2, 4; target rows [1, 2], [1], [1, 2, 3]; auxiliary rows 2, 1, 3
Tensors = dict[str, torch.Tensor]


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


SHARDS: dict[str, Callable[[Tensors], dict[str, Any]]] = {
    r"starts .* from \[0, 0, 0\] to \[9, 6, 6\], expected them to rise": lambda _: {"aux_starts": numbers(0, 4, 3, 6)},
    r"starts .* from \[0, 0, 1\] to": lambda _: {"row_starts": numbers(1, 2, 3, 6)},
    r"to \[9, 6, 7\], expected them to rise from 0 to \[9, 6, 6\]": lambda _: {"row_starts": numbers(0, 2, 3, 7)},
    r"\[9, 6, 6\], expected them to rise from 0 to \[9": lambda _: {"token_starts": numbers(0, -1, 5, 9)},
    r"sample 1 of the shard has 0 tokens": lambda _: {"token_starts": numbers(0, 3, 3, 9)},
    r"sample 2 of the shard has 65 tokens, expected 1 to the manifest's seq_length, 64": lambda _: {
        "token_starts": numbers(0, 3, 5, 70),
        "input_ids": torch.zeros(70, dtype=torch.uint32),
        "loss_bits": torch.zeros(9, dtype=torch.uint8),
    },
    r"sample 0 of the shard has .* \[3, 2, 2\], expected \[3, 0, 0\] by its loss bits": lambda old: {
        "loss_bits": torch.zeros_like(old["loss_bits"])
    },
    r"loss_bits has bits set behind the last token": lambda old: {
        "loss_bits": old["loss_bits"] | torch.tensor([0, 2], dtype=torch.uint8)
    },
    r"its header has .*'input_ids' int64 \[9\]": lambda _: {"input_ids": torch.zeros(9, dtype=torch.int64)},
    r"its header has .*'aux_hidden_states' bfloat16 \[6, 2, 5\]": lambda _: {
        "aux_hidden_states": torch.zeros(6, 2, 5, dtype=torch.bfloat16)
    },
    r"its header has .*'more'": lambda _: {"more": torch.zeros(1)},
    r"has no token_starts": lambda _: {"token_starts": None},
    r"0 samples, expected 1 to 200,000": lambda _: {f"{part}_starts": numbers(0) for part in ("token", "aux", "row")},
}


@pytest.mark.parametrize("reason", SHARDS)
def test_a_shard_of_other_tensors_is_refused(tmp_path: Path, reason: str) -> None:
    write_native(tmp_path, MASKS)
    path = shard_path(tmp_path, 0)
    old = {name: tensor.clone() for name, tensor in load_file(path).items()}
    changed = {name: tensor for name, tensor in {**old, **SHARDS[reason](old)}.items() if tensor is not None}
    save_file(changed, path)
    with pytest.raises(CacheError, match=reason) as raised:
        NativeEagle3Dataset(tmp_path)
    assert str(raised.value).startswith(path) and raised.value.code == "E701"


def with_header(path: str, header: bytes, size: int = 0) -> None:
    Path(path).write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, max(size, 8 + len(header)))


def of_holes(path: str) -> None:
    """A header that is true to its size, and holes."""
    shapes = {"token_starts": ("I64", [2]), "aux_starts": ("I64", [2]), "row_starts": ("I64", [2])}
    shapes |= {"log_normalizers": ("F32", [0]), "argmax_ids": ("U32", [0]), "input_ids": ("U32", [2**23])}
    shapes |= {
        "aux_hidden_states": ("BF16", [0, 2, 4]),
        "last_hidden_states": ("BF16", [0, 4]),
        "loss_bits": ("U8", [2**20]),
    }
    sizes, end, header = {"I64": 8, "F32": 4, "U32": 4, "BF16": 2, "U8": 1}, 0, {}
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + sizes[dtype] * (shape[0] if len(shape) == 1 else 0)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with_header(path, text, 8 + len(text) + end)


FILES: dict[str, tuple[str, Callable[[str], object]]] = {
    "almost all of it is holes": ("E203", of_holes),
    "give a header of 2,000,000 bytes": ("E701", lambda path: with_header(path, b"{" + b" " * 1_999_999)),
    "the number 'NaN'": (
        "E701",
        lambda path: with_header(path, b'{"x":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}'),
    ),
    "a symbolic link": ("E205", lambda path: (os.rename(path, path + ".real"), os.symlink(path + ".real", path))),
    "bytes, expected .* as its header states": ("E701", lambda path: os.truncate(path, os.path.getsize(path) - 1)),
    r"in safetensors' order and without metadata": (
        "E701",
        lambda path: save_file(load_file(path), path, metadata={"\x1b[31mred": "no"}),
    ),
}


@pytest.mark.parametrize("reason", FILES)
def test_a_file_that_is_no_shard_is_refused(tmp_path: Path, reason: str) -> None:
    write_native(tmp_path, MASKS)
    code, change = FILES[reason]
    change(shard_path(tmp_path, 0))
    with pytest.raises(CacheError, match=reason) as raised:
        NativeEagle3Dataset(tmp_path)
    assert raised.value.code == code and "\x1b" not in str(raised.value)
    if code == "E205":
        assert len(NativeEagle3Dataset(tmp_path, follow_links=True)[0].input_ids) == 3


MANIFESTS: dict[str, dict[str, Any]] = {
    "hidden_size is True": {"hidden_size": True},
    "hidden_size is 100000000, expected 16,777,216 at most": {"hidden_size": 10**8},
    "num_shards is missing": {"num_shards": ...},
    "aux_dtype is 'fp4', expected one of bf16, fp16, fp32, fp8": {"aux_dtype": "fp4"},
    "dtype is \\['bf16'\\]": {"dtype": ["bf16"]},
    "aux_layer_ids is \\[1, 1\\]": {"aux_layer_ids": [1, 1]},
    "aux_layer_ids is \\[\\]": {"aux_layer_ids": []},
    "selected_token_ids is .* from 0 to 49": {"selected_token_ids": [50], "draft_vocab_size": 1},
    "draft_vocab_size is 3, expected the length": {"draft_vocab_size": 3},
    "conventions.shift is 'left', expected none": {"conventions": manifest_of(1, 1)["conventions"] | {"shift": "left"}},
    "head.eps is True, expected one of a number, None": {"head": manifest_of(1, 1)["head"] | {"eps": True}},
    "head.norm is missing": {"head": []},
    "input_data is 3": {"input_data": 3},
    "3 samples in 1 shard, expected the manifest's 4|3 samples in 1 shards": {"num_samples": 4},
    "declares 3 samples \\(2 shards\\) but found 1 shard": {"num_shards": 2},
}


@pytest.mark.parametrize("reason", MANIFESTS)
def test_a_manifest_that_no_producer_writes_is_refused(tmp_path: Path, reason: str) -> None:
    write_native(tmp_path, MASKS)
    changed = {**manifest_of(3, 1), **MANIFESTS[reason]}
    write_manifest(tmp_path, {key: value for key, value in changed.items() if value is not ...})
    with pytest.raises(CacheError, match=reason):
        NativeEagle3Dataset(tmp_path)


def first_ids(dataset: NativeEagle3Dataset, queue: Any) -> None:
    queue.put([sample.input_ids.tolist() for sample in dataset])


def test_other_processes_and_threads_read_the_same_with_few_maps(tmp_path: Path) -> None:
    written = [sample.input_ids.tolist() for sample in write_native(tmp_path, MASKS * 4, cuts=[2, 5, 9])]
    dataset = NativeEagle3Dataset(tmp_path, max_open_shards=1)
    assert (
        [sample.input_ids.tolist() for sample in dataset]
        == written
        == [sample.input_ids.tolist() for sample in pickle.loads(pickle.dumps(dataset))]
    )
    assert len(dataset._shards._open) == 1 and dataset[-1].input_ids.tolist() == written[-1]
    with pytest.raises(IndexError):
        dataset[12]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda index: dataset[index % 12].input_ids.tolist(), range(240))] == written * 20
    for method in ("fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=first_ids, args=(dataset, queue))
        process.start()
        assert queue.get() == written
        process.join()


def test_a_shard_that_was_replaced_since_is_refused_and_a_view_keeps_its_map(tmp_path: Path) -> None:
    write_native(tmp_path / "a", MASKS)
    write_native(tmp_path / "b", MASKS[::-1])
    dataset = NativeEagle3Dataset(tmp_path / "a")
    path = shard_path(tmp_path / "a", 0)
    os.replace(shard_path(tmp_path / "b", 0), path)
    with pytest.raises(CacheError, match="other samples than when the cache was opened"):
        dataset[0]
