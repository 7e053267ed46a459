"""The on-disk primitives of every token cache, written as a stream and hashed on the way.

Token files are headerless little-endian uint16. Arrays of offsets are .npy files (version 1.0) of little-endian int64.
docs/formats.md gives both byte by byte.
"""

from __future__ import annotations

import hashlib
from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.fileio import sha256_file

TOKEN_DTYPE: np.dtype[np.uint16] = np.dtype("<u2")
OFFSET_DTYPE: np.dtype[np.int64] = np.dtype("<i8")
TOKEN_DTYPE_NAME = "uint16-le"
TOKEN_BYTES = TOKEN_DTYPE.itemsize
_NPY_HEADER_BYTES = 128
_PENDING_OFFSETS = 1 << 16


class HashedFile:
    """A new file whose sha256 is known when it is closed; `files` closes it too where a build fails."""

    def __init__(self, path: Path, files: ExitStack) -> None:
        self._file = files.enter_context(open(path, "wb"))
        self._sha256 = hashlib.sha256()
        self.num_bytes = 0

    def write(self, content: Any) -> None:
        """Append bytes, or anything with their buffer."""
        view = memoryview(content).cast("B") if len(content) else b""
        self._file.write(view)
        self._sha256.update(view)
        self.num_bytes += len(view)

    def close(self) -> str:
        """Close the file and return its hex sha256. Durability comes with the commit, which syncs every file."""
        self._file.close()
        return self._sha256.hexdigest()


class ShardWriter:
    """Cuts a stream of ids into shard_00000.bin, shard_00001.bin, ... Every shard but the last is exactly full."""

    def __init__(self, root: Path, split: str, files: ExitStack, *, shard_bytes: int) -> None:
        if shard_bytes < TOKEN_BYTES:
            raise ValueError(f"shard_bytes={shard_bytes}: expected at least {TOKEN_BYTES}, the bytes of one token")
        self._root, self._split, self._files = root, split, files
        self._shard_tokens = shard_bytes // TOKEN_BYTES
        self._open: HashedFile | None = None
        self._records: list[dict[str, Any]] = []
        (root / split).mkdir()

    def write(self, ids: NDArray[np.uint16]) -> None:
        """Append uint16 ids [n]."""
        while len(ids):
            if self._open is None:
                self._open = HashedFile(self._root / self._name(), self._files)
            room = self._shard_tokens - self._open.num_bytes // TOKEN_BYTES
            self._open.write(np.ascontiguousarray(ids[:room], dtype=TOKEN_DTYPE))
            ids = ids[room:]
            if self._open.num_bytes == self._shard_tokens * TOKEN_BYTES:
                self._finish()

    def close(self) -> list[dict[str, Any]]:
        """Return the record of each shard: name, tokens, bytes, sha256."""
        if self._open is not None:
            self._finish()
        return self._records

    def _name(self) -> str:
        return f"{self._split}/shard_{len(self._records):05d}.bin"

    def _finish(self) -> None:
        assert self._open is not None
        name = self._name()
        self._records.append(file_record(name, self._open.num_bytes // TOKEN_BYTES, self._open))
        self._open = None


def file_record(name: str, tokens: int, file: HashedFile) -> dict[str, Any]:
    """Close a token file and return its entry in meta.json."""
    return {"name": name, "tokens": tokens, "bytes": file.num_bytes, "sha256": file.close()}


class OffsetsWriter:
    """An int64 .npy array of unknown length: the header is written last, the offsets go to disk as they come."""

    def __init__(self, root: Path, name: str, files: ExitStack) -> None:
        self._path, self._name = root / name, name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = files.enter_context(open(self._path, "wb"))
        self._file.write(b"\0" * _NPY_HEADER_BYTES)
        self._pending = array("q")
        self._count = 0

    def append(self, offset: int) -> None:
        """Append one offset."""
        self._pending.append(offset)
        self._count += 1
        if len(self._pending) == _PENDING_OFFSETS:
            self._flush()

    def close(self) -> dict[str, Any]:
        """Write the header and return the array's entry in meta.json: name, entries, bytes, sha256."""
        self._flush()
        self._file.seek(0)
        self._file.write(npy_header(self._count))
        self._file.close()
        digest = sha256_file(self._path)  # the header came last, so the hash needs a second, cheap read
        return {"name": self._name, "entries": self._count, "bytes": self._path.stat().st_size, "sha256": digest}

    def _flush(self) -> None:
        self._file.write(np.array(self._pending, dtype=OFFSET_DTYPE).tobytes())
        del self._pending[:]


def npy_header(count: int) -> bytes:
    """Return the 128 bytes that numpy.save puts before an int64 [count] array (NEP 1, version 1.0)."""
    entry = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count},), }}".encode()
    return b"\x93NUMPY\x01\x00v\x00" + entry.ljust(_NPY_HEADER_BYTES - 11) + b"\n"
