"""How many documents have the text of an earlier one: counted from the digests on disk, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DIGEST_DTYPE: np.dtype[np.uint64] = np.dtype("<u8")
MOST_DIGESTS = 1 << 24
"""Distinct digests of a pass over the file: 128 MiB, and as much again while they are sorted."""
_READ = 1 << 20  # digests at once


def count_duplicates(path: Path, *, most: int = MOST_DIGESTS) -> int:
    """Return how many of a file's 8-byte digests equal an earlier one of the file.

    most: digests that a pass looks at, about. A larger file is read several times: each pass takes those of a range.
    """
    count = path.stat().st_size // DIGEST_DTYPE.itemsize
    passes = max(1, -(-count // most))
    return count - sum(_distinct(path, number, passes, most) for number in range(passes))


def num_duplicates(digests: NDArray[np.generic]) -> int:
    """Return how many of some digests in memory equal an earlier one."""
    return len(digests) - len(np.unique(digests))


def _distinct(path: Path, number: int, passes: int, most: int) -> int:
    """Count the distinct digests of one of `passes` ranges; equal ones are removed now and then: they may be many."""
    found = np.empty(0, dtype=DIGEST_DTYPE)
    parts, held = [found], 0
    with open(path, "rb") as file:
        while len(some := np.fromfile(file, dtype=DIGEST_DTYPE, count=_READ)):
            if passes > 1:
                some = some[(some >> np.uint64(32)) * np.uint64(passes) >> np.uint64(32) == number]
            parts.append(some)
            held += len(some)
            if held > 2 * max(most, len(found)):
                found = np.unique(np.concatenate(parts))
                parts, held = [found], len(found)
    return len(np.unique(np.concatenate(parts)))
