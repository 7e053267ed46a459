"""Look into finished caches and care for them: list, show, stats, locate, diff, verify, gc.

The functions import heavy modules themselves, so that --help answers at once.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from niels_gpt.commands.console import (
    PATH_OR_URL,
    ExitCode,
    Result,
    argument,
    command,
    escaped,
    is_color_wanted,
    option,
    parsed,
    print_error,
    print_failures,
    progress_bar,
    say,
    token_position,
)
from niels_gpt.storage.errors import CacheError, UsageError

if TYPE_CHECKING:
    from niels_gpt.kinds.urls import Verified

FOLDER = click.Path(path_type=Path)

# --- look inside ------------------------------------------------------------------------------------------------------

_CACHE = argument("cache", type=PATH_OR_URL, help="folder or URL of a cache, such as cache/sft/oasst1")
_TOKENIZER = option("--tokenizer", metavar="MODEL", help="file or folder; default: the tokenizer beside the cache")
_LOCAL = option("--local", type=FOLDER, metavar="DIR", help="for a URL: keep what is fetched in this folder")
_SPLIT = click.Choice(["train", "val"])
_SHOWN = 200  # tokens


def _at_hand(cache: Path | str, local: Path | None) -> Path:
    """Return the folder of a cache; of a URL one that stands for it until the command ends."""
    from niels_gpt.kinds.urls import at_hand

    if isinstance(cache, Path) and local is not None:
        raise UsageError(f"{cache}: --local of a folder on this machine, expected a URL")
    return Path(cache) if isinstance(cache, Path) else click.get_current_context().with_resource(at_hand(cache, local))


def _most_tokens(default: int) -> Callable[..., Any]:
    return option("--tokens", type=int, show_default=str(default), metavar="N", help="print at most N tokens")


@command("list", "List the caches in a folder; damaged ones are marked.", examples="niels-gpt list cache/sample")
@argument(
    "cache_dir", type=PATH_OR_URL, default="cache", help="folder or URL of the caches, such as cache or cache/sample"
)
def list_caches(cache_dir: Path | str) -> Result:
    """List the caches."""
    if not isinstance(cache_dir, Path):
        return _list_at(cache_dir)
    from niels_gpt.commands.report import listed, outcomes_table
    from niels_gpt.recipes.records import recorded_outcomes

    try:
        outcomes, damaged = recorded_outcomes(cache_dir)
    except FileNotFoundError:
        if not (cache_dir / "sample").is_dir():
            raise
        cache_dir = cache_dir / "sample"  # only the sample's caches are built
        outcomes, damaged = recorded_outcomes(cache_dir)
    rows = listed(cache_dir, outcomes, damaged)
    refused = {row["key"]: row["refused"] for row in rows if row["refused"]}
    say(outcomes_table(outcomes, damaged, refused, timed=False))
    print_failures(damaged)
    data = {"folder": str(cache_dir), "caches": rows}
    if not damaged and not refused:
        return Result(data)
    return Result(data, ExitCode.DAMAGED, shlex.join(["niels-gpt", "verify", str(cache_dir)]))


def _list_at(url: str) -> Result:
    """List the caches below a URL."""
    from niels_gpt.commands.report import listed, outcomes_table
    from niels_gpt.kinds.urls import caches_at
    from niels_gpt.kinds.verify import in_short
    from niels_gpt.recipes.records import Outcome

    found = caches_at(url)
    if "" in found:
        remedy = f"Look at it: {shlex.join(['niels-gpt', 'stats', url])}"
        raise UsageError(f"{url}: one cache, not a folder of caches. {remedy}")
    of = [(key, each.meta) for key, each in found.items() if each.meta is not None]
    outcomes = [Outcome(key, Path(key), meta, False, math.nan, None, "") for key, meta in of]
    errors = {key: each.error for key, each in found.items() if each.error is not None}
    damaged: dict[str, Exception] = {key: error for key, error in errors.items() if found[key].meta is None}
    root = url.rstrip("/")
    reasons = {key: in_short(error, f"{root}/{key}") for key, error in errors.items()}
    rows = listed(root, outcomes, damaged, reasons)
    refused = {row["key"]: row["refused"] for row in rows if row["refused"]}
    say(outcomes_table(outcomes, damaged, refused, timed=False))
    print_failures(damaged)
    again = shlex.join(["niels-gpt", "verify", url]) if refused else ""
    return Result({"folder": url, "caches": rows}, ExitCode.DAMAGED if refused else ExitCode.GOOD, again)


@command(
    "stats",
    "Print a cache's sizes, lengths, dropped texts, source and licence.",
    examples="niels-gpt stats cache/sft/oasst1 --plot lengths.png",
)
@_CACHE
@option("--plot", type=FOLDER, metavar="PNG", help="draw the lengths and the share with loss into this file")
@_LOCAL
def stats(cache: Path | str, plot: Path | None, local: Path | None) -> Result:
    """Print the figures of a cache."""
    from niels_gpt.kinds import look

    cache = _at_hand(cache, local)
    with progress_bar("stats", "parts") as progress:
        if plot is not None:
            look.write_plot(cache, plot)
        rows = look.stats(cache, progress)
    say(rows)
    code = ExitCode.DAMAGED if "refused" in dict(rows) else ExitCode.GOOD
    return Result(lambda: look.stats_data(cache), code)


@command(
    "show",
    "Print a piece of a cache as text: a chat with its loss mask, a group of rollouts, or tokens.",
    examples="""niels-gpt show cache/sft/oasst1 --split val --at 3
niels-gpt show s3://BUCKET/wikitext --at 1000      fetches what it shows""",
)
@_CACHE
@option("--split", type=_SPLIT, default="train", help="split to read")
@option("--at", type=int, default=0, metavar="N", help="number of the example, group or, in text, first token")
@option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", help="auto: on a terminal")
@_most_tokens(_SHOWN)
@_TOKENIZER
@_LOCAL
def show(
    cache: Path | str,
    split: str,
    at: int,
    color: str,
    tokens: int | None,
    tokenizer: str | None,
    local: Path | None,
) -> Result:
    """Print a piece of a cache."""
    from niels_gpt.kinds import look
    from niels_gpt.kinds.folders import open_cache

    cache = _at_hand(cache, local)
    is_colored = color == "always" or (color == "auto" and is_color_wanted())
    opened = open_cache(cache)  # reports a wrong path before a missing tokenizer
    model = look.tokenizer_for(opened, tokenizer, is_needed=opened.kind.needs_tokenizer)
    most = opened.kind.shown if tokens is None else tokens
    where: dict[str, Any] = {"split": split, "position": at}
    say(lambda: look.show(cache, model, **where, num_tokens=most, color=is_colored), is_safe=True)
    return Result(lambda: look.show_data(cache, model, **where, num_tokens=tokens))


@command(
    "diff",
    "Compare the settings and documents of two caches.\n\nThe exit code is 1 if they differ.",
    examples="niels-gpt diff cache/sft/oasst1 OTHER/sft/oasst1",
)
@argument("a", type=PATH_OR_URL, help="folder of a cache, or of one of its versions; or a URL")
@argument("b", type=PATH_OR_URL, help="folder of a cache, or of one of its versions; or a URL")
@option("--limit", type=int, default=10, metavar="N", help="name at most N documents for each kind of difference")
def diff(a: Path | str, b: Path | str, limit: int) -> Result:
    """Compare two caches."""
    from niels_gpt.commands.report import difference_lines
    from niels_gpt.kinds.diff import diff, is_equal
    from niels_gpt.kinds.folders import open_cache
    from niels_gpt.kinds.look import tokenizer_for

    first, second = (_at_hand(cache, None) for cache in (a, b))
    tokenizers = [tokenizer_for(open_cache(cache)) for cache in (first, second)]
    found = diff(first, second, tokenizers=tokenizers, limit=limit)
    say(difference_lines(found))
    return Result(found, ExitCode.GOOD if is_equal(found) else ExitCode.FAILED)


@command(
    "locate",
    "Find the document of a token: its text around the token, and its source.",
    examples="niels-gpt locate cache/pretrain/wikitext train 1_000_000",
)
@_CACHE
@argument("split", type=_SPLIT, help="train or val")
@argument("position", type=parsed(token_position), help="number of the token in the split, from 0, such as 1_000_000")
@_most_tokens(_SHOWN)
@_TOKENIZER
@_LOCAL
def locate(
    cache: Path | str, split: str, position: int, tokens: int | None, tokenizer: str | None, local: Path | None
) -> Result:
    """Print a document."""
    from niels_gpt.kinds import look
    from niels_gpt.kinds.folders import open_cache

    cache = _at_hand(cache, local)
    model = look.tokenizer_for(open_cache(cache), tokenizer)
    where: dict[str, Any] = {"split": split, "position": position}
    most = _SHOWN if tokens is None else tokens
    say(lambda: look.locate(cache, model, **where, num_tokens=most), is_safe=True)
    return Result(lambda: look.locate_data(cache, model, **where, num_tokens=tokens))


# --- care -------------------------------------------------------------------------------------------------------------


@command(
    "verify",
    "Check caches for damage; names each damaged file and its bytes.",
    examples="""niels-gpt verify cache --deep
niels-gpt verify s3://BUCKET/wikitext      all sizes, and a sample of blocks""",
)
@argument("path", type=PATH_OR_URL, nargs=-1, required=True, help="a cache, or a folder of caches; paths or URLs")
@option("--deep", is_flag=True, help="read all bytes: checks checksums, ids, offsets and loss masks")
def verify(path: tuple[Path | str, ...], deep: bool) -> Result:
    """Check caches."""
    from niels_gpt.commands.report import damage_lines
    from niels_gpt.kinds.folders import caches_of
    from niels_gpt.kinds.verify import find_damage
    from niels_gpt.recipes.records import TOKENIZER_KEY
    from niels_gpt.storage.mounted import is_url
    from niels_gpt.storage.remedies import push_command

    caches, errors = caches_of(each for each in path if isinstance(each, Path))
    urls = _verified([each for each in path if isinstance(each, str)], errors, deep=deep)
    for error in errors.values():  # the other caches are checked
        print_error(error)
    found: dict[str, Any] = {}
    for name, error in errors.items():
        failed = [{"file": "", "offset": 0, "end": 0, "problem": str(error)}]
        found[name] = {"damages": failed, "compared": {}} if is_url(name) else failed
    damaged: list[Path] = []
    for cache in caches:
        with progress_bar(escaped(cache), unit="B", items="files") as progress:
            damages = find_damage(cache, deep=deep, progress=progress)
        found[str(cache)] = [damage._asdict() for damage in damages]
        damaged += [cache] if damages else []
        say(damage_lines(cache, damages))
    for url, verified in urls.items():
        found[url] = {"damages": [damage._asdict() for damage in verified.damages], "compared": verified.compared}
    if damaged:
        first = next((cache for cache in damaged if cache.name == TOKENIZER_KEY), damaged[0])  # what builds need
        return Result(found, ExitCode.DAMAGED, _remedy(first, found[str(first)][0]))
    if bad := {url: verified for url, verified in urls.items() if verified.damages}:
        mended = next((url for url, verified in bad.items() if verified.is_mended_by_push), None)
        return Result(found, ExitCode.DAMAGED, "" if mended is None else push_command(mended))
    return Result(found, ExitCode.FAILED if errors else ExitCode.GOOD)


def _verified(urls: Iterable[str], errors: dict[str, Exception], *, deep: bool) -> dict[str, Verified]:
    """Check and print the caches below some URLs. errors: gets the error of a URL without caches."""
    from niels_gpt.commands.report import damage_lines
    from niels_gpt.kinds.urls import caches_at, find_damage_at

    found: dict[str, Verified] = {}
    for url in urls:
        try:
            for key, listed in caches_at(url).items():
                cache = f"{url.rstrip('/')}/{key}".rstrip("/")
                try:
                    with progress_bar(escaped(cache), unit="B", items="files") as progress:
                        found[cache] = find_damage_at(cache, listed, deep=deep, progress=progress)
                except CacheError as error:
                    if error.code not in ("E208", "E610"):
                        raise
                    errors[cache] = error  # of this one alone
                    continue
                say(f"{damage_lines(cache, found[cache].damages)}\n  {found[cache]}")
        except (CacheError, OSError) as error:
            errors[url] = error
    return found


def _remedy(cache: Path, first: dict[str, Any]) -> str:
    """Return the command that rebuilds a damaged cache, or the partition with the first damage.

    Returns "" for a copy and for a cache that another program wrote.
    """
    from niels_gpt.paths import FAMILIES
    from niels_gpt.recipes.records import TOKENIZER_KEY
    from niels_gpt.recipes.unit_plans import partition_at
    from niels_gpt.storage.remedies import is_copy, rebuild_command, remake_command
    from niels_gpt.storage.versions import versions_dir

    if is_copy(cache):
        return ""
    if cache.name == TOKENIZER_KEY:
        return remake_command(cache)
    is_built = cache.is_symlink() or os.path.lexists(versions_dir(cache))  # else another program has written it
    if not is_built or cache.parent.name not in FAMILIES:
        return ""
    return rebuild_command(cache, partition_at(cache, first["file"], first["offset"], first["end"]))


@command("gc", "Remove old versions of caches and leftovers of killed builds.", examples="niels-gpt gc cache --dry-run")
@argument("cache_dir", type=FOLDER, help="folder of the caches, such as cache")
@option("--dry-run", is_flag=True, help="print what would be removed, and remove nothing")
@option("--unsealed", is_flag=True, help="also remove unsealed partitions that are less than a week old")
def gc(cache_dir: Path, dry_run: bool, unsealed: bool) -> Result:
    """Remove files that no cache needs."""
    from niels_gpt.kinds.folders import refuse_without_caches
    from niels_gpt.recipes.gc import FAILED, collect

    refuse_without_caches(cache_dir)
    lines: list[str] = []
    for line in collect(cache_dir, dry_run=dry_run, unsealed=unsealed):
        say(line)
        lines.append(line)
    if not lines:
        say("nothing to remove")
    failed = any(line.startswith(FAILED) for line in lines)
    again = (
        shlex.join(["niels-gpt", "gc", str(cache_dir), *(["--unsealed"] if unsealed else [])])
        if any(line.startswith("would remove") for line in lines)
        else ""
    )
    return Result({"lines": lines}, ExitCode.FAILED if failed else ExitCode.GOOD, again)
