"""The lock of a builder: a flock, or a lease where the folder says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import PathLike
from niels_gpt.storage.locks import leases
from niels_gpt.storage.locks.folder import FLOCK, lock_kind
from niels_gpt.storage.locks.kernel import kernel_lock, refuse_if_flocked


@contextmanager
def file_lock(path: Path, locked: PathLike, state: str = "is in use", *, wait: bool) -> Iterator[None]:
    """Hold the lock at `path`, as the folder says: a flock on this file, or a lease in a file beside it.

    locked, state: what the lock protects, and what its holder does, for the message "LOCKED: STATE by user ...".
    wait: wait for the lock, without a limit, if another process or thread holds it.
    Under a lease, call `check_lease(path)` before each step that others see: a process that was stopped may have lost
    it. The end of the block calls it.
    Raises: CacheError E503 that names user, host and pid of the holder, unless `wait`; as `kernel_lock`, `lease`,
        `lock_kind` and `check_lease`.
    """
    while True:
        kind = lock_kind(path)
        with (kernel_lock if kind == FLOCK else leases.lease)(path, locked, state, wait=wait):
            if lock_kind(path) == kind:  # `apply_lock_setting` writes its file, then looks for locks
                yield
                return


def refuse_if_held(path: Path, locked: PathLike, state: str = "is in use") -> None:
    """Raise CacheError that names the holder of a lock; nothing is written, and the file may be absent.

    locked, state: as for `file_lock`. Works without write permission. A lease counts as held unless its process is
    known to be dead; see `refuse_while_held`.
    """
    if lock_kind(path) == FLOCK:
        refuse_if_flocked(path, locked, state)
    else:
        leases.refuse_if_leased(path, locked, state)


def refuse_while_held(path: Path, locked: PathLike, state: str = "is in use") -> None:
    """As `refuse_if_held`, but where a lease may have run out, watch it, and remove it if it has.

    That takes up to `leases.LEASE_SECONDS`, for a machine that died with the lease, and needs write permission.
    """
    try:
        refuse_if_held(path, locked, state)
    except CacheError as error:
        if error.code != "E503" or lock_kind(path) == FLOCK:
            raise
        with file_lock(path, locked, state, wait=False):
            pass


def is_leased(path: Path) -> bool:
    """Whether this process holds the lock at `path` as a lease."""
    return os.path.abspath(path) in leases.HELD
