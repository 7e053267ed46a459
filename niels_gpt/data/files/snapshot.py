"""Rows of a hub dataset kept as files of a mirror: how a snapshot is written, resumed and checked.

    <folder>/train-00000.jsonl.gz ...    the rows as upstream has them, one JSON object a line, in the order of a build
    <folder>/snapshot.json               the dataset, the rows and the files; written after each file

Rows are only appended, so an interrupted snapshot resumes, and a finished one can be extended.
"""

from __future__ import annotations

import datetime
import gzip
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from niels_gpt.storage.errors import CacheError, SourceError
from niels_gpt.storage.fileio import canonical_json, fsync_dir, open_for_reading, sha256_file, write_bytes
from niels_gpt.storage.locks import file_lock
from niels_gpt.work import Progress

logger = logging.getLogger(__name__)

MANIFEST_NAME = "snapshot.json"
FORMAT_VERSION = 1
PART_BYTES = 1 << 26  # of JSON, uncompressed: the most that a killed process loses
_MANIFEST_BYTES = 1 << 26  # a file takes 200 bytes of it
_PART_NAME = re.compile(r"[a-z]+-\d{5}\.jsonl\.gz|\.[a-z]+-\d{5}\.jsonl\.gz\.part")
_OF_THE_STREAM = ("dataset", "config", "shuffle")
"""Keys that decide the rows and their order, beside the revision, which a snapshot keeps from its first run."""

Row = dict[str, Any]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return a folder's snapshot.json; None if there is none, as in a mirror made by hand.

    Raises: CacheError E307 if it is damaged.
    """
    path = folder / MANIFEST_NAME
    try:
        with open(open_for_reading(path, follow_links=True), "rb") as file:
            raw = file.read(_MANIFEST_BYTES + 1)
        if len(raw) > _MANIFEST_BYTES:
            raise SourceError(f"more than {_MANIFEST_BYTES:,} bytes")
        manifest: dict[str, Any] = json.loads(raw.decode("utf-8"))
        if manifest["format_version"] != FORMAT_VERSION:
            raise SourceError(f"format_version is {manifest['format_version']}, expected {FORMAT_VERSION}")
        [(file["name"], file["split"], file["rows"], file["sha256"]) for file in manifest["files"]]
        [manifest[key] for key in (*_OF_THE_STREAM, "revision", "finished", "ended", "text_bytes")]
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CacheError(path, f"not a snapshot's manifest ({error!r})", remedy=_again(folder), code="E307") from None
    return manifest


def check_files(folder: Path, manifest: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Compare the files that a build would read with the manifest, by name and sha256.

    Raises: CacheError E307 for an unfinished snapshot, and for missing, foreign or damaged files.
    """
    if not manifest["finished"]:
        raise CacheError(
            folder / MANIFEST_NAME,
            f"this snapshot was interrupted after {_rows_of(manifest):,} rows",
            remedy="Finish it: run the same snapshot command again",
            code="E307",
        )
    names = {path.relative_to(folder).as_posix() for path in files}
    if differing := names ^ {file["name"] for file in manifest["files"]}:
        problem = f"{MANIFEST_NAME} and the files there differ: {', '.join(sorted(differing))}"
        raise CacheError(folder, problem, remedy=_again(folder), code="E307")
    _check_kept(folder, manifest)


def _check_kept(folder: Path, manifest: Mapping[str, Any]) -> None:
    for file in manifest["files"]:
        path = folder / file["name"]
        if not path.is_file():
            raise CacheError(path, "no such file", f"the file that {MANIFEST_NAME} names", _again(folder), code="E307")
        if sha256_file(path) != file["sha256"]:
            raise CacheError(
                path, f"damaged: its sha256 is not that in {MANIFEST_NAME}", remedy=_again(folder), code="E307"
            )


def _again(folder: Path) -> str:
    return f"Remove {folder}, then take it again: niels-gpt snapshot SOURCE DEST"


def take(
    folder: Path,
    about: Mapping[str, Any],
    rows_of: Callable[[str, str], Iterable[Row]],
    *,
    splits: Sequence[str],
    text_of: Callable[[Row], str],
    max_text_bytes: int | None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Append the rows of a dataset to `folder`, after the rows that it has; return the manifest.

    To resume, rows that are kept already are read again and skipped.
    about: dataset, config, revision, licence, attribution, datasets_version and shuffle (None, or seed and buffer).
    rows_of: takes a revision and a split; the same arguments give the same rows in the same order.
    max_text_bytes: stop after the row that reaches this many bytes of text; None: keep all rows.
    progress: called with the rows kept, their UTF-8 bytes of text, and max_text_bytes.
    Raises: CacheError E307 for a folder with other files, rows in another order, or damaged files; the errors of
        `rows_of`, after the rows before them are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / ".lock", folder, "a snapshot is being taken", wait=False):
        manifest = read_manifest(folder) or _new(folder, about)
        for key in _OF_THE_STREAM:
            if manifest[key] != about[key]:
                raise CacheError(
                    folder / MANIFEST_NAME,
                    f"a snapshot with {key} {manifest[key]}",
                    str(about[key]),
                    "Choose another folder, or the same settings",
                    code="E307",
                )
        _check_kept(folder, manifest)
        _remove_unrecorded(folder, manifest)
        writer = _Writer(folder, manifest, text_of, max_text_bytes, progress)
        if not manifest["ended"]:
            manifest["finished"] = False
            write_bytes(folder / MANIFEST_NAME, canonical_json(manifest))  # keeps the revision of the first run
            for split in splits:
                writer.keep(split, iter(rows_of(str(manifest["revision"]), split)))
                if writer.full:
                    break
            manifest["finished"], manifest["ended"] = True, not writer.full
            write_bytes(folder / MANIFEST_NAME, canonical_json(manifest))
    return manifest


def _new(folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    others = sorted(path.name for path in folder.iterdir() if path.name != ".lock" and not path.name.endswith(".part"))
    if others:
        problem = f"{len(others)} files that no snapshot has written (such as {others[0]})"
        raise CacheError(folder, problem, remedy="Choose another folder, or move them away", code="E307")
    return {**about, "format_version": FORMAT_VERSION, "files": [], "text_bytes": 0, "finished": False, "ended": False}


def _remove_unrecorded(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Remove the leftovers of a killed process: parts, and a file that is not in the manifest."""
    recorded = {file["name"] for file in manifest["files"]}
    for path in folder.iterdir():
        if _PART_NAME.fullmatch(path.name) and path.name not in recorded:
            path.unlink()


def _rows_of(manifest: Mapping[str, Any], split: str | None = None) -> int:
    return sum(int(file["rows"]) for file in manifest["files"] if split in (None, file["split"]))


class _Writer:
    """Writes rows as parts, and the manifest after each part."""

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        text_of: Callable[[Row], str],
        max_text_bytes: int | None,
        progress: Progress | None,
    ) -> None:
        self._folder, self._manifest, self._text_of, self._progress = folder, manifest, text_of, progress
        self._limit = max_text_bytes

    @property
    def full(self) -> bool:
        """Whether max_text_bytes is reached."""
        return self._limit is not None and self._manifest["text_bytes"] >= self._limit

    def keep(self, split: str, rows: Iterator[Row]) -> None:
        """Append the rows of one split that are not kept yet, up to the limit."""
        kept = _rows_of(self._manifest, split)
        if kept and not self.full:
            logger.info("%s: skipping the %s rows of %s that are kept already", self._folder, f"{kept:,}", split)
        rest = islice(rows, kept, None)
        while not self.full and self._part(split, rest):
            pass

    def _part(self, split: str, rows: Iterator[Row]) -> bool:
        """Write one file; return whether more rows may follow. If reading fails, the rows before are kept."""
        number = sum(file["split"] == split for file in self._manifest["files"])
        path = self._folder / f"{split}-{number:05}.jsonl.gz"
        temporary = path.with_name(f".{path.name}.part")
        size = kept = 0
        broken: BaseException | None = None
        with open(temporary, "wb") as file:
            # No name or time in the header: equal rows give equal bytes. Level 4 is much faster than 6, and little
            # larger.
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=4, mtime=0) as packed:
                while size < PART_BYTES and not self.full:
                    try:
                        row = next(rows, None)
                    except BaseException as error:
                        row, broken = None, error
                    if row is None:
                        break
                    size += packed.write(_line_of(row, f"{path.name}, row {kept + 1}"))
                    kept += 1
                    self._manifest["text_bytes"] += len(self._text_of(row).encode(errors="replace"))
                    if self._progress is not None and kept % 256 == 0:
                        self._progress(_rows_of(self._manifest) + kept, self._manifest["text_bytes"], self._limit)
            file.flush()
            os.fsync(file.fileno())
        if kept:
            self._commit(temporary, path, split, kept)
        temporary.unlink(missing_ok=True)
        if broken is not None:
            raise broken
        return size >= PART_BYTES

    def _commit(self, temporary: Path, path: Path, split: str, kept: int) -> None:
        record = {"name": path.name, "split": split, "rows": kept, "bytes": temporary.stat().st_size}
        digest = sha256_file(temporary)
        os.replace(temporary, path)
        fsync_dir(self._folder)
        self._manifest["files"].append({**record, "sha256": digest})
        write_bytes(self._folder / MANIFEST_NAME, canonical_json(self._manifest))
        logger.info("%s: kept; %s rows so far", path, f"{_rows_of(self._manifest):,}")


def _line_of(row: Row, where: str) -> bytes:
    def plain(value: Any) -> str:
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        raise SourceError(f"{where}: a value of type {type(value).__name__} cannot be kept as JSON")

    return (json.dumps(row, ensure_ascii=False, default=plain) + "\n").encode(errors="replace")
