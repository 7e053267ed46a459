"""Build several caches in one process: which ones, one after the other, each checked; and what is printed of it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from niels_gpt.commands.console import print_error, print_warning, progress_bar
from niels_gpt.commands.report import checked, outcomes_table, plan_table, snapshot_lines
from niels_gpt.commands.settings_flags import settings_of
from niels_gpt.recipes import run_recipe
from niels_gpt.recipes.disk import DiskNeed, needed_bytes, refuse_without_room, unfinished_bytes
from niels_gpt.recipes.plan import RECIPES, Plan, plan, recipes
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.recipes.run_recipe import TOKENIZER_KEY, Outcome, cache_root
from niels_gpt.recipes.tokenizer import stage_tokenizer
from niels_gpt.recipes.user_sources import names_in_lines, stated_credit
from niels_gpt.settings import Settings, UsageError

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class UnknownSourceError(UsageError):
    """A source that was asked for does not exist, or none was asked for."""

    code = "E103"


def run_build(arguments: argparse.Namespace) -> int:
    """The commands build and build-all: print what was built, or with --dry-run what would be."""
    settings = settings_of(arguments)
    chosen = chosen_keys(settings, arguments.sources)
    if arguments.dry_run:
        plans = plan(settings, chosen)
        print(plan_table(plans, settings.cache_dir))
        if settings.disk_check:
            _refuse_plans_without_room(settings, plans)
        return 1 if any(item.action.startswith("cannot") for item in plans) else 0
    _return_large_blocks()
    outcomes: list[Outcome] = []
    failures: dict[str, Exception] = {}
    flags = {"refresh": arguments.refresh, "restart": arguments.restart}
    try:
        build_each(settings, chosen, outcomes, failures, bar=lambda key: progress_bar(key, items="documents"), **flags)
    finally:
        if outcomes or failures:
            print(outcomes_table(outcomes, failures))
    return print_failures(failures)


def run_snapshot(arguments: argparse.Namespace) -> int:
    """The command snapshot: print what the snapshot holds and how to build from it; returns the exit status."""
    from niels_gpt.recipes.snapshot import take_snapshot

    settings, where = settings_of(arguments), (arguments.source, arguments.dest)
    _return_large_blocks()
    with progress_bar(f"snapshot {arguments.source}", unit="B", items="rows") as progress:
        folder, manifest = take_snapshot(settings, *where, tokens=arguments.tokens, progress=progress)
    print(snapshot_lines(settings, *where, arguments.tokens, folder, manifest))
    return 0


def chosen_keys(settings: Settings, sources: Sequence[str] | None) -> list[str]:
    """Return the keys, such as sft/oasst1, of some sources and of those of --pretrain and --sft. None: of all.

    Raises: UnknownSourceError; UsageError for a line of a setting that cannot be parsed.
    """
    stated_credit(settings, "")
    known = recipes(settings)
    keys = {key.split("/")[1]: key for key in known}
    names = list(keys) if sources is None else [*sources, *names_in_lines(settings)]
    unknown = [name for name in names if name not in keys and name not in known]
    if unknown or not names:
        problem = f"no source is called {unknown[0]!r}" if unknown else "no source is named"
        raise UnknownSourceError(f"{problem}, expected some of {', '.join(keys)}, or --pretrain or --sft")
    return list(dict.fromkeys(keys.get(name, name) for name in names))


def build_each(
    settings: Settings,
    chosen: Sequence[str],
    outcomes: list[Outcome],
    failures: dict[str, Exception],
    *,
    refresh: bool,
    restart: bool = False,
    bar: Callable[[str], AbstractContextManager[Any]],
) -> None:
    """Build the tokenizer and then each cache, and check it. Warnings go to stderr.

    outcomes: receives what was built, the tokenizer included. failures: receives the errors by a cache's key; one
        failing source does not stop the others.
    refresh: ask the hub for its newest revisions. restart: build each from scratch.
    bar: gives a progress callback, or None, for the time of one build.
    Raises: as `stage_tokenizer`.
    """
    if settings.disk_check:
        _refuse_without_room(settings, chosen)
    tokenizer = stage_tokenizer(settings, user_sources_only=not set(chosen) & set(RECIPES), announce=True)
    outcomes.append(tokenizer)
    known = recipes(settings)
    for key in chosen:
        with bar(key) as progress:
            try:
                if restart:
                    run_recipe.restart(settings, key)
                outcome = known[key](settings, refresh=refresh, progress=progress)
                for warning in checked(outcome, settings):
                    print_warning("W201", f"{key}: {warning}")
                outcomes.append(outcome)
            except Exception as error:
                failures[key] = error
                logging.debug("%s failed", key, exc_info=True)
    installed = cache_root(settings) / TOKENIZER_KEY
    if tokenizer.path.resolve() != installed.resolve():
        print(f"{installed} stays as it was: no cache was built with the new tokenizer", file=sys.stderr)


def print_failures(failures: dict[str, Exception]) -> int:
    """Print a line for each failed cache; returns the exit status."""
    for key, failure in failures.items():
        print_error(failure, of=f"{key}: {type(failure).__name__}: ")
    return 1 if failures else 0


def _refuse_without_room(settings: Settings, chosen: Sequence[str]) -> None:
    """Refuse before the first byte is written what does not fit together: the caches that do not exist yet."""
    root, needs, left = cache_root(settings), {}, 0
    for key in chosen:
        with contextlib.suppress(OSError, ValueError):  # the build of that source reports it
            if not (root / key).is_symlink():
                needs[key] = needed_bytes(settings, resolve_source(settings, key.split("/")[1]))
                left += unfinished_bytes(root / key)
    refuse_without_room(settings, root, needs, left)


def _refuse_plans_without_room(settings: Settings, plans: Sequence[Plan]) -> None:
    root = cache_root(settings)
    needs = {item.key: DiskNeed(item.least_bytes, item.disk_bytes) for item in plans if item.disk_bytes}
    refuse_without_room(settings, root, needs, sum(unfinished_bytes(root / key) for key in needs))


def _return_large_blocks() -> None:
    """Let glibc return every freed block of 1 MiB and more to the system at once.

    By default it raises that bound up to 32 MiB, and the holes that encoding long documents leaves add up: 80 books
    instead of 8 cost 43 MiB more at the peak, and 15 MiB more with a fixed bound.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc: nothing is lost
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
