"""Leases: one holder, by counters that are seen to move; one that was stopped notices; no pid elsewhere is guessed.

Other processes run the programs below. Their constants are shorter, so that a lease runs out within the test.
"""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from support.errors import refused
from support.fault_builds import NOBODY, ready, skip_unless

from niels_gpt.storage.codes import code_of
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks import (
    apply_lock_setting,
    check_lease,
    file_lock,
    hold_version,
    leases,
    lock_kind,
    refuse_if_held,
    unless_held,
)
from niels_gpt.storage.locks.leases import LEASES_DIR, MARKER, Holder, lease_path, read_lease
from niels_gpt.storage.versions import refuse_if_partition_is_built

HOLD = """
import pathlib, sys
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks import check_lease, file_lock, leases
leases.BEAT_SECONDS = 0.02
path = pathlib.Path(sys.argv[1])
try:
    with file_lock(path, "c", "is being built", wait=False):
        print("held", flush=True)
        sys.stdin.readline()
        check_lease(path)
        path.with_name("durable").touch()
except CacheError as error:
    print(error.code, error, flush=True)
"""
OTHER_MACHINE = ["unshare", "--user", "--map-root-user", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
OTHER_MACHINE += ["sh", "-c", 'hostname elsewhere && exec "$0" "$@"']


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Let a counter move soon."""
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(leases, "_POLL_SECONDS", 0.02)


@pytest.fixture
def expiring(monkeypatch):
    """Let a lease run out within a test."""
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.4)


@pytest.fixture
def lock(tmp_path):
    """The path of a lock in a folder of leases."""
    apply_lock_setting(tmp_path, "lease")
    return tmp_path / "pretrain" / ".versions" / "c" / "lock"


def holding(lock, *prefix):
    """Let another process hold a lock; it is killed at the end."""
    return ready([*prefix, sys.executable, "-c", HOLD, str(lock)], "held")


def plant(lock, content, number=1):
    """Write a lease of a lock."""
    name = lease_path(lock)
    path = name.with_name(f"{name.name}.{number}")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.content())
    return path


def elsewhere(counter=1):
    """A process of another machine, whose pid is not in use here."""
    return Holder("a token", counter, "ada", "elsewhere", "a boot", "pid:[1]", 2**30)


# --- the folder says how it is locked ---------------------------------------------------------------------------------


def test_a_folder_says_how_all_below_it_is_locked(tmp_path):
    root = tmp_path / "cache"
    deepest = root / "sample/pretrain/.versions/n/partitions-0123456789ab/.versions/00003/lock"
    apply_lock_setting(root, "auto")
    apply_lock_setting(root, "flock")
    assert lock_kind(deepest) == "flock" and not root.exists()
    apply_lock_setting(root, "lease")
    before = (root / MARKER).read_bytes()
    for setting in ("lease", "auto"):
        apply_lock_setting(root, setting)
    (tmp_path / "link").symlink_to("cache")
    paths = [deepest, root / "eagle3" / "targets" / "sidecar" / "lock", root, tmp_path / "link" / "sft" / "lock"]
    assert [lock_kind(path) for path in paths] == ["lease"] * 4 and lock_kind(tmp_path / "lock") == "flock"
    with refused("E512", f"{root / MARKER}") as error:
        apply_lock_setting(root, "flock")
    assert error.value.code == "E512" and (root / MARKER).read_bytes() == before
    with pytest.raises(ValueError, match="auto, flock, lease"):
        apply_lock_setting(root, "dotlock")


def test_a_folder_where_a_builder_has_a_flock_does_not_change(tmp_path):
    lock = tmp_path / "pretrain" / ".versions" / "c" / "lock"
    with holding(lock) as holder, refused("E503", f"pid {holder.pid}") as error:
        apply_lock_setting(tmp_path, "lease")
    assert error.value.code == "E503" and lock_kind(lock) == "flock"
    lock.write_text("user ada, host elsewhere, pid 7\n")  # alive or killed: flock may not show which
    with pytest.raises(CacheError, match="host elsewhere") as error:
        apply_lock_setting(tmp_path, "lease")
    assert error.value.code == "E512" and not (tmp_path / MARKER).exists()
    lock.write_text("")
    apply_lock_setting(tmp_path, "lease")
    lock.write_text("user ada, host elsewhere, pid 7\n")  # by a program that does not look
    with pytest.raises(CacheError, match="host elsewhere"):
        file_lock(lock, "c", wait=False).__enter__()


def test_who_waited_for_a_flock_takes_a_lease_where_the_folder_has_changed(tmp_path):
    lock, order = tmp_path / "lock", []
    with file_lock(lock, "c", wait=False):
        waiting = threading.Thread(target=lambda: order.append(held_in(lock)))
        waiting.start()
        time.sleep(0.1)
        (tmp_path / MARKER).write_text('{"kind": "locks", "lock": "lease"}')
        lock.write_text("")
    waiting.join()
    assert order == ["lease"]


def held_in(lock):
    with file_lock(lock, "c", wait=True):
        return "lease" if leases.HELD else "flock"


@pytest.mark.parametrize(
    "marker", [b"", b"[]", b'{"kind": "locks", "lock": "new"}', b" " * 5000, "link", "FIFO", "folder"], ids=str
)
def test_a_marker_that_is_not_ours_is_refused(tmp_path, marker):
    spoil(tmp_path / MARKER, marker)
    for attempt in (lambda: file_lock(tmp_path / "lock", "c", wait=False).__enter__(), lambda: lock_kind(tmp_path)):
        with refused("E512", "locks.json") as error:
            attempt()
        assert error.value.code == "E512"


def spoil(path, how):
    """Put something at a path: bytes, or a link to a good file, a FIFO, a folder, a file of two names."""
    good = path.parent / "good"
    good.write_bytes(elsewhere().content() if path.parent.name == LEASES_DIR else b'{"kind": "locks", "lock": "lease"}')
    if isinstance(how, bytes):
        path.write_bytes(how)
    elif how == "FIFO":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to("good")
    else:
        path.hardlink_to(good)


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b'{"kind": "lease", "token": 1}',
        b"\x00" * 2**20,
        elsewhere().content().replace(b'"ada"', b"[[[]]]"),
        "link",
        "FIFO",
        "folder",
        "hard link",
    ],
    ids=range(8),
)
def test_a_file_at_a_leases_name_that_is_none_is_named_and_left(lock, content):
    path = plant(lock, b"")
    path.unlink()
    spoil(path, content)
    before = sorted(path.parent.iterdir())
    for attempt in (lambda: refuse_if_held(lock, "c"), lambda: file_lock(lock, "c", wait=True).__enter__()):
        with pytest.raises(CacheError, match=path.name) as error:
            attempt()
        assert error.value.code == "E504"
    assert sorted(path.parent.iterdir()) == before


# --- who holds it -----------------------------------------------------------------------------------------------------


def test_a_lease_is_one_file_while_it_is_held_and_nothing_after(lock):
    with file_lock(lock, "c", wait=False):
        (path,) = lease_path(lock).parent.iterdir()
        first = read_lease(path)
        with refused("E503", f"pid {os.getpid()}"):
            file_lock(lock, "c", "is being built", wait=False).__enter__()
        while (later := read_lease(path)) == first:
            time.sleep(0.01)
        assert first and later and first.token == later.token and first.counter < later.counter
        check_lease(lock)
        with file_lock(lock.with_name("other"), "d", wait=False):
            assert len(leases.HELD) == 2
    assert not lease_path(lock).parent.exists() and not leases.HELD and lock.parent.is_dir()
    check_lease(lock)  # nothing is held


def test_one_of_this_machine_that_was_killed_is_replaced_at_once(lock):
    with holding(lock) as holder:
        with pytest.raises(CacheError, match=rf"^c: is being built by user \S+, host \S+, pid {holder.pid}\."):
            file_lock(lock, "c", "is being built", wait=False).__enter__()
        holder.kill()
    refuse_if_held(lock, "c")
    with file_lock(lock, "c", wait=False):
        (path,) = lease_path(lock).parent.iterdir()
        assert path.name.endswith(".2")


def test_one_of_another_machine_is_replaced_only_after_its_counter_stood_still(lock, monkeypatch):
    path, ended = plant(lock, elsewhere()), threading.Event()

    def beat():
        counter = 1
        while not ended.wait(0.02):
            counter += 1
            path.write_bytes(elsewhere(counter).content())

    beats = threading.Thread(target=beat)
    beats.start()
    try:
        for _ in range(3):
            with refused("E503", "host elsewhere") as error:
                file_lock(lock, "c", wait=False).__enter__()
            assert error.value.code == "E503"
    finally:
        ended.set()
        beats.join()
    with refused("E503", "host elsewhere"):
        refuse_if_held(lock, "c")  # who only looks does not wait to know
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.4)
    before = path.read_bytes()
    with file_lock(lock, "c", wait=False):
        assert not path.exists() and before
    assert not path.parent.exists()


@pytest.mark.usefixtures("expiring")
def test_a_file_that_was_just_created_counts_until_it_stood_still(lock):
    plant(lock, b"")
    with pytest.raises(CacheError, match="just started"):
        refuse_if_held(lock, "c")
    with file_lock(lock, "c", wait=False):
        assert len(list(lease_path(lock).parent.iterdir())) == 1


@pytest.mark.usefixtures("expiring")
def test_a_stopped_holder_that_wakes_up_writes_nothing_durable(lock):
    with holding(lock) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        with file_lock(lock, "c", wait=True):
            stopped.send_signal(signal.SIGCONT)
            out, _ = stopped.communicate("\n")
            assert out.startswith("E512 c: this process lost its lease to user ")
            assert f"pid {os.getpid()}" in out and not lock.with_name("durable").exists()
            check_lease(lock)
        assert not lease_path(lock).parent.exists()


def test_a_forked_child_neither_keeps_a_lease_nor_ends_it(lock):
    with file_lock(lock, "c", wait=False):
        child = os.fork()
        if not child:
            status = 1
            try:
                check_lease(lock)
                status = len(leases.HELD) + (threading.active_count() - 1)
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        check_lease(lock)
    assert not lease_path(lock).parent.exists()


@contextmanager
def no_room():
    """Refuse every byte that this process writes to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_gives_no_lease(lock):
    with no_room(), pytest.raises(OSError, match=lease_path(lock).name) as error:
        file_lock(lock, "c", wait=False).__enter__()
    assert code_of(error.value) == "E501" and not lease_path(lock).parent.exists()
    with file_lock(lock, "c", wait=False), no_room():
        time.sleep(0.1)
        check_lease(lock)


@pytest.mark.usefixtures("expiring")
def test_a_folder_that_may_not_be_written_is_named_and_a_holder_in_it():
    root = Path(tempfile.mkdtemp())
    try:
        apply_lock_setting(root, "lease")
        lock = root / "lock"
        path = plant(lock, elsewhere())
        for folder, mode in ((root, 0o755), (path.parent, 0o555)):
            folder.chmod(mode)
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
        with pytest.raises(CacheError, match="host elsewhere"):
            refuse_if_held(lock, "c")
        with pytest.raises(PermissionError, match="cannot write there"):
            file_lock(lock, "c", wait=False).__enter__()
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        path.parent.chmod(0o755)
        shutil.rmtree(root)


def test_gc_keeps_every_version_where_builders_take_leases(lock):
    version = lock.with_name("0123456789ab")
    version.mkdir(parents=True)
    (version / "meta.json").write_text("{}")
    with unless_held(version) as why:
        assert "nobody can know" in why
    hold = hold_version(version)
    with unless_held(version) as why:
        assert hold and why == "open in a reader"


def test_a_partition_that_is_built_under_a_lease_is_seen(lock):
    inner = lock.parent / "partitions-0123456789ab" / ".versions" / "00003"
    with (
        file_lock(inner / "lock", inner, wait=False),
        refused("E503", "00003") as error,
    ):
        refuse_if_partition_is_built(inner.parent.parent)
    assert error.value.code == "E503"


@pytest.mark.usefixtures("expiring")
def test_the_lease_of_a_machine_that_died_with_a_finished_partition_runs_out(lock):
    plan = lock.parent / "partitions-0123456789ab"
    (plan / ".versions" / "00003").mkdir(parents=True)
    path = plant(plan / ".versions" / "00003" / "lock", elsewhere())
    with refused("E503", "00003", "host elsewhere"):
        refuse_if_partition_is_built(plan, dry_run=True)
    refuse_if_partition_is_built(plan)
    assert not path.exists()


@pytest.mark.usefixtures("expiring")
def test_the_last_number_of_a_lease_is_named(lock):
    path = plant(lock, elsewhere(), 999_999_999)
    with refused("E504", path) as error:
        file_lock(lock, "c", wait=False).__enter__()
    assert error.value.code == "E504" and os.listdir(path.parent) == [path.name]


def test_a_strangers_file_called_lock_is_no_holder(tmp_path):
    (tmp_path / "lock").write_text("the notes on my door's lock\n")
    apply_lock_setting(tmp_path, "lease")
    assert lock_kind(tmp_path) == "lease"


@pytest.mark.parametrize("kind", ["flock", "lease"])
@pytest.mark.parametrize(
    "name", ["\N{GRINNING FACE}" * 300, "\udcff\n", "x" * 1200], ids=["long", "not UTF-8", "longer"]
)
def test_any_user_name_takes_a_lock(tmp_path, monkeypatch, name, kind):
    monkeypatch.setenv("LOGNAME", name)
    apply_lock_setting(tmp_path, kind)
    with file_lock(tmp_path / "lock", "c", wait=False):
        check_lease(tmp_path / "lock")
        with refused("E503", f"{socket.gethostname()}", f"{os.getpid()}"):
            file_lock(tmp_path / "lock", "c", wait=False).__enter__()


# --- another machine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flock", "lease"])
def test_a_builder_on_another_machine_is_neither_disturbed_nor_believed_dead(tmp_path, kind):
    skip_unless(*OTHER_MACHINE, "true")
    apply_lock_setting(tmp_path, kind)
    lock = tmp_path / "c" / "lock"
    with holding(lock, *OTHER_MACHINE) as there:
        for _ in range(2):
            with pytest.raises(CacheError, match=r"is in use by user \S+, host elsewhere, pid \d+\.") as error:
                file_lock(lock, "c", wait=False).__enter__()
            assert error.value.code == "E503"
        there.communicate("\n")
        assert lock.with_name("durable").exists()
    with file_lock(lock, "c", wait=False):
        command = [*OTHER_MACHINE, sys.executable, "-c", HOLD, str(lock)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said.startswith("E503 c: is being built by user ") and f"pid {os.getpid()}" in said
        check_lease(lock)


def test_a_lease_says_who_holds_it(lock):
    with file_lock(lock, "c", wait=False):
        (path,) = lease_path(lock).parent.iterdir()
        found = json.loads(path.read_bytes())
    here = Holder.of_this_process("")
    assert found == {**asdict(here), "kind": "lease", "token": found["token"], "counter": found["counter"]}
    assert not here.is_dead() and not elsewhere().is_dead()
