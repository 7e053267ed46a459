"""How a folder of caches is locked: by flock, or by leases where its `.locks.json` says so.

Leases are in `.leases/` beside that file, and not beside the locks: no list of a cache's files has to know them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

from niels_gpt.paths import FAMILIES
from niels_gpt.settings import UsageError
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks.kernel import refuse_if_flocked
from niels_gpt.storage.meta_json import parse_object, read_regular

MARKER, LEASES_DIR = ".locks.json", ".leases"
FLOCK, LEASE = "flock", "lease"
_SETTINGS = ("auto", FLOCK, LEASE)
_CONTENT = {"kind": "locks", "lock": LEASE}
_MOST_BYTES = 4096
_MOST_LEVELS = 10
"""Folders that are looked in: from the lock of a partition to the folder of caches there are eight."""
_HOLDER = re.compile(r"user .+, host (.+), pid [0-9]+")
_LOCK_NAMES = ("lock", ".lock")


def lock_kind(path: Path) -> str:
    """Return how a lock file at `path` is locked, "flock" or "lease": a folder above it says so, by its `.locks.json`.

    path: a lock file or a folder, which may be absent. Links in it are resolved first, so that every process finds the
    same folders. So no caller passes the kind on, and processes with different settings lock in the same way.
    Raises: CacheError E512 where a `.locks.json` is not a file of this project; PermissionError.
    """
    return FLOCK if _marker_above(path) is None else LEASE


def lease_path(path: Path) -> Path:
    """Return the path of the leases of a lock, to which they add their numbers. The folder is one of leases.

    The name is a hash of the lock's path below the folder of caches: machines may mount that in different places.
    Raises: CacheError E205 where `.leases` is a link; FileNotFoundError where the folder says nothing any more.
    """
    marker = _marker_above(path)
    if marker is None:
        raise FileNotFoundError(f"{path}: {MARKER} was removed while a lease was taken")
    folder = marker.with_name(LEASES_DIR)
    if folder.is_symlink():
        raise CacheError(
            folder, "a symbolic link", "a folder: nothing is written through links", "Remove it", code="E205"
        )
    name = os.path.relpath(os.path.realpath(path), marker.parent)
    return folder / hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def _marker_above(path: Path) -> Path | None:
    real = Path(os.path.realpath(path))
    for folder in [real, *real.parents][:_MOST_LEVELS]:
        marker = folder / MARKER
        try:
            if parse_object(read_regular(marker, _MOST_BYTES)) != _CONTENT:
                raise ValueError("of another program, or of a later version of this one")
        except FileNotFoundError:
            continue
        except PermissionError:
            if os.access(folder, os.X_OK):  # else nothing below it can be locked, and the lock's own error says so
                raise
            continue
        except ValueError as error:  # a CacheError is one
            found = error.problem if isinstance(error, CacheError) else str(error)
            remedy = f"If no build runs in the folder: {shlex.join(['rm', '-r', str(marker)])}"
            raise CacheError(marker, found, str(_CONTENT), remedy, code="E512") from error
        return marker
    return None


def apply_lock_setting(root: Path, setting: str) -> None:
    """Let a folder of caches be locked as the setting `lock` says; call it at the start of a run.

    root: the folder of caches; of an EAGLE-3 cache that cache's own folder.
    setting: "auto" (as the folder says, flock where it says nothing), "flock" or "lease".
    "lease" writes `.locks.json`, which every later run follows, on every machine.
    Raises: CacheError E512 for "flock" in a folder of leases; CacheError E503 or E512 for "lease" where a builder
        holds a flock, or where one on another machine may.
    """
    if setting not in _SETTINGS:
        raise UsageError(f"lock (--lock) is {setting!r}, expected one of {', '.join(_SETTINGS)}")
    marker = _marker_above(root)
    if setting == FLOCK and marker is not None:
        remedy = f"Leave --lock out. To go back to flock, when no build runs in the folder on any machine: rm {marker}"
        raise CacheError(root, f"its locks are leases, by {marker}", FLOCK, remedy, code="E512")
    if setting != LEASE or marker is not None:
        return
    fileio.make_dir(root)
    _refuse_links(root)
    for path in _lock_files(root):
        refuse_kernel_lock(path, path.parent)
    # Who takes a flock meanwhile is seen by each taker of the same lease. The file stays: others may follow it by now.
    fileio.write_bytes(root / MARKER, fileio.canonical_json(_CONTENT))


def refuse_kernel_lock(path: Path, locked: fileio.PathLike, state: str = "is in use") -> None:
    """Raise CacheError unless it is certain that nobody has a flock on a lock file in a folder of leases.

    That is E503 for a holder on this machine, and E512 where the file names a holder on another one: flock may not
    show it, and a killed one leaves its name.
    """
    holder = refuse_if_flocked(path, locked, state)
    named = _HOLDER.fullmatch(holder)  # else it is another program's file, whose locks are not ours to judge
    if named and named[1] != socket.gethostname():
        found = f"{state} by {holder}, or was when that process was killed: flock does not show which"
        raise CacheError(locked, found, remedy=f"If that process has ended: rm {path}", code="E512")


def _refuse_links(root: Path) -> None:
    """Refuse a family of caches that lies elsewhere: its locks would be looked for there."""
    for path in root.iterdir():
        if path.is_symlink() and path.name in FAMILIES:
            found = f"a symbolic link to {os.path.realpath(path)}, whose locks are not those of {root}"
            raise CacheError(path, found, "a folder", "Name the folder of caches that it lies in", code="E512")


def _lock_files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in _LOCK_NAMES if name in names)
