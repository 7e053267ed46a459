"""Parsers of files that anybody may have written: a value that is right, or a documented error."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzed import JSON, damaged, fuzz, written

from niels_gpt.cache import CacheError
from niels_gpt.cache.mmap import load_idx, mmap_tokens
from niels_gpt.data.files import json_stream
from niels_gpt.storage.fileio import canonical_json
from niels_gpt.storage.meta_json import file_records, meta_bytes, meta_crc32, parse_object


@fuzz(100)
@given(raw=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()).flatmap(damaged))
def test_what_is_parsed_is_what_json_says_or_a_value_error(raw: bytes) -> None:
    try:
        found = parse_object(raw)
    except ValueError:
        return
    assert found == json.loads(raw) and canonical_json(found)


@fuzz(100)
@given(value=JSON, around=st.sampled_from([None, "shards", "index", "ids", "checksums", "files"]), deep=st.booleans())
def test_records_of_any_json_are_good_or_a_cache_error(value: Any, around: str | None, deep: bool) -> None:
    meta = value if around is None else {around: {"train": [value]} if deep else value}
    with contextlib.suppress(CacheError):
        for record in file_records(meta):
            assert isinstance(record["bytes"], int) and len(record["sha256"]) == 64
            assert ".." not in record["name"].split("/") and not record["name"].startswith("/")


@fuzz(100)
@given(meta=st.dictionaries(st.text(max_size=9), JSON, max_size=4), data=st.data())
def test_one_changed_byte_of_any_meta_is_seen(meta: dict[str, Any], data: st.DataObject) -> None:
    try:
        raw = bytearray(meta_bytes(meta))
    except UnicodeEncodeError:
        return
    stored, found = meta_crc32(bytes(raw))
    assert stored == found and json.loads(raw)["meta_crc32"] == f"{found:08x}"
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    stored, found = meta_crc32(bytes(raw))
    assert stored is None or stored != found


def npy(offsets: list[int]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(offsets, dtype="<i8"))
    return file.getvalue()


OFFSETS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 40), max_size=6)
NPY = OFFSETS.map(npy) | st.lists(st.integers(1, 40), max_size=6, unique=True).map(
    lambda found: npy([0, *sorted(found)])
)


@fuzz(150)
@given(content=NPY | NPY.flatmap(damaged) | st.binary(max_size=200), num_tokens=st.integers(0, 50))
def test_offsets_are_those_that_numpy_reads_and_good_or_a_cache_error(content: bytes, num_tokens: int) -> None:
    with written({"train_idx.npy": content}) as folder:
        try:
            found = load_idx(folder / "train_idx.npy", num_tokens=num_tokens)
        except CacheError:
            return
        assert found[0] == 0 and np.all(found[1:] > found[:-1]) and found[-1] < num_tokens
        assert np.array_equal(found, np.load(folder / "train_idx.npy", allow_pickle=False))


@fuzz(100)
@given(content=st.binary(max_size=40), expected=st.none() | st.integers(0, 40))
def test_a_token_file_is_its_ids_or_a_cache_error(content: bytes, expected: int | None) -> None:
    with written({"train_tokens.bin": content}) as folder:
        try:
            found = mmap_tokens(folder / "train_tokens.bin", expected_bytes=expected)
        except CacheError:
            assert len(content) % 2 or not content or expected not in (None, len(content))
            return
        assert found.tobytes() == content


# --- JSON of anybody's text --------------------------------------------------------------------------------------

VALUES = st.lists(JSON, max_size=4)


def spelled(values: list[Any], how: str) -> bytes:
    if how == "lines":
        return b"".join(json.dumps(value).encode() + b"\n" for value in values)
    return json.dumps(values, indent=2 if how == "indented" else None).encode()


@fuzz(100)
@given(
    raw=st.builds(spelled, VALUES, st.sampled_from(("lines", "array", "indented"))).flatmap(damaged), block=st.data()
)
def test_damaged_json_files_give_values_or_a_value_error(raw: bytes, block: st.DataObject) -> None:
    with contextlib.suppress(ValueError), pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_stream, "BLOCK_BYTES", block.draw(st.sampled_from((1, 7, 1 << 16))))
        for number, _, _ in json_stream.iter_values(io.BytesIO(raw), "x"):
            assert number >= 0
