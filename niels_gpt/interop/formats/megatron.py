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
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.interop.foreign import ForeignFolder
from niels_gpt.interop.formats.chunks import chunked, least_shards
from niels_gpt.interop.output import Output
from niels_gpt.interop.token_cache import TokenCache
from niels_gpt.storage.errors import CacheError

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPE_OF_WIDTH = {2: 8, 4: 4}
_MAX = np.iinfo(np.int32).max


def write(cache: TokenCache, output: Output) -> None:
    """Link each shard as SPLIT_NNNNN.bin, and write its .idx.

    Raises: CacheError E220 for ids from 2**31 on, and for a document of 2**31 tokens in one shard.
    """
    if cache.vocab_size > _MAX + 1:
        raise CacheError(
            cache.path, f"vocab_size is {cache.vocab_size:,}", "at most 2**31: Megatron-LM has no uint32", code="E220"
        )
    for split in SPLITS:
        for file in cache.files(split):
            ends = file.ends
            if file.tokens > _MAX and int(np.diff(ends, prepend=0).max()) > _MAX:
                raise least_shards(file, "Megatron-LM counts in a sequence")
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
    """Look into a folder of pairs of .bin and .idx files."""
    raise CacheError(source, "cannot be imported yet", code="E221")
