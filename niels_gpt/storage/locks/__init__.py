"""Locks: one builder for each cache, and readers that keep their version from gc.

kernel.py      a lock of the kernel (flock) on a file, whose text names the holder; it ends with the process
leases.py      leases, for file systems without flock: how often a holder raises its counter, when another may take over
mounts.py      whether a folder's file system passes flock on to other machines

readers.py     the earlier name of `hold_version` here, for one release

A builder takes `file_lock`: a flock, or a lease if the folder's `.locks.json` says so. A reader takes a shared flock on
the folder of its version, which gc looks for.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, PathLike

if TYPE_CHECKING:
    from niels_gpt.storage.locks.leases import apply_lock_setting, check_lease, is_lost, lock_kind

__all__ = [
    "OPEN",
    "VersionHold",
    "apply_lock_setting",
    "check_lease",
    "file_lock",
    "hold_folder",
    "hold_version",
    "is_leased",
    "is_lost",
    "lock_kind",
    "refuse_if_held",
    "refuse_while_held",
    "unless_held",
]

OPEN = "open in a reader"
"""Why `unless_held` keeps a version: the only reason that is certain."""
_LEASES = "builders lock this folder by leases, which readers have not, so nobody can know whether one has it open"
_NO_FOLDER = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_NOT_OFFERED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def __getattr__(name: str) -> Any:
    # kernel and leases are imported where they are used: a process that reads a cache needs neither.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.leases"), name)


@contextmanager
def file_lock(path: Path, locked: PathLike, state: str = "is in use", *, wait: bool) -> Iterator[None]:
    """Hold the builder's lock at `path`: a flock on this file, or a lease if the folder says so.

    locked, state: what the lock protects and what its holder does, for the message "LOCKED: STATE by user ...".
    wait: wait without a limit while another process or thread holds it.
    Under a lease, call `check_lease(path)` before each step that others see: a process that was stopped may have lost
    it. The end of the block calls it too.
    Raises: CacheError E503 with user, host and pid of the holder, unless `wait`; CacheError E504 if another file has
        the lock's name; CacheError E512 if the lease was lost, or if a builder without leases may hold the lock;
        OSError without permission, on a full disk, and without flock.
    """
    from niels_gpt.storage.locks import kernel, leases

    while True:
        kind = leases.lock_kind(path)
        take = kernel.kernel_lock if kind == leases.FLOCK else leases.lease
        with take(path, locked, state, wait=wait):
            # `apply_lock_setting` writes its file, then looks for locks. A lock taken in between has the old kind.
            if leases.lock_kind(path) == kind:
                yield
                return


def refuse_if_held(path: Path, locked: PathLike, state: str = "is in use") -> None:
    """Raise CacheError E503 with the holder of a lock, if there is one; write nothing.

    locked, state: as in `file_lock`. The file may be absent, and write permission is not needed. A lease counts as held
    unless its process is known to be dead; see `refuse_while_held`.
    """
    from niels_gpt.storage.locks import kernel, leases

    if leases.lock_kind(path) == leases.FLOCK:
        kernel.refuse_if_flocked(path, locked, state)
    else:
        leases.refuse_if_leased(path, locked, state)


def refuse_while_held(path: Path, locked: PathLike, state: str = "is in use") -> None:
    """Raise CacheError E503 with the holder of a lock; watch a lease that may have run out, and remove it if it has.

    Watching takes up to `leases.LEASE_SECONDS`, for a machine that died with the lease, and needs write permission.
    """
    from niels_gpt.storage.locks.leases import FLOCK, lock_kind

    try:
        refuse_if_held(path, locked, state)
    except CacheError as error:
        if error.code != "E503" or lock_kind(path) == FLOCK:
            raise
        with file_lock(path, locked, state, wait=False):
            pass


def is_leased(path: Path) -> bool:
    """Return whether this process holds the lock at `path` as a lease."""
    from niels_gpt.storage.locks.leases import HELD

    return os.path.abspath(path) in HELD


class VersionHold:
    """A shared lock on the folder of a version, for the lifetime of this object; true if it holds.

    A moved folder stays locked. A forked child shares the lock and the reader; the kernel drops the lock with the last
    descriptor. Copies and unpickled objects take a lock of their own.
    """

    _handle: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            # The folder, not its meta.json: a new description of equal tokens replaces that file, and the lock would
            # stay on the old one, which gc does not check.
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
    """Keep gc from removing a version while the returned object lives; write nothing, and never raise.

    folder: the version's own folder, resolved. A link is not followed: it may point to another version by now.
    The object is false, and holds nothing, if the folder has no meta.json, if gc is removing it, or if the file system
    has no locks. A network file system may hide the lock from other machines.
    """
    return VersionHold(folder)


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a shared lock on a folder, which `unless_held` finds; hold nothing if the file system has no locks."""
    handle = _open_folder(folder)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@contextmanager
def unless_held(folder: Path) -> Iterator[str]:
    """Yield why a version may have a reader, or "" if it has none; no reader can take a hold within the block then.

    A version may always have one if its file system has no locks, or if its builders take leases. A path that is not a
    folder has none.
    """
    from niels_gpt.storage.locks.leases import FLOCK, lock_kind

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
    what = "this file system has no locks" if error.errno in _NOT_OFFERED else f"it cannot be locked ({error.strerror})"
    return f"{what}, so nobody can know whether a reader has it open"


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
