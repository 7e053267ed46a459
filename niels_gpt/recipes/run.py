"""Building several caches in one process: which ones, one after the other, checked; what a command line needs."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from niels_gpt.cache.meta import find_meta
from niels_gpt.fileio import CacheError
from niels_gpt.inspection.contents import Damage
from niels_gpt.inspection.damage import find_damage
from niels_gpt.interrupts import interruptible, say_interrupted
from niels_gpt.recipes import produce
from niels_gpt.recipes.disk import left_bytes, need_of, refuse_without_room
from niels_gpt.recipes.origins import origin_of
from niels_gpt.recipes.own import UsageError, named_by_lines, said_credit
from niels_gpt.recipes.plan import RECIPES, recipes
from niels_gpt.recipes.produce import TOKENIZER_KEY, Outcome, cache_root
from niels_gpt.recipes.report import checked
from niels_gpt.recipes.tokenizer import stage_tokenizer
from niels_gpt.records import printable
from niels_gpt.settings import Settings

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class UnknownSourceError(UsageError):
    """A source that was asked for is not one of those that there are, or none was asked for."""


def chosen_keys(settings: Settings, sources: Sequence[str] | None) -> list[str]:
    """Return the keys, such as sft/oasst1, of some sources and of those of --pretrain and --sft. None: of all.

    Raises: UnknownSourceError; UsageError for a line that is none, those of --licence and --attribution included.
    """
    said_credit(settings, "")
    known = recipes(settings)
    keys = {key.split("/")[1]: key for key in known}
    names = list(keys) if sources is None else [*sources, *named_by_lines(settings)]
    unknown = [name for name in names if name not in keys and name not in known]
    if unknown or not names:
        found = f"no source is called {unknown[0]!r}" if unknown else "no source is named"
        raise UnknownSourceError(f"{found}, expected some of {', '.join(keys)}, or --pretrain or --sft")
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

    outcomes, failures: receive what was built, the tokenizer included, and by its key why a cache was not, as it comes:
        one failing source does not stop the others.
    refresh: ask the hub for its newest revisions. restart: build each from scratch, whatever is there.
    bar: gives a progress callback, or None, for the time of one build.
    Raises: as `stage_tokenizer`.
    """
    if settings.disk_check:
        _refuse_without_room(settings, chosen)
    tokenizer = stage_tokenizer(settings, own_only=not set(chosen) & set(RECIPES), announce=True)
    outcomes.append(tokenizer)
    known = recipes(settings)
    for key in chosen:
        with bar(key) as progress:
            try:
                if restart:
                    produce.restart(settings, key)
                outcome = known[key](settings, refresh=refresh, progress=progress)
                for warning in checked(outcome, settings):
                    print(f"warning: {key}: {printable(warning)}", file=sys.stderr)
                outcomes.append(outcome)
            except Exception as error:
                failures[key] = error
                logging.debug("%s failed", key, exc_info=True)
    installed = cache_root(settings) / TOKENIZER_KEY
    if tokenizer.path.resolve() != installed.resolve():
        print(f"{installed} stays as it was: no cache was built with the new tokenizer", file=sys.stderr)


def _refuse_without_room(settings: Settings, chosen: Sequence[str]) -> None:
    """Refuse before the first byte what does not fit together: the caches that are not there at all."""
    root, needs, left = cache_root(settings), {}, 0
    for key in chosen:
        with contextlib.suppress(OSError, ValueError):  # the build of that source tells
            if not (root / key).is_symlink():
                needs[key] = need_of(settings, key, origin_of(settings, key.split("/")[1]))
                left += left_bytes(root / key)
    refuse_without_room(settings, root, needs, left)


def damage_of(cache: Path, *, deep: bool, progress: Callable[[int, int, int | None], None] | None) -> list[Damage]:
    """Return the damage of any cache of the project, as `find_damage` has it; eagle3/targets has checks of its own.

    deep: read every file; else of an EAGLE-3 cache the headers of its shards alone.
    """
    meta: dict[str, Any] = {}
    with contextlib.suppress(CacheError, OSError, RuntimeError):  # find_damage tells
        meta = find_meta(cache.resolve()) or {}
    if meta.get("kind") != "eagle3":
        return find_damage(cache, deep=deep, progress=progress)
    from niels_gpt.eagle3.verify import verify

    def told(done: int, total: int) -> None:
        if progress is not None:
            progress(0, done, total)

    try:
        verdicts = verify(cache, names=None if deep else ["complete"], progress=told)
    except (CacheError, OSError) as error:  # no manifest that can be read
        return [Damage("", 0, 0, str(error))]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        return [Damage("", 0, 0, f"not as docs/formats.md describes it ({error!r})")]  # the other caches are looked at
    return [Damage("", 0, 0, problem) for verdict in verdicts.values() for problem in verdict.problems]


def give_large_blocks_back() -> None:
    """Let glibc return every freed block of 1 MiB and more to the system at once.

    By default it raises that bound to 32 MiB as it goes, and the holes that encoding long documents leaves add up:
    80 books instead of 8 cost 43 MiB more at the peak, and 15 MiB more with a fixed bound.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc: nothing to be done, nothing lost
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def exit_status(
    command: Callable[[], int | None], errors: tuple[type[Exception], ...] = (ValueError, OSError, ImportError)
) -> int:
    """Run a command of a command line; returns its status, None being 0: 1 with one line for an error of these kinds,
    130 if it is interrupted, and 0 if nobody reads on. A CacheError is a ValueError."""
    try:
        with interruptible():
            status = command()
    except errors as error:
        if isinstance(error, BrokenPipeError) and is_unread("\n"):
            return 0
        logging.getLogger(__name__).debug("", exc_info=True)
        print("error:", "\n".join(map(printable, str(error).split("\n"))), file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        say_interrupted(error)
        return 130
    is_unread()
    return status or 0


def is_unread(more: str = "") -> bool:
    """Write out what was printed, and `more`; returns whether nobody reads it any more, as behind `| head -1`."""
    try:
        print(more, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        return True
    return False


def number_of_tokens(text: str) -> int:
    """Parse a number of tokens: 205M, 1.5G, 300_000. Raises: ValueError."""
    scale = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}.get(text[-1:].lower())
    with contextlib.suppress(ValueError, OverflowError):
        number = int(float(text[:-1] if scale else text) * (scale or 1))
        if number > 0:
            return number
    raise ValueError(f"{text!r}: expected a number of tokens above 0, such as 205M")


def token_position(text: str) -> int:
    """Parse the number of a token: 1_000_000, or as it is printed, 1,000,000. Raises: ValueError."""
    with contextlib.suppress(ValueError):
        return int(text.replace(",", ""))
    raise ValueError(f"{text!r}: expected the number of a token, such as 1_000_000")
