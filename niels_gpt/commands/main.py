"""niels-gpt: every command, in groups. A command's module is imported when the command runs or is explained."""

from __future__ import annotations

from collections.abc import Sequence

import click

from niels_gpt import __version__
from niels_gpt.commands.console import Group, run
from niels_gpt.kinds.homes import MORE_CACHES, OTHER_TOOLS, home_commands

_HERE = "niels_gpt.commands"
_LOOKS = f"{_HERE}.look"
PANELS = {
    "Build": {
        "build": f"{_HERE}.cache:build",
        "seal": f"{_HERE}.partitions:seal",
        "snapshot": f"{_HERE}.cache:snapshot",
        "train-tokenizer": f"{_HERE}.train_tokenizer:train",
        "add-sentinels": f"{_HERE}.train_tokenizer:sentinels",
        "demo": f"{_HERE}.demo:demo",
    },
    "Look inside": {
        "list": f"{_LOOKS}:list_caches",
        **{name: f"{_LOOKS}:{name}" for name in ("show", "stats", "locate", "diff")},
    },
    "Care": {
        **{name: f"{_LOOKS}:{name}" for name in ("verify", "gc")},
        **{name: f"{_HERE}.doctor:{name}" for name in ("doctor", "explain")},
    },
    OTHER_TOOLS: home_commands(OTHER_TOOLS),
    MORE_CACHES: home_commands(MORE_CACHES),
}
"""Panel of the help -> command -> its place, as module:name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run niels-gpt and return its exit code. argv: default sys.argv."""
    return run(ROOT, argv, "niels-gpt", {})


ROOT = Group(
    "niels-gpt",
    places={title: places for title, places in PANELS.items() if places},
    help="Reproducible, verifiable training-data caches for language models.",
    examples="""niels-gpt demo cache                           build every cache from the bundled sample
niels-gpt show cache/sample/sft/oasst1         print a chat and which of its tokens carry loss
niels-gpt verify cache --deep                  find every damaged byte""",
    closing="Every command has --help, --json and --strict. Documentation: docs/index.md\n"
    "Exit codes: 0 good, 1 failed, 2 usage, 3 damage found, 4 not installed, 130 interrupted",
)
ROOT = click.version_option(__version__, message="%(prog)s %(version)s")(ROOT)
