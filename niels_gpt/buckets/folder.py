"""A bounded folder of pieces of files, which all processes of a machine share. Pieces least recently used go first.

    LOCAL/used                       bytes in LOCAL, by whoever changed them last; its flock is held for that
    LOCAL/NAME-0123456789ab/         one cache, as its meta.json was: 12 digits of the sha256 of meta.json
        meta.json, index/...         small files, whole, under their own names
        .pieces/FILE-PIECE           1 MiB of a large file: numbers of the file and of the piece, in hexadecimal digits
        .pieces/FILE-PIECE.half      a piece on its way; who fetches it holds a flock on it

A file appears whole, by a rename, and goes by unlink, so a process that has it open keeps it. A killed process leaves a
half without a lock, which the next one overwrites.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from niels_gpt.storage.errors import CacheError, NoRoomError
from niels_gpt.storage.fileio import META_NAME, NO_LINK, walked

PIECES = ".pieces"
HALF = ".half"
MOUNT_NAME = re.compile(r"[\w.-]{1,100}-[0-9a-f]{12}")
_USED = "used"
_SLACK = 16  # an eviction makes a sixteenth of the folder free, because it lists the whole folder
_RENEWED_NS = 10_000_000_000  # a piece that is read this soon again keeps its time
_SETTLED_NS = 100_000_000  # more than the step of the times of files
_KEPT = (META_NAME, "index/crc32.bin")  # small, and needed to compare all others


class BoundedFolder:
    """The folder LOCAL, which holds at most `max_bytes`. Each process has its own object; nothing stays open."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Create the folder if it is absent. path: absolute.

        Raises: CacheError E504 if it is no folder; E502 if it belongs to another user, or everybody may write there.
        """
        self.path, self.max_bytes = path, max_bytes
        self.make("")

    def make(self, name: str) -> Path:
        """Return a folder of one cache in it, created if absent; "" is the folder itself. Raises: as the class."""
        path = self.path / name if name else self.path
        for each in (path, path / PIECES) if name else (path,):
            if not name:
                each.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                each.mkdir(0o700)
            about = os.lstat(each)
            if not stat.S_ISDIR(about.st_mode):
                raise CacheError(each, "not a folder", "a folder for pieces of caches", code="E504")
            if about.st_uid != os.geteuid() or about.st_mode & stat.S_IWOTH:
                whose = "everybody may write there" if about.st_uid == os.geteuid() else f"of user {about.st_uid}"
                remedy = f"Name a folder of your own: local={os.fspath(self.path / 'MINE')!r}"
                raise CacheError(each, whose, f"a folder of user {os.geteuid()} alone", remedy, code="E502")
        return path

    def reserve(self, num_bytes: int) -> None:
        """Make room for so many bytes. Raises: NoRoomError E501 if they do not fit beside what is on its way."""
        with self._locked() as handle:
            text = os.pread(handle, 32, 0)
            used = int(text) if text.isdigit() else self._recounted(None)
            if used + num_bytes > self.max_bytes:
                used = self._recounted(self.max_bytes - self.max_bytes // _SLACK - num_bytes)
            if used + num_bytes > self.max_bytes:
                found = f"max_bytes={self.max_bytes:,} of {self.path}: {used:,} are on their way or must stay"
                raise NoRoomError(f"{found}, and {num_bytes:,} more do not fit. Raise max_bytes")
            os.ftruncate(handle, 0)
            os.pwrite(handle, b"%d" % (used + num_bytes), 0)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        handle = os.open(self.path / _USED, os.O_RDWR | os.O_CREAT | NO_LINK, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)

    def _recounted(self, most: int | None) -> int:
        """Return the bytes in the folder, after the oldest files went until at most `most` are left; None: none goes.

        Only files of mounts go: no half that somebody writes, and not what is needed to compare all others.
        """
        found, total = list[tuple[int, int, Path]](), 0
        for mount in self._mounts():
            for _, names, about in walked(mount):
                name = "/".join(names)
                if stat.S_ISREG(about.st_mode):
                    total += about.st_size
                    if name not in _KEPT:
                        found.append((about.st_atime_ns, about.st_size, mount / name))
        for _, size, path in sorted(found):
            if most is None or total <= most:
                break
            if _gone(path):
                total -= size
        return total

    def _mounts(self) -> list[Path]:
        with os.scandir(self.path) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if MOUNT_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]

    @contextmanager
    def arriving(self, path: Path, size: int, *, wait: bool = True) -> Iterator[int | None]:
        """Yield a descriptor to write a file of `size` bytes into, which then appears at `path`, unless this raises.

        Yields None if the file is there already, or, without `wait`, if another process or thread writes it.
        Raises: NoRoomError E501; OSError.
        """
        handle = self._half(path, wait=wait)
        if handle is None:
            yield None
            return
        half = _half_of(path)
        try:
            self.reserve(size)
            with _room(path, size):
                os.posix_fallocate(handle, 0, size) if size else None
                os.ftruncate(handle, size)  # of a half that a killed process left
                yield handle
            os.rename(half, path)
        except BaseException:
            os.unlink(half)
            raise
        finally:
            os.close(handle)

    def _half(self, path: Path, *, wait: bool) -> int | None:
        """Return the locked half of a file; None as `arriving`."""
        half = _half_of(path)
        while True:
            if os.path.lexists(path):
                return None
            handle = os.open(half, os.O_RDWR | os.O_CREAT | NO_LINK, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                if _is_at(handle, half) and not os.path.lexists(path):
                    return handle
            except BlockingIOError:
                os.close(handle)
                return None
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)  # who held the lock renamed or removed the half


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
    except OSError:
        return None
    about, now = os.fstat(handle), time.time_ns()
    if not stat.S_ISREG(about.st_mode) or about.st_size != size:
        os.close(handle)
        return None
    if now - about.st_atime_ns > _RENEWED_NS:
        os.utime(handle, ns=(now, about.st_mtime_ns))  # a mount without access times keeps one that is set
    return handle, (about.st_ino, about.st_mtime_ns) if abs(now - about.st_mtime_ns) > _SETTLED_NS else None


def is_other(path: str, size: int) -> bool:
    """Return whether there is something else than a regular file of `size` bytes."""
    with suppress(FileNotFoundError):
        about = os.lstat(path)
        return not stat.S_ISREG(about.st_mode) or about.st_size != size
    return False


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


def _half_of(path: Path) -> Path:
    return path.with_name(path.name + HALF)


def _is_at(handle: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    return False


@contextmanager
def _room(path: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        found = f"{path.parent}: the disk is full, and {size:,} bytes more do not fit"
        raise NoRoomError(error.errno, f"{found}. Make room, or name another folder: local=DIR") from error
