"""Who holds a lease: the content of its file, and whether that process is known to be dead."""

from __future__ import annotations

import json
import os
import shlex
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import NO_LINK
from niels_gpt.storage.locks.kernel import refuse_other_files, user_name
from niels_gpt.storage.meta_json import parse_object, printable

_BYTES = 1024
"""Of a lease's file, always: a counter is raised by one write over the same bytes."""
_LOOKS, _PAUSE = 5, 0.02  # a read may meet a write


@dataclass
class Holder:
    """The process that holds a lease, and how often it has raised its counter."""

    token: str = ""
    """Random, of this lease alone; "" for a file that was just created."""
    counter: int = 0
    user: str = ""
    host: str = ""
    boot: str = ""
    """The kernel's id of this run of the machine; "" where the system has none."""
    pids: str = ""
    """The namespace that the pid belongs to; "" where the system has none."""
    pid: int = 0

    @classmethod
    def of_this_process(cls, token: str) -> Holder:
        """Return this process."""
        boot = pids = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
            pids = os.readlink("/proc/self/ns/pid")
        return cls(token, 0, user_name(), socket.gethostname(), boot, pids, os.getpid())

    def content(self) -> bytes:
        """Return the bytes of the file."""
        raw = json.dumps({"kind": "lease", **asdict(self)}, ensure_ascii=False).encode(errors="replace")
        if len(raw) >= _BYTES:
            raise ValueError(f"{len(raw)} bytes of user and host names, expected fewer than {_BYTES}")
        return raw.ljust(_BYTES - 1) + b"\n"

    def is_dead(self) -> bool:
        """Whether it is a process of this machine, in the same namespace of pids, that has ended.

        Of no other process is this known: its counter alone says whether it is alive.
        """
        here = self.of_this_process("")
        if not self.boot or not self.pids or (self.host, self.boot, self.pids) != (here.host, here.boot, here.pids):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        return _is_zombie(self.pid)

    def __str__(self) -> str:
        if not self.token:
            return "a process that has just started"
        return printable(f"user {self.user}, host {self.host}, pid {self.pid}")


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended and its parent has not asked for its status yet."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # /proc is of another namespace
            return False
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"Z"]
    except OSError:
        return False


def read_lease(path: Path) -> Holder | None:
    """Return the holder of a lease; None where there is no such file.

    Raises: CacheError E504 for a file that is no lease; OSError.
    """
    problem = ""
    for _ in range(_LOOKS):
        try:
            handle = os.open(path, os.O_RDONLY | NO_LINK)
        except FileNotFoundError:
            return None
        except OSError as error:
            problem = str(error.strerror)  # a link
            break
        try:
            status = os.fstat(handle)
            if status.st_nlink == 0:  # it was removed meanwhile
                return None
            refuse_other_files(status, path)
            raw = os.pread(handle, _BYTES + 1, 0)
        finally:
            os.close(handle)
        try:
            return _parsed(raw)
        except ValueError as error:
            problem = str(error)
        time.sleep(_PAUSE)
    remedy = f"If no build runs: {shlex.join(['rm', '-r', str(path)])}"
    raise CacheError(path, f"is no lease: {problem}", remedy=remedy, code="E504")


def _parsed(raw: bytes) -> Holder:
    if not raw:
        return Holder()
    found: dict[str, Any] = parse_object(raw) if len(raw) <= _BYTES else {}
    if found.pop("kind", None) != "lease" or found.keys() != {field.name for field in fields(Holder)}:
        raise ValueError("another content")
    holder = Holder(**found)
    for field in fields(Holder):
        value = getattr(holder, field.name)
        if type(value) is not (int if field.name in ("counter", "pid") else str):
            raise ValueError(f"another content ({field.name})")
    if holder.pid < 1 or not holder.token:
        raise ValueError("another content (pid or token)")
    return holder
