"""The files of a cache -> the folder of a build: in ranges, several at once, resumed, compared with their sha256."""

from __future__ import annotations

import hashlib
import logging
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from niels_gpt.engine.journal import Checkpoint, Journal
from niels_gpt.exchange.transfer.described import Described
from niels_gpt.exchange.transfer.jobs import Tally, at_once
from niels_gpt.exchange.transfer.remote import RANGE_BYTES, Bucket
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError, NoRoomError
from niels_gpt.storage.fileio import META_NAME, OutputFile
from niels_gpt.storage.meta_json import MAX_JSON_BYTES, open_regular, path_inside

logger = logging.getLogger(__name__)
_FREE_BYTES = 1 << 24  # for meta.json and the file system


class Arrival:
    """The files of one cache on their way from a bucket to a folder."""

    def __init__(self, bucket: Bucket, remote: Described, work: Path, tally: Tally) -> None:
        """work: of the build; what an earlier run left there is used."""
        self.bucket, self.remote, self.work, self.tally = bucket, remote, work, tally
        bucket.patience.pause = tally.pause

    def fetch(self, records: Iterable[dict[str, Any]], jobs: int) -> None:
        """Fetch these files. Raises: CacheError E611 for a damaged one, E610 where the cache at the URL is another one
        by then, E612; OSError E501 without room."""
        wanted = list(records)
        refuse_without_room(self.work, sum(int(record["bytes"]) - self._arrived(record) for record in wanted))
        for folder in sorted({path_inside(self.work, str(record["name"])).parent for record in wanted}):
            fileio.make_dir(folder)
        at_once(self._fetch, wanted, jobs, self.tally)
        self.refuse_if_replaced()

    def _arrived(self, record: dict[str, Any]) -> int:
        try:
            return min(path_inside(self.work, str(record["name"])).lstat().st_size, int(record["bytes"]))
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def _fetch(self, record: dict[str, Any]) -> None:
        """Fetch one file. What an earlier run left of it is used; one that arrives damaged is fetched once more."""
        where, size, kept = self.bucket.at(str(record["name"])), int(record["bytes"]), self._arrived(record)
        came, expected = "", f"{record['sha256'][:12]} by its {META_NAME}"
        for keep in (kept, 0, 0) if kept else (0, 0):
            if came:
                logger.info("%s: arrived with the sha256 %s, expected %s; again", where, came[:12], expected)
            before, came = came, self._fetched(record, keep)
            if came == record["sha256"]:
                self.tally.add(files=1)
                return
            arrived = self._arrived(record)
            self.tally.add(moved=keep - arrived, kept=-keep)
        fileio.remove(path_inside(self.work, str(record["name"])))
        self.refuse_if_replaced()
        found, remedy = f"damaged: its sha256 is {came[:12]}, twice", push_again(self.bucket.shown)
        if came != before:
            found, remedy = f"arrived with the sha256 {before[:12]}, then {came[:12]}", RUN_AGAIN
        short = f" ({arrived:,} of {size:,} bytes)" if arrived < size else ""
        raise CacheError(where, found + short, expected, remedy, code="E611")

    def _fetched(self, record: dict[str, Any], keep: int) -> str:
        """Append what is missing of a file, and return the sha256 of all of it."""
        name, size = str(record["name"]), int(record["bytes"])
        path, digest = path_inside(self.work, name), hashlib.sha256()
        if keep:
            with open(open_regular(path, holes=True), "rb") as earlier:
                for _ in range(0, keep, RANGE_BYTES):
                    part = earlier.read(min(RANGE_BYTES, keep - earlier.tell()))
                    digest.update(part)
                    self.tally.add(kept=len(part))
        file = OutputFile(path, keep=keep)
        try:
            for piece in self.bucket.pieces(name, keep, size):
                file.write(piece)
                digest.update(piece)
                self.tally.add(moved=len(piece))
        except FileNotFoundError:
            self.refuse_if_replaced()
            remedy = push_again(self.bucket.shown)
            raise CacheError(
                self.bucket.at(name), "no such file", f"a file that {META_NAME} names", remedy, code="E611"
            ) from None
        finally:
            file.close()
        return digest.hexdigest()

    def refuse_if_replaced(self) -> None:
        """Raise CacheError E610 where the URL has another meta.json than when this began, or none, at two looks."""
        if all(self.bucket.read(META_NAME, MAX_JSON_BYTES) != self.remote.raw for _ in range(2)):
            found = "its cache was replaced while it was read. Nothing was committed"
            raise CacheError(self.bucket.shown, found, remedy="Run it again", code="E610")


def keep(notes: Path, identity: dict[str, Any]) -> None:
    """Let a build of `storage.versions.resumable` stay where it is stopped, for the next run. notes: of its journal."""
    journal = Journal(notes, identity)
    if journal.last is None:
        journal.append(Checkpoint())
    journal.close()


RUN_AGAIN = "The connection alters what it carries. Run it again: it resumes"


def push_again(url: str) -> str:
    """Return the remedy for a cache that is damaged at its URL."""
    return f"Take another copy, or have it sent again from one: niels-gpt push CACHE {shlex.quote(url)} --check"


def refuse_without_room(folder: Path, num_bytes: int) -> None:
    """Raise OSError with code E501 where so many bytes do not fit on the disk of a folder, which may not exist yet."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if num_bytes and num_bytes + _FREE_BYTES > free:
        found = f"{folder}: {num_bytes:,} bytes do not fit: {free:,} are free. Make room, or name another folder"
        raise NoRoomError(found)
