"""The records of files in a meta.json: names stay inside the cache, numbers and hashes are what they must be."""

import pytest
from support.errors import refused

from niels_gpt.cache import CacheError
from niels_gpt.storage.meta_json import checked_name, file_records, path_inside

DIGEST = "0" * 64
BAD_NAMES = [
    *["../../../../outside/secret.bin", "train/../../../../../outside/secret.bin", "train/../train/shard_00000.bin"],
    *["./train/shard_00000.bin", "train/./shard_00000.bin", "train//shard_00000.bin", "train/", "/etc/hostname"],
    *["//etc/hostname", "", ".", "..", "...\0", "train/shard\x00", "train\\shard_00000.bin", "..\\..\\outside"],
    *["train/shard\n00000.bin", "train/\x1b[2Jshard", "train/\x7f", "train/\u202enib.exe", "train/\ud800"],
    *["train/" + "x" * 256, "/".join(["x" * 200] * 9)],
]
NO_NAMES = [None, True, 3, 0.5, [], ["train/shard_00000.bin"], {"name": "x"}]
BAD_COUNTS = [-1, 2**63, 10**90, True, False, 20.0, 0.5, "20", None, [20], {}]
BAD_DIGESTS = [None, 3, True, [], "", "0" * 63, "0" * 65, "A" * 64, "g" * 64, DIGEST + "\n", "٠" * 64]


def record(**parts):
    return {"name": "train/shard_00000.bin", "bytes": 20, "tokens": 10, "sha256": DIGEST, **parts}


@pytest.mark.parametrize("name", [*BAD_NAMES, *NO_NAMES])
def test_a_name_that_is_none_of_a_file_in_the_cache_is_refused(tmp_path, name):
    message = r"^w/meta.json: shards\.val\[1\]\.name is .{1,80}, expected the relative path of a file inside the cache"
    with pytest.raises(CacheError, match=message):
        file_records({"shards": {"val": [record(), record(name=name)]}}, "w/meta.json")
    with pytest.raises(CacheError, match="a file's name is"):
        path_inside(tmp_path, name)


@pytest.mark.parametrize("name", ["a", "a/b", "...", "..a", ".hidden", "a b", "naïve/漢字.bin", "x" * 255, "-rf", "~"])
def test_other_names_are_good(tmp_path, name):
    assert checked_name(name, "name", "meta.json") == name and path_inside(tmp_path, name) == tmp_path / name


BAD_PARTS = [
    *(
        (part, count, "an integer from 0")
        for part in ("bytes", "tokens", "entries", "block_bytes")
        for count in BAD_COUNTS
    ),
    *(("sha256", digest, "64 lower-case hex") for digest in BAD_DIGESTS),
]


@pytest.mark.parametrize(("part", "value", "expected"), BAD_PARTS)
def test_a_count_and_a_sha256_that_are_none_are_refused(part, value, expected):
    with refused("E202", "meta.json", f"index.train.{part} is ", expected):
        file_records({"index": {"train": record(**{part: value})}})


MALFORMED = [
    ([], "the whole is [], expected an object"),
    (None, "the whole is None, expected an object"),
    ({"shards": None}, "shards is None, expected an object"),
    ({"shards": [record()]}, "shards is [{"),
    ({"shards": {"train": record()}}, "shards.train is {"),
    ({"shards": {"train": ["shard"]}}, "shards.train[0] is 'shard', expected an object"),
    ({"shards": {"train": [record(), []]}}, "shards.train[1] is [], expected an object"),
    ({"shards": {"train": [{"name": "a", "sha256": DIGEST}]}}, "expected a record with bytes"),
    ({"shards": {"train": [{"name": "a", "bytes": 1}]}}, "expected a record with sha256"),
    ({"shards": {"train": [{"bytes": 1, "sha256": DIGEST}]}}, "expected a record with name"),
    ({"index": {"train": [record()]}}, "index.train is [{"),
    ({"ids": 5}, "ids is 5, expected an object"),
    ({"ids": {"val": None}}, "ids.val is None, expected an object"),
    ({"checksums": None}, "checksums is None, expected an object"),
    ({"files": {}}, "files is {}, expected a list"),
    ({"files": [record(name="meta.json")]}, "files[0].name is 'meta.json', expected a file other than meta.json"),
    ({"files": [record(), record()]}, "files[1].name is 'train/shard_00000.bin', expected a file other than"),
    ({"shards": {"train": [record()]}, "checksums": record()}, "checksums.name is 'train/shard_00000.bin'"),
    ({"shards": {"train": [record(name="x" * 10**6)]}}, "shards.train[0].name is 'xxx"),
    ({"shards": {"train": list(range(10**6))}}, "shards.train[0] is 0, expected an object"),
    ({"index": {"train": list(range(10**6))}}, "index.train is [0, 1, 2, 3, ...]"),
]


@pytest.mark.parametrize(("meta", "message"), MALFORMED)
def test_records_of_another_shape_are_refused_by_a_short_message(meta, message):
    with pytest.raises(CacheError, match=r"^w: .*, expected .*\. Build it again: niels-gpt") as caught:
        file_records(meta, "w")
    assert message in str(caught.value) and len(str(caught.value)) < 320


def test_records_come_in_the_order_of_the_checksums():
    one, two, three, four, five, six, seven, eight, nine, ten = (record(name=str(number)) for number in range(1, 11))
    meta = {"files": [nine, ten], "checksums": eight, "ids": {"val": seven, "train": six}}
    meta |= {"index": {"val": five, "train": four}, "shards": {"val": [three], "train": [one, two]}}
    assert [found["name"] for found in file_records(meta)] == [str(number) for number in range(1, 11)]
    assert file_records({}) == file_records({"shards": {}, "index": {}}) == []
