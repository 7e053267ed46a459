"""Build several caches in one process, one after the other, check each, and print the results.

Decides which caches a command line names, and which are refused or left out before the first build.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from niels_gpt.commands.console import (
    ExitCode,
    Result,
    escaped,
    print_failures,
    print_warning,
    progress_bar,
    say,
    tell,
)
from niels_gpt.commands.report import checked, listed, notices, outcome_line, outcomes_table, plan_table, snapshot_lines
from niels_gpt.data.exclude import read_exclusion
from niels_gpt.kinds.kind import Kind, has_partitions, kind_of_key, look_command
from niels_gpt.recipes.disk import free_bytes, needed_bytes, refuse_without_room, unfinished_bytes
from niels_gpt.recipes.family import family_of
from niels_gpt.recipes.plan import HOME_OF, RECIPES, Plan, every_recipe, needs_tokenizer, plan, recipes
from niels_gpt.recipes.records import TOKENIZER_KEY, Outcome, cache_root
from niels_gpt.recipes.request import restart as start_over
from niels_gpt.recipes.resolve import ResolvedSource, resolve_source
from niels_gpt.recipes.tokenizer import (
    ended_caches,
    expected_vocab_size,
    needs_sentinels,
    no_sentinels,
    stage_tokenizer,
    tokenizer_state,
    usable_tokenizer,
    with_all_asked,
)
from niels_gpt.recipes.units import BUILT_WHOLE
from niels_gpt.recipes.user_sources import names_in_lines, stated_credit
from niels_gpt.settings import Settings
from niels_gpt.storage.codes import code_of
from niels_gpt.storage.errors import UsageError
from niels_gpt.storage.meta_json import shortened
from niels_gpt.storage.remedies import did_you_mean
from niels_gpt.work import Progress

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_SHOWN = 3  # entries that a warning names


class UnknownSourceError(UsageError):
    """An unknown source, or no source at all."""

    code = "E103"


def build_caches(
    settings: Settings,
    sources: Sequence[str] | None,
    *,
    dry_run: bool,
    refresh: bool,
    restart: bool,
    yes: bool = False,
    in_partitions: Callable[..., Outcome] | None = None,
) -> Result:
    """Build caches and print the results; with `dry_run`, print the plan instead.

    sources: names, or None for all. yes: see `agreed`. in_partitions: see `build_each`.
    Raises: UsageError for --partitions if no named cache can have partitions, for unknown sources, and where
        `agreed` refuses; NoRoomError E501 if the caches do not fit on the disk.
    """
    chosen = chosen_keys(settings, sources)
    if settings.partitions > 1 and not any(map(has_partitions, chosen)):
        have = "only caches of text, chats and recorded rollouts, and eagle3/targets, have partitions"
        raise UsageError(f"--partitions {settings.partitions}: {have}, not {', '.join(chosen)}. Leave the flag out")
    settings = with_all_asked(settings, explicit_options())
    if dry_run:
        return _planned(settings, chosen, of_all=sources is None)
    agreed(settings, chosen, yes=yes)
    _return_large_blocks()
    outcomes: list[Outcome] = []
    failures: dict[str, Exception] = {}
    flags: dict[str, Any] = {"refresh": refresh, "restart": restart, "of_all": sources is None}
    flags["in_partitions"] = in_partitions
    try:
        build_each(settings, chosen, outcomes, failures, bar=bar_of, **flags)
    finally:
        if outcomes or failures:
            print_built(outcomes, failures)
    unmatched = _unmatched(settings, outcomes, failures)
    return Result(
        lambda: {"caches": built_rows(settings, outcomes, failures), **unmatched},
        print_failures(failures),
        "" if failures else _look(settings, outcomes),
    )


def explicit_options() -> list[str]:
    """Return the settings whose options are on the command line."""
    context = click.get_current_context(silent=True)
    written = click.core.ParameterSource.COMMANDLINE
    return [] if context is None else [name for name in context.params if context.get_parameter_source(name) is written]


def agreed(settings: Settings, chosen: Sequence[str], *, yes: bool) -> None:
    """Ask before the build replaces a tokenizer that other finished caches need. `yes` answers the question.

    Raises: UsageError E412 if the answer is no, or there is no terminal to ask on.
    """
    if yes or not any(needs_tokenizer(settings, key) for key in chosen):
        return
    state = tokenizer_state(settings)
    ended = [] if state.startswith(("up to date", "cannot be used")) else ended_caches(settings, chosen)
    if not ended:
        return
    path = cache_root(settings) / TOKENIZER_KEY
    problem = f"{path} would be replaced: readers then refuse {', '.join(ended)} until they are built again"
    can_ask = sys.stdin.isatty() and sys.stderr.isatty()
    if can_ask and click.confirm(f"{problem}. Replace it?", err=True):
        return
    remedy = "Build them in the same command, name another --cache-dir, or agree with --yes"
    raise UsageError(f"{problem}. {remedy}", code="E412")


def _unmatched(
    settings: Settings, outcomes: Sequence[Outcome], failures: Mapping[str, Exception]
) -> dict[str, list[str]]:
    """Warn (W313) of entries of --exclude that match no document, and return them, ready for JSON.

    Returns {} if they are unknown: this process has not read every source from its beginning.
    """
    if settings.exclude is None or failures or settings.partitions > 1:
        return {}
    exclusion = read_exclusion(settings.exclude)
    reused = [outcome.path for outcome in outcomes if outcome.reused and outcome.key != TOKENIZER_KEY]
    if exclusion.resumed or not exclusion.absent.keys() >= {*reused}:
        return {}
    unmatched = sorted(
        (exclusion.entries - exclusion.matched).intersection(*(exclusion.absent[path] for path in reused))
    )
    if unmatched:
        shown = ", ".join(map(shortened, unmatched[:_SHOWN])) + (", ..." if len(unmatched) > _SHOWN else "")
        number = f"{len(unmatched):,} of its {len(exclusion.entries):,} entries"
        print_warning("W313", f"{settings.exclude}: {number} match no document: {shown}")
    return {"unmatched_exclude": unmatched}


def bar_of(key: str) -> AbstractContextManager[Progress]:
    """Return a context that yields a progress callback for the build of a cache."""
    return progress_bar(key, items=(kind_of_key(key) or Kind).counted)


def built_rows(
    settings: Settings, outcomes: Sequence[Outcome], failures: Mapping[str, Exception]
) -> list[dict[str, Any]]:
    """Return the rows of `listed`, and a row with the error for each failed cache, ready for JSON."""
    failed = [
        {"key": key, "state": "failed", "error": {"code": code_of(error), "message": str(error)}}
        for key, error in failures.items()
    ]
    return [*listed(cache_root(settings), outcomes, {}), *failed]


def _planned(settings: Settings, chosen: list[str], *, of_all: bool) -> Result:
    plans, failures = plan(settings, chosen), dict[str, Exception]()
    say(plan_table(plans, settings.cache_dir))
    _configured(settings, chosen, failures, of_all=of_all)
    if settings.disk_check:
        _refuse_plans_without_room(settings, plans)
    failing = ("cannot",) if of_all else ("cannot", "left out")
    code = ExitCode.FAILED if any(item.action.startswith(failing) for item in plans) else ExitCode.GOOD
    return Result(
        {"caches": [asdict(item) for item in plans], "free_bytes": free_bytes(Path(settings.cache_dir))},
        max(code, print_failures(failures)),
    )


def print_built(outcomes: Sequence[Outcome], failures: Mapping[str, Exception] = MappingProxyType({})) -> None:
    """Print a table of the caches; for a single cache one line, after a line for a new tokenizer."""
    caches = [outcome for outcome in outcomes if outcome.key != TOKENIZER_KEY]
    if failures or len(caches) != 1:
        say(outcomes_table(outcomes, failures))
        return
    new = [outcome for outcome in outcomes if outcome in caches or not outcome.reused]
    say("\n".join([*map(outcome_line, new), *filter(None, map(notices, new))]))


def _look(settings: Settings, outcomes: Sequence[Outcome]) -> str:
    """Return the command that looks into the last cache; an eagle3 cache only if there is no other."""
    built = [outcome.key for outcome in outcomes if outcome.key != TOKENIZER_KEY and outcome.meta.get("built", True)]
    built.sort(key=lambda key: key not in HOME_OF)
    if not built:
        return ""
    return look_command(built[-1], cache_root(settings) / built[-1])


def take(settings: Settings, source: str, dest: Path, tokens: int | None) -> Result:
    """Take a snapshot, and print its contents and the command that builds from it."""
    from niels_gpt.recipes.snapshot import take_snapshot

    _return_large_blocks()
    with progress_bar(f"snapshot {source}", unit="B", items="rows") as progress:
        folder, manifest = take_snapshot(settings, source, dest, tokens=tokens, progress=progress)
    line, build_from_it = snapshot_lines(settings, source, dest, tokens, folder, manifest)
    say(line)
    return Result({"folder": str(folder), **manifest}, next=build_from_it)


def chosen_keys(settings: Settings, sources: Sequence[str] | None) -> list[str]:
    """Return the keys of some sources, and of the sources in settings such as --pretrain. sources: None for all.

    A source's name stands for its cache of tokens: oasst1 is sft/oasst1. Other caches are named by their keys, such as
    trees/oasst1. The eagle3 caches come last.
    Raises: UnknownSourceError E103; UsageError for a setting that cannot be parsed.
    """
    stated_credit(settings, "")
    known, of_tokens = every_recipe(settings), recipes(settings)
    keys = {key.split("/")[1]: key for key in reversed(of_tokens)}  # the first key of a name counts
    names = list(keys) if sources is None else [*sources, *names_in_lines(settings)]
    unknown = [name for name in names if name not in keys and name not in known]
    if unknown or not names:
        problem = f"no source is called {unknown[0]!r}" if unknown else "no source is named"
        near = did_you_mean(unknown[0], _names(known)) if unknown else ""
        expected = f"expected some of {', '.join(_names(known))}, or --pretrain, --sft or --rollouts"
        raise UnknownSourceError(f"{problem}.{near} E{expected[1:]}" if near else f"{problem}, {expected}")
    every = list(known) if sources is None else [keys.get(name, name) for name in names]
    return [*dict.fromkeys(key for key in every if key not in HOME_OF), *(key for key in HOME_OF if key in every)]


def _names(known: Iterable[str]) -> list[str]:
    """Return the names of caches on a command line: the source, or the key if another cache has that name."""
    keys: dict[str, str] = {}
    for key in known:
        keys.setdefault(key if key in HOME_OF or key.split("/")[1] in keys else key.split("/")[1], key)
    return list(keys)


def build_each(
    settings: Settings,
    chosen: Sequence[str],
    outcomes: list[Outcome],
    failures: dict[str, Exception],
    *,
    refresh: bool,
    restart: bool = False,
    of_all: bool = False,
    in_partitions: Callable[..., Outcome] | None = None,
    bar: Callable[[str], AbstractContextManager[Any]],
) -> None:
    """Build the tokenizer if a cache needs one, then build and check each cache. Prints warnings to stderr.

    outcomes: receives the finished caches, the tokenizer included. failures: receives errors by key; after a failed
        cache the others are built.
    refresh: use the hub's newest revisions. restart: build from scratch. of_all: leave out with a warning chats that
        the tokenizer has no sentinels for, and eagle3 caches without a target; otherwise they fail.
    in_partitions: builds and seals a cache in partitions instead of its recipe, which does so in this process; called
        with settings, name (the key), refresh and progress.
    bar: returns a context that yields a progress callback, or None, for one build.
    Raises: ValueError and OSError of the tokenizer and of settings that no cache of a family can be built with.
    """
    chosen = _configured(settings, chosen, failures, of_all=of_all)
    found = _resolved(settings, [key for key in chosen if key not in HOME_OF])
    if settings.disk_check:
        _refuse_without_room(settings, found)
    known = every_recipe(settings)
    tokenizer = _staged(settings, chosen, refresh=refresh)
    left_out = list[str]()
    if tokenizer is not None:
        outcomes.append(tokenizer)
        left_out = _without_sentinels(settings, chosen, tokenizer) if of_all else []
    installed = cache_root(settings) / TOKENIZER_KEY
    is_split = settings.partitions > 1
    if whole := [key for key, source in found.items() if is_split and not source.is_partitioned(settings)]:
        print_warning("W505", f"{', '.join(whole)}: {BUILT_WHOLE}")
    for key, recipe in ((key, known[key]) for key in chosen if key not in left_out):
        if tokenizer is not None and installed.resolve() == tokenizer.path.resolve():
            settings = replace(settings, retrain_tokenizer=False)  # it is trained and installed by now
        if in_partitions is not None and key not in whole and has_partitions(key):
            recipe = partial(in_partitions, name=key)
        with bar(key) as progress:
            try:
                if restart:
                    start_over(settings, key)
                own = replace(settings, partitions=1) if key in whole else settings
                outcome = recipe(own, refresh=refresh, progress=progress)
                for code, warning in checked(outcome, settings):
                    print_warning(code, f"{key}: {warning}")
                outcomes.append(outcome)
            except Exception as error:
                failures[key] = error
                logging.debug("%s failed", key, exc_info=True)
    if tokenizer is not None and tokenizer.path.resolve() != installed.resolve():
        state = "stays as it was" if os.path.lexists(installed) else "is not there yet"
        tell(escaped(f"{installed} {state}: no cache was built with the new tokenizer"))
        outcomes.remove(tokenizer)


def _staged(settings: Settings, chosen: Sequence[str], *, refresh: bool) -> Outcome | None:
    """Return the tokenizer of the chosen caches, trained if it is missing; None if no cache needs one.

    Settings that no cache of a chosen family can be built with are refused first.
    """
    for family in {family_of(key) for key in chosen if key not in HOME_OF}:
        family.check_early(settings)
    if not any(needs_tokenizer(settings, key) for key in chosen):
        return None
    is_users_own = not set(chosen) & {*RECIPES, *HOME_OF}
    how = {"user_sources_only": is_users_own, "announce": True, "refresh": refresh}
    return stage_tokenizer(settings, **how, from_scratch=settings.retrain_tokenizer)


def _configured(
    settings: Settings, chosen: Sequence[str], failures: dict[str, Exception], *, of_all: bool
) -> Sequence[str]:
    """Return the keys that can be built. The others become failures; with `of_all` they are left out with a warning."""
    problems = {key: problem for key in chosen if key in HOME_OF and (problem := HOME_OF[key].left_out(settings))}
    if not of_all:
        failures.update(problems)
    for problem in {type(each): each for each in problems.values()}.values() if of_all else ():
        keys = " and ".join(key for key, each in problems.items() if type(each) is type(problem))
        print_warning("W513", f"{keys} left out: {problem}", is_counted=problem.is_asked)
    return [key for key in chosen if key not in problems]


def _without_sentinels(settings: Settings, chosen: Sequence[str], tokenizer: Outcome) -> list[str]:
    """Return the chosen keys that need sentinels which the tokenizer lacks, and warn of them."""
    ids = tokenizer.meta["special_token_ids"]

    def lacks(key: str) -> bool:
        if key in HOME_OF:
            return not ids and needs_tokenizer(settings, key)
        return needs_sentinels(settings, key.split("/")[0], ids)

    found = [key for key in chosen if lacks(key)]
    if found:
        reason = no_sentinels(settings, found, tokenizer.path)
        print_warning("W411", f"{', '.join(found)} left out: {reason}")
    return found


def _resolved(settings: Settings, keys: Iterable[str]) -> dict[str, ResolvedSource]:
    """Return the sources of caches by key, as they are before the first build; without those that cannot be read."""
    found = {}
    for key in keys:
        with contextlib.suppress(OSError, ValueError):  # the build of that source reports it
            found[key] = resolve_source(settings, key)
    return found


def _refuse_without_room(settings: Settings, found: Mapping[str, ResolvedSource]) -> None:
    """Refuse the build, before the first byte, if the caches that do not exist yet do not fit on the disk together."""
    root, tokenizer = cache_root(settings), None
    with contextlib.suppress(OSError, ValueError):  # the build of the tokenizer reports it
        tokenizer = usable_tokenizer(settings)
    num_ids = expected_vocab_size(settings, tokenizer)
    new = {key: source for key, source in found.items() if not (root / key).is_symlink()}
    needs = {key: needed_bytes(settings, source, num_ids) for key, source in new.items()}
    refuse_without_room(settings, root, needs, sum(unfinished_bytes(root / key) for key in needs))


def _refuse_plans_without_room(settings: Settings, plans: Sequence[Plan]) -> None:
    root = cache_root(settings)
    needs = {item.key: item.disk_bytes for item in plans if item.disk_bytes and item.key != TOKENIZER_KEY}
    refuse_without_room(settings, root, needs, sum(unfinished_bytes(root / key) for key in needs))


def _return_large_blocks() -> None:
    """Let glibc return every freed block of 1 MiB and more to the system at once.

    By default glibc raises this bound up to 32 MiB, and the holes left by long documents add up: 80 books instead of 8
    cost 43 MiB more at the peak, but only 15 MiB more with a fixed bound.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc: nothing is lost
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
