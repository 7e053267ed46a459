"""The command lines: arguments in, exit status and text out. Only they read argv and write to the terminal.

Each command is one click command. `niels-gpt` has all of them; `python -m niels_gpt.cache.cli` and the other modules
have some, with exit codes 0, 1 and 2. The script niels-gpt runs `start`, which imports main.py.

main.py             niels-gpt: groups all commands
console.py          runs every command: --json, --strict, help, exit codes, Ctrl-C, log lines, bars
settings_flags.py   makes one option of each field of Settings, and decides which ones --help shows
cache.py            build, build-all, snapshot; python -m niels_gpt.cache.cli
look.py             list, show, stats, locate, diff, verify, gc: finished caches
build.py            runs builds and snapshots: one cache after the other, each checked
exchange.py         export, import, card for other tools' files; push, pull, stage for buckets and other disks
partitions.py       seal, build --partition, build --dask
report.py           words the results of list, build, --dry-run, snapshot, verify and diff
train_tokenizer.py  train-tokenizer, add-sentinels; python -m niels_gpt.train_tokenizer
eagle3/             the commands for EAGLE-3 caches; python -m niels_gpt.eagle3 and niels_gpt.eagle3.precompute
demo.py             demo: builds every cache of the bundled sample
doctor.py           doctor: lists installed packages and caches with problems; explain: explains a code
prefix_tree.py      tree stats, tree show; python -m niels_gpt.prefix_tree
"""

from __future__ import annotations

import sys


def start() -> int:
    """Run niels-gpt and return its exit code. A missing package that commands need ends in one line and code 4."""
    try:
        from niels_gpt.commands.main import main
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "niels_gpt":
            raise
        print(f"error[E901]: {error}. Install what the commands need: pip install niels-gpt", file=sys.stderr)
        return 4  # ExitCode.NOT_INSTALLED, whose module needs click
    return main()
