"""All commands for EAGLE-3 caches in one group: `niels-gpt eagle3`, and python -m niels_gpt.eagle3."""

from __future__ import annotations

from collections.abc import Sequence

from niels_gpt.commands.console import Command, Group, run
from niels_gpt.commands.eagle3.change import convert, join, redraft, seal
from niels_gpt.commands.eagle3.exchange import export, import_
from niels_gpt.commands.eagle3.look import inspect, stats, verify
from niels_gpt.commands.eagle3.respond import respond

COMMANDS: list[Command] = [verify, inspect, stats, convert, redraft, seal, join, import_, export, respond]
FACE = Group(
    "eagle3", COMMANDS, help="Check an EAGLE-3 cache, look into it, convert it; read and write other tools' files."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run python -m niels_gpt.eagle3 with arguments, default those of the process; returns the exit status."""
    return run(FACE, argv, "python -m niels_gpt.eagle3")
