"""Files compressed by zstd: frames one after the other, damaged ones, and windows that take too much memory."""

from collections import Counter

import pytest
from support.data_files import lines, numbered_rows, write, zstd
from support.errors import refused

from niels_gpt.data import open_files
from niels_gpt.data.fineweb_edu import iter_fineweb_edu

ROWS = [{"text": f"row {number}"} for number in range(2_000)]


def own(folder):
    return [sample.text for sample in open_files(str(folder)).texts(source="own")]


def test_rows_of_several_frames_skippable_ones_included_are_read_in_order(tmp_path):
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    halves = [
        zstd.compress(lines(*ROWS[:901])[:-7]),
        skippable,
        zstd.compress(lines(*ROWS[:901])[-7:] + lines(*ROWS[901:])),
    ]
    path = tmp_path / "a.JSONL.zst"
    path.write_bytes(b"".join(halves))
    assert [row for _, row in numbered_rows(path)] == ROWS
    assert own(tmp_path) == [row["text"] for row in ROWS]


def test_a_mirror_may_hold_them(tmp_path):
    write(tmp_path / "HuggingFaceFW/fineweb-edu/train-0.jsonl.zst", lines(*ROWS))
    write(tmp_path / "HuggingFaceFW/fineweb-edu/train-1.json.zst", b'[{"text": "last"}]')
    texts = [sample.text for sample in iter_fineweb_edu(source_root=tmp_path)]
    assert texts == [*(row["text"] for row in ROWS), "last"]


@pytest.mark.parametrize("damage", ["cut", "changed", "more", "other"])
def test_a_damaged_file_is_an_error_that_names_it_after_the_rows_before(tmp_path, damage):
    checked = {zstd.CompressionParameter.checksum_flag: 1}
    whole = b"".join(zstd.compress(lines(*ROWS[at : at + 500]), options=checked) for at in range(0, 2_000, 500))
    at = len(whole) - 40
    damaged = {
        "cut": whole[:-9],
        "changed": whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
        "more": whole + b"junk that is no frame",
        "other": b"PK\x03\x04" + whole,
    }
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(damaged[damage])
    read = []
    with refused("E302", path):
        read += [read.append(row) for _, row in numbered_rows(path)]
    assert read == ROWS[: len(read)] and len(read) >= (0 if damage == "other" else 1_400)


def test_a_window_of_more_than_128_mebibytes_is_refused(tmp_path):
    content = lines(*ROWS)
    for log in (27, 28):
        packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: log})
        (tmp_path / f"{log}.jsonl.zst").write_bytes(packer.compress(content) + packer.flush())
    counters = Counter()
    samples = open_files(str(tmp_path)).texts(source="own", counters=counters)
    with refused("E302", "28.jsonl.zst", "134,217,728 bytes", "--long"):
        [next(samples).text for _ in range(2_001)]
    assert not counters
