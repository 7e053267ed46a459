"""Shared locks on the folders of versions: readers keep their version from gc. Without flock gc removes no version."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from niels_gpt.storage.fileio import META_NAME

_LEASES = "builders lock this folder by leases, which readers have not, so nobody can know whether one has it open"
_NO_FOLDER = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
OPEN = "open in a reader"
"""Why `unless_held` keeps a version: the only reason that is certain."""


class VersionHold:
    """A shared lock on the folder of a version, for the lifetime of this object; true if it holds.

    The folder is locked, not its meta.json: that is replaced when equal tokens get a new description, and the lock
    would stay on the old file, which gc does not check. A moved folder stays locked.
    A forked child shares the lock and the reader; the kernel drops the lock with the last descriptor. Copies and
    unpickled objects take a lock of their own.
    """

    _handle: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._handle = _open_folder(folder)
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.stat(META_NAME, dir_fd=self._handle)  # after the lock: gc may have removed the version just before
        except (OSError, ValueError):  # ValueError: a NUL in the name
            self.__del__()

    def __bool__(self) -> bool:
        return self._handle is not None

    def __reduce__(self) -> tuple[Callable[[Path], VersionHold], tuple[Path]]:
        return hold_version, (self.folder,)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit the name os may be gone
        handle, self._handle = self._handle, None
        if handle is not None:
            close(handle)


def hold_version(folder: Path) -> VersionHold:
    """Keep gc from removing a version during the lifetime of the returned object; nothing is written.

    folder: of the version itself, resolved. A link is not followed: it may point to another version by now.
    Never raises. The object is false, and holds nothing, if the folder has no meta.json, if gc is removing it, or if
    the file system has no locks. A network file system may hide the lock from other machines.
    """
    return VersionHold(folder)


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a shared lock on a folder, which `unless_held` finds; nothing is held where there are no locks."""
    handle = _open_folder(folder)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@contextmanager
def unless_held(folder: Path) -> Iterator[str]:
    """Yield why a version may have a reader, "" if it has none; then no reader can take a hold within the block.

    Without locks on its file system, and where builders take leases, a version always may have one. A path that is no
    folder has none.
    """
    from niels_gpt.storage.locks.folder import FLOCK, lock_kind  # gc alone needs them

    handle = None
    try:
        try:
            handle = _open_folder(folder)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            why = "" if lock_kind(folder) == FLOCK else _LEASES
        except BlockingIOError:
            why = OPEN
        except OSError as error:
            why = "" if error.errno in _NO_FOLDER else _unknown(error)
        yield why
    finally:
        if handle is not None:
            os.close(handle)


def _unknown(error: OSError) -> str:
    from niels_gpt.storage.locks.kernel import NOT_OFFERED

    what = "this file system has no locks" if error.errno in NOT_OFFERED else f"it cannot be locked ({error.strerror})"
    return f"{what}, so nobody can know whether a reader has it open"


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
