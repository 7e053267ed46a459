"""Processes that a test waits for."""

import time
from pathlib import Path


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
