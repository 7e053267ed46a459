"""Many files mapped as one array: side by side in one address range, each when it is needed.

Python's mmap cannot place a map. Before 3.13 it also keeps a descriptor for each map: a process may have 1,024 by
default, and a cache may have more shards. The calls and constants here are Linux's. On other systems `HAS_FILE_MAPS` is
false, `mapped_file` uses Python's mmap, and windows are read by positioned reads.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

HAS_FILE_MAPS: bool = sys.platform == "linux"
"""Whether `FileMaps` may be used."""
_libc: Any = None
if HAS_FILE_MAPS:
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_munmap = _libc.munmap if HAS_FILE_MAPS else None
_FAILED = ctypes.c_void_p(-1).value
# Constants of Linux; Python's module lacks MAP_FIXED.
_PROT_NONE, _PROT_READ = 0, 1
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 1, 2, 0x10, 0x20
_MADV_RANDOM = 1


class MapError(OSError):
    """Memory could not be mapped."""

    code = "E507"


class FileMaps:
    """The bytes of several files, read-only. `numpy.asarray` gives a uint8 array that keeps the maps alive.

    File i is at bytes starts[i] to starts[i] + sizes[i], and begins at a page boundary. To read a file before its `add`
    kills the process.
    """

    num_in_process: ClassVar[int] = 0
    """Number of files that all objects of this class have mapped now."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: bytes of each file, above 0; at least one. Raises: MapError E507 without such an address range."""
        self.sizes, (*self.starts, end) = sizes, page_starts(sizes)
        self._num_bytes = self._num_files = 0  # nothing to unmap yet
        self._address = _mmap(None, end, -1, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS)
        self._num_bytes = end
        self.__array_interface__: dict[str, Any] = {
            "data": (self._address, True),  # read-only
            "shape": (self.starts[-1] + sizes[-1],),
            "typestr": "|u1",
            "version": 3,
        }

    def add(self, number: int, handle: int, *, random: bool = False) -> None:
        """Map file `number` from its open descriptor, which may be closed afterwards. Raises: MapError E507.

        random: advise the kernel not to read ahead.
        """
        address, size = self._address + self.starts[number], self.sizes[number]
        _mmap(address, size, handle, _PROT_READ, _MAP_SHARED | _MAP_FIXED)
        self._num_files += 1
        FileMaps.num_in_process += 1
        if random:
            _libc.madvise(address, size, _MADV_RANDOM)  # advice only: a failure does no harm

    def __del__(self, munmap: Callable[[int, int], int] | None = _munmap) -> None:
        if self._num_bytes and munmap is not None:
            munmap(self._address, self._num_bytes)
            type(self).num_in_process -= self._num_files  # by its type: at exit the name of the class may be gone


def has_room(num_files: int) -> bool:
    """Return whether this process may map that many more files: in all a third of the maps that Linux allows it.

    A file takes two maps, itself and the gap before the next one. A process without maps left can allocate no memory.
    """
    return FileMaps.num_in_process + num_files <= _most_files()


@functools.cache
def _most_files() -> int:
    try:
        with open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
            return int(file.read()) // 3
    except (OSError, ValueError):
        return 65_530 // 3  # the kernel's default


def mapped_file(handle: int, size: int) -> NDArray[np.uint8]:
    """Map one file from its open descriptor, which may be closed afterwards: uint8 [size], read-only.

    size: above 0. Raises: OSError.
    """
    if not HAS_FILE_MAPS:
        return np.frombuffer(mmap.mmap(handle, size, access=mmap.ACCESS_READ), dtype=np.uint8)
    maps = FileMaps([size])
    maps.add(0, handle)
    return np.asarray(maps)


def page_starts(sizes: Sequence[int]) -> list[int]:
    """Return the start of each file at a page boundary, and last the end of all. sizes: bytes."""
    return [0, *accumulate(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)]


def _mmap(at: int | None, size: int, handle: int, access: int, flags: int) -> int:
    address: int = _libc.mmap(at, size, access, flags, handle, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise MapError(
            number,
            f"{os.strerror(number)}: {size} bytes cannot be mapped. The limits are `ulimit -v` and the number of maps, "
            "`sysctl vm.max_map_count`",
        )
    return address


def memory_bytes() -> int:
    """Return the memory limit of this process: the machine's, or its control group's if that is smaller."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(machine, int(file.read()))
    except (OSError, ValueError):  # no control group, or "max"
        return machine
