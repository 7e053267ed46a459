"""Documents as columns are the documents that come row by row: texts, ids, counters, positions and messages."""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_files import invalid_utf8, lines, write, write_parquet

from niels_gpt.data.files import columns, parquet, rows
from niels_gpt.documents import DocumentBatch
from niels_gpt.recipes import sources
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.settings import Settings

LIMIT = 600
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["", "a\0b", "x" * 550, "x" * LIMIT, " \u3000", "\x1f"]
)
IDS = st.none() | st.sampled_from(["id-1", "é", 7, 2**70, 1.5, True, "y" * 1_001, ["a"], {}])
FIELD = st.sampled_from(["text", "content", "document", "other", "path", "row", "message_ids", "message_tree_id"])
ROWS = st.fixed_dictionaries({"text": TEXTS}, optional={"id": IDS}) | st.dictionaries(FIELD, TEXTS | IDS, max_size=3)
ODD_LINES = st.sampled_from(
    [
        b"\n",
        b"no row\n",
        b'{"text": "\xff"}\n',
        rb'{"text": "\ud83d"}' + b"\n",
        b"[1]\n",
        b'{"text": NaN, "content": "c"}\n',
    ]
)
JSONL = st.lists(ROWS.map(lines) | ODD_LINES, max_size=8).map(b"".join)
NULLABLE = st.none() | TEXTS


KINDS: dict[str, Callable[[list[str]], Any]] = {
    "plain": lambda texts: pa.array(texts, pa.string()),
    "null": lambda texts: pa.array([None, *texts[1:]], pa.string()),
    "large": lambda texts: pa.array(texts, pa.large_string()),
    "view": lambda texts: pa.array(texts, pa.string_view()),
    "coded": lambda texts: pa.array(texts, pa.string()).dictionary_encode(),
    "bytes": lambda texts: pa.array([text.encode() for text in texts], pa.binary()),
    "number": lambda texts: pa.array(range(len(texts))),
    "broken": lambda texts: invalid_utf8(*(text.encode() for text in texts[1:]), b"\xff"),
    "list": lambda texts: pa.array([[text] for text in texts]),
}


@st.composite
def tables(draw: st.DrawFn) -> Any:
    """Return a table of which most columns are strings, in different arrow types, and how it is written."""
    size, columns = draw(st.integers(1, 14)), {}
    for name in draw(st.lists(st.sampled_from(["text", "content", "id", "path", "odd"]), unique=True, min_size=1)):
        kind = draw(st.sampled_from(["plain", "plain", "plain", *KINDS]))
        columns[name] = KINDS[kind](draw(st.lists(TEXTS, min_size=size, max_size=size)))
    return pa.table(columns), {"row_group_size": draw(st.integers(1, 15)), "use_dictionary": draw(st.booleans())}


FILES = st.one_of(
    st.tuples(st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zst", ".json"]), JSONL),
    st.tuples(st.just(".json"), st.lists(ROWS, max_size=4).map(lambda rows: json.dumps(rows).encode())),
    st.tuples(st.just(".jsonl"), JSONL.map(lambda content: b"\xef\xbb\xbf" + content)),
    st.tuples(st.just(".jsonl"), JSONL.map(lambda content: content.decode("utf-8", "replace").encode("utf-16"))),
    st.tuples(st.just(".parquet"), tables()),
    st.tuples(st.sampled_from([".txt", ".md", ".md.gz", ".txt.zst"]), TEXTS.map(str.encode) | st.just(b"\xff")),
)


class Seen(NamedTuple):
    """One document, and what its loader had counted, and where it was."""

    split: str | None
    text: str
    id: str
    counters: dict[str, int]
    position: dict[str, int]


def flat(batches: Iterator[DocumentBatch]) -> Iterator[Seen]:
    for batch in batches:
        starts = [start for start, _ in batch.counters]
        assert starts[0] == 0 and starts == sorted(set(starts)) and len(batch) == len(batch.ids) > 0
        states, counters = dict(batch.counters), batch.counters[0][1]
        for at, text in enumerate(batch.texts):
            counters = states.get(at, counters)
            place = {name: values[at] for name, values in batch.position.items()}
            yield Seen(batch.split, text.decode(), batch.ids[at], nonzero(counters), place)


def nonzero(counters: Any) -> dict[str, int]:
    return {name: number for name, number in counters.items() if number}


class Reading:
    """One reading of a source, row by row or by columns, from the beginning or from behind a document."""

    def __init__(self, given: Settings, name: str, *, by_column: bool, behind: Seen | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self.position: dict[str, int] = {}
        self.seen: list[Seen] = []
        self.error = ""
        self.messages: list[str] = []
        args = (given, resolve_source(given, name), None, self.counters, self.position)
        log, logger = Log(self.messages), logging.getLogger("niels_gpt")
        logger.addHandler(log)
        try:
            stream = flat(sources.document_batches(*args)) if by_column else self.rows(sources.document_rows(*args))
            if behind is not None:  # as a builder does, when the loader was called and before the first row
                self.counters.clear()
                self.counters.update(behind.counters)
                self.position.update(behind.position)
            self.seen.extend(stream)
        except ValueError as error:
            self.error = str(error)
        finally:
            logger.removeHandler(log)

    def rows(self, rows: sources.Documents) -> Iterator[Seen]:
        for split, text, name in rows:
            yield Seen(split, text, name, nonzero(self.counters), dict(self.position))

    @property
    def end(self) -> Any:
        return nonzero(self.counters), self.position if self.seen else {}, self.error


class Log(logging.Handler):
    """Keeps messages."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


def compare(given: Settings, name: str) -> Reading:
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


def put(folder: Path, files: list[tuple[str, Any]]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for number, (suffix, content) in enumerate(files):
        path = folder / f"{number}{suffix}"
        if suffix == ".parquet":
            write_parquet(path, content[0], **content[1])
        else:
            write(path, content)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "BATCH_ROWS", 4)
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


FIXTURES = settings(deadline=None, max_examples=150)


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


def test_notes_and_their_splits(folder: Path) -> None:
    for number in range(30):
        write(folder / "notes" / "roam" / f"{number % 4}/{number}.md", f"note {number % 20}" + "\0" * (number == 7))
    write(folder / "notes" / "roam" / "broken.md", b"\xff")
    seen = compare(Settings(source_root=str(folder / "notes")), "roam").seen
    assert {document.split for document in seen} == {"train", "val"} and len(seen) == 31


@pytest.mark.parametrize("entries", ["id-3\n", "0.jsonl\n", "id-3\n1.parquet\n"])
def test_what_is_excluded_is_in_no_batch(folder: Path, entries: str) -> None:
    rows = [{"text": f"text {number}", "id": f"id-{number}"} for number in range(9)]
    put(folder / "own", [(".jsonl", lines(*rows)), (".parquet", (pa.Table.from_pylist(rows), {}))])
    listed = write(folder / "exclude.txt", entries)
    seen = compare(Settings(pretrain=f"own={folder / 'own'}", exclude=str(listed)), "own").seen
    assert len(seen) == 18 - {"id-3\n": 2, "0.jsonl\n": 9, "id-3\n1.parquet\n": 10}[entries]


def test_a_line_is_parsed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder / "own", [(".jsonl", lines({"text": "a"}, {"other": "b"}, {"text": 7}) + b"no row\n[1]\n\n")])
    given, parsed = Settings(pretrain=f"own={folder / 'own'}"), list[bytes]()
    for module in (columns, rows):
        monkeypatch.setattr(module, "parsed", lambda line, of=module.parsed: parsed.append(line) or of(line))
    for by_column in (False, True):
        parsed.clear()
        assert len(Reading(given, "own", by_column=by_column).seen) == 1 and len(parsed) == 6


def test_a_damaged_file_costs_no_document_before_it(folder: Path) -> None:
    rows = [{"text": f"text {number}"} for number in range(7)]
    put(folder / "own", [(".jsonl", lines(*rows)), (".parquet", (pa.Table.from_pylist(rows), {}))])
    (folder / "own" / "1.parquet").write_bytes(b"PAR1 no more")
    reading = compare(Settings(pretrain=f"own={folder / 'own'}"), "own")
    assert len(reading.seen) == 7
    assert "1.parquet: not a whole parquet file" in reading.error


def test_a_row_group_of_large_texts_in_codes_is_read_in_batches_by_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
