"""Values of a JSON array or of several objects, one after the other, from a file that is read in blocks."""

import io
import json
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st
from support.data_files import json_blocks, json_values
from support.errors import refused

from niels_gpt.data.files import json_stream


def test_a_broken_item_is_noticed_before_the_rest_is_read(monkeypatch):
    monkeypatch.setattr(json_stream, "BLOCK_BYTES", 100)
    file = io.BytesIO(b'[{"n": 1}, {"n": oops}, ' + b'{"n": 1}, ' * 10_000)
    with refused("E302", "item 2"):
        list(json_stream.iter_values(file, "x"))
    assert file.tell() < 500


class LoggedFile(io.BytesIO):
    """Remembers the largest read that was asked for."""

    largest = 0

    def read(self, size=-1, /):
        self.largest = max(self.largest, size or 0)
        return super().read(size)


def test_an_array_of_3_megabytes_comes_whole_through_little_memory(monkeypatch):
    monkeypatch.setattr(json_stream, "BLOCK_BYTES", 4_096)
    rows = [{"number": number, "text": 'é\\"\u2028' * (number % 97)} for number in range(1, 20_001)]
    file = LoggedFile(json.dumps(rows, ensure_ascii=False).encode())
    assert len(file.getvalue()) > 3_000_000
    tracemalloc.start()
    try:
        for row, (number, value, _) in zip(rows, json_stream.iter_values(file, "x"), strict=True):
            assert value == row and number == row["number"]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert file.largest <= 2 * 4_096 and peak_bytes < 500_000


def test_a_value_larger_than_a_block_is_decoded_a_few_times_only(monkeypatch):
    monkeypatch.setattr(json_stream, "BLOCK_BYTES", 10)
    file = io.BytesIO(b'[{"text": "' + b"x" * 100_000 + b'"}, {"text": "y"}]')
    reads = []
    monkeypatch.setattr(file, "read", lambda size: reads.append(size) or io.BytesIO.read(file, size))
    assert [len(value["text"]) for _, value, _ in json_stream.iter_values(file, "x")] == [100_000, 1]
    assert len(reads) < 25  # the window doubles


def test_every_cut_of_numbers_literals_and_escapes_reads_the_same(monkeypatch):
    content = rb'[-12.5e+3, 0, true, false, null, "\ud83d\ude42\\\"\u00e9", {"a": [1, -Infinity]}, 1E5]'
    for size in range(1, len(content) + 2):
        monkeypatch.setattr(json_stream, "BLOCK_BYTES", size)
        assert json_values(content) == json.loads(content)


STRINGS = st.text(st.sampled_from('"\\{}[],: x\n\u20ac'), max_size=9)
NESTED = st.recursive(STRINGS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=2))


@given(st.lists(NESTED, min_size=1, max_size=5), st.integers(1, 30), st.integers(1, 20), st.booleans())
def test_what_is_too_large_in_an_array_is_passed_over_wherever_blocks_end(values, limit, block, spread):
    content = json.dumps(values, ensure_ascii=False, indent=1 if spread else None)
    items = [text for _, _, text in json_stream.iter_values(io.BytesIO(content.encode()), "x")]
    expected = [value if len(item.encode()) <= limit else None for value, item in zip(values, items, strict=True)]
    with json_blocks(block):
        found = json_stream.iter_values(io.BytesIO(content.encode()), "x", limit)
        assert [value if text else None for _, value, text in found] == expected
