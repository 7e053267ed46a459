"""Shards are one stream of ids cut at exact sizes, whatever the sizes of the writes.

Run: pytest tests/test_shard_writer.py
"""

import hashlib
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.build.writer import OffsetsWriter, ShardWriter

TOKENS = st.lists(st.integers(0, 65535), max_size=12)


def write_shards(root: Path, writes: list[list[int]], shard_bytes: int) -> list[dict[str, Any]]:
    """Write some arrays of ids one after another and return the records of the shards."""
    with ExitStack() as files:
        writer = ShardWriter(root, "train", files, shard_bytes=shard_bytes)
        for ids in writes:
            writer.write(np.array(ids, dtype=np.uint16))
        return writer.close()


def test_five_ids_in_shards_of_two(tmp_path: Path) -> None:
    records = write_shards(tmp_path, [[1, 2, 3], [4], [5]], shard_bytes=4)
    assert [(record["name"], record["tokens"], record["bytes"]) for record in records] == [
        ("train/shard_00000.bin", 2, 4),
        ("train/shard_00001.bin", 2, 4),
        ("train/shard_00002.bin", 1, 2),
    ]
    assert (tmp_path / "train" / "shard_00001.bin").read_bytes() == b"\x03\x00\x04\x00"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(writes=st.lists(TOKENS, max_size=8), shard_bytes=st.integers(2, 40))
def test_any_writes_and_any_shard_size_give_the_stream_in_full_shards(
    writes: list[list[int]], shard_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        records = write_shards(Path(name), writes, shard_bytes)
        contents = [Path(name, record["name"]).read_bytes() for record in records]
        assert len(list(Path(name, "train").iterdir())) == len(records)
    assert np.frombuffer(b"".join(contents), dtype="<u2").tolist() == [token for ids in writes for token in ids]
    assert all(len(content) == shard_bytes // 2 * 2 for content in contents[:-1])
    assert all(0 < len(content) <= shard_bytes for content in contents)
    for number, (record, content) in enumerate(zip(records, contents, strict=True)):
        assert record == {
            "name": f"train/shard_{number:05d}.bin",
            "tokens": len(content) // 2,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }


def test_a_stream_that_ends_with_a_full_shard_leaves_no_empty_one(tmp_path: Path) -> None:
    assert len(write_shards(tmp_path, [[1, 2], [3, 4]], shard_bytes=4)) == 2


def test_no_ids_give_no_shard_and_an_empty_folder(tmp_path: Path) -> None:
    assert write_shards(tmp_path, [[], []], shard_bytes=4) == []
    assert list((tmp_path / "train").iterdir()) == []


def test_a_strided_view_is_written_as_its_values(tmp_path: Path) -> None:
    with ExitStack() as files:
        writer = ShardWriter(tmp_path, "val", files, shard_bytes=64)
        writer.write(np.arange(10, dtype=np.uint16)[::3])
        writer.close()
    assert (tmp_path / "val" / "shard_00000.bin").read_bytes() == b"\x00\x00\x03\x00\x06\x00\x09\x00"


@pytest.mark.parametrize("shard_bytes", [1, 0, -4])
def test_a_shard_size_below_one_token_is_refused(tmp_path: Path, shard_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"shard_bytes={shard_bytes}: expected at least 2"):
        write_shards(tmp_path, [[1]], shard_bytes=shard_bytes)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(offsets=st.lists(st.integers(0, 2**62), max_size=20))
def test_offsets_are_a_npy_file_that_numpy_reads(offsets: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as files:
        writer = OffsetsWriter(Path(name), "index/train_docs.npy", files)
        for offset in offsets:
            writer.append(offset)
        record = writer.close()
        path = Path(name, "index", "train_docs.npy")
        assert np.load(path).tolist() == offsets and np.load(path).dtype == np.int64
        content = path.read_bytes()
    assert record == {
        "name": "index/train_docs.npy",
        "entries": len(offsets),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def test_more_offsets_than_are_held_in_memory_are_all_written(tmp_path: Path) -> None:
    with ExitStack() as files:
        writer = OffsetsWriter(tmp_path, "idx.npy", files)
        for offset in range(70_000):
            writer.append(offset)
        writer.close()
    assert np.array_equal(np.load(tmp_path / "idx.npy"), np.arange(70_000))
