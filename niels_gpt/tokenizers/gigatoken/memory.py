"""When the cache of gigatoken has to be dropped, by the size of the process."""

from __future__ import annotations

import ctypes
import os
from typing import Final

_LOOK_EVERY: Final = 1 << 20
"""Bytes of text between two looks at the size of the process. New words take up to 11 bytes for each byte of text."""
_WITHOUT_SIZE: Final = 256 << 20
"""Bytes of text after which it is opened again where a process cannot see its size: elsewhere than on Linux."""


class Memory:
    """Decides when the cache has to be dropped, by the size of the process.

    A process grows for other reasons too, such as a shuffle buffer that fills. Where a drop gave back less than a
    quarter of the growth, the next one waits for twice the growth: a process of any size drops a few times for nothing.
    """

    def __init__(self, max_growth: int) -> None:
        """max_growth: bytes."""
        self.times_reopened = 0
        self._max_growth = self._allowed = max_growth
        self._encoded = 0  # bytes of text since the last look
        self._lowest = process_size()
        self._at_drop: int | None = None

    def is_full(self, num_bytes: int) -> bool:
        """Count bytes of encoded text; return whether to drop the cache now."""
        self._encoded += num_bytes
        if self._encoded < (_LOOK_EVERY if self._lowest is not None else _WITHOUT_SIZE):
            return False
        self._encoded = 0
        if self._lowest is not None and not self._has_grown(self._lowest):
            return False
        self.times_reopened += 1
        return True

    def _has_grown(self, lowest: int) -> bool:
        if self._at_drop is not None:  # by now no thread has the dropped cache
            _return_free_memory()
        size = process_size() or lowest
        if self._at_drop is not None:
            is_useful = self._at_drop - size >= (self._at_drop - lowest) // 4
            self._allowed = self._max_growth if is_useful else 2 * self._allowed
            self._at_drop, lowest = None, size
        self._lowest = min(lowest, size)
        if size - self._lowest < self._allowed:
            return False
        self._at_drop = size
        return True


def process_size() -> int | None:
    """Return the bytes of memory that this process uses (its resident set); None where that cannot be read."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def _return_free_memory() -> None:
    """Let glibc return to the system what lies free in its arenas: a third of a dropped cache."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
