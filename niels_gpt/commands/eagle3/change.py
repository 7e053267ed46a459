"""eagle3 convert: another form of a cache."""

from __future__ import annotations

from pathlib import Path

import click
from rich_click import option

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
