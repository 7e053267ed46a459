"""Rows of a .jsonl, .json, .parquet or .txt file: one by one, or as columns where they are usual.

A row is usual if it is read without a repair, has a text in one of the fields that may hold it, and no second text in
another of them. Every other row is yielded by itself, or dropped.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from niels_gpt.data.files import json_stream
from niels_gpt.data.files.part import WHOLE_FILE, Share
from niels_gpt.data.files.text import (
    MAX_DOCUMENT_BYTES,
    REPAIRED,
    Problem,
    decode,
    has_other_text,
    is_empty_file,
    is_pointer,
    line_blocks,
    lines_of,
    note,
    opened_text,
    unpacked_name,
)
from niels_gpt.storage.errors import SourceError

Row = tuple[int, dict[str, Any]]
"""A row's number from 1 (of the line, array item or parquet row), and its fields."""
TABLE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet")
_MAX_DEPTH = 200
"""Levels of a row of JSON. Python's own limit is 994 or more, according to its release."""
_TOO_DEEP = f"nested in more than {_MAX_DEPTH} levels"
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN, _NESTED = frozenset({str, int, bool, type(None)}), frozenset({dict, list})
_NUMBERS = frozenset({int, float})


@dataclass(frozen=True)
class Columns:
    """Consecutive usual rows of a file."""

    numbers: Sequence[int]
    """Row numbers, from 1, ascending."""
    texts: list[bytes]
    """Each row's text in UTF-8: the first of `Reading.texts` that holds a string."""
    fields: dict[str, list[Any]]
    """Values of `Reading.others`, None where a row lacks one. A field that no row has may be missing."""

    def after(self, number: int) -> Columns:
        """Return the rows after the one with this number."""
        cut = sum(each <= number for each in self.numbers)
        fields = {name: values[cut:] for name, values in self.fields.items()}
        return Columns(self.numbers[cut:], self.texts[cut:], fields)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read the rows of one file."""

    texts: Sequence[str] = ()
    """Fields that may hold a row's text; the first string counts. (): yield no Columns."""
    others: Sequence[str] = ()
    """Further fields of Columns."""
    columns: Collection[str] | None = None
    """Columns to read of a parquet file, where it has them; None: all."""
    counters: Counter[str] | None = None
    """Receives repairs and empty files, by reason."""
    unreadable: Callable[[Problem], None] | None = None
    """Called for each row that is dropped: no JSON object, or too large. One problem may stand for several rows of
    parquet. None: raise SourceError instead."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """Limit of a line or item with its line end, or of a parquet row's values. A larger one is never held in memory."""
    skip_to: int = 0
    """Last row that was yielded before. Rows up to it are skipped: not counted again, and decoded only in an array."""
    share: Share = WHOLE_FILE
    """Rows to read, or row groups of a parquet file that has at least `share.step` of them. Other rows are not counted,
    and decoded only in an array."""

    @property
    def file_counters(self) -> Counter[str] | None:
        """Counters of what a file has once, such as a byte-order mark; None where another reading counts it."""
        return None if self.skip_to or not self.share.has(0) else self.counters

    def drop(self, problem: Problem) -> None:
        """Report a dropped row to `unreadable`. Raises: SourceError E302 without `unreadable`."""
        if self.unreadable is None:
            raise SourceError(problem)
        self.unreadable(problem)


def iter_rows(
    paths: Iterable[Path], *, counters: Counter[str] | None = None, max_document_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[dict[str, Any]]:
    """Yield the rows of files in order; a .txt file gives one {"text": line} per line, with its newline.

    Raises: SourceError E302 for a damaged file, and for a row that is not a JSON object or larger than
        `max_document_bytes`. The message names the file, and the line or item.
    """
    for path in paths:
        rows = numbered_rows(path, counters=counters, max_document_bytes=max_document_bytes)
        yield from (row for _, row in rows)


def numbered_rows(path: Path, **how: Any) -> Iterator[Row]:
    """Yield a file's rows with their numbers, one by one. how: fields of Reading, without `texts`.

    Raises: SourceError E302 for another kind of file, a damaged file and an array that is cut off; without `unreadable`
        also for a row that would be dropped.
    """
    return cast(Iterator[Row], rows_or_columns(path, Reading(**how)))


def rows_or_columns(path: Path, reading: Reading) -> Iterator[Columns | Row]:
    """Yield a file's rows in order; with `reading.texts` runs of usual rows as Columns of about a mebibyte.

    A file of zero bytes has no rows, and is counted.
    Raises: SourceError E302 for another kind of file, a damaged file and an array that is cut off; without
        `reading.unreadable` also for a row that would be dropped.
    """
    name = path.name.lower()
    if is_empty_file(path, reading.file_counters):
        return
    if name.endswith(".parquet"):
        yield from _of_parquet(path, reading)
    elif name.endswith(".txt"):
        yield from _text_lines(path, reading)
    elif not unpacked_name(name).endswith((".jsonl", ".json")):
        raise SourceError(f"{path}: rows come from {' '.join(TABLE_SUFFIXES)} .json .txt, not from this kind of file")
    elif _is_read_by_line(path, reading.max_document_bytes):
        with opened_text(path, counters=reading.file_counters) as file:
            yield from rows_of_lines(file, path, reading)
    else:
        yield from _json_items(path, reading)


def _of_parquet(path: Path, reading: Reading) -> Iterator[Columns | Row]:
    from niels_gpt.data.files import parquet  # imports pyarrow, which is heavy

    decode_text = partial(decode, counters=reading.counters, where=os.fspath(path))
    batches = parquet.iter_batches(
        path,
        columns=reading.columns,
        max_row_bytes=reading.max_document_bytes,
        skip_to=reading.skip_to,
        share=reading.share,
    )
    for numbers, batch in batches:
        if isinstance(batch, Problem):
            reading.drop(batch)
        elif (found := parquet.usual_columns(batch, reading.texts, reading.others)) is None:
            yield from parquet.rows_of_batch(batch, decode_text, path, numbers, reading.skip_to)
        else:
            columns = Columns(numbers, *found)
            yield columns if numbers[0] > reading.skip_to else columns.after(reading.skip_to)


def _text_lines(path: Path, reading: Reading) -> Iterator[Row]:
    with opened_text(path, counters=reading.file_counters) as file:
        lines = lines_of(file, reading.max_document_bytes, reading.share, reading.skip_to, path=path)
        for number, line in lines:
            where = f"{path}, line {number}"
            if line is None:
                reading.drop(Problem.too_large(where, reading.max_document_bytes))
            else:
                yield number, {"text": decode(line, counters=reading.counters, where=where)}


def _is_read_by_line(path: Path, limit: int) -> bool:
    """Return whether each line of a file of JSON is a row: in .jsonl always, in .json if no row has several lines."""
    if unpacked_name(path.name).lower().endswith(".jsonl"):
        return True
    with opened_text(path) as file:
        return not json_stream.spans_lines(file, limit)


def _json_items(path: Path, reading: Reading) -> Iterator[Row]:
    with opened_text(path, counters=reading.file_counters) as file:
        for number, value, text in json_stream.iter_values(file, str(path), reading.max_document_bytes):
            if number <= reading.skip_to or not reading.share.has(number - 1):
                continue
            row = value
            if not isinstance(value, Problem):
                row = _json_item(value, text, f"{path}, item {number}", reading.counters)
            if isinstance(row, Problem):
                reading.drop(row)
            else:
                yield number, row


def rows_of_lines(file: BinaryIO, path: Path, reading: Reading) -> Iterator[Columns | Row]:
    """Yield the rows of an open file with one JSON object a line, as `rows_or_columns`. path: names it in messages."""
    for first, lines in line_blocks(file, reading.max_document_bytes, path):
        numbers, texts, rows = list[int](), list[bytes](), list[dict[str, Any]]()
        wanted = reading.share.numbers(max(first, reading.skip_to + 1), first + len(lines))
        for number, line in zip(wanted, lines[wanted.start - first :: wanted.step], strict=True):
            row = None if line is None else parsed(line)
            text = None if row is None or not reading.texts else _usual_text(row, reading.texts)
            if row is not None and text is not None:
                numbers.append(number)
                texts.append(text)
                rows.append(row)
                continue
            if rows:
                yield Columns(numbers, texts, _fields_of(rows, reading.others))
                numbers, texts, rows = [], [], []
            if row is None:
                row = _unusual_row(line, path, number, reading)
            if row is not None:
                yield number, row
        if rows:
            yield Columns(numbers, texts, _fields_of(rows, reading.others))


def _usual_text(row: dict[str, Any], names: Sequence[str]) -> bytes | None:
    """Return the text of a usual row; None for any other."""
    found = [value for name in names if type(value := row.get(name)) is str]
    if not found or (len(found) > 1 and has_other_text(found)):
        return None
    text = found[0].encode()
    return None if is_pointer(text) else text


def _fields_of(rows: list[dict[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: [row.get(name) for row in rows] for name in names}


def _unusual_row(line: bytes | None, path: Path, number: int, reading: Reading) -> dict[str, Any] | None:
    """Return the row of a line that `parsed` leaves to Python's json; None if it is blank or dropped.

    line: None stands for a line that is too large.
    """
    where = f"{path}, line {number}"
    if line is None:
        reading.drop(Problem.too_large(where, reading.max_document_bytes))
        return None
    if not line.strip():
        return None
    row = _json_object(line, where, reading.counters)
    if isinstance(row, Problem):
        is_jsonl = unpacked_name(path.name).lower().endswith(".jsonl")
        reading.drop(Problem(row + _remedy(line, is_jsonl and number == 1)))
        return None
    return row


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line where orjson reads it exactly as Python's json does; None where Python's json decides.

    orjson accepts less: no NaN, no number above 1.8e308, no half of a surrogate pair, no invalid UTF-8. And it makes
    a float of an integer of more than 64 bits, the one thing that it reads otherwise.
    """
    if len(line) > json_stream.MAX_LISTS and line.count(b"[") + line.count(b"{") > json_stream.MAX_LISTS:
        return None
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if type(row) is not dict:
        return None
    kinds = {*map(type, row.values())}
    if kinds <= _PLAIN:
        return row
    if not kinds.isdisjoint(_NESTED) and line.count(b"[") + line.count(b"{") > _MAX_DEPTH:
        return None
    return row if _has_small_numbers(row) else None


def _has_small_numbers(value: Any) -> bool:
    kind = type(value)
    if kind is float:
        return math.fabs(value) < 2.0**63
    if kind is dict:
        return all(map(_has_small_numbers, value.values()))
    if kind is not list:
        return True
    kinds = {*map(type, value)}
    if kinds <= _PLAIN or (kinds <= _NUMBERS and max(map(abs, value)) < 2.0**63):  # long lists of ids and of floats
        return True
    return all(map(_has_small_numbers, value))


def _json_object(line: bytes, where: str, counters: Counter[str] | None) -> dict[str, Any] | Problem:
    text = decode(line, counters=counters, where=where)
    try:
        if len(text) > json_stream.MAX_LISTS and json_stream.has_many_lists(text):
            raise ValueError(json_stream.TOO_MANY)
        row = json.loads(text)
        if _is_too_deep(row, line.count(b"[") + line.count(b"{")):
            reason = f" ({_TOO_DEEP})"
        elif isinstance(row, dict):
            return _without_surrogates(row, counters, where) if b"\\ud" in line or b"\\uD" in line else row
        else:
            reason = ""
    except (ValueError, RecursionError) as error:  # RecursionError: [[[[...
        reason = f" ({error})"
    return Problem(f"{where}: expected a JSON object{reason}, found {line[:60]!r}")


def _remedy(line: bytes, is_first: bool) -> str:
    if b"\0" in line:
        return ". NUL bytes are a sign of UTF-16 without a byte-order mark: save the file as UTF-8"
    if is_first and (line.strip() == b"[" or (line.lstrip().startswith(b"[") and b"{" in line)):
        return ". An array of rows is read from .json and .json.gz: rename the file"
    return ""


def _json_item(value: Any, text: str, where: str, counters: Counter[str] | None) -> dict[str, Any] | Problem:
    try:
        text.encode()
    except UnicodeEncodeError:  # contains bytes that are not UTF-8
        return _json_object(text.encode("utf-8", "surrogateescape"), where, counters)
    is_too_deep = _is_too_deep(value, text.count("[") + text.count("{"))
    if is_too_deep or not isinstance(value, dict):
        reason = f" ({_TOO_DEEP})" if is_too_deep else ""
        return Problem(f"{where}: expected a JSON object{reason}, found {text[:60]!r}")
    return _without_surrogates(value, counters, where) if "\\ud" in text or "\\uD" in text else value


def _is_too_deep(value: Any, brackets: int) -> bool:
    """Return whether a value has more than _MAX_DEPTH levels. brackets: of its JSON, at least as many as levels.

    Without this limit, which rows are read would depend on the release of Python.
    """
    if brackets <= _MAX_DEPTH:
        return False
    level = [value]
    for _ in range(_MAX_DEPTH):
        items = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in items if isinstance(item, dict | list)]
    return bool(level)


def _without_surrogates(row: dict[str, Any], counters: Counter[str] | None, where: str) -> dict[str, Any]:
    # JSON can contain half of a surrogate pair ("\ud83d"), which Python reads but no UTF-8 encoder accepts.
    repaired = _repaired(row)
    if repaired != row:
        note(counters, REPAIRED, f"{where}: half a surrogate pair in its JSON; kept, with U+FFFD in its place")
    return cast(dict[str, Any], repaired)


def _repaired(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_repaired(item) for item in value]
    return {_repaired(key): _repaired(item) for key, item in value.items()} if isinstance(value, dict) else value
