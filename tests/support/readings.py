"""Files of every format drawn at random, and what a loader of documents gives of them, document by document."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa
import pytest
from hypothesis import strategies as st

from niels_gpt.data.exclude import read_exclusion
from niels_gpt.data.files import parquet, rows
from niels_gpt.documents import Partition
from niels_gpt.engine.meta import Source
from niels_gpt.recipes import resolve, sources
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.recipes.training import source_state
from support.data_files import invalid_utf8, lines, write, write_parquet

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


KINDS = {
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
def tables(draw):
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


def flat(batches):
    for batch in batches:
        starts = [start for start, _ in batch.counters]
        assert starts[0] == 0 and starts == sorted(set(starts)) and len(batch) == len(batch.ids) > 0
        states, counters = dict(batch.counters), batch.counters[0][1]
        for at, text in enumerate(batch.texts):
            counters = states.get(at, counters)
            place = {name: values[at] for name, values in batch.position.items()}
            yield Seen(batch.split, text.decode(), batch.ids[at], nonzero(counters), place)


def nonzero(counters):
    return {name: number for name, number in counters.items() if number}


def found_source(given, name):
    """Return where a source's texts or chats come from by these settings: the hub, a snapshot of it, or a mirror."""
    return resolve_source(given, name)


def state_of_source(given, name):
    """Return the fingerprint of a source as it is now."""
    return source_state(given, name)


@contextmanager
def trained_on(*names):
    """Let a tokenizer be trained on these sources alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("niels_gpt.recipes.training.training_order", lambda: list(names))
        yield


@contextmanager
def parsed_lines():
    """Collect the lines of JSON that are parsed where rows are read as columns."""
    seen = []
    parse = rows.parsed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "parsed", lambda line: seen.append(line) or parse(line))
        yield seen


def read_in_small_batches(monkeypatch, rows=4, documents=5):
    """Let small files have several batches, of rows of parquet and of documents."""
    monkeypatch.setattr(parquet, "BATCH_ROWS", rows)
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", documents)


def forbid_reading(monkeypatch):
    """Let a build fail that reads its source."""

    def unreadable(*_, **__):
        raise AssertionError("the source was read")
        yield

    monkeypatch.setattr(sources, "document_batches", unreadable)
    monkeypatch.setattr(sources, "chats", unreadable)


def say_version_of_datasets(monkeypatch, version):
    """Let caches of the hub say that this version of the library read them."""
    monkeypatch.setattr(resolve, "version", lambda name: version)


def opened_source(given, name):
    """The documents or chats of a source as a recipe gives them to a builder, and what it says of them."""
    origin, counters, position = resolve_source(given, name), Counter[str](), dict[str, int]()
    excluded = given.exclude and read_exclusion(given.exclude).facts
    about = {"provenance": {**origin.provenance(None), "exclude": excluded}, "counters": counters, "position": position}
    opened = sources.chats if origin.spec.family == "sft" else sources.document_batches
    return opened(given, origin, None, counters, position), Source(name, **about)


class Reading:
    """One reading of a source, row by row or by columns, from the beginning or from behind a document.

    partition: its number and how many there are; it is read alone, by columns. revision: of a source of the hub.
    """

    def __init__(
        self,
        given,
        name,
        *,
        by_column=True,
        behind=None,
        partition=None,
        revision=None,
    ):
        self.counters = Counter()
        self.position = {}
        self.seen = []
        self.error = ""
        self.messages = []
        args = (given, resolve_source(given, name), revision, self.counters, self.position)
        log, logger = Log(self.messages), logging.getLogger("niels_gpt")
        logger.addHandler(log)
        try:
            batches = sources.document_batches(*args, partition and Partition(*partition)) if by_column else iter(())
            stream = flat(batches) if by_column else self.rows(sources.document_rows(*args))
            if behind is not None:  # as a builder does, when the loader was called and before the first row
                self.counters.clear()
                self.counters.update(behind.counters)
                self.position.update(behind.position)
            self.seen.extend(stream)
        except ValueError as error:
            self.error = str(error)
        finally:
            logger.removeHandler(log)

    def rows(self, rows):
        for split, text, name in rows:
            yield Seen(split, text, name, nonzero(self.counters), dict(self.position))

    @property
    def end(self):
        return nonzero(self.counters), self.position if self.seen else {}, self.error


class Log(logging.Handler):
    """Keeps messages."""

    def __init__(self, messages):
        super().__init__()
        self._messages = messages

    def emit(self, record):
        self._messages.append(record.getMessage())


def put(folder, files):
    """Write files to a folder, in place of what was there; each is a suffix and a content: bytes, or `tables`."""
    shutil.rmtree(folder, ignore_errors=True)
    for number, (suffix, content) in enumerate(files):
        path = folder / f"{number}{suffix}"
        if suffix == ".parquet":
            write_parquet(path, content[0], **content[1])
        else:
            write(path, content)
