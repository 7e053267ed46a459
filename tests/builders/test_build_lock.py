"""One build at a time holds a cache's lock, under its name (D11); folders that may not be written are named.

What another user may do is done by this file as a script, which gives up the rights of root.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.byte_tokenizer import build, train_text
from support.disk import versions_dir
from support.fault_builds import (
    NOBODY,
    OLD,
    TEXTS,
    Heard,
    answer,
    asking,
    build_new,
    documents_in_journal,
    error_of,
    ready,
    skip_unless,
)
from support.power_loss import tree_of
from support.small_builds import batches_of, locked

from niels_gpt.cache import CacheError

HOLD_THE_LOCK = """
import sys
from niels_gpt.storage import versions
with versions.build_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def holding(path, *prefix):
    """Let another process hold the lock of a cache; it is killed at the end."""
    return ready([*prefix, sys.executable, "-c", HOLD_THE_LOCK, str(path)], "held")


ELSEWHERE = ["unshare", "-ru", "sh", "-c", 'hostname elsewhere && exec "$0" "$@"']


@pytest.mark.parametrize(
    ("prefix", "host"), [([], socket.gethostname()), (ELSEWHERE, "elsewhere")], ids=["here", "elsewhere"]
)
def test_a_second_build_is_refused_and_a_killed_one_holds_nothing(tmp_path, prefix, host):
    if prefix:
        skip_unless("unshare", "-ru", "hostname", host)
    build(tmp_path / "c", [OLD])
    with holding(tmp_path / "c", *prefix) as holder:
        name = rf"/c: is being built by user \S+, host {re.escape(host)}, pid {holder.pid}\."
        with pytest.raises(CacheError, match=name):
            build(tmp_path / "c", ["a" * 30])
        assert train_text(tmp_path / "c") == OLD
        build(tmp_path / "other", ["a" * 30])  # each cache has a lock of its own
    build(tmp_path / "c", ["a" * 30])
    assert train_text(tmp_path / "c") == train_text(tmp_path / "other") == "a" * 30


def test_who_waits_says_for_whom_and_gets_the_lock_then(tmp_path, monkeypatch, caplog):
    said = []
    with holding(tmp_path / "c") as holder:

        class Hearing(logging.Handler):
            def emit(self, record):
                said.append(record.getMessage())
                holder.communicate()  # the holder lets go only now

        caplog.set_level(logging.INFO, "niels_gpt")
        monkeypatch.setattr(logging.getLogger("niels_gpt"), "handlers", [Hearing()])
        with locked(tmp_path / "c", wait=True) as folder:
            assert f"pid {os.getpid()}" in (folder / "lock").read_text()
    (line,) = said
    assert re.fullmatch(rf".*/c: is being built by user \S+, host \S+, pid {holder.pid}; waiting", line)


FORK_AND_DIE = """
import os, signal, sys, time
from niels_gpt.storage import versions
with versions.build_lock(sys.argv[1]):
    child = os.fork()
    if not child:
        print("forked", flush=True)
        time.sleep(60)
        os._exit(0)
    signal.pause()
"""


def test_a_forked_child_does_not_hold_the_lock_of_its_dead_parent(tmp_path):
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


def serve():
    """Give up the rights of root, if there are any, and answer."""
    with tempfile.TemporaryDirectory() as folder:  # all that a build imports, while it may be read
        build(Path(folder, "c"), ["abc"])
        build_new(Path(folder, "s"), "sft", TEXTS[:3])
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    answer({"build": lambda name: error_of(Path(name, "c")), "lose the right": lose_the_right, "hold": hold})


def hold(name):
    """Hold the lock of a cache until a line comes."""
    with locked(Path(name, "c")):
        print(json.dumps(os.getpid()), flush=True)
        sys.stdin.readline()
    return "let go"


@pytest.fixture(scope="module")
def nobody():
    """Asks a process of a user without rights to do something in a folder."""
    environment = {key: text for key, text in os.environ.items() if key not in ("LOGNAME", "USER", "LNAME", "USERNAME")}
    with asking(sys.executable, __file__, cwd="/", env=environment) as ask:
        yield ask


def name_of_nobody():
    number = NOBODY if os.geteuid() == 0 else os.geteuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


@pytest.fixture
def shared():
    """A folder that other users may enter, which those of pytest are not, and may not write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(folder)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.mark.parametrize("place", [".", ".versions", ".versions/c"])
def test_a_folder_that_may_not_be_written_is_named_with_the_user(shared, nobody, place):
    build(shared / "c", [OLD])
    (shared / ".versions" / "c" / "lock").unlink()
    if place != ".versions/c":  # nothing of this cache is there yet
        shutil.rmtree(shared / ".versions" / "c")
        (shared / "c").unlink()
    if place == ".":
        (shared / ".versions").rmdir()
    (shared / place).chmod(0o555)
    before = tree_of(shared)
    found = nobody("build", shared)
    assert (found["type"], found["errno"]) == ("PermissionError", errno.EACCES)
    told = f"user {name_of_nobody()} cannot write there. Give it the permission, or name another folder for the caches"
    assert told in found["message"] and str(shared / ".versions") in found["message"]
    assert tree_of(shared) == before


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755])
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("lock_mode", [0o600, 0o644])
def test_a_lock_of_another_user_is_named(shared, nobody, lock_mode, held, mode):
    build(shared / "c", [OLD])
    folder = versions_dir(shared / "c")
    (folder / "lock").chmod(lock_mode)
    folder.chmod(mode)
    before = tree_of(shared)
    with locked(shared / "c") if held else contextlib.nullcontext():
        found = nobody("build", shared)
    if held and (lock_mode, mode) == (0o644, 0o755):
        name = rf"user \S+, host {re.escape(socket.gethostname())}, pid {os.getpid()}\."
        assert found["type"] == "CacheError" and re.search(f"/c: is being built by {name}", found["message"])
    else:
        assert (found["type"], found["errno"]) == ("PermissionError", errno.EACCES)
        assert f"user {name_of_nobody()} cannot write there. Give it the permission" in found["message"]
    assert ".versions/c" in found["message"] and tree_of(shared) == before


def lose_the_right(name):
    """Build while the folder of the finished files becomes read-only; then build again."""
    folder = Path(name)
    batches_of(pytest.MonkeyPatch(), 10)
    build(folder / "c", [OLD])

    def texts():
        yield from TEXTS[:25]
        (work,) = (folder / ".versions" / "c").glob("building-*[!l]")
        (work / "train").chmod(0o555)
        yield from TEXTS[25:]

    error = None
    try:
        build_new(folder / "c", texts=texts())
    except OSError as caught:
        error = caught
    found = {
        "errno": None if error is None else error.errno,
        "message": str(error),
        "kept": documents_in_journal(folder / "c"),
        "old is readable": train_text(folder / "c") == OLD,
    }
    (work,) = (folder / ".versions" / "c").glob("building-*[!l]")
    (work / "train").chmod(0o755)
    heard = Heard()
    meta = build_new(folder / "c")
    return {**found, "resumed": heard.numbers, "content_sha256": meta["content_sha256"]}


def test_a_folder_made_read_only_in_mid_build_is_named(shared, nobody, tmp_path):
    (shared / "theirs").mkdir()
    if os.geteuid() == 0:
        os.chown(shared / "theirs", NOBODY, NOBODY)
    found = nobody("lose the right", shared / "theirs")
    assert found["errno"] == errno.EACCES and found["old is readable"]
    assert re.search(r"Permission denied.*train\.bin|Permission denied.*train/shard_\d+\.bin", found["message"])
    assert 20 <= found["kept"] < len(TEXTS) and found["resumed"] == [found["kept"]]
    assert found["content_sha256"] == build_new(tmp_path / "c")["content_sha256"]


@needs_root
def test_a_lock_that_another_user_holds_is_refused_by_the_users_name(shared, nobody):
    build(shared / "c", [OLD])
    folder = versions_dir(shared / "c")
    for path in (folder, folder / "lock"):
        os.chown(path, NOBODY, NOBODY)
    before = tree_of(shared)
    host = re.escape(socket.gethostname())
    pid = nobody("hold", shared)
    name = rf"/c: is being built by user {name_of_nobody()}, host {host}, pid {pid}\. Wait for it, or stop"
    for kind in ("pretrain", "sft"):
        with pytest.raises(CacheError, match=name):
            build_new(shared / "c", kind)
    assert nobody("let go", shared) == "let go" and tree_of(shared) == before
    build(shared / "c", ["new"])
    assert train_text(shared / "c") == "new"


def test_a_file_system_without_locks_is_named_and_left_alone(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    build(tmp_path / "c", [OLD])
    before = tree_of(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refused)
    told = r"No locks available: this file system has no flock\. Lock .* \(--lock lease\).*versions/c/lock"
    with pytest.raises(OSError, match=told) as error:
        build(tmp_path / "c", ["new"])
    assert error.value.errno == errno.ENOLCK and tree_of(tmp_path) == before


if __name__ == "__main__":
    serve()
