"""eagle3 convert, join: another form of a cache; parts that become one."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
from rich_click import argument, option

from niels_gpt.commands.console import Result, say
from niels_gpt.commands.eagle3.look import command, of_cache


@command(
    "convert",
    "Convert a dense cache to the other version of the format; no shard is rewritten.",
    examples="niels-gpt eagle3 convert CACHE --format-version 2",
)
@of_cache
@option("--format-version", type=click.Choice([1, 2]), required=True, help="version to convert to")
def convert(cache: Path, follow_links: bool, format_version: int) -> Result:
    """Convert a cache."""
    from niels_gpt.eagle3.cache import convert

    is_changed = convert(cache, format_version, follow_links=follow_links)
    changed = f"now version {format_version}: manifest.json was rewritten, no shard was changed"
    say(f"{cache}: {changed if is_changed else f'is version {format_version} already; nothing was written'}")
    return Result({"cache": str(cache), "format_version": format_version, "changed": is_changed})


@command(
    "join",
    "Put the parts that precompute --part made together: links where possible, the bytes of one run.",
    examples="niels-gpt eagle3 join CACHE part-1 part-2 part-3",
)
@argument("out", type=click.Path(path_type=Path), help="folder of the cache: empty or absent")
@argument("part", type=click.Path(path_type=Path), nargs=-1, required=True, help="folders that precompute --part made")
def join(out: Path, part: tuple[Path, ...]) -> Result:
    """Join parts."""
    from niels_gpt.eagle3.produce.join import join

    joined = join(out, part)
    totals = joined.meta["totals"]
    copied = f", {joined.copied_bytes:,} bytes were copied" if joined.copied_bytes else ""
    say(
        f"{out}: {totals['shards']:,} shards, {totals['samples']:,} samples, {totals['tokens']:,} tokens; "
        f"{joined.linked_bytes:,} bytes are shared with the parts{copied}"
    )
    made = {"folder": str(out), "totals": totals}
    sizes = {"linked_bytes": joined.linked_bytes, "copied_bytes": joined.copied_bytes}
    return Result(made | sizes, next=shlex.join(["niels-gpt", "eagle3", "verify", str(out)]))
