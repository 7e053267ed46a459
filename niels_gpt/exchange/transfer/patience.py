"""Waits for the answers of a server: a line where none comes, and an end.

No library ends a request for certain: a server may send a byte a second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from niels_gpt.storage.errors import CacheError

logger = logging.getLogger(__name__)

SAID_AFTER_S, LONGEST_SILENCE_S = 10.0, 60.0
"""Seconds without an answer of a server until a line says so; twice as many until each next line, up to the longest."""
LONGEST_S = 600.0
"""Seconds that a request may take, with all its attempts."""
UPLOAD_BYTES_PER_S = 1 << 14
"""So many bytes that are sent make that a second longer."""
_T = TypeVar("_T")


class Patience:
    """Waits for the answers of one server, in several threads."""

    def __init__(self) -> None:
        self.pause: Callable[[float], object] = time.sleep
        """Waits so many seconds; may raise to give up."""
        self._heard = self._said = float("-inf")
        self._silence = SAID_AFTER_S

    def heard(self, *_: object, **__: object) -> None:
        """Note that the server does its work. Also a hook of fsspec's callbacks."""
        self._heard = time.monotonic()

    def answer(self, what: str, request: Future[_T], end: float) -> _T:
        """Return the answer to a request. what: for messages. Raises: as the request; CacheError E612 at `end`."""
        begin = time.monotonic()
        try:
            while not request.done() and not wait([request], min(1.0, SAID_AFTER_S)).done:
                self.pause(0)
                self._look(what, begin, end)
            self.heard()
            return request.result()
        finally:
            request.cancel()

    def _look(self, what: str, begin: float, end: float) -> None:
        now = time.monotonic()
        if now >= end:
            remedy = "Run it again: it resumes. On a slow line take fewer files at once: --jobs 1"
            raise CacheError(what, f"no whole answer after {now - begin:,.0f} s", remedy=remedy, code="E612")
        silent = now - max(begin, self._heard)
        if min(silent, now - self._said) >= self._silence:
            self._said, self._silence = now, min(2 * self._silence, LONGEST_SILENCE_S)
            logger.info("%s: no answer for %.0f s; given up in %.0f s", what, silent, end - now)


def end_of(num_bytes: int = 0) -> float:
    """Return when a request that begins now is given up. num_bytes: that it sends."""
    return time.monotonic() + LONGEST_S + num_bytes / UPLOAD_BYTES_PER_S


def in_thread(ask: Callable[[], _T]) -> Future[_T]:
    """Return a request of a library without coroutines: a thread makes it, and is left behind where it never ends."""
    request: Future[_T] = Future()
    request.set_running_or_notify_cancel()

    def run() -> None:
        try:
            request.set_result(ask())
        except BaseException as error:
            request.set_exception(error)

    threading.Thread(target=run, name="request", daemon=True).start()
    return request
