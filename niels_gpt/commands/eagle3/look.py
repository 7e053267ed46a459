"""eagle3 verify, inspect, stats: check a cache and look into it; those of other tools in the same format, too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich_click import argument, option

from niels_gpt.commands.console import (
    ERRORS,
    ExitCode,
    Result,
    progress_bar,
    say,
)
from niels_gpt.commands.console import command as any_command
from niels_gpt.display.tables import folded, table
from niels_gpt.eagle3.inspect.checks import RECOMPUTED
from niels_gpt.pictures import check_png
from niels_gpt.storage.checks import Verdict

command = partial(any_command, errors=(*ERRORS, RuntimeError), level=logging.WARNING)
_PATH = click.Path(path_type=Path)


def of_cache(function: Callable[..., Result]) -> Callable[..., Result]:
    """Add the argument CACHE and the flag --follow-links to a command's function."""
    text = "read files that are links, as in a snapshot of the Hugging Face hub; refused otherwise"
    function = option("--follow-links", is_flag=True, help=text)(function)
    return argument("cache", type=_PATH, help="folder of a cache: with a manifest.json")(function)


@command(
    "verify",
    "Report every damage of a cache with its shard and sample.",
    examples="""niels-gpt eagle3 verify CACHE                        every damage, with its shard and sample
niels-gpt eagle3 verify CACHE --target MODEL -k 8    and run 8 samples through the target again""",
)
@of_cache
@option("--target", metavar="MODEL", help="folder or hub id of the cache's target: run samples through it again")
@option("--revision", metavar="REV", help="hub commit, tag or branch of the target; as in the plan if not given")
@option("-k", "--samples", type=int, default=8, metavar="N", help="samples to run, drawn by the seed")
@option("--seed", type=int, default=0, metavar="N", help="seed of the draw")
@option("--device", type=click.Choice(["cpu", "cuda"]), help="where the target runs; as in the plan if not given")
def verify(cache: Path, follow_links: bool, target: str | None, **how: Any) -> Result:
    """Check a cache."""
    from niels_gpt.eagle3.inspect.verify import verify
    from niels_gpt.eagle3.resume import refuse_unsealed

    refuse_unsealed(cache)
    recomputed = Verdict([], "not made: name the target with --target")
    if target is not None:  # first, so that a wrong one is reported before all of the cache is read
        recomputed = _recomputed(cache, target, follow_links=follow_links, **how)
    with progress_bar("verify", "B") as progress:
        verdicts = verify(cache, progress=progress, follow_links=follow_links)
    verdicts[RECOMPUTED] = recomputed
    say("\n".join([f"{cache}:", *(_verdict_lines(name, verdict) for name, verdict in verdicts.items())]))
    code = ExitCode.FAILED if target is not None and recomputed.note is not None else ExitCode.GOOD
    if any(verdict.problems for verdict in verdicts.values()):
        code = ExitCode.DAMAGED
    return Result({name: vars(verdict) for name, verdict in verdicts.items()}, code)


def _recomputed(
    path: Path, name: str, *, revision: str | None, samples: int, seed: int, device: str | None, follow_links: bool
) -> Verdict:
    from niels_gpt.eagle3.inspect.recompute import recomputed
    from niels_gpt.recipes.eagle3.asset import target_of

    target = target_of(path, name, revision=revision, device=device, follow_links=follow_links)
    with progress_bar("target", "batches") as progress:
        return recomputed(path, target, k=samples, seed=seed, progress=progress, follow_links=follow_links)


def _verdict_lines(name: str, verdict: Verdict) -> str:
    count = len(verdict.problems)
    outcome = verdict.note or ("ok" if not verdict.figures else f"ok: {verdict.figures}")
    if count:
        outcome = f"{count} problem{'' if count == 1 else 's'}"
    lines = [*folded(f"  {name:<14}{outcome}", indent=" " * 16), *(f"    {problem}" for problem in verdict.problems)]
    return "\n".join([*lines, *(f"    note: {remark}" for remark in verdict.remarks)])


@command(
    "inspect",
    "Print what a cache was made from and its form, or the slots of a sample.",
    examples="niels-gpt eagle3 inspect CACHE --sample 3 --tokenizer MODEL",
)
@of_cache
@option("--sample", type=int, metavar="I", help="number of a sample of the cache, from 0")
@option("--tokenizer", metavar="MODEL", help="folder or hub id, for the text of the ids; ids alone if not given")
@option("--slot", type=int, metavar="P", default=0, help="first slot of the sample to print")
@option("--slots", type=int, metavar="N", default=32, help="slots to print, at most")
def inspect(
    cache: Path, follow_links: bool, sample: int | None, tokenizer: str | None, slot: int, slots: int
) -> Result:
    """Print what is in a cache."""
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
    "Print tokens, shares, lengths, mass, entropy and norms of a cache.",
    examples="niels-gpt eagle3 stats CACHE --plot stats.png",
)
@of_cache
@option("--plot", type=_PATH, metavar="PNG", help="write a picture of lengths, entropy and mass there")
@option("--seed", type=int, default=0, metavar="N", help="seed of the slots whose floats are read")
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
        from niels_gpt.eagle3.inspect.plot import plot as draw
        from niels_gpt.storage.fileio import write_bytes

        write_bytes(plot, draw(numbers, cache.name))
    say(table(numbers.rows()))
    return Result(numbers.as_json())
