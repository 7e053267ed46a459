"""Locks: one builder for each cache, and readers that keep their version from gc.

builders.py    the lock of a builder: a flock, or a lease where the folder says so
folder.py      how a folder of caches is locked: its .locks.json, and the setting `lock`
kernel.py      a lock of the kernel on a file, whose text names the holder; it ends with the process
leases.py      a lock that reaches other machines without the kernel: a file whose holder raises a counter in it
holders.py     what a lease's file says of its holder, and whether that process is dead
mounts.py      whether a folder's file system passes flock on to other machines
readers.py     a reader's lock on the folder of its version, which gc looks for

The names below are imported at their first use: who reads a cache takes no builder's lock.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niels_gpt.storage.locks.builders import file_lock, is_leased, refuse_if_held, refuse_while_held
    from niels_gpt.storage.locks.folder import apply_lock_setting, lock_kind
    from niels_gpt.storage.locks.kernel import logger
    from niels_gpt.storage.locks.leases import check_lease, is_lost
    from niels_gpt.storage.locks.readers import OPEN, VersionHold, hold_folder, hold_version, unless_held

_HOMES = {
    **dict.fromkeys(("file_lock", "is_leased", "refuse_if_held", "refuse_while_held"), "builders"),
    **dict.fromkeys(("apply_lock_setting", "lock_kind"), "folder"),
    "logger": "kernel",
    **dict.fromkeys(("check_lease", "is_lost"), "leases"),
    **dict.fromkeys(("OPEN", "VersionHold", "hold_folder", "hold_version", "unless_held"), "readers"),
}

__all__ = [
    "OPEN",
    "VersionHold",
    "apply_lock_setting",
    "check_lease",
    "file_lock",
    "hold_folder",
    "hold_version",
    "is_leased",
    "is_lost",
    "lock_kind",
    "logger",
    "refuse_if_held",
    "refuse_while_held",
    "unless_held",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
