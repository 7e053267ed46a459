"""python -m niels_gpt.eagle3.precompute: run a frozen target over chats once, and store its outputs for drafts.

recipes/eagle3/options.py defines the flags; this module prints the estimate and the result.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from niels_gpt.commands.console import (
    ERRORS,
    Command,
    ExitCode,
    Option,
    Result,
    is_color_wanted,
    progress_bar,
    run,
    say,
)
from niels_gpt.recipes.eagle3.options import GROUPS, Options, TargetOptions, flag_name
from niels_gpt.settings import Settings, usable_cores

if TYPE_CHECKING:
    from niels_gpt.eagle3.build import Produced
    from niels_gpt.eagle3.disk import Estimate
    from niels_gpt.recipes.eagle3.prepare import Prepared

AnyOptions = TypeVar("AnyOptions", bound=TargetOptions)
_UNSTATED = (None, ParameterSource.DEFAULT)
_NAMES = {each.name for each in fields(Options)} - {"partitions", "partition", "resume", "show"} | {"source_root"}
"""Options that all partitions of a cache may be made with."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run python -m niels_gpt.eagle3.precompute with arguments; return the exit status."""
    return run(PRECOMPUTE, argv, "python -m niels_gpt.eagle3.precompute")


def _precompute(source_root: str, dry_run: bool, **given: Any) -> Result:
    return _run(options_of(given, Options), Settings(source_root=source_root), _stated_words(), dry_run=dry_run)


def _stated_words() -> list[str]:
    """Return the command's words without the ones that differ by partition, for other machines to run."""
    context = click.get_current_context()
    words = ["niels-gpt", "eagle3", "precompute"]
    for flag in context.command.params:
        value, source = context.params.get(flag.name or ""), context.get_parameter_source(flag.name or "")
        if source not in _UNSTATED and flag.name in _NAMES and isinstance(flag, click.Option):
            words += [flag.opts[0], _whole_path(str(value))]
    return words


def _whole_path(value: str) -> str:
    """Return the absolute path for an existing path, as other machines run in other folders; else the value."""
    is_path = any(sign in value for sign in "/.") and os.path.exists(value)
    return os.path.abspath(value) if is_path else value


def _run(options: Options, settings: Settings, command: list[str], *, dry_run: bool) -> Result:
    from niels_gpt.eagle3.disk import estimate, refuse_without_room
    from niels_gpt.eagle3.resume import finished_shards, progress_text
    from niels_gpt.recipes.eagle3.prepare import carry_out, prepare, warn_of_missing_start
    from niels_gpt.recipes.eagle3.request import resolve

    assert options.output_dir is not None
    resolved = resolve(options, settings)
    _hint_at_threads(options.workers, resolved.run)
    with progress_bar("tokenizing", "samples") as show:
        prepared = prepare(resolved, tokenized=lambda samples, _: show(0, samples, None))
    if prepared.shown:
        from niels_gpt.chat.rows import show_rows

        say(show_rows(prepared.shown, resolved.tokenizer, color=is_color_wanted()), is_safe=True)
    part = options.part_numbers
    done = finished_shards(options.output_dir, prepared.plan, resume=options.resume, part=part)
    sizes = estimate(options.output_dir, prepared.plan, prepared.samples, done=done, part=part)
    _print_estimate(sizes, prepared, options.output_dir)
    if state := progress_text(options.output_dir, prepared.plan, done):
        say(f"{options.output_dir}: {state}")
    if dry_run:
        warn_of_missing_start(prepared, options.output_dir)
        return Result(asdict(sizes) | {"fits": sizes.fits}, ExitCode.GOOD if sizes.fits else ExitCode.FAILED)
    refuse_without_room(options.output_dir, sizes, prepared.plan.manifest)
    with progress_bar("target", items="bytes") as show:
        produced = carry_out(prepared, options.output_dir, resume=options.resume, command=command, progress=show)
    made = {"folder": str(options.output_dir), "shards": produced.shards}
    if not produced.meta:
        return _partition_made(prepared, options, made)
    _print_made(produced, options.output_dir)
    made |= {"totals": produced.meta["totals"], "token_bytes": produced.meta["token_bytes"]}
    made["bytes_per_token"] = produced.meta["bytes_per_token"]
    return Result(made, next=shlex.join(["niels-gpt", "eagle3", "verify", str(options.output_dir)]))


def _partition_made(prepared: Prepared, options: Options, made: dict[str, Any]) -> Result:
    """Print the result of a partition, and what to do next."""
    from niels_gpt.eagle3.partitions import part_text
    from niels_gpt.eagle3.resume import finished_of, progress_text

    part = options.part_numbers
    assert options.output_dir is not None and part is not None
    done = finished_of(options.output_dir, prepared.plan)
    if state := progress_text(options.output_dir, prepared.plan, done):
        say(f"{options.output_dir}: {state}")
    say(
        f"{options.output_dir}: made {made['shards']:,} of {prepared.plan.num_shards:,} shards, {part_text(part)}. "
        "The cache is not finished: make the other partitions with the same options, here or on other machines, and "
        "seal it"
    )
    numbers = {"partition": options.partition, "partitions": options.partitions, "part": f"{part[0]}/{part[1]}"}
    return Result(
        made | numbers | {"of_shards": prepared.plan.num_shards},
        next=shlex.join(["niels-gpt", "seal", str(options.output_dir)]),
    )


def _hint_at_threads(workers: int, run: dict[str, Any]) -> None:
    """Print a hint if workers share cores. The number of threads decides bytes, so it is not changed here."""
    cores, processes = usable_cores(), workers * run.get("tensor_parallel", 1)
    fitting = max(1, cores // processes)
    if processes > 1 and run["device"] == "cpu" and run["threads"] > fitting:
        print(
            f"hint: {processes} processes of {run['threads']} threads each share {cores} cores and slow each other "
            f"down; name --threads {fitting} for a new cache",
            file=sys.stderr,
        )


# --- what is printed --------------------------------------------------------------------------------------------------


def _print_estimate(sizes: Estimate, prepared: Prepared, folder: Path) -> None:
    from niels_gpt.eagle3.format.drafters import rows_text
    from niels_gpt.eagle3.partitions import part_text

    manifest = prepared.plan.manifest
    say(
        f"{sizes.samples:,} samples, {sizes.tokens:,} tokens, {sizes.supervised_share:.1%} supervised; "
        f"mean length {sizes.mean_length:.0f}, longest {sizes.max_length} of {manifest['seq_length']}"
    )
    for what, counts in (("left out", prepared.plan.dropped), ("altered", prepared.plan.altered)):
        if counts:
            say(f"{what}: {', '.join(f'{reason} {number:,}' for reason, number in counts.items())}")
    if (found := prepared.repeated) is not None and found.number:
        share = found.number / max(1, found.total)
        say(f"samples with a reply that ends in repetition: {found.number:,} ({share:.1%}), such as {found.example}")
    draft = f"draft vocabulary {manifest['draft_vocab_size']:,} of {manifest['target_vocab_size']:,}"
    if prepared.plan.is_native:
        blocks = ", ".join(map(str, manifest["aux_layer_ids"]))
        layers = f"{manifest['aux_dtype']} of the blocks {blocks}, " if blocks else ""
        say(f"native form, {layers}{manifest['dtype']} of the last one, {draft}")
        say(f"target rows {rows_text(manifest)}")
    else:
        topk = manifest.get("target_probs_topk") or "all"
        say(f"format version {manifest['format_version']}, {manifest['dtype']}, {draft}, probabilities kept: {topk}")
    finished = f", {sizes.shards_done:,} of them finished" if sizes.shards_done else ""
    if part := prepared.resolved.options.part_numbers:
        finished += f", {sizes.shards_left:,} to make in {part_text(part)}"
    say(f"{sizes.shards:,} shards{finished}, {sizes.batches:,} batches")
    holes, padding = "", ""
    if not prepared.plan.is_native:
        holes = f" ({'padding is holes there' if sizes.has_holes else 'no holes on that file system'})"
        padding = "padding and "
    say(
        f"{folder}: {_by_token(sizes.bytes_per_token, sizes.token_bytes)}; "
        f"{sizes.apparent_bytes:,} bytes of files with {padding}"
        f"{'target weights, at most' if prepared.plan.is_native else 'embeddings'}; to write "
        f"{sizes.to_write_bytes:,}{holes}, free {sizes.free_bytes:,}: {'fits' if sizes.fits else 'does not fit'}"
    )


def _by_token(total: float, parts: dict[str, float]) -> str:
    """Return bytes_per_token as text, with the bytes of a slot, or of a native cache's larger tensors."""
    text = f"{total:,.0f} bytes a token"
    if "target_probs" in parts or "target_probs_values" in parts:
        return f"{text}, {sum(parts.values()):,.0f} a slot"
    named = {name: size for name, size in sorted(parts.items(), key=lambda each: -each[1]) if size >= total / 200}
    rest = total - sum(named.values())
    shown = [f"{name} {size:,.0f}" for name, size in named.items()] + ([f"others {rest:,.1f}"] if rest else [])
    return f"{text} ({', '.join(shown)})"


def _print_made(produced: Produced, folder: Path) -> None:
    from niels_gpt.eagle3.totals import Counts

    meta, totals = produced.meta, produced.meta["totals"]
    on_disk = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
    done = "all shards were there, meta.json was written" if produced.is_described else "up to date"
    say(f"{folder}: {f'made {produced.shards:,} shards' if produced.shards else done}")
    if "target_rows" in totals:
        aux = f", {totals['aux_rows']:,} rows of auxiliary states" if meta["manifest"]["aux_layer_ids"] else ""
        more = f"{totals['target_rows']:,} target rows{aux}"
    else:
        more = f"probability mass kept: {'all' if meta['kept_mass'] is None else format(meta['kept_mass'], '.4f')}"
    say(f"{totals['samples']:,} samples, {totals['tokens']:,} tokens, {Counts.of_meta(meta)}, {more}")
    weights = "target weights" if "target_rows" in totals else "padding and embeddings"
    by_token = _by_token(meta["bytes_per_token"], meta["token_bytes"])
    say(f"{by_token}; {meta['disk_bytes']:,} bytes of files with {weights}, {on_disk:,} on disk")
    if meta["manifest"]["format_version"] == 2:
        from niels_gpt.eagle3.format.manifest import recipe_of

        say(f"NeMo Automodel's trainer reads it with this in its recipe: {recipe_of(folder, meta['manifest'])}")


# --- flags ------------------------------------------------------------------------------------------------------------


def flags_of(options: type[TargetOptions], dry_run: str) -> list[click.Parameter]:
    """Return a flag for each option with a group, in the order of GROUPS. dry_run: help of --dry-run."""
    found = [_flag(each) for group in GROUPS for each in fields(options) if each.metadata["group"] == group]
    text = "where sources are read: hub, sample, or the folder of a mirror"
    root = Option(["--source-root"], default=Settings().source_root, metavar="ROOT", help=text, panel=GROUPS[0])
    return [*found, root, Option(["--dry-run"], is_flag=True, help=dry_run, panel=GROUPS[-1])]


def options_of(given: dict[str, Any], options: type[AnyOptions]) -> AnyOptions:
    """Return the options that the flags state. Raises: click.UsageError."""
    from niels_gpt.recipes.chats import template_text

    file = given["chat_template"]
    try:
        made = options(**{**given, "chat_template": template_text(Settings(chat_template=file and str(file)))})
        if isinstance(made, Options):  # also those stated as their default
            source = click.get_current_context().get_parameter_source
            made.check_form([name for name in given if source(name) not in _UNSTATED])
        return made
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error), click.get_current_context()) from error


def _flag(each: Field[Any]) -> Option:
    how = dict(each.metadata["flag"])
    if "choices" in how:
        how["type"] = click.Choice(how.pop("choices"))
    elif how.get("type") is Path:
        how["type"] = click.Path(path_type=Path)
    elif each.metadata["least"] is not None:
        how = {"type": int, "metavar": "N", **how}
    if each.default is False:
        how["is_flag"] = True
    elif each.default not in (None, MISSING):
        how["default"] = each.default
    return Option([flag_name(each.name), each.name], help=each.metadata["help"], panel=each.metadata["group"], **how)


class _Precompute(Command):
    """The command; takes --format-version as the older name of --format."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        return super().parse_args(ctx, [re.sub("^--format[-_]version(?=$|=)", "--format", each) for each in args])


PRECOMPUTE = _Precompute(
    "precompute",
    callback=_precompute,
    params=[
        *flags_of(Options, "print sizes and free space, and stop; exit code 1: it does not fit"),
        Option(["--part"], metavar="i/N", hidden=True, help="the earlier name: --partitions N --partition i - 1"),
    ],
    help="Run a large model over chats once, and store its outputs for training drafts.\n\n"
    "A draft is a small model that proposes tokens for a large one, the target, to check. It learns from the target's "
    "outputs; from the cache in DIR it does so without the target. MODEL is a transformers model, by folder or hub id. "
    "SOURCE is a source of chats (dolly15k, oasst1, or your own by its name), or a file, folder or pattern of JSONL, "
    "JSON or parquet: chats, or rows of input_ids and loss_mask. --resume continues a run that was killed, with any "
    "number of workers, to the same bytes.",
    errors=(*ERRORS, RuntimeError),
    kept="; finished shards stay: resume with the same command and --resume",
    unread=1,
    examples="""niels-gpt eagle3 precompute --target-model MODEL --input-data chats.jsonl --output-dir DIR --dry-run
niels-gpt eagle3 precompute --target-model MODEL --input-data chats.jsonl --output-dir DIR --format native
niels-gpt eagle3 precompute --target-model MODEL --input-data chats.jsonl --output-dir DIR --resume""",
)
