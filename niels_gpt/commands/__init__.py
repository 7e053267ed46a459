"""The command lines: arguments in, exit status and text out. Only they read argv and write to the terminal.

console.py          what all commands share: exit status, Ctrl-C, log lines, progress bar, tables, JSON
settings_flags.py   one flag for each field of Settings
cache.py            python -m niels_gpt.cache.cli: all arguments; runs all but the builds; status 1 at Ctrl-C
build.py            runs build, build-all and snapshot of the same command line: one cache after the other, each checked
report.py           the text that list, build, --dry-run, snapshot, verify and diff print
train_tokenizer.py  python -m niels_gpt.train_tokenizer
precompute.py       python -m niels_gpt.eagle3.precompute: flags, the estimate and progress that it prints
eagle3.py           python -m niels_gpt.eagle3: verify, inspect, convert, stats
prefix_tree.py      python -m niels_gpt.prefix_tree: stats and show
"""
