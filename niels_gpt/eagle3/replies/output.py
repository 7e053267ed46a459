"""The file of replies while it is made, and when it is done.

    replies.jsonl          the rows in the order of the chats; it appears when all are done
    replies.jsonl.record   what decides the rows; once done, the counts and the file's sha256
    replies.jsonl.part     while it is made: the sha256 of what decides the rows; then a line for each chat that is
                           done, with its rows and counts, in any order

The same command resumes: a torn last line is dropped, and only chats without a line run again. Other settings are
refused. Neither suffix is one of a file of chats, so a folder of replies can be read as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import OutputFile, canonical_json, sha256_file
from niels_gpt.storage.locks import check_lease, file_lock
from niels_gpt.storage.meta_json import open_regular, parse_object, read_regular

RECORD_VERSION = 1
_RECORD, _PART, _LOCK = ".record", ".part", ".lock"
_MAX_LINE = 1 << 28


class ReplyFile:
    """A file of replies that this process makes. Made by `opened`."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self._settings = path, json.loads(json.dumps(settings))
        sha256 = hashlib.sha256(canonical_json(self._settings)).hexdigest()
        self._head = json.dumps({"settings_sha256": sha256}).encode() + b"\n"
        self.counts: Counter[str] = Counter()
        """Of all chats that are done."""
        self.done: set[int] = set()
        """Numbers of the chats that are done."""
        self._places: dict[int, int] = {}  # number of a chat -> where its line starts
        self._part: OutputFile | None = None

    def append(self, chats: Sequence[tuple[int, Sequence[Mapping[str, Any]], Mapping[str, int]]]) -> None:
        """Add chats, each its number, rows and counts; durable when it returns. Those that are done are left out.

        Raises: CacheError E512 where this process has lost its lease, so that another one may append.
        """
        assert self._part is not None
        self._check_lease()
        for number, rows, counts in chats:
            if number not in self.done:
                self._places[number] = self._part.num_bytes
                line = {"chat": number, "counts": dict(counts), "rows": list(rows)}
                self._part.write(json.dumps(line).encode() + b"\n")
                self._count(number, counts)
        self._part.sync()

    def finish(self, counters: Mapping[str, int]) -> dict[str, Any]:
        """Write the file, in the order of the chats; returns the record. counters: of what the source dropped."""
        assert self._part is not None
        self._check_lease()
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        file = OutputFile(temporary)
        with open(open_regular(self._part.path), "rb") as lines:
            for number in sorted(self._places):
                lines.seek(self._places[number])
                for row in json.loads(lines.readline(_MAX_LINE))["rows"]:
                    file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        file.sync()
        file.close()
        fileio.rename(temporary, self.path)
        record = self._record(sha256=sha256_file(self.path), counts=dict(self.counts), dropped=dict(counters))
        fileio.write_bytes(_beside(self.path, _RECORD), canonical_json(record))
        self._part.close()
        fileio.remove(self._part.path)
        return record

    def _check_lease(self) -> None:
        check_lease(_beside(self.path, _LOCK))

    def _record(self, **more: Any) -> dict[str, Any]:
        return {"record_version": RECORD_VERSION, "settings": self._settings, **more}

    def _count(self, number: int, counts: Mapping[str, int]) -> None:
        self.done.add(number)
        self.counts.update(counts)

    def _start(self) -> dict[str, Any] | None:
        """Open the part file, at the end of its last whole line; returns the record if all is done already."""
        record, part = recorded(self.path), _beside(self.path, _PART)
        if record is None and os.path.lexists(self.path):
            raise CacheError(self.path, "is there, and no run made it", remedy="Name another --output", code="E704")
        if record is not None:
            refuse_other(self.path, record, self._settings)
            if "sha256" in record:
                _refuse_changed(self.path, record)
                if part.is_file():  # the run was killed before it removed it
                    fileio.remove(part)
                return record
        keep = self._read(part) if part.exists() else 0
        if record is None:
            fileio.write_bytes(_beside(self.path, _RECORD), canonical_json(self._record()))
        self._part = OutputFile(part, keep=keep)
        if not keep:
            self._part.write(self._head)
        return None

    def _read(self, part: Path) -> int:
        """Read the whole lines of a part file; returns their length in bytes.

        Raises: CacheError for one that is damaged, or that a run with other settings left behind.
        """
        with open(open_regular(part), "rb") as file:
            first = file.readline(_MAX_LINE)
            if not first.endswith(b"\n"):
                return 0
            if first != self._head:
                raise CacheError(
                    part,
                    "was started with other settings",
                    remedy="Use those, or remove it, or name another --output",
                    code="E703",
                )
            keep = len(first)
            while line := file.readline(_MAX_LINE):
                try:
                    if not line.endswith(b"\n"):
                        break
                    value = json.loads(line)
                    number, counts = value["chat"], {str(name): int(count) for name, count in value["counts"].items()}
                    assert isinstance(number, int) and isinstance(value["rows"], list)
                except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
                    if file.readline(1):
                        remedy = f"Remove it and {self.path}{_RECORD}, and run it again"
                        raise CacheError(
                            part, f"damaged at byte {keep}", "a line of JSON", remedy, code="E701"
                        ) from None
                    break
                self._places[number] = keep
                self._count(number, counts)
                keep += len(line)
        return keep


@contextmanager
def opened(path: Path, settings: Mapping[str, Any]) -> Iterator[ReplyFile | dict[str, Any]]:
    """Yield the file of replies to make or to resume; or its record, where it is done.

    settings: all that decides the rows, values of JSON.
    Raises: CacheError where another process makes it, where it was made with other settings or by something else, and
        where it is damaged or was changed.
    """
    fileio.make_dir(path.parent)
    for own in (path.with_name(f".{path.name}.tmp"), _beside(path, _PART), _beside(path, _LOCK)):
        if os.path.lexists(own) and (own.is_symlink() or not own.is_file()):
            remedy = f"Remove it: {shlex.join(['rm', '-r', str(own)])}"
            raise CacheError(own, "a link, a folder or a pipe", "a file of this command", remedy, code="E205")
    lock = _beside(path, _LOCK)
    with file_lock(lock, path, "is being made", wait=False):
        file = ReplyFile(path, settings)
        try:
            yield file._start() or file
        finally:
            if file._part is not None:
                file._part.close()
        fileio.remove(lock)


def recorded(path: Path) -> dict[str, Any] | None:
    """Return the record of a file of replies; None without one. Raises: CacheError for a damaged one."""
    record = _beside(path, _RECORD)
    try:
        found = parse_object(read_regular(record))
        if found.get("record_version") != RECORD_VERSION or not isinstance(found.get("settings"), dict):
            raise ValueError(f"record_version is not {RECORD_VERSION}, or it has no settings")
    except FileNotFoundError:
        return None
    except ValueError as error:
        remedy = "Remove it, and run it again"
        raise CacheError(record, "is no record of replies", "the record of a run", remedy, code="E701") from error
    return found


def refuse_other(path: Path, record: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise CacheError, naming the fields, where a file of replies was started with other settings."""
    before = record["settings"]
    differ = sorted(name for name in {*before, *settings} if before.get(name) != settings.get(name))
    if differ:
        raise CacheError(
            path,
            f"was started with other settings: {', '.join(differ)}",
            remedy=f"Use those of {path}{_RECORD}, or name another --output",
            code="E703",
        )


def _refuse_changed(path: Path, record: Mapping[str, Any]) -> None:
    problem = "is missing, and its record has it" if not path.is_file() else "was changed since it was made"
    if not path.is_file() or sha256_file(path) != record["sha256"]:
        raise CacheError(path, problem, remedy=f"Remove {path}{_RECORD}, or name another --output", code="E701")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
