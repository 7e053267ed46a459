"""What long work shares: the Progress callback, and the signals that end a command.

SIGTERM and SIGHUP act like Ctrl-C, and a second signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

Progress = Callable[[int, int, int | None], None]
"""Called by long work, which commands show as a bar and Dagster as log lines: items finished (documents, shards,
files), units done, units in all (tokens or bytes; None if unknown). Each function that takes one names its units."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_caught: dict[signal.Signals, Any] = {}  # the handlers from before


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt with the signal's name; the next one ends the process.

    After a signal the default handlers stay, so that a second signal can end the process during its clean-up; without a
    signal the earlier handlers are restored. An ignored signal stays ignored, as SIGHUP under nohup. A forked child
    ends at any of them. Does nothing outside the main thread, where no handler can be set.
    """
    if threading.current_thread() is not threading.main_thread() or _caught:
        yield
        return
    owner, raised = os.getpid(), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        for each in _caught:
            signal.signal(each, signal.SIG_DFL)
        if os.getpid() != owner:
            os.kill(os.getpid(), number)
            return
        raised = True
        raise KeyboardInterrupt(signal.Signals(number).name)

    try:
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                _caught[number] = signal.signal(number, interrupt)
        yield
    finally:
        if not raised and os.getpid() == owner:
            for each, handler in _caught.items():
                signal.signal(each, handler)
        _caught.clear()


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Let a signal end the process at once, during a long call into C++ that Python handlers cannot interrupt.

    Use it within `interruptible`, for work without results to keep.
    """
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in _caught}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Let processes and threads that start in the block never receive Ctrl-C: this process handles it."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # or the first spawn does that, and unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def say_interrupted(error: KeyboardInterrupt, kept: str = "") -> None:
    """Print to stderr that a command was interrupted, with the signal's name unless it was Ctrl-C, and `kept`."""
    name = str(error)
    by = "" if name in ("", "SIGINT") else f" by {name}"
    with suppress(OSError):  # SIGHUP: the terminal is gone
        print(f"\ninterrupted{by}{kept}", file=sys.stderr, flush=True)
