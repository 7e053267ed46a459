"""Run several transfers at once, report progress, and stop all at the first error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from niels_gpt.buckets.bucket import Stopped
from niels_gpt.work import Progress

Item = TypeVar("Item")


class Tally:
    """Count files and bytes of several threads, and report them."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        """total: bytes in all. progress: called with files done, bytes done, and bytes in all."""
        self.files = self.moved = self.kept = 0
        self._total, self._progress = total, progress
        self._lock, self._stop = threading.Lock(), threading.Event()

    def add(self, *, moved: int = 0, kept: int = 0, files: int = 0) -> None:
        """Count bytes moved, bytes that were there already, and finished files.

        Negative numbers take back the counts of a file that starts again. Raises: Stopped after `stop`.
        """
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self.files, self.moved, self.kept = self.files + files, self.moved + moved, self.kept + kept
            if self._progress is not None:
                self._progress(self.files, self.moved + self.kept, self._total)

    def pause(self, seconds: float) -> None:
        """Wait. Raises: Stopped after `stop`, which ends the wait."""
        if self._stop.wait(seconds):
            raise Stopped

    def stop(self) -> None:
        """Make the next `add` or `pause` of each thread raise Stopped."""
        self._stop.set()


def at_once(work: Callable[[Item], object], items: Iterable[Item], jobs: int, tally: Tally) -> None:
    """Do `work` for each item in `jobs` threads. The first error stops the others, and is raised."""
    with ThreadPoolExecutor(jobs, thread_name_prefix="transfer") as executor:
        try:
            for done in as_completed([executor.submit(work, item) for item in items]):
                done.result()
        except BaseException:  # an interrupt too
            tally.stop()
            executor.shutdown(cancel_futures=True)
            raise
