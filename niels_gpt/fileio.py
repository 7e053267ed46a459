"""Files that are either complete or absent, canonical JSON, checksums, and the error of a bad cache.

Whatever a build or a commit does to the disk goes through this module, so that a test can record it (`recorded`), cut
the record anywhere, and see what a power failure there would have left.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from niels_gpt.remedies import with_command

META_NAME = "meta.json"
PathLike = str | os.PathLike[str]


class CacheError(ValueError):
    """A cache is damaged, foreign, or does not match what it is used with. The message names the file.

    Where it advises to build everything, that becomes the command for the cache whose path the message begins with.
    """

    def __init__(self, message: str) -> None:
        super().__init__(with_command(message))


def canonical_json(value: Any) -> bytes:
    """Return `value` as utf-8 JSON with sorted keys, an indent of 2 and a final newline: equal values, equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sha256_file(path: PathLike) -> str:
    """Return the hex sha256 of a file, read in large blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Operation = tuple[Any, ...]
"""What was done to the disk: a verb, a path, and the rest.

("create", path), ("write", path, offset, bytes), ("cut", path, size), ("fsync", path), ("rename", path, new path),
("mkdir", path), ("symlink", path, target), ("unlink", path), ("rmdir", path), ("fsync_dir", path)
"""

_trace: list[Operation] | None = None
_CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no link is followed, and a pipe in the way is an error


@contextmanager
def recorded(trace: list[Operation]) -> Iterator[None]:
    """Append every operation on the disk that goes through this module to `trace`, in order, the bytes included."""
    global _trace
    before, _trace = _trace, trace
    try:
        yield
    finally:
        _trace = before


def _note(verb: str, path: PathLike, *rest: Any) -> None:
    if _trace is not None:
        _trace.append((verb, os.fspath(path), *rest))


class OutputFile:
    """A file that is only ever appended to. Nothing is buffered here: what was written survives the process."""

    def __init__(self, path: PathLike, *, keep: int = 0) -> None:
        """keep: bytes of the file that stay, where it exists; what follows them is cut off."""
        self.path, self.num_bytes = Path(path), keep
        new = not self.path.exists()
        with _named(self.path):
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _CAREFULLY, 0o666)
        if new:
            _note("create", path)
        elif os.fstat(self._handle).st_size != keep:
            os.ftruncate(self._handle, keep)
            _note("cut", path, keep)
        self._unsynced = True

    def write(self, content: Any) -> None:
        """Append bytes, or anything with their buffer. Raises OSError that names the file, as where a disk is full."""
        view = memoryview(content).cast("B") if len(content) else memoryview(b"")
        while len(view):
            with _named(self.path):
                written = os.write(self._handle, view)
            if _trace is not None:
                _note("write", self.path, self.num_bytes, bytes(view[:written]))
            self.num_bytes += written
            self._unsynced = True
            view = view[written:]

    def sync(self) -> None:
        """Make what was written durable; without new bytes nothing is done."""
        if self._unsynced:
            with _named(self.path):
                os.fsync(self._handle)
            _note("fsync", self.path)
            self._unsynced = False

    def close(self) -> None:
        """Close the file, which may be done twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class SizedFile:
    """A new file of a known size, of which any part may be written at any time; what never is stays zero.

    Where the file system has holes, as ext4, xfs, btrfs and tmpfs do, what is not written takes no disk.
    """

    def __init__(self, path: PathLike, size: int) -> None:
        """size: bytes. Raises: FileExistsError."""
        self.path = Path(path)
        with _named(self.path):
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFULLY, 0o666)
            _note("create", path)
            os.ftruncate(self._handle, size)
        _note("cut", path, size)

    def write(self, offset: int, content: Any) -> None:
        """Write bytes, or anything with their buffer, at an offset. Raises OSError that names the file."""
        view = memoryview(content).cast("B") if len(content) else memoryview(b"")
        while len(view):
            with _named(self.path):
                written = os.pwrite(self._handle, view, offset)
            if _trace is not None:
                _note("write", self.path, offset, bytes(view[:written]))
            offset += written
            view = view[written:]

    def sync(self) -> None:
        """Make what was written durable."""
        with _named(self.path):
            os.fsync(self._handle)
        _note("fsync", self.path)

    def close(self) -> None:
        """Close the file, which may be done twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


@contextmanager
def _named(path: PathLike) -> Iterator[None]:
    """Give an OSError of a call that knows no more than a file descriptor the file's name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def fsync_file(path: PathLike) -> None:
    """Make durable what a file holds, whoever wrote it."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    _note("fsync", path)


def fsync_dir(path: PathLike) -> None:
    """Make the names in a folder durable, as fsync does for a file's bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    _note("fsync_dir", path)


def sync_tree(root: PathLike) -> None:
    """Make a folder durable, with all that is in it."""
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            fsync_file(os.path.join(folder, name))
        fsync_dir(folder)


def rename(path: PathLike, new: PathLike) -> None:
    """Rename, replacing what is at `new`, and make both names durable. What is renamed was synced before."""
    os.replace(path, new)
    _note("rename", path, os.fspath(new))
    target, source = (os.path.dirname(os.path.abspath(name)) for name in (new, path))
    fsync_dir(target)  # first: the file must be in one of the two at any moment
    if source != target:
        fsync_dir(source)


def make_dir(path: PathLike) -> None:
    """Make a folder, and those above it, where there is none; its name is durable."""
    if not os.path.isdir(path):
        make_dir(os.path.dirname(os.path.abspath(path)))
        with suppress(FileExistsError):  # somebody else was faster
            os.mkdir(path)
            _note("mkdir", path)
        fsync_dir(os.path.dirname(os.path.abspath(path)))


def symlink(target: PathLike, path: PathLike) -> None:
    """Make a symlink; `rename` is what makes it durable."""
    with _named(path):
        os.symlink(target, path)
    _note("symlink", path, os.fspath(target))


def walked(path: PathLike) -> Iterator[tuple[int, list[str], os.stat_result]]:
    """Yield everything below a folder, what is in a folder before the folder itself, each folder in order of names.

    As the descriptor of the folder that it lies in, its names from below `path` on (a list that changes later), and its
    lstat. No link is followed, also not one that takes a folder's place meanwhile; no other file system is entered; the
    depth is not limited, and one or two descriptors are open at a time.
    Raises: OSError; where a folder is moved while it is walked through, too.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _CAREFULLY)
    start, names = os.fstat(handle), list[str]()
    above: list[tuple[os.stat_result, list[str]]] = []
    left = sorted(os.listdir(handle), reverse=True)
    try:
        while left or names:
            if not left:
                about, (before, left) = os.fstat(handle), above.pop()
                handle = _replaced(handle, "..")
                if not os.path.samestat(os.fstat(handle), before):
                    raise OSError(errno.ESTALE, "moved while it was looked through", os.path.join(path, *names))
                yield handle, names, about
                names.pop()
                continue
            try:
                about = os.stat(name := left.pop(), dir_fd=handle, follow_symlinks=False)
            except FileNotFoundError:  # somebody else was faster
                continue
            names.append(name)
            if not stat.S_ISDIR(about.st_mode):
                yield handle, names, about
                names.pop()
                continue
            if about.st_dev != start.st_dev:
                raise OSError(errno.EXDEV, "another file system is mounted there", os.path.join(path, *names))
            above.append((os.fstat(handle), left))
            handle = _replaced(handle, name)
            left = sorted(os.listdir(handle), reverse=True)
    finally:
        os.close(handle)


def _replaced(handle: int, name: str) -> int:
    """Open a folder beside or above the one that is open, in its place."""
    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _CAREFULLY, dir_fd=handle)
    os.close(handle)
    return below


def remove(path: PathLike) -> None:
    """Remove a file, a link, or a folder with all that is in it; nothing where there is nothing. Raises as `walked`."""
    if os.path.isdir(path) and not os.path.islink(path):
        for handle, names, about in walked(path):
            is_folder = stat.S_ISDIR(about.st_mode)
            try:
                os.rmdir(names[-1], dir_fd=handle) if is_folder else os.unlink(names[-1], dir_fd=handle)
            except FileNotFoundError:  # somebody else was faster
                continue
            except OSError as error:
                raise OSError(error.errno, error.strerror, os.path.join(path, *names)) from error
            if _trace is not None:
                _note("rmdir" if is_folder else "unlink", os.path.join(path, *names))
        os.rmdir(path)
        _note("rmdir", path)
        return
    with suppress(FileNotFoundError):
        os.unlink(path)
        _note("unlink", path)


def check_png(target: Path) -> None:
    """Raise what would keep a picture from being written: ValueError for a name that is not of a .png,
    FileNotFoundError if there is no folder for it."""
    if target.suffix.lower() != ".png":
        raise ValueError(f"{target}: expected the name of a .png, the only kind of picture that is drawn")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target}: no folder {target.parent} to draw it in. Make it first")


def write_bytes(path: PathLike, content: bytes) -> None:
    """Write a file atomically: a unique sibling, fsync, rename. No trace is left on failure; the umask is honoured."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    file = OutputFile(temporary)
    try:
        file.write(content)
        file.sync()
        file.close()
        rename(temporary, target)
    except BaseException:
        file.close()
        remove(temporary)
        raise
