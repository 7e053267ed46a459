"""seal, build --partition and build --dask. The functions import heavy modules themselves, as in cache.py."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.commands.console import Result, argument, command, option, print_warning, progress_bar, say
from niels_gpt.commands.settings_flags import settings_of, settings_options, source_names
from niels_gpt.display.numbers import many
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import UsageError
from niels_gpt.storage.remedies import build_command

if TYPE_CHECKING:
    from niels_gpt.engine.units import Mended
    from niels_gpt.kinds.kind import Kind
    from niels_gpt.recipes.records import Outcome
    from niels_gpt.recipes.units import CacheUnits, MadeUnit
    from niels_gpt.work import Progress


@command(
    "seal",
    "Join the finished partitions of a cache into one cache.\n\nPass the flags that the partitions were built with; "
    "none for a folder of `eagle3 precompute --partition`. Every file is read once more; then the partitions are "
    "removed.",
    kept=". Nothing is lost; the same command seals the cache",
    examples="niels-gpt seal fineweb_edu --partitions 64\nniels-gpt seal DIR",
)
@argument("source", shell_complete=source_names, help="the source of the cache, or a folder of partitions")
@option("--sizes-only", is_flag=True, help="check only the sizes of the files, not their sha256")
def seal(source: str, sizes_only: bool, **given: Any) -> Result:
    """Seal partitions."""
    from niels_gpt.commands.build import UnknownSourceError, built_rows, explicit_options, print_built
    from niels_gpt.commands.report import checked
    from niels_gpt.kinds.folders import sealing_kind
    from niels_gpt.recipes.home_recipes import units_of

    kind, flags = sealing_kind(Path(source)), [name for name in explicit_options() if name != "source"]
    if kind is not None and not flags:
        return seal_folder(kind, Path(source))
    settings = settings_of(given)
    try:
        key = _partitioned_key(settings, [source])
    except UnknownSourceError as error:
        if kind is None:
            raise
        stated = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
        raise UsageError(f"{stated}: {source} is a folder of partitions; leave the flags out") from error
    with progress_bar(f"seal {key}", unit="B", items="files") as progress:
        outcome = units_of(settings, key, fixes=False).seal(deep=not sizes_only, progress=progress)
    for code, warning in checked(outcome, settings):
        print_warning(code, f"{key}: {warning}")
    print_built([outcome])
    return Result({"caches": built_rows(settings, [outcome], {})}, next=_look(settings, key))


settings_options(seal, with_eagle3=True)


def seal_folder(kind: Kind, folder: Path) -> Result:
    """Seal the partitions in a folder, and print the contents of the cache."""
    with progress_bar("seal", "B") as progress:
        sealed = kind.seal(folder, progress)
    say(sealed.text)
    return Result(sealed.data, next=sealed.next)


def build_one(
    settings: Settings, sources: Sequence[str], number: int, *, refresh: bool, restart: bool, yes: bool
) -> Result:
    """Build one partition, and print its contents and the next command."""
    from niels_gpt.commands.build import agreed
    from niels_gpt.commands.report import partition_line
    from niels_gpt.recipes.home_recipes import units_of

    key = _partitioned_key(settings, sources)
    if settings.retrain_tokenizer:
        raise UsageError(
            "--retrain-tokenizer: each partition would train its own tokenizer. Build another cache with it first"
        )
    agreed(settings, [key], yes=yes)
    if not 0 <= number < settings.partitions:
        raise UsageError(f"--partition {number}: expected 0 to {settings.partitions - 1}, below --partitions")
    units = units_of(settings, key, refresh=refresh)
    if restart:
        with progress_bar(f"{key} {number}", items=units.counted) as progress:
            mended = units.mend(number, progress)
        if mended is not None:
            return _mended(units, *mended)
    if restart and not units.restart(number):
        whole = build_command(settings, key, "--restart")
        raise UsageError(f"--partition {number}: {key} is sealed and up to date. To build it from scratch: {whole}")
    with progress_bar(f"{key} {number}", items=units.counted) as progress:
        made = units.build(number, progress=progress)
    say(partition_line(made))
    data = {"key": key, "partition": number, "partitions": settings.partitions, "reused": made.reused}
    if "partition" in made.meta:  # else it is the sealed cache's meta.json
        data |= {key: made.meta[key] for key in ("docs", "totals") if key in made.meta}
    data["seconds"] = made.seconds
    if "partition" not in made.meta:
        return Result({**data, "sealed": True, "unfinished": []}, next=_look(settings, key))
    if left := units.unfinished():
        total = many(settings.partitions, "partition")
        say(f"{key}: {len(left):,} of {total} {'is' if len(left) == 1 else 'are'} not finished")
    seals = "" if left else build_command(settings, key, verb="seal")
    return Result({**data, "sealed": False, "unfinished": left}, next=seals)


def _mended(units: CacheUnits, made: MadeUnit, mended: Mended) -> Result:
    """Print which files of a sealed cache are repaired, and the next command."""
    from niels_gpt.commands.report import partition_line

    say(partition_line(made))
    number, total = made.partition
    for name in mended.files:
        say(f"{made.key}: {name} is repaired")
    for name in mended.left:
        say(f"{made.key}: {name} is still damaged: bytes of other partitions are wrong or missing")
    if not mended.files and not mended.left:
        say(f"{made.key}: nothing of partition {number} was damaged")
    again = shlex.join(["niels-gpt", "verify", str(units.path), "--deep"])
    if mended.unit is not None:
        again = build_command(units.settings, made.key, "--partition", str(mended.unit), "--restart")
    elif mended.left and not mended.files:  # the damaged partition is unknown
        again = build_command(units.settings, made.key, "--restart")
    data = {"key": made.key, "partition": number, "partitions": total, "reused": made.reused, "sealed": True}
    return Result({**data, "mended": mended.files, "damaged": mended.left, "seconds": made.seconds}, next=again)


def on_dask(settings: Settings, where: str) -> Callable[..., Outcome]:
    """Return a function that builds and seals a cache in partitions on a Dask cluster, for `build_caches`.

    Raises: UsageError for settings without partitions and for a malformed `where`; ImportError without Dask.
    """
    from niels_gpt.recipes.dask import build_on_dask, check_where

    if settings.partitions < 2:
        raise UsageError(f"--dask {where}: workers build partitions. Pass --partitions P too, 2 or more")
    check_where(where)

    def build(settings: Settings, name: str, *, progress: Progress | None = None, **how: Any) -> Outcome:
        # Without a bar, each partition logs a line.
        return build_on_dask(settings, name, where, progress=progress if sys.stderr.isatty() else None, **how)

    return build


def _partitioned_key(settings: Settings, sources: Sequence[str]) -> str:
    """Return the key of the one named cache. Raises: UsageError for several caches, and without partitions."""
    from niels_gpt.commands.build import chosen_keys
    from niels_gpt.kinds.kind import has_partitions

    keys = chosen_keys(settings, sources)
    if len(keys) != 1 or not has_partitions(keys[0]):
        expected = "expected one cache of text, chats or rollouts, or eagle3/targets"
        raise UsageError(f"{', '.join(keys)}: {expected}")
    if settings.partitions < 2:
        raise UsageError(f"{keys[0]}: the number of partitions is missing. Pass --partitions P, 2 or more")
    return keys[0]


def _look(settings: Settings, key: str) -> str:
    from niels_gpt.kinds.kind import look_command
    from niels_gpt.recipes.records import cache_root

    return look_command(key, cache_root(settings) / key)
