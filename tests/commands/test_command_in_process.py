"""A command line that runs in the process of a test does what the installed script does; see support/commands.py."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import Done, niels_gpt


@pytest.mark.parametrize("argv", [("list", "nowhere", "--json"), ("stats",), ("explain", "E203")], ids=" ".join)
def test_a_command_says_and_returns_what_the_script_does(argv):
    script = [Path(sys.executable).with_name("niels-gpt"), *argv]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert niels_gpt(*argv) == Done(done.returncode, done.stdout, done.stderr)


def test_a_module_is_run_under_its_own_name():
    done = niels_gpt("no-command", module="niels_gpt.cache.cli")
    assert (done.status, done.out) == (2, "") and "Usage: python -m niels_gpt.cache.cli" in done.err


def test_a_command_leaves_the_process_as_it_was(flags, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)  # which a command sets

    def state():
        root, handlers = (
            logging.getLogger(),
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        )
        return [dict(os.environ), sys.argv, sys.stdout, sys.stderr, root.level, root.handlers[:], handlers]

    before = state()
    Path("a.txt").write_text("A heron.")
    done = niels_gpt("build", "notes", "--pretrain", "notes=*.txt", *flags)
    assert done.status == 0 and done.err.startswith("warning[W308]: "), done
    assert "zsh_source" in niels_gpt("doctor", env={"SHELL": "/bin/zsh"}).out
    assert state() == before
