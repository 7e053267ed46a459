"""Look into an EAGLE-3 cache, check it, convert it.

    python -m niels_gpt.eagle3 verify CACHE                              every damage, with its shard and sample
    python -m niels_gpt.eagle3 verify CACHE --target MODEL -k 8          and run 8 samples through the target once more
    python -m niels_gpt.eagle3 inspect CACHE --sample 3 --tokenizer MODEL    its form, and the slots of a sample
    python -m niels_gpt.eagle3 convert CACHE --format-version 2          a dense cache of version 1 becomes one of 2
    python -m niels_gpt.eagle3 stats CACHE --plot stats.png              tokens, lengths, mass, entropy

A cache is made by python -m niels_gpt.eagle3.precompute. Caches of other tools that have this form are read too.

Exit status: 0 good, 1 something failed or is damaged, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.fileio import check_png
from niels_gpt.recipes.progress import progress_bar

if TYPE_CHECKING:
    from niels_gpt.eagle3.verify import Verdict


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with arguments, default those of the process; returns the exit status."""
    from niels_gpt.recipes.run import exit_status

    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    return exit_status(lambda: arguments.run(arguments), (ValueError, OSError, ImportError, RuntimeError))


def _verify(arguments: argparse.Namespace) -> int:
    from niels_gpt.eagle3.checks import RECOMPUTED
    from niels_gpt.eagle3.verify import Verdict, verify

    again = Verdict([], "not made: name the target with --target")
    if arguments.target is not None:  # first: a wrong one is told before all of the cache is read
        again = _run_again(arguments)
    with progress_bar("verify", "B") as progress:
        verdicts = {
            **verify(arguments.cache, progress=progress, follow_links=arguments.follow_links),
            RECOMPUTED: again,
        }
    if arguments.json:
        print(json.dumps({name: vars(verdict) for name, verdict in verdicts.items()}, indent=2))
    else:
        print(f"{arguments.cache}:")
        for name, verdict in verdicts.items():
            print(_verdict_lines(name, verdict))
    not_made = arguments.target is not None and again.note is not None  # it was asked for
    return 1 if not_made or any(verdict.problems for verdict in verdicts.values()) else 0


def _run_again(arguments: argparse.Namespace) -> Verdict:
    from niels_gpt.eagle3.recompute import recomputed
    from niels_gpt.recipes.eagle3_asset import target_of

    cache, links = arguments.cache, {"follow_links": arguments.follow_links}
    target = target_of(cache, arguments.target, revision=arguments.revision, device=arguments.device, **links)
    with progress_bar("target", "batches") as progress:
        return recomputed(cache, target, k=arguments.samples, seed=arguments.seed, progress=progress, **links)


def _verdict_lines(name: str, verdict: Verdict) -> str:
    count = len(verdict.problems)
    said = verdict.note or ("ok" if not verdict.figures else f"ok: {verdict.figures}")
    if count:
        said = f"{count} problem{'' if count == 1 else 's'}"
    lines = [f"  {name:<14}{said}", *(f"    {problem}" for problem in verdict.problems)]
    return "\n".join([*lines, *(f"    note: {remark}" for remark in verdict.remarks)])


def _inspect(arguments: argparse.Namespace) -> int:
    from niels_gpt.eagle3 import show
    from niels_gpt.recipes.report import table

    cache, number, links = arguments.cache, arguments.sample, {"follow_links": arguments.follow_links}
    if arguments.json:
        print(json.dumps(show.description(cache, **links), indent=2, ensure_ascii=False))
        return 0
    if number is None:
        print(table(show.summary(cache, **links)), table(show.shard_rows(cache, **links)), sep="\n\n")
        return 0
    tokenizer = None
    if arguments.tokenizer is not None:
        from niels_gpt.eagle3.tokenizers import open_tokenizer

        tokenizer = open_tokenizer(arguments.tokenizer)
    rows = show.slot_rows(cache, number, tokenizer, begin=arguments.slot, slots=arguments.slots, **links)
    print(show.sample_heading(cache, number, **links), table(rows), sep="\n")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from niels_gpt.eagle3.cache import convert

    version = arguments.format_version
    changed = convert(arguments.cache, version, follow_links=arguments.follow_links)
    said = f"now version {version}: manifest.json was written anew, no shard was touched"
    print(f"{arguments.cache}: {said if changed else f'is version {version} already; nothing was written'}")
    return 0


def _stats(arguments: argparse.Namespace) -> int:
    from niels_gpt.eagle3.stats import stats
    from niels_gpt.recipes.report import table

    target: Path | None = arguments.plot
    if target is not None:  # before all of the cache is read
        check_png(target)
    with progress_bar("stats", "shards") as progress:
        found = stats(arguments.cache, seed=arguments.seed, progress=progress, follow_links=arguments.follow_links)
    if target is not None:
        from niels_gpt.eagle3.plot import plot
        from niels_gpt.fileio import write_bytes

        write_bytes(target, plot(found, arguments.cache.name))
    print(json.dumps(found.as_json(), indent=2) if arguments.json else table(found.rows()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m niels_gpt.eagle3", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> Callable[..., Any]:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(run=run)
        added.add_argument("cache", type=Path, metavar="CACHE", help="folder of a cache: with a manifest.json")
        text = "read files that are links, as in a snapshot of the Hugging Face hub (default: refuse)"
        added.add_argument("--follow-links", action="store_true", help=text)
        if run is not _convert:
            added.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        return added.add_argument

    _add_verify(command("verify", "name every damage of a cache with its shard and sample", _verify))
    add = command("inspect", "print what a cache was made from and its form, or the slots of a sample", _inspect)
    add("--sample", type=int, metavar="I", help="number of a sample of the cache, from 0")
    add("--tokenizer", metavar="MODEL", help="folder or hub id, for the text of the ids (default: ids alone)")
    add("--slot", type=int, metavar="P", default=0, help="first slot of the sample to print (default: 0)")
    add("--slots", type=int, metavar="N", default=32, help="slots to print, at most (default: 32)")
    add = command("convert", "turn a dense cache into the other version of the format, by its manifest alone", _convert)
    add("--format-version", type=int, choices=(1, 2), required=True, help="version that the cache shall have")
    add = command("stats", "print tokens, shares, lengths, mass, entropy and norms of a cache", _stats)
    add("--plot", type=Path, metavar="PNG", help="draw lengths, entropy and mass there")
    add("--seed", type=int, default=0, metavar="N", help="of the slots whose floats are looked at (default: 0)")
    return parser


def _add_verify(add: Callable[..., Any]) -> None:
    add("--target", metavar="MODEL", help="folder or hub id of the cache's target: run samples through it once more")
    add("--revision", metavar="REV", help="hub commit, tag or branch of the target (default: as in the plan)")
    add("-k", "--samples", type=int, default=8, metavar="N", help="samples to run, drawn by the seed (default: 8)")
    add("--seed", type=int, default=0, metavar="N", help="of the draw (default: 0)")
    add("--device", choices=("cpu", "cuda"), help="where the target runs (default: as in the plan)")


if __name__ == "__main__":
    sys.exit(main())
