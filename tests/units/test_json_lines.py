"""Lines of JSON: what orjson reads is what Python's json reads, and all else is Python's to decide."""

import io
import json
import logging
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.json_values import JSON

from niels_gpt.data.files import rows
from niels_gpt.data.files.rows import numbered_rows
from niels_gpt.data.files.text import line_blocks, lines_of

LIMIT = 4_000
ODD = [
    b"NaN", b"-Infinity", b"Infinity", b"Inf", b"1e400", b"-0", b"-0.0", b"1E5", b"01", b"1.", b"+1", b"0.1e-400",
    b"18446744073709551615", b"18446744073709551616", b"-9223372036854775808", b"-9223372036854775809", b"9" * 40,
    b"1" * 400, b"9" * 4_301, b"123456789012345678901.0", b"1e19", b"0.30000000000000004", b"2.2250738585072011e-308",
    rb'"\ud83d"', rb'"\ud83d\ude00"', rb'"\ude00\ud83d"', rb'"\uD83D"', rb'"\u0000"', rb'"\/"', rb'"\x41"', rb'"\u12"',
    b'"\x00"', b'"\x1f"', b'"\x7f"', b'"\xff"', b'"\xed\xa0\xbd"', b'"\xf4\x90\x80\x80"', b'"\xc0\xaf"', b'"\t"',
    b"\xef\xbb\xbf", b"[" * 150 + b"]" * 150, b"[" * 199 + b"]" * 199, b"[" * 200 + b"]" * 200,
    b"[" * 1_500 + b"]" * 1_500, b'{"a":' * 250 + b"1" + b"}" * 250, b'"' + b"[" * 250 + b'"', b"{}", b"[]", b"'a'",
    b"true", b"True", b"null", b"// a", b"/**/1", b'{"a":1,}', b"[1,]", b'"' + b"x" * LIMIT + b'"',
]  # fmt: skip
KEYS = [b'"text"', b'"a"', rb'"te\u0078t"', rb'"\ud83d"', b'""', b"text", b'"a' + b"y" * 80 + b'"']
VALUES = (
    st.sampled_from(ODD)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.text().map(lambda text: json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass"))
)
PAIRS = st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=4)  # equal keys too
OBJECTS = PAIRS.map(lambda pairs: b"{" + b", ".join(key + b": " + value for key, value in pairs) + b"}")
LINES = OBJECTS | VALUES | st.sampled_from([b"", b" ", b"\x0b", b"\r", b"\x00", b"[", b'[{"a": 1},', b"{} {}"])


@st.composite
def mutated(draw):
    """Return a line with a few bytes put in, taken out or replaced."""
    line = draw(LINES)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(line)))
        put = draw(st.sampled_from([b"", b'"', b"\\", b",", b"}", b"{", b"[", b"\xff", b"\0", b"1", b" ", b"\xc2\x85"]))
        line = line[:at] + put + line[at + draw(st.integers(0, 2)) :]
    return draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"  "])) + line.replace(b"\n", b"") + b"\n"


class Kept(logging.Handler):
    """Keeps the messages that are logged."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def read(path):
    """Return rows, problems, counters and messages; repr tells 1 from 1.0 and True, and shows the order of keys."""
    counters = Counter()
    problems = []
    log, logger = Kept(), logging.getLogger("niels_gpt.data.files.text")
    logger.addHandler(log)
    try:
        how = {"unreadable": problems.append, "max_document_bytes": LIMIT}
        found = [(number, repr(row)) for number, row in numbered_rows(path, counters=counters, **how)]
    finally:
        logger.removeHandler(log)
    return found, [(problem, problem.reason, problem.rows) for problem in problems], counters, log.messages


def read_by_python(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "parsed", lambda line: None)
        return read(path)


@settings(max_examples=400)
@given(content=st.lists(mutated(), max_size=6).map(b"".join))
def test_rows_counters_problems_and_messages_are_those_of_pythons_parser(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(content)
    assert read(path) == read_by_python(path)


@pytest.mark.parametrize("value", ODD)
def test_each_odd_value_is_read_as_by_pythons_parser_in_a_row_and_nested(tmp_path, value):
    path = tmp_path / "lines.jsonl"
    shapes = [
        b'{"text": %s}',
        b'{"id": "a", "b": [0.5, %s]}',
        b'{"b": {"c": %s}, "text": "t"}',
        b"%s",
        b'{"text": "a", "text": %s}',
    ]
    path.write_bytes(b"".join(shape % value + b"\n" for shape in shapes))
    assert read(path) == read_by_python(path)


def test_usual_rows_are_not_parsed_by_python(tmp_path, monkeypatch):
    """Chats, scores and nested fields are as fast as texts."""
    usual = [
        {"text": "Grüße [1] {2}", "id": "a", "score": 0.5, "n": 3, "ok": True, "none": None},
        {"messages": [{"role": "user", "content": "hi"}], "meta": {"scores": [1.5, 2.5]}},
        {"text": "[{" * 300},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in usual))
    monkeypatch.setattr(rows.json, "loads", None)
    assert [row for _, row in numbered_rows(tmp_path / "a.jsonl")] == usual


def test_a_line_over_the_limit_is_passed_over_and_no_other_one():
    for content in (b"aaaa\nb\ncccccc", b"aaaaa\nb\ncccc", b"a\n\nbbbbbbbbbbbbb\nc\n"):
        expected = [line if len(line) <= 5 else None for line in content.splitlines(keepends=True)]
        assert [line for _, line in lines_of(io.BytesIO(content), 5)] == expected


class Dripping(io.BytesIO):
    """Gives a few bytes at a time."""

    def __init__(self, content, step):
        super().__init__(content)
        self._step = step

    def read1(self, size=-1, /):
        return super().read1(self._step)


@given(
    content=st.lists(st.sampled_from([b"a", b"\n", b"\r", b"bb", b"\xc2\x85"]), max_size=30).map(b"".join),
    step=st.integers(1, 40),
    limit=st.integers(1, 8),
)
def test_lines_do_not_depend_on_where_a_block_ends(content, step, limit):
    found, numbers = [], []
    for first, lines in line_blocks(Dripping(content, step), limit):
        numbers += range(first, first + len(lines))
        found += lines
    expected = list(io.BytesIO(content))
    assert found == [line if len(line) <= limit else None for line in expected]
    assert numbers == list(range(1, len(expected) + 1))
