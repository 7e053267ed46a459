"""Leases that many processes want: exactly one holds it, and one that was stopped leaves its taker's bytes.

Other processes run the programs below. Their constants are shorter, so that a lease runs out within the test.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fault_builds import TEXTS, build_new, ready
from support.power_loss import tree_of

from niels_gpt.storage.locks import apply_lock_setting, leases
from niels_gpt.storage.locks.leases import Holder, lease_path

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Let a counter move soon."""
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(leases, "_POLL_SECONDS", 0.02)


@pytest.fixture
def lock(tmp_path):
    """The path of a lock in a folder of leases."""
    apply_lock_setting(tmp_path, "lease")
    return tmp_path / "pretrain" / ".versions" / "c" / "lock"


CONTEND = """
import os, pathlib, random, sys
from niels_gpt.storage.locks import check_lease, file_lock, leases
leases._POLL_SECONDS, leases.BEAT_SECONDS, leases.LEASE_SECONDS = 0.002, 0.1, float(sys.argv[2])
path, inside = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1] + ".inside")
random.seed(int(sys.argv[3]))
for _ in range(int(sys.argv[4])):
    with file_lock(path, "c", wait=True):
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if another is inside
        with open(str(path) + ".count", "a") as count:
            count.write("x")
        check_lease(path)
        os.unlink(inside)
        if random.random() < 0.2:
            os._exit(9)  # killed while it holds the lock
"""


def contend(lock, takers, rounds, seconds):
    """Let processes take a lock in turns, some of which are killed with it; returns how often one was inside."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    commands = [[sys.executable, "-c", CONTEND, lock, seconds, number, rounds] for number in range(takers)]
    running = [subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) for command in commands]
    said = [each.communicate()[1] for each in running]
    assert all(each.returncode in (0, 9) for each in running), said
    count = Path(f"{lock}.count")
    number = len(count.read_text())
    count.unlink()
    return number


def test_of_many_takers_exactly_one_is_inside(lock):
    for _ in range(2):
        assert contend(lock, takers=12, rounds=20, seconds=60) >= 12


def test_of_many_takers_of_a_lease_that_has_run_out_exactly_one_goes_on(lock):
    for number in range(1, 3):
        name = lease_path(lock)
        name.parent.mkdir(exist_ok=True)
        dead = Holder("a token", 1, "ada", "elsewhere", "a boot", "pid:[1]", 2**30)
        name.with_name(f"{name.name}.{number}").write_bytes(dead.content())
        assert contend(lock, takers=8, rounds=1, seconds=6) == 8


BUILD = """
import sys
from pathlib import Path
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks import leases
from support.fault_builds import TEXTS, build_new
leases.BEAT_SECONDS = 0.05

def texts():
    for number, text in enumerate(TEXTS):
        if number == int(sys.argv[2]):
            print("half", flush=True)
            sys.stdin.readline()
        yield text

try:
    build_new(Path(sys.argv[1]), texts=texts())
    print("built")
except CacheError as error:
    print(error.code, error)
"""


@pytest.mark.parametrize("stopped_at", [0, 25])
def test_a_build_that_was_stopped_and_taken_over_leaves_the_others_bytes(tmp_path, monkeypatch, stopped_at):
    expected = build_new(tmp_path / "alone" / "c")
    monkeypatch.setattr(leases, "LEASE_SECONDS", 1.0)
    shared = tmp_path / "shared"
    apply_lock_setting(shared, "lease")
    with ready([sys.executable, "-c", BUILD, str(shared / "c"), str(stopped_at)], "half") as stopped:
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(2)
        made = build_new(shared / "c", texts=_waking(stopped))
        assert made == expected
        out, _ = stopped.communicate()
        assert out.startswith("E512 ") and "lost its lease" in out
    assert _caches(shared) == _caches(tmp_path / "alone")


def _caches(folder):
    """Return a folder's files but those of locks."""
    return {name: content for name, content in tree_of(folder).items() if ".l" not in name and "/lock" not in name}


def _waking(stopped):
    """Yield the texts, and let the stopped build go on in the middle."""
    for number, text in enumerate(TEXTS):
        if number == 20:
            assert stopped.stdin is not None
            stopped.send_signal(signal.SIGCONT)
            stopped.stdin.write("\n")
            stopped.stdin.flush()
            stopped.wait(20)
        yield text
