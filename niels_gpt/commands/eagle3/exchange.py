"""eagle3 import, export: native caches from other tools' folders, and such folders from native caches."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich_click import argument, option

from niels_gpt.commands.console import ExitCode, Result, progress_bar, say
from niels_gpt.commands.eagle3.look import command, of_cache
from niels_gpt.settings import UsageError
from niels_gpt.storage.meta_json import printable

if TYPE_CHECKING:
    from niels_gpt.eagle3.exchange.importing import Imported

TOOLS = ("specforge", "speculators")
_PATH = click.Path(path_type=Path)


@command(
    "import",
    "Make a native cache of the files of another tool.",
    examples="""niels-gpt eagle3 import DIR OUT --from specforge --target MODEL
niels-gpt eagle3 import DIR OUT --from speculators --target MODEL --aux-dtype fp8
niels-gpt eagle3 import DIR OUT --from specforge --target MODEL --trust --layers eagle3""",
)
@argument("source", type=_PATH, metavar="DIR", help="folder of the other tool's files")
@argument("out", type=_PATH, metavar="OUT", help="folder of the cache; must be empty or not exist")
@option("--from", "tool", type=click.Choice(TOOLS), required=True, help="the tool that wrote the files")
@option("--target", metavar="MODEL", required=True, help="folder or hub id of the model that the states are of")
@option("--revision", metavar="REV", help="hub commit, tag or branch of the target")
@option(
    "-k",
    "--samples",
    type=click.IntRange(1),
    default=8,
    metavar="N",
    help="samples to run, which show what the states are",
)
@option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, metavar="N", help="seed of the draw")
@option("--device", type=click.Choice(["cpu", "cuda"]), help="where the target runs; cuda where there is one")
@option("--trust", is_flag=True, help="run nothing; the states are what --layers and --last-hidden say")
@option("--layers", metavar="IDS", help="with --trust: the blocks, from 0: eagle3, dflash:N, or ids such as 1,15,28")
@option(
    "--last-hidden",
    type=click.Choice(["pre_norm", "post_norm"]),
    help="with --trust: before or after the final norm; as the tool documents it if not given",
)
@option(
    "--loss-mask",
    type=click.Choice(["raw", "shifted"]),
    help="of each token itself, or of the next; if not given, raw, and checked where the drawn samples have 8 replies",
)
@option("--draft-vocab-size", type=click.IntRange(1), metavar="D", help="tokens that the draft knows; all if not given")
@option("--aux-dtype", type=click.Choice(["stored", "fp8"]), default="stored", help="of the auxiliary states")
@option("--shard-bytes", type=click.IntRange(1 << 16), metavar="N", help="limit of a shard's bytes; 1 GiB if not given")
@option("--drop-bad", is_flag=True, help="leave out bad samples and count them, in place of an error")
@option("--follow-links", is_flag=True, help="read files that are links; refused otherwise")
def import_(source: Path, out: Path, tool: str, **how: Any) -> Result:
    """Import a folder."""
    from niels_gpt.eagle3.exchange.importing import import_cache

    if how["trust"] != (how["layers"] is not None) or (how["last_hidden"] and not how["trust"]):
        raise UsageError("--trust needs --layers, and --layers and --last-hidden need --trust")
    target, running = _opened(tool, **how)
    with progress_bar("import", "samples") as progress:
        done = import_cache(
            tool,
            source,
            out,
            target,
            **running,
            seed=how["seed"],
            loss_mask=how["loss_mask"],
            draft_vocab_size=how["draft_vocab_size"],
            aux_fp8=how["aux_dtype"] == "fp8",
            drop_bad=how["drop_bad"],
            progress=progress,
            follow_links=how["follow_links"],
            **({"shard_bytes": how["shard_bytes"]} if how["shard_bytes"] else {}),
        )
    say("\n".join(_import_lines(out, done)))
    return Result({"cache": str(out), **asdict(done)}, ExitCode.GOOD, f"niels-gpt eagle3 verify {out}")


def _opened(
    tool: str,
    *,
    target: str,
    revision: str | None,
    device: str | None,
    samples: int,
    layers: str | None,
    last_hidden: str | None,
    **_: Any,
) -> tuple[Any, dict[str, Any]]:
    """Return the loaded target, and the arguments that say how the conventions are found."""
    import torch

    from niels_gpt.eagle3.exchange.importing import FILES, Target
    from niels_gpt.eagle3.exchange.proof import Convention, capture_of
    from niels_gpt.eagle3.format.run import Run
    from niels_gpt.eagle3.head import TargetHead
    from niels_gpt.eagle3.target import parse_aux_layers, target_facts
    from niels_gpt.recipes.eagle3.prepare import open_target

    facts = target_facts(target, revision=revision)
    run = Run.here(device, attention="sdpa", threads=torch.get_num_threads())
    how: dict[str, Any] = {"samples": samples}
    if layers is not None:
        blocks = tuple(parse_aux_layers(layers, facts.num_layers))
        how["stated"] = Convention(blocks, last_hidden or FILES[tool].usual_last)
    place = torch.device(run.device)
    model = open_target(
        place, name=target, revision=facts.revision, compute_dtype=run.compute_dtype, attention=run.attention
    )
    if layers is None:
        how["capture"] = capture_of(model, facts.num_layers, place)
    special = _special_ids(target, revision, model.config.get_text_config())
    sizes = facts.hidden_size, facts.vocab_size
    return Target(target, TargetHead.of_model(model), *sizes, special, asdict(facts)), how


def _special_ids(target: str, revision: str | None, config: Any) -> list[int | None]:
    """Return bos, eos, pad and unk of the target's tokenizer, else those of its config."""
    from niels_gpt.chat.tokenizers import open_tokenizer

    try:
        return list(open_tokenizer(target, revision=revision).special_token_ids)
    except (OSError, ValueError):  # of states alone no tokenizer is needed
        say("note: the target's tokenizer cannot be opened; its special tokens are those of its config")
    given: list[Any] = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")]
    return [each[0] if isinstance(each, list) and each else each for each in given]


def _import_lines(out: Path, done: Imported) -> list[str]:
    convention = done.convention
    blocks = ", ".join(map(str, convention.aux_layer_ids))
    lines = [
        f"{out}: {done.samples:,} samples of {done.tokens:,} tokens, {done.target_rows:,} of them with a target row",
        f"  auxiliary states  the outputs of blocks {blocks}, counted from 0",
        f"  last hidden       {convention.last_hidden}",
        f"  loss mask         {done.loss_mask}, {'checked' if done.mask_checked else 'not checked'}",
    ]
    if convention.samples:
        apart = ", ".join(f"{each:.2g}" for each in convention.distances)
        lines.append(f"  compared          {convention.tokens:,} tokens of {convention.samples} samples: {apart} away")
    else:
        lines.append("  compared          nothing: the layers and the norm are as stated")
    if done.dropped:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(done.dropped.items()))
        lines += [f"  left out          {counts}", *(f"    {printable(text)}" for text in done.first_dropped)]
    return [*lines, *(f"  note: {note}" for note in done.notes)]


@command(
    "export",
    "Write a native cache as the files of another tool.",
    examples="""niels-gpt eagle3 export CACHE OUT --to specforge
niels-gpt eagle3 export CACHE OUT --to speculators""",
)
@of_cache
@argument("out", type=_PATH, metavar="OUT", help="folder to write; must be empty or not exist")
@option("--to", "tool", type=click.Choice(TOOLS), required=True, help="the tool that shall read the files")
def export(cache: Path, out: Path, follow_links: bool, tool: str) -> Result:
    """Export a cache."""
    from niels_gpt.eagle3.exchange.exporting import export_cache

    with progress_bar("export", "samples") as progress:
        done = export_cache(cache, tool, out, progress=progress, follow_links=follow_links)
    lines = [
        f"{out}: {done.samples:,} samples of {done.tokens:,} tokens, {done.num_bytes:,} bytes of states",
        f"  last hidden  {done.last_hidden}",
        f"  zeros        {done.without_aux:,} tokens without auxiliary states, {done.without_last:,} without a last "
        "one, which the loss of EAGLE-3 does not need",
    ]
    say("\n".join([*lines, *(f"  note: {note}" for note in done.notes)]))
    return Result({"out": str(out), "tool": tool, **asdict(done)})
