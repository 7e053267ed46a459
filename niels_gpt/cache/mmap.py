"""Memory-mapped token files and their offsets. Opened read-only; nothing is loaded, nothing is ever written."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import OFFSET_DTYPE, TOKEN_BYTES, TOKEN_NUMPY_DTYPE
from niels_gpt.fileio import CacheError

_REBUILD = "Rebuild the cache: python -m niels_gpt.cache.cli build-all"


def mmap_tokens(path: str | os.PathLike[str], *, expected_bytes: int | None = None) -> NDArray[np.uint16]:
    """Map a token file; returns uint16 [tokens], read-only, as a plain ndarray over the map.

    A plain ndarray slices 1.5 to 1.9 times faster than numpy's memmap class. Closing is left to the garbage collector.
    expected_bytes: the size that meta.json gives.
    Raises: FileNotFoundError; CacheError for an empty file, an odd length, or another size than expected.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"{os.fspath(path)}: no such token file. {_REBUILD}")
    size = os.path.getsize(path)
    if expected_bytes is not None and size != expected_bytes:
        raise CacheError(f"{os.fspath(path)}: {size} bytes, expected {expected_bytes} by its meta.json. {_REBUILD}")
    if size == 0:
        raise CacheError(f"{os.fspath(path)}: an empty file: this split has no token, or it was cut. {_REBUILD}")
    if size % TOKEN_BYTES:
        raise CacheError(f"{os.fspath(path)}: {size} bytes, expected a multiple of {TOKEN_BYTES} (uint16). {_REBUILD}")
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, dtype=TOKEN_NUMPY_DTYPE)


def load_idx(path: str | os.PathLike[str], *, num_tokens: int) -> NDArray[np.int64]:
    """Map an offsets file; returns int64 [examples]: example i is tokens[idx[i]:idx[i + 1]], the last goes to the end.

    Raises: FileNotFoundError; CacheError unless it is a 1-D int64 array that begins at 0, ascends strictly, and stays
        below `num_tokens`: no example is empty.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"{os.fspath(path)}: no such offsets file. {_REBUILD}")
    try:
        idx = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        raise CacheError(f"{os.fspath(path)}: not a .npy file ({error}). {_REBUILD}") from error
    if not isinstance(idx, np.ndarray) or idx.dtype != OFFSET_DTYPE or idx.ndim != 1:
        found = f"{idx.dtype} {list(idx.shape)}" if isinstance(idx, np.ndarray) else type(idx).__name__
        raise CacheError(f"{os.fspath(path)}: {found}, expected int64 [examples]. {_REBUILD}")
    offsets: NDArray[np.int64] = idx.view(np.ndarray)
    if len(offsets) == 0:
        raise CacheError(f"{os.fspath(path)}: no example in this split, or it was cut. {_REBUILD}")
    if offsets[0] != 0:
        raise CacheError(f"{os.fspath(path)}: begins at {offsets[0]}, expected 0. {_REBUILD}")
    falling = np.flatnonzero(np.diff(offsets) <= 0)
    if len(falling):
        raise CacheError(f"{os.fspath(path)}: offsets do not ascend at entry {falling[0] + 1}. {_REBUILD}")
    if offsets[-1] >= num_tokens:
        raise CacheError(
            f"{os.fspath(path)}: offset {offsets[-1]} lies beyond the {num_tokens} tokens of {_tokens_beside(path)}. "
            + _REBUILD
        )
    return offsets


def _tokens_beside(path: str | os.PathLike[str]) -> str:
    return Path(path).name.replace("_idx.npy", "_tokens.bin")
