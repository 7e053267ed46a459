"""export, import, card, push, pull, stage: caches as files of other tools and back, and caches in buckets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich_click import argument, option

from niels_gpt.commands.console import Command, Result, command, escaped, progress_bar, say
from niels_gpt.interop.names import FORMAT_NAMES, read_line

_PATH = click.Path(path_type=Path)
_CACHE = argument("cache", type=_PATH, help="folder of a cache, such as cache/pretrain/wikitext")
_FORMAT = click.Choice(FORMAT_NAMES)


@command(
    "export",
    "Write a cache as the files of another tool.\n\n"
    "Files whose bytes are those of the cache are hard links: they take no room, and are read-only.",
    kept=". Nothing is left of an export that was stopped",
    examples="""niels-gpt export cache/pretrain/wikitext OUT --to megatron
niels-gpt export cache/sft/oasst1 OUT --to hf""",
)
@_CACHE
@argument("dest", type=_PATH, help="folder to write; must be empty or not exist")
@option("--to", "name", type=_FORMAT, required=True, help="the tool that shall read the files")
def export(cache: Path, dest: Path, name: str) -> Result:
    """Export a cache."""
    from niels_gpt.display.numbers import many, size_text
    from niels_gpt.interop.exporting import export_cache
    from niels_gpt.interop.output import MANIFEST_NAME
    from niels_gpt.storage.meta_json import parse_object, read_regular

    with progress_bar(f"export {escaped(dest)}", "B", "files") as progress:
        done = export_cache(cache, name, dest, progress=progress)
    line = read_line(str(dest), parse_object(read_regular(dest / MANIFEST_NAME)))
    linked = f", {size_text(done.linked_bytes)} of them links" if done.linked_bytes else ""
    sizes = f"{many(done.files, 'file')}, {many(done.tokens, 'token')}, {size_text(done.num_bytes)}{linked}"
    say("\n".join([f"{dest}: {sizes}", *(f"  note: {reason}: {count:,}" for reason, count in done.noted.items())]))
    if line:
        say(f"read it: {line}")
    return Result({"cache": str(cache), "out": str(dest), "format": name, **asdict(done), "read": line})


@command(
    "card",
    "Print the card of a cache: README.md of a hub dataset repository.",
    examples="""niels-gpt card cache/pretrain/wikitext
niels-gpt card cache/pretrain/wikitext --output README.md""",
)
@_CACHE
@option("--output", type=_PATH, metavar="FILE", help="write it there; printed if not given")
def card(cache: Path, output: Path | None) -> Result:
    """Print a card."""
    from niels_gpt.interop.card import card_of
    from niels_gpt.recipes.records import made_by
    from niels_gpt.storage.fileio import write_bytes

    text = card_of(cache, command=made_by(cache))
    if output is None:
        say(text.rstrip("\n"))
        return Result({"cache": str(cache), "card": text})
    write_bytes(output, text.encode())
    say(f"{output}: the card of {cache}")
    return Result({"cache": str(cache), "card": text, "output": str(output)})


COMMANDS: list[Command] = [export, card]
