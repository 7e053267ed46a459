"""Locks: one builder for each cache, and readers that keep their version from gc.

kernel.py      a builder's lock on a file, whose text names the holder; the kernel drops it with the process
readers.py     a reader's lock on the folder of its version, which gc looks for
"""

from niels_gpt.storage.locks.kernel import file_lock, logger, refuse_if_held
from niels_gpt.storage.locks.readers import OPEN, VersionHold, hold_folder, hold_version, unless_held

__all__ = [
    "OPEN",
    "VersionHold",
    "file_lock",
    "hold_folder",
    "hold_version",
    "logger",
    "refuse_if_held",
    "unless_held",
]
