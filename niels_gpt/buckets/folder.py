"""A bounded folder of pieces of files, which all processes of a machine share. Pieces least recently used go first.

    LOCAL/used                       bytes in LOCAL, by the last change of them; its flock is held for a change
    LOCAL/NAME-0123456789ab/         one cache, as its meta.json was: 12 digits of the sha256 of meta.json
        meta.json, index/...         small files, whole, under their own names
        .pieces/FILE-PIECE           1 MiB of a large file: numbers of the file and of the piece, in hexadecimal digits
        .pieces/FILE-PIECE.half      a piece on its way; who fetches it holds a flock on it. A process that has waited
                                     ten seconds for another one fetches it too, into a half with its own number

A file appears whole, by a rename, and goes by unlink, so a process that has it open keeps it. A killed process leaves a
half without a lock, which the next one overwrites. Only folders with `.pieces` in them count, and lose files.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shlex
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from niels_gpt.storage.errors import CacheError, NoRoomError
from niels_gpt.storage.fileio import META_NAME, NO_LINK, NotRegularError, open_for_reading, walked

logger = logging.getLogger(__name__)

PIECES = ".pieces"
HALF = ".half"
MOUNT_NAME = re.compile(r"[\w.-]{1,100}-[0-9a-f]{12}")
PATIENCE_S = 10.0
"""Seconds to wait for another process that has a lock and does nothing."""
_POLL_S, _POLL_USED_S = 0.01, 0.001
_USED = "used"
_SLACK = 16  # an eviction makes a sixteenth of the folder free, because it lists the whole folder
_RENEWED_NS = 10_000_000_000  # a piece that is read this soon again keeps its time
_SETTLED_NS = 100_000_000  # more than the step of the times of files
_OWN = "Name a folder that only these runs write to: local=DIR"
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EACCES)
_LAST = (META_NAME, "index/crc32.bin")  # to go, because all others are compared with them


class BusyFolderError(NoRoomError):
    """Files on their way take the room, but there will be some."""


class BoundedFolder:
    """The folder LOCAL, which holds at most `max_bytes`. Each process has its own object; nothing stays open."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Create the folder if it is absent. path: absolute.

        Raises: CacheError E504 if it is no folder; E502 if it belongs to another user, or everybody may write there.
        """
        self.path, self.max_bytes = path, max_bytes
        self._is_stuck = False  # a stopped process had the lock last time, so nobody waits for it again
        self.make("")

    def make(self, name: str) -> Path:
        """Return a folder of one cache in it, created if absent; "" is the folder itself. Raises: as the class."""
        path = self.path / name
        for each in (self.path, path, path / PIECES) if name else (path,):
            with suppress(FileExistsError, NotADirectoryError):
                if each == self.path:
                    each.parent.mkdir(parents=True, exist_ok=True)
                each.mkdir(0o700)
            about = os.lstat(each) if os.path.lexists(each) else None
            if about is None or not stat.S_ISDIR(about.st_mode):
                raise CacheError(each, "not a folder", "a folder for pieces of caches", code="E504")
            # Its group may write: a usual umask is 002. What others put there is of another user, and refused.
            if about.st_uid != os.geteuid() or about.st_mode & stat.S_IWOTH:
                whose = "everybody may write there" if about.st_uid == os.geteuid() else f"of user {about.st_uid}"
                remedy = f"Name a folder of your own: local={os.fspath(self.path / 'MINE')!r}"
                raise CacheError(each, whose, f"a folder of user {os.geteuid()} alone", remedy, code="E502")
        return path

    def _allocate(self, handle: int, size: int) -> None:
        """Make room for a new file, and take it on the disk. handle: of the empty file.

        Raises: NoRoomError E501; a BusyFolderError if there will be room.
        """
        with self._locked() as used_file:
            text = os.pread(used_file, 32, 0)
            used, arriving = (int(text), 0) if text.isdigit() else self._recounted(None)
            if used + size > self.max_bytes >= size:
                used, arriving = self._recounted(self.max_bytes - self.max_bytes // _SLACK - size)
            if used + size > self.max_bytes:
                found = f"max_bytes={self.max_bytes:,} of {self.path}: {used:,} are on their way"
                kind = BusyFolderError if used - arriving + size <= self.max_bytes else NoRoomError
                raise kind(f"{found}, and {size:,} more do not fit. Raise max_bytes")
            if size:
                os.posix_fallocate(handle, 0, size)  # before the lock is released: who counts again finds all of it
            os.ftruncate(used_file, 0)
            os.pwrite(used_file, b"%d" % (used + size), 0)

    def trim(self) -> None:
        """Remove what is beyond `max_bytes`, which may have been more until now."""
        with suppress(BusyFolderError, FileNotFoundError, NotRegularError):
            with open(open_for_reading(self.path / _USED), "rb") as file:
                text = file.read(32)
            if text.isdigit() and int(text) > self.max_bytes:
                self._allocate(-1, 0)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Yield the open file `used`, locked. Raises: BusyFolderError if a stopped process has the lock."""
        path, end = self.path / _USED, time.monotonic() + (0 if self._is_stuck else PATIENCE_S)
        handle = self._opened(path)
        if handle is None:
            remedy = f"Remove it: {shlex.join(['rm', '-r', str(path)])}"
            raise CacheError(path, "no file that this program made", "a number of bytes", remedy, code="E504")
        try:
            while not _locks(handle):
                if time.monotonic() > end:
                    self._is_stuck = True
                    raise BusyFolderError(f"{path}: another process has locked it for {PATIENCE_S:.0f} s")
                time.sleep(_POLL_USED_S)
            self._is_stuck = False
            yield handle
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
            os.close(handle)

    def _opened(self, path: Path) -> int | None:
        """Open a file to write, created if absent; None if no regular file of this user alone is there.

        Makes folders that somebody has removed.
        """
        for _ in range(3):
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o600)
            except FileNotFoundError:
                self.make("".join(path.relative_to(self.path).parent.parts[:1]))
                path.parent.mkdir(0o700, parents=True, exist_ok=True)
                continue
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a socket
                    return None
                raise
            about = os.fstat(handle)
            if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and about.st_nlink <= 1:
                return handle
            os.close(handle)
            return None
        raise CacheError(self.path, "removed again and again while it was used", remedy=_OWN, code="E210")

    def _recounted(self, most: int | None) -> tuple[int, int]:
        """Return the bytes in the folder, after the oldest files went until at most `most` are left; None: none goes.

        Also returns how many of them are on their way. Only files of mounts go, and no half that somebody writes.
        """
        found, total, arriving = list[tuple[bool, int, int, Path]](), 0, 0
        for mount in self._mounts():
            with suppress(OSError):  # somebody removed or moved it
                for _, names, about in walked(mount):
                    name = "/".join(names)
                    if stat.S_ISREG(about.st_mode):
                        total += about.st_size
                        found.append((name in _LAST, about.st_atime_ns, about.st_size, mount / name))
        for _, _, size, path in sorted(found):
            if most is None or total <= most:
                break
            if _gone(path):
                total -= size
            elif path.name.endswith(HALF):
                arriving += size
        return total, arriving

    def _mounts(self) -> list[Path]:
        with os.scandir(self.path) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if MOUNT_NAME.fullmatch(entry.name)
                and entry.is_dir(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                and os.path.isdir(os.path.join(entry.path, PIECES))
            ]

    @contextmanager
    def arriving(self, path: Path, size: int, *, wait_s: float = 0.0) -> Iterator[int | None]:
        """Yield a descriptor to write a file of `size` bytes into, which then appears at `path`, unless this raises.

        Yields None if the file is there already, or if another process or thread writes it; wait_s: seconds to wait for
        a process that writes nothing meanwhile, after which this one writes it too.
        Raises: NoRoomError E501, a BusyFolderError if there will be room; CacheError E504 for a folder in its place;
            OSError.
        """
        found = self._half(path, size, wait_s)
        if found is None:
            yield None
            return
        handle, half = found
        try:
            with _room(path, size):
                self._allocate(handle, size)
                yield handle
            if _is_at(handle, half):  # else somebody removed it, and the file is not kept
                self._appear(half, path)
        except BaseException:
            if _is_at(handle, half):
                os.unlink(half)
            raise
        finally:
            os.close(handle)

    def _appear(self, half: Path, path: Path) -> None:
        """Give a file its name, or remove it if a stopped process has the lock."""
        try:
            with self._locked(), suppress(FileNotFoundError):  # who counts now would find neither name
                os.rename(half, path)
        except BusyFolderError:
            os.unlink(half)

    def _half(self, path: Path, size: int, wait_s: float) -> tuple[int, Path] | None:
        """Return the locked and empty half of a file, and where it is; None as `arriving`."""
        half, end = path.with_name(path.name + HALF), time.monotonic() + wait_s
        while not _is_whole(path, size):
            handle = self._opened(half)
            if handle is None:
                remove(half)
                continue
            changed, has_lock = os.fstat(handle).st_mtime, _locks(handle)
            if has_lock and _is_at(handle, half) and not os.path.lexists(path):
                os.ftruncate(handle, 0)  # of a killed process
                return handle, half
            os.close(handle)
            if has_lock:
                continue  # who held the lock renamed or removed the half
            if not wait_s:
                return None
            if time.time() - changed > wait_s or time.monotonic() > end:
                logger.info("%s: another process has not brought it in %.0f s", path, wait_s)
                half = path.with_name(f"{path.name}.{os.getpid():x}{HALF}")
            time.sleep(_POLL_S)
        return None


def read_at(path: Path, size: int, begin: int, count: int) -> bytes | None:
    """Return bytes of a file; None as `opened`."""
    found = opened(path, size)
    if found is None:
        return None
    try:
        return os.pread(found[0], count, begin)
    finally:
        os.close(found[0])


def opened(path: str | Path, size: int) -> tuple[int, tuple[int, int] | None] | None:
    """Open a file of `size` bytes and mark it as used; None if it is absent, or no regular file of that size.

    Returns the descriptor, which the caller closes, and what changes with its content; that is None for a moment after
    a write, because a second write may have the same time.
    """
    try:
        handle = os.open(path, os.O_RDONLY | NO_LINK)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise  # as of too many open files: who asks would ask again and again
    about, now = os.fstat(handle), time.time_ns()
    if not stat.S_ISREG(about.st_mode) or about.st_size != size:
        os.close(handle)
        return None
    if now - about.st_atime_ns > _RENEWED_NS:
        with suppress(OSError):  # of a file system that is read-only now
            os.utime(handle, ns=(now, about.st_mtime_ns))  # a mount without access times keeps one that is set
    return handle, (about.st_ino, about.st_mtime_ns) if abs(now - about.st_mtime_ns) > _SETTLED_NS else None


def _gone(path: Path) -> bool:
    """Remove a file, unless it is a half that somebody writes. Returns whether it is gone."""
    handle = None
    try:
        if path.name.endswith(HALF):
            handle = os.open(path, os.O_RDONLY | NO_LINK)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def _locks(handle: int) -> bool:
    """Lock a file, unless another one has the lock."""
    with suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_whole(path: Path, size: int) -> bool:
    """Return whether a file of this size is there. What else is there is removed; a link is not followed."""
    try:
        about = os.lstat(path)
    except OSError:
        return False
    if stat.S_ISREG(about.st_mode) and about.st_size == size and os.access(path, os.R_OK):
        return True
    logger.warning("%s: damaged in this folder, so it is fetched again", path, extra={"code": "W611"})
    remove(path)
    return False


def remove(path: Path) -> None:
    """Remove a file of this folder, if it is there. Raises: CacheError E504 for a folder in its place; OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        remedy = f"Remove it: {shlex.join(['rm', '-r', str(path)])}"
        raise CacheError(path, "a folder", "a file that is fetched", remedy, code="E504") from None


def _is_at(handle: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    return False


@contextmanager
def _room(path: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        found = f"{path.parent}: {size:,} bytes more do not fit ({os.strerror(error.errno)})"
        raise NoRoomError(error.errno, f"{found}. Make room, or name another folder: local=DIR") from error
