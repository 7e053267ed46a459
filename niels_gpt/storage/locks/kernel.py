"""Locks of the kernel on files: flock, or a record lock (fcntl) where flock is not offered; both end with a process."""

from __future__ import annotations

import errno
import fcntl
import getpass
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import NO_LINK, PathLike, make_dir
from niels_gpt.storage.meta_json import printable

logger = logging.getLogger(__name__)


@contextmanager
def kernel_lock(path: Path, locked: PathLike, state: str = "is in use", *, wait: bool) -> Iterator[None]:
    """Hold a lock file, which is made if it is absent.

    locked, state: what the lock protects, and what its holder does, for the message "LOCKED: STATE by user ...".
    wait: wait for the lock, without a limit, if another process or thread holds it.
    Where flock is not offered, a process must not open and close the lock file elsewhere: to close any descriptor of it
    drops the record lock.
    Raises: CacheError that names user, host and pid of the holder, unless `wait`; CacheError if `path` is not a regular
        file, or has hard links: the holder's name would overwrite their text.
    """
    handle, holder = _attempt(path, locked, state)
    try:
        if holder:
            if not wait:
                raise in_use(holder, path, locked, state)
            logger.info("%s: %s by %s; waiting", os.fspath(locked), state, holder)
        while holder:
            if handle is None:
                time.sleep(_POLL_SECONDS)
                handle, holder = _attempt(path, locked, state)
            else:
                fcntl.flock(handle, fcntl.LOCK_EX)
                holder = ""
        assert handle is not None
        with suppress(OSError):  # a full disk: the lock holds without its text
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"user {user_name()}, host {socket.gethostname()}, pid {os.getpid()}\n".encode(), 0)
            os.fsync(handle)  # where flock does not reach, another machine has this text alone
        try:
            yield
        finally:
            if handle in _held:  # not in a forked child, where the number may be another file's by now
                os.ftruncate(handle, 0)  # no name of a user or host stays in the folder
    finally:
        if handle is not None:
            _release(handle)


def _attempt(path: Path, locked: PathLike, state: str) -> tuple[int | None, str]:
    """Try once to lock a file; returns a descriptor, and the holder if there is one.

    (7, ""): locked. (7, "user ..."): locked by another; flock can wait for it. (None, "user ..."): another holds a
    record lock, perhaps a thread of this process.
    """
    with _guard:
        here = _record_lock_here(path)
        if here is not None:
            return None, _holder(here)
        handle = _open(path, locked, state)
        _held.add(handle)
        try:
            refuse_other_files(os.fstat(handle), path)
            _lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle, ""
        except _RecordLockedError:
            holder = _holder(handle)
            _release(handle)
            return None, holder
        except BlockingIOError:
            return handle, _holder(handle)
        except OSError as error:
            _release(handle)
            why = f"{error.strerror}: this file system has no locks. Name another folder for the caches"
            raise OSError(error.errno, why, str(path)) from error
        except BaseException:
            _release(handle)
            raise


def _release(handle: int) -> None:
    with _guard:
        if handle in _held:  # not in a forked child
            _held.discard(handle)
            _record_locked.discard(handle)
            os.close(handle)


class _RecordLockedError(BlockingIOError):
    """Another process has a record lock."""


def _lock(handle: int, how: int) -> None:
    """Take a lock by flock, or where that is not offered a record lock, which has no say within one process.

    Raises: BlockingIOError if another has it, _RecordLockedError where it is a record lock; OSError without locks.
    """
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        try:
            fcntl.lockf(handle, how)
        except (BlockingIOError, PermissionError) as taken:  # some systems say EACCES
            raise _RecordLockedError(*taken.args) from None
        _record_locked.add(handle)


def _record_lock_here(path: Path) -> int | None:
    """Return the descriptor with which this process holds a record lock on a file; None without one. Under `_guard`.

    To open and close that file once more would drop the lock.
    """
    for handle in _record_locked:
        with suppress(OSError):  # no such file
            if os.path.samestat(os.fstat(handle), os.lstat(path)):
                return handle
    return None


def _open(path: Path, locked: PathLike, state: str) -> int:
    try:
        make_dir(path.parent)
        return os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
    except OSError as error:
        if isinstance(error, PermissionError):
            refuse_if_flocked(path, locked, state)
        raise not_written(error, path) from error


def not_written(error: OSError, path: Path) -> OSError:
    """Return the error of a file that could not be made, with the user's name and what to do."""
    advice = f"user {user_name()} cannot write there. Let it, or name another folder for the caches"
    return OSError(error.errno, f"{error.strerror}; {advice}", str(path))


def refuse_other_files(status: os.stat_result, path: Path) -> None:
    """Raise CacheError for a file that is not a lock file of this project."""
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return
    is_file = stat.S_ISREG(status.st_mode)
    kind = f"a file with {status.st_nlink} names (hard links)" if is_file else "not a regular file"
    raise CacheError(path, kind, "a lock file with one name", f"Remove it: rm -r {path}", code="E504")


def refuse_if_flocked(path: Path, locked: PathLike, state: str = "is in use") -> str:
    """Raise CacheError that names the holder of a lock file; nothing is written, and the file may be absent.

    Returns the file's text: it names a holder that was killed, or one that the lock does not show; "" without any.
    locked, state: as for `kernel_lock`. Works without write permission.
    """
    with _guard:
        if (here := _record_lock_here(path)) is not None:
            raise in_use(_holder(here), path, locked, state)
        try:
            handle = os.open(path, os.O_RDONLY | NO_LINK)
        except OSError:
            return ""
        try:
            _lock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(_holder(handle), path, locked, state) from None
        except OSError:  # no locks there
            return _text(handle)
        else:
            return _text(handle)
        finally:
            _record_locked.discard(handle)
            os.close(handle)


def in_use(holder: str, path: Path, locked: PathLike, state: str) -> CacheError:
    """Return the error that names a holder."""
    return CacheError(locked, f"{state} by {holder}", remedy=f"Wait for it, or stop that process ({path})", code="E503")


def _holder(handle: int) -> str:
    return _text(handle) or "a process that has just started"


def _text(handle: int) -> str:
    with suppress(OSError):  # a folder
        return printable(os.pread(handle, 4096, 0).decode(errors="replace").strip())
    return ""


# Held while a lock file is looked at, opened, locked or closed, never while one waits: a record lock has no say between
# two threads, and to close another descriptor of its file drops it.
_guard = threading.RLock()
_held: set[int] = set()
_record_locked: set[int] = set()
NOT_OFFERED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_POLL_SECONDS = 0.05


def _release_in_child() -> None:
    # A forked child shares the lock; without this it would still hold it after its parent's death.
    global _guard
    _guard = threading.RLock()  # another thread of the parent may have had it
    _record_locked.clear()  # those are the parent's alone
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_release_in_child)


def user_name() -> str:
    """Return the name of this process's user, printable and not longer than a lease has room for, or its number."""
    try:
        return printable(getpass.getuser())[:100]
    except (KeyError, OSError):  # a uid without an account, as in many containers
        return str(os.getuid())
