"""Leases: locks that need nothing of a file system but O_EXCL and reads of bytes that another machine has synced.

A folder of caches is locked by leases if it has a `.locks.json`, by flock if not. The lease of a lock is a file NAME.N
in `.leases` beside `.locks.json`, and not beside the lock: no list of a cache's files has to know it.

Its holder raises a counter in the file every few seconds; a process that wants the lease watches the counter by its own
clock. A lease whose counter stood still for LEASE_SECONDS has run out. Clocks of two machines are never compared.

Taking a lease: create NAME.(N+1) with O_EXCL, where N is the highest number there, so that one of several takers
succeeds. List the folder again; if a file is there that this taker has not seen run out, it is another's: give up the
own file. Then remove the files that have run out, so that their holders find theirs gone if they wake up. Two takers
cannot both succeed: one of the two files was created later, and its creator has seen the other. A holder removes its
file at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from secrets import token_hex
from typing import Any

from niels_gpt.paths import FAMILIES
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError, UsageError
from niels_gpt.storage.fileio import NO_LINK, PathLike
from niels_gpt.storage.locks.kernel import (
    in_use,
    logger,
    not_written,
    refuse_if_flocked,
    refuse_other_files,
    user_name,
)
from niels_gpt.storage.meta_json import link_in_the_way, parse_object, printable, read_regular

MARKER, LEASES_DIR = ".locks.json", ".leases"
FLOCK, LEASE = "flock", "lease"
_SETTINGS = ("auto", FLOCK, LEASE)
_CONTENT = {"kind": "locks", "lock": LEASE}
_MOST_BYTES = 4096  # of a `.locks.json`
_MOST_LEVELS = 10  # folders above a lock: eight lie between the lock of a partition and the folder of caches
_HOLDER = re.compile(r"user .+, host (.+), pid [0-9]+")
_LOCK_NAMES = ("lock", ".lock")

BEAT_SECONDS = 2.0
"""Between two raises of the counter. A process that tries a held lease waits as long to see it move."""
LEASE_SECONDS = 60.0
"""A lease runs out after its counter stood still for so long: 30 raises, or the restart of a file server."""
_POLL_SECONDS = 0.2
_NUMBER = re.compile(r"[1-9]\d{0,8}")
_BYTES = 1024
"""Bytes of a lease's file, always: one write over the same bytes raises the counter."""
_LOOKS, _PAUSE = 5, 0.02  # a read may meet a write


def lock_kind(path: Path) -> str:
    """Return how a lock file at `path` is locked: "lease" if a folder above it has a `.locks.json`, else "flock".

    path: a lock file or a folder, which may be absent. Links in it are resolved first, so that every process finds the
    same folders. The folder says it, not the caller: processes with different settings then lock in the same way.
    Raises: CacheError E512 if a `.locks.json` is not a file of this project; PermissionError.
    """
    return FLOCK if _marker_above(path) is None else LEASE


def lease_path(path: Path) -> Path:
    """Return the path of a lock's leases, to which they add their numbers. The folder must be one of leases.

    The name is a hash of the lock's path below the folder of caches: machines may mount that in different places.
    Raises: CacheError E205 if `.leases` is a link; FileNotFoundError if `.locks.json` was removed meanwhile.
    """
    marker = _marker_above(path)
    if marker is None:
        raise FileNotFoundError(f"{path}: {MARKER} was removed while a lease was taken")
    folder = marker.with_name(LEASES_DIR)
    if folder.is_symlink():
        raise link_in_the_way(folder, "a folder: nothing is written through links")
    name = os.path.relpath(os.path.realpath(path), marker.parent)
    return folder / hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def _marker_above(path: Path) -> Path | None:
    real = Path(os.path.realpath(path))
    for folder in [real, *real.parents][:_MOST_LEVELS]:
        marker = folder / MARKER
        try:
            if parse_object(read_regular(marker, _MOST_BYTES)) != _CONTENT:
                raise ValueError("written by another program, or by a later version of this one")
        except FileNotFoundError:
            continue
        except PermissionError:
            if os.access(folder, os.X_OK):  # else nothing below it can be locked, and the lock's own error says so
                raise
            continue
        except ValueError as error:  # a CacheError is one
            found = error.problem if isinstance(error, CacheError) else str(error)
            remedy = f"If no build runs in the folder: {shlex.join(['rm', '-r', str(marker)])}"
            raise CacheError(marker, found, str(_CONTENT), remedy, code="E512") from error
        return marker
    return None


def apply_lock_setting(root: Path, setting: str) -> None:
    """Apply the setting `lock` to a folder of caches, at the start of a run.

    root: the folder of caches; for an EAGLE-3 cache, that cache's own folder.
    setting: "auto" (as the folder says, flock if it says nothing), "flock" or "lease".
    "lease" writes `.locks.json`, which every later run follows, on every machine.
    Raises: UsageError for another setting; CacheError E512 for "flock" in a folder of leases; for "lease", CacheError
        E503 while a builder holds a flock, and CacheError E512 if one on another machine may hold one.
    """
    if setting not in _SETTINGS:
        raise UsageError(f"lock (--lock) is {setting!r}, expected one of {', '.join(_SETTINGS)}")
    marker = _marker_above(root)
    if setting == FLOCK and marker is not None:
        command = f"rm {shlex.quote(str(marker))}"
        remedy = f"Leave --lock out. To go back to flock, when no build runs in the folder on any machine: {command}"
        raise CacheError(root, f"its locks are leases, by {marker}", FLOCK, remedy, code="E512")
    if setting != LEASE or marker is not None:
        return
    fileio.make_dir(root)
    _refuse_links(root)
    for folder, _, names in os.walk(root):
        for name in _LOCK_NAMES:
            if name in names:
                _refuse_kernel_lock(Path(folder, name), folder)
    # A builder that takes a flock meanwhile is seen by each taker of the same lease. The file stays even if this run
    # fails: others may follow it by now.
    fileio.write_bytes(root / MARKER, fileio.canonical_json(_CONTENT))


def _refuse_kernel_lock(path: Path, locked: PathLike, state: str = "is in use") -> None:
    """Raise CacheError unless it is certain that nobody has a flock on a lock file in a folder of leases.

    E503 names a holder on this machine. E512 names one on another machine: flock may not show it here, and a killed
    holder leaves its name in the file.
    """
    holder = refuse_if_flocked(path, locked, state)
    named = _HOLDER.fullmatch(holder)  # else it is another program's file, whose locks are not ours to judge
    if named and named[1] != socket.gethostname():
        found = f"{state} by {holder}, or was when that process was killed: flock does not show which"
        raise CacheError(locked, found, remedy=f"If that process has ended: rm {shlex.quote(str(path))}", code="E512")


def _refuse_links(root: Path) -> None:
    """Refuse a family of caches that lies elsewhere: its locks would be looked for there."""
    for path in root.iterdir():
        if path.is_symlink() and path.name in FAMILIES:
            found = f"a symbolic link to {os.path.realpath(path)}, which {root / MARKER} would not cover"
            raise CacheError(path, found, "a folder", "Name the folder of caches that it lies in", code="E512")


@dataclass
class Holder:
    """The process that holds a lease, and how often it has raised its counter."""

    token: str = ""
    """Random, only for this lease; "" for a file that was just created."""
    counter: int = 0
    user: str = ""
    host: str = ""
    boot: str = ""
    """The kernel's id of this run of the machine; "" if the system has none."""
    pids: str = ""
    """The namespace of the pid; "" if the system has none."""
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
        """Whether it is known to have ended: only known of processes of this machine in the same namespace of pids.

        For any other process only the counter says whether it is alive.
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
    """Return whether a process has ended and its parent has not asked for its status yet."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # /proc belongs to another namespace
            return False
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"Z"]
    except OSError:
        return False


def read_lease(path: Path) -> Holder | None:
    """Return the holder of a lease, or None if there is no such file.

    Raises: CacheError E504 for a file that is not a lease; OSError.
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
    remedy = f"If no build runs: rm -r {shlex.quote(str(path))}"
    raise CacheError(path, f"is not a lease: {problem}", remedy=remedy, code="E504")


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


class Lease:
    """A lease that this process holds; a thread raises its counter."""

    def __init__(self, path: Path, locked: PathLike) -> None:
        """path: the file NAME.N, which is created. Raises: FileExistsError; another OSError, and no file is left."""
        self.path, self.locked, self.process = path, locked, os.getpid()
        self._holder, self._ended = Holder.of_this_process(token_hex(16)), threading.Event()
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK, 0o666)
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        try:
            self._write()
        except OSError as error:  # a full disk: nobody could see that it is held
            self.give_back()
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_held(self) -> bool:
        """Whether the file still is this lease's. It is opened by its name each time: that asks the file server."""
        found = read_lease(self.path)
        return found is not None and found.token == self._holder.token

    def release(self) -> None:
        """Stop the thread, and remove the file if it still is this lease's."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with suppress(OSError, CacheError):
            if self.is_held():
                self.give_back()
        self.close()

    def give_back(self) -> None:
        """Remove the file, and the folder of leases with the last one."""
        with suppress(OSError):
            os.unlink(self.path)
            os.rmdir(self.path.parent)
        self.close()

    def close(self) -> None:
        """Close the file."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def _write(self) -> None:
        os.pwrite(self._handle, self._holder.content(), 0)
        os.fsync(self._handle)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError, CacheError):  # a server that does not answer for a while; `check_lease` decides
                self._holder.counter += 1
                self._write()
                if not self.is_held():
                    return


HELD: dict[str, Lease] = {}
"""The leases of this process by the absolute paths of their locks."""


def _forget_in_child() -> None:
    # A forked child has no such thread, and the lease is its parent's: the child neither keeps it alive nor removes it.
    while HELD:
        HELD.popitem()[1].close()


os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def lease(path: Path, locked: PathLike, state: str, *, wait: bool) -> Iterator[None]:
    """Hold the lease of the lock at `path`. Takes the arguments of `file_lock`.

    Takes over a lease that has run out, and at once the lease of a dead process of this machine. Without `wait` it
    takes up to LEASE_SECONDS to find that another lease has run out.
    Raises: CacheError E503 with the holder, unless `wait`; CacheError E504 for another file at the lease's name;
        CacheError E512 if a builder without leases may hold the lock, or if the lease was lost; OSError, also on a full
        disk.
    """
    held = _taken(path, locked, state, wait)
    key = os.path.abspath(path)
    HELD[key] = held
    try:
        held.start()
        yield
        _refuse_if_lost(held)
    finally:
        if os.getpid() == held.process:  # not in a forked child
            del HELD[key]
            held.release()


def check_lease(path: Path) -> None:
    """Raise CacheError E512 if this process has lost its lease of the lock at `path`; do nothing without a lease.

    Call it before each step that others will see: a process that was stopped does not know for how long. A lease is
    lost, too, if the folder's `.locks.json` was removed: others take a flock then. Reads two files.
    """
    held = HELD.get(os.path.abspath(path))
    if held is None:
        return
    _refuse_if_lost(held)
    if lock_kind(path) == FLOCK:
        found = f"this process has a lease, and {MARKER} was removed meanwhile: others may have a flock"
        raise CacheError(held.locked, found, remedy="Run the same command again when no other build runs", code="E512")


def _refuse_if_lost(held: Lease) -> None:
    if held.is_held() or os.getpid() != held.process:  # a forked child has no lease
        return
    taker = max(_leases(held.path.with_suffix("")).items(), default=(0, None))[1]
    found = f"this process lost its lease to {taker or 'another process, which has ended'}"
    remedy = "It was stopped for longer than a lease lasts. Run the same command again"
    raise CacheError(held.locked, found, remedy=remedy, code="E512")


def is_lost(path: Path) -> bool:
    """Whether this process had a lease of the lock at `path`, and cannot show that it still has it; never raises.

    The files in the folder may be another builder's then, and must not be removed.
    """
    try:
        check_lease(path)
    except (CacheError, OSError):
        return True
    return False


def refuse_if_leased(path: Path, locked: PathLike, state: str) -> None:
    """Raise CacheError E503 for a lease whose process is not known to be dead; write nothing."""
    _refuse_kernel_lock(path, locked, state)
    name = lease_path(path)
    for number, found in _leases(name).items():
        if not found.is_dead():
            raise in_use(str(found), name.with_name(f"{name.name}.{number}"), locked, state)


class _Watch:
    """The leases of a lock as one taker has seen them, by its own clock."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Holder, float, float]] = {}  # with the times of the first and the last look
        self.moved: Holder | None = None
        """A holder that is alive: its counter was seen to move."""

    def is_over(self, number: int, found: Holder) -> bool:
        """Return whether a lease has run out, or its process is known to be dead."""
        now = time.monotonic()
        before, since, last = self._seen.get(number, (None, now, now))
        if before != found and before is not None:
            self.moved = found
        # Two looks far apart: a server that hung has kept the holder waiting, too, so its time begins again.
        if before != found or now - last > LEASE_SECONDS / 2:
            since = now
        self._seen[number] = found, since, now
        return found.is_dead() or now - since >= LEASE_SECONDS


def _taken(path: Path, locked: PathLike, state: str, wait: bool) -> Lease:
    watch, said, name = _Watch(), False, lease_path(path)
    while True:
        _make_folder(path.parent)  # callers expect it, as under flock
        _refuse_kernel_lock(path, locked, state)
        found = _leases(name)
        held = [each for number, each in found.items() if not watch.is_over(number, each)]
        if not held:
            taken = _attempt(name, locked, watch, max(found, default=0) + 1)
            if taken is not None:
                return taken
            time.sleep(random.random() * _POLL_SECONDS)  # two that met must not meet again
            continue
        here = os.path.abspath(path) in HELD
        if not wait and (here or watch.moved is not None):
            raise in_use(str(held[-1] if here else watch.moved), name, locked, state)
        if not said:
            what = "waiting" if wait else "watching whether that process is alive"
            text = "%s: %s by %s; %s. A lease of a machine that has died is replaced after %g seconds"
            logger.info(text, os.fspath(locked), state, held[-1], what, LEASE_SECONDS)
            said = True
        time.sleep(_POLL_SECONDS)


def _attempt(path: Path, locked: PathLike, watch: _Watch, number: int) -> Lease | None:
    """Create the lease of a number, and remove those that have run out; None if another process was faster."""
    if not _NUMBER.fullmatch(str(number)):  # nobody would find it
        last = path.with_name(f"{path.name}.{number - 1}")
        remedy = f"If no build runs: {shlex.join(['rm', str(last)])}"
        raise CacheError(last, "has the last number that a lease may have", remedy=remedy, code="E504")
    _make_folder(path.parent)
    try:
        mine = Lease(path.with_name(f"{path.name}.{number}"), locked)
    except (FileExistsError, FileNotFoundError):  # the last of others took the folder with it
        return None
    except PermissionError as error:
        raise not_written(error, path) from error
    try:
        others = {each: found for each, found in _leases(path).items() if each != number}
        if all(watch.is_over(each, found) for each, found in others.items()):
            for each in others:
                with suppress(FileNotFoundError):
                    os.unlink(path.with_name(f"{path.name}.{each}"))
            if mine.is_held():
                return mine
    except BaseException:
        mine.give_back()
        raise
    mine.release()
    return None


def _make_folder(folder: Path) -> None:
    try:
        fileio.make_dir(folder)
    except PermissionError as error:
        raise not_written(error, folder) from error


def _leases(path: Path) -> dict[int, Holder]:
    """Return the leases of a name by their numbers, the lowest first. Raises: CacheError E504."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(path.parent):
            stem, _, number = name.rpartition(".")
            if stem == path.name and _NUMBER.fullmatch(number):
                holder = read_lease(path.parent / name)
                if holder is not None:
                    found[int(number)] = holder
    return dict(sorted(found.items()))
