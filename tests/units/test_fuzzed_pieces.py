"""Records of any JSON, and JSON files with any damage: good, or refused."""

import contextlib
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzed import JSON, damaged, fuzz

from niels_gpt.cache import CacheError
from niels_gpt.data.files import json_stream
from niels_gpt.storage.meta_json import file_records


@fuzz(100)
@given(value=JSON, around=st.sampled_from([None, "shards", "index", "ids", "checksums", "files"]), deep=st.booleans())
def test_records_of_any_json_are_good_or_a_cache_error(value: Any, around: str | None, deep: bool) -> None:
    meta = value if around is None else {around: {"train": [value]} if deep else value}
    with contextlib.suppress(CacheError):
        for record in file_records(meta):
            assert isinstance(record["bytes"], int) and len(record["sha256"]) == 64
            assert ".." not in record["name"].split("/") and not record["name"].startswith("/")


VALUES = st.lists(JSON, max_size=4)


def spelled(values, how):
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
