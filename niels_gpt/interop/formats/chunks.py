"""What several formats write alike: arrays in pieces, and the error of a shard that is too long for a format."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from niels_gpt.interop.token_cache import TokenFile
from niels_gpt.storage.errors import CacheError

_CHUNK = 1 << 19


def chunked(ends: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield an array in pieces of some MiB."""
    for begin in range(0, len(ends), _CHUNK):
        yield ends[begin : begin + _CHUNK]


def spans(ends: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield where documents start and end, in pieces: int64 [some documents, 2]."""
    first = 0
    for some in chunked(ends):
        yield np.stack([np.append(first, some[:-1]), some], axis=1)
        first = int(some[-1])


def too_long(file: TokenFile, limit: str) -> CacheError:
    """Return the error of a token file with more tokens than a format counts."""
    remedy = "Build the cache with a smaller --shard-bytes, for instance 134217728"
    return CacheError(file.path, f"{file.tokens:,} tokens", f"at most 2**31 - 1, which {limit}", remedy, code="E220")
