"""The bytes of a SentencePiece model: its algorithm; pieces get another type, or are appended, without changing an id.

A model is a protobuf message ModelProto. Its repeated field 1 has the pieces in the order of their ids; fields 1, 2 and
3 of a piece are its text, score and type. All other fields are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

CONTROL: Final = 3
"""The type of a piece that no text gives."""
USER_DEFINED: Final = 4
"""The type of a piece that its literal in a text always gives."""

_PIECE, _TEXT, _TYPE, _TRAINER, _MODEL_TYPE = 1, 1, 3, 2, 3  # numbers of fields
_BPE = 2  # the value of _MODEL_TYPE; 1, the default, is unigram
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


def is_bpe(model: bytes) -> bool:
    """Return whether a model's algorithm is BPE. Raises: ValueError for a damaged model."""
    at = 0
    while at + 1 < len(model) and model[at] == _PIECE << 3 | _BYTES and model[at + 1] < 0x80:  # a short piece
        at += 2 + model[at + 1]
    rest = model[at:]
    trainer = next((rest[value:end] for number, _, value, end in _fields(rest) if number == _TRAINER), b"")
    kinds = [_read_varint(trainer, value)[0] for number, _, value, _ in _fields(trainer) if number == _MODEL_TYPE]
    return kinds[-1:] == [_BPE]


def with_types(model: bytes, types: Mapping[int, int]) -> bytes:
    """Return a model with other types of pieces, by id. Raises: ValueError for a damaged model."""
    out = bytearray()
    token_id = 0
    for number, start, value, end in _fields(model):
        if number != _PIECE:
            out += model[start:end]
            continue
        if token_id in types:
            piece = model[value:end]
            kept = b"".join(piece[at:stop] for field, at, _, stop in _fields(piece) if field != _TYPE)
            out += _piece(kept, types[token_id])
        else:
            out += model[start:end]
        token_id += 1
    return bytes(out)


def with_pieces(model: bytes, literals: Sequence[str]) -> bytes:
    """Return a model with user-defined pieces appended: their ids follow the largest one."""
    pieces = ((_tag(_TEXT, _BYTES) + _length(literal.encode()) + literal.encode()) for literal in literals)
    return model + b"".join(_piece(text, USER_DEFINED) for text in pieces)


def _piece(fields: bytes, kind: int) -> bytes:
    message = fields + _tag(_TYPE, _VARINT) + _varint(kind)
    return _tag(_PIECE, _BYTES) + _length(message) + message


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield each field's number, start, start of its value, and end. Raises: ValueError for a damaged message."""
    at = 0
    while at < len(message):
        start = at
        key, at = _read_varint(message, at)
        number, wire, value = key >> 3, key & 7, at
        if wire == _VARINT:
            _, at = _read_varint(message, at)
        elif wire == _BYTES:
            size, value = _read_varint(message, at)
            at = value + size
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"byte {start}: no field of a SentencePiece model")
        if at > len(message):
            raise ValueError(f"byte {start}: a field beyond the end of a SentencePiece model")
        yield number, start, value, at


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError(f"byte {at}: no number of a SentencePiece model")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _tag(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _length(content: bytes) -> bytes:
    return _varint(len(content))
