"""Files that are either complete or absent, canonical JSON, checksums, and the error of a bad cache."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

META_NAME = "meta.json"


class CacheError(ValueError):
    """A cache is damaged, foreign, or does not match what it is used with. The message names the file."""


def canonical_json(value: Any) -> bytes:
    """Return `value` as utf-8 JSON with sorted keys, an indent of 2 and a final newline: equal values, equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the hex sha256 of a file, read in large blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_dir(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable, as fsync does for a file's bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically: a unique sibling, fsync, rename. No trace is left on failure; the umask is honoured."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_umask())  # mkstemp gives 0600, whatever the umask says
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    fsync_dir(target.parent)


def _umask() -> int:
    # The umask can only be read by setting it; Linux also shows it in /proc, which no other thread can disturb.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        os.umask(current := os.umask(0o022))
        return current
    return int(next(line.split()[1] for line in lines if line.startswith("Umask:")), 8)
