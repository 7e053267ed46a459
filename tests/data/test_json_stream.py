"""JSON files larger than memory: arrays, objects and lines give the same rows."""

import json
from collections import Counter
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_files import json_blocks, json_values, numbered_rows, rows_of, write
from support.errors import refused

from niels_gpt.data import LocalFiles
from niels_gpt.data.fineweb_edu import iter_fineweb_edu


@pytest.fixture(params=[1, 7, None])
def block_bytes(request):
    """Small blocks, and those of every day."""
    with json_blocks(request.param) if request.param else nullcontext():
        yield


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'[{"n": 1}, {"n": 2}]', [{"n": 1}, {"n": 2}]),
        (b'\xef\xbb\xbf\r\n[\r\n{"n": 1}\r\n,\r\n{"n": 2}\r\n]\r\n', [{"n": 1}, {"n": 2}]),
        (b'{"n": 1}\r\n\r\n{"n": 2}', [{"n": 1}, {"n": 2}]),
        (b'\xef\xbb\xbf{"n": 1}\n{"n": 2}\n', [{"n": 1}, {"n": 2}]),
        (b'{"n": 1}', [{"n": 1}]),
        (b'\n{\n  "n": [\n    1]\n}\n', [{"n": [1]}]),
        (b'{\n"n": 1}\n{\n"n": 2}', [{"n": 1}, {"n": 2}]),  # as jq prints them
        (b"[]\n", []),
        (b"\xef\xbb\xbf", []),
        (b"", []),
    ],
)
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.usefixtures("block_bytes")
def test_a_json_file_is_an_array_an_object_or_lines(tmp_path, name, content, expected):
    assert rows_of(write(tmp_path / name, content)) == expected


def test_plain_json_files_are_no_part_of_a_mirror(tmp_path):
    for name in ("a.jsonl", "dataset_infos.json"):
        write(tmp_path / "HuggingFaceFW/fineweb-edu" / name, json.dumps({"text": name}))
    assert [page.text for page in iter_fineweb_edu(source_root=tmp_path)] == ["a.jsonl"]


def test_each_unreadable_row_is_reported_and_dropped_or_an_error(tmp_path):
    problems = []
    path = write(tmp_path / "a.json.gz", b'[{"n": 1}, [3], {"n": 3}, null]')
    assert list(numbered_rows(path, unreadable=problems.append)) == [(1, {"n": 1}), (3, {"n": 3})]
    said = [f"{path}, item {n}: expected a JSON object, found {what!r}" for n, what in ((2, "[3]"), (4, "null"))]
    assert problems == said
    with refused("E302", said[0]):
        rows_of(path)


def test_a_broken_first_line_does_no_harm_to_the_others(tmp_path):
    problems = []
    path = write(tmp_path / "a.json", b'{"n": \n{"n": 2}\n{"n": 3}')
    assert list(numbered_rows(path, unreadable=problems.append)) == [(2, {"n": 2}), (3, {"n": 3})]
    assert len(problems) == 1 and problems[0].startswith(f"{path}, line 1: expected a JSON object")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'[{"n": 1}, {"n": 2},]', ["item 3:", "found ']'"]),
        (b'[{"n": 1}, {"n": 2}', ["after item 2:", "found the end of the file"]),
        (b'[{"n": 1}, {"n": 2', ["json, item 2:", "found '{\"n\": 2'"]),
        (b'[{"n": 1}, {"n": "2', ["json, item 2:", "(Unterminated string"]),
        (b'[{"n": 1} {"n": 2}]', ["after item 1:", "found '{\"n\": 2}]'"]),
        (b"[{\"n\": 1}, {'n': 2}]", ["json, item 2:", "(Expecting property name"]),
        (b'[{"n": 1}, 12.]', ["after item 2:", "expected , or ]"]),
        (b'[{"n": 1}] [2]', ["after its array:", "found '[2]'"]),
        (b'[{"n": 1}, ' + b"[" * 3_000, ["json, item 2:", "(nested too deeply)"]),
        (b'[{"n": 1},', ["json, item 2:", "found the end of the file"]),
    ],
)
@pytest.mark.usefixtures("block_bytes")
def test_a_broken_array_is_an_error_that_names_the_place(tmp_path, content, complaint):
    path = write(tmp_path / "a.json", content)
    rows = numbered_rows(path, unreadable=lambda _: None)  # tolerance does not help: what follows is lost
    assert next(rows) == (1, {"n": 1})
    with refused("E302", "a.json", *complaint):
        list(rows)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("levels", [200, 201])
def test_a_row_of_201_levels_is_not_read_whatever_python_could(tmp_path, name, levels):
    row = b'{"n": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"
    content = b'[{"n": 1}, ' + row + b"]" if name == "a.json" else b'{"n": 1}\n' + row + b"\n"
    problems = []
    rows = list(numbered_rows(write(tmp_path / name, content), unreadable=problems.append))
    assert [number for number, _ in rows] == [1, 2][: 1 + (levels == 200)]
    assert [("more than 200 levels" in problem) for problem in problems] == [True] * (levels == 201)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (
            b'{"a": "caf\xe9 \xe2\x82", "b": {"c": ["\xff"]}, "\xe9": "\\ud83d\\ude42"}',
            {"a": "caf\ufffd \ufffd", "b": {"c": ["\ufffd"]}, "\ufffd": "\U0001f642"},
        ),
        (
            rb'{"a": [{"b": "x\ud83d", "c": "\ud83d\ude42"}], "\ude42": "\uD83D"}',
            {"a": [{"b": "x\ufffd", "c": "\U0001f642"}], "\ufffd": "\ufffd"},
        ),
    ],
)
def test_what_has_no_utf8_is_replaced_at_any_depth_and_counted_once_a_row(tmp_path, item, expected, counters):
    other = b'{"a": "\xc3\xa9"}'
    for name, content in (("a.json", b"[" + item + b",\n" + other + b"]"), ("a.jsonl", item + b"\n" + other)):
        counters.clear()
        assert rows_of(write(tmp_path / name, content), counters=counters) == [expected, {"a": "é"}]
        assert counters == {"repaired_utf8": 1}


TEXTS = st.text(st.characters() | st.sampled_from('"\\\ud83d\ude42\ufeff\u2028\r\n'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ROWS = st.dictionaries(TEXTS, VALUES, max_size=3)


@settings(max_examples=60)
@given(st.lists(st.tuples(ROWS, TEXTS), min_size=1, max_size=6), st.integers(1, 40), st.booleans(), st.booleans())
def test_the_samples_are_the_same_however_the_rows_are_written_and_cut(
    tmp_path_factory,
    drawn,
    size,
    escaped,
    spread,
):
    folder = tmp_path_factory.mktemp("rows")
    rows = [{**row, "text": text} for row, text in drawn]
    # Half a surrogate pair has no utf-8: escaped it is repaired, and as such it is three bytes to replace.
    lines = b"".join(json.dumps(row, ensure_ascii=escaped).encode("utf-8", "surrogatepass") + b"\n" for row in rows)
    array = json.dumps(rows, ensure_ascii=escaped, indent=1 if spread else None).encode("utf-8", "surrogatepass")
    files = {"a.jsonl": lines, "a.json": lines, "a.jsonl.gz": lines, "b.json": array, "b.json.gz": array}
    read = []
    with json_blocks(size):
        for name, content in files.items():
            counters = Counter()
            found = LocalFiles(folder, (write(folder / name, content),), 0)
            samples = list(found.texts(source="own", counters=counters))
            read.append(([(s.text, s.meta | {"path": ""}) for s in samples], counters))
        assert escaped or json_values(lines) == json_values(array)
    assert len(read[0][0]) == len(rows) and all(other == read[0] for other in read)
    if not any("\ud800" <= char <= "\udfff" for _, text in drawn for char in text):
        assert [text for text, _ in read[0][0]] == [text for _, text in drawn]
