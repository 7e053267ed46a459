"""Removing what caches no longer need: old versions, unfinished builds, what a killed process left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from niels_gpt.fileio import CacheError
from niels_gpt.locks import unless_held
from niels_gpt.recipes.report import disk_bytes, size
from niels_gpt.versions import VERSIONS_DIR, build_lock, discard, removable


def collect(cache_dir: Path, *, dry_run: bool) -> Iterator[str]:
    """Remove what the caches below a folder no longer need; yields a line for each piece, with its size and why.

    dry_run: remove nothing. A cache that is being built is left alone, and its line says who builds; a version that a
    reader has open is kept.
    Raises: FileNotFoundError where the folder is not there; OSError where something cannot be removed.
    """
    if not cache_dir.is_dir():
        raise FileNotFoundError(f"{cache_dir}: no such folder. Name the folder of the caches, such as cache")
    found = (path for path in cache_dir.rglob(f"{VERSIONS_DIR}/*") if path.is_dir())
    for folder in sorted(path for path in found if not path.is_symlink() and not path.parent.is_symlink()):
        cache = folder.parent.parent / folder.name
        lines: list[str] = []
        try:
            with build_lock(cache):
                for path, why in removable(cache):
                    lines.append(_discarded(path, why, dry_run))
        except (CacheError, OSError) as error:  # somebody else holds the lock, or owns the folder
            lines.append(f"left alone {error}")
        yield from lines  # without the lock: who reads them may take his time


def _discarded(path: Path, why: str, dry_run: bool) -> str:
    # A reader that resolves the public link takes hold of the version a moment later. If gc asks in between, that
    # version is the committed one, which stays anyway, unless two builds are committed in that moment as well. Such
    # a reader fails at the first file that it misses; that is accepted.
    num_bytes = disk_bytes(path)
    with unless_held(path) as free:
        if not free:
            return f"kept {path} ({size(num_bytes)}): open in a reader"
        if not dry_run:
            discard(path)
    return f"{'would remove' if dry_run else 'removed'} {path} ({size(num_bytes)}): {why}"
