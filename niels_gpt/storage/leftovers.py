"""Which files and folders beside the versions of caches can be removed, why, and which of them this project made."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from niels_gpt.storage.fileio import META_NAME, PathLike
from niels_gpt.storage.meta_json import open_regular, parse_object, read_regular
from niels_gpt.storage.versions import (
    ATTEMPTS_NAME,
    BUILD_NAME,
    BUILDING,
    DAMAGED,
    JOURNAL_NAME,
    JOURNAL_SUFFIX,
    KINDS,
    LINK,
    PARTITIONS,
    RECIPE_NAME,
    SHA256_DIGITS,
    VERSION_NAME,
    VERSIONS_DIR,
    is_half_written,
    is_plan,
    journals_first,
    versions_dir,
)

PROBE = re.compile(r"\.probe-[0-9a-f]{8}")
"""The hidden folder in which a build tries what the file system keeps; one that is killed meanwhile leaves it."""
_ADOPTED = re.compile(r"adopted\d+")
_MAX_LINE = 1 << 24  # bytes of a line of a journal


def versions_below(folder: Path) -> list[Path]:
    """Return the folders below a folder that may contain the versions of a cache, sorted; links are not followed.

    Those of partitions are left out: they are parts of an unfinished build.
    """
    found: list[Path] = []
    waiting = [os.fspath(folder)]
    while waiting:
        parent = waiting.pop()
        try:
            with os.scandir(parent) as entries:
                folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:  # not readable, or its path is too long
            continue
        if os.path.basename(parent) == VERSIONS_DIR:
            found += map(Path, folders)
        waiting += (each for each in folders if not is_plan(Path(each)))
    return sorted(found)


class Leftover(NamedTuple):
    """A file or folder beside the versions of a cache that the cache does not need."""

    path: Path
    why: str
    is_ours: bool
    """Whether this project made it: only then gc removes it."""


def removable(path: PathLike, kinds: Collection[str] = KINDS) -> list[tuple[Path, str]]:
    """Return what gc may remove of the cache at `path`, and why: the `leftovers` that are ours."""
    return [(entry.path, entry.why) for entry in leftovers(path, kinds) if entry.is_ours]


def leftovers(path: PathLike, kinds: Collection[str] = KINDS) -> list[Leftover]:
    """Return all versions of the cache at `path` but the two newest, and the rest of dead builds (D11).

    A leftover is ours by its content, at its right place: a version has a meta.json of a known kind and the name of its
    content; a journal begins with our first line, beside its build. Other names of ours, such as building, count if the
    folder has recipe.json, a version, or a journal of ours.
    The committed version always stays. Call this with `build_lock` held, or a build in progress looks dead. Whether a
    reader has an old version open is not checked here: see `niels_gpt.storage.locks.unless_held`.
    kinds: the `kind` of the caches that are ours.
    """
    folder = versions_dir(path)
    if folder.is_symlink() or folder.parent.is_symlink():
        return []  # of another cache
    names = (entry for entry in folder.parent.parent.iterdir() if entry.is_symlink())
    committed = {os.path.normpath(name.parent / os.readlink(name)) for name in names}
    entries = sorted(folder.iterdir(), key=journals_first)
    marked = {entry for entry in entries if _is_marked(entry, kinds)}
    found: list[Leftover] = []
    versions: list[Path] = []
    for entry in entries:
        if BUILD_NAME.fullmatch(entry.name) and (entry.suffix or Path(f"{entry}{JOURNAL_SUFFIX}") in entries):
            what = "its journal" if entry.suffix == JOURNAL_SUFFIX else "the same build would resume from it"
            found.append(Leftover(entry, f"an unfinished build: {what}", bool(marked)))
        elif _is_partitions(entry):
            found.append(Leftover(entry, "an unfinished build: its partitions", entry in marked))
        elif entry.name == ATTEMPTS_NAME and entry.is_file() and not entry.is_symlink():
            found.append(Leftover(entry, "of unfinished builds", bool(marked)))
        elif (
            entry.name in (BUILDING, DAMAGED)
            or BUILD_NAME.fullmatch(entry.name)
            or is_half_written(entry)
            or _is_link(entry)
        ):
            found.append(Leftover(entry, _KILLED, bool(marked)))
        elif entry in marked and VERSION_NAME.fullmatch(entry.name):
            versions.append(entry)
            found += [Leftover(file, _KILLED, True) for file in entry.iterdir() if is_half_written(file)]
        elif VERSION_NAME.fullmatch(entry.name) and not entry.is_symlink() and os.path.lexists(entry / META_NAME):
            if _ADOPTED.fullmatch(entry.name) and marked and (entry / META_NAME).is_file():
                versions.append(entry)
            else:
                found.append(Leftover(entry, "a version", False))
    versions.sort(key=lambda entry: entry.lstat().st_mtime_ns)
    older = [entry for entry in versions if str(entry) not in committed]
    return found + [Leftover(entry, "an old version", True) for entry in older[: max(0, len(older) - 1)]]


_KILLED = "left by a process that was killed"


def _is_partitions(entry: Path) -> bool:
    return entry.name.startswith(f"{PARTITIONS}-") and entry.is_dir() and not entry.is_symlink()


def _is_link(entry: Path) -> bool:
    return entry.name == LINK and entry.is_symlink()


def _is_marked(entry: Path, kinds: Collection[str]) -> bool:
    """Whether the content of an entry of the versions folder shows that this project made it."""
    try:
        if entry.name == RECIPE_NAME:
            return {"fingerprint", "meta_sha256", "version"} <= parse_object(read_regular(entry)).keys()
        if entry.is_symlink() or not entry.is_dir():
            return False
        if _is_partitions(entry):
            return is_plan(entry)
        if entry.suffix == JOURNAL_SUFFIX and BUILD_NAME.fullmatch(entry.name):
            return is_journal(entry / JOURNAL_NAME)
        if not VERSION_NAME.fullmatch(entry.name):
            return False
        meta = parse_object(read_regular(entry / META_NAME))
    except (OSError, ValueError):
        return False
    content = str(meta.get("content_sha256"))
    named = content.startswith(entry.name) or _ADOPTED.fullmatch(entry.name) is not None
    return meta.get("kind") in kinds and named and SHA256_DIGITS.fullmatch(content) is not None


def is_journal(path: Path) -> bool:
    """Whether a file begins with the first line of a build's journal. Raises as `open_regular`."""
    with open(open_regular(path), "rb") as file:
        line = file.readline(_MAX_LINE)
    if line[-1:] != b"\n" or line[:9] != f"{zlib.crc32(line[9:-1]):08x} ".encode():
        return False
    return {"identity", "journal_version"} <= parse_object(line[9:]).keys()
