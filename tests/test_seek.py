"""A build of files that were not changed resumes without reading again what it has, and makes the same bytes.

Run: pytest tests/test_seek.py
"""

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from byte_tokenizer import ByteTokenizer
from power_loss import tree_of

from niels_gpt.build import stream
from niels_gpt.build.describe import Source
from niels_gpt.build.journal import _line, _parsed
from niels_gpt.build.pretrain import build_pretrain
from niels_gpt.build.sft import build_sft
from niels_gpt.cache import CacheError
from niels_gpt.data import parquet_stream, places
from niels_gpt.data.exclude import read_exclusion
from niels_gpt.data.text_files import WITH_NUL
from niels_gpt.recipes import sources
from niels_gpt.recipes.origins import origin_of
from niels_gpt.settings import Settings

LIMIT = 1_000


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BATCH_ITEMS", 4)
    monkeypatch.setattr(parquet_stream, "BATCH_ROWS", 5)


def text_rows(name: str) -> list[Any]:
    """Return rows with all that may happen to one."""
    rows: list[Any] = [{"id": f"{name}-{number}", "text": f"{name} {number} words"} for number in range(19)]
    rows[3] = {"other": 1}
    rows[6]["text"] = "x" * LIMIT
    rows[8]["text"] = "the same everywhere"
    rows[11]["text"] = f"{name} nul \0"
    rows[13]["text"] = "<|eot|>"
    rows[14]["text"] = ""
    return rows


def chat_rows(name: str) -> list[Any]:
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": f"{name} {number}"}, {"role": "assistant", "content": "yes"}]}
        for number in range(19)
    ]
    rows[2] = {"other": 1}
    rows[5]["messages"][0]["role"] = "tool"
    rows[9]["messages"][1]["content"] = "x" * LIMIT
    rows[12]["messages"] = rows[13]["messages"]
    return rows


def dolly_rows(name: str) -> list[Any]:
    rows: list[Any] = [
        {"instruction": f"{name} {number}", "response": "yes", "context": ""} for number in range(19)
    ]
    rows[2] = {"other": 1}
    rows[5]["response"] = ""
    return rows


def lines(rows: list[Any]) -> bytes:
    """Return them as JSON lines with a byte-order mark, a blank line, one that is no row and one that is no UTF-8."""
    found = [json.dumps(row).encode() + b"\n" for row in rows]
    found[4:4] = [b"\n", b"no row\n"]
    found[10] = found[10].replace(b"words", b"w\xffrds").replace(b"yes", b"y\xffs")
    return b"\xef\xbb\xbf" + b"".join(found)


def put_parquet(path: Path, rows: list[Any]) -> None:
    columns = sorted({key for row in rows for key in row} - {"other"})
    texts = {key: [row.get(key) for row in rows] for key in columns}
    if "text" in texts:  # two that are no UTF-8, in one batch
        raw = [None if text is None else text.encode() for text in texts["text"]]
        raw[10], raw[12] = b"\xff 10", b"\xff 12"
        lengths = pa.array(raw, pa.binary())
        texts["text"] = pa.Array.from_buffers(pa.string(), len(raw), lengths.buffers(), lengths.null_count)
    pq.write_table(pa.table(texts), path, row_group_size=11)


def put_folder(folder: Path, rows: Callable[[str], list[Any]]) -> Path:
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(rows("a")))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(rows("b"))))
    (folder / "c.json").write_text(json.dumps(rows("c")))
    put_parquet(folder / "d.parquet", rows("d"))
    (folder / "e.jsonl").write_bytes(lines(rows("e")))
    return folder


def text_folder(folder: Path) -> Path:
    put_folder(folder, text_rows)
    for number in range(7):
        (folder / f"e{number}.txt").write_bytes(f"document {number}".encode() * (99 if number == 3 else 1))
    (folder / "e5.txt").write_bytes(b"\xef\xbb\xbfmark \xff")
    (folder / "e6.md.gz").write_bytes(gzip.compress(b"packed"))
    (folder / "picture.png").write_bytes(b"")
    return folder


def chat_folder(folder: Path) -> Path:
    return put_folder(folder, chat_rows)


def mirror(folder: Path) -> Path:
    dolly, wikitext = folder / "databricks/databricks-dolly-15k", folder / "Salesforce/wikitext/wikitext-103-raw-v1"
    dolly.parent.mkdir(parents=True)
    put_folder(dolly, dolly_rows)
    (dolly / "c.json").unlink()
    (dolly / "d.parquet").unlink()
    wikitext.mkdir(parents=True)
    (wikitext / "train-0.jsonl").write_bytes(lines(text_rows("a")))
    (wikitext / "train-1.txt").write_bytes(b"".join(b"line %d \xff\n" % number for number in range(9)) + b" \nlast")
    put_parquet(wikitext / "validation-0.parquet", text_rows("v"))
    return folder


class Case:
    """One source, and its builds."""

    def __init__(self, key: str, put: Callable[[Path], Path], home: Path, **given: Any) -> None:
        self.family, _, self.name = key.partition("/")
        self.folder = put(home / "files")
        where = {"source_root": str(self.folder)}
        if self.name == "own":
            where = {"pretrain" if self.family == "pretrain" else "sft": f"own={self.folder}"}
        self.settings = Settings(max_document_bytes=LIMIT, **where, **given)

    def build(self, path: Path, at: int | None = None, **changed: Any) -> dict[str, Any]:
        """Build as a recipe does, with a checkpoint after each batch; at: stop behind so many documents."""
        origin, counters, position = origin_of(self.settings, self.name), Counter[str](), dict[str, int]()
        facts = {**origin.facts(None), "exclude": self.settings.exclude and read_exclusion(self.settings.exclude).facts}
        about = Source(self.name, facts=facts, counters=counters, position=position)
        arguments = {"tokenizer": ByteTokenizer(), "seed": 0, "num_threads": 0, "source": about}
        given: dict[str, Any] = {**arguments, "checkpoint_seconds": 0, **changed}
        if self.family == "sft":
            chats = sources.chats(self.settings, origin, None, counters, position)
            return build_sft(cut_off(chats, at), path, **{"val_frac": 0.1, **given})
        if self.name == "wikitext":
            splits = sources.wikitext_splits(self.settings, origin)
            texts = sources.wikitext_texts(self.settings, None, counters, splits, position)
        else:
            texts = sources.own_texts(self.settings, origin, counters, position)
        unbounded = {"max_train_tokens": None, "max_val_tokens": None, "shuffle_buffer": None, "shard_bytes": 240}
        return build_pretrain(cut_off(texts, at), path, **{"val_frac": 0.3, **unbounded, **given})

    def interrupt(self, path: Path, at: int, **changed: Any) -> int:
        """Leave a build unfinished; returns how many documents it has."""
        with pytest.raises(ConnectionError):
            self.build(path, at, **changed)
        return int(self.checkpoint(path)["documents"])

    def checkpoint(self, path: Path) -> dict[str, Any]:
        """Return the last checkpoint of an unfinished build."""
        return dict(_parsed(journal(path).read_bytes().splitlines(keepends=True)[-1]))


def cut_off(items: Iterator[Any], at: int | None) -> Iterator[Any]:
    for number, item in enumerate(items):
        if number == at:
            raise ConnectionError("killed")
        yield item


def journal(path: Path) -> Path:
    return next((path.parent / ".versions" / path.name).glob("building-*.journal/journal.jsonl"))


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the last line of a journal, with a good CRC-32."""
    whole = journal(path).read_bytes().splitlines(keepends=True)
    value = _parsed(whole[-1])
    change(value)
    journal(path).write_bytes(b"".join([*whole[:-1], _line(value)]))


def left(path: Path) -> dict[str, Any]:
    found = tree_of(path.parent).items()
    return {name: content for name, content in found if not name.endswith(("/lock", "/attempts.json"))}


CASES: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "texts": ("pretrain/own", text_folder),
    "chats": ("sft/own", chat_folder),
    "dolly": ("sft/dolly15k", mirror),
    "wikitext": ("pretrain/wikitext", mirror),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES), indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest, folder: Path) -> Case:
    return Case(*request.param, folder)


@EACH
def test_killed_at_any_checkpoint_and_resumed_the_bytes_are_the_same(
    case: Case, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meta = case.build(folder / "whole" / "c")
    expected = left(folder / "whole" / "c")
    read = meta.get("documents_read", meta.get("examples_read"))
    assert read > 30 and meta["source"]["counters"]["repaired_utf8"] >= 2
    with caplog.at_level("INFO"):
        for at in range(9, read + 1, 3):
            path = folder / str(at) / "c"
            done = case.interrupt(path, at) if at < read else case.interrupt(path, read - 1)
            caplog.clear()
            assert case.build(path) == meta
            assert f"resuming after {done} documents" in caplog.text and left(path) == expected


@EACH
def test_killed_again_and_again_the_bytes_are_the_same(case: Case, folder: Path) -> None:
    case.build(folder / "whole" / "c")
    done = 0
    with pytest.raises(StopIteration):
        while True:
            try:
                case.build(folder / "c", 9)
                raise StopIteration
            except ConnectionError:
                assert done < case.checkpoint(folder / "c")["documents"]
                done = case.checkpoint(folder / "c")["documents"]
    assert done > 20 and left(folder / "c") == left(folder / "whole" / "c")
