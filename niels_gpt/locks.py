"""Locks, which the kernel drops when their process ends in any way.

A builder has a lock file, whose text says who holds it; a reader has the folder of the version that it reads.
"""

from __future__ import annotations

import fcntl
import getpass
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from niels_gpt.fileio import META_NAME, CacheError, make_dir

logger = logging.getLogger(__name__)
_CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def file_lock(path: Path, what: str, *, wait: bool) -> Iterator[None]:
    """Hold a lock file, which need not be there yet.

    The kernel drops the lock when its process ends in any way, so a dead process cannot hold it.
    what: begins the message for who comes second: "PATH: is being built".
    wait: stand in line, for as long as it takes, where somebody else holds it.
    Raises: CacheError naming user, host and pid of the holder, at once, unless `wait`; CacheError for what is no file,
        or is one that has another name too: what a lock says of its holder would be written over it.
    """
    handle = _open(path, what)
    _refuse_unless_ours(handle, path)
    _held.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise CacheError(f"{what} by {_holder(handle)}. Wait for it, or stop that process ({path})") from None
            logger.info("%s by %s; waiting", what, _holder(handle))
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            why = f"{error.strerror}: this file system has no locks. Name another folder for the caches"
            raise OSError(error.errno, why, str(path)) from error
        with suppress(OSError):  # a full disk: the lock holds, it only does not say whose it is
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"user {_user()}, host {socket.gethostname()}, pid {os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            if handle in _held:  # not in a forked child, where the number may be another file's by now
                os.ftruncate(handle, 0)  # nothing of this machine stays in the folder
    finally:
        if handle in _held:
            _held.discard(handle)
            os.close(handle)


def _open(path: Path, what: str) -> int:
    try:
        make_dir(path.parent)
        return os.open(path, os.O_RDWR | os.O_CREAT | _CAREFULLY, 0o666)
    except OSError as error:
        if isinstance(error, PermissionError):
            refuse_if_held(path, what)
        advice = f"user {_user()} cannot write there. Let it, or name another folder for the caches"
        raise OSError(error.errno, f"{error.strerror}; {advice}", str(path)) from error


def _refuse_unless_ours(handle: int, path: Path) -> None:
    """Close what is no lock file of ours, and raise CacheError."""
    about = os.fstat(handle)
    why = None
    if not stat.S_ISREG(about.st_mode):
        why = "not a regular file"
    elif about.st_nlink > 1:
        why = f"a file with {about.st_nlink} names (hard links)"
    if why is not None:
        os.close(handle)
        raise CacheError(f"{path}: {why}, expected a lock file that is nobody else's. Remove it: rm -r {path}")


def refuse_if_held(path: Path, what: str) -> None:
    """Raise CacheError that says who holds a lock file, which need not be there. Nothing is written.

    what: as for `file_lock`, which is not needed for it: who may not write the file may still see that.
    """
    try:
        handle = os.open(path, os.O_RDONLY | _CAREFULLY)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CacheError(f"{what} by {_holder(handle)}. Wait for it, or stop that process ({path})") from None
    except OSError:
        return
    finally:
        os.close(handle)


def _holder(handle: int) -> str:
    return os.pread(handle, 4096, 0).decode(errors="replace").strip() or "a process that has just begun"


_held: set[int] = set()


def _let_go() -> None:
    # A forked child shares the lock; without this it would hold it on after its parent's death.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without an account, as in many containers
        return str(os.getuid())


class VersionHold:
    """A shared lock on the folder of a version, for as long as this object lives; true if it holds.

    Locked is the folder, not its meta.json: that is replaced when the same tokens are described anew, and the lock
    would stay with the old file, where `gc` does not ask. The folder stays the same, also when it is moved.
    A forked child shares the lock, as it shares the reader: the kernel drops it with the last descriptor. A copy, and
    what is unpickled, holds anew.
    """

    _handle: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._handle = _open_folder(folder)
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.stat(META_NAME, dir_fd=self._handle)  # after the lock: gc may have removed the version a moment before
        except (OSError, ValueError):  # ValueError: a NUL in the name
            self.__del__()

    def __bool__(self) -> bool:
        return self._handle is not None

    def __reduce__(self) -> tuple[Callable[[Path], VersionHold], tuple[Path]]:
        return hold_version, (self.folder,)

    def __del__(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def hold_version(folder: Path) -> VersionHold:
    """Keep `gc` from removing a version while the returned object lives; nothing is written.

    folder: of the version itself, already resolved: a link is not followed, for it may name another version by now.
    Never raises. The object is false, and holds nothing, where the folder has no meta.json, gc is just removing it, or
    the file system has no locks. A network file system may keep the lock from other machines.
    """
    return VersionHold(folder)


@contextmanager
def unless_held(folder: Path) -> Iterator[bool]:
    """Yield whether no reader holds a version; if so, nobody can take hold of it within the block.

    True too where that cannot be asked: no folder, or no locks on its file system.
    """
    handle = None
    try:
        try:
            handle = _open_folder(folder)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError as error:
            free = not isinstance(error, BlockingIOError)
        yield free
    finally:
        if handle is not None:
            os.close(handle)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
