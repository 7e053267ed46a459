"""Memory-mapped token files and their offsets. Opened read-only; nothing is loaded, nothing is ever written."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import OFFSET_DTYPE, TOKEN_BYTES, TOKEN_NUMPY_DTYPE
from niels_gpt.fileio import CacheError
from niels_gpt.records import open_regular, shortened

_REBUILD = "Rebuild the cache: python -m niels_gpt.cache.cli build-all"
_OFFSET_BYTES = 8
_MAX_HEADER = 1 << 16  # version 1.0 of .npy has no longer one
# What numpy.save writes for any array without fields; evaluating the header, as numpy.load does, is not needed.
_NPY_HEADER = re.compile(
    rb"\{'descr': '([^']{1,20})', 'fortran_order': (?:False|True), 'shape': \(([0-9, ]{0,99})\), \} *\n"
)


def mmap_tokens(path: str | os.PathLike[str], *, expected_bytes: int | None = None) -> NDArray[np.uint16]:
    """Map a token file; returns uint16 [tokens], read-only, as a plain ndarray over the map.

    A plain ndarray slices 1.5 to 1.9 times faster than numpy's memmap class. Closing is left to the garbage collector.
    expected_bytes: the size that meta.json gives.
    Raises: FileNotFoundError; CacheError for an empty file, an odd length, another size than expected, or a path that
        is no regular file: links are not followed.
    """
    handle = _opened(path, "token file")
    try:
        size = os.fstat(handle).st_size
        if expected_bytes is not None and size != expected_bytes:
            raise CacheError(f"{os.fspath(path)}: {size} bytes, expected {expected_bytes} by its meta.json. {_REBUILD}")
        if size == 0:
            raise CacheError(f"{os.fspath(path)}: an empty file: this split has no token, or it was cut. {_REBUILD}")
        if size % TOKEN_BYTES:
            raise CacheError(
                f"{os.fspath(path)}: {size} bytes, expected a multiple of {TOKEN_BYTES} (uint16). {_REBUILD}"
            )
        mapped = mmap.mmap(handle, size, access=mmap.ACCESS_READ)
    finally:
        os.close(handle)
    return np.frombuffer(mapped, dtype=TOKEN_NUMPY_DTYPE)


def load_idx(path: str | os.PathLike[str], *, num_tokens: int, expected_bytes: int | None = None) -> NDArray[np.int64]:
    """Map an offsets file; returns int64 [examples]: example i is tokens[idx[i]:idx[i + 1]], the last goes to the end.

    expected_bytes: the size that meta.json gives.
    Raises: FileNotFoundError; CacheError unless it is a regular file, its header is that of a 1-D int64 array, as
        numpy.save writes it in version 1.0 or 2.0, of the size that the file has, and it begins at 0, ascends
        strictly, and stays below `num_tokens`: no example is empty.
    """
    offsets = _mapped_npy(path, expected_bytes)
    if len(offsets) == 0:
        raise CacheError(f"{os.fspath(path)}: no example in this split, or it was cut. {_REBUILD}")
    if offsets[0] != 0:
        raise CacheError(f"{os.fspath(path)}: begins at {offsets[0]}, expected 0. {_REBUILD}")
    # Not by differences: those of hostile numbers overflow.
    falling = np.flatnonzero(offsets[1:] <= offsets[:-1])
    if len(falling):
        raise CacheError(f"{os.fspath(path)}: offsets do not ascend at entry {falling[0] + 1}. {_REBUILD}")
    if offsets[-1] >= num_tokens:
        raise CacheError(
            f"{os.fspath(path)}: offset {offsets[-1]} lies beyond the {num_tokens} tokens of {_tokens_beside(path)}. "
            + _REBUILD
        )
    return offsets


def _mapped_npy(path: str | os.PathLike[str], expected_bytes: int | None) -> NDArray[np.int64]:
    """Map a .npy file of one dimension of int64, of which nothing is believed that its size does not confirm."""
    handle = _opened(path, "offsets file")
    try:
        size = os.fstat(handle).st_size
        if expected_bytes is not None and size != expected_bytes:
            raise CacheError(f"{os.fspath(path)}: {size} bytes, expected {expected_bytes} by its meta.json. {_REBUILD}")
        start, count = _header(os.fspath(path), os.pread(handle, _MAX_HEADER, 0))
        if size != start + count * _OFFSET_BYTES:
            raise CacheError(
                f"{os.fspath(path)}: {size} bytes, expected {start + count * _OFFSET_BYTES} by its own header, which "
                f"has {count} entries. {_REBUILD}"
            )
        mapped = mmap.mmap(handle, size, access=mmap.ACCESS_READ)
    finally:
        os.close(handle)
    return np.frombuffer(mapped, dtype=OFFSET_DTYPE, offset=start, count=count)


def _header(path: str, begin: bytes) -> tuple[int, int]:
    """Return where the numbers of a .npy file start, in bytes, and how many there are, by the first bytes of it."""
    width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}.get(begin[:8], 0)
    start = 8 + width + int.from_bytes(begin[8 : 8 + width], "little")
    header = _NPY_HEADER.fullmatch(begin[8 + width : start])
    if not width or start > len(begin) or header is None:
        raise CacheError(f"{path}: not a .npy file of plain numbers: it begins {shortened(begin[:60])}. {_REBUILD}")
    descr, shape = header.group(1).decode(errors="replace"), header.group(2).decode()
    count = re.fullmatch(r"(\d{1,19}),", shape)
    if descr != np.dtype(OFFSET_DTYPE).str or count is None:
        raise CacheError(f"{path}: {descr} of shape ({shape}), expected int64 [examples]. {_REBUILD}")
    return start, int(count.group(1))


def _opened(path: str | os.PathLike[str], what: str) -> int:
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{os.fspath(path)}: no such {what}. {_REBUILD}") from None


def _tokens_beside(path: str | os.PathLike[str]) -> str:
    return Path(path).name.replace("_idx.npy", "_tokens.bin")
