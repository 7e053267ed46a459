"""eagle3 convert, redraft, seal, join: other forms, other draft vocabularies; parts that become one cache."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich_click import argument, option

from niels_gpt.commands.console import Result, progress_bar, say
from niels_gpt.commands.eagle3.look import command, of_cache
from niels_gpt.commands.partitions import seal_folder
from niels_gpt.storage.errors import CacheError

_PATH = click.Path(path_type=Path)


@command(
    "convert",
    "Convert a cache: versions 1 and 2 into each other in place, a native one into a new cache of version 1 or 2.",
    examples="""niels-gpt eagle3 convert CACHE --format 2                     1 -> 2: no shard is rewritten
niels-gpt eagle3 convert CACHE --format 1 --output-dir OUT    native -> 1""",
)
@of_cache
@option(
    "--format", "--format-version", "form", type=click.Choice(["1", "2", "native"]), required=True, help="to convert to"
)
@option("--output-dir", type=_PATH, metavar="OUT", help="folder of the new cache, for a native one")
@option("--shard-size", type=click.IntRange(1), default=256, metavar="N", help="samples of a shard, for a native cache")
@option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="where distributions are made")
def convert(cache: Path, follow_links: bool, form: str, output_dir: Path | None, **how: Any) -> Result:
    """Convert a cache."""
    from niels_gpt.eagle3.format.manifest import is_native, read_manifest

    manifest = read_manifest(cache, follow_links=follow_links)
    if is_native(manifest) and form != "native":
        return _published(cache, int(form), output_dir, follow_links=follow_links, **how)
    if form == "native" and not is_native(manifest):
        raise _not_to_native(cache, manifest, follow_links)
    _refuse_stated("output_dir", "shard_size", "device")
    if form == "native":
        say(f"{cache}: is native already; nothing was written")
        return Result({"cache": str(cache), "format": form, "changed": False})
    return _in_place(cache, int(form), follow_links)


def _refuse_stated(*names: str) -> None:
    """Raise UsageError for an option that the command line states and no shard is written by."""
    given = click.get_current_context().get_parameter_source
    if stated := [name for name in names if given(name) not in (None, ParameterSource.DEFAULT)]:
        flags = ", ".join("--" + name.replace("_", "-") for name in stated)
        raise click.UsageError(
            f"{flags}: only where a native cache becomes one of version 1 or 2. Here no shard is written, and the "
            "cache stays in its place. Leave it out, or copy the cache first"
        )


def _in_place(cache: Path, version: int, follow_links: bool) -> Result:
    from niels_gpt.eagle3.cache import convert

    is_changed = convert(cache, version, follow_links=follow_links)
    changed = f"now version {version}: manifest.json was rewritten, no shard was changed"
    say(f"{cache}: {changed if is_changed else f'is version {version} already; nothing was written'}")
    return Result({"cache": str(cache), "format_version": version, "changed": is_changed})


def _published(
    cache: Path, version: int, out: Path | None, *, follow_links: bool, shard_size: int, device: str
) -> Result:
    import torch

    from niels_gpt.eagle3.derive.published import Published

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no usable GPU here. Use --device cpu")
    if out is None:
        raise click.UsageError(f"{cache} is native, and version {version} has other shards: name --output-dir OUT")
    published = Published(cache, version, shard_size=shard_size, device=device, follow_links=follow_links)
    cost = published.cost(out)
    say(
        f"{out}: {cost.apparent_bytes:,} bytes of files with padding and embeddings; to write {cost.written_bytes:,}, "
        f"free {cost.free_bytes:,}"
    )
    if cost.rounded_from is not None:
        say(f"the auxiliary states are {cost.rounded_from}: they are written as {published.manifest['dtype']}")
    with progress_bar("convert", "tok") as progress:
        published.write(out, progress=progress)
    say(f"{out}: version {version}; distributions where there is loss, uniform ones in the other slots")
    made = {"cache": str(out), "format_version": version, "changed": True, "bytes": cost.apparent_bytes}
    return Result(made, next=shlex.join(["niels-gpt", "eagle3", "verify", str(out)]))


def _not_to_native(cache: Path, manifest: dict[str, Any], follow_links: bool) -> CacheError:
    """Return the refusal, with the command that makes a native cache of the same input, as far as the plan has it."""
    from niels_gpt.eagle3.format.plan import read_record

    record = read_record(cache, follow_links=follow_links) or {}
    target, source = record.get("target", {}), record.get("source", {})
    root = {"sample": "sample", "hub": "hub", "mirror": "FOLDER"}.get(str(source.get("kind")))
    is_whole = manifest["draft_vocab_size"] == manifest["target_vocab_size"]
    options = {
        "target-model": target.get("name") or manifest.get("target_model") or "MODEL",
        "revision": target.get("revision"),
        "input-data": source.get("input_data") or manifest.get("input_data") or "SOURCE",
        "source-root": root,
        "document-start": ((record.get("tokenizer") or {}).get("document_start") or {}).get("token"),
        "limit": source.get("limit"),
        "seq-length": manifest["seq_length"],
        "draft-vocab-from": None if is_whole else cache,
        "output-dir": "DIR",
    }
    words = ["niels-gpt", "eagle3", "precompute", "--format", "native"]
    words += [str(word) for name, value in options.items() if value is not None for word in (f"--{name}", value)]
    has_template = record.get("tokenizer", {}).get("template_sha256") is not None
    template = "With the --chat-template of the first run, if it had one. " if has_template else ""
    found = (
        f"version {manifest['format_version']} holds neither the target's last hidden states nor its log-normalizers, "
        "of which a native cache is made"
    )
    return CacheError(cache, found, remedy=f"{template}Run the target again: {shlex.join(words)}", code="E710")


@command(
    "redraft",
    "Give a native cache another draft vocabulary: a new cache without running the target, of hard links to the old.",
    examples="niels-gpt eagle3 redraft CACHE OUT --draft-vocab-size 16000",
)
@of_cache
@argument("out", type=_PATH, help="folder of the new cache: empty or absent, on the same file system")
@option("--draft-vocab-size", type=click.IntRange(1), metavar="D", help="tokens of the draft: the most frequent ones")
@option("--draft-vocab-from", metavar="FILE", help="take them from a token mapping or a cache")
@option("--tokenizer", metavar="MODEL", help="folder or hub id that has the special tokens, for a cache without a plan")
@option("--copy", is_flag=True, help="copy the files: for a folder on another file system")
def redraft(
    cache: Path,
    follow_links: bool,
    out: Path,
    draft_vocab_size: int | None,
    draft_vocab_from: str | None,
    tokenizer: str | None,
    copy: bool,
) -> Result:
    """Give a cache another draft vocabulary."""
    from niels_gpt.eagle3.derive.redraft import redraft
    from niels_gpt.eagle3.format.manifest import read_manifest
    from niels_gpt.eagle3.vocab import load_token_mapping

    if draft_vocab_size is None and draft_vocab_from is None:
        raise click.UsageError("name --draft-vocab-size, --draft-vocab-from, or both")
    selected: list[int] | None = None
    special: list[int | None] = []
    if draft_vocab_from is not None:
        vocab_size = read_manifest(cache, follow_links=follow_links)["target_vocab_size"]
        ids, _ = load_token_mapping(draft_vocab_from, target_vocab_size=vocab_size, draft_vocab_size=draft_vocab_size)
        selected = ids.tolist()
    else:
        special = _special_ids(cache, tokenizer, follow_links)
    made = redraft(
        cache,
        out,
        draft_vocab_size=draft_vocab_size,
        special_token_ids=special,
        selected_token_ids=selected,
        copy=copy,
        follow_links=follow_links,
    )
    size, (linked, copied) = len(made.selected_token_ids), (made.linked_bytes, made.copied_bytes)
    fewer = f", which is all of the target's, not {draft_vocab_size:,}" if size < (draft_vocab_size or 0) else ""
    say(f"{out}: draft vocabulary {size:,}{fewer}; {made.counts}; {linked:,} bytes linked, {copied:,} copied")
    return Result(
        {"cache": str(out), "draft_vocab_size": size, "positions": made.counts.positions, "linked_bytes": linked},
        next=shlex.join(["niels-gpt", "eagle3", "verify", str(out)]),
    )


def _special_ids(cache: Path, name: str | None, follow_links: bool) -> list[int | None]:
    """Return bos, eos, pad and unk: the plan's, or, without a plan, those of the target's tokenizer."""
    from niels_gpt.chat.tokenizers import open_tokenizer
    from niels_gpt.eagle3.format.manifest import read_manifest
    from niels_gpt.eagle3.format.plan import read_record

    record = read_record(cache, follow_links=follow_links) or {}
    planned: list[int | None] | None = record.get("tokenizer", {}).get("special_token_ids")
    if planned is not None and name is None:
        return planned
    model = name or read_manifest(cache, follow_links=follow_links)["target_model"]
    try:
        return list(open_tokenizer(model).special_token_ids)
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        found = f"it has no plan with the special tokens, and the tokenizer of {model} cannot be opened: {error}"
        remedy = "Name the target's folder or hub id with --tokenizer, or the tokens with --draft-vocab-from"
        raise CacheError(cache, found, remedy=remedy, code="E707") from error


@command(
    "seal",
    "Finish a folder in which precompute --partition made all partitions: every shard is checked, then meta.json is "
    "written.",
    examples="niels-gpt eagle3 seal DIR",
)
@argument("cache", type=_PATH, metavar="DIR", help="folder that the partitions were made in")
def seal(cache: Path) -> Result:
    """Seal a folder of parts."""
    from niels_gpt.eagle3.kind import EAGLE3

    return seal_folder(EAGLE3, cache)


@command(
    "join",
    "Put partitions together that were made in folders of their own: links where possible, the bytes of one run.",
    examples="niels-gpt eagle3 join CACHE part-1 part-2 part-3",
)
@argument("out", type=click.Path(path_type=Path), help="folder of the cache: empty or absent")
@argument("part", type=click.Path(path_type=Path), nargs=-1, required=True, help="folders of precompute --partition")
def join(out: Path, part: tuple[Path, ...]) -> Result:
    """Join parts."""
    from niels_gpt.eagle3.build import join

    joined = join(out, part)
    totals = joined.meta["totals"]
    copied = f", {joined.copied_bytes:,} bytes were copied" if joined.copied_bytes else ""
    say(
        f"{out}: {totals['shards']:,} shards, {totals['samples']:,} samples, {totals['tokens']:,} tokens; "
        f"{joined.linked_bytes:,} bytes are shared with them{copied}"
    )
    made = {"folder": str(out), "totals": totals}
    sizes = {"linked_bytes": joined.linked_bytes, "copied_bytes": joined.copied_bytes}
    return Result(made | sizes, next=shlex.join(["niels-gpt", "eagle3", "verify", str(out)]))
