"""Wall time and peak memory of a recipe."""

from __future__ import annotations

import time
from pathlib import Path


class Measured:
    """Wall time and peak memory of a block; Linux lets a process reset its own high-water mark."""

    seconds: float = 0.0
    peak_bytes: int | None = None

    def __enter__(self) -> Measured:
        self._begin = time.perf_counter()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._can_reset = True
        except OSError:
            self._can_reset = False
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._begin
        if self._can_reset:
            lines = Path("/proc/self/status").read_text().splitlines()
            self.peak_bytes = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
