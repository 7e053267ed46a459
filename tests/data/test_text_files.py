"""Encodings, limits, links and odd files, of every loader."""

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_files import kept_of_the_hub, lines, numbered_rows, write, write_parquet, zstd
from support.errors import refused
from support.readings import found_source

from niels_gpt.data import LocalFiles, open_files
from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.gutenberg import iter_gutenberg
from niels_gpt.data.oasst1 import iter_oasst1_sft
from niels_gpt.data.roam import iter_notes, list_roam_paths, roam_dir_of
from niels_gpt.data.wikitext import iter_wikitext
from niels_gpt.settings import Settings
from niels_gpt.storage.fileio import open_for_reading

WEB, WIKI, DOLLY = "HuggingFaceFW/fineweb-edu", "Salesforce/wikitext", "databricks/databricks-dolly-15k"
OASST = "OpenAssistant/oasst1"


def own(folder, counters, **more):
    samples = open_files(str(folder)).texts(source="own", counters=counters, **more)
    return [sample.text for sample in samples]


MARKS = ["utf-8-sig", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]
TEXT = "Grüße, 你好 \U0001f642\r\nand a second line\n"


def with_mark(text, encoding):
    return text.encode(encoding) if encoding == "utf-8-sig" else f"\ufeff{text}".encode(encoding)


@pytest.mark.parametrize("encoding", MARKS)
@pytest.mark.parametrize("name", ["a.txt", "a.md.gz", "a.md.zst", "a.jsonl", "a.json", "a.json.gz"])
def test_a_byte_order_mark_says_the_encoding_and_is_no_text(tmp_path, name, encoding, counters):
    text = TEXT
    if "json" in name:
        rows = [{"text": TEXT}, {"text": "two"}]
        text = json.dumps(rows, ensure_ascii=False) if name < "a.jsonl" else lines(*rows).decode()
    write(tmp_path / name, with_mark(text, encoding))
    assert own(tmp_path, counters) == ([TEXT, "two"] if "json" in name else [TEXT])
    assert counters == {"byte_order_mark": 1}


@pytest.mark.parametrize("encoding", MARKS)
def test_lines_of_a_mirror_honour_a_byte_order_mark(tmp_path, encoding, counters):
    write(tmp_path / WIKI / "train.txt", with_mark(" = 你好 = \n\nText\n", encoding))
    found = [line.text for line in iter_wikitext(split="train", source_root=tmp_path, counters=counters)]
    assert found == [" = 你好 = \n", "Text\n"] and counters == {"byte_order_mark": 1, "blank": 1}


def test_thirty_files_of_another_encoding_are_kept_and_counted_as_repaired_with_the_first_named(
    tmp_path, caplog, counters
):
    for number in range(30):
        write(tmp_path / f"{number:02}.txt", f"Grüße {number}".encode("latin-1"))
    assert own(tmp_path, counters) == [f"Gr\ufffd\ufffde {number}" for number in range(30)]
    assert counters == {"repaired_utf8": 30}
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/00.txt: not UTF-8 at byte 2") and "repaired_utf8" in message


def test_broken_utf16_is_replaced_and_counted_with_its_document(tmp_path, counters):
    write(tmp_path / "a.txt", b"\xff\xfeo\0k\0\x00\xd8x\0" + b"!")  # half a pair, and half a character at the end
    assert own(tmp_path, counters) == ["ok\ufffdx\ufffd"]
    assert counters == {"repaired_utf8": 1, "byte_order_mark": 1}


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "lines.json", "a.parquet"]
)
def test_a_row_over_the_limit_costs_that_row_alone(tmp_path, name, caplog, counters):
    rows = [{"text": "one"}, {"text": "x" * 5_000}, {"text": "three"}, {"text": "y" * 990}]
    if name.endswith("parquet"):
        write_parquet(tmp_path / name, {"text": [row["text"] for row in rows]})
    else:
        write(tmp_path / name, json.dumps(rows).encode() if name in ("a.json", "a.json.gz") else lines(*rows))
    assert own(tmp_path, counters, max_document_bytes=1_010) == ["one", "three", "y" * 990]
    assert counters == {"too_large": 1}
    assert len(caplog.messages) == 1 and f"{tmp_path}/{name}" in caplog.messages[0] and "1,010" in caplog.messages[0]


def test_a_row_group_with_a_page_over_the_limit_is_left_out_whole_with_its_number_of_rows(tmp_path, caplog, counters):
    texts = ["a", "b" * 3_000_000, "c", "d"]
    write_parquet(tmp_path / "a.parquet", {"text": texts, "id": [1, 2, 3, 4]}, row_group_size=2)
    assert own(tmp_path, counters, max_document_bytes=500_000) == ["c", "d"]
    assert counters == {"too_large": 2} and "rows 1 to 2: a page of" in caplog.text


def test_columns_that_are_not_read_have_no_limit(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"text": ["a"], "raw": ["b" * 3_000_000]})
    assert own(tmp_path, Counter(), max_document_bytes=1_000) == ["a"]


MEASURE = """
import sys
from collections import Counter
from pathlib import Path
from niels_gpt.data import open_files
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
counters = Counter()
warm = open_files(sys.argv[4], base=folder).texts(source="x")
assert [sample.text for sample in warm] == ["warm"]
before = peak()
samples = open_files(sys.argv[3], base=folder).texts(source="x", counters=counters, max_document_bytes=limit)
texts = [sample.text[:9] for sample in samples]
print(repr((texts, dict(counters), peak() - before)))
"""


def measured(path, limit):
    """Return the starts of a file's texts, the counters, and by how many bytes reading it raised the peak of memory."""
    warm = path.parent / f"warm{'.parquet' if path.name.endswith('parquet') else '.jsonl'}"
    write_parquet(warm, {"text": ["warm"]}) if warm.suffix == ".parquet" else write(warm, lines({"text": "warm"}))
    command = [sys.executable, "-c", MEASURE, str(path.parent), str(limit), path.name, warm.name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    found = eval(done.stdout)
    return found


CONSTANT = 8 << 20  # bytes: buffers, modules that load late
BOMBS = {
    "a.jsonl.gz": (b'{"text": "before"}\n{"text": "', b'"}\n{"text": "after"}\n'),
    "a.json.gz": (b'[{"text": "before"}, {"text": "', b'"}, {"text": "after"}]'),
    "a.jsonl.zst": (b'{"text": "before"}\n{"text": "', b'"}\n{"text": "after"}\n'),
    "a.parquet": (b"before", b"after"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "a.json.gz")) for n in BOMBS])
def test_a_bomb_takes_memory_by_the_limit_and_not_by_its_size(tmp_path, name):
    size, limit = 50 << 20, 2 << 20
    (first, last), path = BOMBS[name], tmp_path / name
    if name.endswith("parquet"):
        texts = [first.decode(), "x" * size, last.decode()]
        write_parquet(path, {"text": texts}, row_group_size=1, compression="zstd")
    else:
        pack = {".gz": partial(gzip.open, compresslevel=1), ".zst": zstd.open}[path.suffix]
        with pack(path, "wb") as file:
            file.writelines([first, *[b"x" * (1 << 20)] * (size >> 20), last])
    assert path.stat().st_size < 1 << 20
    texts, counters, grown = measured(path, limit)
    assert (texts, counters) == (["before", "after"], {"too_large": 1})
    assert grown < 8 * limit + CONSTANT < size


@pytest.mark.slow
def test_a_line_that_takes_long_to_skip_is_named_while_it_is_read(tmp_path, caplog):
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(b"x" * (1 << 20), 1) * 4_097 + gzip.compress(b'\n{"text": "b"}')
    )
    with caplog.at_level("INFO"):
        assert own(tmp_path, counters := Counter(), max_document_bytes=1_000) == ["b"]
    assert counters == {"too_large": 1} and f"{tmp_path}/a.jsonl.gz, line 1: more than 4 GiB" in caplog.text


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.txt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("a.json", "a.parquet"))]
)
def test_a_document_takes_at_most_eight_times_its_size(tmp_path, name):
    size, path = 20 << 20, tmp_path / name
    text = b"x" * size
    if name.endswith("parquet"):
        write_parquet(path, {"text": [text.decode()]})
    else:
        write(path, {"a.txt": text, "a.json": b'[{"text": "%b"}]' % text}.get(name, b'{"text": "%b"}' % text))
    texts, counters, grown = measured(path, size + 100)
    assert (texts, counters) == (["x" * 9], {}) and grown < 8 * size + CONSTANT


@pytest.mark.parametrize("kind", [pytest.param("list", marks=pytest.mark.slow), "map"])
def test_a_row_of_parquet_that_repeats_a_text_is_measured_before_it_is_written_out(tmp_path, kind):
    import pyarrow as pa

    def turns(number):
        if kind == "map":
            return [("role", "user"), *[("content", "x" * 1_000_000)] * number]
        return [{"role": "user", "content": "x" * 1_000_000}] * number

    columns = {"messages": [turns(1), turns(300), turns(1)], "id": ["a", "b", "c"]}
    of_map = pa.map_(pa.string(), pa.string())
    kinds = {"map": of_map, "list": pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))}
    table = pa.table(columns, schema=pa.schema([("messages", kinds[kind]), ("id", pa.string())]))
    write_parquet(tmp_path / "a.parquet", table)
    del table
    before, problems = pa.total_allocated_bytes(), []
    rows = numbered_rows(tmp_path / "a.parquet", unreadable=problems.append, max_document_bytes=5_000_000)
    for number, row in rows:
        assert row == {"messages": turns(1), "id": columns["id"][number - 1]}
        assert pa.total_allocated_bytes() - before < 40_000_000
    assert len(problems) == 1 and problems[0].reason == "too_large" and ", row 2: " in problems[0]


CHAT = {"instruction": "Q", "response": "A", "context": ""}
MESSAGES = [
    {"message_tree_id": "t", "message_id": "p", "parent_id": None, "text": "Q", "role": "prompter", "lang": "en"},
    {"message_tree_id": "t", "message_id": "a", "parent_id": "p", "text": "A", "role": "assistant", "lang": "en"},
]


Loader = Callable[..., Iterator[Any]]
SOURCES = [
    (iter_fineweb_edu, WEB, [{"text": "good"}]),
    (partial(iter_wikitext, split="train"), WIKI, [{"text": "good"}]),
    (iter_gutenberg, "gutenberg", [{"text": "good"}]),
    (partial(iter_dolly_sft, shuffle=False), DOLLY, [CHAT]),
    (iter_oasst1_sft, OASST, MESSAGES),
]
EACH_SOURCE = pytest.mark.parametrize(("load", "folder", "good"), SOURCES, ids=[folder for _, folder, _ in SOURCES])


@EACH_SOURCE
def test_bad_rows_of_a_mirror_are_counted_and_named_and_the_rest_is_read(
    tmp_path: Path,
    load: Loader,
    folder: str,
    good: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    counters: Counter[str],
) -> None:
    deep = b'{"text": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n"
    huge = lines({"text": "x" * 200_000})
    path = write(tmp_path / folder / "train.jsonl", deep + lines({"title": 1}, {"title": 2}) + huge + lines(*good))
    assert len(list(load(source_root=tmp_path, counters=counters, max_document_bytes=150_000))) == 1
    assert counters == {"unreadable_row": 1, "missing_field": 2, "too_large": 1}
    where = [message.split(": ")[0] for message in caplog.messages]
    assert where == [f"{path}, line 1", f"{path}, row 2", f"{path}, line 4"]
    write(path, b"not json\n" + lines({"title": 1}))  # nothing to be used is an error
    with refused("E303", "(1 missing_field, 1 unreadable_row)", path, "row 2"):
        list(load(source_root=tmp_path))


def test_passed_over_rows_do_not_shift_the_index(tmp_path):
    write(tmp_path / "gutenberg/a.jsonl", b"[]\n" + lines({"text": "one"}, {"title": 1}))
    write(tmp_path / "gutenberg/b.txt", b"x" * 5_000)
    write(tmp_path / "gutenberg/c.txt", b"book")
    write(tmp_path / "gutenberg/d.jsonl", lines({"text": "two"}))
    found = [(book.text, book.meta["index"]) for book in iter_gutenberg(source_root=tmp_path, max_document_bytes=1_000)]
    assert found == [("one", 1), ("book", 4), ("two", 5)]


def test_a_large_note_is_counted_and_named(tmp_path, caplog, counters):
    write(tmp_path / "a.md", b"x" * 5_000)
    write(tmp_path / "sub/b.md", b"note")
    notes = iter_notes(list_roam_paths(tmp_path), folder=tmp_path, counters=counters, max_document_bytes=4_999)
    assert [(note.text, note.meta) for note in notes] == [("note", {"path": "sub/b.md"})]
    assert counters == {"too_large": 1} and f"{tmp_path}/a.md" in caplog.text


@given(st.text(st.characters(), max_size=40), st.integers(1, 300))
def test_the_limit_of_a_hub_row_is_that_of_its_line_in_a_snapshot(text, limit):
    row = {"text": text, "n": [1, None, {"deep": 2.5}]}
    line = (json.dumps(row, ensure_ascii=False) + "\n").encode(errors="replace")
    counters = Counter()
    kept = kept_of_the_hub([row], counters, limit)
    assert kept == ([row] if len(line) <= limit else []) and counters["too_large"] == 1 - len(kept)


@EACH_SOURCE
def test_links_in_a_mirror_are_followed_on_request_only(
    tmp_path: Path,
    load: Loader,
    folder: str,
    good: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    counters: Counter[str],
) -> None:
    write(tmp_path / "secret/train.jsonl", lines(*({**row, "message_tree_id": "s"} for row in good)))
    write(tmp_path / "mirror" / folder / "train.jsonl", lines(*good))
    (tmp_path / "mirror" / folder / "train-2.jsonl").symlink_to(tmp_path / "secret/train.jsonl")
    (tmp_path / "mirror" / folder / "more").symlink_to(tmp_path / "secret")
    (tmp_path / "mirror" / folder / "loop").symlink_to("..")
    (tmp_path / "named").symlink_to("mirror")
    assert len(list(load(source_root=tmp_path / "named", counters=counters))) == 1
    assert counters == {"links_not_followed": 3}
    assert len(caplog.messages) == 1 and "loop: a symbolic link, which is not followed" in caplog.text
    assert len(list(load(source_root=tmp_path / "mirror", follow_links=True))) == 2  # each file once


@EACH_SOURCE
def test_a_dataset_that_is_a_link_is_an_error_that_says_how_to_follow_it(
    tmp_path: Path, load: Loader, folder: str, good: list[dict[str, Any]]
) -> None:
    write(tmp_path / "out" / Path(folder).name / "train.jsonl", lines(*good))
    link = tmp_path / "mirror" / Path(folder).parts[0]
    link.parent.mkdir()
    link.symlink_to(tmp_path / "out" if "/" in folder else tmp_path / "out" / folder)
    with refused("E301", link, "--follow-links", kind=FileNotFoundError):
        load(source_root=tmp_path / "mirror")
    assert len(list(load(source_root=tmp_path / "mirror", follow_links=True))) == 1


def test_links_among_notes_are_followed_on_request_only(tmp_path):
    write(tmp_path / "secret.md", b"secret")
    write(tmp_path / "mirror/roam/a.md", b"a")
    (tmp_path / "mirror/roam/c.md").symlink_to(tmp_path / "secret.md")
    links = []
    assert [Path(path).name for path in list_roam_paths(tmp_path / "mirror/roam", links=links)] == ["a.md"]
    assert links == [tmp_path / "mirror/roam/c.md"]
    assert len(list_roam_paths(tmp_path / "mirror/roam", follow_links=True)) == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other/roam").symlink_to(tmp_path / "mirror/roam")
    with refused("E301", "--follow-links", kind=FileNotFoundError):
        roam_dir_of(tmp_path / "other", roam_dir="")
    assert roam_dir_of("hub", roam_dir=tmp_path / "other/roam") == tmp_path / "other/roam"
    os.remove(tmp_path / "mirror/roam/a.md")
    with refused("E301", "c.md", "--follow-links", kind=FileNotFoundError):
        found_source(Settings(source_root=str(tmp_path / "mirror")), "roam")


def test_pipes_and_devices_are_never_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for name in ("pipe.txt", "zero.txt"):
        with refused("E205", name):
            open_for_reading(tmp_path / name, follow_links=True)
        with refused("E205", name):
            list(LocalFiles(tmp_path, (tmp_path / name,), 0).texts(source="own"))


DEEP = b'{"a": ' + b'{"b": ' * 900 + rb'"\ud83d"' + b"}" * 900 + b"}"  # Python's decoder reads it, its functions do not


@pytest.mark.parametrize("bad", [DEEP, b"[" * 20_000 + b"]" * 20_000, b"9" * 5_000, b'{"a": ' + b"9" * 5_000 + b"}"])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl"])
def test_a_row_that_python_cannot_read_costs_that_row_alone(tmp_path, name, bad, counters):
    rows = [b'{"text": "one"}', bad, rb'{"text": "\ud83d two"}']
    write(tmp_path / name, b"\n".join(rows) if name == "a.jsonl" else b"[" + b",".join(rows) + b"]")
    assert own(tmp_path, counters) == ["one", "\ufffd two"]
    assert counters == {"unreadable_row": 1, "repaired_utf8": 1}


def test_a_flipped_bit_in_a_page_with_a_checksum_is_refused(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    how = {"compression": "none", "use_dictionary": False, "write_page_checksum": True, "write_statistics": False}
    pq.write_table(pa.table({"text": ["The heron walks", "The otter swims"]}), tmp_path / "a.parquet", **how)
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    raw[raw.index(b"otter")] ^= 1
    (tmp_path / "a.parquet").write_bytes(raw)
    with refused("E302", "a.parquet"):
        list(open_files(str(tmp_path)).texts(source="own"))
