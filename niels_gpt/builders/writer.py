"""Writes a cache's files as streams and hashes them: token files, .npy offsets, lines of source ids.

Token files are headerless little-endian uint16 or uint32. Arrays of offsets are .npy files (version 1.0) of
little-endian int64. docs/formats.md gives both byte by byte.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cache.formats import BLOCK_BYTES, OFFSET_DTYPE, npy_header
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import OutputFile
from niels_gpt.storage.meta_json import open_regular

_READ_BYTES = 1 << 20


class BlockHashes:
    """The sha256 of a stream of bytes, and the CRC-32 of each of its blocks."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes so far."""
        self._sha256, self._crcs, self._crc = hashlib.sha256(), array("I"), 0

    @property
    def sha256(self) -> str:
        """The hex sha256 of the bytes so far."""
        return self._sha256.hexdigest()

    def update(self, content: Any) -> None:
        """Take the next bytes, or anything with a buffer of them."""
        view = memoryview(content).cast("B") if len(content) else memoryview(b"")
        self._sha256.update(view)
        while len(view):
            part = view[: BLOCK_BYTES - self.num_bytes % BLOCK_BYTES]
            self._crc = zlib.crc32(part, self._crc)
            self.num_bytes += len(part)
            view = view[len(part) :]
            if self.num_bytes % BLOCK_BYTES == 0:
                self._crcs.append(self._crc)
                self._crc = 0

    def checksums(self) -> bytes:
        """Return the CRC-32 of each block, as uint32-le; the last block may be shorter."""
        whole = np.asarray(self._crcs, dtype="<u4").tobytes()
        return whole + self._crc.to_bytes(4, "little") if self.num_bytes % BLOCK_BYTES else whole


class HashedFile:
    """An append-only file, its sha256, and the CRC-32 of each of its blocks."""

    def __init__(
        self,
        path: Path,
        *,
        keep: int = 0,
        sha256: str | None = None,
        before_open: Callable[[], None] | None = None,
    ) -> None:
        """keep, sha256: the bytes to keep of an earlier run, and their hash; later bytes are truncated.

        before_open: called after those bytes were read and before the file is created or truncated.
        Raises: CacheError if the file does not begin with those bytes; as `before_open`.
        """
        self.path = path
        self.hashes = BlockHashes()
        """Of the bytes in the file."""
        if keep:
            self._reread(keep, sha256)
        if before_open is not None:
            before_open()
        self._file = OutputFile(path, keep=keep)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, those of earlier runs included."""
        return self._file.num_bytes

    @property
    def sha256(self) -> str:
        """The hex sha256 of the bytes so far."""
        return self.hashes.sha256

    def write(self, content: Any) -> None:
        """Append bytes, or anything with a buffer of them."""
        self._file.write(content)
        self.hashes.update(content)

    def sync(self) -> None:
        """Make the bytes written so far durable."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def moved(self, root: Path, name: str) -> dict[str, Any]:
        """Sync and close the file and move it to `root/name`; returns its name, bytes and sha256."""
        self.sync()
        self.close()
        fileio.make_dir((root / name).parent)
        fileio.rename(self.path, root / name)
        return {"name": name, "bytes": self.num_bytes, "sha256": self.sha256}

    def checksums(self) -> bytes:
        """Return the CRC-32 of each block, as uint32-le; the last block may be shorter."""
        return self.hashes.checksums()

    def _reread(self, keep: int, sha256: str | None) -> None:
        with open(open_regular(self.path), "rb") as file:
            while self.hashes.num_bytes < keep and (
                content := file.read(min(_READ_BYTES, keep - self.hashes.num_bytes))
            ):
                self.hashes.update(content)
        if (position := self.hashes.num_bytes) < keep or self.sha256 != sha256:
            expected = f"{keep} of sha256 {str(sha256)[:12]} by the journal"
            raise CacheError(self.path, f"{position} bytes of sha256 {self.sha256[:12]}", expected, code="E505")


def write_whole(root: Path, name: str, content: Iterable[Any], crcs: list[bytes] | None = None) -> dict[str, Any]:
    """Write a file of a cache and sync it; returns its record, and appends its block checksums to `crcs`."""
    file = HashedFile(root / name)
    try:
        for part in content:
            file.write(part)
        file.sync()
    finally:
        file.close()
    if crcs is not None:
        crcs.append(file.checksums())
    return {"name": name, "bytes": file.num_bytes, "sha256": file.sha256}


def checksums_of(path: Path, num_bytes: int, sha256: str) -> bytes:
    """Compare a finished file with its record; returns the CRC-32 of its blocks. Raises: CacheError, OSError."""
    file = HashedFile(path, keep=num_bytes, sha256=sha256)
    file.close()
    return file.checksums()


def npy_parts(path: Path, entries: int, last: int) -> Iterator[bytes]:
    """Yield an .npy file of `entries` int64: those in the file at `path`, and `last`."""
    yield npy_header(entries)
    with open(path, "rb") as file:
        yield from iter(lambda: file.read(_READ_BYTES), b"")
    yield last.to_bytes(OFFSET_DTYPE.itemsize, "little")
