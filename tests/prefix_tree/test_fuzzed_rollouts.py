"""A rollout cache under random damage of files and description: refused by name, or read within its vocabulary."""

from __future__ import annotations

import json
from functools import cache as cached

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bits_caches import sealed
from support.disk import META_NAME, meta_bytes, read_meta
from support.errors import refused
from support.fuzzed import JSON, damaged, fuzz, written
from support.power_loss import tree_of
from support.small_builds import VOCABULARY, quick_folder, rollouts

from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.storage.errors import CacheError

FIELDS = ("logprobs", "advantage", "reward")
FILES = (
    *(f"train_{name}.bin" for name in ("tokens", "loss", *FIELDS)),
    *("index/train_groups.npy", "index/train_samples.npy", "index/train_ids.txt"),
)


@cached
def good():
    """The files of a small cache, by name."""
    with quick_folder() as folder:
        rollouts(folder / "c", val_frac=0)
        return {name: content for name, content in tree_of((folder / "c").resolve()).items() if content is not None}


@pytest.fixture
def cache(tmp_path):
    for name, content in good().items():
        (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "c" / name).write_bytes(content)
    return tmp_path / "c"


def test_an_id_outside_the_vocabulary_is_refused_where_it_is_read(cache):
    tokens = np.fromfile(cache / "train_tokens.bin", "<u2")
    tokens[-1] = VOCABULARY
    tokens.tofile(cache / "train_tokens.bin")
    sealed(cache, read_meta(cache))  # as a builder with a fault would write it
    data = RolloutDataset(cache)
    data.group(0)
    with refused("E203", "train_tokens.bin", "sample", "group", "id 30"):
        data.group(len(data) - 1)


# Columns of the table "a sample's number" of docs/formats.md. The sample has 8 tokens and stands in a group of three.
BEYOND = [(0, 0), (0, 1 << 40), (1, -2), (1, 8), (2, -1), (2, 8), (3, -1), (3, 3), (3, 0), (4, -1), (4, 9)]


@pytest.mark.parametrize(("column", "number"), BEYOND)
def test_a_number_of_a_sample_beyond_its_bounds_is_refused(cache, column, number):
    path = cache / "index" / "train_samples.npy"
    rows = np.load(path).reshape(-1, 5)
    assert rows[1, 0] == 8
    rows[1, column] = number
    np.save(path, rows.ravel())
    sealed(cache, read_meta(cache))
    with refused("E203", "train_samples.npy"):
        RolloutDataset(cache).group(0)


def read_all(folder):
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
