"""gc removes what caches no longer need and nothing else, and may itself be killed at any moment."""

import contextlib
import copy
import errno
import fcntl
import json
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
from support.commands import niels_gpt
from support.data_files import write
from support.disk import VERSIONS_DIR, versions_dir
from support.errors import refused
from support.fault_builds import before_each_removal, interrupt, ready
from support.power_loss import MODELS, Disk, put, recorded_below, tree_of
from support.processes import open_in
from support.small_builds import documents, locked, pretrain, whole_version

from niels_gpt.cache import CacheError
from niels_gpt.engine.meta import Source
from niels_gpt.recipes.gc import collect
from niels_gpt.storage.locks import hold_version
from niels_gpt.storage.versions import removable

pytestmark = pytest.mark.usefixtures("small_batches")


def not_recorded(path, seed):
    """Leave a build that is committed, and was killed before it could say so."""

    def fail(meta):
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        pretrain(path, seed, committed=fail)


def plain_folder(path, content="{}"):
    """Make a folder that looks like a version at a first glance."""
    write(path / "meta.json", content)
    return path


def without_locks(folder):
    return {name: content for name, content in tree_of(folder).items() if not name.endswith("/lock")}


def removed(lines):
    """Return the names of what some lines say was removed, after a look that nothing else of ours is there."""
    found = [line for line in lines if not line.endswith("by its content, no cache put it there")]
    assert all(line.startswith("removed ") for line in found), found
    return [Path(re.split(r" \((?:version )?|\)", line.removeprefix("removed "))[1]).name for line in found]


def four_versions(path):
    """Build four versions, of which gc removes the first two, and return their names."""
    return [pretrain(path, seed)["content_sha256"][:12] for seed in range(4)]


def test_the_committed_version_and_the_newest_other_stay_and_unfinished_builds_go(folder):
    contents = four_versions(folder / "c")
    interrupt("pretrain", folder / "c", 60, documents(9), seed=9)
    (dead,) = versions_dir(folder / "c").glob("building-*.journal")
    (versions_dir(folder / "c") / "lock").unlink()
    before = tree_of(folder)
    done = niels_gpt("gc", str(folder), "--dry-run")
    assert done.status == 0
    assert tree_of(folder) == before
    said, _, after = done.out.partition("next: ")
    assert after == f"niels-gpt gc {folder}\n"
    done = niels_gpt("gc", str(folder))
    assert done.status == 0
    assert done.out == said.replace("would remove", "removed")
    assert removed(iter(said.replace("would remove", "removed").splitlines())) == [dead.name, dead.stem, *contents[:2]]
    assert {entry.name for entry in versions_dir(folder / "c").iterdir()} == {"lock", *contents[2:]}
    assert whole_version(folder / "c").startswith(contents[3])
    assert list(collect(folder, dry_run=False)) == []
    done = niels_gpt("gc", str(folder / "nowhere"))
    assert done.status == 1 and "no such folder" in done.err


def test_adopted_folders_are_versions_too(folder):
    pretrain(folder / "c")
    for number in (0, 1, 12):
        plain_folder(versions_dir(folder / "c") / f"adopted{number}")
        os.utime(versions_dir(folder / "c") / f"adopted{number}", ns=(number, number))
    assert removed(collect(folder, dry_run=False)) == ["adopted0", "adopted1"]


NO_NAMES = ("1", "2024-01", "ABCDEF012345", "abcdef01234", "abcdef0123456", "adopted", "adopted-1", "xadopted1", "old")
NO_BUILDS = ("building-plans", "building-0123456789ab-copy", "building-2.journal")
OF_OTHERS = {  # by file, "/" after its content: a link to that folder
    **{f"{VERSIONS_DIR}/c/{name}/meta.json": "{}" for name in NO_NAMES},
    **{f"{VERSIONS_DIR}/c/{name}/meta.json/mine": "no file" for name in ("1" * 12, "2" * 12, "adopted0", "adopted1")},
    **{
        f"{home}/precious": "precious"
        for name in NO_BUILDS
        for home in (f"{VERSIONS_DIR}/c/{name}", f"p/{VERSIONS_DIR}/q/{name}")
    },
    f"{VERSIONS_DIR}/c/link/precious": "precious",
    f"{VERSIONS_DIR}/c/{'3' * 12}": "a file",
    f"{VERSIONS_DIR}/c/{'4' * 12}/meta.json": '{"kind": "photo"}',
    **{f"{VERSIONS_DIR}/c/{number:012}": "elsewhere/" for number in range(5, 9)},
    "elsewhere/meta.json": "{}",
    **{f"project/{VERSIONS_DIR}/mine/v{name}/meta.json": "{}" for name in ("1", "2", "3", "building", "links")},
    **{f"project/versions/mine/{name * 12}/meta.json": "{}" for name in "012"},
}


def test_what_has_not_the_name_and_the_files_of_a_version_is_left(folder):
    contents = four_versions(folder / "c")
    ours = tree_of(folder).keys()
    for name, content in OF_OTHERS.items():
        if content.endswith("/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(folder / content)
        else:
            write(folder / name, content)
    strangers = {name: content for name, content in tree_of(folder).items() if name not in ours}
    assert removed(collect(folder, dry_run=False)) == contents[:2]
    after = tree_of(folder)
    assert {name: after.get(name, "gone") for name in strangers} == strangers


@pytest.mark.parametrize("link", [VERSIONS_DIR, f"{VERSIONS_DIR}/c"])
def test_a_link_in_the_place_of_the_versions_is_not_followed(folder, link):
    four_versions(folder / "other" / "c")
    interrupt("pretrain", folder / "other" / "c", 60)
    (versions_dir(folder / "other" / "c") / "lock").unlink()
    (folder / "cache" / link).parent.mkdir(parents=True)
    (folder / "cache" / link).symlink_to(folder / "other" / link)
    before = tree_of(folder / "other")
    assert len(removable(folder / "other" / "c")) == 4 and removable(folder / "cache" / "c") == []
    assert removed(collect(folder / "cache", dry_run=False)) == []
    assert tree_of(folder / "other") == before


def test_of_a_link_in_the_place_of_an_unfinished_build_only_the_link_goes(folder):
    pretrain(folder / "c")
    write(folder / "elsewhere" / "journal.jsonl", "mine")
    before = tree_of(folder / "elsewhere")
    for name in ("building-0123456789ab", "building-0123456789ab.journal"):
        (versions_dir(folder / "c") / name).symlink_to(folder / "elsewhere")
    list(collect(folder, dry_run=False))
    assert tree_of(folder / "elsewhere") == before


@pytest.mark.parametrize("kind", ["moved", "copied", "./", "../", "absolute", "trailing slash"])
def test_the_version_of_a_link_of_another_name_stays(folder, kind):
    content = pretrain(folder / "c", 0)["content_sha256"]
    target = os.readlink(folder / "c")
    if kind == "moved":
        (folder / "c").rename(folder / "d")
    else:
        targets = {"copied": target, "./": f"./{target}", "../": f"../{folder.name}/{target}"}
        targets |= {"absolute": str(folder / target), "trailing slash": f"{target}/"}
        (folder / "d").symlink_to(targets[kind])
    for seed in (1, 2, 3):
        pretrain(folder / "c", seed)
    gone = removed(collect(folder, dry_run=False))
    assert len(gone) == 1 and content[:12] not in gone
    assert whole_version(folder / "d") == content
    assert whole_version(folder / "c") != content


def with_unfinished_builds(path):
    """Leave old versions, a dead build, and one that was not recorded, which is the committed one."""
    for seed in (1, 2, 3):
        pretrain(path, seed)
    not_recorded(path, 4)
    interrupt("pretrain", path, 60)
    return [0, 4]


def with_an_unrecorded_old_version(path):
    """Leave a build that was not recorded, and whose version is an old one by now."""
    not_recorded(path, 4)
    for seed in (1, 2, 3):
        pretrain(path, seed)
    return [4]


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[pytest.mark.slow] * (model != "mixed")) for model in MODELS]
)
@pytest.mark.parametrize("leave", [with_unfinished_builds, with_an_unrecorded_old_version])
def test_after_a_gc_that_was_killed_anywhere_every_build_goes_on_or_begins_anew(folder, leave, model):
    seeds = leave(folder / "cache" / "c")
    before, content = tree_of(folder / "cache"), whole_version(folder / "cache" / "c")
    whole = {seed: pretrain(folder / "whole" / "c", seed)["content_sha256"] for seed in seeds}
    trace = recorded_below(folder / "cache", lambda: list(collect(folder / "cache", dry_run=False)))
    assert len(trace) > 10
    for cut in range(len(trace) + 1):
        disk = Disk(before)
        disk.apply(trace[:cut])
        left = folder / "left"
        put(disk.left(model, seed=cut), left)
        assert whole_version(left / "c") == content
        for seed in seeds:
            assert pretrain(left / "c", seed)["content_sha256"] == whole[seed] == whole_version(left / "c")
        shutil.rmtree(left)


@pytest.mark.parametrize("dry_run", [True, False])
def test_no_lock_is_held_while_the_lines_are_read(folder, dry_run):
    four_versions(folder / "c")
    lines = collect(folder, dry_run=dry_run)
    assert next(lines)
    content = pretrain(folder / "c", 7)["content_sha256"]
    assert len(list(lines)) == 1 and whole_version(folder / "c") == content


def three_caches(folder):
    for name in "abc":
        for seed in range(3):
            pretrain(folder / name, seed)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (None, "left alone .*/b: is being built by user .*pid {pid}"),
        (lambda lock: os.link(write(lock.parents[2] / "mine", "precious"), lock), "left alone .*/b/lock.*hard links"),
        (lambda lock: lock.symlink_to(lock.parents[2] / "nowhere"), "could not remove .*/b/lock"),
        (Path.mkdir, "could not remove .*/b/lock"),
    ],
)
def test_a_cache_that_cannot_be_locked_is_left_and_the_others_are_not(folder, spoil, found):
    three_caches(folder)
    versions = versions_dir(folder / "b")
    with locked(folder / "b") if spoil is None else contextlib.nullcontext():
        if spoil is not None:
            (versions / "lock").unlink()
            spoil(versions / "lock")
        before = tree_of(versions)
        lines = list(collect(folder, dry_run=False))
        if "hard links" in found:
            with pytest.raises(CacheError, match="hard links"):
                pretrain(folder / "b", 7)
        assert tree_of(versions) == before and not (folder / "nowhere").exists()
    assert [line.split()[0] for line in lines] == ["removed", found.split()[0], "removed"]
    assert re.match(found.format(pid=os.getpid()), lines[1])
    assert spoil is not None or len(list(collect(folder, dry_run=False))) == 1


def test_what_cannot_be_removed_stops_gc_for_its_own_cache_only_and_fails_it(folder, monkeypatch):
    three_caches(folder)
    for seed in (3, 4):
        pretrain(folder / "b", seed)
    expected = [[path for path, _ in removable(folder / name)] for name in "abc"]

    def rmdir(path, *, dir_fd=None):
        above = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        if Path(above, path).is_relative_to(expected[1][1]):
            raise PermissionError(1, "Operation not permitted", str(path))
        real(path, dir_fd=dir_fd)

    real = os.rmdir
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", rmdir)
        done = niels_gpt("gc", str(folder))
        assert done.status == 1
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == ["removed", "removed", "could", "removed"]
    assert "Operation not permitted" in lines[2] and str(expected[1][1]) in lines[2]
    assert [[path.exists() for path in paths] for paths in expected] == [[False], [False, True, True], [False]]


def test_nobody_builds_or_takes_hold_while_a_version_is_removed(folder, monkeypatch):
    old, *_ = three_versions(folder / "c")
    holds = []

    def meanwhile(path):
        with refused("E503", f"pid {os.getpid()}"):
            pretrain(folder / "c", 7)
        holds.append(bool(hold_version(path)))

    before_each_removal(monkeypatch, meanwhile)
    assert removed(collect(folder, dry_run=False)) == [old.name] and holds == [False]
    assert json.loads((folder / "c" / "meta.json").read_bytes())["seed"] == 2


READER = """
import os, signal, sys
from pathlib import Path
from niels_gpt.storage.locks import hold_version

hold = hold_version(Path(sys.argv[1]))
if sys.argv[2] == "forks":  # a child goes on; the one that opened the version is killed
    if os.fork() == 0:
        assert hold
        print("holds", flush=True)
    else:
        os.wait()
else:
    print("holds" if hold else "holds nothing", flush=True)
sys.stdin.read()
del hold
print("let go", flush=True)
"""


def reader(version, how="stays"):
    """Run a process that holds a version until its stdin ends."""
    return ready([sys.executable, "-c", READER, str(version), how], "holds")


def ended(process):
    """Let a reader, or the child that it has forked, come to its end."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    assert process.stdout.readline() == "let go\n"


def shown(version):
    """How a version is called in what is printed."""
    return f"{version.parents[2] / version.parent.name} (version {version.name})"


def three_versions(path):
    """Build three versions, of which gc removes the first; returns their folders."""
    return [versions_dir(path) / pretrain(path, seed)["content_sha256"][:12] for seed in range(3)]


def says_kept(lines, version):
    (line,) = lines
    return line.startswith(f"kept {shown(version)} (") and line.endswith("): open in a reader")


def test_a_version_that_another_process_has_open_stays_until_that_ends(folder):
    first, second, _ = three_versions(folder / "c")
    pretrain(folder / "c", 3)
    before = without_locks(folder)
    with reader(second) as process:
        lines = list(collect(folder, dry_run=True))
        assert [line.rpartition(" (")[0] for line in lines] == [
            f"would remove {shown(first)}",
            f"kept {shown(second)}",
        ]
        assert without_locks(folder) == before
        lines = list(collect(folder, dry_run=False))
        assert [line.rpartition(" (")[0] for line in lines] == [
            f"removed {shown(first)}",
            f"kept {shown(second)}",
        ]
        assert second.exists() and not first.exists()
        ended(process)
    assert removed(collect(folder, dry_run=False)) == [second.name]


@pytest.mark.parametrize("how", ["stays", "forks"])
def test_a_reader_that_was_killed_holds_nothing_and_a_child_that_it_has_forked_goes_on(folder, how):
    old, *_ = three_versions(folder / "c")
    with reader(old, how) as process:
        process.kill()
        process.wait()
        if how == "forks":
            assert says_kept(collect(folder, dry_run=False), old)
            ended(process)
        assert removed(collect(folder, dry_run=False)) == [old.name]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda hold: pickle.loads(pickle.dumps(hold))])
def test_a_copy_of_a_hold_holds_anew(folder, again):
    old, *_ = three_versions(folder / "c")
    assert len(list(collect(folder, dry_run=True))) == 1
    hold = hold_version(old)  # also after gc has asked
    second = again(hold)
    del hold
    assert second and says_kept(collect(folder, dry_run=False), old)
    del second
    assert removed(collect(folder, dry_run=False)) == [old.name]


def test_a_version_that_is_described_anew_is_held_on(folder):
    first = pretrain(folder / "c")
    version = (folder / "c").resolve()
    hold, inode = hold_version(version), (version / "meta.json").stat().st_ino
    second = pretrain(folder / "c", source=Source(name="another"))
    assert (folder / "c").resolve() == version and first != second
    assert (version / "meta.json").stat().st_ino != inode
    for seed in (1, 2):
        pretrain(folder / "c", seed)
    assert hold and says_kept(collect(folder, dry_run=False), version)


def test_a_folder_that_a_build_adopts_is_held_on(folder):
    content = pretrain(folder / "elsewhere")["content_sha256"]
    shutil.copytree((folder / "elsewhere").resolve(), folder / "c")
    hold = hold_version(folder / "c")
    for seed in (1, 2):
        pretrain(folder / "c", seed)
    assert hold and says_kept(collect(folder, dry_run=False), versions_dir(folder / "c") / content[:12])


def test_a_hold_writes_nothing_and_leaves_no_descriptor(folder):
    version, *_ = three_versions(folder / "c")
    before, stat = tree_of(folder), version.stat()
    hold = hold_version(version)
    assert hold and open_in(folder) == [version]
    del hold
    assert tree_of(folder) == before and version.stat() == stat and open_in(folder) == []


@pytest.mark.parametrize("what", ["nothing", "a file", "a link", "no meta.json", "a NUL"])
def test_what_is_no_version_is_not_held_and_is_no_error(folder, what):
    version, *_ = three_versions(folder / "c")
    (folder / "empty").mkdir()
    paths = {"nothing": "nowhere", "a file": "c/meta.json", "a link": "c", "no meta.json": "empty", "a NUL": "\0"}
    hold = hold_version(folder / paths[what])
    assert not hold and open_in(folder) == []
    assert not pickle.loads(pickle.dumps(hold)) and hold_version(version)


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EACCES])
def test_without_locks_on_folders_a_version_is_read_and_kept(folder, monkeypatch, error):
    def flock(handle, operation):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(error, os.strerror(error))
        real(handle, operation)

    old, *_ = three_versions(folder / "c")
    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    assert not hold_version(old)
    (line,) = collect(folder, dry_run=False)
    assert line.startswith(f"kept {shown(old)} (") and "nobody can know whether a reader has it open" in line
    assert line.endswith(f"When no reader runs: rm -r {old}") and old.is_dir()


NAMES = ("building", "damaged", "building-0123456789ab", "building-0123456789ab.journal", "0123456789ab", "adopted1")
FOREIGN_METAS = ('{"version": 3}', '{"kind": "photo"}', '{"kind": "pretrain", "content_sha256": 7}', "[]", "no JSON")


def test_what_another_program_has_put_there_is_left_and_reported(folder):
    for number, content in enumerate(FOREIGN_METAS):
        for name in (*NAMES, "1" * 12, "2" * 12, "3" * 12):
            write(plain_folder(folder / VERSIONS_DIR / f"app{number}" / name, content) / "journal.jsonl", content)
        write(folder / VERSIONS_DIR / f"app{number}" / "recipe.json", content)
        write(folder / VERSIONS_DIR / f"app{number}" / "lock", "precious")
    before = tree_of(folder)
    for flags in (["--dry-run"], []):
        done = niels_gpt("gc", str(folder), *flags)
        assert done.status == 0
        assert done.out.count("left alone") == len(FOREIGN_METAS) * (len(NAMES) + 3)
        assert tree_of(folder) == before


def test_a_folder_that_is_too_deep_for_a_path_is_removed_and_costs_nobody_else(folder):
    versions = three_versions(folder / "c")
    three_versions(folder / "d")
    handle = os.open(versions[0], os.O_RDONLY)
    for _ in range(2_100):  # of 2 bytes each: beyond PATH_MAX
        os.mkdir("d", dir_fd=handle)
        below = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below
    os.close(handle)
    os.utime(versions[0], ns=(0, 0))  # the oldest again
    assert len(list(collect(folder, dry_run=True))) == 2
    assert len(removed(collect(folder, dry_run=False))) == 2 and not versions[0].exists()
