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
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from niels_gpt.interrupts import interruptible, say_interrupted
from niels_gpt.records import printable
from niels_gpt.settings import Settings

if TYPE_CHECKING:
    from niels_gpt.recipes.plan import Plan
    from niels_gpt.recipes.produce import Outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    from niels_gpt.recipes.own import UsageError
    from niels_gpt.recipes.run import give_large_blocks_back, is_unread

    arguments = _parser().parse_args(argv)
    give_large_blocks_back()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_SafeFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for client in ("httpx", "httpx2"):  # a line for each request to the hub
        logging.getLogger(client).setLevel(logging.WARNING)
    try:
        with interruptible():
            status: int = arguments.run(arguments)
    except (ValueError, OSError, ImportError) as error:  # CacheError is a ValueError, ConnectionError an OSError
        if isinstance(error, BrokenPipeError) and is_unread("\n"):  # and not a connection's
            return 0
        print(f"error: {_safe(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt as error:
        say_interrupted(error, arguments.kept)
        return 1
    is_unread()
    return status


def add_settings_flags(parser: argparse.ArgumentParser, *, only: Sequence[str] | None = None) -> None:
    """Give a parser one flag for each field of Settings, so that every default can be overridden; or for some."""
    group = parser.add_argument_group("settings")
    types = get_type_hints(Settings)
    for field in fields(Settings):
        if field.name.startswith("eagle3_") if only is None else field.name not in only:  # eagle3/targets: the asset's
            continue
        text = field.metadata["help"].replace("%", "%%") + f" (default: {field.default})"
        flag = "--" + field.name.replace("_", "-")
        if field.name in ("pretrain", "sft", "licence", "attribution"):
            group.add_argument(flag, action="append", metavar="LINE", help=text + "; may be given several times")
        elif types[field.name] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        else:
            kind = types[field.name] if types[field.name] in (int, float) else str
            choices = ("drop", "raise") if field.name == "on_special" else None
            metavar = None if choices else kind.__name__.upper()
            group.add_argument(flag, type=kind, default=field.default, help=text, choices=choices, metavar=metavar)


def _typed(parse: Callable[[str], int]) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        try:
            return parse(text)
        except ValueError as error:  # of which argparse would not print the message
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the Settings that the flags spell."""
    given: dict[str, Any] = {field.name: vars(arguments).get(field.name, field.default) for field in fields(Settings)}
    for name, value in given.items():
        given[name] = ";".join(value) if isinstance(value, list) else value  # several lines of a flag are one setting
    return Settings(**given)


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
    from niels_gpt.recipes.run import number_of_tokens
    from niels_gpt.recipes.snapshot import READS, SPLITS

    build_all = command("build-all", "build every cache of tokens; not eagle3/targets, which Dagster builds", _build)
    build_all.set_defaults(sources=None)
    build = command("build", "build some caches", _build)
    names = ", ".join(key.split("/")[1] for key in RECIPES)
    build.add_argument("sources", nargs="*", metavar="SOURCE", help=f"some of {names}, and of those of sources.toml")
    for builder in (build_all, build):
        builder.set_defaults(kept=". What was finished is kept; the same command resumes the build in progress")
        builder.add_argument("--dry-run", action="store_true", help="print what would be built and the disk it needs")
        text = "build from scratch, without what is there: finished or not, it is done once more"
        builder.add_argument("--restart", action="store_true", help=text)
        builder.add_argument("--refresh", action="store_true", help="ask the hub for its newest revisions")
        add_settings_flags(builder)
    snapshot = command("snapshot", "keep the raw text of a hub source once, for builds without network", _snapshot)
    snapshot.set_defaults(kept=". The files that were finished are kept; the same command resumes")
    snapshot.epilog = (
        "Builds with --source-root DEST read it in the hub's place. Interrupted, the same command goes on, and with "
        "more tokens it makes the snapshot longer; what it has is read once more from the hub, but not written."
    )
    snapshot.add_argument("source", metavar="SOURCE", help=f"one of {', '.join(SPLITS)}")
    snapshot.add_argument("dest", type=Path, metavar="DEST", help="folder of the mirror; other sources may be there")
    text = "for builds of so many tokens, as 205M (default: both token budgets)"
    snapshot.add_argument("--tokens", type=_typed(number_of_tokens), metavar="N", help=text)
    add_settings_flags(snapshot, only=READS)


def _add_viewers(command: Callable[..., argparse.ArgumentParser]) -> None:
    from niels_gpt.recipes.run import token_position

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


def _build(arguments: argparse.Namespace) -> int:
    from niels_gpt.recipes.plan import plan
    from niels_gpt.recipes.report import outcomes_table, plan_table
    from niels_gpt.recipes.run import build_each, chosen_keys

    settings = settings_of(arguments)
    chosen = chosen_keys(settings, arguments.sources)
    if arguments.dry_run:
        plans = plan(settings, chosen)
        print(plan_table(plans, settings.cache_dir))
        if settings.disk_check:
            _check_room(settings, plans)
        return 1 if any(item.action.startswith("cannot") for item in plans) else 0
    outcomes: list[Outcome] = []
    failures: dict[str, Exception] = {}
    try:
        build_each(
            settings,
            chosen,
            outcomes,
            failures,
            refresh=arguments.refresh,
            restart=arguments.restart,
            bar=_progress_bar,
        )
    finally:
        if outcomes or failures:
            print(outcomes_table(outcomes, failures))
    return _print_failures(failures)


class _SafeFormatter(logging.Formatter):
    """Escapes what a message must not send to a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as lines of text."""
        return _safe(super().format(record))


def _safe(said: object) -> str:
    """Return a message without control characters that a file's name or content may have brought: those are escaped."""
    return "\n".join(map(printable, str(said).split("\n")))


def _json(found: object) -> str:
    """Return JSON for people and machines, without characters that command a terminal."""
    text = json.dumps(found, indent=2, ensure_ascii=False)
    return re.sub("[\x7f-\x9f]", lambda char: f"\\u{ord(char.group()):04x}", text)


def _check_room(settings: Settings, plans: Sequence[Plan]) -> None:
    from niels_gpt.recipes.disk import Need, left_bytes, refuse_without_room
    from niels_gpt.recipes.produce import cache_root

    root = cache_root(settings)
    needs = {item.key: Need(item.least_bytes, item.disk_bytes) for item in plans if item.disk_bytes}
    refuse_without_room(settings, root, needs, sum(left_bytes(root / key) for key in needs))


def _print_failures(failures: dict[str, Exception]) -> int:
    for key, failure in failures.items():
        print(f"error: {_safe(key)}: {type(failure).__name__}: {_safe(failure)}", file=sys.stderr)
    return 1 if failures else 0


@contextlib.contextmanager
def _progress_bar(key: str, *, unit: str = "tok", counted: str = "documents") -> Iterator[Any]:
    """Yield a progress callback: a bar with speed and time left on a terminal, None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=key, unit=unit, unit_scale=True, leave=False) as bar:

        def show(documents: int, tokens: int, expected: int | None) -> None:
            bar.total = expected
            bar.set_postfix({counted: documents}, refresh=False)
            bar.update(tokens - bar.n)

        yield show


def _list(arguments: argparse.Namespace) -> int:
    from niels_gpt.recipes.produce import recorded_outcomes
    from niels_gpt.recipes.report import listed, outcomes_table

    outcomes, damaged = recorded_outcomes(arguments.cache_dir)
    rows = listed(arguments.cache_dir, outcomes, damaged)
    refused = {row["key"]: row["refused"] for row in rows if row["refused"]}
    print(_json(rows) if arguments.json else outcomes_table(outcomes, damaged, refused))
    return _print_failures(damaged) or (1 if refused else 0)


def _snapshot(arguments: argparse.Namespace) -> int:
    from niels_gpt.recipes.report import snapshot_lines
    from niels_gpt.recipes.snapshot import take_snapshot

    settings, where = settings_of(arguments), (arguments.source, arguments.dest)
    with _progress_bar(f"snapshot {arguments.source}", unit="B", counted="rows") as progress:
        folder, manifest = take_snapshot(settings, *where, tokens=arguments.tokens, progress=progress)
    print(snapshot_lines(settings, *where, arguments.tokens, folder, manifest))
    return 0


def _stats(arguments: argparse.Namespace) -> int:
    from niels_gpt.inspection.plot import write_plot
    from niels_gpt.inspection.stats import summary
    from niels_gpt.recipes.report import table

    if arguments.plot is not None:
        write_plot(arguments.cache, arguments.plot)
    rows = summary(arguments.cache)
    print(_json(dict(rows)) if arguments.json else table(rows))
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
    from niels_gpt.inspection.contents import Damage
    from niels_gpt.recipes.report import damage_lines
    from niels_gpt.recipes.run import damage_of

    caches, errors = caches_of(arguments.paths)
    for error in errors.values():  # the others are looked at
        print(f"error: {_safe(error)}", file=sys.stderr)
    found = {path: [Damage("", 0, 0, error)._asdict()] for path, error in errors.items()}
    for cache in caches:
        with _progress_bar(_safe(cache), unit="B", counted="files") as progress:
            damages = damage_of(cache, deep=arguments.deep, progress=progress)
        found[str(cache)] = [damage._asdict() for damage in damages]
        if not arguments.json:
            print(damage_lines(cache, damages))
    if arguments.json:
        print(_json(found))
    return 1 if any(found.values()) else 0


def _diff(arguments: argparse.Namespace) -> int:
    from niels_gpt.inspection.diff import diff, is_equal
    from niels_gpt.inspection.show import tokenizer_beside
    from niels_gpt.recipes.report import difference_lines

    pair = arguments.a, arguments.b
    found = diff(*pair, tokenizers=[tokenizer_beside(cache) for cache in pair], limit=arguments.limit)
    print(_json(found) if arguments.json else difference_lines(found))
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
    from niels_gpt.recipes.garbage import FAILED, collect

    refuse_without_caches(arguments.cache_dir)
    failed = False
    for line in collect(arguments.cache_dir, dry_run=arguments.dry_run):
        print(_safe(line))
        failed |= line.startswith(FAILED)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
