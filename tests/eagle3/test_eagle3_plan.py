"""The samples and the plan of an EAGLE-3 cache, and what it will take of the disk."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import eagle3_runs as small

from niels_gpt.eagle3.cache import convert
from niels_gpt.eagle3.format.plan import differing_fields, open_plan, plan_batches
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.produce.estimate import estimate, has_holes
from niels_gpt.storage.errors import CacheError


def batches(lengths: Sequence[int], batch_size: int, max_batch_tokens: int, seq_length: int = 24) -> Any:
    return plan_batches(lengths, batch_size, max_batch_tokens, seq_length=seq_length)


def test_the_longest_rows_run_first_and_equally_long_ones_by_their_number() -> None:
    found = batches([5, 17, 8, 17, 1], batch_size=2, max_batch_tokens=1000)
    assert found == [(24, [1, 3]), (8, [2, 0]), (8, [4])]
    with pytest.raises(ValueError, match="row 1 has 25 tokens, expected at most seq_length, 24"):
        batches([3, 25], batch_size=1, max_batch_tokens=8)


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 7), st.integers(1, 200), st.integers(40, 50))
def test_each_row_is_in_one_batch_that_holds_it(lengths: list[int], size: int, tokens: int, slots: int) -> None:
    found = batches(lengths, size, tokens, slots)
    assert sorted(row for _, rows in found for row in rows) == list(range(len(lengths)))
    for width, rows in found:
        longest = max(lengths[row] for row in rows)
        assert longest <= width <= slots and (width == slots or (width - longest < 8 and width % 8 == 0))
        assert len(rows) <= size and (len(rows) == 1 or len(rows) * width <= tokens)


def test_equal_input_gives_an_equal_plan_and_any_change_another() -> None:
    samples = small.samples_of()
    base = small.plan(samples)
    changes: list[dict[str, Any]] = [
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
    plans += [small.plan(Samples.of_rows(rows)) for rows in others]
    assert len({plan.sha256 for plan in plans}) == len(plans)
    assert small.plan(small.samples_of()).sha256 == base.sha256


def test_the_plan_of_a_cache_can_be_read_back_and_after_a_conversion_too(tmp_path: Path) -> None:
    small.run(tmp_path / "c")
    expected = small.plan(small.samples_of())
    for version in (1, 2, 1):
        convert(tmp_path / "c", version)
        assert open_plan(tmp_path / "c") == expected
    record = json.loads((tmp_path / "c" / "sidecar" / "plan.json").read_bytes())
    assert record["run"]["threads"] == 1 and record["manifest"]["num_samples"] == 10
    lines = (tmp_path / "c" / "sidecar" / "batches.jsonl").read_text().splitlines()
    expected_lines = [[[24, [1, 3]], [16, [0, 2]]], [[24, [2, 1]], [8, [0, 3]]], [[16, [1, 0]]]]
    assert [json.loads(line) for line in lines] == expected_lines


def test_a_plan_that_does_not_fit_the_files_beside_it_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with pytest.raises(FileNotFoundError, match=r"plan.json not found"):
        open_plan(folder)
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
        with pytest.raises(CacheError, match=r"plan\.json"):
            open_plan(folder)
        (folder / name).write_bytes(whole)
    assert open_plan(folder).num_shards == 3


def test_differing_fields_are_named_by_their_path() -> None:
    left = {"a": 1, "b": {"c": 1, "d": {"e": [1]}}, "g": None}
    right = {"a": 2, "b": {"c": 1, "d": {"e": [2]}, "f": 1}}
    assert differing_fields(left, right) == ["a", "b.d.e", "b.f", "g"]
    assert differing_fields(left, left) == []


def allocated(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("form", [{}, small.TOPK], ids=["dense", "topk"])
def test_the_estimate_is_what_a_run_takes(folder: Path, form: dict[str, Any]) -> None:
    samples = small.samples_of(60)
    plan = small.plan(samples, **form)
    found = estimate(folder / "c", plan, samples)
    meta = small.run(folder / "c", samples=samples, given=plan).meta
    assert (found.samples, found.tokens, found.shards) == (60, meta["totals"]["tokens"], meta["totals"]["shards"])
    assert found.bytes_per_token == meta["bytes_per_token"]
    assert abs(found.apparent_bytes - meta["disk_bytes"]) < 0.1 * meta["disk_bytes"]
    assert found.fits and found.max_length == small.LENGTH and found.mean_length == found.tokens / 60
    again = estimate(folder / "c", plan, samples, done=range(found.shards))
    assert again.to_write_bytes < 0.1 * found.to_write_bytes and again.shards_done == found.shards


def test_padding_is_not_counted_where_it_is_a_hole(folder: Path) -> None:
    if not has_holes(folder):
        pytest.skip("this file system has no holes")
    samples = Samples.of_rows([small.Row(str(number), [1, 2], [1, 1]) for number in range(8)])
    plan = small.plan(samples, seq_length=4000, max_batch_tokens=16000)
    found = estimate(folder / "c", plan, samples)
    small.run(folder / "c", samples=samples, given=plan)
    assert allocated(folder / "c") <= found.to_write_bytes + 4096 * 20 < found.apparent_bytes / 2


def test_what_a_killed_writer_left_counts_as_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = small.samples_of()
    (folder / "c").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    (folder / "c" / ".shard-000000.safetensors.0123abcd.tmp").write_bytes(bytes(1 << 22))
    (folder / "c" / "mine").write_bytes(bytes(1 << 22))
    found = estimate(folder / "c", small.plan(samples), samples)
    assert found.free_bytes == 1000 + (1 << 22) and found.fits
