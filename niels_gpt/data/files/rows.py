"""Rows of a .jsonl, .json, .parquet or .txt file, and the position from which a resumed build reads them."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson

from niels_gpt.data.files import json_stream
from niels_gpt.data.files.parquet import iter_parquet
from niels_gpt.data.files.part import WHOLE_FILE, Share
from niels_gpt.data.files.text import (
    MAX_DOCUMENT_BYTES,
    REPAIRED,
    Problem,
    decode,
    is_empty_file,
    lines_of,
    note,
    opened_text,
    unpacked_name,
)
from niels_gpt.storage.errors import SourceError

T = TypeVar("T")
TABLE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet")
_MAX_DEPTH = 200
"""Levels of a row of JSON. Python's own limit is 994 or more, according to its release."""
_TOO_DEEP = f"nested in more than {_MAX_DEPTH} levels"
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN, _NESTED = frozenset({str, int, bool, type(None)}), frozenset({dict, list})
_NUMBERS = frozenset({int, float})


def iter_rows(
    paths: Iterable[Path], *, counters: Counter[str] | None = None, max_document_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[dict[str, Any]]:
    """Stream the rows of files in order; a .txt file gives one {"text": line} per line, with its newline.

    Raises: ValueError naming the file, and the line or item of JSON, for a row that is no JSON object or larger than
        `max_document_bytes`, and for a damaged file.
    """
    for path in paths:
        rows = numbered_rows(path, counters=counters, max_document_bytes=max_document_bytes)
        yield from (row for _, row in rows)


def numbered_rows(
    path: Path,
    *,
    counters: Counter[str] | None = None,
    columns: Collection[str] | None = None,
    unreadable: Callable[[Problem], None] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    skip_to: int = 0,
    share: Share = WHOLE_FILE,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Stream a file's rows, each with its number from 1: the number of the line, array item or parquet row.

    columns: the only ones to read of a parquet file, as far as it has them; None: all.
    unreadable: called for each row that is no JSON object or too large, which is then dropped. In a parquet file it may
        be several rows at once, which can only be read together: see parquet.py.
    max_document_bytes: of a line or item with its line end, or of a parquet row's values; a larger one is never held.
    skip_to: number of a row that was yielded before. The rows up to it are skipped; they are not counted again, and not
        decoded, except in an array.
    share: which rows, or row groups of a parquet file that has at least `share.step` of them. Others are not decoded,
        except in an array, and not counted; a byte-order mark is counted with the first row.
    Raises: ValueError naming the file if it is damaged as a whole or an array that is cut off; without `unreadable`
        also for a row that would be dropped. A file without a byte has no rows, and is counted.
    """
    if is_empty_file(path, of_file(counters, skip_to, share)):
        return
    name = path.name.lower()
    rows: Iterator[tuple[int, dict[str, Any] | Problem]]
    if name.endswith(".parquet"):
        decode_text = partial(decode, counters=counters, where=os.fspath(path))
        rows = iter_parquet(
            path, decode=decode_text, columns=columns, max_row_bytes=max_document_bytes, skip_to=skip_to, share=share
        )
    elif name.endswith(".txt"):
        rows = _text_lines(path, counters, max_document_bytes, skip_to, share)
    elif unpacked_name(name).endswith((".jsonl", ".json")):
        rows = _json_rows(path, counters, max_document_bytes, skip_to, share)
    else:
        raise SourceError(f"{path}: rows come from {' '.join(TABLE_SUFFIXES)} .json .txt, not from this kind of file")
    for number, row in rows:
        if isinstance(row, dict):
            yield number, row
        elif unreadable is None:
            raise SourceError(row)
        else:
            unreadable(row)


def _text_lines(
    path: Path, counters: Counter[str] | None, limit: int, skip_to: int, share: Share
) -> Iterator[tuple[int, dict[str, Any] | Problem]]:
    with opened_text(path, counters=of_file(counters, skip_to, share)) as file:
        for number, line in lines_of(file, limit, share, skip_to, path=path):
            if line is None:
                yield number, Problem.too_large(f"{path}, line {number}", limit)
                continue
            try:
                text = line.decode()
            except UnicodeDecodeError:
                text = decode(line, counters=counters, where=f"{path}, line {number}")
            yield number, {"text": text}


def of_file(counters: Counter[str] | None, skip_to: int, share: Share) -> Counter[str] | None:
    """Return the counters of what a file has once, such as a byte-order mark; None where it is counted elsewhere."""
    return None if skip_to or not share.has(0) else counters


def _json_rows(
    path: Path, counters: Counter[str] | None, limit: int, skip_to: int, share: Share
) -> Iterator[tuple[int, dict[str, Any] | Problem]]:
    by_line = _is_read_by_line(path, limit)
    with opened_text(path, counters=of_file(counters, skip_to, share)) as file:
        if not by_line:
            for number, value, text in json_stream.iter_values(file, str(path), limit):
                if number <= skip_to or not share.has(number - 1):
                    continue
                where = f"{path}, item {number}"
                yield number, value if isinstance(value, Problem) else _json_item(value, text, where, counters)
            return
        for number, line in lines_of(file, limit, share, skip_to, path=path):
            row = None if line is None else parsed(line)
            if (found := row_of_line(line, row, path, number, limit, counters)) is not None:
                yield number, found


def _is_read_by_line(path: Path, limit: int) -> bool:
    """Return whether each line of a file of JSON is a row: in .jsonl always, in .json if no row has several lines."""
    if unpacked_name(path.name).lower().endswith(".jsonl"):
        return True
    with opened_text(path) as file:
        return not json_stream.spans_lines(file, limit)


def row_of_line(
    line: bytes | None,
    fast: dict[str, Any] | None,
    path: Path,
    number: int,
    limit: int,
    counters: Counter[str] | None,
) -> dict[str, Any] | Problem | None:
    """Return the row of a line; None if the line is blank.

    line: with its line end; None for one of more than `limit` bytes. fast: what `parsed` returns for it.
    number: of the line, from 1.
    """
    where = f"{path}, line {number}"
    if line is None:
        return Problem.too_large(where, limit)
    if fast is not None:
        return fast
    if not line.strip():
        return None
    row = _json_object(line, where, counters)
    if isinstance(row, Problem):
        is_jsonl = unpacked_name(path.name).lower().endswith(".jsonl")
        row = Problem(row + _remedy(line, is_jsonl and number == 1))
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


class Position:
    """Where a loader is in its files, kept in a dict that it shares with the builder, as it shares its counters.

    To resume, the builder fills the dict before the first row is read, with its content when some sample was yielded:
    the loader starts with the next one. While it reads, the loader keeps in the dict `file`, the file's number from 0;
    `row`, the row's number from 1, 1 for a file that is one document; and numbers of its own.
    """

    def __init__(self, shared: dict[str, int] | None) -> None:
        """shared: None if no builder wants it. Create this when the first row is wanted, not before."""
        self._wanted = shared is not None
        self._shared = {} if shared is None else shared
        self._start = dict(self._shared)
        self.resumed = "file" in self._start
        """Whether samples are skipped."""

    def number(self, name: str) -> int:
        """Return one of the loader's own numbers at the start; 0 at the beginning of the source."""
        return self._start.get(name, 0)

    def skips_file(self, file: int) -> bool:
        """Return whether every row of a file is skipped, so that it need not be opened."""
        return file < self.number("file")

    def last_skipped_row(self, file: int) -> int:
        """Return the number of the last row of a file that is skipped; 0 if none is."""
        return self.number("row") if file == self.number("file") else 0

    def set(self, file: int, row: int, **numbers: int) -> None:
        """Record the row that was read, before a sample is made of it."""
        self._shared.update(numbers, file=file, row=row)

    def set_all(self, file: int, rows: Sequence[int], **numbers: Sequence[int]) -> dict[str, list[int]]:
        """Record rows of a file that were read; return the position at each, which `set` would have left in the dict.

        rows: their numbers. numbers: the loader's own numbers at each of them. Returns {} if no builder wants it.
        """
        columns = {"file": [file] * len(rows), "row": list(rows), **{name: list(own) for name, own in numbers.items()}}
        columns = {**{name: [value] * len(rows) for name, value in self._shared.items()}, **columns}
        self._shared.update({name: values[-1] for name, values in columns.items()})
        return columns if self._wanted else {}


def from_position(parts: Sequence[T], position: dict[str, int]) -> Iterator[T]:
    """Yield the parts from the one whose number `position` holds as "stream"; each next one clears `position`."""
    first = position.get("stream", 0)
    for number, part in enumerate(parts):
        if number > first or "stream" not in position:
            position.clear()
            position["stream"] = number
        if number >= first:
            yield part
