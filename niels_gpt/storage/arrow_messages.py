"""Sizes of the messages of an Arrow IPC stream by their headers, before anything is unpacked.

A message is ff ff ff ff, int32 (bytes of its header), the header, and its body. A header is a flatbuffers table: an
int32 at the table's place says how far before it the vtable lies. A vtable is uint16: two sizes, then the place of each
field in the table, 0 for an absent one. Fields by number, from Message.fbs:

    Message          1 type of the header (2 dictionary, 3 rows), 2 the header, 3 bytes of the body
    DictionaryBatch  1 the rows
    RecordBatch      2 the buffers, int64 [n, 2] (place in the body, bytes); 3 a table, if they are packed

A packed buffer begins with an int64: its bytes when unpacked, or -1 if it is not packed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

_MAX_HEADER = 1 << 24
_DICTIONARY, _ROWS = 2, 3


class Message(NamedTuple):
    """A schema, a dictionary, or some rows."""

    is_dictionary: bool
    is_packed: bool
    num_bytes: int
    """Bytes of its body when unpacked."""


def messages(handle: int) -> Iterator[Message]:
    """Yield the messages of an open file. Raises: ValueError if it is not a complete stream."""
    end, at = os.fstat(handle).st_size, 0
    try:
        while at < end:
            mark, size = struct.unpack("<Ii", os.pread(handle, 8, at))
            if mark != 0xFFFFFFFF or not 0 <= size <= _MAX_HEADER:
                raise ValueError(f"no message at byte {at}")
            if size == 0:
                return
            header, body = os.pread(handle, size, at + 8), at + 8 + size
            message = _fields(header, _offset(header, 0))
            (length,) = struct.unpack_from("<q", header, message[3]) if message.get(3) else (0,)
            if not 0 <= length <= end - body:
                raise ValueError(f"a body of {length:,} bytes at byte {body}, and {end - body:,} bytes are left")
            kind = header[message[1]]
            rows = _fields(header, _offset(header, message[2])) if kind in (_DICTIONARY, _ROWS) else {}
            if kind == _DICTIONARY:
                rows = _fields(header, _offset(header, rows[1]))
            is_packed = 3 in rows
            num_bytes = _unpacked(handle, header, _offset(header, rows[2]), body) if is_packed else length
            yield Message(kind == _DICTIONARY, is_packed, num_bytes)
            at = body + length
    except (struct.error, LookupError, OverflowError) as error:
        raise ValueError(f"a broken message at byte {at}") from error


def _fields(header: bytes, table: int) -> dict[int, int]:
    """Return the places of the fields of a table by their numbers."""
    vtable = table - struct.unpack_from("<i", header, table)[0]
    (size,) = struct.unpack_from("<H", header, vtable)
    offsets = struct.unpack_from(f"<{max(size - 4, 0) // 2}H", header, vtable + 4)
    return {number: table + offset for number, offset in enumerate(offsets) if offset}


def _offset(header: bytes, place: int) -> int:
    return place + int(struct.unpack_from("<I", header, place)[0])


def _unpacked(handle: int, header: bytes, buffers: int, body: int) -> int:
    """Return the bytes of all buffers of a body when unpacked. buffers: place of their vector in the header."""
    (count,), total = struct.unpack_from("<I", header, buffers), 0
    for offset, length in struct.iter_unpack("<qq", header[buffers + 4 : buffers + 4 + 16 * count]):
        stated = os.pread(handle, 8, body + max(offset, 0)) if length > 0 else bytes(8)
        total += max(length, *struct.unpack("<q", stated))
    return total
