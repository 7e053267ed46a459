"""A child that was forked in the middle of a build, and comes out of it in any way, leaves its parent's build alone."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.disk import versions_dir
from support.errors import refused
from support.power_loss import tree_of
from support.small_builds import BUILDERS, ITEMS, locked, quick_folder, whole_version

from niels_gpt.cache import CacheError
from niels_gpt.storage import versions
from niels_gpt.storage.locks import file_lock

KINDS = pytest.mark.parametrize("kind", sorted(BUILDERS))
PRECIOUS = b"precious" * 10
_taken = []  # descriptors of a child
_SECONDS = 20  # after which a child that hangs is killed, and its parent's test fails


pytestmark = pytest.mark.usefixtures("small_batches")


@pytest.fixture
def folder():
    with quick_folder() as path:
        (path / "precious").write_bytes(PRECIOUS)
        yield path


def raises():
    raise RuntimeError("the child has an error")


def exits():
    sys.exit(3)


def returns(): ...


WAYS = pytest.mark.parametrize("way", [raises, exits, returns], ids=lambda way: way.__name__)
Way = Callable[[], None]


def alone(work):
    """Do some work in which children are forked; a child that comes out of it ends here.

    Its status is 0 if the files that it has opened in `forked` are still open.
    """
    parent = os.getpid()
    try:
        return work()
    finally:
        if os.getpid() != parent:
            still = {os.path.realpath(f"/proc/self/fd/{handle}") for handle in _taken}
            os._exit(0 if len(still) == 1 and still.pop().endswith("/precious") else 8)


def handle_of(lock):
    """Return the descriptor that this process has of a lock file."""
    found = [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
    (handle,) = (int(name) for name in found if os.readlink(f"/proc/self/fd/{name}") == str(lock))
    return handle


def forked(lock, precious):
    """Fork; the child, to which this is True, gets a file under the lock's descriptor number. The parent waits for it.

    The test fails where the child cannot get that number, or hangs.
    """
    number = handle_of(lock)
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return False
    signal.alarm(_SECONDS)
    _taken[:] = [os.open(precious, os.O_RDWR) for _ in range(number + 1)]
    if number not in _taken:
        os._exit(9)
    return True


def is_held(path):
    """Tell whether the cache at `path` is locked by this process, and whether its lock says so."""
    try:
        with locked(path):
            return False
    except CacheError as error:
        assert f"pid {os.getpid()}" in str(error)
        return True


def forking(items, at, path, precious, way, *, reads_on=False):
    """Yield items for the build of the cache at `path`; at one of them a child is forked that leaves by some way.

    reads_on: where that way leads back here, the child has all the items that its parent has.
    """
    folder = versions_dir(path)
    for number, item in enumerate(items):
        if number == at:
            before = tree_of(folder)
            if forked(folder / "lock", precious):
                way()
                if not reads_on:
                    return
                yield item
                continue
            assert tree_of(folder) == before
            assert is_held(path)
        yield item


@KINDS
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("at", [1, 35], ids=["before a checkpoint", "after some"])
@pytest.mark.parametrize(
    ("way", "reads_on"),
    [(raises, False), (exits, False), (returns, False), (returns, True)],
    ids=["raises", "exits", "ends as if all were read", "reads on as its parent"],
)
def test_a_child_that_comes_out_of_the_source_changes_nothing(
    folder: Path, kind: str, num_threads: int, at: int, way: Way, reads_on: bool
) -> None:
    BUILDERS[kind](folder / "whole" / "c")
    items = forking(ITEMS[kind](0), at, folder / "cache" / "c", folder / "precious", way, reads_on=reads_on)
    alone(lambda: BUILDERS[kind](folder / "cache" / "c", items=items, num_threads=num_threads))
    assert (folder / "precious").read_bytes() == PRECIOUS
    assert tree_of(folder / "cache") == tree_of(folder / "whole")
    assert whole_version(folder / "cache" / "c") == whole_version(folder / "whole" / "c")


@KINDS
def test_a_child_of_a_replay_does_not_commit_for_its_parent(folder: Path, kind: str) -> None:
    BUILDERS[kind](folder / "whole" / "c")
    path = folder / "cache" / "c"

    def blocking():
        yield from ITEMS[kind](0)[:1]
        path.write_text("in the way")
        yield from ITEMS[kind](0)[1:]

    with pytest.raises(CacheError, match="is a file"):
        BUILDERS[kind](path, items=blocking())
    path.unlink()
    items = forking(ITEMS[kind](0), 1, path, folder / "precious", returns, reads_on=True)
    alone(lambda: BUILDERS[kind](path, items=items))
    assert (folder / "precious").read_bytes() == PRECIOUS
    assert tree_of(folder / "cache") == tree_of(folder / "whole")


@WAYS
def test_a_child_that_comes_out_of_a_lock_leaves_it_to_its_parent(folder: Path, way: Way) -> None:
    def work():
        with file_lock(folder / "lock", "it", "is being built", wait=False):
            if forked(folder / "lock", folder / "precious"):
                way()
                return
            assert f"pid {os.getpid()}" in (folder / "lock").read_text()
            second = file_lock(folder / "lock", "it", "is being built", wait=False)
            with refused("E503", f"pid {os.getpid()}"), second:
                raise AssertionError("two have the lock")

    alone(work)
    assert (folder / "precious").read_bytes() == PRECIOUS
    with file_lock(folder / "lock", "it", "is being built", wait=False):
        pass
    assert (folder / "lock").read_bytes() == b""


@WAYS
@pytest.mark.parametrize("how", ["with a journal", "before its journal", "in one go"])
def test_a_child_that_comes_out_of_a_build_leaves_its_folders(folder: Path, way: Way, how: str) -> None:
    def work():
        with contextlib.ExitStack() as stack:
            if how == "in one go":
                build = stack.enter_context(versions.building(folder / "c"))
            else:
                build, journal = stack.enter_context(versions.resumable(folder / "c", "0" * 64))
                build.mkdir()
                if how == "with a journal":
                    (journal / "journal.jsonl").write_bytes(b"line")
            (build / "half").write_bytes(b"half")
            before = tree_of(folder)
            if forked(build.parent / "lock", folder / "precious"):
                way()
                return
            assert tree_of(folder) == before and is_held(folder / "c")

    alone(work)
    assert [entry.name for entry in versions_dir(folder / "c").iterdir()] == ["lock"]


def test_a_child_cannot_build_what_its_parent_builds_and_may_build_another_cache(folder):
    build = BUILDERS["pretrain"]
    expected = build(folder / "whole" / "c")

    def work():
        with refused("E503", f"pid {os.getppid()}"):
            build(folder / "cache" / "c")
        (folder / "refused").touch()
        build(folder / "of the child")
        raises()

    items = forking(ITEMS["pretrain"](0), 35, folder / "cache" / "c", folder / "precious", work)
    assert alone(lambda: build(folder / "cache" / "c", items=items)) == expected
    assert whole_version(folder / "of the child") == expected["content_sha256"] and (folder / "refused").exists()
    assert (folder / "precious").read_bytes() == PRECIOUS
