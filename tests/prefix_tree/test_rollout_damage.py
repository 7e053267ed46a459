"""A rollout cache that is damaged or made to harm its reader: refused by name, or read within its vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache as cached
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzed import JSON, Files, damaged, fuzz, written
from support.power_loss import tree_of
from support.small_builds import VOCABULARY, quick_folder, rollouts
from support.small_caches import change_meta

from niels_gpt.prefix_tree.rollouts.format import GROUP_COLUMNS, SAMPLE_COLUMNS
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import meta_bytes

FIELDS = ("logprobs", "advantage", "reward")
FILES = (
    *(f"train_{name}.bin" for name in ("tokens", "loss", *FIELDS)),
    *("index/train_groups.npy", "index/train_samples.npy", "index/train_ids.txt"),
)


@cached
def good() -> Files:
    """The files of a small cache, by name."""
    with quick_folder() as folder:
        rollouts(folder / "c", val_frac=0)
        return {name: content for name, content in tree_of((folder / "c").resolve()).items() if content is not None}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    for name, content in good().items():
        (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "c" / name).write_bytes(content)
    return tmp_path / "c"


def link(path: Path) -> None:
    shutil.move(path, path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"bytes, expected \d+ by its meta.json"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), r"bytes, expected \d+ by its meta.json"),
    "empty": (lambda path: path.write_bytes(b""), "0 bytes, expected"),
    "missing": (Path.unlink, "no such"),
    "a link": (link, "links are not followed"),
    "a folder": (lambda path: [path.unlink(), path.mkdir()], "not a regular file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_and_named(cache: Path, name: str, damage: str) -> None:
    change, message = DAMAGES[damage]
    change(cache / name)
    with pytest.raises((CacheError, FileNotFoundError), match=message) as error:
        RolloutDataset(cache)
    assert str(error.value).startswith(str(cache / name))


NUMBERS = [
    *(("groups", column, number) for column in range(len(GROUP_COLUMNS)) for number in (-1, 1, 2**62)),
    *(("samples", column, number) for column in range(len(SAMPLE_COLUMNS)) for number in (-(2**62), 2**62)),
]


@pytest.mark.parametrize(("table", "column", "added"), NUMBERS)
def test_a_number_of_the_index_that_does_not_fit_is_refused(cache: Path, table: str, column: int, added: int) -> None:
    path = cache / f"index/train_{table}.npy"
    values = np.load(path)
    width = len(GROUP_COLUMNS if table == "groups" else SAMPLE_COLUMNS)
    values[3 * width + column] += added
    np.save(path, values)
    with pytest.raises(CacheError) as error:
        RolloutDataset(cache)
    assert str(error.value).startswith(str(cache / "index/train_"))


def test_an_index_of_other_ids_is_found_when_a_group_is_folded(cache: Path) -> None:
    """All of its numbers fit: only the ids tell."""
    data = RolloutDataset(cache)
    group = next(number for number in range(len(data)) if data.groups[number, 1] > 1)
    first, path = int(data.groups[group, GROUP_COLUMNS.index("first_token")]), cache / "train_tokens.bin"
    tokens = np.fromfile(path, "<u2")
    second = first + int(data.groups[group, 2]) + int(data.samples[data.groups[group, 0], 0] - data.groups[group, 2])
    tokens[second] = tokens[first + int(data.groups[group, 2])]  # the second sample begins as the first one does
    tokens.tofile(path)
    data = RolloutDataset(cache)
    with pytest.raises(CacheError, match=rf"group {group} has \d+ tokens after folding, expected \d+ by its ids"):
        data.forest(group)


def test_an_id_outside_the_vocabulary_is_refused_where_it_is_read(cache: Path) -> None:
    tokens = np.fromfile(cache / "train_tokens.bin", "<u2")
    tokens[-1] = VOCABULARY
    tokens.tofile(cache / "train_tokens.bin")
    data = RolloutDataset(cache)
    data.group(0)
    with pytest.raises(CacheError, match=r"train_tokens.bin: sample \d of group \d+ has the id 30, expected ids below"):
        data.group(len(data) - 1)


def rewritten(path: Path, dtype: str, at: int, value: float) -> None:
    values = np.fromfile(path, dtype)
    values[at] = value
    values.tofile(path)


VALUES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "not a number": (
        lambda folder: rewritten(folder / "train_logprobs.bin", "<f4", 0, np.nan),
        "train_logprobs.bin: sample 0 of group 0 has a value that is not finite",
    ),
    "infinite": (
        lambda folder: rewritten(folder / "train_reward.bin", "<f4", 0, np.inf),
        "train_reward.bin: sample 0 of group 0 has a value that is not finite",
    ),
    "other targets": (
        lambda folder: rewritten(folder / "train_loss.bin", "u1", 0, 0),
        r"train_loss.bin: sample 0 of group 0 has \d targets, expected \d by the index",
    ),
    "a target in a prompt": (
        lambda folder: rewritten(
            folder / "train_loss.bin", "u1", 0, np.fromfile(folder / "train_loss.bin", "u1")[0] | 1
        ),
        "train_loss.bin: sample 0 of group 0 has a target in its prompt",
    ),
}


@pytest.mark.parametrize("what", VALUES)
def test_a_value_that_no_build_stores_is_refused_where_it_is_read(cache: Path, what: str) -> None:
    damage, message = VALUES[what]
    damage(cache)
    with pytest.raises(CacheError, match=message):
        RolloutDataset(cache).group(0)


META: dict[str, tuple[dict[str, Any], str]] = {
    "a field that is not there": ({"fields": {"advantages": "token"}}, "does not name train_advantages.bin"),
    "an unknown field": ({"fields": {"../x": "token"}}, "expected some of logprobs"),
    "a field by something else": ({"fields": {"logprobs": "sample"}}, "expected some of logprobs"),
    "no fields": ({"fields": None}, "fields is None"),
    "another kind": ({"kind": "sft"}, "kind is 'sft', expected 'rollouts'"),
    "another width": ({"token_dtype": "uint32-le"}, "token_dtype is 'uint32-le'"),
    "ids of 16 bits of any vocabulary": ({"vocab_size": None}, "expected 'uint32-le' without a vocab_size"),
    "no totals": ({"totals": {}}, "totals.train_groups is None"),
    "no files": ({"files": []}, "does not name train_"),
    "a file outside": ({"files": [{"name": "../x", "bytes": 1, "sha256": "0" * 64}]}, "the relative path of a file"),
}


@pytest.mark.parametrize("what", META)
def test_a_description_that_does_not_fit_is_refused(cache: Path, what: str) -> None:
    keys, message = META[what]
    change_meta(cache, **keys)
    with pytest.raises(CacheError, match=message):
        RolloutDataset(cache)


def read_all(folder: Path) -> None:
    """Read every group; what is not a documented error fails the test."""
    try:
        data = RolloutDataset(folder)
        for number in range(len(data)):
            for sample in data.group(number).samples:
                assert 0 < len(sample.ids) == len(sample.loss_mask) and sample.ids.max() < VOCABULARY
            data.forest(number)
    except (CacheError, FileNotFoundError) as error:
        assert str(folder) in str(error)


@fuzz(60)
@given(st.data())
def test_random_damage_gives_good_ids_or_a_documented_error(data: st.DataObject) -> None:
    """With sizes in meta.json that are right, as who damages a cache on purpose would write them."""
    files = dict(good())
    name = data.draw(st.sampled_from(FILES))
    files[name] = data.draw(damaged(files[name]))
    meta = json.loads(files[META_NAME])
    records = [*meta["shards"]["train"], *meta["files"], *meta["index"].values(), *meta["ids"].values()]
    for record in records:
        if record["name"] == name:
            record["bytes"] = len(files[name])
            if "tokens" in record:
                record["tokens"] = len(files[name]) // 2
    files[META_NAME] = meta_bytes(meta)
    with written(files) as folder:
        read_all(folder)


@fuzz(60)
@given(st.data())
def test_random_values_in_meta_json_give_good_ids_or_a_documented_error(data: st.DataObject) -> None:
    meta = json.loads(good()[META_NAME])
    key = data.draw(st.sampled_from(sorted(meta)))
    meta[key] = data.draw(JSON)
    with written({**good(), META_NAME: meta_bytes(meta)}) as folder:
        read_all(folder)
