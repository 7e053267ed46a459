"""Run a command line in this process: its exit status, what it prints, and its JSON.

Signals, pipes that nobody reads and what a start imports need a process; the tests of these start one.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt import commands
from niels_gpt.interrupts import SIGNALS
from niels_gpt.storage.codes import CodedWarning


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value that it printed."""
        return json.loads(self.out)


def niels_gpt(*argv: str | Path, env: dict[str, str] | None = None, module: str = "") -> Done:
    """Run `niels-gpt ARGV` as the installed script does, and leave this process as it was.

    env: variables of the environment beside those that are there. module: run `python -m MODULE ARGV` instead.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors, "") for errors in ("strict", "backslashreplace"))
    start = importlib.import_module(module).main if module else commands.start
    with _restored(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        os.environ.update(env or {})
        sys.argv = [module or "niels-gpt", *map(str, argv)]
        status = start()
    return Done(status, _text(out), _text(err))


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Begin with the logging of a fresh process, and restore what a command changes in its process."""
    root, argv, environment = logging.getLogger(), sys.argv, dict(os.environ)
    level, handlers = root.level, root.handlers[:]
    levels = {name: logging.getLogger(name).level for name in list(root.manager.loggerDict)}
    is_main = threading.current_thread() is threading.main_thread()  # elsewhere no handler can be set
    signals = {number: signal.getsignal(number) for number in SIGNALS if is_main}
    root.handlers[:] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", CodedWarning)  # a command prints it; any other warning is an error here
            yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        for name in list(root.manager.loggerDict):
            logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
        for number, handler in signals.items():
            signal.signal(number, handler)
        sys.argv = argv
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
