"""The native form's pieces: which rows are stored, their bytes and cuts, the writer of a shard, fp8."""

import dataclasses
import itertools
import os
import re
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.eagle3_native import manifest_of, random_sample, write_native
from support.errors import refused

from niels_gpt.eagle3.cache import read_manifest, shard_path, write_manifest
from niels_gpt.eagle3.format.layout import read_tensors_header
from niels_gpt.eagle3.format.native import NativeLayout, dequantized, quantized, row_counts, target_positions
from niels_gpt.eagle3.format.shard_writer import NativeShardWriter
from niels_gpt.eagle3.format.shards import shards_of
from niels_gpt.eagle3.native import NativeEagle3Dataset

MASKS = [[0, 0, 1, 1, 0, 0, 1, 0, 0, 0], [0, 0, 0], [1], [1, 0, 0], [0, 1, 1, 1, 1]]
POSITIONS = [[2, 3, 4, 6, 7], [], [], [1], [1, 2, 3, 4]]  # on paper: t >= 1 with m[t] = 1 or m[t - 1] = 1


def test_rows_are_those_that_a_loss_can_need():
    assert [target_positions(np.array(mask)).tolist() for mask in MASKS] == POSITIONS


MASK = st.lists(st.booleans(), min_size=1, max_size=12)


@settings(max_examples=30)
@given(masks=st.lists(MASK, min_size=1, max_size=8), limit=st.integers(2048, 4000), data=st.data())
def test_any_masks_give_the_rows_and_bytes_of_the_oracle(tmp_path_factory, masks, limit, data):
    folder = tmp_path_factory.mktemp("c")
    expected = []
    for mask in masks:
        positions = [t for t in range(1, len(mask)) if mask[t] or mask[t - 1]]
        expected.append([len(mask), positions[-1] if positions else 0, len(positions)])
    counts = row_counts(np.cumsum([0, *map(len, masks)]), np.concatenate(masks))
    assert counts.tolist() == expected
    layout = NativeLayout(hidden_size=4, layers=2, dtype="bf16", aux_dtype=data.draw(st.sampled_from(["bf16", "fp8"])))
    cuts = layout.cut(counts, limit)
    assert cuts[0] == 0 and cuts[-1] == len(masks) and sorted({*cuts}) == cuts
    samples = write_native(folder, masks, cuts[1:-1], aux_dtype=layout.aux_dtype)
    aux_row = 2 * 4 * 2 if layout.aux_dtype == "bf16" else 2 * 4 + 2 * 4
    for shard, (first, behind) in enumerate(itertools.pairwise(cuts)):
        size = 24 + sum(24 + 4 * tokens + aux_row * aux + 16 * rows for tokens, aux, rows in expected[first:behind])
        size += -(-sum(tokens for tokens, _, _ in expected[first:behind]) // 8)
        path = Path(shard_path(folder, shard))
        assert path.stat().st_size == layout.shard_bytes(counts[first:behind])
        assert path.stat().st_size - len(read_tensors_header(path)[1]) == size
        assert size - 24 <= limit - 2048 or behind == first + 1
        assert shards_of(folder, read_manifest(folder)).damage(shard) == []
    shards = NativeEagle3Dataset(folder)
    for index, sample in enumerate(samples):
        read = shards[index]
        assert read.loss_mask.tolist() == masks[index] and read.input_ids.tolist() == sample.input_ids.tolist()
        for name in ("aux_hidden_states", "last_hidden_states", "log_normalizers", "argmax_ids"):
            assert torch.equal(getattr(read, name).float(), getattr(sample, name).float())


def test_a_writer_takes_each_sample_once_and_whole(tmp_path):
    manifest = manifest_of(2, 1)
    good, other = random_sample(MASKS[0], manifest), random_sample(MASKS[4], manifest)
    writer = NativeShardWriter(tmp_path, 0, NativeLayout(4, 2, "bf16", "bf16"), np.array([[10, 7, 5], [5, 4, 4]]))
    writer.write(1, other)
    changed = {
        "aux_hidden_states": good.aux_hidden_states.float(),
        "aux_scales": torch.zeros(7, 2),
        "last_hidden_states": good.last_hidden_states[1:],
        "argmax_ids": good.argmax_ids - 100,
        "input_ids": good.input_ids[1:],
        "loss_mask": ~good.loss_mask,
    }
    for name, value in changed.items():
        with refused("E102", "row 0", "loss mask" if name == "loss_mask" else name):
            writer.write(0, dataclasses.replace(good, **{name: value}))
    with refused("E102", "row 0"):
        writer.commit()
    with refused("E102", "row 1"):
        writer.write(1, other)
    writer.discard()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_fp8_is_what_torch_makes_of_it_and_brought_back_exactly():
    torch.manual_seed(0)
    states = torch.randn(40, 3, 16) * torch.logspace(-30, 30, 40).view(-1, 1, 1)
    states[3, 1] = 0
    values, scales = quantized(states)
    assert torch.equal(scales, states.abs().amax(-1) / 448) and scales[3, 1] == 0
    assert (
        (dequantized(values, scales, torch.float32) - states)
        .abs()
        .le(states.abs() / 16 + 448 * scales[..., None] / 2**18)
        .all()
    )
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 64)
    for some in (every, every[:, :63].contiguous()):  # with and without NaN
        factors = torch.tensor([0.0, 1e-3, 1.5, 7e35])
        for dtype in (torch.float32, torch.bfloat16):
            expected = (some.float() * factors[:, None]).to(dtype)
            assert torch.equal(dequantized(some, factors, dtype).nan_to_num(7), expected.nan_to_num(7))
    tiny = torch.tensor([[8.8e-43, 0.0]])  # whose scale is rounded down by a third
    assert torch.isfinite(dequantized(*quantized(tiny), torch.float32)).all()
    with refused("E102", "fp8"):
        quantized(torch.tensor([[1.0, float("nan")]]))


def in_memory():
    """Return the bytes of this process's own memory, without maps of files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(r"RssAnon:\s*(\d+)", status)[1])


def test_memory_does_not_grow_with_a_shard_and_a_new_shard_leaves_the_links_of_the_old_one(tmp_path):
    manifest = manifest_of(16, 1, hidden_size=4096)
    sample = random_sample([0, *[1] * 63], manifest)  # 1.5 MiB
    layout = NativeLayout.of(manifest)
    counts = np.repeat([[64, 63, 63]], 16, axis=0)
    write_manifest(tmp_path, manifest)
    for ids in (sample.input_ids, sample.input_ids + 1):
        writer = NativeShardWriter(tmp_path, 0, layout, counts)
        used = [in_memory()]
        for row in range(16):
            writer.write(row, dataclasses.replace(sample, input_ids=ids))
            used.append(in_memory())
        receipt = writer.commit()
        assert (
            shards_of(tmp_path, read_manifest(tmp_path)).damage(0, lambda _, used=used: used.append(in_memory())) == []
        )
        assert max(used) - used[0] < 4 << 20 < receipt["bytes"] / 4
        if not (tmp_path / "link").exists():
            os.link(shard_path(tmp_path, 0), tmp_path / "link")
    read = NativeEagle3Dataset(tmp_path)[15]
    states = [read.aux_hidden_states, read.last_hidden_states, read.log_normalizers]
    assert len({tensor.untyped_storage().data_ptr() for tensor in states}) == 1  # views of one map
    raw = (tmp_path / "link").read_bytes()
    assert sample.input_ids.tobytes() in raw and (sample.input_ids + 1).tobytes() not in raw
