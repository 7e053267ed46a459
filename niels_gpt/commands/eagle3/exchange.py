"""`niels-gpt eagle3 import`, `watch` and `export`: the files of other tools."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from niels_gpt.commands.console import ExitCode, Result, argument, option, progress_bar, say, tell
from niels_gpt.commands.eagle3.shared import PATH, command, of_cache
from niels_gpt.display.bar import LINE_EVERY_S
from niels_gpt.recipes.eagle3.options import DRAFTERS, TARGETS
from niels_gpt.storage.errors import UsageError
from niels_gpt.storage.meta_json import parse_object, printable

if TYPE_CHECKING:
    from niels_gpt.eagle3.exchange.move import Imported

GROWING = ("specforge", "speculators")
"""Tools whose folders `watch` takes while they grow."""
TOOLS = (*GROWING, "automodel")


_OF_IMPORT = (
    argument("source", type=PATH, metavar="DIR", help="folder of the other tool's files"),
    argument("out", type=PATH, metavar="OUT", help="folder of the cache: empty or missing"),
    option("--target", metavar="MODEL", required=True, help="folder or hub id of the model that the states come from"),
    option("--revision", metavar="REV", help="commit, tag or branch of the target on the hub"),
    option(
        "-k",
        "--samples",
        type=click.IntRange(1),
        default=8,
        metavar="N",
        help="number of samples to run through the target, to find out which layers are stored",
    ),
    option("--device", type=click.Choice(["cpu", "cuda"]), help="where the target runs; cuda if available"),
    option("--trust", is_flag=True, help="load only the target's head; believe --layers and --last-hidden"),
    option(
        "--layers",
        metavar="IDS",
        help="with --trust: stored layers from 0: eagle3, dflash:N, dspark:N, none, or 1,15,28",
    ),
    option(
        "--last-hidden",
        type=click.Choice(["pre_norm", "post_norm"]),
        help="with --trust: last hidden states before or after the final norm; as usual for the tool if not given",
    ),
    option(
        "--loss-mask",
        type=click.Choice(["raw", "shifted"]),
        help="raw: of each token itself; shifted: of the next one; if not given raw, checked by the replies",
    ),
    option(
        "--for",
        "made_for",
        type=click.Choice(DRAFTERS),
        help="kind of draft, for which SpecForge has other files; if not given eagle3, and dspark for automodel",
    ),
    option(
        "--targets",
        type=click.Choice(TARGETS),
        help="tokens whose last hidden state is kept; if not given as --for has it",
    ),
    option(
        "--draft-vocab-size",
        type=click.IntRange(1),
        metavar="D",
        help="tokens the draft can propose; all if not given",
    ),
    option("--aux-dtype", type=click.Choice(["stored", "fp8"]), default="stored", help="dtype of the layers' states"),
    option(
        "--shard-bytes", type=click.IntRange(1 << 16), metavar="N", help="most bytes of a shard; 1 GiB if not given"
    ),
    option("--drop-bad", is_flag=True, help="leave out bad samples and count them, instead of failing"),
    option("--follow-links", is_flag=True, help="read files that are symbolic links; refused otherwise"),
)
"""Arguments and options of import and watch."""


def of_import(tools: tuple[str, ...]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Add `_OF_IMPORT`, and --from with these tools, to a command's function."""
    which = option("--from", "tool", type=click.Choice(tools), required=True, help="the tool that wrote the files")

    def added(function: Callable[..., Result]) -> Callable[..., Result]:
        for add in reversed((*_OF_IMPORT[:2], which, *_OF_IMPORT[2:])):
            function = add(function)
        return function

    return added


@command(
    "import",
    "Make a native cache from the files of another tool.",
    examples="""niels-gpt eagle3 import DIR OUT --from specforge --target MODEL
niels-gpt eagle3 import DIR OUT --from speculators --target MODEL --aux-dtype fp8
niels-gpt eagle3 import DIR OUT --from specforge --target MODEL --trust --layers eagle3
niels-gpt eagle3 import DIR OUT --from specforge --target MODEL --for dspark
niels-gpt eagle3 import DIR OUT --from automodel --target MODEL""",
)
@of_import(TOOLS)
@option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, metavar="N", help="seed of the draw")
def import_(source: Path, out: Path, tool: str, **how: Any) -> Result:
    """Import a folder."""
    from niels_gpt.eagle3.exchange.move import import_cache

    target, arguments = _arguments(tool, source, **how)
    with progress_bar("import", "samples") as progress:
        done = import_cache(tool, source, out, target, **arguments, seed=how["seed"], progress=progress)
    say("\n".join(_import_lines(out, done)))
    return Result({"cache": str(out), **asdict(done)}, ExitCode.GOOD, _next(out))


@command(
    "watch",
    "Make a native cache while another tool still writes the files: wait for them, and continue after a stop.",
    examples="""niels-gpt eagle3 watch DIR OUT --from speculators --target MODEL --trust --layers 1,15,28
niels-gpt eagle3 watch DIR OUT --from speculators --target MODEL --trust --layers eagle3 --consume
niels-gpt eagle3 watch DIR OUT --from specforge --target MODEL --samples-total 50000""",
)
@of_import(GROWING)
@option(
    "--samples-total",
    type=click.IntRange(1),
    metavar="N",
    help="number of SpecForge's samples; if not given, until a file DIR/done",
)
@option("--once", is_flag=True, help="nothing more comes: take the files that are there, and end")
@option("--consume", is_flag=True, help="remove each file once its states are in a finished shard")
@option(
    "--patience",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    metavar="S",
    help="seconds after which a file that is not whole, or does not come, is bad",
)
def watch(
    source: Path,
    out: Path,
    tool: str,
    samples_total: int | None,
    once: bool,
    consume: bool,
    patience: float,
    **how: Any,
) -> Result:
    """Watch a folder."""
    from niels_gpt.eagle3.exchange.watch import Until, Waiting, watch_cache

    if consume and how["follow_links"]:
        raise UsageError("--consume removes no links: leave out --follow-links")
    if samples_total and tool != "specforge":
        raise UsageError("--samples-total is for --from specforge; the rows of speculators give the number")
    last = time.monotonic()

    def waiting(now: Waiting) -> None:
        nonlocal last
        if now.seconds >= LINE_EVERY_S and time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            taken = f"{now.samples:,} samples are in {now.shards:,} shards of {now.num_bytes:,} bytes"
            fault = f", which is not taken ({now.fault})" if now.fault else ""
            tell(f"watch: waiting {now.seconds:,.0f} s for {now.name}{fault}; {taken}")

    target, arguments = _arguments(tool, source, **how)
    arguments |= {"consume": consume, "command": _words_of_this_command(), "waiting": waiting}
    until = Until(samples_total, once, patience)
    with progress_bar("watch", "samples") as progress:
        done = watch_cache(tool, source, out, target, **arguments, until=until, progress=progress)
    lines = _import_lines(out, done.imported)
    if consume:
        kept = f"; {done.kept_files:,} had changed since, and stay" if done.kept_files else ""
        lines.append(f"  removed           {done.removed_files:,} files of {done.removed_bytes:,} bytes{kept}")
    say("\n".join(lines))
    made = {"cache": str(out), **asdict(done.imported)}
    made |= {name: getattr(done, name) for name in ("removed_files", "removed_bytes", "kept_files")}
    return Result(made, ExitCode.GOOD, _next(out))


def _next(out: Path) -> str:
    """Return the command that checks a new cache."""
    return shlex.join(["niels-gpt", "eagle3", "verify", str(out)])


def _words_of_this_command() -> list[str]:
    """Return the arguments and options that were given to the running command, for a command that repeats it."""
    context, words = click.get_current_context(), list[str]()
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if context.get_parameter_source(parameter.name or "") in (None, ParameterSource.DEFAULT) or value is False:
            continue
        text = str(value.absolute() if isinstance(value, Path) else value)
        words += [parameter.opts[-1]] * isinstance(parameter, click.Option) + [text] * (value is not True)
    return words


def _arguments(tool: str, source: Path, **how: Any) -> tuple[Any, dict[str, Any]]:
    """Return the loaded target, and the arguments that import and watch share."""
    from niels_gpt.eagle3.exchange.move import rows_of_import

    if tool == "automodel" and (how["layers"] or how["last_hidden"]):
        raise UsageError("--from automodel: its manifest has the layers, and its last hidden states are post_norm")
    needs_layers = how["trust"] and tool != "automodel"
    if needs_layers != (how["layers"] is not None) or (how["last_hidden"] and not how["trust"]):
        raise UsageError("--trust needs --layers, and --layers and --last-hidden need --trust")
    how["targets"] = rows_of_import(tool, how["made_for"], how["targets"])
    target, running = _opened(tool, source, **how)
    names = ("loss_mask", "made_for", "targets", "draft_vocab_size", "drop_bad", "follow_links")
    shared = {name: how[name] for name in names} | ({"shard_bytes": how["shard_bytes"]} if how["shard_bytes"] else {})
    return target, {**running, **shared, "aux_fp8": how["aux_dtype"] == "fp8"}


def _opened(
    tool: str,
    source: Path,
    *,
    target: str,
    revision: str | None,
    device: str | None,
    samples: int,
    trust: bool,
    layers: str | None,
    last_hidden: str | None,
    follow_links: bool,
    **_: Any,
) -> tuple[Any, dict[str, Any]]:
    """Return the target, and the arguments that decide how the conventions are determined.

    With `trust` only the target's head is loaded.
    """
    import torch

    from niels_gpt.eagle3.exchange.automodel import AutomodelFiles
    from niels_gpt.eagle3.exchange.move import READERS, Target
    from niels_gpt.eagle3.exchange.proof import Convention, capture_of
    from niels_gpt.eagle3.format.layout import DTYPES
    from niels_gpt.eagle3.format.plan import Run
    from niels_gpt.eagle3.head import TargetHead
    from niels_gpt.eagle3.models import sha256_of_ends, text_config
    from niels_gpt.eagle3.target import parse_aux_layers, target_facts
    from niels_gpt.recipes.eagle3.prepare import open_target

    facts = target_facts(target, revision=revision, hash_weights=not trust)
    run = Run.here(device, attention="sdpa", threads=torch.get_num_threads())
    how: dict[str, Any] = {"samples": samples}
    place, known = torch.device(run.device), asdict(facts)
    which: dict[str, Any] = {"name": target, "revision": facts.revision}
    if not trust:
        model = open_target(place, compute_dtype=run.compute_dtype, attention=run.attention, **which)
        how["capture"] = capture_of(model, facts.num_layers, place)
        head = TargetHead.of_model(model)
    else:
        if layers is None:
            files = AutomodelFiles(source, facts.hidden_size, facts.vocab_size, follow_links=follow_links)
            blocks = files.aux_layer_ids
        else:
            blocks = tuple(parse_aux_layers(layers, facts.num_layers))
        how["stated"] = Convention(blocks, last_hidden or READERS[tool].usual_last)
        known["head_files"] = sha256_of_ends(**which)
        head = TargetHead.of_checkpoint(**which, dtype=DTYPES[run.compute_dtype], device=place)
    special = _special_ids_of_target(target, revision, text_config(**which))
    return Target(target, head, facts.hidden_size, facts.vocab_size, special, known), how


def _special_ids_of_target(target: str, revision: str | None, config: Any) -> list[int | None]:
    """Return bos, eos, pad and unk of the target's tokenizer, or of its config."""
    from niels_gpt.chat.tokenizers import open_tokenizer

    try:
        return list(open_tokenizer(target, revision=revision).special_token_ids)
    except (OSError, ValueError):  # states need no tokenizer
        say("note: the target's tokenizer cannot be opened; the special tokens come from the target's config")
    given: list[Any] = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")]
    return [each[0] if isinstance(each, list) and each else each for each in given]


def _import_lines(out: Path, done: Imported) -> list[str]:
    convention = done.convention
    blocks = ", ".join(map(str, convention.aux_layer_ids))
    lines = [
        f"{out}: {done.samples:,} samples of {done.tokens:,} tokens, {done.target_rows:,} of them with a target row",
        f"  auxiliary states  {f'the outputs of blocks {blocks}, counted from 0' if blocks else 'none'}",
        f"  last hidden       {convention.last_hidden}",
        f"  loss mask         {done.loss_mask}, {'checked' if done.mask_checked else 'not checked'}",
    ]
    if convention.samples:
        apart = ", ".join(f"{each:.2g}" for each in convention.distances)
        lines.append(f"  compared          {convention.tokens:,} tokens of {convention.samples} samples: {apart} away")
    else:
        lines += [
            "  compared          nothing: the layers and the norm are as stated",
            f"  not proved        {', '.join(done.not_proved)}",
        ]
    if done.dropped:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(done.dropped.items()))
        lines += [f"  left out          {counts}", *(f"    {printable(text)}" for text in done.first_dropped)]
    return [*lines, *(f"  note: {note}" for note in done.notes)]


@command(
    "export",
    "Write a native cache as files of another tool.",
    examples="""niels-gpt eagle3 export CACHE OUT --to specforge
niels-gpt eagle3 export CACHE OUT --to speculators --for mtp
niels-gpt eagle3 export CACHE OUT --to automodel""",
)
@of_cache
@argument("out", type=PATH, metavar="OUT", help="folder to write: empty or missing")
@option("--to", "tool", type=click.Choice(TOOLS), required=True, help="the tool that will read the files")
@option(
    "--for",
    "made_for",
    type=click.Choice(DRAFTERS),
    help="the kind of draft; if not given the one that the cache was made for, else eagle3, of automodel dspark",
)
@option("--layers", metavar="IDS", help="with automodel: layers of the features, such as 1,10,18,26,35")
@option(
    "--shard-size",
    type=click.IntRange(1, 10_000_000),
    metavar="N",
    help="with automodel: samples in a shard; 256 if not given",
)
def export(cache: Path, out: Path, follow_links: bool, tool: str, layers: str | None, **how: Any) -> Result:
    """Export a cache."""
    from niels_gpt.eagle3.exchange.export import export_cache

    for name, value in (("--layers", layers), ("--shard-size", how["shard_size"])):
        if tool != "automodel" and value is not None:
            raise UsageError(f"{name} is for --to automodel; the others take all blocks, and a file is a sample")
    how = {name: value for name, value in how.items() if value is not None}
    if layers is not None:
        try:
            how["layers"] = [int(each) for each in layers.split(",")]
        except ValueError:
            raise UsageError(f"--layers {layers}: expected numbers separated by commas") from None
    with progress_bar("export", "samples") as progress:
        done = export_cache(cache, tool, out, **how, progress=progress, follow_links=follow_links)
    lines = [
        f"{out}: {done.samples:,} samples of {done.tokens:,} tokens, {done.num_bytes:,} bytes of states",
        f"  for          {done.made_for}",
        f"  last hidden  {done.last_hidden}",
    ]
    zeros = f"{done.without_aux:,} tokens without auxiliary states"
    if done.last_hidden != "none":
        zeros += f", {done.without_last:,} without a last hidden state"
    zeros += f"; the loss of {done.made_for} reads none of them"
    lines.append(f"  zeros        {zeros if done.without_aux or done.without_last else 'none'}")
    if done.left_out:
        lines.append(f"  left out     {done.left_out:,} samples without two tokens with loss side by side")
    lines += [f"  note: {note}" for note in done.notes]
    if tool == "automodel":
        from niels_gpt.eagle3.format.layout import MANIFEST_NAME, read_file
        from niels_gpt.eagle3.format.manifest import recipe_of

        recipe = recipe_of(out, parse_object(read_file(out / MANIFEST_NAME)))
        lines.append(f"NeMo Automodel's trainer reads it with this, and a mask_token_id, in its recipe: {recipe}")
    say("\n".join(lines))
    return Result({"out": str(out), "tool": tool, **asdict(done)})
