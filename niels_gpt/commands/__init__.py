"""The command lines: arguments in, exit status and text out. Only they read argv and write to the terminal.

Each command is a click command that is defined once. `niels-gpt` has them all; `python -m niels_gpt.cache.cli` and the
others have some, with exit codes of 0, 1 and 2. The script niels-gpt is `start`, which imports main.py.

main.py             niels-gpt: every command, in groups
console.py          what all commands share: --json, --strict, help, exit codes, Ctrl-C, log lines, bars, tables
settings_flags.py   one option for each field of Settings, and which of them --help shows; names of sources
cache.py            build, snapshot, list, show, stats, locate, diff, verify, gc; python -m niels_gpt.cache.cli
build.py            runs builds and snapshots: one cache after the other, each checked
exchange.py         export, import, card; push, pull, stage: other tools' files, and buckets
partitions.py       seal; build --partition, and what is left to do
report.py           the text that list, build, --dry-run, snapshot, verify and diff print
train_tokenizer.py  train-tokenizer, add-sentinels; python -m niels_gpt.train_tokenizer
eagle3/             the commands for EAGLE-3 caches; python -m niels_gpt.eagle3 and niels_gpt.eagle3.precompute
demo.py             demo: every cache of the bundled sample
doctor.py           doctor and explain: what is installed, which caches need care; what a code means
prefix_tree.py      tree stats, show; python -m niels_gpt.prefix_tree
"""

from __future__ import annotations

import sys


def start() -> int:
    """Run niels-gpt, or print one line where a package that the commands need is missing; returns the exit code."""
    try:
        from niels_gpt.commands.main import main
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "niels_gpt":
            raise
        print(f"error[E901]: {error}. Install what the commands need: pip install niels-gpt", file=sys.stderr)
        return 4  # ExitCode.NOT_INSTALLED, whose module needs click
    return main()
