"""Build token caches and look into them.

    python -m niels_gpt.cache.cli build-all --cache-dir cache --seed 42       every cache
    python -m niels_gpt.cache.cli build roam oasst1 --source-root MIRROR      some caches
    python -m niels_gpt.cache.cli build --pretrain notes=~/notes              a cache of your own text: pretrain/notes
    python -m niels_gpt.cache.cli build --sft chats='shared/*.json'           a cache of your own chats: sft/chats
    python -m niels_gpt.cache.cli snapshot fineweb_edu MIRROR --tokens 205M   keep raw text, for builds offline
    python -m niels_gpt.cache.cli build-all --source-root sample --dry-run    what would be done
    python -m niels_gpt.cache.cli list cache                                  what is there, and what readers refuse
    python -m niels_gpt.cache.cli stats cache/sft/oasst1                      lengths, drops, licence of one cache
    python -m niels_gpt.cache.cli show cache/sft/oasst1 --split val --at 3    an example with its loss mask
    python -m niels_gpt.cache.cli verify cache --deep                         every damage, with its file and bytes
    python -m niels_gpt.cache.cli diff cache/sft/oasst1 OTHER/sft/oasst1      settings and documents that differ
    python -m niels_gpt.cache.cli locate cache/sft/oasst1 train 1_000_000     the document at a token
    python -m niels_gpt.cache.cli gc cache --dry-run                          old versions that could be removed

Exit status: 0 good, 1 something failed, is damaged, differs or was interrupted, 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.cache.meta import find_meta
from niels_gpt.commands.build import print_failures, run_build, run_snapshot
from niels_gpt.commands.console import (
    as_json,
    escaped,
    exit_status,
    log_to_stderr,
    number_of_tokens,
    print_error,
    progress_bar,
    table,
    token_position,
)
from niels_gpt.commands.report import damage_lines, difference_lines, listed, outcomes_table
from niels_gpt.commands.settings_flags import add_settings_flags
from niels_gpt.inspection.file_checks import Damage
from niels_gpt.inspection.verify import find_damage
from niels_gpt.progress import Progress
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import resolved


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with arguments, default those of the process; returns the exit status."""
    arguments = _parser().parse_args(argv)
    log_to_stderr()
    return exit_status(lambda: arguments.run(arguments), interrupted=1, kept=arguments.kept)


def _typed(parse: Callable[[str], int]) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        try:
            return parse(text)
        except ValueError as error:  # of which argparse would not print the message
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m niels_gpt.cache.cli", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(run=run, kept="")
        return added

    _add_builders(command)
    _add_viewers(command)
    gc = command("gc", "remove old versions and dead builds", _gc)
    gc.add_argument("cache_dir", type=Path, help="folder of the caches, such as cache")
    gc.add_argument("--dry-run", action="store_true", help="print what would be removed")
    return parser


def _add_builders(command: Callable[..., argparse.ArgumentParser]) -> None:
    from niels_gpt.recipes.plan import RECIPES
    from niels_gpt.recipes.snapshot import READS, SPLITS

    build_all = command("build-all", "build every cache of tokens; not eagle3/targets, which Dagster builds", run_build)
    build_all.set_defaults(sources=None)
    build = command("build", "build some caches", run_build)
    names = ", ".join(key.split("/")[1] for key in RECIPES)
    build.add_argument("sources", nargs="*", metavar="SOURCE", help=f"some of {names}, and of those of sources.toml")
    for builder in (build_all, build):
        builder.set_defaults(kept=". What was finished is kept; the same command resumes the build in progress")
        builder.add_argument("--dry-run", action="store_true", help="print what would be built and the disk it needs")
        text = "build from scratch, without what is there: finished or not, it is done once more"
        builder.add_argument("--restart", action="store_true", help=text)
        builder.add_argument("--refresh", action="store_true", help="ask the hub for its newest revisions")
        add_settings_flags(builder)
    snapshot = command("snapshot", "keep the raw text of a hub source once, for builds without network", run_snapshot)
    snapshot.set_defaults(kept=". The files that were finished are kept; the same command resumes")
    snapshot.epilog = (
        "Builds with --source-root DEST read it instead of the hub. The same command resumes an interrupted snapshot, "
        "and with more tokens extends it; rows that it has are read again from the hub, but not written."
    )
    snapshot.add_argument("source", metavar="SOURCE", help=f"one of {', '.join(SPLITS)}")
    snapshot.add_argument("dest", type=Path, metavar="DEST", help="folder of the mirror; other sources may be there")
    text = "for builds of so many tokens, as 205M (default: both token budgets)"
    snapshot.add_argument("--tokens", type=_typed(number_of_tokens), metavar="N", help=text)
    add_settings_flags(snapshot, only=READS)


def _add_viewers(command: Callable[..., argparse.ArgumentParser]) -> None:

    listing = command("list", "print a table of the caches", _list)
    listing.add_argument("cache_dir", type=Path, help="folder of the caches, such as cache or cache/sample")
    stats = command("stats", "print the sizes, lengths, drops, source and licence of a cache", _stats)
    show = command("show", "print a decoded piece of a cache", _show)
    verify = command("verify", "name every damage of a cache with its file and bytes", _verify)
    diff = command("diff", "print the settings and documents in which two caches differ", _diff)
    locate = command("locate", "print the document at a token, and where it came from", _locate)
    for viewer in (stats, show, locate):
        viewer.add_argument("cache", type=Path, metavar="CACHE", help="folder of a cache, such as cache/sft/oasst1")
    stats.add_argument("--plot", type=Path, metavar="PNG", help="draw the lengths, and the share with loss, there")
    show.add_argument("--split", choices=("train", "val"), default="train", help="(default: train)")
    show.add_argument("--at", type=int, default=0, metavar="N", help="token position, or number of an sft example")
    show.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="(default: auto)")
    verify.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a cache, or a folder of caches")
    verify.add_argument("--deep", action="store_true", help="read every file: checksums, ids, offsets, loss mask")
    for name in "ab":
        diff.add_argument(name, type=Path, metavar=name.upper(), help="folder of a cache, or of one of its versions")
    diff.add_argument("--limit", type=int, default=10, metavar="N", help="documents named of each kind (default: 10)")
    for machine in (listing, stats, verify, diff):
        machine.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    locate.add_argument("split", choices=("train", "val"), metavar="SPLIT", help="train or val")
    locate.add_argument(
        "position", type=_typed(token_position), metavar="POSITION", help="token of the split, from 0: 1_000_000"
    )
    for viewer, tokens in ((show, 200), (locate, 2_000)):
        text = f"tokens to print, at most (default: {tokens})"
        viewer.add_argument("--tokens", type=int, default=tokens, metavar="N", help=text)
        viewer.add_argument("--tokenizer", metavar="MODEL", help="spm.model (default: the one beside the cache)")


def _list(arguments: argparse.Namespace) -> int:
    from niels_gpt.recipes.run_recipe import recorded_outcomes

    outcomes, damaged = recorded_outcomes(arguments.cache_dir)
    rows = listed(arguments.cache_dir, outcomes, damaged)
    refused = {row["key"]: row["refused"] for row in rows if row["refused"]}
    print(as_json(rows) if arguments.json else outcomes_table(outcomes, damaged, refused))
    return print_failures(damaged) or (1 if refused else 0)


def _stats(arguments: argparse.Namespace) -> int:
    from niels_gpt.inspection.plot import write_plot
    from niels_gpt.inspection.stats import summary

    if arguments.plot is not None:
        write_plot(arguments.cache, arguments.plot)
    rows = summary(arguments.cache)
    print(as_json(dict(rows)) if arguments.json else table(rows))
    return 1 if "refused" in dict(rows) else 0


def _show(arguments: argparse.Namespace) -> int:
    from niels_gpt.inspection.show import show, tokenizer_of

    color = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
    tokenizer = tokenizer_of(arguments.cache, arguments.tokenizer)
    where = {"split": arguments.split, "position": arguments.at}
    print(show(arguments.cache, tokenizer, **where, num_tokens=arguments.tokens, color=color))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from niels_gpt.inspection.caches import caches_of

    caches, errors = caches_of(arguments.paths)
    for error in errors.values():  # the others are looked at
        print_error(error)
    found = {path: [Damage("", 0, 0, str(error))._asdict()] for path, error in errors.items()}
    for cache in caches:
        with progress_bar(escaped(cache), unit="B", items="files") as progress:
            damages = _damage_of(cache, deep=arguments.deep, progress=progress)
        found[str(cache)] = [damage._asdict() for damage in damages]
        if not arguments.json:
            print(damage_lines(cache, damages))
    if arguments.json:
        print(as_json(found))
    return 1 if any(found.values()) else 0


def _damage_of(cache: Path, *, deep: bool, progress: Progress | None) -> list[Damage]:
    """Return the damage of a cache of any kind. deep: read every file; else, of an EAGLE-3 cache, the headers."""
    meta: dict[str, Any] = {}
    with contextlib.suppress(CacheError, OSError):  # find_damage reports it
        meta = find_meta(resolved(cache)) or {}
    if meta.get("kind") != "eagle3":
        return find_damage(cache, deep=deep, progress=progress)
    from niels_gpt.eagle3.inspect.verify import verify

    try:
        verdicts = verify(cache, names=None if deep else ["complete"], progress=progress)
    except (CacheError, OSError) as error:  # the manifest cannot be read
        return [Damage("", 0, 0, str(error))]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        return [Damage("", 0, 0, f"not as docs/formats.md describes it ({error!r})")]
    return [Damage("", 0, 0, problem) for verdict in verdicts.values() for problem in verdict.problems]


def _diff(arguments: argparse.Namespace) -> int:
    from niels_gpt.inspection.diff import diff, is_equal
    from niels_gpt.inspection.show import tokenizer_beside

    pair = arguments.a, arguments.b
    found = diff(*pair, tokenizers=[tokenizer_beside(cache) for cache in pair], limit=arguments.limit)
    print(as_json(found) if arguments.json else difference_lines(found))
    return 0 if is_equal(found) else 1


def _locate(arguments: argparse.Namespace) -> int:
    from niels_gpt.inspection.locate import locate
    from niels_gpt.inspection.show import tokenizer_beside, tokenizer_of

    cache, model = arguments.cache, arguments.tokenizer
    tokenizer = tokenizer_of(cache, model) if model else tokenizer_beside(cache)
    print(locate(cache, tokenizer, split=arguments.split, position=arguments.position, num_tokens=arguments.tokens))
    return 0


def _gc(arguments: argparse.Namespace) -> int:
    from niels_gpt.inspection.caches import refuse_without_caches
    from niels_gpt.recipes.gc import FAILED, collect

    refuse_without_caches(arguments.cache_dir)
    failed = False
    for line in collect(arguments.cache_dir, dry_run=arguments.dry_run):
        print(escaped(line))
        failed |= line.startswith(FAILED)
    return 1 if failed else 0
