"""How large the pages of a parquet file are, read from their headers before anything is decompressed.

The footer has sums of whole column chunks only, so nothing else tells a chunk of a thousand texts from one of a single
text of 300 MB. A page header is a struct of Thrift's compact protocol; of its fields these are read (parquet.thrift):

    1 type: 0 data, 2 dictionary, 3 data of version 2     2 uncompressed_page_size     3 compressed_page_size
    5, 7, 8 the header of that type, whose field 1 is num_values; of 8 field 3 is num_rows
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

_FIRST_READ, _MOST_READ = 1 << 9, 1 << 24  # bytes of a header: its statistics may hold two long texts
_DICTIONARY = 2


@dataclass(frozen=True)
class Page:
    """One page, as its header says."""

    num_values: int
    """Values, which of a column without lists are rows."""
    num_bytes: int
    """Uncompressed, which is what a reader allocates."""
    is_dictionary: bool


def pages_of(handle: int, start: int, end: int) -> Iterator[Page]:
    """Yield the pages of a column chunk, which is bytes `start` to `end` (exclusive) of the open file `handle`.

    Raises: ValueError where there is no page header.
    """
    while start < end:
        header, size = _header_at(handle, start, end)
        kind, num_bytes, compressed = (_number(header, field) for field in (1, 2, 3))
        if num_bytes < 0 or compressed < 0:
            raise ValueError(f"no page header at byte {start}")
        about = next((about for field in (5, 7, 8) if isinstance(about := header.get(field), dict)), {})
        yield Page(_number(about, 1), num_bytes, kind == _DICTIONARY)
        start += size + compressed


def _number(fields: dict[int, object], field: int) -> int:
    value = fields.get(field)
    return value if isinstance(value, int) else -1


def _header_at(handle: int, start: int, end: int) -> tuple[dict[int, object], int]:
    read = _FIRST_READ
    while True:
        block = os.pread(handle, min(read, end - start), start)
        try:
            return _struct(block, 0, 0)
        except IndexError:
            if len(block) < read or read >= _MOST_READ:
                raise ValueError(f"no page header at byte {start}") from None
            read *= 8


def _struct(block: bytes, at: int, depth: int) -> tuple[dict[int, object], int]:
    """Return the fields of a struct by their number, and where it ends; IndexError if the block ends first."""
    if depth > 8:
        raise ValueError("a page header nested too deeply")
    fields: dict[int, object] = {}
    number = 0
    while (first := block[at]) != 0:
        at += 1
        if first >> 4:
            number += first >> 4
        else:
            zigzag, at = _varint(block, at)
            number = (zigzag >> 1) ^ -(zigzag & 1)
        fields[number], at = _value(block, at, first & 15, depth)
    return fields, at + 1


def _value(block: bytes, at: int, kind: int, depth: int) -> tuple[object, int]:
    if kind in (1, 2):  # true and false, which have no bytes of their own
        return kind == 1, at
    if kind == 3:
        return block[at], at + 1
    if kind in (4, 5, 6):
        zigzag, at = _varint(block, at)
        return (zigzag >> 1) ^ -(zigzag & 1), at
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = _varint(block, at)
        return None, at + size
    if kind == 12:
        return _struct(block, at, depth + 1)
    raise ValueError(f"a page header with a value of type {kind}")  # no list, set or map is in one


def _varint(block: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = block[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if not byte & 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits in a page header")
