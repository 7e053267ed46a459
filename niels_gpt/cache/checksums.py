"""Compare the bytes of a file with the CRC-32 of its 64 KiB blocks, in index/crc32.bin.

A file of another version often has the right size. A reader compares the first and the last block of each file when a
process first opens it, which finds every file that was swapped as a whole. With check="blocks" it compares each block
when it is first read, which finds every changed byte. Caches of builder 1 and of other tools have no such checksums.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import BLOCK_BYTES, crc32, num_blocks
from niels_gpt.storage.errors import REBUILD, CacheError
from niels_gpt.storage.meta_json import file_records, open_regular, path_inside, read_regular
from niels_gpt.storage.mounted import MOUNTED

CRC_DTYPE: np.dtype[np.uint32] = np.dtype("<u4")
Check = Literal["ends", "blocks"]
"""Blocks that a reader compares: the ends of each file once per process, or each block that it reads."""

_MAX_OWN = 1 << 24
"""Most bytes of checksums that are hashed at the first opening, in 10 ms: enough for 256 GiB of files."""
_compared: set[tuple[Any, ...]] = set()
"""Files whose ends this process, or the one that it was forked from, has compared."""


def covered_files(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the records of files with block checksums, in the order of the checksums; [] without checksums."""
    name = meta["checksums"]["name"] if "checksums" in meta else None
    return [record for record in file_records(meta) if record["name"] != name] if name is not None else []


def stored_checksums(folder: Path, meta: Mapping[str, Any]) -> dict[str, NDArray[np.uint32]]:
    """Return the stored checksums of each file's blocks: name -> uint32 [blocks].

    Returns {} if the builder stored none, or their file cannot be read or has another size.
    """
    covered = covered_files(meta)
    if not covered or meta["checksums"].get("block_bytes") != BLOCK_BYTES:
        return {}
    counts = [num_blocks(record["bytes"]) for record in covered]
    try:
        raw = read_regular(path_inside(folder, meta["checksums"]["name"]), CRC_DTYPE.itemsize * sum(counts))
    except (OSError, CacheError):
        return {}
    if len(raw) != CRC_DTYPE.itemsize * sum(counts):
        return {}
    parts = np.split(np.frombuffer(raw, dtype=CRC_DTYPE), np.cumsum(counts)[:-1])
    return {record["name"]: part for record, part in zip(covered, parts, strict=True)}


def checked_check(check: str) -> None:
    """Raise ValueError unless `check` is one of `Check`."""
    if check not in get_args(Check):
        raise ValueError(f"check={check!r}: expected one of {', '.join(get_args(Check))}")


class BlockSums:
    """Checksums of one version of a cache, read block by block; false without any. May be pickled."""

    def __init__(self, folder: Path, meta: Mapping[str, Any] | None, check: str = "ends") -> None:
        """folder: of the version, resolved. check: one of `Check`. Raises: ValueError for another."""
        checked_check(check)
        self.folder, self._check = folder, check
        self.mount = MOUNTED.get(str(folder))
        """What brings the files, of a cache at a URL; it compares each block itself."""
        self._meta = meta if meta is not None and _has_sums(folder, meta) else None
        self._record: dict[str, Any] = {} if self._meta is None else dict(self._meta["checksums"])
        self._content = str((meta or {}).get("content_sha256"))
        self._first: dict[str, int] | None = None
        self._seen: dict[str, bytearray] = {}  # of each file: a byte for each block that was compared

    def __bool__(self) -> bool:
        return bool(self._record)

    @property
    def _firsts(self) -> dict[str, int]:
        """Number of each file's first block among all blocks; found when a file is first opened."""
        meta = self._meta  # before _first is looked at: another thread may set both
        if self._first is None and meta is not None:
            first, total = {}, 0
            for record in covered_files(meta):
                first[record["name"]] = total
                total += num_blocks(record["bytes"])
            # A file of another size is not compared: `verify` describes the damage.
            self._first = first if self._record.get("bytes") == CRC_DTYPE.itemsize * total else {}
            self._meta = None
        return self._first or {}

    @property
    def every_block(self) -> bool:
        """Whether each block is compared when it is first read."""
        return self._check == "blocks" and bool(self)

    @property
    def in_blocks(self) -> bool:
        """Whether files are read block by block, so that they cannot be mapped: each is compared, or fetched."""
        return self.every_block or self.mount is not None

    def check_opened(self, path: Path, handle: int, *, whole: bool = False) -> None:
        """Compare the first and the last block of an open file, once per process.

        whole: the caller reads all of it: with check="blocks" every block is compared now.
        Raises: CacheError E201 naming the file and the bytes; E203 or E204 for the file of checksums itself.
        """
        if not self:
            return
        about = os.fstat(handle)
        if whole and self.every_block:
            self.touch(path, about.st_size, 0, about.st_size, lambda number: _pread(handle, number))
            return
        key = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, self._content
        if key in _compared:
            return
        name = self._name(path)
        if name is not None and about.st_size:
            last = num_blocks(about.st_size) - 1
            self._compare(path, name, sorted({0, last}), lambda number: _pread(handle, number))
        _compared.add(key)

    def touch(self, path: Path, size: int, begin: int, end: int, block: Callable[[int], Any]) -> None:
        """Compare the blocks of bytes begin to end - 1 that were not compared before.

        size: of the file. block: returns the bytes of a block by its number.
        Raises: CacheError E201 naming the file and the bytes; E203 or E204 for the file of checksums itself.
        """
        name = self._name(path)
        if name is None or end <= begin:
            return
        seen = self._seen.get(name)
        if seen is None:
            seen = self._seen[name] = bytearray(num_blocks(size))
        first, last = begin // BLOCK_BYTES, num_blocks(end)
        number = seen.find(0, first, last)
        while number >= 0:
            self._compare(path, name, [number], block)
            seen[number] = 1
            number = seen.find(0, number, last)

    def _name(self, path: Path) -> str | None:
        """Return a file's name in meta.json; None if it has no checksums."""
        try:
            name = path.relative_to(self.folder).as_posix()
        except ValueError:
            return None
        return name if self._record and name in self._firsts else None

    def _compare(self, path: Path, name: str, numbers: list[int], block: Callable[[int], Any]) -> None:
        stored = self._stored([self._firsts[name] + number for number in numbers])
        for number, crc in zip(numbers, stored, strict=True):
            content = block(number)
            if crc32(content) != crc:
                self._refuse_wrong_sums()
                start = number * BLOCK_BYTES
                found = f"bytes {start} to {start + len(content)} do not match their checksum"
                why = f"The file is damaged, or of another version than {self._record['name']}"
                raise CacheError(path, found, remedy=f"{why}. {REBUILD}", code="E201")

    def _stored(self, numbers: list[int]) -> Iterator[int]:
        path = path_inside(self.folder, self._record["name"])
        self._check_own(path)
        try:
            handle = open_regular(path)
        except FileNotFoundError:
            raise CacheError(path, "no such file", "the checksums of the cache", REBUILD, code="E204") from None
        try:
            if (size := os.fstat(handle).st_size) != self._record["bytes"]:
                expected = f"{self._record['bytes']} by its meta.json"
                raise CacheError(path, f"{size} bytes", expected, REBUILD, code="E203")
            width = CRC_DTYPE.itemsize
            return iter([int.from_bytes(os.pread(handle, width, width * number), "little") for number in numbers])
        finally:
            os.close(handle)

    def _check_own(self, path: Path) -> None:
        """Compare the sha256 of the checksums themselves, once per process; large ones only with check="blocks"."""
        if self._record["bytes"] > _MAX_OWN and not self.every_block:
            return
        with suppress(FileNotFoundError):  # the caller says so
            about = os.stat(path, follow_symlinks=False)
            key = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, self._content
            if key not in _compared and about.st_size == self._record["bytes"]:
                self._refuse_wrong_sums()
                _compared.add(key)

    def _refuse_wrong_sums(self) -> None:
        """Raise CacheError if the checksums are damaged themselves: the file that they blame may be good."""
        path = path_inside(self.folder, self._record["name"])
        raw = read_regular(path, self._record["bytes"])
        if hashlib.sha256(raw).hexdigest() != self._record["sha256"]:
            found = "its bytes do not match its sha256, so it cannot tell which files are good"
            raise CacheError(path, found, remedy=REBUILD, code="E201")


def _has_sums(folder: Path, meta: Mapping[str, Any]) -> bool:
    """Return whether a cache has checksums of these blocks. Their file may be absent, because training does not need
    it."""
    record = meta.get("checksums", {})
    return record.get("block_bytes") == BLOCK_BYTES and os.path.lexists(folder / str(record.get("name")))


def _pread(handle: int, number: int) -> bytes:
    """Return a block of an open file. A network file system may return less than requested, so it reads until all is
    there."""
    parts, at, end = [], number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES
    while at < end and (part := os.pread(handle, end - at, at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


class CheckedItems:
    """Map of a file whose blocks are compared when they are first sliced."""

    def __init__(self, items: NDArray[Any], path: Path, sums: BlockSums) -> None:
        """items: of the whole file."""
        self._items, self._path, self._sums = items, path, sums
        self._bytes = items.view(np.uint8).data

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, some: slice) -> NDArray[Any]:
        """Return items of the file. Raises: CacheError E201 for a block with another checksum."""
        begin, end, _ = some.indices(len(self._items))
        size = self._items.itemsize
        self._sums.touch(self._path, len(self._bytes), begin * size, end * size, self._block)
        found: NDArray[Any] = self._items[begin:end]
        return found

    def _block(self, number: int) -> memoryview:
        return self._bytes[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
