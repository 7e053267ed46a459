"""A process that lost its lease while it was stopped changes nothing of its taker's, at whatever step it wakes up."""

import itertools
import json
import shutil
from contextlib import ExitStack

import pytest
from support.errors import refused
from support.fault_builds import TEXTS, build_new
from support.power_loss import tree_of

from niels_gpt.engine import checkpoints
from niels_gpt.kinds.verify import find_damage
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks import apply_lock_setting, check_lease, file_lock, leases
from niels_gpt.storage.locks.leases import LEASES_DIR, MARKER, Holder
from niels_gpt.storage.versions import build_lock, building, commit, publish, resumable


def _files(folder):
    return {name: content for name, content in tree_of(folder).items() if LEASES_DIR not in name}


def lose():
    """Let another process have taken over every lease of this one."""
    for held in leases.HELD.values():
        held.path.unlink(missing_ok=True)
        held.path.with_suffix(".9").write_bytes(
            Holder("a token", 1, "ada", "elsewhere", "a boot", "pid:[1]", 2**30).content()
        )


def losing(monkeypatch, owner, name, turn=0):
    """Lose all leases at the end of a call of a function, that of the number `turn`."""
    real, calls = getattr(owner, name), itertools.count()

    def call(*args, **kwargs):
        result = real(*args, **kwargs)
        if next(calls) == turn:
            lose()
        return result

    monkeypatch.setattr(owner, name, call)


def test_a_folder_that_says_no_more_that_its_locks_are_leases_ends_them(tmp_path):
    apply_lock_setting(tmp_path, "lease")
    lock = tmp_path / "lock"
    with file_lock(lock, "c", wait=False):
        (tmp_path / MARKER).unlink()
        with refused("E512", "locks.json") as error:
            check_lease(lock)
    assert error.value.code == "E512" and not (tmp_path / LEASES_DIR).exists()


@pytest.mark.usefixtures("small_batches")
def test_a_build_that_loses_its_lease_while_it_reads_its_shards_changes_nothing(tmp_path, monkeypatch):
    def dying():
        yield from TEXTS[:25]
        raise KeyboardInterrupt

    apply_lock_setting(tmp_path, "lease")
    with pytest.raises(KeyboardInterrupt):
        build_new(tmp_path / "c", texts=dying())
    (shard,) = tmp_path.rglob("train/shard_00000.bin")
    shard.with_name("shard_00099.bin").touch()  # by the taker, which has come further
    before = _files(tmp_path)
    assert any("shard" in name for name in before)
    losing(monkeypatch, checkpoints, "checksums_of")
    with refused("E512", "host elsewhere") as error:
        build_new(tmp_path / "c")
    after = _files(tmp_path)
    assert error.value.code == "E512" and {**after, **before} == after


@pytest.mark.usefixtures("small_batches")
def test_who_lost_its_lease_may_write_on_to_the_files_that_it_has_open(tmp_path):
    def dying():
        yield from TEXTS[:30]
        raise KeyboardInterrupt

    apply_lock_setting(tmp_path, "lease")
    with pytest.raises(KeyboardInterrupt):
        build_new(tmp_path / "c", texts=dying())
    files = [path for path in tmp_path.rglob("*.*") if path.suffix in (".bin", ".txt") and path.stat().st_size]
    assert any("shard" in path.name for path in files) and any("ids" in path.name for path in files)
    with ExitStack() as stack:
        stale = [stack.enter_context(open(path, "ab", buffering=0)) for path in files if "00000" not in path.name]
        found = build_new(tmp_path / "c", progress=lambda *_: [file.write(b"x") for file in stale])
    assert found == build_new(tmp_path / "whole" / "c")
    assert find_damage(tmp_path / "c", deep=True) == []


@pytest.mark.parametrize("step", ["sync_tree", "symlink"])
def test_a_commit_that_loses_its_lease_is_not_seen(tmp_path, monkeypatch, step):
    apply_lock_setting(tmp_path, "lease")
    before = build_new(tmp_path / "c")
    losing(monkeypatch, fileio, step)
    with refused("E512", "host elsewhere") as error, building(tmp_path / "c") as work:
        (work / "meta.json").write_text("{}")
        commit(work, tmp_path / "c", "a" * 64)
    assert error.value.code == "E512" and json.loads((tmp_path / "c" / "meta.json").read_text()) == before


def test_two_that_build_without_a_journal_have_two_folders(tmp_path):
    apply_lock_setting(tmp_path, "lease")
    with building(tmp_path / "c") as stopped:
        pass
    stopped.mkdir()
    (stopped / "spm.model").touch()
    with refused("E512", "host elsewhere"), building(tmp_path / "c") as work:
        assert work != stopped and list(work.iterdir()) == [] and not stopped.exists()
        lose()
        shutil.rmtree(work)  # by the taker
        (work / "train.bin").touch()


def test_who_lost_its_lease_removes_and_replaces_nothing(tmp_path):
    apply_lock_setting(tmp_path, "lease")
    public = tmp_path / "c"
    public.mkdir()
    with refused("E512", "host elsewhere"), build_lock(public) as folder:
        lose()
        publish(folder / ("a" * 12), public)
    assert public.is_dir() and not public.is_symlink()
    for number, interrupts in enumerate((False, True)):
        with pytest.raises((CacheError, KeyboardInterrupt)), resumable(public / str(number), "b" * 64) as (_, journal):
            if not interrupts:
                (journal / "journal.jsonl").touch()
            lose()
            if interrupts:
                raise KeyboardInterrupt
        assert journal.is_dir()


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
def test_a_build_that_loses_its_lease_while_it_syncs_a_file_takes_no_further_step(tmp_path):
    apply_lock_setting(tmp_path, "lease")
    for turn in itertools.count():
        trace = []
        with pytest.MonkeyPatch.context() as patched, fileio.recorded(trace):
            synced = lose_at_sync(patched, turn, trace)
            try:
                build_new(tmp_path / str(turn), shard_bytes=2048)
            except CacheError as error:
                assert error.code == "E512"
        if not synced:
            break
        if synced[0].endswith(".tmp") and "journal.jsonl" in synced[0]:
            continue  # the first line of a journal is one step, with the sync in it
        steps = [op for op in trace[trace.index("lost") :] if op[0] in ("rename", "unlink", "rmdir", "create", "cut")]
        assert [op for op in steps if not op[-1].endswith("/meta.json")] == [], (turn, synced)
        assert not any(op[0] == "write" and "journal.jsonl" in op[1] for op in trace[trace.index("lost") :]), turn
    assert turn > 30


def lose_at_sync(patched, turn, trace):
    """Lose all leases at the end of a sync of a file; returns a list that has the file's path then."""
    real, calls, synced = fileio.OutputFile.sync, itertools.count(), list[str]()

    def sync(file):
        before = len(trace)
        real(file)
        if len(trace) > before and next(calls) == turn:
            lose()
            synced.append(str(file.path))
            trace.append("lost")

    patched.setattr(fileio.OutputFile, "sync", sync)
    return synced
