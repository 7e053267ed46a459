"""export, import, card: caches as files of other tools, and back. push, pull, stage: caches in buckets."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from niels_gpt.commands.console import Result, argument, command, escaped, option, progress_bar, say
from niels_gpt.exchange.names import FORMAT_NAMES, MASK_NAMES, read_line

if TYPE_CHECKING:
    from niels_gpt.exchange.transfer.fetch import Fetched

_PATH = click.Path(path_type=Path)
_CACHE = argument("cache", type=_PATH, help="folder of a cache, such as cache/pretrain/wikitext")
_FORMAT: dict[str, Any] = {"type": click.Choice(FORMAT_NAMES), "required": True, "metavar": "TOOL"}
_NAMES = ", ".join(FORMAT_NAMES)


@command(
    "export",
    "Write a cache as the files of another tool.\n\n"
    "Files with the same bytes as the cache's are hard links: they take no room and are read-only.",
    kept=". The incomplete export is removed",
    examples="""niels-gpt export cache/pretrain/wikitext OUT --to megatron
niels-gpt export cache/sft/oasst1 OUT --to hf
niels-gpt export cache/sft/oasst1 OUT --to hf --mask loss_mask      as SkyRL reads it""",
)
@_CACHE
@argument("dest", type=_PATH, help="folder to write; must be empty or not exist")
@option("--to", "name", **_FORMAT, help=f"the tool that will read the files: {_NAMES}")
@option(
    "--mask",
    type=click.Choice(MASK_NAMES),
    metavar="COLUMN",
    help=f"for chats --to hf: 0 and 1 in this column instead of labels: {', '.join(MASK_NAMES)}",
)
def export(cache: Path, dest: Path, name: str, mask: str | None) -> Result:
    """Export a cache."""
    from niels_gpt.exchange.exporting import export_cache
    from niels_gpt.exchange.output import MANIFEST_NAME
    from niels_gpt.storage.meta_json import parse_object, read_regular

    with progress_bar(f"export {escaped(dest)}", "B", "files") as progress:
        done = export_cache(cache, name, dest, mask=mask, progress=progress)
    line = read_line(str(dest), parse_object(read_regular(dest / MANIFEST_NAME)))
    say(f"{dest}: {done}")
    if line:
        say(f"read it: {line}")
    return Result({"cache": str(cache), "out": str(dest), "format": name, **asdict(done), "read": line})


@command(
    "card",
    "Print a dataset card for a cache: the README.md of a repository on the hub.",
    examples="""niels-gpt card cache/pretrain/wikitext
niels-gpt card cache/pretrain/wikitext --output README.md""",
)
@_CACHE
@option("--output", type=_PATH, metavar="FILE", help="write the card into this file; default: print it")
def card(cache: Path, output: Path | None) -> Result:
    """Print a card."""
    from niels_gpt.exchange.card import card_of
    from niels_gpt.recipes.records import made_by
    from niels_gpt.storage.fileio import write_bytes

    text = card_of(cache, command=made_by(cache))
    if output is None:
        say(text.rstrip("\n"))
        return Result({"cache": str(cache), "card": text})
    write_bytes(output, text.encode())
    say(f"{output}: the card of {cache}")
    return Result({"cache": str(cache), "card": text, "output": str(output)})


@command(
    "import",
    "Make a cache of the files of another tool.\n\n"
    "Files with the bytes of a cache's files become hard links. Files go to val if their name contains the word val, "
    "valid, validation, dev or eval; files of test are left out.",
    kept=". The incomplete import is removed",
    examples="""niels-gpt import DIR wiki --from megatron --tokenizer MODEL      writes cache/imported/wiki
niels-gpt import DIR pretrain/wiki --from olmo --val '*_held_*.npy'""",
)
@argument("source", type=_PATH, metavar="SRC", help="folder or file of the other tool")
@argument("name", help="cache to write: NAME (short for imported/NAME), pretrain/NAME or sft/NAME")
@option("--from", "format", **_FORMAT, help=f"the tool that wrote the files: {_NAMES}")
@option(
    "--tokenizer", metavar="MODEL", help="file, folder or hub id; default for a niels-gpt export: the caches' tokenizer"
)
@option("--cache-dir", type=_PATH, default="cache", help="folder of the caches")
@option("--val", metavar="GLOB", help="files of val; default: decided by their names")
@option("--document-end", metavar="TOKEN", help="token that ends documents, or none, or auto")
@option("--copy", is_flag=True, help="copy files instead of linking them; a linked file of SRC becomes read-only")
@option("--licence", metavar="TEXT", help="licence of the text")
@option("--attribution", metavar="TEXT", help="whom to credit for the text")
@option("--pad-id", type=click.IntRange(0), metavar="ID", help="for chats: the id that pads rows")
@option(
    "--utf8-bytes/--no-utf8-bytes", default=True, help="decode the tokens to count the text's bytes, for bits per byte"
)
def import_(source: Path, name: str, **how: Any) -> Result:
    """Import a folder."""
    from niels_gpt.recipes.exchange.imports import import_cache

    with progress_bar(f"import {escaped(source)}", "B", "files") as progress:
        done = import_cache(source, name, **how, progress=progress)
    say(str(done))
    about = {"cache": str(done.path), "files": done.files, "tokens": done.tokens, "linked_bytes": done.linked_bytes}
    data = {**about, "content_sha256": done.meta["content_sha256"], "totals": done.meta["totals"]}
    return Result(data, next=shlex.join(["niels-gpt", "verify", str(done.path)]))


# --- buckets ----------------------------------------------------------------------------------------------------------

_JOBS = option("--jobs", type=click.IntRange(1, 256), default=8, metavar="N", help="transfer N files at once")
_URL = "s3://, gs://, az://, hf://datasets/OWNER/NAME, or a path; no credentials in it"


@command(
    "push",
    "Copy a cache to a bucket.\n\n"
    "meta.json is sent last. The same command resumes, and does not send files again that are there already.",
    kept=". Files that were sent are kept; the same command resumes",
    examples="niels-gpt push cache/pretrain/wikitext s3://BUCKET/wikitext",
)
@_CACHE
@argument("url", help=f"folder for only this cache: {_URL}")
@option("--replace", is_flag=True, help="replace another cache at URL")
@option("--check", is_flag=True, help="read every file back, compare its sha256, and send files that differ again")
@option("--public", is_flag=True, help="for hf://: make the repository public")
@_JOBS
def push(cache: Path, url: str, replace: bool, check: bool, public: bool, jobs: int) -> Result:
    """Push a cache."""
    from niels_gpt.exchange.card import card_of
    from niels_gpt.exchange.transfer.push import push
    from niels_gpt.recipes.records import made_by

    card = card_of(cache, command=made_by(cache), url=url).encode() if url.startswith("hf://") else None
    with progress_bar(f"push {escaped(cache)}", "B", "files") as progress:
        done = push(cache, url, replace=replace, check=check, jobs=jobs, progress=progress, public=public, card=card)
    say(str(done))
    return Result({"cache": str(cache), **asdict(done)}, next=shlex.join(["niels-gpt", "pull", url, "DEST"]))


@command(
    "pull",
    "Copy a cache from a bucket.\n\n"
    "Checks the sha256 of every file; readers see the cache only when it is complete. The same command resumes.",
    kept=". Fetched files are kept; the same command resumes",
    examples="niels-gpt pull s3://BUCKET/wikitext cache/pretrain/wikitext",
)
@argument("url", help=f"folder of a cache: {_URL}")
@argument("dest", type=_PATH, help="path of the new cache, such as cache/pretrain/wikitext")
@option("--wait", is_flag=True, help="wait if another process is writing DEST")
@_JOBS
def pull(url: str, dest: Path, wait: bool, jobs: int) -> Result:
    """Pull a cache."""
    from niels_gpt.exchange.transfer.fetch import pull

    with progress_bar(f"pull {escaped(dest)}", "B", "files") as progress:
        done = pull(url, dest, jobs=jobs, wait=wait, progress=progress)
    return _fetched(done)


@command(
    "stage",
    "Copy a cache to a fast disk, such as a node's local one.",
    kept=". Fetched files are kept; the same command resumes",
    examples="""niels-gpt stage cache/pretrain/wikitext /local/wikitext
niels-gpt stage s3://BUCKET/wikitext /local/wikitext --split train --max-bytes 100000000""",
)
@argument("source", metavar="CACHE_OR_URL", help=f"folder of a cache, or {_URL}")
@argument("dest", type=_PATH, help="path of the copy")
@option("--split", type=click.Choice(["train", "val"]), help="copy only this split")
@option("--max-bytes", type=click.IntRange(1), metavar="N", help="copy as many token files as fit into N bytes")
@_JOBS
def stage(source: str, dest: Path, split: str | None, max_bytes: int | None, jobs: int) -> Result:
    """Stage a cache."""
    from niels_gpt.exchange.transfer.fetch import stage

    with progress_bar(f"stage {escaped(dest)}", "B", "files") as progress:
        done = stage(source, dest, split=split, max_bytes=max_bytes, jobs=jobs, progress=progress)
    return _fetched(done)


def _fetched(done: Fetched) -> Result:
    """Print and return the result of a pull or a stage."""
    say(str(done))
    data = {name: str(fact) if isinstance(fact, Path) else fact for name, fact in asdict(done).items()}
    return Result(data, next=shlex.join(["niels-gpt", "verify", str(done.path)]))
