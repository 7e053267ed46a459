"""Locks of the kernel on files (flock), which end with the process; the file's text names the holder."""

from __future__ import annotations

import fcntl
import getpass
import logging
import os
import shlex
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import NO_LINK, PathLike, make_dir
from niels_gpt.storage.meta_json import printable

logger = logging.getLogger(__name__)


@contextmanager
def kernel_lock(path: Path, locked: PathLike, state: str = "is in use", *, wait: bool) -> Iterator[None]:
    """Hold a flock on the lock file at `path`, which is created if it is absent.

    locked, state: what the lock protects and what its holder does, for the message "LOCKED: STATE by user ...".
    wait: wait without a limit while another process or thread holds it.
    Raises: CacheError E503 with user, host and pid of the holder, unless `wait`; CacheError E504 if `path` is not a
        regular file or has hard links, since the holder's name would overwrite their text; OSError without permission,
        and without flock.
    """
    handle = _open(path, locked, state)
    _held.add(handle)
    try:
        refuse_other_files(os.fstat(handle), path)
        _flock(handle, path, locked, state, wait)
        with suppress(OSError):  # a full disk: the lock holds without its text
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"user {user_name()}, host {socket.gethostname()}, pid {os.getpid()}\n".encode(), 0)
            os.fsync(handle)  # if flock does not reach another machine, that machine has only this text
        try:
            yield
        finally:
            if handle in _held:  # not in a forked child, where the number may be another file's by now
                os.ftruncate(handle, 0)  # no name of a user or host stays in the folder
    finally:
        if handle in _held:
            _held.discard(handle)
            os.close(handle)


def _flock(handle: int, path: Path, locked: PathLike, state: str, wait: bool) -> None:
    """Take the flock of an open lock file; see `kernel_lock`."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(handle)
        if not wait:
            raise in_use(holder, path, locked, state) from None
        logger.info("%s: %s by %s; waiting", os.fspath(locked), state, holder)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        remedy = "Lock the caches by leases (--lock lease), or name another folder for them"
        raise OSError(error.errno, f"{error.strerror}: this file system has no flock. {remedy}", str(path)) from error


def _open(path: Path, locked: PathLike, state: str) -> int:
    try:
        make_dir(path.parent)
        return os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
    except OSError as error:
        if isinstance(error, PermissionError):
            refuse_if_flocked(path, locked, state)
        raise not_written(error, path) from error


def not_written(error: OSError, path: Path) -> OSError:
    """Return the error of a file that could not be created, with the user's name and what to do."""
    advice = f"user {user_name()} cannot write there. Give it the permission, or name another folder for the caches"
    return OSError(error.errno, f"{error.strerror}; {advice}", str(path))


def refuse_other_files(status: os.stat_result, path: Path) -> None:
    """Raise CacheError E504 for a file that is not a lock file of this project."""
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return
    is_file = stat.S_ISREG(status.st_mode)
    kind = f"a file with {status.st_nlink} names (hard links)" if is_file else "not a regular file"
    raise CacheError(path, kind, "a lock file with one name", f"Remove it: rm -r {shlex.quote(str(path))}", code="E504")


def refuse_if_flocked(path: Path, locked: PathLike, state: str = "is in use") -> str:
    """Raise CacheError E503 with the holder of a lock file, if there is one; write nothing.

    locked, state: as in `kernel_lock`. The file may be absent, and write permission is not needed.
    Returns the file's text, "" without any: it names a holder that was killed, or one that the lock does not show.
    """
    try:
        handle = os.open(path, os.O_RDONLY | NO_LINK)
    except OSError:
        return ""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return _text(handle)
    except BlockingIOError:
        raise in_use(_holder(handle), path, locked, state) from None
    except OSError:  # no flock there
        return _text(handle)
    finally:
        os.close(handle)


def in_use(holder: str, path: Path, locked: PathLike, state: str) -> CacheError:
    """Return the error E503 that names a holder."""
    return CacheError(locked, f"{state} by {holder}", remedy=f"Wait for it, or stop that process ({path})", code="E503")


def _holder(handle: int) -> str:
    return _text(handle) or "a process that has just started"


def _text(handle: int) -> str:
    with suppress(OSError):  # a folder
        return printable(os.pread(handle, 4096, 0).decode(errors="replace").strip())
    return ""


_held: set[int] = set()
"""The descriptors of the lock files that this process has open."""


def _release_in_child() -> None:
    # A forked child shares the lock; without this it would still hold it after its parent's death.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_release_in_child)


def user_name() -> str:
    """Return the name of this process's user, printable and short enough for a lease; or the user's number."""
    try:
        return printable(getpass.getuser())[:100]
    except (KeyError, OSError):  # a uid without an account, as in many containers
        return str(os.getuid())
