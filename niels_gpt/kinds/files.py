"""Check the files of a cache: presence, size, sha256, and 64 KiB blocks that differ from their stored CRC-32.

Each file is read once, in pieces of 4 MiB, hashed and scanned in one pass. A file with wrong bytes is one damage, and
no other file is judged by it.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.checksums import CRC_DTYPE, stored_checksums
from niels_gpt.cache.formats import BLOCK_BYTES, npy_header
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, walked
from niels_gpt.storage.meta_json import file_records, open_regular, path_inside
from niels_gpt.work import Progress

if TYPE_CHECKING:
    from niels_gpt.engine.journal import BlockHashes

HEADER_BYTES = len(npy_header(0))
_READ_BYTES = 1 << 22
_NO_SUMS: NDArray[np.uint32] = np.empty(0, dtype=CRC_DTYPE)
_NO_BLOCKS: NDArray[np.intp] = np.empty(0, dtype=np.intp)
_MAX_RANGES = 20  # of damaged bytes, reported for one file
_LEFTOVER = re.compile(r"\.meta\.json\.[0-9a-f]+\.tmp")  # of a process that was killed; gc removes it

Record = dict[str, Any]


class Damage(NamedTuple):
    """Wrong bytes of a file."""

    file: str
    """Name in the cache's folder."""
    offset: int
    """First wrong byte."""
    end: int
    """Byte after the last wrong one."""
    problem: str
    """Found and expected."""


class Scan(Protocol):
    """Look for damage in one file, piece by piece."""

    def feed(self, content: memoryview, /) -> None:
        """Take the next bytes: a multiple of 8, except for the last piece."""

    def damages(self) -> Iterator[Damage]:
        """Yield the damage; called after the last byte."""


class FileChecks:
    """Files that the meta.json of one version names."""

    def __init__(
        self,
        folder: Path,
        meta: dict[str, Any],
        content_sha256: Callable[[Sequence[Record]], str],
        progress: Progress | None = None,
    ) -> None:
        """folder: of the version, resolved. content_sha256: computes it by the rule of the kind.
        progress: called with files, bytes read, and bytes to read in all."""
        self.folder, self.meta, self._content_sha256 = folder, meta, content_sha256
        self._progress = progress
        self.readable: dict[str, Record] = {}
        """Records of files that exist with their size, by name; filled by `size_damages`."""
        self.sound: set[str] = set()
        """Names of files whose sha256 is right; filled by `read`."""
        self.linked: dict[str, int] = {}
        """Files with further names (hard links), written after meta.json: number of names; filled by `size_damage`."""
        self._files_read = self._bytes_read = self._total_bytes = 0
        self._wrong_sums: list[tuple[int, int]] = []

    @functools.cached_property
    def records(self) -> list[Record]:
        """Return the records of all files. Raises: CacheError E202 for a malformed one."""
        return file_records(self.meta, str(self.folder / META_NAME))

    @functools.cached_property
    def _buffer(self) -> memoryview:
        return memoryview(bytearray(_READ_BYTES))

    @functools.cached_property
    def _stored(self) -> dict[str, tuple[int, NDArray[np.uint32]]]:
        """Stored block checksums by file name, and the number of the first one among all."""
        found, first = {}, 0
        for name, crcs in stored_checksums(self.folder, self.meta).items():
            found[name] = first, crcs
            first += len(crcs)
        return found

    def content_problem(self) -> str | None:
        """Compare content_sha256 with the records of the files. Returns the problem, or None."""
        recorded, actual = self.meta["content_sha256"], self._content_sha256(self.records)
        if actual == recorded:
            return None
        return f"content_sha256 is {str(recorded)[:12]}, but the files it names give {actual[:12]}"

    def size_damages(self) -> Iterator[Damage]:
        """Yield files that are missing, no regular files, or of another size."""
        for record in self.records:
            damage = self.size_damage(record)
            if damage is not None:
                yield damage
            else:
                self.readable[record["name"]] = record

    def size_damage(self, record: Record) -> Damage | None:
        """Compare one file with its record."""
        name, size = record["name"], record["bytes"]
        try:
            with open(open_regular(path_inside(self.folder, name)), "rb") as file:
                about = os.fstat(file.fileno())
            actual = about.st_size
            if about.st_nlink > 1 and about.st_mtime_ns > os.stat(self.folder / META_NAME).st_mtime_ns:
                self.linked[name] = about.st_nlink
        except FileNotFoundError:
            return Damage(name, 0, size, f"no such file, expected {size} bytes by its {META_NAME}")
        except CacheError as error:
            return Damage(name, 0, size, ". ".join(filter(None, (error.problem, error.own_remedy))))
        except OSError as error:
            return Damage(name, 0, size, str(error))
        if actual != size:
            expected = f"{actual} bytes, expected {size} by its {META_NAME}"
            return Damage(name, min(actual, size), max(actual, size), expected + self._why_linked(name))
        return None

    def _why_linked(self, name: str) -> str:
        """Say how a damaged file was written through another name; "" if nothing tells. A rebuild gives the cache its
        own file."""
        if (count := self.linked.get(name)) is None:
            return ""
        remedy = "rebuild the cache, or remove this name and copy a good file there"
        return f". The file has {count} names (hard links, as an export has), and was written through one: {remedy}"

    def unnamed_damages(self) -> Iterator[Damage]:
        """Yield files and links that meta.json does not name. Follows no link."""
        known = {META_NAME, *(record["name"] for record in self.records)}
        for _, names, about in walked(self.folder):
            name = "/".join(names)
            if not stat.S_ISDIR(about.st_mode) and name not in known and not _LEFTOVER.fullmatch(name):
                what = "a symbolic link" if stat.S_ISLNK(about.st_mode) else "a file"
                yield Damage(name, 0, about.st_size, f"{what} that the cache's {META_NAME} does not name")

    def sha256_damages(self) -> Iterator[Damage]:
        """Compare the sha256 of every readable file."""
        checksums = self.meta.get("checksums", {}).get("name")
        for record in sorted(self.readable.values(), key=lambda record: bool(record["name"] == checksums)):
            yield from self.read(record)  # the checksums last: `sound` tells which of their entries can be judged

    def linked_damages(self) -> Iterator[Damage]:
        """Compare the sha256 of readable files that may have been written through another name."""
        records = [record for name, record in self.readable.items() if name in self.linked]
        self._total_bytes = sum(record["bytes"] for record in records)
        for record in records:
            yield from self.read(record)

    def pieces(self, record: Record) -> Iterator[memoryview]:
        """Yield the bytes of a file. Each piece overwrites the one before."""
        with open(open_regular(path_inside(self.folder, record["name"])), "rb", buffering=0) as file:
            while count := file.readinto(self._buffer):
                yield self._buffer[:count]

    def read(self, record: Record, scans: Sequence[Scan] = ()) -> list[Damage]:
        """Compare the sha256 of a readable file, and feed its bytes to the scans.

        Removes a file that cannot be read to its end from `readable`.
        """
        from niels_gpt.engine.journal import BlockHashes

        self._files_read += 1
        self._total_bytes = self._total_bytes or sum(other["bytes"] for other in self.readable.values())
        hashes = BlockHashes()
        try:
            for content in self.pieces(record):
                hashes.update(content)
                for scan in scans:
                    scan.feed(content)
                self._bytes_read += len(content)
                if self._progress is not None:
                    self._progress(self._files_read, self._bytes_read, self._total_bytes)
        except (CacheError, OSError) as error:
            del self.readable[record["name"]]
            return [Damage(record["name"], 0, record["bytes"], str(error))]
        return self._judged(record, hashes)

    def _judged(self, record: Record, hashes: BlockHashes) -> list[Damage]:
        """Compare the hashes of a file with its record, and of its blocks with their checksums."""
        name, recorded, sha256 = record["name"], record["sha256"], hashes.sha256
        first, stored = self._stored.get(name, (0, _NO_SUMS))
        crcs = np.frombuffer(hashes.checksums(), dtype=CRC_DTYPE)
        wrong = np.flatnonzero(stored != crcs) if len(stored) == len(crcs) else _NO_BLOCKS
        is_sums = name == self.meta.get("checksums", {}).get("name")
        if sha256 == recorded:
            self.sound.add(name)
            self._wrong_sums += _spans(wrong + first, CRC_DTYPE.itemsize, None)
            return self._located(name, "other checksums than its files have", self._wrong_sums if is_sums else [])
        others = [other for other in self.records if other["name"] != name]
        if self._content_sha256([*others, {**record, "sha256": sha256}]) == self.meta["content_sha256"]:
            self.sound.add(name)
            problem = f"sha256 of {name} is {recorded[:12]}, but the file and content_sha256 say {sha256[:12]}"
            return [Damage(META_NAME, 0, 0, problem)]
        problem = f"sha256 {sha256[:12]}, expected {recorded[:12]} by its {META_NAME}"
        spans = self._wrong_sums if is_sums else _spans(wrong, BLOCK_BYTES, record["bytes"])
        first_damage, *more = self._located(name, problem, spans) or [Damage(name, 0, record["bytes"], problem)]
        return [first_damage._replace(problem=first_damage.problem + self._why_linked(name)), *more]

    def _located(self, name: str, problem: str, spans: Sequence[tuple[int, int]]) -> list[Damage]:
        """Return a damage for each of the first spans of a file, [start, end) in bytes, and one for all others."""
        found = [Damage(name, *span, f"{problem}; bytes {span[0]} to {span[1]} differ") for span in spans[:_MAX_RANGES]]
        if rest := spans[_MAX_RANGES:]:
            found.append(Damage(name, rest[0][0], rest[-1][1], f"and {len(rest)} places more"))
        return found


def _spans(numbers: NDArray[np.intp], size: int, end: int | None) -> list[tuple[int, int]]:
    """Merge ascending block numbers into spans of bytes [start, stop) that do not go past `end`."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    spans = [(int(run[0]) * size, (int(run[-1]) + 1) * size) for run in runs if len(run)]
    return spans if end is None else [(start, min(stop, end)) for start, stop in spans]
