"""Real signals to real commands: SIGTERM and SIGHUP do what Ctrl-C does, and the second signal ends the process."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.commands import niels_gpt

LONG = 600  # seconds: a hang, not a measure


@pytest.fixture
def command(tmp_path, tiny_model_path):
    """A build of some seconds, with threads that encode."""
    with open(tmp_path / "long.jsonl", "w") as file:
        for number in range(30_000):
            file.write(json.dumps({"text": f"{number} " + "some words of a text that is long enough " * 20}) + "\n")
    (tmp_path / "short.txt").write_text("some words\n" * 9)
    sources = [f"--pretrain={file.partition('.')[0]}={tmp_path / file}" for file in ("short.txt", "long.jsonl")]
    build = ["build", *sources, "--cache-dir", str(tmp_path / "c")]
    return [sys.executable, "-m", "niels_gpt.cache.cli", *build, "--tokenizer", str(tiny_model_path)]


def started(command, tmp_path):
    """Start a build, and wait until it encodes: until its journal has a checkpoint after the first line."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journals = "c/pretrain/.versions/long/*.journal/journal.jsonl"
    while process.poll() is None and not any(path.read_bytes().count(b"\n") > 1 for path in tmp_path.glob(journals)):
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, signal.SIGHUP))]
)
def test_each_signal_says_what_is_kept_and_the_same_command_resumes(command, tmp_path, number):
    process = started(command, tmp_path)
    process.send_signal(number)
    shown, errors = process.communicate(timeout=LONG)
    assert process.returncode == 1, errors
    assert "interrupted" in errors and "the same command resumes" in errors and "terminate" not in errors
    assert number.name in errors or number == signal.SIGINT
    assert "pretrain/short" in shown and os.path.islink(tmp_path / "c/pretrain/short")
    assert not os.path.lexists(tmp_path / "c/pretrain/long")
    done = niels_gpt(*command[3:], "--dry-run")
    assert done.status == 0 and "unfinished" in done.out


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(command, tmp_path):
    process = started(command, tmp_path)
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=LONG)
    assert process.returncode in (1, -signal.SIGTERM) and "terminate called" not in errors


def test_an_ignored_signal_stays_ignored_and_a_forked_child_dies_of_one(tmp_path):
    program = (
        "import os, signal\nfrom niels_gpt.work import interruptible\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with interruptible():\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    pid = os.fork()\n"
        "    if not pid:\n        os.kill(os.getpid(), signal.SIGTERM)\n        os._exit(0)\n"
        "    print(os.WTERMSIG(os.waitpid(pid, 0)[1]), flush=True)\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=LONG)
    assert int(done.stdout) == signal.SIGTERM


def test_the_training_of_a_tokenizer_ends_at_once(command, tmp_path):
    """Minutes in C++, in which no Python runs: the signal itself ends it, and the next run starts clean."""
    command = [*command[: command.index("--tokenizer")], "--vocab-size", "300"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "training" not in process.stderr.readline():
        pass
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    process.communicate()
    assert not os.path.lexists(tmp_path / "c" / "tokenizer")
