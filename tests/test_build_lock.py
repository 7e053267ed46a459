"""One build at a time holds a cache's lock, under its name, and no dead process holds it (D11).

Run: pytest tests/test_build_lock.py
"""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from byte_tokenizer import build, train_text

from niels_gpt import locks, versions
from niels_gpt.cache import CacheError

HOLD_THE_LOCK = """
import sys
from niels_gpt import locks, versions
with versions.build_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_build_is_refused_by_name_and_a_killed_builder_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path / "c")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            name = rf"user \S+, host {re.escape(socket.gethostname())}, pid {holder.pid}\."
            with pytest.raises(CacheError, match=f"is being built by {name}"):
                build(tmp_path / "c", ["a" * 30])
        finally:
            holder.kill()
    build(tmp_path / "c", ["a" * 30])
    assert train_text(tmp_path / "c") == "a" * 30


def test_another_cache_may_be_built_at_the_same_time(tmp_path: Path) -> None:
    with versions.build_lock(tmp_path / "one"):
        build(tmp_path / "two", ["a" * 30])
    assert train_text(tmp_path / "two") == "a" * 30


def test_who_waits_says_for_whom_and_gets_the_lock_when_the_holder_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path / "c")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None and holder.stdout.readline() == "held\n"
        said: list[str] = []

        def say(text: str, *about: object) -> None:
            said.append(text % about)
            holder.communicate()  # the holder lets go only now

        monkeypatch.setattr(locks.logger, "info", say)
        with versions.build_lock(tmp_path / "c", wait=True) as folder:
            assert f"pid {os.getpid()}" in (folder / "lock").read_text()
    (line,) = said
    assert re.fullmatch(rf".*/c: is being built by user \S+, host \S+, pid {holder.pid}; waiting", line)


FORK_AND_DIE = """
import os, signal, sys, time
from niels_gpt import versions
with versions.build_lock(sys.argv[1]):
    child = os.fork()
    if not child:
        print("forked", flush=True)
        time.sleep(60)
        os._exit(0)
    signal.pause()
"""


def test_a_forked_child_does_not_hold_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORK_AND_DIE, str(tmp_path / "c")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "forked\n"
        os.kill(parent.pid, signal.SIGKILL)
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        try:
            build(tmp_path / "c", ["abc"])
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    assert train_text(tmp_path / "c") == "abc"
