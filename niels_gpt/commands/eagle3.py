"""Check an EAGLE-3 cache, look into it, convert it.

    python -m niels_gpt.eagle3 verify CACHE                              every damage, with its shard and sample
    python -m niels_gpt.eagle3 verify CACHE --target MODEL -k 8          and run 8 samples through the target again
    python -m niels_gpt.eagle3 inspect CACHE --sample 3 --tokenizer MODEL    its form, and the slots of a sample
    python -m niels_gpt.eagle3 convert CACHE --format-version 2          a dense cache of version 1 becomes one of 2
    python -m niels_gpt.eagle3 stats CACHE --plot stats.png              tokens, lengths, mass, entropy

python -m niels_gpt.eagle3.precompute makes a cache. Caches of other tools in the same format are read too.

Exit status: 0 good, 1 something failed or is damaged, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.commands.console import ERRORS, as_json, exit_status, log_to_stderr, progress_bar, table
from niels_gpt.eagle3.inspect.checks import RECOMPUTED
from niels_gpt.pictures import check_png
from niels_gpt.storage.checks import Verdict


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with arguments, default those of the process; returns the exit status."""
    arguments = _parser().parse_args(argv)
    log_to_stderr(logging.WARNING)
    return exit_status(lambda: arguments.run(arguments), errors=(*ERRORS, RuntimeError))


def _verify(arguments: argparse.Namespace) -> int:
    from niels_gpt.eagle3.inspect.verify import verify

    path, is_asked = arguments.cache, arguments.target is not None
    # The target comes first, so that a wrong one is reported before all of the cache is read.
    recomputed = _recomputed(arguments) if is_asked else Verdict([], "not made: name the target with --target")
    with progress_bar("verify", "B") as progress:
        verdicts = verify(path, progress=progress, follow_links=arguments.follow_links)
    verdicts[RECOMPUTED] = recomputed
    if arguments.json:
        print(as_json({name: vars(verdict) for name, verdict in verdicts.items()}))
    else:
        print(f"{path}:", *(_verdict_lines(name, verdict) for name, verdict in verdicts.items()), sep="\n")
    is_not_made = is_asked and recomputed.note is not None
    return 1 if is_not_made or any(verdict.problems for verdict in verdicts.values()) else 0


def _recomputed(arguments: argparse.Namespace) -> Verdict:
    from niels_gpt.eagle3.inspect.recompute import recomputed
    from niels_gpt.recipes.eagle3.asset import target_of

    path, links = arguments.cache, {"follow_links": arguments.follow_links}
    target = target_of(path, arguments.target, revision=arguments.revision, device=arguments.device, **links)
    with progress_bar("target", "batches") as progress:
        return recomputed(path, target, k=arguments.samples, seed=arguments.seed, progress=progress, **links)


def _verdict_lines(name: str, verdict: Verdict) -> str:
    count = len(verdict.problems)
    outcome = verdict.note or ("ok" if not verdict.figures else f"ok: {verdict.figures}")
    if count:
        outcome = f"{count} problem{'' if count == 1 else 's'}"
    lines = [f"  {name:<14}{outcome}", *(f"    {problem}" for problem in verdict.problems)]
    return "\n".join([*lines, *(f"    note: {remark}" for remark in verdict.remarks)])


def _inspect(arguments: argparse.Namespace) -> None:
    from niels_gpt.eagle3.inspect import show

    path, number, links = arguments.cache, arguments.sample, {"follow_links": arguments.follow_links}
    if arguments.json:
        print(as_json(show.description(path, **links)))
    elif number is None:
        print(table(show.summary(path, **links)), table(show.shard_rows(path, **links)), sep="\n\n")
    else:
        tokenizer = None
        if arguments.tokenizer is not None:
            from niels_gpt.chat.tokenizers import open_tokenizer

            tokenizer = open_tokenizer(arguments.tokenizer)
        rows = show.slot_rows(path, number, tokenizer, begin=arguments.slot, slots=arguments.slots, **links)
        print(show.sample_heading(path, number, **links), table(rows), sep="\n")


def _convert(arguments: argparse.Namespace) -> None:
    from niels_gpt.eagle3.cache import convert

    version = arguments.format_version
    is_changed = convert(arguments.cache, version, follow_links=arguments.follow_links)
    changed = f"now version {version}: manifest.json was rewritten, no shard was changed"
    print(f"{arguments.cache}: {changed if is_changed else f'is version {version} already; nothing was written'}")


def _stats(arguments: argparse.Namespace) -> None:
    from niels_gpt.eagle3.inspect.stats import stats

    picture: Path | None = arguments.plot
    if picture is not None:
        check_png(picture)  # fail before all of the cache is read
    with progress_bar("stats", "shards") as progress:
        numbers = stats(arguments.cache, seed=arguments.seed, progress=progress, follow_links=arguments.follow_links)
    if picture is not None:
        from niels_gpt.eagle3.inspect.plot import plot
        from niels_gpt.storage.fileio import write_bytes

        write_bytes(picture, plot(numbers, arguments.cache.name))
    print(as_json(numbers.as_json()) if arguments.json else table(numbers.rows()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m niels_gpt.eagle3", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Callable[[argparse.Namespace], int | None]) -> Callable[..., Any]:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(run=run)
        added.add_argument("cache", type=Path, metavar="CACHE", help="folder of a cache: with a manifest.json")
        text = "read files that are links, as in a snapshot of the Hugging Face hub (default: refuse)"
        added.add_argument("--follow-links", action="store_true", help=text)
        if run is not _convert:
            added.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        return added.add_argument

    _add_verify(command("verify", "report every damage of a cache with its shard and sample", _verify))
    add = command("inspect", "print what a cache was made from and its form, or the slots of a sample", _inspect)
    add("--sample", type=int, metavar="I", help="number of a sample of the cache, from 0")
    add("--tokenizer", metavar="MODEL", help="folder or hub id, for the text of the ids (default: ids alone)")
    add("--slot", type=int, metavar="P", default=0, help="first slot of the sample to print (default: 0)")
    add("--slots", type=int, metavar="N", default=32, help="slots to print, at most (default: 32)")
    add = command(
        "convert", "convert a dense cache to the other version of the format; no shard is rewritten", _convert
    )
    add("--format-version", type=int, choices=(1, 2), required=True, help="version to convert to")
    add = command("stats", "print tokens, shares, lengths, mass, entropy and norms of a cache", _stats)
    add("--plot", type=Path, metavar="PNG", help="write a picture of lengths, entropy and mass there")
    add("--seed", type=int, default=0, metavar="N", help="seed of the slots whose floats are read (default: 0)")
    return parser


def _add_verify(add: Callable[..., Any]) -> None:
    add("--target", metavar="MODEL", help="folder or hub id of the cache's target: run samples through it again")
    add("--revision", metavar="REV", help="hub commit, tag or branch of the target (default: as in the plan)")
    add("-k", "--samples", type=int, default=8, metavar="N", help="samples to run, drawn by the seed (default: 8)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the draw (default: 0)")
    add("--device", choices=("cpu", "cuda"), help="where the target runs (default: as in the plan)")
