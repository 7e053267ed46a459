"""Removing what caches no longer need: old versions, unfinished builds, what a killed process left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from niels_gpt.fileio import CacheError
from niels_gpt.locks import unless_held
from niels_gpt.recipes.report import disk_bytes, size
from niels_gpt.versions import Piece, build_lock, discard, pieces, refuse_if_building, removable, versions_below

FAILED = "could not remove"
"""How the line of what should be gone and is not begins."""


def collect(cache_dir: Path, *, dry_run: bool) -> Iterator[str]:
    """Remove what the caches below a folder no longer need; yields a line for each piece, with its size and why.

    dry_run: remove nothing, and write nothing. A cache that is being built is left alone, and its line says who builds;
    a version that a reader has open is kept; what no cache has put there (`niels_gpt.versions.pieces`) is left alone.
    Links are not followed. What cannot be removed has a line that begins with FAILED; the other caches are looked at.
    Raises: FileNotFoundError where the folder is not there.
    """
    if not cache_dir.is_dir():
        raise FileNotFoundError(f"{cache_dir}: no such folder. Name the folder of the caches, such as cache")
    for folder in versions_below(cache_dir):
        cache = folder.parent.parent / folder.name
        lines: list[str] = []
        try:
            if not dry_run and removable(cache):
                with build_lock(cache):
                    for piece in pieces(cache):  # again: somebody may have built meanwhile
                        lines.append(_discarded(piece, dry_run))
            else:
                refuse_if_building(cache)
                lines += [_discarded(piece, dry_run) for piece in pieces(cache)]
        except CacheError as error:  # somebody else holds the lock, or it is no lock
            lines.append(f"left alone {error}")
        except OSError as error:
            lines.append(f"{FAILED} {error}")
        yield from lines  # without the lock: who reads them may take his time


def _discarded(piece: Piece, dry_run: bool) -> str:
    # A reader that resolves the public link takes hold of the version a moment later. If gc asks in between, that
    # version is the committed one, which stays anyway, unless two builds are committed in that moment as well. Such
    # a reader fails at the first file that it misses; that is accepted.
    path = piece.path
    if not piece.is_ours:
        return f"left alone {path}: no cache has put it there, by what it holds"
    num_bytes = disk_bytes(path)
    with unless_held(path) as free:
        if not free:
            return f"kept {path} ({size(num_bytes)}): open in a reader"
        if not dry_run:
            discard(path)
    return f"{'would remove' if dry_run else 'removed'} {path} ({size(num_bytes)}): {piece.why}"
