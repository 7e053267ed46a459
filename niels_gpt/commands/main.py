"""niels-gpt: every command, in groups. Heavy modules are imported by the commands, so that --help answers at once."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich_click import RichCommandPanel

from niels_gpt import __version__
from niels_gpt.commands import cache, demo, doctor, partitions, train_tokenizer
from niels_gpt.commands.console import Group, run
from niels_gpt.kinds.homes import MORE_CACHES, OTHER_TOOLS, home_commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run niels-gpt and return its exit code. argv: default sys.argv."""
    return run(ROOT, argv, "niels-gpt", {})


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
    OTHER_TOOLS: home_commands(OTHER_TOOLS),
    MORE_CACHES: home_commands(MORE_CACHES),
}
ROOT = Group(
    "niels-gpt",
    [each for commands in _PANELS.values() for each in commands],
    help="Reproducible, verifiable training-data caches for language models.",
    examples="""niels-gpt demo cache                           build every cache from the bundled sample
niels-gpt show cache/sample/sft/oasst1         print a chat and which of its tokens carry loss
niels-gpt verify cache --deep                  find every damaged byte""",
    closing="Every command has --help, --json and --strict. Documentation: docs/index.md\n"
    "Exit codes: 0 good, 1 failed, 2 usage, 3 damage found, 4 not installed, 130 interrupted",
    panels=[
        RichCommandPanel(title, commands=[str(command.name) for command in commands])
        for title, commands in _PANELS.items()
        if commands
    ],
)
ROOT = click.version_option(__version__, message="%(prog)s %(version)s")(ROOT)
