"""The files of an unfinished build: hashed files that only grow, and a journal with one line for each checkpoint.

Token files are headerless little-endian uint16 or uint32. Arrays of offsets are .npy files (version 1.0) of
little-endian int64. docs/formats.md gives both byte by byte, and the keys of a line.

A line of the journal is eight hex digits, a space and a JSON object; the digits are the object's CRC-32. The first
object identifies the build. A damaged or cut last line is ignored, and the build resumes from the checkpoint before it:
files only grow, so later bytes can be truncated. Damage before a good line is an error, because ignoring it would lose
that line's work. `Attempts` counts the runs of a build that reached no new checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from niels_gpt.cache.formats import BLOCK_BYTES, OFFSET_DTYPE, crc32, npy_header
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import COPY, OutputFile, rename, write_bytes
from niels_gpt.storage.meta_json import (
    checked_count,
    checked_sha256,
    file_records,
    open_regular,
    parse_object,
    path_inside,
    read_regular,
)
from niels_gpt.storage.versions import ATTEMPTS_NAME, BUILDING, JOURNAL_NAME, JOURNAL_SUFFIX, versions_dir

if TYPE_CHECKING:  # verify hashes by this module
    from niels_gpt.engine.stream import Seek

logger = logging.getLogger(__name__)

JOURNAL_VERSION = 1
_MAX_LINE = 1 << 24
_MAX_ATTEMPTS_BYTES = 1 << 12
_READ_BYTES = 1 << 20


class BlockHashes:
    """The sha256 of a stream of bytes, and the CRC-32 of each of its blocks."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Number of bytes so far."""
        self._sha256, self._crcs, self._crc = hashlib.sha256(), array("I"), 0

    @property
    def sha256(self) -> str:
        """The hex sha256 of the bytes so far."""
        return self._sha256.hexdigest()

    def update(self, content: Any) -> None:
        """Add bytes or any buffer."""
        view = memoryview(content).cast("B") if len(content) else memoryview(b"")
        self._sha256.update(view)
        while len(view):
            part = view[: BLOCK_BYTES - self.num_bytes % BLOCK_BYTES]
            self._crc = crc32(part, self._crc)
            self.num_bytes += len(part)
            view = view[len(part) :]
            if self.num_bytes % BLOCK_BYTES == 0:
                self._crcs.append(self._crc)
                self._crc = 0

    def checksums(self) -> bytes:
        """Return the CRC-32 of each block as little-endian uint32; the last block may be shorter."""
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
        before_open: Callable[[Path], None] | None = None,
        copies: bool = False,
        lazy: bool = False,
    ) -> None:
        """keep, sha256: number of bytes of an earlier run to keep, and their hash. Later bytes are truncated.

        before_open: called with the path before a file is created, replaced or truncated; its errors are raised.
        copies: keep these bytes in a copy, which a process that has the old file open cannot change.
        lazy: create the file at the first byte or `sync`.
        Raises: CacheError E505 if the file does not begin with these bytes; OSError.
        """
        self.path = path
        self.hashes = BlockHashes()
        """Hashes of the bytes in the file."""
        self._before_open = before_open
        self._file: OutputFile | None = None
        if not keep and not lazy:
            self._open()
        if not keep:
            return
        if copies and before_open is not None:
            before_open(path)
        copy = OutputFile(path.with_name(COPY + path.name)) if copies else None
        try:
            self._reread(keep, sha256, copy)
            self._open(keep, copy)
        except BaseException:
            if copy is not None:
                copy.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Number of bytes in the file, with those kept from earlier runs."""
        return self.hashes.num_bytes

    @property
    def sha256(self) -> str:
        """The hex sha256 of the bytes so far."""
        return self.hashes.sha256

    def write(self, content: Any) -> None:
        """Append bytes or any buffer."""
        if len(content):
            (self._file or self._open()).write(content)
            self.hashes.update(content)

    def sync(self) -> None:
        """Make the bytes written so far durable."""
        (self._file or self._open()).sync()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def checksums(self) -> bytes:
        """Return the CRC-32 of each block as little-endian uint32; the last block may be shorter."""
        return self.hashes.checksums()

    def record(self, name: str) -> dict[str, Any]:
        """Return the file's record for meta.json. name: its name in the cache."""
        return {"name": name, "bytes": self.num_bytes, "sha256": self.sha256}

    def _open(self, keep: int = 0, copy: OutputFile | None = None) -> OutputFile:
        if copy is not None:
            copy.sync()
        if self._before_open is not None:
            self._before_open(self.path)
        if copy is None:
            self._file = OutputFile(self.path, keep=keep)
        else:
            rename(copy.path, self.path)
            self._file, copy.path = copy, self.path
        return self._file

    def _reread(self, keep: int, sha256: str | None, copy: OutputFile | None) -> None:
        with open(open_regular(self.path), "rb") as file:
            while self.num_bytes < keep and (content := file.read(min(_READ_BYTES, keep - self.num_bytes))):
                self.hashes.update(content)
                if copy is not None:
                    copy.write(content)
        if self.num_bytes < keep or self.sha256 != sha256:
            expected = f"{keep} of sha256 {str(sha256)[:12]} by the journal"
            raise CacheError(self.path, f"{self.num_bytes} bytes of sha256 {self.sha256[:12]}", expected, code="E505")


def write_whole(
    root: Path,
    name: str,
    content: Iterable[Any],
    crcs: list[bytes] | None = None,
    before_open: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Write a file of a cache and sync it; return its record, and append its block checksums to `crcs`.

    name: path below `root`. before_open: see `HashedFile`.
    """
    file = HashedFile(root / name, before_open=before_open)
    try:
        for part in content:
            file.write(part)
        file.sync()
    finally:
        file.close()
    if crcs is not None:
        crcs.append(file.checksums())
    return file.record(name)


def checksums_of(path: Path, num_bytes: int, sha256: str) -> bytes:
    """Compare a finished file with its record; return the CRC-32 of its blocks. Raises: CacheError E505; OSError."""
    file = HashedFile(path, keep=num_bytes, sha256=sha256)
    file.close()
    return file.checksums()


def npy_parts(path: Path, entries: int, last: int | None = None) -> Iterator[bytes]:
    """Yield an .npy file of `entries` int64: the content of the file at `path`, then `last` if it is not None."""
    yield npy_header(entries)
    yield from parts_of(path)
    if last is not None:
        yield last.to_bytes(OFFSET_DTYPE.itemsize, "little")


def parts_of(path: Path) -> Iterator[bytes]:
    """Yield a file in parts of 1 MiB."""
    with open(path, "rb") as file:
        yield from iter(lambda: file.read(_READ_BYTES), b"")


@dataclass(frozen=True)
class Checkpoint:
    """The durable state of a build at one moment."""

    documents: int = 0
    """Documents consumed from the source, dropped ones included."""
    generator: str | None = None
    """sha256 of the state of the shuffle's torch.Generator; None without a shuffle."""
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Bytes and sha256 of each growing file, also of the digests of consumed documents."""
    finished: list[dict[str, Any]] = field(default_factory=list)
    """Records of the shards finished since the checkpoint before."""
    state: dict[str, Any] = field(default_factory=dict)
    """The builder's own numbers; under "seen", texts by name."""
    ended: bool = False
    """Whether no further document is needed."""
    sealed: str | None = None
    """content_sha256, once only the commit is left to do."""
    seek: Seek | None = None
    """Where the source resumes; None: all consumed documents are read again."""


class Journal:
    """The journal in a folder, which may not exist yet."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], remedy: str | None = None) -> None:
        """Read the journal. identity: everything that decides the bytes of the build. remedy: for messages.

        Raises: CacheError E505 for a damaged journal, and for the journal of another build.
        """
        self.path = folder / JOURNAL_NAME
        self.last: Checkpoint | None = None
        self.finished: list[dict[str, Any]] = []
        self._header = json.loads(json.dumps({"identity": identity, "journal_version": JOURNAL_VERSION}))
        self._file: OutputFile | None = None
        self._remedy = remedy or remedy_of(folder)
        self._keep = self._read() if self.path.exists() else 0

    def append(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint; it is durable when this returns. The caller has synced its files and checked the lease.

        The first call creates the journal, or cuts its damaged end. It is not done earlier, because the journal may be
        another builder's by now, and the caller checks that just before.
        """
        if self._file is None:
            if not self._keep:
                write_bytes(self.path, line := _line(self._header))
                self._keep = len(line)
            self._file = OutputFile(self.path, keep=self._keep)
        seek = checkpoint.seek and checkpoint.seek.as_json()
        self._file.write(_line({**vars(checkpoint), "seek": seek}))
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self) -> int:
        """Read the good lines; return their length in bytes."""
        keep, remedy = 0, self._remedy
        with open(open_regular(path_inside(self.path.parent, self.path.name)), "rb") as file:
            while (value := _parsed(line := file.readline(_MAX_LINE))) is not None:
                if keep == 0 and value != self._header:
                    raise CacheError(self.path, "a journal of another build", remedy=remedy, code="E505")
                if keep:
                    self.last = _checkpoint(value, self.path, keep, remedy)
                    self.finished += self.last.finished
                keep += len(line)
            if any(_parsed(later) is not None for later in iter(lambda: file.readline(_MAX_LINE), b"")):
                resume = f"{remedy}; to resume from the checkpoint before the damage: truncate -s {keep} {self.path}"
                raise CacheError(
                    self.path, f"damaged at byte {keep}, and good lines follow", remedy=resume, code="E505"
                )
        if keep == 0:
            raise CacheError(self.path, "its first line is damaged", remedy=remedy, code="E505")
        return keep


class Attempts:
    """Counts the runs of a build that ended without a new checkpoint, to warn (W502) of runs that are too short.

    A run is counted when it starts, so that a killed run counts. Only a warning depends on the file, so it is not
    synced, and the count is 0 if it cannot be read or written.
    """

    def __init__(self, folder: Path, key: str, documents: int) -> None:
        """Count this run, and warn W502 if the runs before reached no further checkpoint.

        folder: the versions folder, whose lock is held. key: of the build. documents: done when this run starts.
        """
        self._path, self._documents = folder / ATTEMPTS_NAME, documents
        self._process = os.getpid()
        self._cache = folder.parent.parent / folder.name
        before = self._runs_before(key)
        if before:
            logger.warning(
                "%s: the last %s no further than %s. A run first reads those again, so a short one makes no progress: "
                "let this one run longer",
                self._cache,
                "run of this build came" if before == 1 else f"{before} runs of this build came",
                f"{documents:,} documents" if documents else "its start",
                extra={"code": "W502"},
            )
        self._write({"build": key, "documents": documents, "runs": before + 1})

    def gained(self, documents: int) -> bool:
        """Return whether this run has made a checkpoint; if so, count from 0 again."""
        if documents == self._documents:
            return False
        self.forget()
        return True

    def interrupted(self, documents: int) -> None:
        """Warn W502 if this run, which was interrupted, made no checkpoint."""
        if not self.gained(documents):
            logger.warning(
                "%s: this run made no progress: %s documents are done, as before",
                self._cache,
                documents,
                extra={"code": "W502"},
            )

    def forget(self) -> None:
        """Count from 0 again, because the build has ended, or its error says what to do."""
        if os.getpid() == self._process:  # not in a forked child
            with suppress(OSError):
                os.unlink(self._path)

    def _runs_before(self, key: str) -> int:
        try:
            known = parse_object(read_regular(self._path, _MAX_ATTEMPTS_BYTES))
        except (OSError, ValueError):
            return 0
        runs = known.get("runs")
        same = (known.get("build"), known.get("documents")) == (key, self._documents)
        return runs if same and type(runs) is int and 0 < runs < 1 << 31 else 0

    def _write(self, content: dict[str, str | int]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(OSError), open(os.open(self._path, flags, 0o666), "w", encoding="utf-8") as file:
            json.dump(content, file)


def remedy_of(folder: Path, from_scratch: str | None = None) -> str:
    """Return the remedy for a build that cannot be resumed. from_scratch: the command of a recipe."""
    return f"To start this build from scratch: {from_scratch or shlex.join(['rm', '-r', str(folder)])}"


def unfinished_builds(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the identity of each unfinished build of the cache at `path`, the most recently written first."""
    dated: list[tuple[int, Path]] = []
    for folder in _journal_folders(path):
        with suppress(FileNotFoundError):  # it has ended meanwhile
            dated.append((folder.lstat().st_mtime_ns, folder))
    return [identity_of(folder) for _, folder in sorted(dated, reverse=True)]


def sealed_builds(path: str | os.PathLike[str]) -> list[Path]:
    """Return the journals' folders of builds of the cache at `path` that were committed and then killed.

    Hold the build lock: a build that is about to end looks the same.
    """
    return [folder for folder in _journal_folders(path) if _is_sealed(folder)]


def identity_of(folder: Path) -> dict[str, Any]:
    """Return the identity of the build in a journal's folder; {} if its journal cannot be read."""
    try:
        with open(open_regular(path_inside(folder.parent, f"{folder.name}/{JOURNAL_NAME}")), "rb") as file:
            header = _parsed(file.readline(_MAX_LINE))
    except (OSError, CacheError):
        return {}
    identity = header.get("identity") if isinstance(header, dict) else None
    return identity if isinstance(identity, dict) else {}


def _journal_folders(path: str | os.PathLike[str]) -> list[Path]:
    return list(versions_dir(path).glob(f"{BUILDING}-*{JOURNAL_SUFFIX}"))


def _is_sealed(folder: Path) -> bool:
    with suppress(OSError, CacheError):
        with open(open_regular(path_inside(folder.parent, f"{folder.name}/{JOURNAL_NAME}")), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_LINE))  # a long build's has hundreds of MiB
            lines = file.read(_MAX_LINE).splitlines(keepends=True)
        last = next((value for line in reversed(lines) if (value := _parsed(line)) is not None), None)
        return isinstance(last, dict) and bool(last.get("sealed")) and not os.path.lexists(folder.with_suffix(""))
    return False


def _line(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, allow_nan=False).encode()
    return f"{zlib.crc32(text):08x} ".encode() + text + b"\n"


def _parsed(line: bytes) -> Any:
    """Return the object of a whole line, None for a damaged or cut one."""
    if len(line) < 10 or line[-1:] != b"\n" or line[:9] != f"{zlib.crc32(line[9:-1]):08x} ".encode():
        return None
    try:
        return json.loads(line[9:])
    except (ValueError, RecursionError):
        return None


def _checkpoint(value: Any, path: Path, byte: int, remedy: str) -> Checkpoint:
    """Return the checkpoint of a line. Every field is checked: a good CRC-32 does not prove who wrote the line."""
    from niels_gpt.engine.stream import Seek

    where = f"{path}, byte {byte}"
    try:
        files = {
            str(name): (checked_count(size, "bytes", where), checked_sha256(digest, "sha256", where))
            for name, (size, digest) in dict(value["files"]).items()
        }
        finished = file_records({"shards": {"finished": value["finished"]}}, where)
        state = value["state"]
        for key, number in state.items():
            if key == "seen" and not isinstance(number, dict):
                raise TypeError("seen is no object")
            for count in number.values() if isinstance(number, dict) else [number]:
                if key == "seen" and isinstance(count, str):
                    continue
                checked_count(count, "state", where)
        generator, sealed = (
            None if value[key] is None else checked_sha256(value[key], key, where) for key in ("generator", "sealed")
        )
        documents = checked_count(value["documents"], "documents", where)
        if not isinstance(value["ended"], bool):
            raise TypeError(f"ended is {value['ended']!r}, expected true or false")
        if sealed is not None and not value["ended"]:
            raise ValueError("sealed before the source had ended")
        seek = Seek.parsed(value.get("seek"), where)
        return Checkpoint(documents, generator, files, finished, state, value["ended"], sealed, seek)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CacheError(
            path, f"byte {byte}: no checkpoint of a build ({error!r:.200})", remedy=remedy, code="E505"
        ) from error
