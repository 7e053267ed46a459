"""The groups `niels-gpt eagle3` and python -m niels_gpt.eagle3, and the commands for finished caches.

Here: verify, inspect, stats; convert, redraft, seal, join. They also take caches of other tools in the same format.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from niels_gpt.commands.console import (
    Command,
    ExitCode,
    Group,
    Result,
    argument,
    option,
    progress_bar,
    run,
    say,
)
from niels_gpt.commands.eagle3.exchange import export, import_, watch
from niels_gpt.commands.eagle3.precompute import PRECOMPUTE
from niels_gpt.commands.eagle3.respond import respond
from niels_gpt.commands.eagle3.shared import PATH, command, of_cache
from niels_gpt.commands.partitions import seal_folder
from niels_gpt.display.pictures import check_png
from niels_gpt.display.tables import folded, table
from niels_gpt.eagle3.inspect.checks import RECOMPUTED
from niels_gpt.recipes.eagle3.options import TargetOptions
from niels_gpt.storage.checks import Verdict
from niels_gpt.storage.errors import CacheError

_HELP = {each.name: each.metadata["help"] for each in fields(TargetOptions)}


@command(
    "verify",
    "Check a cache, and report every damage with its shard and sample.",
    examples="""niels-gpt eagle3 verify CACHE                        every damage, with its shard and sample
niels-gpt eagle3 verify CACHE --target MODEL -k 8    and run 8 samples through the target again
niels-gpt eagle3 verify CACHE --target MODEL --head-only    and load no more of it than its head""",
)
@of_cache
@option("--target", metavar="MODEL", help="folder or hub id of the cache's target: run samples through it again")
@option("--revision", metavar="REV", help="commit, tag or branch of the target; the cache's own if not given")
@option("-k", "--samples", type=int, default=8, metavar="N", help="number of samples to run, drawn by --seed")
@option("--seed", type=int, default=0, metavar="N", help="seed of the draw")
@option("--device", type=click.Choice(["cpu", "cuda"]), help="where the target runs; as for the cache if not given")
@option("--device-map", metavar="MAP", help=_HELP["device_map"])
@option("--max-memory", metavar="LIMITS", help=_HELP["max_memory"])
@option("--head-only", is_flag=True, help="with --target: load its head alone, and compute target rows again by it")
def verify(cache: Path, follow_links: bool, target: str | None, head_only: bool, **how: Any) -> Result:
    """Check a cache."""
    from niels_gpt.eagle3.inspect.verify import verify
    from niels_gpt.eagle3.resume import refuse_unsealed

    refuse_unsealed(cache)
    recomputed = Verdict([], "not made: name the target with --target")
    if head_only and (target is None or how["device"] or how["device_map"] or how["max_memory"]):
        raise click.UsageError("--head-only: needs --target, and computes on the CPU; leave --device and the like out")
    if target is not None:  # first, so that a wrong one is reported before all of the cache is read
        recomputed = _recomputed(cache, target, head_only, follow_links=follow_links, **how)
    with progress_bar("verify", "B") as progress:
        verdicts = verify(cache, progress=progress, follow_links=follow_links)
    verdicts[RECOMPUTED] = recomputed
    say("\n".join([f"{cache}:", *(_verdict_lines(name, verdict) for name, verdict in verdicts.items())]))
    code = ExitCode.FAILED if target is not None and recomputed.note is not None else ExitCode.GOOD
    if any(verdict.problems for verdict in verdicts.values()):
        code = ExitCode.DAMAGED
    return Result({name: vars(verdict) for name, verdict in verdicts.items()}, code)


def _recomputed(
    path: Path, name: str, head_only: bool, *, samples: int, seed: int, follow_links: bool, **where: str | None
) -> Verdict:
    from niels_gpt.eagle3.inspect.by_head import recomputed_by_head
    from niels_gpt.eagle3.inspect.recompute import recomputed
    from niels_gpt.recipes.eagle3.prepare import target_of

    how: dict[str, Any] = {"k": samples, "seed": seed, "follow_links": follow_links}
    if head_only:
        return recomputed_by_head(path, name, revision=where["revision"], **how)
    target = target_of(path, name, follow_links=follow_links, **where)
    with progress_bar("target", "batches") as progress:
        return recomputed(path, target, progress=progress, **how)


def _verdict_lines(name: str, verdict: Verdict) -> str:
    count = len(verdict.problems)
    outcome = verdict.note or ("ok" if not verdict.figures else f"ok: {verdict.figures}")
    if count:
        outcome = f"{count} problem{'' if count == 1 else 's'}"
    lines = [*folded(f"  {name:<14}{outcome}", indent=" " * 16), *(f"    {problem}" for problem in verdict.problems)]
    return "\n".join([*lines, *(f"    note: {remark}" for remark in verdict.remarks)])


@command(
    "inspect",
    "Print the origin, form and shards of a cache, or one sample token by token.",
    examples="niels-gpt eagle3 inspect CACHE --sample 3 --tokenizer MODEL",
)
@of_cache
@option("--sample", type=int, metavar="I", help="number of the sample, from 0")
@option(
    "--tokenizer",
    metavar="MODEL",
    help="folder or hub id, to print ids as text; ids only if not given",
)
@option("--slot", type=int, metavar="P", default=0, help="first token of the sample to print")
@option("--slots", type=int, metavar="N", default=32, help="most tokens to print")
def inspect(
    cache: Path, follow_links: bool, sample: int | None, tokenizer: str | None, slot: int, slots: int
) -> Result:
    """Print a cache's origin, or a sample's slots."""
    from niels_gpt.eagle3.inspect import show

    links = {"follow_links": follow_links}
    if sample is None:
        say(f"{table(show.summary(cache, **links))}\n\n{table(show.shard_rows(cache, **links))}")
        return Result(show.description(cache, **links))
    opened = None
    if tokenizer is not None:
        from niels_gpt.chat.tokenizers import open_tokenizer

        opened = open_tokenizer(tokenizer)
    rows = show.slot_rows(cache, sample, opened, begin=slot, slots=slots, **links)
    say(f"{show.sample_heading(cache, sample, **links)}\n{table(rows)}")
    return Result({"sample": sample, "slots": [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]})


@command(
    "stats",
    "Print figures of a cache: tokens, lengths, kept probability, entropy, norms.",
    examples="niels-gpt eagle3 stats CACHE --plot stats.png",
)
@of_cache
@option("--plot", type=PATH, metavar="PNG", help="also draw lengths, entropy and kept probability into this file")
@option("--seed", type=int, default=0, metavar="N", help="seed that draws the tokens whose states are read")
def stats(cache: Path, follow_links: bool, plot: Path | None, seed: int) -> Result:
    """Print the figures of a cache."""
    from niels_gpt.eagle3.inspect.stats import stats
    from niels_gpt.eagle3.resume import refuse_unsealed

    refuse_unsealed(cache)
    if plot is not None:
        check_png(plot)  # fail before all of the cache is read
    with progress_bar("stats", "shards") as progress:
        numbers = stats(cache, seed=seed, progress=progress, follow_links=follow_links)
    if plot is not None:
        from niels_gpt.eagle3.inspect.stats import plot as draw
        from niels_gpt.storage.fileio import write_bytes

        write_bytes(plot, draw(numbers, cache.name))
    say(table(numbers.rows()))
    return Result(numbers.as_json())


# --- other forms, other draft vocabularies; parts that become one cache -----------------------------------------------


@command(
    "convert",
    "Convert a cache: between versions 1 and 2 in place, or a native one into a new cache of version 1 or 2.",
    examples="""niels-gpt eagle3 convert CACHE --format 2                     1 -> 2: no shard is rewritten
niels-gpt eagle3 convert CACHE --format 1 --output-dir OUT    native -> 1""",
)
@of_cache
@option(
    "--format",
    "--format-version",
    "form",
    type=click.Choice(["1", "2", "native"]),
    required=True,
    help="new form",
)
@option("--output-dir", type=PATH, metavar="OUT", help="folder of the new cache, if CACHE is native")
@option("--shard-size", type=click.IntRange(1), default=256, metavar="N", help="samples in a shard of the new cache")
@option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="where probabilities are computed")
def convert(cache: Path, follow_links: bool, form: str, output_dir: Path | None, **how: Any) -> Result:
    """Convert a cache."""
    from niels_gpt.eagle3.format.manifest import is_native, read_manifest

    manifest = read_manifest(cache, follow_links=follow_links)
    if is_native(manifest) and form != "native":
        return _to_dense(cache, int(form), output_dir, follow_links=follow_links, **how)
    if form == "native" and not is_native(manifest):
        raise _not_to_native(cache, manifest, follow_links)
    _refuse_stated("output_dir", "shard_size", "device")
    if form == "native":
        say(f"{cache}: is native already; nothing was written")
        return Result({"cache": str(cache), "format": form, "changed": False})
    return _in_place(cache, int(form), follow_links)


def _refuse_stated(*names: str) -> None:
    """Raise UsageError for options on the command line that only apply when shards are written."""
    given = click.get_current_context().get_parameter_source
    if stated := [name for name in names if given(name) not in (None, ParameterSource.DEFAULT)]:
        flags = ", ".join("--" + name.replace("_", "-") for name in stated)
        raise click.UsageError(
            f"{flags}: only for a native cache that becomes version 1 or 2. This conversion writes no shard, and "
            "changes the cache in place. Leave it out, or copy the cache first: cp -rL CACHE COPY"
        )


def _in_place(cache: Path, version: int, follow_links: bool) -> Result:
    from niels_gpt.eagle3.cache import convert

    is_changed = convert(cache, version, follow_links=follow_links)
    changed = f"now version {version}: manifest.json was rewritten, no shard was changed"
    say(f"{cache}: {changed if is_changed else f'is version {version} already; nothing was written'}")
    _say_recipe(cache, version, follow_links)
    return Result({"cache": str(cache), "format_version": version, "changed": is_changed})


def _say_recipe(cache: Path, version: int, follow_links: bool = False) -> None:
    from niels_gpt.eagle3.format.manifest import read_manifest, recipe_of

    if version == 2:
        lines = recipe_of(cache, read_manifest(cache, follow_links=follow_links))
        say(f"NeMo Automodel's trainer reads it with this in its recipe: {lines}")


def _to_dense(
    cache: Path, version: int, out: Path | None, *, follow_links: bool, shard_size: int, device: str
) -> Result:
    import torch

    from niels_gpt.eagle3.derive import DenseConversion

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no usable GPU here. Use --device cpu")
    if out is None:
        raise click.UsageError(f"{cache} is native, and version {version} needs new shards: pass --output-dir OUT")
    conversion = DenseConversion(cache, version, shard_size=shard_size, device=device, follow_links=follow_links)
    cost = conversion.cost(out)
    say(
        f"{out}: {cost.apparent_bytes:,} bytes of files with padding and embeddings; to write {cost.written_bytes:,}, "
        f"free {cost.free_bytes:,}"
    )
    if cost.rounded_from is not None:
        say(f"the auxiliary states are converted from {cost.rounded_from} to {conversion.manifest['dtype']}")
    with progress_bar("convert", "tok") as progress:
        conversion.write(out, progress=progress)
    say(f"{out}: version {version}; distributions where there is loss, uniform ones in the other slots")
    _say_recipe(out, version)
    made = {"cache": str(out), "format_version": version, "changed": True, "bytes": cost.apparent_bytes}
    return Result(made, next=shlex.join(["niels-gpt", "eagle3", "verify", str(out)]))


def _not_to_native(cache: Path, manifest: dict[str, Any], follow_links: bool) -> CacheError:
    """Return the refusal, with the command that builds a native cache of the same input if the plan knows it."""
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
    template = "Take the --chat-template of the first run, if it had one. " if has_template else ""
    found = (
        f"version {manifest['format_version']} has neither the target's last hidden states nor its log-normalizers, "
        "and a native cache needs both"
    )
    return CacheError(cache, found, remedy=f"{template}Run the target again: {shlex.join(words)}", code="E710")


@command(
    "redraft",
    "Give a native cache another draft vocabulary: a new cache of hard links, without running the target.",
    examples="niels-gpt eagle3 redraft CACHE OUT --draft-vocab-size 16000",
)
@of_cache
@argument("out", type=PATH, help="folder of the new cache: empty or missing, on the same file system")
@option(
    "--draft-vocab-size",
    type=click.IntRange(1),
    metavar="D",
    help="number of draft tokens: the most frequent ones",
)
@option("--draft-vocab-from", metavar="FILE", help="take the tokens from a file or another cache")
@option(
    "--tokenizer",
    metavar="MODEL",
    help="folder or hub id with the special tokens, for a cache without a plan",
)
@option("--copy", is_flag=True, help="copy the files instead of linking them, for a folder on another file system")
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
    from niels_gpt.eagle3.derive import redraft
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
    fewer = f", the whole vocabulary of the target, not {draft_vocab_size:,}" if size < (draft_vocab_size or 0) else ""
    say(f"{out}: draft vocabulary {size:,}{fewer}; {made.counts}; {linked:,} bytes linked, {copied:,} copied")
    return Result(
        {"cache": str(out), "draft_vocab_size": size, "positions": made.counts.positions, "linked_bytes": linked},
        next=shlex.join(["niels-gpt", "eagle3", "verify", str(out)]),
    )


def _special_ids(cache: Path, name: str | None, follow_links: bool) -> list[int | None]:
    """Return bos, eos, pad and unk from the plan; without a plan, from the target's tokenizer."""
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
        found = f"no plan lists its special tokens, and the tokenizer of {model} cannot be opened: {error}"
        remedy = "Pass the target's folder or hub id as --tokenizer, or name the draft tokens with --draft-vocab-from"
        raise CacheError(cache, found, remedy=remedy, code="E707") from error


@command(
    "seal",
    "Finish a folder in which precompute --partition built all partitions: check every shard, then write meta.json.",
    examples="niels-gpt eagle3 seal DIR",
)
@argument("cache", type=PATH, metavar="DIR", help="folder in which the partitions were built")
def seal(cache: Path) -> Result:
    """Seal a folder of partitions."""
    from niels_gpt.eagle3.kind import EAGLE3

    return seal_folder(EAGLE3, cache)


@command(
    "join",
    "Join partitions that were built in folders of their own into one cache, by links if possible.",
    examples="niels-gpt eagle3 join CACHE part-1 part-2 part-3",
)
@argument("out", type=click.Path(path_type=Path), help="folder of the cache: empty or missing")
@argument(
    "part",
    type=click.Path(path_type=Path),
    nargs=-1,
    required=True,
    help="folders of precompute --partition",
)
def join(out: Path, part: tuple[Path, ...]) -> Result:
    """Join partitions."""
    from niels_gpt.eagle3.build import join

    joined = join(out, part)
    totals = joined.meta["totals"]
    copied = f", {joined.copied_bytes:,} bytes were copied" if joined.copied_bytes else ""
    say(
        f"{out}: {totals['shards']:,} shards, {totals['samples']:,} samples, {totals['tokens']:,} tokens; "
        f"{joined.linked_bytes:,} bytes are shared with the partitions{copied}"
    )
    made = {"folder": str(out), "totals": totals}
    sizes = {"linked_bytes": joined.linked_bytes, "copied_bytes": joined.copied_bytes}
    return Result(made | sizes, next=shlex.join(["niels-gpt", "eagle3", "verify", str(out)]))


# --- the group --------------------------------------------------------------------------------------------------------


COMMANDS: list[Command] = [verify, inspect, stats, convert, redraft, seal, join, import_, watch, export, respond]
FACE = Group("eagle3", COMMANDS, help="Check, print and convert EAGLE-3 caches; read and write other tools' files.")
EAGLE3 = Group(
    "eagle3",
    [PRECOMPUTE, *COMMANDS],
    help="Store a large model's outputs to train drafts (EAGLE-3, DFlash, ...); check and convert such caches.",
)
"""The group of niels-gpt."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run python -m niels_gpt.eagle3 with arguments, by default the process's own; return the exit status."""
    return run(FACE, argv, "python -m niels_gpt.eagle3")
