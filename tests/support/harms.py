"""What is done to the files and descriptions of caches, and the watch over what meets them then."""

import hashlib
import io
import os
import resource
import signal
import stat
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from support.disk import change_meta, checksums_of, crc_fits, describe, file_records, read_meta, write_meta

HANGS = 30
"""Seconds after which a call is ended: it waits for a pipe, or follows a circle."""
MOST_BYTES = 1 << 30
"""Memory that a call may take."""
HOLES = 24 << 30

Harm = Callable[[Path], object]
"""What is done to a file."""


def flip(path, byte, bit=0):
    """Change one bit of a file; a negative byte is counted from its end."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def cut(size):
    """Keep the first bytes of a file; a negative number: all but the last ones."""
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def _replaced(make):
    return lambda path: (path.unlink(), make(path))


def _link_out(path):
    """Put a link to the same bytes outside of the caches: who follows it finds nothing wrong."""
    outside = outside_of(path)
    outside.mkdir(exist_ok=True)
    os.replace(path, outside / path.name)
    path.symlink_to(outside / path.name)


def outside_of(path):
    """Return a folder beside that of the caches."""
    root = next(parent for parent in path.parents if parent.name == "caches")
    return root.parent / "outside"


FILE_HARMS = {
    "empty": cut(0),
    "one byte": cut(1),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a byte less": cut(-1),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": Path.unlink,
    "a link out": _link_out,
    "a link in a circle": _replaced(lambda path: path.symlink_to(path.name)),
    "a link to /dev/zero": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "a link to nothing": _replaced(lambda path: path.symlink_to("nothing")),
    "a pipe": _replaced(os.mkfifo),
    "a socket": _replaced(lambda path: os.mknod(path, stat.S_IFSOCK | 0o644)),
    "a folder": _replaced(Path.mkdir),
    "holes": lambda path: os.truncate(path, HOLES),
}
"""What a quick look sees, by name."""


@contextmanager
def kept(path):
    """Put a file back as it was, whatever became of it."""
    content, about = path.read_bytes(), path.stat()
    try:
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


class Hung(BaseException):
    """A call did not end."""


@contextmanager
def watched(*folders):
    """Fail where a block hangs, takes too much memory, or changes anything in a folder."""
    before = [listing(folder) for folder in folders]
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(used.split()[1]) + MOST_BYTES, limits[1]))
    last = signal.signal(signal.SIGALRM, _hung)
    signal.alarm(HANGS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, last)
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    for folder, was in zip(folders, before, strict=True):
        changed = sorted(set(was) ^ set(listing(folder)))
        assert not changed, f"{folder} was changed: {changed[:5]}"


def _hung(number, frame):
    raise Hung(f"no answer within {HANGS} s")


def listing(folder):
    """Return name, kind, size and time of everything below a folder; links are not followed."""
    found = []
    for above, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            about = os.lstat(os.path.join(above, name))
            found.append((os.path.join(above, name), about.st_mode, about.st_size, about.st_mtime_ns))
    return sorted(found)


# --- values -----------------------------------------------------------------------------------------------------------


def keys(**changed):
    """Set keys of a version's meta.json, with a CRC-32 that fits."""
    return lambda folder: change_meta(folder, **changed)


def number(name, at, value, dtype):
    """Write one number into a file of numbers."""

    def write(folder):
        values = np.fromfile(folder / name, dtype)
        values[at] = value
        values.tofile(folder / name)

    return write


def entry(name, at, added):
    """Add to one entry of a .npy file."""

    def write(folder):
        values = np.load(folder / name)
        values[at] += added
        np.save(folder / name, values)

    return write


def sealed(harm, **changed):
    """Describe the files as they are after a harm, as a builder with a mistake would; then set keys."""
    return lambda folder: (harm(folder), describe(folder, read_meta(folder) | changed))


def resummed(folder):
    """Make the block checksums again from the files: then other checks of a reader have to find a harm."""
    try:
        raw = (folder / "meta.json").read_bytes()
        meta = read_meta(folder)
        name = meta["checksums"]["name"]
        if not crc_fits(raw):
            return
        covered = [record["name"] for record in file_records(meta) if record["name"] != name]
        sums = b"".join(checksums_of((folder / each).read_bytes()) for each in covered)
        if len(sums) != meta["checksums"]["bytes"]:
            return  # of another number of blocks: nobody compares them
        (folder / name).write_bytes(sums)
        meta["checksums"]["sha256"] = hashlib.sha256(sums).hexdigest()
        write_meta(folder, meta)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return  # no meta.json that readers take


def npy(shape, *, descr="'<i8'", version=b"\x01\x00", fortran="False"):
    """Return a .npy file of three offsets whose header says something else."""
    header = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    width = 2 if version == b"\x01\x00" else 4
    header = header.ljust(128 - 9 - width) + b"\n"
    start = b"\x93NUMPY" + version + len(header).to_bytes(width, "little")
    return start + header + np.array([0, 6, 12], dtype="<i8").tobytes()


def saved(values, dtype="<i8"):
    """Return a .npy file of these values."""
    file = io.BytesIO()
    np.save(file, np.array(values, dtype=dtype))
    return file.getvalue()


def file(name, content):
    """Replace the content of a file."""
    return lambda folder: (folder / name).write_bytes(content)
