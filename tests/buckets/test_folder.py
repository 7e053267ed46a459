"""The folder for what is fetched: full, foreign, damaged, removed while it is used, shared, and of another size."""

import fcntl
import logging
import os
import shutil
import subprocess
import sys

import pytest
from support.eagle3_runs import disk
from support.errors import refused
from support.mounted_caches import (
    PIECE_BYTES,
    SHARD,
    altered,
    copied,
    digest,
    only_mount,
    patience,
    pieces,
    stream,
    used_bytes,
)

from niels_gpt.buckets import folder as folders
from niels_gpt.buckets.folder import BoundedFolder, BusyFolderError
from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.storage.errors import UsageError
from niels_gpt.storage.mounted import MOUNTED

IS_ROOT = os.geteuid() == 0


def opened(cache, local, **how):
    return PretrainSplit(f"file://{cache.resolve()}", split="train", local=local, **how)


def codes(caplog):
    return {getattr(record, "code", "") for record in caplog.records}


@pytest.mark.parametrize(("text", "most"), [("50 GiB", 50 << 30), ("50GB", 50 * 10**9), ("0.5 gib", 1 << 29)])
def test_sizes_as_texts(cache, local, text, most):
    opened(cache, local, max_bytes=text, max_ahead="3 MiB")
    assert (only_mount().store.max_bytes, only_mount().max_ahead) == (most, 3 << 20)


@pytest.mark.parametrize("size", [0, -1, "0", "-1", "x", True, 1.5, "", "9" * 40, "1 EiB", "16777215"])
def test_sizes_that_cannot_be(cache, local, size):
    with refused("E101", "max_bytes", repr(size), kind=UsageError):
        opened(cache, local, max_bytes=size)
    assert not local.exists() and not MOUNTED


def test_a_file_in_the_place_of_the_folder(cache, local):
    local.write_bytes(b"mine")
    with refused("E504", local):
        opened(cache, local)
    with refused("E504", local):
        opened(cache, local / "below")
    assert local.read_bytes() == b"mine"


@pytest.mark.parametrize("which", ["local", "mount", "pieces"])
def test_a_folder_that_everybody_may_write(cache, local, which):
    opened(cache, local)
    folder = {"local": local, "mount": only_mount().folder, "pieces": only_mount().folder / ".pieces"}[which]
    folder.chmod(0o777)
    MOUNTED.clear()
    with refused("E502", folder):
        opened(cache, local)


def test_the_group_of_a_folder_may_write_because_that_is_a_usual_umask(cache, local):
    local.mkdir()
    local.chmod(0o775)
    assert len(opened(cache, local).stream(0, 10)) == 10
    assert only_mount().folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not IS_ROOT, reason="only root gives a folder away")
@pytest.mark.parametrize("which", ["local", "mount"])
def test_a_folder_of_another_user(cache, local, which):
    opened(cache, local)
    os.chown(local if which == "local" else only_mount().folder, 12345, 12345)
    MOUNTED.clear()
    with refused("E502", "12345"):
        opened(cache, local)


@pytest.mark.parametrize("which", ["mount", ".pieces", "index"])
def test_folders_that_are_links_are_not_followed(cache, local, tmp_path, which):
    opened(cache, local)
    link = only_mount().folder / ("" if which == "mount" else which)
    shutil.rmtree(link)
    (tmp_path / "mine").mkdir()
    link.symlink_to(tmp_path / "mine")
    MOUNTED.clear()
    with refused("E205" if which == "index" else "E504", link.name):
        opened(cache, local)
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "hard link"])
def test_another_thing_in_the_place_of_the_count_of_bytes(cache, local, tmp_path, kind):
    (tmp_path / "mine").write_bytes(b"mine")
    local.mkdir()
    used = local / "used"
    if kind == "link":
        used.symlink_to(tmp_path / "mine")
    elif kind == "fifo":
        os.mkfifo(used)
    elif kind == "folder":
        used.mkdir()
    else:
        used.hardlink_to(tmp_path / "mine")
    with refused("E504", used, "rm"):
        opened(cache, local)
    assert (tmp_path / "mine").read_bytes() == b"mine" and not MOUNTED


@pytest.mark.parametrize("text", [b"", b"-5", b"x" * 100, b"9" * 100, b"\0" * 8])
def test_a_count_of_bytes_that_is_wrong_is_counted_again(cache, local, text):
    split = opened(cache, local)
    (local / "used").write_bytes(text)
    split.stream(0, 10)
    sizes = [path.stat().st_size for path in only_mount().folder.rglob("*") if path.is_file()]
    assert int((local / "used").read_bytes()) == sum(sizes)


def test_a_pipe_in_place_of_the_count_stops_no_reader_that_needs_no_room(cache, local):
    expected = digest(stream(f"file://{cache.resolve()}", local=local))
    MOUNTED.clear()
    (local / "used").unlink()
    os.mkfifo(local / "used")
    assert digest(stream(f"file://{cache.resolve()}", local=local)) == expected


@pytest.mark.parametrize(
    "kind", ["altered", "shorter", "longer", "link", "fifo", "half link", "half fifo", "half folder"]
)
def test_what_somebody_puts_in_the_place_of_a_piece_is_replaced(cache, local, tmp_path, caplog, kind):
    expected = digest(stream(cache))
    digest(stream(f"file://{cache.resolve()}", local=local))
    MOUNTED.clear()
    (tmp_path / "mine").write_bytes(b"mine")
    for path in pieces(local).values():
        if kind == "altered":
            altered(path, path.stat().st_size // 2)
            continue
        content = path.read_bytes()
        path.unlink()
        path = path.with_name(path.name + ".half" * kind.startswith("half"))
        if kind.endswith("link"):
            path.symlink_to(tmp_path / "mine")
        elif kind.endswith("fifo"):
            os.mkfifo(path)
        elif kind.endswith("folder"):
            path.mkdir()
        else:
            path.write_bytes(content[:-1] if kind == "shorter" else content + b"x")
    if kind == "half folder":
        with refused("E504", ".half", "rm -r"):
            digest(stream(f"file://{cache.resolve()}", local=local))
        return
    assert digest(stream(f"file://{cache.resolve()}", local=local)) == expected
    assert kind.startswith("half") or "W611" in codes(caplog)
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_an_index_file_that_is_altered_is_fetched_again(cache, local, caplog):
    opened(cache, local)
    documents = only_mount().folder / "index" / "train_docs.npy"
    expected = opened(cache, local).documents.copy()
    altered(documents, 200)
    assert (opened(cache, local).documents == expected).all()
    assert "W611" in codes(caplog)


@pytest.mark.parametrize("step", ["before", "between"])
def test_a_folder_that_is_removed_while_it_is_used(cache, local, step):
    """What is needed is fetched again; LOCAL is made again."""
    expected, batches = digest(stream(cache)), stream(f"file://{cache.resolve()}", local=local, max_ahead="1 MiB")
    if step == "before":
        shutil.rmtree(local)
    found = []
    for batch in batches:
        found.append(batch)
        if step == "between" and len(found) % 50 == 1:
            shutil.rmtree(local, ignore_errors=True)
    assert digest(found) == expected


@pytest.mark.slow
def test_the_folder_stays_below_max_bytes_and_foreign_files_in_it_are_not_counted_and_stay(large, tmp_path):
    with disk(tmp_path / "disk", "64m") as local:
        local.chmod(0o700)
        foreign, most = local / "project-0123456789ab", 0
        foreign.mkdir()
        (foreign / "work").write_bytes(bytes(20 << 20))
        os.utime(foreign / "work", (0, 0))
        for number in range(2000):
            (local / f"mine{number}").symlink_to("mine")
        before = used_bytes(local)
        for number, _ in enumerate(stream(f"file://{large.resolve()}", local=local, max_bytes="16 MiB")):
            most = max(most, used_bytes(local) - before)
            if number == 150:
                break
        assert 8 << 20 < most <= 17 << 20  # a piece that goes while it is read still counts
        assert (foreign / "work").stat().st_size == 20 << 20 and len(list(local.glob("mine*"))) == 2000
        MOUNTED.clear()


@pytest.mark.slow
def test_another_process_may_have_another_size(large, local):
    url = f"file://{large.resolve()}"
    assert digest(stream(url, local=local, max_bytes="24 MiB"), 200) == digest(stream(large), 200)
    MOUNTED.clear()
    assert digest(stream(url, local=local, max_bytes="16 MiB"), 200) == digest(stream(large), 200)
    assert sum(path.stat().st_size for path in local.rglob("*") if path.is_file()) <= 16 << 20


def test_a_piece_that_is_in_use_stays(large, local):
    split = opened(large, local, max_bytes="16 MiB")
    split.stream(0, 10)
    piece = pieces(local)["0-0" if "0-0" in pieces(local) else next(iter(pieces(local)))]
    begin = piece.stat().st_ino
    for at in range(0, split.num_tokens - 10, PIECE_BYTES // 8):
        os.utime(piece, (0, piece.stat().st_mtime))
        split.stream(0, 10)
        split.stream(at, at + 10)
    assert piece.stat().st_ino == begin


def test_a_full_disk_is_an_error_until_there_is_room(cache, tmp_path):
    with disk(tmp_path / "disk", "3m") as folder:
        batches = stream(f"file://{cache.resolve()}", local=folder / "local")
        (folder / "other").write_bytes(bytes(2 << 20))
        with refused("E501", folder / "local", "do not fit"):
            digest(batches)
        (folder / "other").unlink()
        subprocess.run(["mount", "-o", "remount,size=32m", str(folder)], check=True)
        assert digest(stream(f"file://{cache.resolve()}", local=folder / "local")) == digest(stream(cache))
        MOUNTED.clear()


def test_a_read_only_folder_serves_what_it_has(cache, tmp_path):
    with disk(tmp_path / "disk", "32m") as folder:
        url, local = f"file://{cache.resolve()}", folder / "local"
        split = opened(cache, local)
        split.stream(0, 10)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        MOUNTED.clear()
        split = PretrainSplit(url, split="train", local=local)
        assert len(split.stream(0, 10)) == 10
        with refused("E502", local):
            split.stream(PIECE_BYTES // 4, PIECE_BYTES // 4 + 10)
        MOUNTED.clear()


def test_a_file_that_may_not_grow_so_large(cache, local):
    """As RLIMIT_FSIZE and quotas do."""
    code = (
        "import resource, signal, sys\n"
        "from niels_gpt.cache.pretrain_dataset import PretrainSplit\n"
        "from niels_gpt.storage.codes import code_of\n"
        "split = PretrainSplit(sys.argv[1], split='train', local=sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))\n"
        "try: split.stream(0, 10)\n"
        "except OSError as error: print(code_of(error), error)\n"
    )
    run = [sys.executable, "-c", code, f"file://{cache.resolve()}", str(local)]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert said.startswith("E501") and str(local) in said


def hold(path):
    """Lock a file as another process does; returns its descriptor."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


@pytest.mark.parametrize("what", ["piece", "index", "used"])
def test_a_lock_of_a_stopped_process_is_waited_for_and_then_left(cache, local, what, caplog):
    caplog.set_level(logging.INFO)
    expected = opened(cache, local).stream(0, 10).copy()
    mount = only_mount()
    MOUNTED.clear()
    if what == "piece":
        (path,) = pieces(local).values()
        path.unlink()
        handle = hold(f"{path}.half")
    elif what == "index":
        path = mount.folder / "index" / "crc32.bin"
        path.unlink()
        handle = hold(f"{path}.half")
    else:
        next(iter(pieces(local).values())).unlink()
        handle = hold(local / "used")
    with patience(0.3):
        assert (opened(cache, local).stream(0, 10) == expected).all()
    os.close(handle)
    assert what == "used" or path.exists()
    assert "0 s" in caplog.text


def test_a_piece_for_which_there_is_no_room_beside_what_is_on_its_way_is_served_and_not_kept(cache, local):
    split = opened(cache, local, max_bytes="16 MiB")
    folder, handles = only_mount().folder / ".pieces", []
    for number in range(16):
        handles.append(hold(folder / f"99-{number:x}.half"))
        os.ftruncate(handles[-1], PIECE_BYTES)
    (local / "used").write_bytes(b"unknown")
    assert (split.stream(0, 10) == PretrainSplit(cache, split="train").stream(0, 10)).all()
    assert not [name for name in pieces(local) if not name.endswith(".half")]
    for handle in handles:
        os.close(handle)
    split.stream(0, 10)
    assert [name for name in pieces(local) if not name.endswith(".half")] == ["0-0"]


def test_an_old_folder_of_another_program_with_such_a_name_stays(large, local):
    opened(large, local, max_bytes="16 MiB")
    (local / "mine-0123456789ab").mkdir()
    (local / "mine-0123456789ab" / "work").write_bytes(bytes(17 << 20))
    (local / "used").write_bytes(b"unknown")
    opened(large, local, max_bytes="16 MiB").stream(0, 10)
    assert (local / "mine-0123456789ab" / "work").stat().st_size == 17 << 20


def test_what_is_left_of_replaced_versions_goes_when_nothing_else_can(large, local):
    split = opened(large, local, max_bytes="16 MiB")
    for version in ("wiki-000000000000", "wiki-000000000001"):
        (local / version / ".pieces").mkdir(parents=True)
        (local / version / "meta.json").write_bytes(bytes(8 << 20))
        os.utime(local / version / "meta.json", (0, 0))
    (local / "used").write_bytes(b"unknown")
    for at in range(0, split.num_tokens - 10, PIECE_BYTES // 2):
        split.stream(at, at + 10)
    assert not (local / "wiki-000000000000" / "meta.json").exists()
    assert (only_mount().folder / "meta.json").exists(), "the newest ones stay"


def test_what_a_killed_process_left_is_overwritten(cache, local):
    opened(cache, local)
    folder = only_mount().folder / ".pieces"
    number = list(only_mount().records).index(SHARD)
    (folder / f"{number:x}-0.half").write_bytes(bytes(3 << 20))
    assert digest(stream(f"file://{cache.resolve()}", local=local)) == digest(stream(cache))
    assert not list(folder.glob("*.half"))


def test_a_copy_of_the_folder_elsewhere_works(cache, local, tmp_path):
    digest(stream(f"file://{cache.resolve()}", local=local))
    MOUNTED.clear()
    copied(local, tmp_path / "other")
    assert digest(stream(f"file://{cache.resolve()}", local=tmp_path / "other")) == digest(stream(cache))
    assert only_mount().fetched_bytes == 0


def test_a_process_that_was_stopped_with_the_lock_is_waited_for_once(local, monkeypatch):
    folder, waits = BoundedFolder(local, 16 << 20), []
    path = folder.make("cache-0123456789ab") / ".pieces" / "0-0"
    monkeypatch.setattr(folders, "PATIENCE_S", 0.05)
    monkeypatch.setattr(folders.time, "sleep", waits.append)

    def arrives():
        waits.clear()
        try:
            with folder.arriving(path, 9) as handle:
                os.write(handle, bytes(9))
        except BusyFolderError:
            assert not path.exists()
            return False
        return path.stat().st_size == 9

    assert arrives() and waits == []
    path.unlink()
    with open(local / "used", "rb") as used:
        fcntl.flock(used, fcntl.LOCK_EX)
        assert not arrives() and len(waits) > 1
        assert not arrives() and waits == [], "a thousand pieces would each wait"
    assert arrives() and waits == []
