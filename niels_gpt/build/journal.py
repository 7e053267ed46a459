"""The journal of a build: one line for each checkpoint, from which a killed build goes on.

A line is eight hex digits, the CRC-32 of what follows them, a space, and a JSON object. The first object says what is
being built. A last line that was cut or damaged does not count: the checkpoint before it is as good as any, for files
only ever grow, and what they have beyond a checkpoint is cut off. Damage before good lines is refused, for it would
lose their work. docs/formats.md has the keys.
"""

from __future__ import annotations

import json
import os
import shlex
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from niels_gpt.build.seek import Seek
from niels_gpt.fileio import CacheError, OutputFile, write_bytes
from niels_gpt.records import checked_count, checked_sha256, file_records, open_regular, path_inside, read_regular
from niels_gpt.versions import BUILDING, JOURNAL_NAME, JOURNAL_SUFFIX, versions_dir

JOURNAL_VERSION = 1
_MAX_LINE = 1 << 24


@dataclass(frozen=True)
class Checkpoint:
    """What was done, and is durable, at one moment of a build."""

    documents: int = 0
    """Documents that were taken from the source, those that were dropped included."""
    generator: str | None = None
    """sha256 of the state of the shuffle's torch.Generator; None without a shuffle."""
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Bytes and sha256 of each file that is being written: the consumed texts' digests are one of them."""
    finished: list[dict[str, Any]] = field(default_factory=list)
    """Records of the shards that were finished since the checkpoint before."""
    state: dict[str, Any] = field(default_factory=dict)
    """The builder's own numbers."""
    ended: bool = False
    """Whether no further document is needed."""
    sealed: str | None = None
    """The content sha256, once nothing is left to do but to commit."""
    seek: Seek | None = None
    """Where the source resumes, if it is files; None: it is read again from its beginning."""


class Journal:
    """Reads the journal in a folder, if there is one; `append` adds a checkpoint that is durable when it returns."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], remedy: str | None = None) -> None:
        """identity: everything that decides the bytes of the build. remedy: that of the build, for messages.

        Raises: CacheError for a journal that is of another build, or that no builder wrote.
        """
        self.path = folder / JOURNAL_NAME
        self.last: Checkpoint | None = None
        self.finished: list[dict[str, Any]] = []
        self._header = json.loads(json.dumps({"identity": identity, "journal_version": JOURNAL_VERSION}))
        self._file: OutputFile | None = None
        self._remedy = remedy or remedy_of(folder)
        if self.path.exists():
            keep = self._read()
            self._file = OutputFile(self.path, keep=keep)

    def append(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint; every file that it names has been synced before. The first one begins the journal."""
        if self._file is None:
            write_bytes(self.path, line := _line(self._header))
            self._file = OutputFile(self.path, keep=len(line))
        seek = checkpoint.seek and checkpoint.seek.as_json()
        self._file.write(_line({**vars(checkpoint), "seek": seek}))
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self) -> int:
        """Return the length of the lines that are whole."""
        keep, remedy = 0, self._remedy
        with open(open_regular(path_inside(self.path.parent, self.path.name)), "rb") as file:
            while (value := _parsed(line := file.readline(_MAX_LINE))) is not None:
                if keep == 0 and value != self._header:
                    raise CacheError(f"{self.path}: a journal of another build. {remedy}")
                if keep:
                    self.last = _checkpoint(value, f"{self.path}, byte {keep}", remedy)
                    self.finished += self.last.finished
                keep += len(line)
            if any(_parsed(later) is not None for later in iter(lambda: file.readline(_MAX_LINE), b"")):
                raise CacheError(
                    f"{self.path}: damaged at byte {keep}, and good lines follow. {remedy}; to resume from the "
                    f"checkpoint before the damage: truncate -s {keep} {self.path}"
                )
        if keep == 0:
            raise CacheError(f"{self.path}: its first line is damaged. {remedy}")
        return keep


def remedy_of(folder: Path, from_scratch: str | None = None) -> str:
    """Return what to do where a build cannot be resumed; from_scratch: the command, where it is a recipe's."""
    return f"To start this build from scratch: {from_scratch or shlex.join(['rm', '-r', str(folder)])}"


def unfinished_builds(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return what each unfinished build of the cache at `path` makes, the last one to be written first."""
    found: list[tuple[int, Path]] = []
    for folder in versions_dir(path).glob(f"{BUILDING}-*{JOURNAL_SUFFIX}"):
        with suppress(FileNotFoundError):  # it has ended meanwhile
            found.append((folder.lstat().st_mtime_ns, folder))
    return [identity_of(folder) for _, folder in sorted(found, reverse=True)]


def sealed_builds(path: str | os.PathLike[str]) -> list[Path]:
    """Return the journals' folders of builds of the cache at `path` that were committed, and killed before they could
    remove them. Hold the lock, or a build in its last moment looks so."""
    found = []
    for folder in versions_dir(path).glob(f"{BUILDING}-*{JOURNAL_SUFFIX}"):
        with suppress(OSError, CacheError):
            lines = read_regular(path_inside(folder.parent, f"{folder.name}/{JOURNAL_NAME}")).splitlines(keepends=True)
            last = next((value for line in reversed(lines) if (value := _parsed(line)) is not None), None)
            if isinstance(last, dict) and last.get("sealed") and not os.path.lexists(folder.with_suffix("")):
                found.append(folder)
    return found


def identity_of(folder: Path) -> dict[str, Any]:
    """Return what the build of a journal's folder makes; {} where its journal cannot be read."""
    try:
        path = path_inside(folder.parent, f"{folder.name}/{JOURNAL_NAME}")
        with open(open_regular(path), "rb") as file:
            value = _parsed(file.readline(_MAX_LINE))
    except (OSError, CacheError):
        return {}
    found = value.get("identity") if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _line(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, allow_nan=False).encode()
    return f"{zlib.crc32(text):08x} ".encode() + text + b"\n"


def _parsed(line: bytes) -> Any:
    """Return the object of a whole line; None for anything else."""
    if len(line) < 10 or line[-1:] != b"\n" or line[:9] != f"{zlib.crc32(line[9:-1]):08x} ".encode():
        return None
    try:
        return json.loads(line[9:])
    except (ValueError, RecursionError):
        return None


def _checkpoint(value: Any, where: str, remedy: str) -> Checkpoint:
    """Check every field: a line with a good CRC-32 may still be anybody's."""
    try:
        files = {
            str(name): (checked_count(found[0], "bytes", where), checked_sha256(found[1], "sha256", where))
            for name, found in dict(value["files"]).items()
        }
        finished = file_records({"shards": {"finished": value["finished"]}}, where)
        state = value["state"]
        for number in state.values():
            for count in number.values() if isinstance(number, dict) else [number]:
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
        raise CacheError(f"{where}: no checkpoint of a build ({error!r:.200}). {remedy}") from error
