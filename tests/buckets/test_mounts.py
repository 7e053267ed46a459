"""A cache at a URL that is damaged, foreign or replaced: its rows are right, or the error names the file and block."""

import json
import logging
import os
import pickle
import shutil

import numpy as np
import pytest
from support import small_builds
from support.disk import META_NAME
from support.errors import refused
from support.mounted_caches import (
    BLOCK_BYTES,
    PIECE_BYTES,
    SHARD,
    altered,
    changed_meta,
    copied,
    digest,
    only_mount,
    pieces,
    stream,
    tokens,
)

from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.storage.mounted import MOUNTED


@pytest.fixture
def bucket(cache, tmp_path):
    """A copy of the cache that stands for its bucket."""
    copied(cache, tmp_path / "bucket")
    return tmp_path / "bucket"


def opened(bucket, local, **how):
    return PretrainSplit(f"file://{bucket}", split="train", local=local, **how)


def test_batches_are_those_of_the_local_cache(cache, bucket, local):
    assert digest(stream(f"file://{bucket}", local=local)) == digest(stream(cache))
    assert (tokens(f"file://{bucket}", local=local) == tokens(cache)).all()


def test_every_piece_is_fetched_once(cache, bucket, local):
    digest(stream(f"file://{bucket}", local=local))
    meta = json.loads((bucket / META_NAME).read_bytes())
    train = sum(shard["bytes"] for shard in meta["shards"]["train"])
    assert train <= only_mount().fetched_bytes <= train + 100_000
    assert int((local / "used").read_text()) == sum(
        each.stat().st_size for each in local.glob("*/**/*.*") if each.is_file()
    ) + sum(each.stat().st_size for each in pieces(local).values() if "." not in each.name)


def test_a_damaged_block_names_the_file_the_block_and_both_attempts(bucket, local):
    altered(bucket / SHARD, PIECE_BYTES + 3 * BLOCK_BYTES + 5)
    split = opened(bucket, local)
    assert len(split.stream(0, 1000)) == 1000
    with refused("E611", SHARD, "block 19", "CRC-32", "; then", "push", "--check"):
        split.stream(PIECE_BYTES // 4, PIECE_BYTES // 4 + 10)
    assert len(split.stream(0, 1000)) == 1000


@pytest.mark.parametrize(
    ("change", "code"), [("gone", "E611"), ("shorter", "E611"), ("link", "E205"), ("fifo", "E205")]
)
def test_a_shard_that_is_gone_or_another(bucket, local, change, code):
    split, path = opened(bucket, local), bucket / SHARD
    content = path.read_bytes()
    path.unlink()
    if change == "shorter":
        path.write_bytes(content[:70_000])
    elif change == "link":
        path.symlink_to(bucket / META_NAME)
    elif change == "fifo":
        os.mkfifo(path)
    with refused(code, SHARD):
        split.stream(0, 10)


def test_a_shard_that_is_longer_than_meta_json_says_is_read_to_its_end_by_meta_json(cache, bucket, local):
    with open(bucket / SHARD, "ab") as file:
        file.write(bytes(1000))
    assert (tokens(f"file://{bucket}", local=local) == tokens(cache)).all()


@pytest.mark.parametrize("change", ["altered", "shorter"])
def test_checksums_that_are_damaged(bucket, local, change):
    sums = bucket / "index" / "crc32.bin"
    altered(sums) if change == "altered" else sums.write_bytes(sums.read_bytes()[:-4])
    for _ in range(2):  # the second opening finds no mount of the first
        with refused("E611", "index/crc32.bin"):
            opened(bucket, local)
    assert not MOUNTED


def test_checksums_of_another_number_of_blocks(bucket, local):
    changed_meta(bucket, lambda meta: meta["checksums"].update(bytes=4))
    with refused("E202", META_NAME):
        opened(bucket, local)


def test_a_replaced_cache_is_refused_and_what_is_here_still_comes_from_here(cache, bucket, local):
    split = opened(bucket, local)
    before = split.stream(0, 100).copy()
    changed_meta(bucket, lambda meta: meta.update(created="tomorrow"))
    (bucket / SHARD).write_bytes(bytes((bucket / SHARD).stat().st_size))
    assert (split.stream(0, 100) == before).all()
    with refused("E610", "replaced"):
        split.stream(PIECE_BYTES // 4, PIECE_BYTES // 4 + 10)
    assert (split.stream(0, 100) == before).all()


def test_two_versions_share_a_folder_and_are_not_mixed(cache, bucket, local):
    first = opened(bucket, local)
    before = first.stream(0, 1000).copy()
    shutil.rmtree(bucket)
    copied(cache, bucket)
    changed_meta(bucket, lambda meta: meta.update(created="tomorrow"))
    second = opened(bucket, local)
    assert second.cache != first.cache and (second.stream(0, 1000) == before).all()
    assert len(list(local.glob("*/meta.json"))) == 2


def test_no_cache_and_half_a_push(bucket, local):
    (bucket / META_NAME).rename(bucket / "niels_gpt-push.json")
    with refused("E204", META_NAME):
        opened(bucket, local)
    shutil.rmtree(bucket)
    with refused("E204", META_NAME):
        opened(bucket, local)
    assert not local.exists() and not MOUNTED


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("E202", lambda path: changed_meta(path, lambda meta: meta.update(format_version=99))),
        ("E202", lambda path: altered(path / META_NAME, 200)),
        ("E202", lambda path: (path / META_NAME).write_bytes(b"no JSON")),
        ("E206", lambda path: (path / META_NAME).write_bytes(b" " * (1 << 25) + b" ")),
    ],
    ids=["newer", "altered", "no JSON", "huge"],
)
def test_a_meta_json_that_cannot_be_used(bucket, local, code, change):
    change(bucket)
    with refused(code, META_NAME):
        opened(bucket, local)
    assert not MOUNTED


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/x", "a/../../x", META_NAME, ".pieces/0-0", "x" * 10_000, SHARD + "/x", "train", "x.half"],
)
def test_names_that_lead_out_of_the_folder_or_into_its_pieces(bucket, local, tmp_path, name):
    changed_meta(bucket, lambda meta: meta["index"]["train"].update(name=name))
    before = {path for path in tmp_path.rglob("*") if local not in path.parents and path != local}
    with refused("E202", META_NAME):
        opened(bucket, local)
    assert {path for path in tmp_path.rglob("*") if local not in path.parents and path != local} == before
    assert not MOUNTED


def test_a_size_beyond_every_disk(bucket, local):
    def huge(meta):
        meta["shards"]["train"][0]["bytes"] = 1 << 62
        meta["checksums"]["bytes"] = 4 * ((1 << 46) + 40)

    changed_meta(bucket, huge)
    with refused("E202"):
        opened(bucket, local)


def test_a_pickled_reader_reads_the_same_and_asks_for_no_meta_json(cache, bucket, local):
    split = opened(bucket, local)
    expected = split.stream(0, 1000).copy()
    copy = pickle.dumps(split)
    (bucket / META_NAME).unlink()
    MOUNTED.clear()
    assert (pickle.loads(copy).stream(0, 1000) == expected).all()


def test_a_batch_of_more_pieces_than_max_bytes_holds(large, local, tmp_path):
    url = copied(large, tmp_path / "bucket")
    with refused("E501", "max_bytes=16,777,216", "pieces"):
        next(iter(stream(url, local=local, max_bytes="16 MiB", global_batch_size=256)))
    few = stream(url, local=local, max_bytes="16 MiB", global_batch_size=8)
    assert digest(few, 3) == digest(stream(large, global_batch_size=8), 3)


def test_a_state_counts_what_was_served_and_not_what_was_fetched(cache, bucket, local):
    served, far = stream(cache), stream(f"file://{bucket}", local=local)
    assert digest(served, 3) == digest(far, 3)
    assert far.state_dict() == served.state_dict() and far.state_dict()["consumed_samples"] == 24
    rest = stream(f"file://{bucket}", local=local)
    rest.load_state_dict(far.state_dict())
    assert digest(rest) == digest(served)


def test_nothing_is_logged_of_a_sound_run(bucket, local, caplog):
    caplog.set_level(logging.INFO, "niels_gpt")
    digest(stream(f"file://{bucket}", local=local))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert np.isfinite(only_mount().requests)


def test_a_folder_that_was_removed_is_made_again(cache, bucket, local):
    expected = digest(stream(cache))
    assert digest(stream(f"file://{bucket}", local=local)) == expected
    shutil.rmtree(local)
    first = stream(f"file://{bucket}", local=local)
    shutil.rmtree(local)
    assert digest(pickle.loads(pickle.dumps(first))) == expected
    assert digest(first) == expected


def test_a_second_opening_changes_only_the_bounds_that_it_names(bucket, local):
    opened(bucket, local, max_bytes="20 MiB", max_ahead="2 MiB")
    opened(bucket, local)
    assert (only_mount().max_bytes, only_mount().max_ahead) == (20 << 20, 2 << 20)
    opened(bucket, local, max_bytes="40 MiB")
    assert (only_mount().max_bytes, only_mount().max_ahead) == (40 << 20, 2 << 20)


@pytest.mark.parametrize("local", [None, "", "s3://team/pieces"])
def test_what_was_fetched_needs_a_folder_here(bucket, local, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    with refused("E101", "local=DIR"):
        opened(bucket, local)
    assert set(tmp_path.iterdir()) == before


def test_a_split_without_text_is_refused_as_in_a_local_cache(local, tmp_path):
    small_builds.pretrain(tmp_path / "built", items=[("train", "the beginning and the end", "a")])
    url = copied(tmp_path / "built", tmp_path / "bucket")
    with refused("E204", f"{url}/val: ", "no shard"):
        PretrainSplit(f"{url}/val", local=local)


def test_a_split_that_contradicts_the_url(bucket, local):
    with pytest.raises(ValueError, match=f"file://{bucket}/train"):
        PretrainSplit(f"file://{bucket}/train", split="val", local=local)
