"""Leases: locks that need nothing of a file system but O_EXCL and reads of what another machine has synced.

The lease of a lock is a file NAME.N in `.leases` (folder.py). Its holder raises a counter in it every few seconds; who
wants it watches the counter by a clock of its own. A lease whose counter stood still for LEASE_SECONDS has run out.

Taking one: create NAME.(N+1) with O_EXCL, where N is the highest there; so of several takers one has it. It lists the
folder again: a file that it has not seen run out belongs to another, and it gives up its own. Then it removes those
that have run out, so that their holders, if they wake up, find theirs gone. Two holders cannot both go on: of two files
one was created later, and its creator has seen the other. A holder removes its file at the end.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import NO_LINK, PathLike, make_dir
from niels_gpt.storage.locks.folder import FLOCK, MARKER, lease_path, lock_kind, refuse_kernel_lock
from niels_gpt.storage.locks.holders import Holder, read_lease
from niels_gpt.storage.locks.kernel import in_use, logger, not_written

BEAT_SECONDS = 2.0
"""Between two raises of the counter. Who tries a lease that is held waits as long to see it move."""
LEASE_SECONDS = 60.0
"""A lease whose counter stood still for as long has run out: after 30 raises, and after the restart of a server."""
_POLL_SECONDS = 0.2
_NUMBER = re.compile(r"[1-9]\d{0,8}")


class Lease:
    """A lease that this process holds; a thread raises its counter."""

    def __init__(self, path: Path, locked: PathLike) -> None:
        """path: of the file NAME.N, which is created. Raises: FileExistsError; OSError, and then there is no file."""
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
        """Whether the file is still this lease's, as a read of it by its name says: that asks the server."""
        found = read_lease(self.path)
        return found is not None and found.token == self._holder.token

    def release(self) -> None:
        """Stop the thread, and remove the file if it is still this lease's."""
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
    # The thread is not in a forked child, and the lease is the parent's: it is neither kept alive nor removed.
    while HELD:
        HELD.popitem()[1].close()


os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def lease(path: Path, locked: PathLike, state: str, *, wait: bool) -> Iterator[None]:
    """Hold the lease of the lock at `path`; as `file_lock`.

    One that has run out is taken over, and one whose process on this machine is dead at once. Without `wait` it takes
    up to LEASE_SECONDS to know that another one has run out.
    Raises: CacheError E503; CacheError E504 for a file at the lease's name that is none; CacheError E512 where a
        builder without leases may hold the lock; OSError, also where the disk is full.
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
    """Raise CacheError E512 if this process has lost its lease of the lock at `path`; nothing to do without a lease.

    A lease is lost, too, where the folder of caches says no more that its locks are leases: others take a flock.
    Call it before what others will see: a process that was stopped does not know for how long. It reads two files.
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
    taker = max(_leases(_name_of(held.path)).items(), default=(0, None))[1]
    found = f"this process lost its lease to {taker or 'another process, which has ended'}"
    remedy = "It was stopped for longer than a lease lasts. Run the same command again"
    raise CacheError(held.locked, found, remedy=remedy, code="E512")


def is_lost(path: Path) -> bool:
    """Whether this process had a lease of the lock at `path`, and cannot show that it still has it; never raises.

    What lies in the folder may then be another builder's, and must not be removed.
    """
    try:
        check_lease(path)
    except (CacheError, OSError):
        return True
    return False


def refuse_if_leased(path: Path, locked: PathLike, state: str) -> None:
    """Raise CacheError E503 for a lease whose process is not known to be dead; nothing is written."""
    refuse_kernel_lock(path, locked, state)
    name = lease_path(path)
    for number, found in _leases(name).items():
        if not found.is_dead():
            raise in_use(str(found), name.with_name(f"{name.name}.{number}"), locked, state)


class _Watch:
    """What a taker has seen of the leases of a lock, by its own clock."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Holder, float, float]] = {}  # with the times of the first and the last look
        self.moved: Holder | None = None
        """A holder that is alive: its counter was seen to move."""

    def is_over(self, number: int, found: Holder) -> bool:
        """Whether a lease has run out, or its process is known to be dead."""
        now = time.monotonic()
        before, since, last = self._seen.get(number, (None, now, now))
        if before != found and before is not None:
            self.moved = found
        if before != found or now - last > LEASE_SECONDS / 2:  # a server that hung has kept the holder waiting, too
            since = now
        self._seen[number] = found, since, now
        return found.is_dead() or now - since >= LEASE_SECONDS


def _taken(path: Path, locked: PathLike, state: str, wait: bool) -> Lease:
    watch, said, name = _Watch(), False, lease_path(path)
    while True:
        _make_folder(path.parent)  # callers expect it, as under flock
        refuse_kernel_lock(path, locked, state)
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
            text = "%s: %s by %s; %s. One of a machine that has died is replaced after %g seconds"
            logger.info(text, os.fspath(locked), state, held[-1], what, LEASE_SECONDS)
            said = True
        time.sleep(_POLL_SECONDS)


def _attempt(path: Path, locked: PathLike, watch: _Watch, number: int) -> Lease | None:
    """Create the lease of a number, and remove those that have run out; None where another process was faster."""
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
        make_dir(folder)
    except PermissionError as error:
        raise not_written(error, folder) from error


def _name_of(path: Path) -> Path:
    return path.with_suffix("")


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
