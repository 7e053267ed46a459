"""All commands for EAGLE-3 caches in one group: `niels-gpt eagle3`, and python -m niels_gpt.eagle3."""

from __future__ import annotations

from collections.abc import Sequence

from niels_gpt.commands.console import Command, Group, run
from niels_gpt.commands.eagle3.change import convert, join, redraft, seal
from niels_gpt.commands.eagle3.exchange import export, import_
from niels_gpt.commands.eagle3.look import inspect, stats, verify
from niels_gpt.commands.eagle3.precompute import PRECOMPUTE
from niels_gpt.commands.eagle3.respond import respond

COMMANDS: list[Command] = [verify, inspect, stats, convert, redraft, seal, join, import_, export, respond]
FACE = Group(
    "eagle3", COMMANDS, help="Check an EAGLE-3 cache, look into it, convert it; read and write other tools' files."
)
ROOT_COMMANDS = [
    Group("eagle3", [PRECOMPUTE, *COMMANDS], help="Caches of a target's outputs, for training EAGLE-3 drafts.")
]
"""What niels-gpt has of this package."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run python -m niels_gpt.eagle3 with arguments, default those of the process; returns the exit status."""
    return run(FACE, argv, "python -m niels_gpt.eagle3")
