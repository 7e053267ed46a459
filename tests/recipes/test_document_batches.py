"""Documents as columns are the documents that come row by row: texts, ids, counters, positions and messages."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LONG
from support.data_files import lines, write, write_parquet
from support.readings import FILES, JSONL, LIMIT, TEXTS, Reading, nonzero, put, read_in_small_batches, tables

from niels_gpt.data.files import parquet, rows
from niels_gpt.settings import Settings


def compare(given, name):
    """Read all by rows and by columns, then what is behind some documents; returns the reading by columns."""
    rows, columns = (Reading(given, name, by_column=by_column) for by_column in (False, True))
    assert columns.seen == rows.seen
    assert columns.end == rows.end and columns.messages == rows.messages
    for at in range(0, len(rows.seen), 3) if rows.seen and rows.seen[0].position else ():
        rest = Reading(given, name, by_column=True, behind=rows.seen[at])
        assert rest.seen == rows.seen[at + 1 :]
        assert (nonzero(rest.counters), rest.position, rest.error) == (
            nonzero(rows.counters),
            rows.position,
            rows.error,
        )
    return columns


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    read_in_small_batches(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("batches")


FIXTURES = settings(max_examples=150 if LONG else 50)


@FIXTURES
@given(files=st.lists(FILES, min_size=1, max_size=4), field=st.sampled_from(["", "", ":content"]))
def test_own_text(files: list[tuple[str, Any]], field: str, folder: Path) -> None:
    put(folder / "own", files)
    compare(Settings(pretrain=f"own={folder / 'own'}{field}", max_document_bytes=LIMIT), "own")


@FIXTURES
@given(files=st.lists(FILES.filter(lambda file: "txt" not in file[0] and "md" not in file[0]), min_size=1, max_size=3))
def test_web_pages(files: list[tuple[str, Any]], folder: Path) -> None:
    files = [(suffix.replace(".json", ".jsonl") if suffix == ".json" else suffix, content) for suffix, content in files]
    put(folder / "web" / "HuggingFaceFW/fineweb-edu", files)
    compare(Settings(source_root=str(folder / "web"), max_document_bytes=LIMIT), "fineweb_edu")


@FIXTURES
@given(files=st.lists(FILES.filter(lambda file: file[0] != ".json" and ".gz" not in file[0]), min_size=1, max_size=3))
def test_books(files: list[tuple[str, Any]], folder: Path) -> None:
    put(folder / "books" / "gutenberg", [("a.txt", b"book"), *files])
    compare(Settings(source_root=str(folder / "books"), max_document_bytes=LIMIT), "gutenberg")


LINES = st.lists(TEXTS | st.sampled_from(["\n", " = A = \n", "\x85\n", "\u3000\n", "\ufffd"]), max_size=12).map("".join)


@FIXTURES
@given(train=LINES, validation=LINES, rows=JSONL, table=tables())
def test_lines(train: str, validation: str, rows: bytes, table: Any, folder: Path) -> None:
    home = folder / "wiki" / "Salesforce/wikitext"
    shutil.rmtree(home, ignore_errors=True)
    write(home / "train-0.txt", train.encode() + b"\n\xff\nlast")
    write(home / "train-1.jsonl", rows)
    write_parquet(home / "train-2.parquet", table[0], **table[1])
    write(home / "validation.txt", validation + "\nend")
    compare(Settings(source_root=str(folder / "wiki"), max_document_bytes=LIMIT), "wikitext")


def test_notes_and_their_splits(folder):
    for number in range(30):
        write(folder / "notes" / "roam" / f"{number % 4}/{number}.md", f"note {number % 20}" + "\0" * (number == 7))
    write(folder / "notes" / "roam" / "broken.md", b"\xff")
    seen = compare(Settings(source_root=str(folder / "notes")), "roam").seen
    assert {document.split for document in seen} == {"train", "val"} and len(seen) == 31


@pytest.mark.parametrize("entries", ["id-3\n", "0.jsonl\n", "id-3\n1.parquet\n"])
def test_what_is_excluded_is_in_no_batch(folder, entries):
    rows = [{"text": f"text {number}", "id": f"id-{number}"} for number in range(9)]
    put(folder / "own", [(".jsonl", lines(*rows)), (".parquet", (pa.Table.from_pylist(rows), {}))])
    listed = write(folder / "exclude.txt", entries)
    seen = compare(Settings(pretrain=f"own={folder / 'own'}", exclude=str(listed)), "own").seen
    assert len(seen) == 18 - {"id-3\n": 2, "0.jsonl\n": 9, "id-3\n1.parquet\n": 10}[entries]


def test_a_line_is_parsed_once(folder, monkeypatch):
    put(folder / "own", [(".jsonl", lines({"text": "a"}, {"other": "b"}, {"text": 7}) + b"no row\n[1]\n\n")])
    given, parsed = Settings(pretrain=f"own={folder / 'own'}"), list[bytes]()
    parse = rows.parsed
    monkeypatch.setattr(rows, "parsed", lambda line: parsed.append(line) or parse(line))
    for by_column in (False, True):
        parsed.clear()
        assert len(Reading(given, "own", by_column=by_column).seen) == 1 and len(parsed) == 6


def test_a_damaged_file_costs_no_document_before_it(folder):
    rows = [{"text": f"text {number}"} for number in range(7)]
    put(folder / "own", [(".jsonl", lines(*rows)), (".parquet", (pa.Table.from_pylist(rows), {}))])
    (folder / "own" / "1.parquet").write_bytes(b"PAR1 no more")
    reading = compare(Settings(pretrain=f"own={folder / 'own'}"), "own")
    assert len(reading.seen) == 7
    assert "1.parquet: not a whole parquet file" in reading.error


@pytest.mark.slow
def test_a_row_group_of_large_texts_in_codes_is_read_in_batches_by_size(folder, monkeypatch):
    """As `datasets` writes them: all texts of a row group are in one dictionary page. Some of them are repeated."""
    monkeypatch.setattr(parquet, "BATCH_ROWS", 1_000)
    texts = [f"{number % 180} " * (3_000 if number % 10 else 1) for number in range(1_000)]
    table = pa.table({"text": [*texts, None], "id": [f"id-{number}" for number in range(1_001)]})
    put(folder / "own", [(".parquet", (table, {"row_group_size": 400}))])
    path = folder / "own" / "0.parquet"
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    assert column.has_dictionary_page and column.total_uncompressed_size > 1 << 20
    given = Settings(pretrain=f"own={folder / 'own'}", max_document_bytes=4 << 20)
    seen = compare(given, "own").seen
    assert [document.text for document in seen] == texts and seen[-1].id == "id-999"
    sizes = [batch.num_rows for _, batch in parquet.iter_batches(path, max_row_bytes=4 << 20)]
    assert sum(sizes) == 1_001 and len(sizes) < 20
    assert all(batch.nbytes <= (1 << 20) + 20_000 for _, batch in parquet.iter_batches(path, max_row_bytes=4 << 20))
