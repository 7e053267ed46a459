"""Texts of rows as columns: many rows at a time where they are as usual, and one by one where they are not.

A row is as usual if it is read without a repair and has a text in one of the fields that may hold it, and no other one
in another. All others are left to rows.py, so that what is dropped, repaired or counted is decided there alone.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.data.files.parquet import iter_batches, rows_of_batch
from niels_gpt.data.files.part import WHOLE_FILE, Share
from niels_gpt.data.files.rows import numbered_rows, of_file, parsed, row_of_line
from niels_gpt.data.files.text import (
    TWO_WORDS,
    Problem,
    decode,
    has_other_text,
    is_empty_file,
    is_pointer,
    line_blocks,
    opened_text,
    unpacked_name,
)

Rows = Iterator[tuple[int, dict[str, Any]]]


@dataclass(frozen=True)
class Columns:
    """Rows of a file in order, without those that were dropped or are left to rows.py."""

    numbers: Sequence[int]
    """Of the rows, from 1: see rows.numbered_rows."""
    texts: list[bytes]
    """The first of the fields of texts that is a string, in UTF-8."""
    fields: dict[str, list[Any]]
    """Values of the other fields, None where a row has none; a field that no row has may be missing."""

    def after(self, number: int) -> Columns:
        """Return the rows behind the one with this number."""
        cut = sum(each <= number for each in self.numbers)
        fields = {name: values[cut:] for name, values in self.fields.items()}
        return Columns(self.numbers[cut:], self.texts[cut:], fields)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a file is read."""

    texts: Sequence[str] = ()
    """The fields that may hold a row's text, the first that is a string does; () for rows alone."""
    others: Sequence[str] = ()
    """More fields of Columns."""
    unreadable: Callable[[Problem], None]
    """As all that follow, of rows.numbered_rows."""
    counters: Counter[str] | None
    columns: Collection[str] | None = None
    max_document_bytes: int
    skip_to: int = 0
    share: Share = WHOLE_FILE


def rows_or_columns(path: Path, reading: Reading) -> Iterator[Columns | tuple[int, dict[str, Any]]]:
    """Yield the rows of rows.numbered_rows, in order: runs of usual ones as Columns, about a mebibyte each."""
    name, of_whole = unpacked_name(path.name).lower(), of_file(reading.counters, reading.skip_to, reading.share)
    if is_empty_file(path, of_whole):
        return
    if reading.texts and name.endswith(".parquet"):
        yield from _of_parquet(path, reading)
    elif reading.texts and name.endswith(".jsonl"):
        with opened_text(path, counters=of_whole) as file:
            for first, lines in line_blocks(file, reading.max_document_bytes, path):
                yield from _of_lines(path, first, lines, reading)
    else:
        yield from numbered_rows(
            path,
            counters=reading.counters,
            columns=reading.columns,
            unreadable=reading.unreadable,
            max_document_bytes=reading.max_document_bytes,
            skip_to=reading.skip_to,
            share=reading.share,
        )


def _of_lines(
    path: Path, first: int, lines: list[bytes | None], reading: Reading
) -> Iterator[Columns | tuple[int, dict[str, Any]]]:
    """Yield the rows of a block of lines of JSON; first: number of the first line."""
    numbers, texts, rows = list[int](), list[bytes](), list[dict[str, Any]]()
    wanted = reading.share.numbers(max(first, reading.skip_to + 1), first + len(lines))
    for number, line in zip(wanted, lines[wanted.start - first :: wanted.step], strict=True):
        row = None if line is None else parsed(line)
        if row is not None:
            found = [value for name in reading.texts if type(value := row.get(name)) is str]
            if found and not (len(found) > 1 and has_other_text(found)):
                text = found[0].encode()
                if not is_pointer(text):
                    numbers.append(number)
                    texts.append(text)
                    rows.append(row)
                    continue
        if rows:
            yield _columns(numbers, texts, rows, reading)
            numbers, texts, rows = [], [], []
        odd = row_of_line(line, row, path, number, reading.max_document_bytes, reading.counters)
        if isinstance(odd, Problem):
            reading.unreadable(odd)
        elif odd is not None:
            yield number, odd
    if rows:
        yield _columns(numbers, texts, rows, reading)


def _columns(numbers: list[int], texts: list[bytes], rows: list[dict[str, Any]], reading: Reading) -> Columns:
    return Columns(numbers, texts, {name: [row.get(name) for row in rows] for name in reading.others})


def _of_parquet(path: Path, reading: Reading) -> Iterator[Columns | tuple[int, dict[str, Any]]]:
    decode_text = partial(decode, counters=reading.counters, where=os.fspath(path))
    batches = iter_batches(
        path,
        columns=reading.columns,
        max_row_bytes=reading.max_document_bytes,
        skip_to=reading.skip_to,
        share=reading.share,
    )
    for numbers, batch in batches:
        if isinstance(batch, Problem):
            reading.unreadable(batch)
        elif (columns := _columns_of_batch(batch, numbers, reading)) is None:
            yield from rows_of_batch(batch, decode_text, path, numbers, reading.skip_to)
        else:
            yield columns if numbers[0] > reading.skip_to else columns.after(reading.skip_to)


def _columns_of_batch(batch: Any, numbers: range, reading: Reading) -> Columns | None:
    """Return a batch of usual rows as columns; None for any other.

    A batch is usual if its texts are all in one column of strings, or the same in others, its other columns hold
    numbers and strings, all strings are valid UTF-8, and no text is a pointer of git-lfs.
    """
    import pyarrow as pa

    names = batch.schema.names
    if len(set(names)) < len(names) or not all(map(_is_usual, batch.schema.types)):
        return None
    strings = [name for name in reading.texts if name in names and _is_string(batch.schema.field(name).type)]
    if not strings or batch.column(strings[0]).null_count:
        return None
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return None
    if any(_differ(batch.column(strings[0]), batch.column(other)) for other in strings[1:]):
        return None
    texts = _bytes_of(batch.column(strings[0]))
    if any(map(is_pointer, texts)):
        return None
    fields = {name: _values_of(batch.column(name)) for name in reading.others if name in names}
    return Columns(numbers, texts, fields)


def _differ(texts: Any, others: Any) -> bool:
    """Whether some value of a second arrow array of strings is another text, as `has_other_text` says."""
    import pyarrow.compute as pc

    is_other = pc.not_equal(texts.cast(others.type), others)
    if not pc.any(is_other).as_py():
        return False
    return bool(pc.any(pc.match_substring_regex(others.filter(is_other), TWO_WORDS)).as_py())


def _is_usual(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return _is_string(kind) or any(
        is_kind(kind) for is_kind in (types.is_integer, types.is_floating, types.is_boolean, types.is_null)
    )


def _is_string(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _values_of(column: Any) -> list[Any]:
    if _is_string(column.type) and not column.null_count:
        return [value.decode() for value in _bytes_of(column)]
    values: list[Any] = column.to_pylist()
    return values


def _bytes_of(column: Any) -> list[bytes]:
    """Return the values of an arrow array of strings without nulls."""
    import numpy as np
    import pyarrow as pa

    kind = np.dtype(np.int64 if pa.types.is_large_string(column.type) else np.int32)
    _, offsets, values = column.buffers()
    ends = np.frombuffer(offsets, kind, len(column) + 1, column.offset * kind.itemsize)
    begin = int(ends[0])
    data = b"" if values is None else values.slice(begin, int(ends[-1]) - begin).to_pybytes()
    places = (ends - begin).tolist()
    return [data[start:end] for start, end in itertools.pairwise(places)]
