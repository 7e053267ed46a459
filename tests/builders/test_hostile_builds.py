"""Journals, folders and links that anybody may have written: refused, or the build ends whole, and touches no more."""

import copy
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.disk import versions_dir
from support.errors import refused
from support.fault_builds import KINDS, files_of, line, unfinished_tree, values_of
from support.json_values import JSON, SOME_SHA256
from support.power_loss import put, tree_of
from support.small_builds import BUILDERS, ITEMS, Counted, pretrain, quick_folder, sft, whole_version

from niels_gpt.cache import CacheError
from niels_gpt.cache.meta import write_meta
from niels_gpt.storage import versions

pytestmark = pytest.mark.usefixtures("small_batches")
QUICK = settings(suppress_health_check=list(HealthCheck), max_examples=60, derandomize=True)


outside_events = None
"""While this is a list: the paths that were opened, renamed or removed, of all that Python tells of such things."""
FOLLOWING = ("os.truncate", "os.chmod", "os.chown", "os.utime", "os.chdir")


def _hook(event, arguments):
    if outside_events is not None and (event == "open" or event.startswith(("os.", "shutil."))):
        follows = event in FOLLOWING or (event == "open" and not int(arguments[2]) & os.O_NOFOLLOW)
        names = [os.fsdecode(name) for name in arguments if isinstance(name, str | bytes | os.PathLike)]
        paths = [os.path.realpath(name if follows else os.path.dirname(name)) for name in names]
        outside_events.extend(f"{event} {path}" for path in paths if "outside" in path)


@functools.cache
def watch():
    """Put the hook in place, which stays as long as the process."""
    sys.addaudithook(_hook)


@contextmanager
def watched(outside):
    """Fail if anything in a folder is opened or changed."""
    global outside_events
    watch()
    (outside / "deep").mkdir(parents=True)
    (outside / "precious").write_bytes(b"\0" * 4096)
    (outside / "deep" / "journal.jsonl").write_bytes(b"mine")
    for name in ("train_ids.txt", "val_ids.txt", *(f"shard_{number:05}.bin" for number in range(9))):
        (outside / name).write_bytes(b"precious")  # with the names that a build would move
    before = tree_of(outside)
    outside_events = []
    try:
        yield
        found = outside_events
    finally:
        outside_events = None
    looked = ("os.listdir", "os.scandir")  # no more than names
    assert [event for event in found if not event.startswith(looked)] == [] and tree_of(outside) == before


@pytest.mark.parametrize(
    "deed",
    [
        lambda outside: (outside / "precious").read_bytes(),
        lambda outside: (outside / "new").write_bytes(b""),
        lambda outside: (outside / "precious").unlink(),
        lambda outside: (outside / "precious").rename(outside / "other"),
        lambda outside: os.close(os.open(outside.parent / "link", os.O_RDONLY)),
    ],
    ids=["read", "write", "remove", "rename", "read through a link"],
)
def test_the_watch_sees_what_is_done_to_a_folder(folder, deed):
    (folder / "link").symlink_to("outside/precious")
    with pytest.raises(AssertionError, match="outside"), watched(folder / "outside"):
        deed(folder / "outside")


def resumes(kind, tree, *, same_content):
    """Build on what was left, with a folder beside it that nothing may touch; returns whether the build ended.

    same_content: the content sha256 that it must then have; None: any whole version.
    """
    with quick_folder() as path, watched(path / "outside"):
        put(tree, path / "cache")
        try:
            BUILDERS[kind](path / "cache" / "c")
        except CacheError as error:
            assert str(path) in str(error)
            return False
        assert whole_version(path / "cache" / "c") == (same_content or whole_version(path / "cache" / "c"))
        return True


def with_journal(kind, raw, sealed=False):
    tree, name, content = unfinished_tree(kind, sealed)
    return {**tree, name: raw}, content


def places_in(value, path=()):
    """Return the path of keys to everything in some JSON, the whole included."""
    found = [path]
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        found += places_in(inner, (*path, key))
    return found


def replaced(value, path, new):
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


@st.composite
def hostile_lines(draw, kind, sealed):
    """Draw a journal whose lines all have a good CRC-32, and of which one value, or a key, is anything."""
    tree, name, _ = unfinished_tree(kind, sealed)
    values = values_of(tree[name])
    number = draw(st.sampled_from([0, 1, len(values) // 2, len(values) - 1, len(values) - 1]))
    path = draw(st.sampled_from(places_in(values[number])))
    values[number] = replaced(values[number], path, draw(JSON))
    return b"".join(map(line, values))


@KINDS
@pytest.mark.parametrize("sealed", [False, True], ids=["unfinished", "sealed"])
@QUICK
@given(data=st.data())
def test_a_hostile_journal_is_refused_or_the_build_ends_whole(kind: str, sealed: bool, data: st.DataObject) -> None:
    tree, _ = with_journal(kind, data.draw(hostile_lines(kind, sealed)), sealed)
    resumes(kind, tree, same_content=None)


@KINDS
@QUICK
@given(data=st.data())
def test_a_journal_with_damaged_bytes_is_refused_or_ends_with_the_right_ones(kind: str, data: st.DataObject) -> None:
    raw = bytearray(unfinished_tree(kind)[0][unfinished_tree(kind)[1]])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        part = data.draw(st.binary(max_size=6))
        raw[at : at + data.draw(st.integers(0, 9))] = part
    tree, content = with_journal(kind, bytes(raw))
    resumes(kind, tree, same_content=content)


NO_NAMES = ["../x", "/etc/passwd", "train/../../x", "", ".", "a//b", "a\\b", "meta.json", "x" * 300, "\ud800", 3, None]


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_the_name_of_a_finished_file_stays_inside_the_build(name):
    raw = unfinished_tree("pretrain")[0][unfinished_tree("pretrain")[1]]
    values = values_of(raw)
    number = next(number for number, value in enumerate(values) if value.get("finished"))
    values[number]["finished"][0]["name"] = name
    tree, _ = with_journal("pretrain", b"".join(map(line, values)))
    assert not resumes("pretrain", tree, same_content=None)


def one_more(value):
    return value + 1 if isinstance(value, int) else {key: count + 1 for key, count in value.items()}


CHANGED_NUMBERS = {
    "fewer documents": lambda last: last.update(documents=last["documents"] - 1),
    "more documents": lambda last: last.update(documents=last["documents"] + 1),
    "no end of documents": lambda last: last.update(documents=2**62),
    "a file of another size": lambda last: last["files"]["texts.bin"].__setitem__(0, 8),
    "a file more": lambda last: last["files"].update({"x.bin": [0, SOME_SHA256]}),
    "a file less": lambda last: last["files"].pop("texts.bin"),
    "another generator": lambda last: last.update(generator=SOME_SHA256),
    "ended": lambda last: last.update(ended=True),
    "sealed": lambda last: last.update(ended=True, sealed=SOME_SHA256),
    "other tokens": lambda last: last["state"].update(
        {key: one_more(value) for key, value in last["state"].items() if key in ("tokens", "train")}
    ),
    "no numbers": lambda last: last.update(state={}),
    "a number for numbers": lambda last: last["state"].update(counts=5),
    "numbers for a number": lambda last: last["state"].update(
        {key: {"a": 5} for key in last["state"] if key in ("tokens", "train")}
    ),
}


@pytest.mark.parametrize("what", sorted(CHANGED_NUMBERS))
@KINDS
def test_numbers_that_cannot_be_are_refused(kind: str, what: str) -> None:
    tree, journal, content = unfinished_tree(kind)
    assert resumes(kind, tree, same_content=content)
    values = values_of(tree[journal])
    CHANGED_NUMBERS[what](values[-1])
    tree, _ = with_journal(kind, b"".join(map(line, values)))
    assert not resumes(kind, tree, same_content=None)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a": ' * 50_000, b"9" * 5_000, b"x" * (1 << 24)], ids=len)
def test_a_line_that_no_parser_takes_ends_the_journal(text):
    raw = unfinished_tree("sft")[0][unfinished_tree("sft")[1]]
    assert isinstance(raw, bytes)
    tree, content = with_journal("sft", raw + b"%08x %s\n" % (zlib.crc32(text), text))
    assert resumes("sft", tree, same_content=content)


@KINDS
def test_nothing_is_opened_or_changed_behind_a_link(kind: str) -> None:
    tree, name, content = unfinished_tree(kind)
    journal = name.rsplit("/", 1)[0]
    work = journal.removesuffix(".journal")
    extra = [journal, work, *(f"{work}/{part}" for part in ("index", "train", "val"))]
    places = sorted({*extra, *(found for found in tree if "/building-" in found)})
    for place in places:
        with quick_folder() as path:
            put(tree, path / "cache")
            if place in extra:
                (path / "cache" / place).mkdir(exist_ok=True)
            link = path / "cache" / place
            to, remove = ("outside", shutil.rmtree) if link.is_dir() else ("outside/precious", Path.unlink)
            remove(link)
            link.symlink_to(path / to)
            with watched(path / "outside"):
                try:
                    BUILDERS[kind](path / "cache" / "c")
                except CacheError as error:
                    assert str(path / "cache") in str(error) and "a symbolic link" in str(error)
                else:
                    assert whole_version(path / "cache" / "c") == content
                    assert not [found for found in (path / "cache" / "c").resolve().rglob("*") if found.is_symlink()]


@KINDS
def test_a_pipe_in_the_place_of_a_file_is_an_error_and_no_wait(kind: str) -> None:
    def too_long(number, frame):
        raise AssertionError("waited for a pipe")

    tree, _, content = unfinished_tree(kind)
    before = signal.signal(signal.SIGALRM, too_long)
    try:
        for place in [found for found in tree if "/building-" in found and tree[found] is not None]:
            with quick_folder() as path:
                put(tree, path / "cache")
                (path / "cache" / place).unlink()
                os.mkfifo(path / "cache" / place)
                signal.alarm(20)
                try:
                    BUILDERS[kind](path / "cache" / "c")
                except (CacheError, OSError) as error:
                    assert str(path / "cache" / place) in str(error) and not isinstance(error, FileNotFoundError)
                else:
                    assert whole_version(path / "cache" / "c") == content
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("content", ["../../../x", "../" * 20 + "x", "0" * 64, "", 3, None, ["x"], "/dev/shm"], ids=str)
def test_a_version_that_says_another_content_than_the_journal_is_refused(folder, content):
    put(unfinished_tree("pretrain", sealed=True)[0], folder / "cache")
    (folder / "x").mkdir()
    (folder / "x" / ".precious.tmp").write_text("precious")
    path = (folder / "cache" / "c").resolve(strict=True) / "meta.json"
    write_meta(str(path), {**json.loads(path.read_bytes()), "content_sha256": content})
    before = files_of(folder)
    with refused("E505", "meta.json", "content_sha256"):
        pretrain(folder / "cache" / "c")
    assert files_of(folder) == before


@pytest.mark.parametrize("content", ["../../x", "0" * 63, "0" * 65, "G" * 64, "0" * 64 + "\n", ""], ids=repr)
def test_a_commit_takes_no_content_that_is_no_sha256(folder, content):
    work = versions_dir(folder / "c") / "building"
    work.mkdir(parents=True)
    (work / "meta.json").write_text("{}")
    before = tree_of(folder)
    with refused("E202", "64 hex"):
        versions.commit(work, folder / "c", content)
    assert tree_of(folder) == before


class Picture:
    """Of which nobody has defined how it is shown: by its address."""


class Rows(list[Any]):
    """A list that shows its address."""

    __repr__ = object.__repr__


ODD = {
    "a content": lambda: [{"role": "user", "content": [Picture()]}, {"role": "assistant", "content": "x"}],
    "a role": lambda: [{"role": Picture(), "content": "x"}],
    "a message": lambda: [Picture()],
    "a chat": Picture,
    "a set": lambda: [{"role": "user", "content": {str(number) for number in range(50)}}],
    "a list of its own": lambda: Rows([{"role": "nobody", "content": "x"}]),
    "no reply": lambda: Rows([{"role": "user", "content": "x"}]),
}


def odd_chats(what):
    """Return chats of which one is dropped, and looks different in each process."""
    found = ITEMS["sft"](0)
    found[3] = ("odd", ODD[what]())
    return found


STOP_HERE = """
import pytest, sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from support.fault_builds import interrupt
from support.small_builds import batches_of
import test_hostile_builds as here
batches_of(pytest.MonkeyPatch())
for what in here.ODD:
    interrupt("sft", Path(sys.argv[2]) / what / "c", 35, here.odd_chats(what))
"""


def test_a_chat_that_is_dropped_and_shows_its_address_goes_on_in_another_process(folder):
    command = [sys.executable, "-c", STOP_HERE, str(Path(__file__).parent), str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "1"})
    held = [odd_chats(what) for what in ODD]  # at other addresses than those of the builds below
    for what in ODD:
        tokenizer = Counted()
        meta = sft(folder / what / "c", items=odd_chats(what), tokenizer=tokenizer)
        assert meta == sft(folder / what / "whole", items=odd_chats(what))
        assert 0 < len(tokenizer.texts) < 2 * len(held[0]) - 20, what
