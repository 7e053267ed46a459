"""Files below a folder: their order, which are hidden, which links are followed, and their fingerprint."""

from __future__ import annotations

import hashlib
import heapq
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from niels_gpt.data.files.text import LINKS, RESOURCE_FORK, open_source

logger = logging.getLogger(__name__)

MAX_DEPTH = 100
"""Levels of folders to look into. Each look takes a time that grows with the length of the path."""


def walk_files(
    folder: Path,
    *,
    suffixes: Sequence[str],
    follow_links: bool = False,
    links: list[Path] | None = None,
    forks: list[Path] | None = None,
) -> list[Path]:
    """List the files below `folder` with one of `suffixes`, sorted by the bytes of their relative paths.

    Hidden files and folders (`.git`, `.obsidian`) are left out. Unreadable folders, pipes and broken links are skipped
    with a warning.
    follow_links: follow links below `folder`, which may itself be one. Each file is then listed once, by the path with
        the fewest links.
    links: receives links to folders, and to files with such a suffix, that are not followed.
    forks: receives hidden files `._NAME` with such a suffix, which macOS puts beside NAME on other disks.
    """
    files: list[Path] = []
    for parent in walk_folders(folder, follow_links=follow_links, links=links):
        for name in _names_in(parent):
            path = parent / name
            if forks is not None and name.startswith("._") and name.endswith(tuple(suffixes)):
                forks.append(path)
            if name.startswith(".") or not name.endswith(tuple(suffixes)) or path.is_dir():
                continue
            if path.is_symlink() and not follow_links:
                if links is not None:
                    links.append(path)
            elif _is_regular(path):
                files.append(path)
    once = once_each(files).values() if follow_links else files
    return sorted(once, key=lambda path: os.fsencode(path.relative_to(folder)))


def walk_folders(folder: Path, *, follow_links: bool = False, links: list[Path] | None = None) -> Iterator[Path]:
    """Yield `folder`, which may be a link, and the folders below it, without hidden ones.

    follow_links: also follow links below `folder`. Each real folder is then yielded once, by the path with the fewest
        links, then the fewest parts, then the first in byte order.
    links: receives links to folders that are not followed.
    """
    root = Path(os.path.realpath(folder))
    seen: set[Path] = set()
    waiting = [(0, 0, b"", folder)]
    while waiting:
        num_links, depth, _, where = heapq.heappop(waiting)
        if depth > MAX_DEPTH:
            text = "%s: below more than %d folders, skipped with all that is in it"
            logger.warning(text, where, MAX_DEPTH, extra={"code": "W304"})
            continue
        real = Path(os.path.realpath(where))
        # Links to hidden folders are ignored: a cache among notes is such a link, and changes with every build.
        hidden = real.is_relative_to(root) and any(part.startswith(".") for part in real.relative_to(root).parts)
        if hidden or real in seen:
            continue
        seen.add(real)
        yield where
        try:
            with os.scandir(where) as entries:
                for entry in entries:
                    # A folder whose path is too long is not a folder for isdir; to look into it fails with a warning.
                    if entry.name.startswith(".") or not (entry.is_dir(follow_symlinks=False) or os.path.isdir(entry)):
                        continue
                    if follow_links or not entry.is_symlink():
                        key = (num_links + entry.is_symlink(), depth + 1, os.fsencode(entry.path) + b"/")
                        heapq.heappush(waiting, (*key, Path(entry.path)))
                    elif links is not None:
                        links.append(Path(entry.path))
        except OSError as error:
            _warn_of(error)


def once_each(paths: Iterable[Path]) -> dict[str, Path]:
    """Return real path -> the path with the fewest links, then the fewest parts, then the first in byte order."""
    names: dict[str, list[Path]] = {}
    for path in paths:
        names.setdefault(os.path.realpath(path), []).append(path)
    return {real: same[0] if len(same) == 1 else min(same, key=_num_links) for real, same in names.items()}


def in_order(files: Iterable[Path], *folders: Path) -> tuple[list[Path], Path]:
    """Return absolute files, each once, and the common folder above them and `folders`.

    The files are sorted by the bytes of their paths below that folder: the same files elsewhere have the same order.
    """
    once = set(files)
    root = Path(os.path.commonpath([*(path.parent for path in once), *folders]))
    return sorted(once, key=lambda path: os.fsencode(path.relative_to(root))), root


def _num_links(path: Path) -> tuple[int, int, bytes]:
    return sum(map(os.path.islink, (path, *path.parents))), len(path.parts), os.fsencode(path)


def first_link(root: Path, path: Path) -> Path | None:
    """Return the first link on the way from `root` down to `path`, which may itself be one; None if there is none."""
    for parent in (*reversed(path.relative_to(root).parents), path.relative_to(root)):
        if (step := root / parent) != root and step.is_symlink():
            return step
    return None


def note_links(counters: Counter[str] | None, links: Sequence[Path]) -> None:
    """Count links that are not followed, and log the first one. Later calls for the same counters do nothing."""
    if counters is not None and links and not counters[LINKS]:
        counters[LINKS] = len(set(links))
        logger.warning(
            "%s: a symbolic link, which is not followed; --follow-links reads its target. Counted as %s: %d",
            min(links),
            LINKS,
            counters[LINKS],
            extra={"code": "W303"},
        )


def note_forks(counters: Counter[str] | None, number: int) -> None:
    """Count resource forks of macOS. Later calls for the same counters do nothing."""
    if counters is not None and number and not counters[RESOURCE_FORK]:
        counters[RESOURCE_FORK] = number


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # walk_folders has logged it
        return []


def _is_regular(path: Path) -> bool:
    if os.path.isfile(path):
        return True
    logger.warning("%s: a pipe, a device or a broken link, expected a file; skipped", path, extra={"code": "W304"})
    return False


def _warn_of(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):  # the caller raises these
        logger.warning("%s: cannot be read, skipped: %s", error.filename, error.strerror, extra={"code": "W304"})


def files_fingerprint(root: Path, paths: Iterable[Path]) -> str:
    """Hash names and contents: sha256 over "relpath, NUL, size, NUL, sha256, newline" in order of relative path.

    Depends neither on the place of `root` nor on modification times.
    Raises: SourceError E302 for a file that is mostly holes.
    """
    total = hashlib.sha256()
    for name, path in sorted((os.fsencode(path.relative_to(root)), path) for path in paths):
        with open(open_source(path), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(name + f"\0{os.fstat(file.fileno()).st_size}\0{digest}\n".encode())
    return total.hexdigest()
