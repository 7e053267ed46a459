"""Every write to disk (atomic, synced) and every open for reading; canonical JSON and checksums.

Builds and commits write through this module only, except for locks and the count of attempts. So a test can record all
writes (`recorded`), cut the record at any place, and see the disk after a loss of power at that moment.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

META_NAME = "meta.json"
PathLike = str | os.PathLike[str]
CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)
"""Errors of os.link for files that cannot be linked, but can be copied."""
NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # follow no link, do not block on a FIFO


def canonical_json(value: Any) -> bytes:
    """Return `value` as utf-8 JSON with sorted keys, indent 2 and a final newline. Equal values give equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


class NotRegularError(ValueError):
    """A link, folder, pipe, device or socket is where a regular file should be."""

    code = "E205"

    def __init__(self, path: PathLike, is_link: bool = False) -> None:
        super().__init__(os.fspath(path), is_link)  # the arguments of a pickled copy
        self.path, self.is_link = os.fspath(path), is_link

    def __str__(self) -> str:
        kind = "a symbolic link" if self.is_link else "a pipe, a device, a socket or a folder"
        return f"{self.path}: {kind}, expected a regular file"


def open_for_reading(path: PathLike, *, follow_links: bool = False) -> int:
    """Open a regular file read-only and return its descriptor, which the caller closes. A FIFO does not block (D29).

    follow_links: for a user's files, whose links were accepted when they were listed; never inside a cache.
    Raises: FileNotFoundError, also if a parent is not a folder; NotRegularError E205; OSError.
    """
    try:
        if follow_links and not stat.S_ISREG(os.stat(path).st_mode):  # opening a device can have effects
            raise NotRegularError(path)
        handle = os.open(path, os.O_RDONLY | (NO_LINK & ~os.O_NOFOLLOW if follow_links else NO_LINK))
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            raise FileNotFoundError(f"{os.fspath(path)}: no such file: its parent is not a folder") from error
        if error.errno == errno.ENXIO or (error.errno == errno.ELOOP and not follow_links):  # a socket, a link
            raise NotRegularError(path, is_link=error.errno == errno.ELOOP) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotRegularError(path)
    return handle


def id_lines(ids: Iterable[str]) -> bytes:
    """Return the lines of a file of source ids, as ASCII: other characters are escaped."""
    names = list(ids)
    plain = "".join(names)
    if plain.isascii() and plain.isprintable() and "\\" not in plain:  # nothing to escape
        return "\n".join([*names, ""]).encode()
    return b"".join(name.encode("unicode_escape") + b"\n" for name in names)


def id_of_line(line: bytes, errors: str = "strict") -> str:
    """Return the source id in a line without its line end. errors: see `bytes.decode`. Raises: ValueError."""
    return line.decode("unicode_escape", errors)


def sha256_file(path: PathLike) -> str:
    """Return the hex sha256 of a file, read in large blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Operation = tuple[Any, ...]
"""One operation on the disk: a verb, a path, and its arguments.

("create", path), ("write", path, offset, bytes), ("cut", path, size), ("fsync", path), ("rename", path, new path),
("mkdir", path), ("symlink", path, target), ("unlink", path), ("rmdir", path), ("fsync_dir", path)
"""

_MANY_FILES, _SYNCED_AT_ONCE = 256, 16
_trace: list[Operation] | None = None


@contextmanager
def recorded(trace: list[Operation]) -> Iterator[None]:
    """Append every disk operation of this module to `trace`, in order, with the bytes written."""
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
    """A file for appending only. Nothing is buffered in the process, so written bytes survive a kill."""

    def __init__(self, path: PathLike, *, keep: int = 0) -> None:
        """keep: number of bytes of an existing file to keep; later bytes are truncated."""
        self.path, self.num_bytes = Path(path), keep
        new = not self.path.exists()
        with named(self.path):
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_LINK, 0o666)
        if new:
            _note("create", path)
        elif os.fstat(self._handle).st_size != keep:
            os.ftruncate(self._handle, keep)
            _note("cut", path, keep)
        self._unsynced = True

    def write(self, content: Any) -> None:
        """Append bytes or any buffer. Raises: OSError with the file's name, for example on a full disk."""
        view = memoryview(content).cast("B") if len(content) else memoryview(b"")
        while len(view):
            with named(self.path):
                written = os.write(self._handle, view)
            if _trace is not None:
                _note("write", self.path, self.num_bytes, bytes(view[:written]))
            self.num_bytes += written
            self._unsynced = True
            view = view[written:]

    def sync(self) -> None:
        """Make the written bytes durable. Does nothing without new bytes."""
        if self._unsynced:
            with named(self.path):
                os.fsync(self._handle)
            _note("fsync", self.path)
            self._unsynced = False

    def close(self) -> None:
        """Close the file; may be called twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class SizedFile:
    """A new file of a known size, written in any order. Unwritten parts are zero.

    On file systems with holes, such as ext4, xfs, btrfs and tmpfs, they take no disk space.
    """

    _handle = -1

    def __init__(self, path: PathLike, size: int) -> None:
        """size: bytes. Raises: FileExistsError."""
        self.path = Path(path)
        with named(self.path):
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o666)
            _note("create", path)
            os.ftruncate(self._handle, size)
        _note("cut", path, size)

    def write(self, offset: int, content: Any) -> None:
        """Write bytes or any buffer at an offset. Raises: OSError with the file's name."""
        view = memoryview(content).cast("B") if len(content) else memoryview(b"")
        while len(view):
            with named(self.path):
                written = os.pwrite(self._handle, view, offset)
            if _trace is not None:
                _note("write", self.path, offset, bytes(view[:written]))
            offset += written
            view = view[written:]

    def sync(self) -> None:
        """Make the written bytes durable."""
        with named(self.path):
            os.fsync(self._handle)
        _note("fsync", self.path)

    def close(self) -> None:
        """Close the file; may be called twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        self.close()  # as Python's own files, for one that an error left open


@contextmanager
def named(path: PathLike) -> Iterator[None]:
    """Add a file's name to an OSError from the block, for calls that know only its descriptor."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def fsync_file(path: PathLike) -> None:
    """Make the content of a file durable."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    _note("fsync", path)


def fsync_dir(path: PathLike) -> None:
    """Make the names in a folder durable. fsync of a file makes only its bytes durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    _note("fsync_dir", path)


def sync_tree(root: PathLike) -> None:
    """Make a folder and all its contents durable."""
    # Many files are synced several at once: a file system then writes its journal once for all that wait.
    from concurrent.futures import ThreadPoolExecutor

    for folder, _, names in os.walk(root):
        paths = [os.path.join(folder, name) for name in sorted(names)]
        if len(paths) < _MANY_FILES:
            for path in paths:
                fsync_file(path)
        else:
            with ThreadPoolExecutor(_SYNCED_AT_ONCE) as executor:
                for first in range(0, len(paths), _MANY_FILES):
                    list(executor.map(fsync_file, paths[first : first + _MANY_FILES]))
        fsync_dir(folder)


def rename(path: PathLike, new: PathLike) -> None:
    """Rename `path` to `new`, replacing it, and make both names durable. The caller has synced the content."""
    os.replace(path, new)
    _note("rename", path, os.fspath(new))
    target, source = (os.path.dirname(os.path.abspath(name)) for name in (new, path))
    fsync_dir(target)  # first: the file must be in one of the two folders at any moment
    if source != target:
        fsync_dir(source)


def make_dir(path: PathLike) -> None:
    """Create a folder and its missing parents, with durable names."""
    if not os.path.isdir(path):
        make_dir(os.path.dirname(os.path.abspath(path)))
        with suppress(FileExistsError):  # another process was faster
            os.mkdir(path)
            _note("mkdir", path)
        fsync_dir(os.path.dirname(os.path.abspath(path)))


def link_or_copy(source: PathLike, path: PathLike) -> bool:
    """Link a regular file whose bytes are durable, or copy it if it cannot be linked; return whether it was linked.

    The caller syncs a copy. Raises: OSError.
    """
    with named(path):
        try:
            os.link(source, path, follow_symlinks=False)
            is_linked = True
        except OSError as error:
            if error.errno not in CANNOT_LINK:
                raise
            shutil.copyfile(source, path, follow_symlinks=False)
            is_linked = False
    if _trace is not None:
        _note("create", path)
        _note("write", path, 0, Path(path).read_bytes())
        if is_linked:
            _note("fsync", path)
    return is_linked


def symlink(target: PathLike, path: PathLike) -> None:
    """Create a symlink. `rename` makes it durable."""
    with named(path):
        os.symlink(target, path)
    _note("symlink", path, os.fspath(target))


def walked(path: PathLike) -> Iterator[tuple[int, list[str], os.stat_result]]:
    """Yield everything below a folder, the contents of a folder before it, sorted by name.

    Each is a descriptor of its parent folder, the names that lead to it from `path` (a list that changes later), and
    its lstat. Links are not followed, even if one replaces a folder during the walk; other file systems not entered.
    The depth is unlimited; at most two descriptors are open.
    Raises: OSError, also if a folder is moved during the walk.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | NO_LINK)
    start, names = os.fstat(handle), list[str]()
    above: list[tuple[os.stat_result, list[str]]] = []
    left = sorted(os.listdir(handle), reverse=True)
    try:
        while left or names:
            if not left:
                about, (before, left) = os.fstat(handle), above.pop()
                handle = _replaced(handle, "..")
                if not os.path.samestat(os.fstat(handle), before):
                    raise OSError(errno.ESTALE, "moved while it was listed", os.path.join(path, *names))
                yield handle, names, about
                names.pop()
                continue
            try:
                about = os.stat(name := left.pop(), dir_fd=handle, follow_symlinks=False)
            except FileNotFoundError:  # another process removed it
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
    """Open the folder `name` relative to an open one, and close that one."""
    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | NO_LINK, dir_fd=handle)
    os.close(handle)
    return below


def remove(path: PathLike) -> None:
    """Remove a file, a link, or a folder with its contents. An absent path is accepted. Raises: OSError."""
    if os.path.isdir(path) and not os.path.islink(path):
        for handle, names, about in walked(path):
            is_folder = stat.S_ISDIR(about.st_mode)
            try:
                os.rmdir(names[-1], dir_fd=handle) if is_folder else os.unlink(names[-1], dir_fd=handle)
            except FileNotFoundError:  # another process removed it
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


def renew(folder: Path) -> None:
    """Replace each file of a folder by a durable copy, which a process that has the old file open cannot change.

    Removes leftovers of a killed call. Folders and links stay.
    """
    for path in sorted(folder.iterdir()):
        if path.name.startswith(COPY):
            remove(path)
        elif stat.S_ISREG(path.lstat().st_mode):
            copy = OutputFile(path.with_name(COPY + path.name))
            try:
                with open(open_for_reading(path), "rb") as file:
                    while block := file.read(1 << 20):
                        copy.write(block)
                copy.sync()
            finally:
                copy.close()
            rename(copy.path, path)


COPY = "copy_"
"""Begins the name of a copy that replaces a file. No file of a builder begins like this, though its rule of names (and
so `gc`) allows it."""


def write_bytes(path: PathLike, content: bytes) -> None:
    """Write a file atomically and durably: a unique sibling, fsync, rename. On failure nothing is left."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
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
