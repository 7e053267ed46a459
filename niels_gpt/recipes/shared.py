"""Check what all machines of one build must share: program versions, and a file system that keeps its promises."""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from secrets import token_hex
from typing import Any

from niels_gpt.cache.formats import FORMAT_VERSION
from niels_gpt.engine.meta import BUILDER_VERSIONS
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks import lock_kind
from niels_gpt.storage.locks.mounts import mount_of
from niels_gpt.storage.versions import PROBE

logger = logging.getLogger(__name__)

LIBRARIES = ("torch", "numpy", "sentencepiece", "tokenizers", "gigatoken", "pyarrow", "orjson", "datasets")
"""Libraries that read, shuffle or encode: another version may give other bytes."""
_PROBE_FILES = {"old", "new", "old-link", "new-link", "once", "lock", "linked"}
_OLD_SECONDS = 600  # a check takes far less


@functools.cache
def code_identity() -> dict[str, Any]:
    """Return the versions of the program that builds a cache: they must be equal on all machines of one build.

    Returns {"format": int, "builder": int, "libraries": {name: version}}, computed once in a process without importing
    a library. A version lacks the part after "+", which names a variant; None: not installed.
    builder: of pretrain caches, for every kind. The fingerprint of a plan holds the builder version of its own kind.
    """
    return {
        "format": FORMAT_VERSION,
        "builder": BUILDER_VERSIONS["pretrain"],
        "libraries": {name: _installed(name) for name in LIBRARIES},
    }


def _installed(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package).partition("+")[0]
    return None


_warned: set[str] = set()  # folders, so that a process that builds many partitions says it once


def check_shared_folder(folder: Path, flag: str = "--cache-dir") -> None:
    """Check that a folder's file system supports builds on several machines, in a hidden folder that is removed again.

    folder: of the caches; made if absent. flag: of the command, for the message.
    Hard links are optional: without them sealing copies.
    Warns W504 if locks are flock's, and the file system may keep them on one machine.
    Raises: CacheError E512 naming the missing feature; OSError naming the folder.
    """
    fileio.make_dir(folder)
    probe = folder / f".probe-{token_hex(4)}"
    os.mkdir(probe)
    _remove_old(folder, probe.lstat().st_mtime)
    try:
        by_flock = lock_kind(probe) == "flock"
        for what, works in _PROBES.items():
            if what == _FLOCK and not by_flock:
                continue
            with fileio.named(folder):
                is_good = works(probe)
            if not is_good:
                remedy = "Add --lock lease" if what == _FLOCK else f"Name another folder ({flag})"
                raise CacheError(folder, f"its file system has no {what}", remedy=remedy, code="E512")
        try:
            os.link(probe / "old", probe / "linked")
        except OSError:
            logger.info("%s: its file system has no hard links; files are copied instead", folder)
    finally:
        fileio.remove(probe)
    hidden = mount_of(folder).hidden
    if by_flock and hidden and str(folder) not in _warned:
        _warned.add(str(folder))
        logger.warning(
            "%s: %s: two machines could build the same cache at once. If several use this folder: --lock lease",
            *(folder, hidden),
            extra={"code": "W504"},
        )


def _remove_old(folder: Path, now: float) -> None:
    """Remove hidden folders of killed checks. now: time by the clock of the folder."""
    for entry in folder.glob(".probe-*"):
        with suppress(OSError):
            about = entry.lstat()
            if not PROBE.fullmatch(entry.name) or not stat.S_ISDIR(about.st_mode):
                continue
            if now - about.st_mtime > _OLD_SECONDS and set(os.listdir(entry)) <= _PROBE_FILES:
                fileio.remove(entry)


def _replaces_a_file(probe: Path) -> bool:
    old, new = probe / "old", probe / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    try:
        os.replace(new, old)
    except OSError:
        return False
    return old.read_bytes() == b"new" and not new.exists()


def _replaces_a_link(probe: Path) -> bool:
    old, new = probe / "old-link", probe / "new-link"
    try:
        os.symlink("old", old)
        os.symlink("new", new)
        os.replace(new, old)
    except OSError:
        return False
    return os.readlink(old) == "new"


def _creates_once(probe: Path) -> bool:
    try:
        for _ in range(2):
            (probe / "once").touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


def _locks(probe: Path) -> bool:
    """Return whether flock keeps a second open file out."""
    with (probe / "lock").open("w") as first, (probe / "lock").open("w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


_FLOCK = "locks (flock) that keep a second process out"
_PROBES: dict[str, Callable[[Path], bool]] = {
    "renames that replace a file": _replaces_a_file,
    "renames that replace a symbolic link": _replaces_a_link,
    "files that are created by exactly one (O_EXCL)": _creates_once,
    _FLOCK: _locks,
}
"""Needed features, as in the message "its file system has no ..."."""
