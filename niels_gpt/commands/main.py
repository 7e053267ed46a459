"""niels-gpt: every command, in groups. Heavy modules are imported by the commands, so that --help answers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from rich_click import RichCommandPanel

from niels_gpt import __version__
from niels_gpt.commands import cache, demo, doctor, exchange, partitions, prefix_tree, train_tokenizer
from niels_gpt.commands.console import Group, run
from niels_gpt.commands.eagle3 import group as eagle3
from niels_gpt.commands.eagle3 import precompute


def main(argv: Sequence[str] | None = None) -> int:
    """Run niels-gpt with arguments, default those of the process; returns the exit code."""
    return run(ROOT, argv, "niels-gpt", {})


def _fold_demo() -> Callable[..., dict[str, Any]]:
    from niels_gpt.prefix_tree.demo import run

    return run


EAGLE3 = Group(
    "eagle3",
    [precompute.PRECOMPUTE, *eagle3.COMMANDS],
    help="Caches of a target's outputs, for training EAGLE-3 drafts.",
)
TREE = Group(
    "tree",
    [*prefix_tree.COMMANDS, prefix_tree.demo_command(_fold_demo)],
    help="What folding shared prefixes saves on recorded rollouts.",
)
_PANELS: dict[str, list[click.Command]] = {
    "Build": [
        cache.build,
        partitions.seal,
        cache.snapshot,
        train_tokenizer.train,
        train_tokenizer.sentinels,
        demo.demo,
    ],
    "Look inside": [cache.list_caches, cache.show, cache.stats, cache.locate, cache.diff],
    "Care": [cache.verify, cache.gc, doctor.doctor, doctor.explain],
    "Other tools and buckets": [*exchange.COMMANDS],
    "More caches": [EAGLE3, TREE],
}
ROOT = Group(
    "niels-gpt",
    [each for commands in _PANELS.values() for each in commands],
    help="Reproducible, verifiable training-data caches for language models.",
    examples="""niels-gpt demo cache                           every cache, from the bundled sample
niels-gpt show cache/sample/sft/oasst1         an example, with its loss mask
niels-gpt verify cache --deep                  every damage, with its file and bytes""",
    closing="Every command has --help, --json and --strict. Documentation: docs/index.md\n"
    "Exit codes: 0 good, 1 failed, 2 usage, 3 damage found, 4 not installed, 130 interrupted",
    panels=[
        RichCommandPanel(title, commands=[str(command.name) for command in commands])
        for title, commands in _PANELS.items()
    ],
)
ROOT = click.version_option(__version__, message="%(prog)s %(version)s")(ROOT)
