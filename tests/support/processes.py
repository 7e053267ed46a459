"""Processes that a test waits for, and the files that this one has open."""

import os
import time
from contextlib import suppress
from pathlib import Path


def open_in(folder):
    """Return the paths in a folder, its own among them, that this process has open: one for each handle, sorted.

    A count of all handles is no measure: it falls whenever Python collects what an earlier test left.
    """
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile, as listdir's own
            paths.append(Path("/proc/self/fd", name).readlink())
    return sorted(path for path in paths if path.is_relative_to(folder))


def assert_gone(pids):
    """Wait for processes to end, and fail if one of them does not."""

    def is_running(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    for _ in range(600):
        if not any(is_running(pid) for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"{pids}: still there")
