"""Build token caches and look into them.

    python -m niels_gpt.cache.cli build-all --cache-dir cache --seed 42       every cache
    python -m niels_gpt.cache.cli build roam oasst1 --source-root MIRROR      some caches
    python -m niels_gpt.cache.cli build-all --source-root sample --dry-run    what would be done
    python -m niels_gpt.cache.cli list cache                                  what is there
    python -m niels_gpt.cache.cli show cache/sft/oasst1 --split val --at 3    an example with its loss mask
    python -m niels_gpt.cache.cli gc cache --dry-run                          old versions that could be removed

Exit status: 0 good, 1 something failed, 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from niels_gpt.settings import Settings

if TYPE_CHECKING:
    from niels_gpt.recipes.produce import Outcome

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    _give_large_blocks_back()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        status: int = arguments.run(arguments)
    except (ValueError, OSError) as error:  # CacheError is a ValueError, ConnectionError and FileNotFoundError OSErrors
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted. Caches that were finished are kept, the one in progress is as before", file=sys.stderr)
        return 1
    return status


def _give_large_blocks_back() -> None:
    """Let glibc return every freed block of 1 MiB and more to the system at once.

    By default it raises that bound to 32 MiB as it goes, and the holes that encoding long documents leaves add up:
    80 books instead of 8 cost 43 MiB more at the peak, and 15 MiB more with a fixed bound.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc: nothing to be done, nothing lost
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def add_settings_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser one flag for each field of Settings, so that every default can be overridden."""
    group = parser.add_argument_group("settings")
    types = get_type_hints(Settings)
    for field in fields(Settings):
        text = field.metadata["help"].replace("%", "%%") + f" (default: {field.default})"
        flag = "--" + field.name.replace("_", "-")
        if types[field.name] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        else:
            kind = types[field.name] if types[field.name] in (int, float) else str
            choices = ("drop", "raise") if field.name == "on_special" else None
            metavar = None if choices else kind.__name__.upper()
            group.add_argument(flag, type=kind, default=field.default, help=text, choices=choices, metavar=metavar)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the Settings that the flags spell."""
    return Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})


def _parser() -> argparse.ArgumentParser:
    from niels_gpt.recipes.plan import RECIPES

    names = [key.split("/")[1] for key in RECIPES]
    parser = argparse.ArgumentParser(
        prog="python -m niels_gpt.cache.cli", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    build_all = commands.add_parser("build-all", help="build every cache", description="Build every cache.")
    build_all.set_defaults(run=_build, sources=names)
    build = commands.add_parser("build", help="build some caches", description="Build some caches.")
    build.add_argument("sources", nargs="+", metavar="SOURCE", help=f"some of {', '.join(names)}")
    build.set_defaults(run=_build)
    for command in (build_all, build):
        command.add_argument("--dry-run", action="store_true", help="print what would be built and the disk it needs")
        command.add_argument("--refresh", action="store_true", help="ask the hub for its newest revisions")
        add_settings_flags(command)
    show = commands.add_parser("show", help="print a decoded piece of a cache", description="Print a piece of a cache.")
    show.add_argument("cache", type=Path, help="folder of a cache, such as cache/sft/oasst1")
    show.add_argument("--split", choices=("train", "val"), default="train", help="(default: train)")
    show.add_argument("--at", type=int, default=0, metavar="N", help="token position, or number of an sft example")
    show.add_argument("--tokens", type=int, default=200, metavar="N", help="tokens to print, at most (default: 200)")
    show.add_argument("--tokenizer", metavar="MODEL", help="spm.model (default: the one beside the cache)")
    show.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="(default: auto)")
    show.set_defaults(run=_show)
    listing = commands.add_parser(
        "list", help="print a table of the caches", description="Print a table of the caches."
    )
    listing.add_argument("cache_dir", type=Path, help="folder of the caches, such as cache or cache/sample")
    listing.set_defaults(run=_list)
    gc = commands.add_parser("gc", help="remove old versions", description="Remove old versions and dead builds.")
    gc.add_argument("cache_dir", type=Path, help="folder of the caches, such as cache")
    gc.add_argument("--dry-run", action="store_true", help="print what would be removed")
    gc.set_defaults(run=_gc)
    return parser


def _build(arguments: argparse.Namespace) -> int:
    from niels_gpt.recipes.plan import RECIPES, ensure_tokenizer

    keys = {key.split("/")[1]: key for key in RECIPES}
    unknown = [name for name in arguments.sources if name not in keys and name not in RECIPES]
    if unknown:
        print(f"error: no source is called {unknown[0]!r}, expected some of {', '.join(keys)}", file=sys.stderr)
        return 2
    settings = settings_of(arguments)
    chosen = list(dict.fromkeys(keys.get(name, name) for name in arguments.sources))
    if arguments.dry_run:
        return _print_plan(settings, chosen)
    outcomes: list[Outcome] = []
    failures: dict[str, Exception] = {}
    try:
        outcomes.append(ensure_tokenizer(settings))
        for key in chosen:
            with _progress_bar(key) as progress:
                try:
                    outcome = RECIPES[key](settings, refresh=arguments.refresh, progress=progress)
                    _check(outcome, settings)
                    outcomes.append(outcome)
                except Exception as error:  # one failing source does not stop the others
                    failures[key] = error
                    logging.debug("%s failed", key, exc_info=True)
    finally:
        _print_table(outcomes, failures)
    return _print_failures(failures)


def _print_failures(failures: dict[str, Exception]) -> int:
    for key, failure in failures.items():
        print(f"error: {key}: {type(failure).__name__}: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _check(outcome: Outcome, settings: Settings) -> None:
    """Print what the warnings say, and raise CacheError for what makes a cache bad: the checks of Dagster's assets."""
    from niels_gpt.fileio import CacheError
    from niels_gpt.inspection.verify import CHECKS, Limits, verify

    limits = Limits(deep=settings.deep_checks, max_dropped_share=settings.max_dropped_share)
    problems = verify(outcome.path, limits)
    bad: list[str] = []
    for check in CHECKS[outcome.meta["kind"]]:
        if check.blocking:
            bad += problems[check.name]
            continue
        for problem in problems[check.name]:
            print(f"warning: {outcome.key}: {problem}", file=sys.stderr)
    if bad:
        raise CacheError("; ".join(bad))


@contextlib.contextmanager
def _progress_bar(key: str) -> Iterator[Any]:
    """Yield a builder's progress callback: a bar with tokens/s and time left on a terminal, None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=key, unit="tok", unit_scale=True, leave=False) as bar:

        def show(documents: int, tokens: int, expected: int | None) -> None:
            bar.total = expected
            bar.set_postfix(documents=documents, refresh=False)
            bar.update(tokens - bar.n)

        yield show


def _print_plan(settings: Settings, keys: list[str]) -> int:
    from niels_gpt.recipes.plan import plan

    rows = [(item.key, item.action, item.source, _size(item.disk_bytes)) for item in plan(settings, keys)]
    _print_rows([("what", "would be", "from", "disk at most"), *rows])
    free = _free_bytes(Path(settings.cache_dir))
    print(f"disk free at {settings.cache_dir}: {_size(free)}")
    return 1 if any(row[1].startswith("cannot") for row in rows) else 0


def _free_bytes(folder: Path) -> int:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    stat = os.statvfs(existing)
    return stat.f_bavail * stat.f_frsize


def _print_table(outcomes: Sequence[Outcome], failures: dict[str, Exception]) -> None:
    from niels_gpt.recipes.produce import TOKENIZER_KEY

    rows: list[tuple[str, ...]] = [("cache", "state", "train", "val", "seconds", "tokens/s", "peak memory", "on disk")]
    for outcome in outcomes:
        totals = outcome.meta.get("totals") or {}
        speed = "-" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:,.0f}"
        peak = "-" if outcome.peak_bytes is None else _size(outcome.peak_bytes)
        counts = [_count(totals, split) for split in ("train", "val")]
        if outcome.key == TOKENIZER_KEY:
            counts = [f"{outcome.meta['vocab_size']:,} ids", "-"]
        seconds = f"{outcome.seconds:.2f}".replace("nan", "-")
        rows.append((outcome.key, _state(outcome), *counts, seconds, speed, peak, _size(outcome.disk_bytes)))
    rows += [(key, "FAILED", *["-"] * 6) for key in failures]
    _print_rows(rows)


def _state(outcome: Outcome) -> str:
    built = {"partial": "partial", False: "not built"}.get(outcome.meta.get("built"), "built")
    return f"{built}, up to date" if outcome.reused else built


def _count(totals: dict[str, int], split: str) -> str:
    if f"{split}_examples" in totals:
        return f"{totals[f'{split}_examples']:,} examples, {totals[f'{split}_tokens']:,} tokens"
    return f"{totals.get(f'{split}_tokens', 0):,} tokens"


def _print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"


def _list(arguments: argparse.Namespace) -> int:
    from niels_gpt.recipes.produce import recorded_outcomes

    outcomes, damaged = recorded_outcomes(arguments.cache_dir)
    _print_table(outcomes, damaged)
    return _print_failures(damaged)


def _show(arguments: argparse.Namespace) -> int:
    from niels_gpt.inspection.show import show
    from niels_gpt.recipes.produce import TOKENIZER_KEY
    from niels_gpt.tokenizer import MODEL_NAME, load_tokenizer

    beside = Path(os.path.abspath(arguments.cache)).parent.parent / TOKENIZER_KEY
    tokenizer = load_tokenizer(arguments.tokenizer or beside / MODEL_NAME)
    color = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
    print(
        show(
            arguments.cache,
            tokenizer,
            split=arguments.split,
            position=arguments.at,
            num_tokens=arguments.tokens,
            color=color,
        )
    )
    return 0


def _gc(arguments: argparse.Namespace) -> int:
    from niels_gpt.fileio import VERSIONS_DIR, build_lock, removable

    for folder in sorted(arguments.cache_dir.rglob(f"{VERSIONS_DIR}/*")):
        cache = folder.parent.parent / folder.name
        with build_lock(cache):
            for path in removable(cache):
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                print(f"{'would remove' if arguments.dry_run else 'removed'} {path} ({_size(size)})")
                if not arguments.dry_run:
                    shutil.rmtree(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
