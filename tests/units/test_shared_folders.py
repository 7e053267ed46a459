"""What machines must share: the same program, and a folder whose file system keeps its promises."""

import errno
import fcntl
import logging
import os
import re
import subprocess
import sys

import pytest
from support import ROOT

from niels_gpt.recipes import shared
from niels_gpt.recipes.shared import LIBRARIES, check_shared_folder, code_identity
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks import apply_lock_setting, mounts
from niels_gpt.storage.locks.mounts import mount_in, mount_of

LOCAL = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"


def line(kind, options="rw", place="/data"):
    return f"50 22 0:45 / {place} rw,relatime shared:9 - {kind} server:/x {options}"


def test_the_program_is_named_without_importing_a_library():
    program = (
        "import sys, json; from niels_gpt.recipes.shared import code_identity; "
        "print(json.dumps([code_identity(), [name for name in sys.argv[1:] if name in sys.modules]]))"
    )
    command = [sys.executable, "-c", program, "torch", "datasets", "pyarrow"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout
    here = code_identity()
    assert said == f"[{said[1:].rpartition(', [')[0]}, []]\n"
    assert here["libraries"].keys() == set(LIBRARIES) and "+" not in str(here)
    assert here.keys() == {"format", "builder", "libraries"}  # a changed line of code alone stops nobody


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("nfs", "rw,vers=3,local_lock=none", None),
        ("nfs", "rw,vers=3,nolock,local_lock=all", "nolock"),
        ("nfs4", "rw,vers=4.2,local_lock=none", None),
        ("nfs4", "rw,local_lock=flock", "local_lock=flock"),
        ("nfs4", "rw,local_lock=posix", None),
        ("lustre", "rw,flock,lazystatfs", None),
        ("lustre", "rw,localflock", "localflock"),
        ("lustre", "rw,lazystatfs", "without flock"),
        ("ceph", "rw", None),
        ("gpfs", "rw", None),
        ("cifs", "rw,vers=3.1.1", "cifs"),
        ("fuse.sshfs", "rw", "fuse.sshfs"),
        ("9p", "rw", "9p"),
        ("virtiofs", "rw", "virtiofs"),
        ("of_tomorrow", "rw", "of_tomorrow"),
        *((kind, "rw", None) for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay")),
    ],
)
def test_what_is_known_of_a_file_system(kind, options, told):
    found = mount_in([*LOCAL.splitlines(), line(kind, options)], "/data/cache")
    assert found.kind == kind and (told in found.hidden if told else not found.hidden)


def test_the_innermost_and_latest_mount_counts():
    lines = [LOCAL.strip(), line("nfs4"), line("xfs", place="/data/in\\040here"), line("cifs"), "", "damaged - x"]
    paths = ["/data", "/data/cache", "/data/in here/cache", "/database", "/"]
    assert [mount_in(lines, path).kind for path in paths] == ["cifs", "cifs", "xfs", "ext4", "ext4"]
    assert mount_in([], "/data").kind == ""


def test_the_table_of_the_page_is_what_is_known():
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8").partition("## What the machines must share")[2]
    rows = re.findall(r"^\| (`[^|]+) \|([^|]*)\| ([^|]*) \|$", page, re.MULTILINE)
    told = {kind for row in rows for kind in re.findall("`([^`]+)`", row[0])}
    assert told >= mounts._ALL_MACHINES and {"ext4", "xfs", "btrfs", "tmpfs", "overlay", "cifs"} <= told
    for kinds, hides, reaches in rows:
        for kind in re.findall("`([^`]+)`", kinds):
            options = re.findall("`([^`]+)`", hides)
            plain = mount_in([line(kind, mounts._NEEDED.get(kind, "rw"))], "/data")
            assert reaches.startswith({(True, ""): "one machine", (False, ""): "yes"}.get(plain[1:], "not known")), kind
            assert set(options) <= {*mounts._ONE_MACHINE.get(kind, ()), mounts._NEEDED.get(kind)}, kind
            assert set(mounts._ONE_MACHINE.get(kind, ())) <= set(options), kind


def test_a_good_folder_is_left_as_it_was(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        check_shared_folder(tmp_path / "cache")
        apply_lock_setting(tmp_path / "cache", "lease")
        check_shared_folder(tmp_path / "cache")
        for name in (".probe-0123abcd", ".probe-4567cdef", ".probe-89ab0123", ".probe-notes"):
            (tmp_path / "cache" / name).mkdir()
        (tmp_path / "cache/.probe-4567cdef/mine").touch()
        for name in (".probe-0123abcd", ".probe-4567cdef", ".probe-notes"):
            os.utime(tmp_path / "cache" / name, (0, 0))
        check_shared_folder(tmp_path / "cache")  # removes what a killed process has left, when it is old
    left = [".locks.json", ".probe-4567cdef", ".probe-89ab0123", ".probe-notes"]
    assert sorted(os.listdir(tmp_path / "cache")) == left
    assert not [each for each in caplog.records if each.levelno > logging.INFO] or mount_of(tmp_path).hidden


@pytest.mark.parametrize("missing", ["flock", "replace", "symlink", "link"])
def test_what_a_folder_lacks_is_named(tmp_path, monkeypatch, caplog, missing):
    def refused(*_):
        raise OSError(errno.ENOTSUP, "not offered")

    monkeypatch.setattr(fcntl if missing == "flock" else os, missing, refused)  # no such file system is at hand
    caplog.set_level(logging.INFO)
    if missing == "link":
        check_shared_folder(tmp_path)
        assert "no hard links" in caplog.text
    else:
        with pytest.raises(CacheError, match=r"--lock lease" if missing == "flock" else r"--cache-dir") as error:
            check_shared_folder(tmp_path)
        assert error.value.code == "E512"
    if missing == "flock":
        apply_lock_setting(tmp_path, "lease")
        check_shared_folder(tmp_path)
    assert not list(tmp_path.glob(".probe*"))


def test_locks_that_do_not_reach_other_machines_are_told_once(tmp_path, monkeypatch, caplog):
    hidden = mount_in([line("nfs", "rw,nolock", "/")], str(tmp_path))
    monkeypatch.setattr(shared, "mount_of", lambda _: hidden)
    for _ in range(2):
        check_shared_folder(tmp_path)
    (record,) = caplog.records
    assert getattr(record, "code", "") == "W504"
    assert "nfs is mounted with nolock" in record.getMessage() and "--lock lease" in record.getMessage()
    caplog.clear()
    apply_lock_setting(tmp_path, "lease")
    shared._warned.clear()
    check_shared_folder(tmp_path)
    assert not caplog.records
