"""What the commands print fits the terminal: no line is wider, and no word is cut.

A line may be wider for one word alone, such as a path, and for a command to copy: both stay in one piece.
"""

import os
import pty
import re
import subprocess
import sys

import pytest
from support.commands import every_command, niels_gpt

from niels_gpt.commands.console import with_progress
from niels_gpt.display import bar, tables

ROLLOUTS = '{"prompt_ids": [1, 2, 3], "completions": [[4, 5], [4, 6], [7]]}\n'
COMMAND = re.compile(r"\s*(next: |read it: |Install \w.*: )?(niels-gpt|pip install|python -m|eval) ")
BUILD = "build --all --source-root sample"
OUTPUTS = """
list c/sample
list .
stats c/sample/sft/oasst1
stats c/sample/pretrain/roam
stats c/sample/trees/oasst1
stats c/sample/tokenizer
stats c/sample/eagle3/targets
stats c/sample/eagle3/draft_vocab
show c/sample/sft/oasst1 --at 3
show c/sample/sft/oasst1 --color always
show c/sample/pretrain/roam --at 3
show c/sample/trees/oasst1 --at 3
show c/sample/tokenizer --at 3
show c/sample/eagle3/targets
show c/sample/eagle3/draft_vocab
locate c/sample/pretrain/wikitext train 1_000
locate c/sample/sft/oasst1 train 1_000
locate c/sample/trees/oasst1 train 1_000
locate c/sample/eagle3/targets train 1_000
diff c/sample/sft/oasst1 c/sample/sft/dolly15k
diff c/sample/pretrain/roam c/sample/pretrain/wikitext
verify c
gc c --dry-run
doctor c
explain E106
explain E203
card c/sample/pretrain/roam
build --all --source-root sample --cache-dir none --dry-run
build --all --source-root sample --cache-dir c --dry-run
build nothing
export c/sample/pretrain/wikitext OUT --to megatron
import OUT wiki --from megatron --tokenizer c/sample/tokenizer --cache-dir OUT.c
push c/sample/pretrain/wikitext OUT.bucket
pull OUT.bucket OUT.pulled
stage c/sample/pretrain/wikitext OUT.staged
add-sentinels c/sample/tokenizer OUT.sentinels
train-tokenizer --input-glob words.txt --vocab-size 400 --out-dir OUT.trained
tree stats rollouts.jsonl
tree show rollouts.jsonl
eagle3 inspect c/sample/eagle3/targets
eagle3 inspect c/sample/eagle3/targets --sample 3
eagle3 stats c/sample/eagle3/targets
eagle3 verify c/sample/eagle3/targets
eagle3 convert c/sample/eagle3/targets --format 2
""".strip().splitlines()
UNCHANGED = {"list", "stats", "diff", "doctor", "eagle3", "tree", "explain", "verify", "gc"}
"""Commands that print the same words in a pipe."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo's caches in c/, a file of rollouts, and one of words."""
    where = tmp_path_factory.mktemp("width")
    done = niels_gpt("demo", where / "c", env={"COLUMNS": "80"}, is_terminal=True)
    assert done.status == 0 and too_wide(without_bars(done.out + done.err), 80) == []
    (where / "rollouts.jsonl").write_text(ROLLOUTS)
    (where / "words.txt").write_text("some words of a text. " * 500)
    return where


@pytest.fixture(autouse=True)
def _in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def without_bars(text):
    return "\n".join(line.rsplit("\r", 1)[-1] for line in text.split("\n"))


def too_wide(text, columns):
    """The lines that do not fit, but for one word alone and for a command."""
    found = []
    for line in text.splitlines():
        words = [word for word in re.sub(r"\x1b\[[0-9;]*m", "", line).split() if len(word) < columns // 2]
        if tables.size_of(line) > columns and words and not COMMAND.match(line):
            found.append(line)
    return found


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("line", OUTPUTS)
def test_every_output_fits_the_terminal_and_keeps_its_words(line, columns):
    words = line.replace("OUT", f"out{columns}").split()
    done = niels_gpt(*words, env={"COLUMNS": str(columns)}, is_terminal=True)
    shown = without_bars(done.out + done.err)
    assert shown and too_wide(shown, columns) == []
    if words[0] in UNCHANGED:
        piped = niels_gpt(*words)
        assert {*shown.split()} <= {*piped.out.split(), *piped.err.split()}, "a word was cut"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("words", [(), ("eagle3",), ("tree",), *every_command()], ids=" ".join)
def test_every_help_fits_the_terminal(words, columns):
    done = niels_gpt(*words, "--help", env={"COLUMNS": str(columns)})
    assert done.status == 0 and "…" not in done.out
    assert too_wide(done.out, min(columns, 100)) == []


def test_every_command_is_tried():
    tried = {tuple(line.split()) for line in OUTPUTS}
    others = {("demo",), ("seal",), ("snapshot",)}
    of_eagle3 = ["export", "import", "join", "precompute", "redraft", "respond", "seal", "watch"]
    others |= {("eagle3", name) for name in of_eagle3}
    for command in every_command().keys() - others:
        assert any(words[: len(command)] == command for words in tried), command


def test_in_a_pipe_lines_of_messages_stay_whole():
    done = niels_gpt("list", "nowhere", env={"COLUMNS": "40"})
    assert done.err.count("\n") == 1 and len(done.err) > 80


def test_a_log_line_stands_above_the_bar_of_a_terminal():
    program = """
import logging, sys
from niels_gpt.commands.console import log_to_stderr, progress_bar
log_to_stderr()
with progress_bar("notes", "B") as progress:
    for done in range(1, 5):
        progress(0, 25 * done, 100)
        logging.getLogger("niels_gpt").info("line %d", done)
"""
    main, worker = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", program], stderr=worker, env=environment) as process:
        os.close(worker)
        drawn = b""
        with pytest.raises(OSError):  # of a terminal that nobody writes to any more
            while True:
                drawn += os.read(main, 1 << 16)
    os.close(main)
    assert process.returncode == 0
    screen = [line.rsplit("\r", 1)[-1] for line in drawn.decode().replace("\r\n", "\n").split("\n")]
    assert [line for line in screen if "line" in line] == [f"line {number}" for number in range(1, 5)]


def test_a_log_shows_how_far_a_loop_is(monkeypatch, capsys):
    monkeypatch.setattr(bar, "LINE_EVERY_S", 0.0)
    assert [*with_progress("abc", "training", "updates", 3)] == ["a", "b", "c"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("training: 0 updates of 3, 0%")
    assert lines[-1].startswith("training: 3 updates of 3, 100%")
