"""The samples and the plan of an EAGLE-3 cache, and what it will take of the disk."""

import json
import shutil
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import eagle3_runs as small
from support.eagle3_runs import estimated, has_holes, planned, recorded_plan, samples_in_memory, samples_on_disk
from support.errors import refused

from niels_gpt.eagle3.cache import convert


def test_equal_input_gives_an_equal_plan_and_any_change_another():
    samples = small.samples_of()
    base = small.plan(samples)
    changes = [
        {"dtype": "fp32"},
        {"selected_token_ids": [3, 7, 11, 0, 1, 2, 4, 5, 39, 20, 21, 8]},
        {"target": {"config_sha256": "d" * 64}},
        {"tokenizer": {"pad_id": 6}},
        {"source": {"limit": 10}},
        {"dropped": {"empty": 3}},
        {"run": {"threads": 2}},
        {"batch_size": 4},
        {"max_batch_tokens": 63},
    ]
    plans = [base, *(small.plan(samples, **change) for change in changes)]
    others = [[*small.rows(9), small.Row("x", [1], [1])], small.rows(9), small.rows(10, seed=1)]
    plans += [small.plan(rows) for rows in others]
    assert len({planned(plan).sha256 for plan in plans}) == len(plans)
    assert planned(small.plan(small.samples_of())).sha256 == planned(base).sha256


def test_the_plan_of_a_cache_can_be_read_back_and_after_a_conversion_too(tmp_path):
    small.run(tmp_path / "c")
    expected = planned(small.plan(small.samples_of()))
    for version in (1, 2, 1):
        convert(tmp_path / "c", version)
        assert recorded_plan(tmp_path / "c") == expected
    record = json.loads((tmp_path / "c" / "sidecar" / "plan.json").read_bytes())
    assert record["run"]["threads"] == 1 and record["manifest"]["num_samples"] == 10
    lines = (tmp_path / "c" / "sidecar" / "batches.jsonl").read_text().splitlines()
    expected_lines = [[[24, [1, 3]], [16, [0, 2]]], [[24, [2, 1]], [8, [0, 3]]], [[16, [1, 0]]]]
    assert [json.loads(line) for line in lines] == expected_lines


def test_a_plan_that_does_not_fit_the_files_beside_it_is_refused(tmp_path):
    folder = tmp_path / "c"
    with refused("E702", "plan.json", kind=FileNotFoundError):
        recorded_plan(folder)
    small.run(folder)
    for name, old, new in [
        ("sidecar/batches.jsonl", b"[[24", b"[[16"),
        ("sidecar/batches.jsonl", b"[[24", b"{{24"),
        ("manifest.json", b'"dtype": "bf16"', b'"dtype": "fp16"'),
        ("manifest.json", b"    39,", b"    38,"),
        ("sidecar/plan.json", b'"kind": "eagle3"', b'"kind": "sft"'),
        ("sidecar/plan.json", b'"run": {', b'"walk": {'),
        ("sidecar/plan.json", b"}", b""),
    ]:
        whole = (folder / name).read_bytes()
        assert old in whole
        (folder / name).write_bytes(whole.replace(old, new))
        with refused("E208" if b"sft" in new else "E701", "plan.json"):
            recorded_plan(folder)
        (folder / name).write_bytes(whole)
    assert recorded_plan(folder).num_shards == 3


@pytest.mark.parametrize("form", [{}, small.TOPK], ids=["dense", "topk"])
def test_the_estimate_is_what_a_run_takes(folder, form):
    samples = small.samples_of(60)
    plan = small.plan(samples, **form)
    found = estimated(folder / "c", plan)
    meta = small.run(folder / "c", samples=samples, given=plan).meta
    assert (found.samples, found.tokens, found.shards) == (60, meta["totals"]["tokens"], meta["totals"]["shards"])
    assert found.bytes_per_token == meta["bytes_per_token"]
    assert abs(found.apparent_bytes - meta["disk_bytes"]) < 0.1 * meta["disk_bytes"]
    assert found.fits and found.max_length == small.LENGTH and found.mean_length == found.tokens / 60
    again = estimated(folder / "c", plan, resume=True)
    assert again.to_write_bytes < 0.1 * found.to_write_bytes and again.shards_done == found.shards


def test_padding_is_not_counted_where_it_is_a_hole(folder):
    if not has_holes(folder):
        pytest.skip("this file system has no holes")
    samples = [small.Row(str(number), [1, 2], [1, 1]) for number in range(8)]
    plan = small.plan(samples, seq_length=4000, max_batch_tokens=16000)
    found = estimated(folder / "c", plan)
    small.run(folder / "c", samples=samples, given=plan)
    allocated = sum(path.stat().st_blocks * 512 for path in (folder / "c").rglob("*") if path.is_file())
    assert allocated <= found.to_write_bytes + 4096 * 20 < found.apparent_bytes / 2


def test_what_a_killed_writer_left_counts_as_free(folder, monkeypatch):
    samples = small.samples_of()
    (folder / "c").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    (folder / "c" / ".shard-000000.safetensors.0123abcd.tmp").write_bytes(bytes(1 << 22))
    (folder / "c" / "mine").write_bytes(bytes(1 << 22))
    found = estimated(folder / "c", small.plan(samples))
    assert found.free_bytes == 1000 + (1 << 22) and found.fits


IDS, MASK, STARTS = np.array([1, 2, 3], np.int32), np.array([0, 1, 1], np.uint8), np.array([0, 2, 3], np.int64)


ODD = [small.Row("a\nb", [1, 2, 3], [0, 1, 1]), small.Row("", [4], [0]), small.Row("é\\n\ud800", [5, 6], [1, 0])]


def put(folder, names=b"a\nb\n", **changed):
    tensors = {"ids": IDS, "loss_mask": MASK, "starts": STARTS, **changed}
    save_file(tensors, folder / "samples.safetensors")
    (folder / "ids.txt").write_bytes(names)


def test_samples_come_back_as_they_were_written_and_only_equal_ones_have_an_equal_sha256(tmp_path):
    written = samples_in_memory(ODD)
    written.write(tmp_path)
    read = samples_on_disk(tmp_path)
    assert list(read.source_ids) == [sample.id for sample in ODD]
    for number, sample in enumerate(ODD):
        ids, mask = read.row(number)
        assert (ids.tolist(), mask.tolist()) == (sample.input_ids, sample.loss_mask)
    assert (len(read), read.lengths.tolist(), read.supervised) == (3, [3, 1, 2], 3)
    assert (read.ids.dtype, read.loss_mask.dtype, read.starts.dtype) == (np.int32, np.uint8, np.int64)
    assert read.checksums == written.checksums
    assert (tmp_path / "ids.txt").read_bytes().count(b"\n") == 3
    sums = [
        samples_in_memory(rows).checksums for rows in (ODD, ODD[:2], [small.Row("x", [1, 2, 3], [0, 1, 1]), *ODD[1:]])
    ]
    assert len({tuple(found.values()) for found in sums}) == 3
    for name in ("ids.txt", "samples.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for wrong in (whole[:-1], b"", whole + b"x\n"):
            (tmp_path / name).write_bytes(wrong)
            with refused("E701", "samples.safetensors"):
                samples_on_disk(tmp_path)
        (tmp_path / name).unlink()
        with refused("E702", kind=FileNotFoundError):
            samples_on_disk(tmp_path)
        (tmp_path / name).write_bytes(whole)


@pytest.mark.parametrize(
    ("ids", "mask", "said"),
    [
        ([1, 2], [1], "'x': [2] input_ids and [1] loss_mask"),
        ([], [], "'x': [0] input_ids"),
        ([[1]], [[1]], "'x': [1, 1] input_ids"),
        ([-1, 2], [0, 1], "ids from -1"),
        ([1, 2], [0, 2], "loss_mask up to 2"),
    ],
)
def test_a_row_of_other_forms_or_values_is_refused(ids, mask, said):
    with refused("E102", said):
        samples_in_memory([small.Row("x", ids, mask)])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ids": IDS.astype(np.int64) + 2**40}, "ids of int64 [3], expected int32"),
        ({"ids": IDS.astype(np.float32)}, "ids of float32"),
        ({"ids": IDS.view(np.uint32)}, "ids of uint32"),
        ({"ids": IDS[None]}, "ids of int32 [1, 3]"),
        ({"ids": IDS - 2}, "ids from -1"),
        ({"ids": IDS[:2]}, "starts of 3 numbers, expected them to rise from 0 to 2"),
        ({"loss_mask": MASK + 7}, "loss_mask up to 8"),
        ({"loss_mask": MASK.astype(bool)}, "loss_mask of bool"),
        ({"loss_mask": MASK[:2]}, "2 samples of 3 ids, 2 loss_mask, 2 names"),
        ({"starts": STARTS.astype(np.float64)}, "starts of float64"),
        ({"starts": STARTS.astype(np.int32)}, "starts of int32"),
        ({"starts": np.array(3)}, "starts of int64 []"),
        ({"starts": STARTS[:0]}, "starts of 0 numbers"),
        ({"starts": STARTS + 1}, "starts of 3 numbers, expected them to rise from 0 to 3"),
        *(({"starts": np.array([0, *ends])}, "starts of 3 numbers") for ends in ([4, 3], [3, 3], [1, 2])),
        ({"starts": np.array([0, 1, 2, 3])}, "3 samples of 3 ids, 3 loss_mask, 2 names"),
        ({"names": b"a\nb"}, "the last name has no line end"),
        ({"names": b"a\n"}, "2 samples of 3 ids, 3 loss_mask, 1 names"),
    ],
)
def test_files_of_something_else_are_refused(changed, said, tmp_path):
    put(tmp_path, **changed)
    with refused("E701", "samples.safetensors", said):
        samples_on_disk(tmp_path)


def test_rows_take_little_more_memory_than_their_bytes():
    count, length = 20_000, 40
    ids, mask = np.arange(length, dtype=np.int32), np.ones(length, np.uint8)

    def rows():
        for _ in range(count):
            yield small.Row("one name", ids.copy(), mask.copy())

    tracemalloc.start()
    try:
        samples = samples_in_memory(rows())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(samples) == count and samples.row(count - 1)[0].tolist() == ids.tolist()
    assert peak < 2 * 5 * count * length  # ids and mask; lists of small arrays take 3.4 times as much
