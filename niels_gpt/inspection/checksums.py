"""Where a file is damaged, by the CRC-32 of its blocks: the blocks that differ, and a single flipped bit to the bit.

CRC-32 is linear: the stored and the found checksum differ by the checksum of the error alone (its syndrome), whatever
the file holds. An error of one bit has a syndrome of its own for each place, so the place can be read from it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.build.writer import BLOCK_BYTES
from niels_gpt.fileio import CacheError, canonical_json
from niels_gpt.records import file_records, meta_crc32, open_regular, parse_object, path_inside, read_regular

CRC_DTYPE: np.dtype[np.uint32] = np.dtype("<u4")
_READ_BYTES = 1 << 22
_CRC_LINE_BYTES = 40  # at most, of the line of meta.json that holds its own checksum
_MAX_CRC_LINES = 8  # places that are tried
_MAX_TRIED_BYTES = 1 << 29  # each try reads all of meta.json: in all, a few seconds


class Flip(NamedTuple):
    """One bit that is not as it was written."""

    byte: int
    """Its place in the file."""
    bit: int
    """0 is the lowest."""


class Blocks(NamedTuple):
    """Bytes of a file that are not as they were written."""

    start: int
    end: int
    flip: Flip | None
    """The only bit among them that is wrong; None where more is."""


def flipped_bit(syndrome: int, num_bytes: int) -> Flip | None:
    """Return the bit of `num_bytes` bytes whose flip changes their CRC-32 by xor with `syndrome`; None: no single one.

    Another error than that of one bit looks like one in one of 8,000 cases (blocks of 64 KiB).
    """
    table = _syndromes()
    for from_end in range(0, num_bytes, BLOCK_BYTES):
        places = np.flatnonzero(table == syndrome)
        if len(places):
            behind, bit = divmod(int(places[0]), 8)
            byte = num_bytes - 1 - from_end - behind
            return Flip(byte, bit) if byte >= 0 else None
        if from_end + BLOCK_BYTES < num_bytes:
            table = _moved(table, BLOCK_BYTES)
    return None


@functools.cache
def _syndromes() -> NDArray[np.uint32]:
    """Return the syndrome of each single bit of the last BLOCK_BYTES bytes of anything: [8 * bytes behind it + bit]."""
    nothing = zlib.crc32(b"\0")
    table = np.array([zlib.crc32(bytes([1 << bit])) ^ nothing for bit in range(8)], dtype=np.uint32)
    while len(table) < 8 * BLOCK_BYTES:
        table = np.concatenate([table, _moved(table, len(table) // 8)])
    return table


def _moved(syndromes: NDArray[np.uint32], num_bytes: int) -> NDArray[np.uint32]:
    """Return the syndromes of the same errors with so many bytes more behind them. It is linear, so tables do it."""
    zeros = bytes(num_bytes)
    tables, number = np.zeros((4, 256), dtype=np.uint32), np.arange(256)
    for place in range(32):
        part, bit = divmod(place, 8)
        tables[part][(number >> bit) & 1 == 1] ^= np.uint32(zlib.crc32(zeros, 1 << place) ^ zlib.crc32(zeros))
    moved = np.zeros_like(syndromes)
    for part in range(4):
        moved ^= tables[part][(syndromes >> np.uint32(8 * part)) & np.uint32(255)]
    return moved


def damaged_meta_bit(raw: bytes) -> tuple[Flip, dict[str, Any]] | None:
    """Return the one bit of a meta.json that was flipped, and what it says with that bit put right.

    None where its bytes are as written, hold no checksum, or differ by more than a bit.
    """
    stored, found = meta_crc32(raw)
    if stored == found:
        return None
    candidates = list(_flips_of_crc_line(raw))
    if stored is not None and stored >= 0 and (flip := flipped_bit(stored ^ found, len(raw))) is not None:
        candidates.append(flip)
    for flip in candidates:
        right = with_flips(raw, [flip])
        try:
            meta = parse_object(right)
        except ValueError:
            continue
        if len(set(meta_crc32(right))) == 1 and canonical_json(meta) == right:
            return flip, meta
    return None


def _flips_of_crc_line(raw: bytes) -> Iterator[Flip]:
    """Yield the bits of the checksum and of its line, each of which would make it right again."""
    found_lines = itertools.islice(re.finditer(b"meta_|crc32", raw), 2 * _MAX_CRC_LINES)  # one of both is whole
    starts = sorted({max(0, found.start() - 12) for found in found_lines})[:_MAX_CRC_LINES]
    places = (range(8 * start, 8 * min(start + _CRC_LINE_BYTES, len(raw))) for start in starts)
    left = _MAX_TRIED_BYTES // len(raw) if raw else 0
    for tried in places:
        for place in tried[: max(0, left)]:
            stored, found = meta_crc32(with_flips(raw, [flip := Flip(*divmod(place, 8))]))
            if stored == found:
                yield flip
        left -= len(tried)


def with_flips(content: bytes, flips: list[Flip], *, at: int = 0) -> bytes:
    """Return bytes that begin at byte `at` of a file, with bits of the file put right."""
    changed = bytearray(content)
    for byte, bit in flips:
        if at <= byte < at + len(changed):
            changed[byte - at] ^= 1 << bit
    return bytes(changed)


def num_blocks(num_bytes: int) -> int:
    """Return how many blocks a file has; an empty one has none."""
    return -(-num_bytes // BLOCK_BYTES)


def covered_files(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the records of the files whose blocks the checksums are of, in their order; [] without checksums."""
    name = meta["checksums"]["name"] if "checksums" in meta else None
    return [record for record in file_records(meta) if record["name"] != name] if name is not None else []


def stored_checksums(folder: Path, meta: Mapping[str, Any]) -> dict[str, NDArray[np.uint32]]:
    """Return the checksums that were stored of each file's blocks: name -> uint32 [blocks].

    Empty where the builder stored none, where their file cannot be read, or where its size is not theirs.
    """
    covered = covered_files(meta)
    if not covered or meta["checksums"].get("block_bytes") != BLOCK_BYTES:
        return {}
    counts = [num_blocks(record["bytes"]) for record in covered]
    try:
        raw = read_regular(path_inside(folder, meta["checksums"]["name"]), CRC_DTYPE.itemsize * sum(counts))
    except (OSError, CacheError):
        return {}
    if len(raw) != CRC_DTYPE.itemsize * sum(counts):
        return {}
    parts = np.split(np.frombuffer(raw, dtype=CRC_DTYPE), np.cumsum(counts)[:-1])
    return {record["name"]: part for record, part in zip(covered, parts, strict=True)}


def read_blocks(path: Path, num_bytes: int) -> Iterator[bytes]:
    """Yield the blocks of the first `num_bytes` bytes of a file."""
    with open(open_regular(path), "rb") as file:
        for start in range(0, num_bytes, BLOCK_BYTES):
            yield file.read(min(BLOCK_BYTES, num_bytes - start))


def damaged_blocks(path: Path, stored: NDArray[np.uint32], num_bytes: int, sha256: str) -> list[Blocks]:
    """Return the blocks of a file that differ from their checksums; neighbours are one, but for a single flipped bit.

    sha256: of the file as it was written. Where every error looks like a flipped bit, it has the last word.
    """
    found: list[Blocks] = []
    for number, (block, crc) in enumerate(zip(read_blocks(path, num_bytes), stored.tolist(), strict=True)):
        if zlib.crc32(block) == crc:
            continue
        start, end = number * BLOCK_BYTES, number * BLOCK_BYTES + len(block)
        flip = flipped_bit(zlib.crc32(block) ^ crc, len(block))
        if flip is None and found and found[-1].end == start and found[-1].flip is None:
            start = found.pop().start
        found.append(Blocks(start, end, None if flip is None else Flip(start + flip.byte, flip.bit)))
    flips = [blocks.flip for blocks in found if blocks.flip is not None]
    if len(flips) == len(found) and sha256_with(path, flips) != sha256:
        return [Blocks(start, end, None) for start, end, _ in found]
    return found


def sha256_with(path: Path, flips: list[Flip]) -> str:
    """Return the hex sha256 that a file would have with some bits put right."""
    digest, at = hashlib.sha256(), 0
    with open(open_regular(path), "rb") as file:
        while content := file.read(_READ_BYTES):
            digest.update(with_flips(content, flips, at=at))
            at += len(content)
    return digest.hexdigest()


def damaged_entries(folder: Path, meta: Mapping[str, Any], sound: Collection[str]) -> Iterator[tuple[Blocks, str]]:
    """Yield the bytes of each wrong entry in the file of checksums, and the name of the file that it is of.

    sound: the names of the files that are as they were written. Entries of others cannot be judged.
    """
    place, stored = 0, stored_checksums(folder, meta)
    for record in covered_files(meta) if stored else []:
        name = record["name"]
        blocks = read_blocks(folder / name, record["bytes"]) if name in sound else iter(())
        for number, (block, crc) in enumerate(zip(blocks, stored[name].tolist(), strict=False)):
            start, error = place + CRC_DTYPE.itemsize * number, zlib.crc32(block) ^ crc
            if error:
                byte, bit = divmod(error.bit_length() - 1, 8)
                flip = Flip(start + byte, bit) if error.bit_count() == 1 else None
                yield Blocks(start, start + CRC_DTYPE.itemsize, flip), name
        place += CRC_DTYPE.itemsize * num_blocks(record["bytes"])
