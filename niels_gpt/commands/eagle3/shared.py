"""What the commands for finished EAGLE-3 caches share: their errors, and the argument CACHE."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from niels_gpt.commands.console import ERRORS, Result, argument, option
from niels_gpt.commands.console import command as any_command

command = partial(any_command, errors=(*ERRORS, RuntimeError), level=logging.WARNING)
PATH = click.Path(path_type=Path)


def of_cache(function: Callable[..., Result]) -> Callable[..., Result]:
    """Add the argument CACHE and the flag --follow-links to a command's function."""
    text = "read files that are symbolic links, as in a snapshot of the Hugging Face hub; refused otherwise"
    function = option("--follow-links", is_flag=True, help=text)(function)
    return argument("cache", type=PATH, help="folder of a cache, with its manifest.json")(function)
