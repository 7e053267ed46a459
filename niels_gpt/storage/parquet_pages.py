"""The pages of a parquet file by their headers, before anything is decompressed.

The footer has sums of whole column chunks only, and cannot tell a chunk of a thousand texts from a chunk with one text
of 300 MB. A page header is a struct of Thrift's compact protocol with these fields (parquet.thrift): 1 type (0 data,
2 dictionary, 3 data of version 2); 2 uncompressed_page_size; 3 compressed_page_size; 5, 7, 8 the header of that type
(field 1: num_values; field 2, or 4 of version 2: encoding).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

CODES = (2, 8)
"""Encodings of values as codes of a dictionary: PLAIN_DICTIONARY, RLE_DICTIONARY."""

_FIRST_READ, _MOST_READ = 1 << 9, 1 << 24  # bytes of a header: its statistics may hold two long texts
_DICTIONARY, _DATA_2 = 2, 3


@dataclass(frozen=True)
class Page:
    """One page, by its header."""

    num_values: int
    """Values; in a column without lists these are rows."""
    num_bytes: int
    """Uncompressed: what a reader allocates."""
    is_dictionary: bool
    encoding: int
    """Encoding of its values, by the number in parquet.thrift."""


def pages_of(handle: int, start: int, end: int) -> Iterator[Page]:
    """Yield the pages of a column chunk: bytes `start` to `end` (exclusive) of the open file `handle`.

    Raises: ValueError if there is no page header.
    """
    while start < end:
        header, size = _header_at(handle, start, end)
        kind, num_bytes, compressed = (_number(header, field) for field in (1, 2, 3))
        if num_bytes < 0 or compressed < 0:
            raise ValueError(f"no page header at byte {start}")
        about = next((about for field in (5, 7, 8) if isinstance(about := header.get(field), dict)), {})
        yield Page(_number(about, 1), num_bytes, kind == _DICTIONARY, _number(about, 4 if kind == _DATA_2 else 2))
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
    """Return the fields of a struct by number, and its end; IndexError if the block ends first."""
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
    if kind in (1, 2):  # true and false have no bytes
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
    raise ValueError(f"a page header with a value of type {kind}")  # page headers have no list, set or map


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
