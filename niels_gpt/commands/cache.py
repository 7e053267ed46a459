"""Build caches: build, build-all and snapshot, with their flags; python -m niels_gpt.cache.cli.

build.py runs the builds. The functions import heavy modules themselves, so that --help answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from niels_gpt.commands.console import (
    OF_FACES,
    ExitCode,
    Group,
    Result,
    argument,
    command,
    number_of_tokens,
    option,
    parsed,
    run,
)
from niels_gpt.commands.main import PANELS
from niels_gpt.commands.settings_flags import settings_of, settings_options, source_names
from niels_gpt.data.sources import SOURCES
from niels_gpt.kinds.homes import OTHER_TOOLS, home_commands, home_keys
from niels_gpt.recipes.snapshot import READS, SPLITS

KEPT = ". What was finished is kept; the same command resumes the build in progress"


def main(argv: Sequence[str] | None = None) -> int:
    """Run python -m niels_gpt.cache.cli and return its exit status. argv: default sys.argv."""
    return run(FACE, argv, "python -m niels_gpt.cache.cli", {**OF_FACES, ExitCode.INTERRUPTED: 1})


# --- build ------------------------------------------------------------------------------------------------------------


def _how_to_build(function: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in (
        option("--refresh", is_flag=True, help="use the newest revisions of the hub", panel="Build"),
        option(
            "--restart",
            is_flag=True,
            help="build from scratch; with --partition of a sealed cache, repair its files",
            panel="Build",
        ),
        option("--dry-run", is_flag=True, help="print the planned builds and the disk space they need", panel="Build"),
        option(
            "--yes",
            is_flag=True,
            hidden=True,
            help="replace a tokenizer that other caches need, without asking",
            panel="Build",
        ),
    ):
        function = decorate(function)
    return function


@command(
    "build",
    "Build some caches, or all with --all.\n\nCaches that are up to date are left alone; interrupted builds resume.",
    kept=KEPT,
    examples="""niels-gpt build --all --source-root sample             every cache from the bundled sample
niels-gpt build oasst1 wikitext --seed 7               two caches from the hub
niels-gpt build --pretrain notes='notes/**/*.md'       a cache of your own text: pretrain/notes
niels-gpt build --all --source-root MIRROR --dry-run   the plan and the disk space it needs""",
)
@argument(
    "source",
    nargs=-1,
    shell_complete=source_names,
    panel="What",
    help=f"{', '.join((*SOURCES, *home_keys()))}, or a source of your own",
)
@option("--all", "is_all", is_flag=True, help="every cache; the eagle3 ones only with --eagle3-target", panel="What")
@option("--partition", type=int, metavar="I", help="build only partition I of --partitions, from 0", panel="Build")
@option(
    "--dask",
    metavar="WHERE",
    help="build the partitions on a Dask cluster: tcp://HOST:PORT, or local:N for N processes here",
    panel="Build",
)
@_how_to_build
def build(
    source: tuple[str, ...],
    is_all: bool,
    partition: int | None,
    dask: str | None,
    dry_run: bool,
    refresh: bool,
    restart: bool,
    yes: bool,
    **given: Any,
) -> Result:
    """Build the named caches."""
    from niels_gpt.commands.build import build_caches

    if is_all and (source or partition is not None):
        other = source[0] if source else "--partition"
        raise click.UsageError(f"--all builds every cache: leave out --all or {other}")
    settings, chosen = settings_of(given), None if is_all else source
    if partition is not None and dask is not None:
        raise click.UsageError("--partition builds one partition here, --dask all on a cluster: leave out one of them")
    if partition is not None and dry_run:
        raise click.UsageError("--dry-run shows all partitions of a cache: leave out --partition")
    if partition is not None:
        from niels_gpt.commands.partitions import build_one

        return build_one(settings, source, partition, refresh=refresh, restart=restart, yes=yes)
    elsewhere = None
    if dask is not None:
        from niels_gpt.commands.partitions import on_dask

        elsewhere = on_dask(settings, dask)
    how: dict[str, Any] = {"dry_run": dry_run, "refresh": refresh, "restart": restart, "yes": yes}
    return build_caches(settings, chosen, **how, in_partitions=elsewhere)


@command("build-all", "Build every cache; the eagle3 ones only with --eagle3-target.", kept=KEPT)
@_how_to_build
def build_all(dry_run: bool, refresh: bool, restart: bool, yes: bool, **given: Any) -> Result:
    """Build everything."""
    from niels_gpt.commands.build import build_caches

    return build_caches(settings_of(given), None, dry_run=dry_run, refresh=refresh, restart=restart, yes=yes)


@command(
    "snapshot",
    "Save a source of the hub to a folder, for builds without network.\n\n"
    "Builds with --source-root DEST read the folder instead of the hub. The same command resumes an interrupted "
    "snapshot; with more --tokens it extends one. It then reads the rows it has once more, but does not write them.",
    kept=". Finished files are kept; the same command resumes",
    examples="niels-gpt snapshot fineweb_edu MIRROR --tokens 205M",
)
@argument("source", shell_complete=lambda *_: list(SPLITS), help=f"one of {', '.join(SPLITS)}")
@argument("dest", type=click.Path(path_type=Path), help="folder of the mirror; one folder can hold several sources")
@option(
    "--tokens",
    type=parsed(number_of_tokens),
    metavar="N",
    help="enough text for N tokens, such as 205M; default: the token budgets of train and val",
)
def snapshot(source: str, dest: Path, tokens: int | None, **given: Any) -> Result:
    """Take a snapshot."""
    from niels_gpt.commands.build import take

    return take(settings_of(given), source, dest, tokens)


settings_options(build, with_eagle3=True)
settings_options(build_all, with_eagle3=True)
settings_options(snapshot, only=READS)


_IN_NIELS_GPT = {name: place for places in PANELS.values() for name, place in places.items()}
_OF_FACE = ("build", "seal", "snapshot", "list", "show", "stats", "locate", "diff", "verify", "gc")
FACE = Group(
    "cache.cli",
    places={
        "Commands": {
            "build-all": "niels_gpt.commands.cache:build_all",
            **{name: _IN_NIELS_GPT[name] for name in _OF_FACE},
            **home_commands(OTHER_TOOLS),
        }
    },
    help="Build token caches and look into them.\n\nThe same commands as niels-gpt, which has more.",
)
