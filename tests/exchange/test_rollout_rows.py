"""Rollouts as rows of parquet: what datasets reads, and what build --rollouts makes the same cache of again."""

import json
from pathlib import Path

import pytest
from support.commands import niels_gpt
from support.errors import refused

from niels_gpt.exchange.exporting import export_cache
from niels_gpt.prefix_tree.rollouts.build import build_rollouts
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.prefix_tree.rollouts.records import Rollout, RolloutGroup

ROWS = [
    {
        "group": f"q{number}",
        "prompt_ids": [5, 6, 20 + number],
        "completions": [
            {"ids": [40 + at, 7], "logprobs": [-0.5, -1.0], "advantage": at - 1.5, "reward": 0.25 * at}
            for at in range(3)
        ],
    }
    for number in range(12)
]


def built(name, files):
    done = niels_gpt("build", name, "--rollouts", f"{name}={files}", "--rollouts-val-frac", "0.2", "--cache-dir", "c")
    assert done.status == 0, done.err
    return Path("c/rollouts") / name


def test_rows_of_parquet_make_the_same_rollouts_again(tmp_path):
    import datasets

    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    cache = built("maths", "rows.jsonl")
    done = niels_gpt("export", cache, "out", "--to", "hf")
    assert done.status == 0, done.err
    rows = datasets.load_dataset(
        "parquet", data_files="out/data/*.parquet", split="train", cache_dir=str(tmp_path / "d")
    )
    assert len(rows) == 36 and rows.column_names[:4] == ["group", "ids", "prompt_length", "mask"]
    first = rows[0]
    number = int(first["group"][1:])
    assert first["ids"] == [5, 6, 20 + number, 40, 7] and first["mask"] == [0, 0, 0, 1, 1]
    assert (first["prompt_length"], first["logprobs"], first["advantage"]) == (3, [-0.5, -1.0], -1.5)
    again = built("again", "out/data/*.parquet")
    found = niels_gpt("diff", cache, again, "--json").json
    counts = [found[part]["count"] for part in ("only_a", "only_b", "moved")]
    assert found["compared"] == "tokens" and counts == [0, 0, 0]
    for split in ("train", "val"):
        one, other = (RolloutDataset(folder, split) for folder in (cache, again))
        groups = [{data.id(at): data.read(at) for at in range(len(data))} for data in (one, other)]
        assert groups[0].keys() == groups[1].keys()
        for name, samples in groups[0].items():
            for mine, theirs in zip(samples, groups[1][name], strict=True):
                assert mine.ids.tolist() == theirs.ids.tolist() and mine.prompt_length == theirs.prompt_length
                assert {of: values.tolist() for of, values in mine.fields.items()} == {
                    of: values.tolist() for of, values in theirs.fields.items()
                }


def test_an_unknown_prompt_is_null_and_other_formats_are_refused(tmp_path):
    import pyarrow.parquet as pq

    groups = [RolloutGroup("a", [Rollout([1, 2, 3], loss_mask=[0, 1, 1])])]
    build_rollouts(groups, tmp_path / "c", vocab_size=9, val_frac=0)
    export_cache(tmp_path / "c", "hf", tmp_path / "out")
    (row,) = pq.read_table(tmp_path / "out" / "data" / "train-00000-of-00001.parquet").to_pylist()
    assert row == {"group": "a", "ids": [1, 2, 3], "prompt_length": None, "mask": [0, 1, 1]}
    with refused("E220", "rollouts", "megatron"):
        export_cache(tmp_path / "c", "megatron", tmp_path / "other")


@pytest.fixture(autouse=True)
def there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
