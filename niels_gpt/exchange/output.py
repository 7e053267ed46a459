"""Writes a folder of another tool: hard links where the bytes are the same, copies, streams, and the manifest."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from niels_gpt.exchange.token_cache import TokenCache, TokenFile
from niels_gpt.progress import Progress
from niels_gpt.storage import fileio
from niels_gpt.storage.fileio import OutputFile

MANIFEST_NAME = "niels_gpt.json"
"""In every folder that is exported: of which cache it is, and which of its shards each file holds."""
MANIFEST_VERSION = 1
_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class Output:
    """The folder of an export while it is written, and the records of its files."""

    def __init__(self, work: Path, cache: TokenCache, total: int, progress: Progress | None, modes: Modes) -> None:
        """work: an empty folder. total: bytes of all token files. modes: of the cache's files.

        progress: called with files, bytes written or linked, and `total`.
        """
        self.work, self.cache, self._progress = work, cache, progress
        self.records: list[dict[str, Any]] = []
        """Of each file, in the order written: name, bytes, sha256; of a token file also its part of the manifest."""
        self.noted: dict[str, int] = {}
        """What the format could not hold as the cache has it, by reason, counted."""
        self.modes = modes
        self._total, self._done = total, 0

    def place(self, name: str, file: TokenFile) -> None:
        """Let `name` be a token file of the cache: the same bytes, a hard link, or a copy where links are impossible.

        A link is made read-only, and the cache's file with it: they are one file with two names. A file of another
        owner cannot be made so, and is copied.
        """
        path = self.work / name
        fileio.make_dir(path.parent)
        linked = fileio.link_or_copy(file.path, path) and self.modes.made_read_only(path, file.path)
        record = {"bytes": int(file.record["bytes"]), "sha256": file.record["sha256"]}
        self._add(name, record, made="link" if linked else "copy", files=[file])

    def write(self, name: str, content: Iterable[Any], files: Iterable[TokenFile] = ()) -> None:
        """Write a file from buffers. files: the token files whose tokens are in it, in order."""
        path, digest = self.work / name, hashlib.sha256()
        fileio.make_dir(path.parent)
        file = OutputFile(path)
        try:
            for part in content:
                file.write(part)
                digest.update(part)
        finally:
            file.close()
        self._add(name, {"bytes": file.num_bytes, "sha256": digest.hexdigest()}, made="written", files=list(files))

    def note(self, reason: str, count: int) -> None:
        """Count what the format could not hold as the cache has it."""
        if count:
            self.noted[reason] = self.noted.get(reason, 0) + count

    def _add(self, name: str, record: dict[str, Any], *, made: str, files: list[TokenFile]) -> None:
        tokens = [{"name": file.record["name"], "tokens": file.tokens, "continues": file.continues} for file in files]
        split = {"split": files[0].split, "of": tokens} if files else {}
        self.records.append({"name": name, **record, "made": made, **split})
        self._done += sum(int(file.record["bytes"]) for file in files)
        if self._progress is not None:
            self._progress(len(self.records), self._done, self._total)


class Modes:
    """The files that lost the right to write because they were linked, to give it back if the work fails."""

    def __init__(self) -> None:
        self._before: list[tuple[Path, int]] = []

    @contextmanager
    def restored_on_failure(self) -> Iterator[Modes]:
        """Give each file the mode back that it had, if the block raises."""
        try:
            yield self
        except BaseException:
            for path, mode in self._before:
                with suppress(OSError):
                    os.chmod(path, mode)
            raise

    def made_read_only(self, path: Path, source: Path) -> bool:
        """Make a hard link to `source` read-only, or put a copy in its place; returns whether it is still the link."""
        mode = stat.S_IMODE(path.stat().st_mode)
        if not mode & _WRITES:
            return True
        try:
            os.chmod(path, mode & ~_WRITES)
        except PermissionError:
            linked = path.with_name(f".{path.name}.link")
            os.rename(path, linked)
            shutil.copyfile(linked, path)
            fileio.remove(linked)
            return False
        self._before.append((source, mode))
        return True
