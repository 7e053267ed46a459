"""Megatron-LM: SPLIT_NNNNN.bin, ids without a header, and SPLIT_NNNNN.idx, where its sequences and documents are.

The .bin file has the bytes of our shard: its ids are uint16, or int32 where ours are uint32 (below 2**31 these are the
same bytes). The .idx file, little-endian, without padding:
    9 bytes  4d 4d 49 44 49 44 58 00 00 ("MMIDIDX", two zeros)
    uint64   1, the version
    uint8    the type of the ids: 8 is uint16, 4 is int32
    uint64   S, the sequences
    uint64   D + 1, one more than the documents
    int32    [S] tokens of each sequence
    int64    [S] the first byte of each sequence in the .bin file
    int64    [D + 1] the number of the first sequence of each document, and S
A document is one sequence here, so S is D, and the last array counts from 0 to D. A document that lies in two shards is
two documents. Megatron-LM opens the pair by its path without the suffix, for instance DEST/train_00000.
An import also reads ids of the types 1, 2, 3 and 5 (uint8, int8, int16, int64), and several sequences in a document. It
leaves out the modes of sequences that may follow, int8 [S].
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.exchange.foreign import ForeignFile, ForeignFolder, read_pieces
from niels_gpt.exchange.formats.listing import checked_ends, chunked, listed, too_long
from niels_gpt.exchange.output import Output, TokenCache
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import open_regular

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPE_OF_WIDTH = {2: 8, 4: 4}
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MAX = np.iinfo(np.int32).max


def write(cache: TokenCache, output: Output) -> None:
    """Link each shard as SPLIT_NNNNN.bin, and write its .idx.

    Raises: CacheError E220 for a document of 2**31 tokens in one shard.
    """
    for split in SPLITS:
        for file in cache.files(split):
            ends = file.ends
            if file.tokens > _MAX and int(np.diff(ends, prepend=0).max()) > _MAX:
                raise too_long(file, "Megatron-LM counts in a sequence")
            output.place(f"{split}_{file.number:05d}.bin", file)
            output.write(f"{split}_{file.number:05d}.idx", _index(ends, cache.dtype.itemsize))
            output.note("documents_cut_between_files", int(file.continues))


def _index(ends: NDArray[np.int64], width: int) -> Iterator[bytes]:
    yield _HEADER.pack(_MAGIC, _VERSION, _TYPE_OF_WIDTH[width], len(ends), len(ends) + 1)
    first = 0
    for some in chunked(ends):
        yield np.diff(some, prepend=first).astype("<i4").tobytes()
        first = int(some[-1])
    first = 0
    for some in chunked(ends):
        yield (width * np.append(first, some[:-1])).astype("<i8").tobytes()
        first = int(some[-1])
    for begin in range(0, len(ends) + 1, 1 << 20):
        yield np.arange(begin, min(begin + (1 << 20), len(ends) + 1), dtype="<i8").tobytes()


def read(source: Path, *, val_glob: str | None = None, vocab_size: int | None = None) -> ForeignFolder:
    """Look into a folder of pairs of .bin and .idx files. Leaves modes of sequences out, and counts them."""
    listing = listed(source, ".bin", "megatron", val_glob)
    files = []
    for each in listing.files:
        index = each.beside(each.name.removesuffix(".bin") + ".idx")
        if index is None:
            raise CacheError(each.path, "no .idx file of its name beside it", code="E221")
        header = _checked_header(index, listing.noticed)
        dtype = np.dtype(header.dtype)
        tokens = each.tokens_of(dtype.itemsize)
        ends = partial(_ends, index, header, tokens)
        listing.noticed["sequences_joined"] += max(0, header.sequences - header.documents)
        _ends(index, header, tokens, listing.noticed)
        if header.dtype in ("<u2", "<i4"):
            files.append(each.plain(dtype.itemsize, ends=ends, pieces=partial(read_pieces, each.path, dtype)))
        else:
            pieces = partial(read_pieces, each.path, dtype)
            files.append(ForeignFile(each.split, each.name, tokens, pieces, ends, continues=each.continues))
    return listing.folder(files)


class _Header(NamedTuple):
    """First bytes of an .idx file."""

    dtype: str
    sequences: int
    documents: int


def _checked_header(index: Path, noticed: Counter[str]) -> _Header:
    """Return the header of an .idx file. Raises: CacheError E221 if its sizes do not fit the file."""
    with open(open_regular(index), "rb") as file:
        size, raw = os.fstat(file.fileno()).st_size, file.read(_HEADER.size)
    if len(raw) < _HEADER.size or raw[: len(_MAGIC)] != _MAGIC:
        raise CacheError(index, f"begins with {raw[:9]!r}", "the header of an index of Megatron-LM", code="E221")
    _, version, code, sequences, entries = _HEADER.unpack(raw)
    if version != _VERSION or code not in _TYPES:
        found = f"version {version} and ids of type {code}"
        raise CacheError(index, found, "version 1 and a type of whole numbers: 1, 2, 3, 4, 5 or 8", code="E221")
    expected = _HEADER.size + 12 * sequences + 8 * entries
    if size not in (expected, expected + sequences) or not entries:
        found = f"{size:,} bytes, {sequences:,} sequences and {entries:,} borders of documents"
        raise CacheError(index, found, f"{expected:,} bytes, and a border at least", code="E221")
    noticed["modes_of_sequences_left_out"] += size - expected
    return _Header(_TYPES[code], sequences, entries - 1)


def _ends(index: Path, header: _Header, tokens: int, noticed: Counter[str] | None = None) -> NDArray[np.int64]:
    """Return where documents end, in tokens. Raises: CacheError E221 unless sequences lie end to end."""
    count = header.sequences
    with open(open_regular(index), "rb") as file:
        file.seek(_HEADER.size)
        sizes = ("<i4", count), ("<i8", count), ("<i8", header.documents + 1)
        lengths, pointers, borders = (np.fromfile(file, dtype, count=size) for dtype, size in sizes)
    if len(borders) <= header.documents:
        raise CacheError(index, "ends while it is read", f"{header.documents + 1:,} borders", code="E203")
    ends = np.cumsum(lengths, dtype=np.int64)
    if np.any(lengths < 0) or np.any(pointers != np.dtype(header.dtype).itemsize * (ends - lengths)):
        raise CacheError(index, "sequences that do not lie end to end in the .bin file", code="E221")
    if borders[0] != 0 or borders[-1] != count or np.any(np.diff(borders) < 0):
        raise CacheError(index, "borders of documents", f"from 0 to {count:,}, ascending", code="E221")
    return checked_ends(np.append(0, ends)[borders[1:]], tokens, index, noticed)
