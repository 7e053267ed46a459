"""Collect garbage in a folder of caches: old versions, unfinished builds, leftovers of killed processes."""

from __future__ import annotations

import shlex
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from niels_gpt.display.numbers import size_text
from niels_gpt.engine.journal import identity_of
from niels_gpt.engine.meta import OF_ANOTHER_VERSION, is_of_this_version
from niels_gpt.engine.units import plans_of
from niels_gpt.kinds.kind import kind_names
from niels_gpt.recipes.records import recorded_recipe
from niels_gpt.recipes.unit_plans import is_of_seal
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import walked
from niels_gpt.storage.locks import OPEN, unless_held
from niels_gpt.storage.versions import (
    BUILDING,
    JOURNAL_SUFFIX,
    PARTITIONS,
    PLAN_NAME,
    Leftover,
    build_lock,
    discard,
    is_plan,
    leftovers,
    refuse_if_building,
    refuse_if_partition_is_built,
    removable,
    version_name,
    versions_below,
)

_WEEK_S = 7 * 24 * 3600
FAILED = "could not remove"
"""Beginning of the line of a piece that could not be removed."""


def collect(cache_dir: Path, *, dry_run: bool, unsealed: bool = False) -> Iterator[str]:
    """Remove the pieces that the caches in a folder no longer need. Yields a line for each, with size and reason.

    dry_run: remove and write nothing. unsealed: remove the newest partitions of a cache too. Otherwise they stay for a
        week after the last one was finished, because the next task of a job may continue with them.
    Leaves alone: a cache that is being built, and all its partitions while one is built; a version that a reader has
    open, and every version on a file system without locks; files that no cache wrote (`storage.versions.leftovers`).
    Follows no link. A piece that cannot be removed has a line that begins with FAILED, and the other caches are still
    processed.
    Raises: FileNotFoundError if the folder does not exist.
    """
    if not cache_dir.is_dir():
        raise FileNotFoundError(f"{cache_dir}: no such folder. Name the folder of the caches, such as cache")
    kinds = kind_names()
    for folder in versions_below(cache_dir):
        cache = folder.parent.parent / folder.name
        lines: list[str] = []
        try:
            if not dry_run and removable(cache, kinds):
                with build_lock(cache):
                    kept = None if unsealed else wanted_plan(cache)
                    for piece in _explained(leftovers(cache, kinds)):  # listed again: a build may have ended meanwhile
                        lines.append(_remove(piece, kept, dry_run))
            else:
                refuse_if_building(cache)
                kept = None if unsealed else wanted_plan(cache)
                lines += [_remove(piece, kept, dry_run) for piece in _explained(leftovers(cache, kinds))]
        except CacheError as error:  # another process holds the lock, or its file is no lock
            lines.append(f"left alone {error}")
        except OSError as error:
            lines.append(f"{FAILED} {error}")
        yield from lines  # after the lock is released: the caller may be slow


def _explained(pieces: list[Leftover]) -> list[Leftover]:
    """Return the pieces; the reason of an unfinished build says if this version of the program cannot resume it."""
    others = {
        piece.path.with_suffix("")
        for piece in pieces
        if piece.path.suffix == JOURNAL_SUFFIX and not is_of_this_version(identity_of(piece.path))
    }
    why = f"an unfinished build {OF_ANOTHER_VERSION}"
    return [piece._replace(why=why) if piece.path in others else piece for piece in pieces]


def wanted_plan(cache: Path) -> Path | None:
    """Return the folder of the newest plan of a cache, unless it was sealed or is older than a week."""
    for plan in plans_of(cache)[:1]:
        fixed = (plan.folder / PLAN_NAME).lstat().st_mtime
        if (recorded := recorded_recipe(cache).get("fingerprint")) is not None:
            is_sealed = plan.fingerprint == recorded and is_of_seal(plan)
        else:  # a seal without a recipe
            is_sealed = cache.is_symlink() and cache.lstat().st_mtime >= fixed
        if not is_sealed and time.time() - max(fixed, plan.folder.lstat().st_mtime) < _WEEK_S:
            return plan.folder
    return None


def _bytes_below(path: Path) -> int:
    """Return the bytes of a file or link, or of all files in a folder. Follows no link."""
    if path.is_dir() and not path.is_symlink():
        return sum(about.st_size for _, _, about in walked(path) if not stat.S_ISDIR(about.st_mode))
    return path.lstat().st_size


def _remove(piece: Leftover, kept: Path | None, dry_run: bool) -> str:
    """Remove a piece, unless it is `kept`, the folder of a plan. Returns its line."""
    # A reader that resolves the public link holds the version a moment later. If gc runs in between, that version is
    # the committed one, which stays, unless two builds are committed in that moment as well. Such a reader fails at
    # the first missing file; that is accepted.
    path = piece.path
    if not piece.is_ours:
        return f"left alone {path}: by its content, no cache put it there"
    if is_plan(path):
        try:
            refuse_if_partition_is_built(path, dry_run=dry_run)
        except CacheError as error:
            return f"left alone {error}"
    num_bytes, name, why_unneeded = _bytes_below(path), version_name(path), piece.why
    if is_plan(path):
        finished = sum(entry.is_symlink() for entry in path.iterdir())  # a build ends with the link
        done = f", {finished:,} of them finished" if finished else ""  # receipts of shards are not links
        why_unneeded += done
        if path == kept:
            why = "the newest partitions stay for a week after the last one was finished. To remove them: --unsealed"
            return f"kept {name} ({size_text(num_bytes)}{done}): {why}"
    with unless_held(path) as why:
        if why and not path.name.startswith((BUILDING, PARTITIONS)):  # nobody reads an unfinished build
            remedy = "" if why == OPEN else f". When no reader runs: {shlex.join(['rm', '-r', str(path)])}"
            return f"kept {name} ({size_text(num_bytes)}): {why}{remedy}"
        if not dry_run:
            discard(path)
    return f"{'would remove' if dry_run else 'removed'} {name} ({size_text(num_bytes)}): {why_unneeded}"
