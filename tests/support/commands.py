"""Run a command line in this process: its exit status, what it prints, and its JSON; which commands there are.

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
from dataclasses import dataclass

import click
import pytest

from niels_gpt import commands
from niels_gpt.commands import cache, prefix_tree, train_tokenizer
from niels_gpt.commands.eagle3 import precompute, respond
from niels_gpt.commands.eagle3 import tools as eagle3
from niels_gpt.commands.main import ROOT
from niels_gpt.commands.settings_flags import settings_of
from niels_gpt.kinds.rows import Stats
from niels_gpt.storage import remedies
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.work import SIGNALS


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self):
        """The one JSON value that it printed."""
        return json.loads(self.out)


def niels_gpt(*argv, env=None, module="", is_terminal=False):
    """Run `niels-gpt ARGV` as the installed script does, and leave this process as it was.

    env: variables of the environment beside those that are there. module: run `python -m MODULE ARGV` instead.
    is_terminal: whether the command takes its output for a terminal.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors, "") for errors in ("strict", "backslashreplace"))
    out.isatty = err.isatty = lambda: is_terminal
    start = importlib.import_module(module).main if module else commands.start
    with _restored(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        os.environ.update(env or {})
        sys.argv = [module or "niels-gpt", *map(str, argv)]
        status = start()
    return Done(status, _text(out), _text(err))


def _text(stream):
    stream.flush()
    return stream.buffer.getvalue().decode()


@contextlib.contextmanager
def _restored():
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
            logger, level = logging.getLogger(name), levels.get(name, logging.NOTSET)
            if logger.level != level:  # setLevel clears what every logger remembers: half the time of a short command
                logger.setLevel(level)
        for number, handler in signals.items():
            signal.signal(number, handler)
        sys.argv = argv
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


# --- which commands there are -----------------------------------------------------------------------------------------


def every_command(group=ROOT, *names):
    """Every command of niels-gpt, by its name in words."""
    found = {}
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if isinstance(command, click.Group):
            found |= every_command(command, *names, name)
        else:
            found[*names, name] = command
    return found


FACES = {
    "": ROOT,
    "niels_gpt.cache.cli": cache.FACE,
    "niels_gpt.eagle3": eagle3.FACE,
    "niels_gpt.eagle3.precompute": precompute.PRECOMPUTE,
    "niels_gpt.eagle3.respond": respond.respond,
    "niels_gpt.prefix_tree": prefix_tree.FACE,
    "niels_gpt.train_tokenizer": train_tokenizer.train,
}
"""What `python -m` runs; niels-gpt itself has no name here."""


def parse(*argv, module=""):
    """Parse the arguments of niels-gpt, or of `python -m MODULE`, without running anything."""
    command = FACES[module]
    while isinstance(command, click.Group):
        command, argv = command.get_command(None, argv[0]), argv[1:]
    return command.make_context(command.name, list(argv))


def build_again(path, code=""):
    """What a damaged cache's error ends in."""
    return remedies.build_again(path, code)


def rebuild_command(path):
    """The command that messages name to build a cache again."""
    return remedies.rebuild_command(path)


def settings_by(*flags):
    """What `build` is to be done with, by its flags."""
    return settings_of(parse("build", *flags).params)


@contextlib.contextmanager
def stats_does(work):
    """Let `niels-gpt stats` do this and print what it returns: for what all commands have in common."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("niels_gpt.kinds.look.stats", lambda *_: Stats(work()))
        yield
