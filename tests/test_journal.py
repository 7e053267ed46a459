"""The journal of a build on paper, and journals that nobody should trust.

Run: pytest tests/test_journal.py
"""

import copy
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from power_loss import Tree, put, tree_of
from small_builds import BATCH_ITEMS, BUILDERS, ITEMS, quick_folder, whole_version

from niels_gpt.build import stream
from niels_gpt.build.journal import Checkpoint, Journal, identity_of
from niels_gpt.cache import CacheError

KINDS = pytest.mark.parametrize("kind", sorted(BUILDERS))
QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=120, derandomize=True)
SOME_SHA256 = hashlib.sha256(b"").hexdigest()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BATCH_ITEMS", BATCH_ITEMS)


def line(value: Any) -> bytes:
    """Return a line of a journal as docs/formats.md has it."""
    text = json.dumps(value, sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


@functools.cache
def unfinished(kind: str, sealed: bool = False) -> tuple[Tree, str, str]:
    """Return what an unfinished build left, the name of its journal, and the content sha256 that it would end with.

    sealed: it has done everything but its last callback, and the version is committed.
    """

    def cut_off(items: list[Any]) -> Iterator[Any]:
        yield from items[:34]
        raise ConnectionError

    def fail(meta: Any) -> None:
        raise ConnectionError

    with quick_folder() as path:
        with pytest.raises(ConnectionError):
            if sealed:
                BUILDERS[kind](path / "c", committed=fail)
            else:
                BUILDERS[kind](path / "c", items=cut_off(ITEMS[kind](0)))
        tree = {name: content for name, content in tree_of(path).items() if not name.endswith("/lock")}
        content = BUILDERS[kind](path / "other" / "c")["content_sha256"]
    return tree, next(name for name in tree if name.endswith("journal.jsonl")), content


def values_of(raw: Any) -> list[Any]:
    """Return the objects of a journal, the header included."""
    return [json.loads(text[9:]) for text in raw.splitlines()]


# --- on paper ---------------------------------------------------------------------------------------------------------


def test_a_journal_is_a_header_and_a_line_for_each_checkpoint(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"seed": 3})
    assert journal.last is None and list(tmp_path.iterdir()) == []
    first = Checkpoint(documents=2, files={"a.bin": (4, SOME_SHA256)}, state={"kept": 1})
    journal.append(first)
    second = Checkpoint(
        3, SOME_SHA256, {}, [{"name": "train/x", "bytes": 1, "sha256": SOME_SHA256}], {}, True, SOME_SHA256
    )
    journal.append(second)
    journal.close()
    values: list[Any] = [
        {"identity": {"seed": 3}, "journal_version": 1},
        {
            "documents": 2,
            "ended": False,
            "files": {"a.bin": [4, SOME_SHA256]},
            "finished": [],
            "generator": None,
            "sealed": None,
            "seek": None,
            "state": {"kept": 1},
        },
        {
            "documents": 3,
            "ended": True,
            "files": {},
            "finished": [{"bytes": 1, "name": "train/x", "sha256": SOME_SHA256}],
            "generator": SOME_SHA256,
            "sealed": SOME_SHA256,
            "seek": None,
            "state": {},
        },
    ]
    assert (tmp_path / "journal.jsonl").read_bytes() == b"".join(map(line, values))
    again = Journal(tmp_path, {"seed": 3})
    assert again.last == second and again.finished == second.finished
    again.close()
    assert identity_of(tmp_path) == {"seed": 3}


@KINDS
def test_a_checkpoint_says_what_lies_on_disk(kind: str) -> None:
    tree, name, _ = unfinished(kind)
    raw = tree[name]
    assert isinstance(raw, bytes) and raw == b"".join(map(line, values_of(raw)))
    header, *checkpoints = values_of(raw)
    assert header["journal_version"] == 1 and header["identity"]["kind"] == kind
    journal, work = name.rsplit("/", 1)[0], name.rsplit("/", 1)[0].removesuffix(".journal")
    assert re.fullmatch(r"\.versions/c/building-[0-9a-f]{12}", work)
    identity = json.dumps(header["identity"], indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert work.endswith(hashlib.sha256(identity.encode()).hexdigest()[:12])
    for file, (size, sha256) in checkpoints[-1]["files"].items():
        content = tree[f"{journal}/{file}"]
        assert isinstance(content, bytes) and hashlib.sha256(content[:size]).hexdigest() == sha256
    for record in (record for checkpoint in checkpoints for record in checkpoint["finished"]):
        content = tree[f"{work}/{record['name']}"]
        assert isinstance(content, bytes) and len(content) == record["bytes"]
        assert hashlib.sha256(content).hexdigest() == record["sha256"]
    assert [found["documents"] for found in checkpoints] == sorted(found["documents"] for found in checkpoints)
    assert checkpoints[-1]["files"]["texts.bin"][0] == 8 * checkpoints[-1]["documents"] > 0


def test_the_generators_state_is_that_of_torch_after_the_draws_so_far() -> None:
    tree, name, _ = unfinished("pretrain")
    checkpoints = values_of(tree[name])[1:]
    generator = torch.Generator().manual_seed(0)
    torch.randint(8, (1024,), generator=generator)
    assert checkpoints[-1]["generator"] == hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()
    assert values_of(unfinished("sft")[0][unfinished("sft")[1]])[-1]["generator"] is None


def test_a_journal_cut_at_any_byte_is_the_checkpoints_before(tmp_path: Path) -> None:
    lines = [line({"identity": {}, "journal_version": 1})]
    lines += [line(json.loads(json.dumps(vars(Checkpoint(documents=number))))) for number in (1, 2)]
    raw, path = b"".join(lines), tmp_path / "journal.jsonl"
    for size in range(len(raw) + 1):
        path.write_bytes(raw[:size])
        if size < len(lines[0]):
            with pytest.raises(CacheError, match=r"journal\.jsonl: its first line is damaged\. To start "):
                Journal(tmp_path, {})
            continue
        journal = Journal(tmp_path, {})
        journal.close()
        whole = (size >= len(lines[0] + lines[1])) + (size == len(raw))
        assert (journal.last.documents if journal.last else 0) == whole
        assert path.read_bytes() == b"".join(lines[: whole + 1])  # what is no line is cut off


def test_damage_before_good_lines_is_refused_and_the_message_says_how_to_go_on_from_before_it(tmp_path: Path) -> None:
    lines = [line({"identity": {}, "journal_version": 1})]
    lines += [line(vars(Checkpoint(documents=number))) for number in (1, 2, 3)]
    lines[2] = lines[2].replace(b'"documents": 2', b'"documents": 9')
    (tmp_path / "journal.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(CacheError, match=r"damaged at byte .*, and good lines follow") as refused:
        Journal(tmp_path, {})
    assert (tmp_path / "journal.jsonl").read_bytes() == b"".join(lines)
    subprocess.run(str(refused.value).rpartition("damage: ")[2], shell=True, check=True)
    journal = Journal(tmp_path, {})
    journal.close()
    assert journal.last is not None and journal.last.documents == 1


@pytest.mark.parametrize("header", [{"identity": {"seed": 4}, "journal_version": 1}, {}, [], 3, None, "x"], ids=str)
def test_the_journal_of_another_build_is_refused(tmp_path: Path, header: Any) -> None:
    (tmp_path / "journal.jsonl").write_bytes(line(header))
    with pytest.raises(CacheError, match=r"of another build|first line is damaged"):
        Journal(tmp_path, {"seed": 3})
    assert identity_of(tmp_path) in ({}, {"seed": 4})


# --- hostile journals -------------------------------------------------------------------------------------------------

outside_events: list[str] | None = None
"""While this is a list: the paths that were opened, renamed or removed, of all that Python tells of such things."""
FOLLOWING = ("os.truncate", "os.chmod", "os.chown", "os.utime", "os.chdir")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if outside_events is not None and (event == "open" or event.startswith(("os.", "shutil."))):
        follows = event in FOLLOWING or (event == "open" and not int(arguments[2]) & os.O_NOFOLLOW)
        names = [os.fsdecode(name) for name in arguments if isinstance(name, str | bytes | os.PathLike)]
        paths = [os.path.realpath(name if follows else os.path.dirname(name)) for name in names]
        outside_events.extend(f"{event} {path}" for path in paths if "outside" in path)


@functools.cache
def watch() -> None:
    """Put the hook in place, which stays as long as the process."""
    sys.addaudithook(_hook)


@contextmanager
def watched(outside: Path) -> Iterator[None]:
    """Fail if anything in a folder is opened or changed."""
    global outside_events
    watch()
    (outside / "deep").mkdir(parents=True)
    (outside / "precious").write_bytes(b"\0" * 4096)
    (outside / "deep" / "journal.jsonl").write_bytes(b"mine")
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
def test_the_watch_sees_what_is_done_to_a_folder(folder: Path, deed: Callable[[Path], Any]) -> None:
    (folder / "link").symlink_to("outside/precious")
    with pytest.raises(AssertionError, match="outside"), watched(folder / "outside"):
        deed(folder / "outside")


def resume(kind: str, tree: Tree, *, same_content: str | None) -> bool:
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


def with_journal(kind: str, raw: bytes, sealed: bool = False) -> tuple[Tree, str]:
    tree, name, content = unfinished(kind, sealed)
    return {**tree, name: raw}, content


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**62, 2**63, 10**40, -1, 8, 40, SOME_SHA256, "train.bin", "texts.bin", "meta.json"])
    | st.sampled_from(["../../outside/precious", "/etc/passwd", "train/../../../x", "a\0b", ".", "\ud800", "x" * 300])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of keys to everything in some JSON, the whole included."""
    found = [path]
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        found += places_in(inner, (*path, key))
    return found


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


@st.composite
def hostile_lines(draw: st.DrawFn, kind: str, sealed: bool) -> bytes:
    """Draw a journal whose lines all have a good CRC-32, and of which one value, or a key, is anything."""
    tree, name, _ = unfinished(kind, sealed)
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
    resume(kind, tree, same_content=None)


@KINDS
@QUICK
@given(data=st.data())
def test_a_journal_with_damaged_bytes_is_refused_or_the_build_ends_with_the_right_ones(
    kind: str, data: st.DataObject
) -> None:
    raw = bytearray(unfinished(kind)[0][unfinished(kind)[1]])  # type: ignore[arg-type]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        part = data.draw(st.binary(max_size=6))
        raw[at : at + data.draw(st.integers(0, 9))] = part
    tree, content = with_journal(kind, bytes(raw))
    resume(kind, tree, same_content=content)


@QUICK
@given(value=st.one_of(JSON, st.fixed_dictionaries({key: JSON for key in vars(Checkpoint())})))
@example({**vars(Checkpoint()), "documents": True})
@example({**vars(Checkpoint()), "files": [["a", [1, SOME_SHA256]]]})
@example({**vars(Checkpoint()), "files": {"a": [1]}})
@example({**vars(Checkpoint()), "state": {"counts": {"a": {"b": 1}}}})
@example({**vars(Checkpoint()), "finished": [{"name": "../x", "bytes": 1, "sha256": SOME_SHA256}]})
@example({**vars(Checkpoint()), "sealed": SOME_SHA256})
def test_any_object_is_a_checkpoint_or_a_cache_error(value: Any) -> None:
    with quick_folder() as path:
        header = line({"identity": {}, "journal_version": 1})
        (path / "journal.jsonl").write_bytes(header + line(value))
        try:
            journal = Journal(path, {})
        except CacheError as error:
            assert f"journal.jsonl, byte {len(header)}" in str(error) and "build from scratch: " in str(error)
            return
        journal.close()
        assert (journal.last is None) == (value is None)  # null is no line
        assert journal.last is None or 0 <= journal.last.documents < 2**63


NO_NAMES = ["../x", "/etc/passwd", "train/../../x", "", ".", "a//b", "a\\b", "meta.json", "x" * 300, "\ud800", 3, None]


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_the_name_of_a_finished_file_stays_inside_the_build(name: Any) -> None:
    raw = unfinished("pretrain")[0][unfinished("pretrain")[1]]
    values = values_of(raw)
    number = next(number for number, value in enumerate(values) if value.get("finished"))
    values[number]["finished"][0]["name"] = name
    tree, _ = with_journal("pretrain", b"".join(map(line, values)))
    assert not resume("pretrain", tree, same_content=None)


CHANGED_NUMBERS: dict[str, Callable[[dict[str, Any]], Any]] = {
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
        tokens=last["state"]["tokens"] + 1
        if isinstance(last["state"]["tokens"], int)
        else {split: count + 1 for split, count in last["state"]["tokens"].items()}
    ),
    "no numbers": lambda last: last.update(state={}),
    "a number for numbers": lambda last: last["state"].update(counts=5),
    "numbers for a number": lambda last: last["state"].update(tokens={"a": 5}),
}


@pytest.mark.parametrize("what", sorted(CHANGED_NUMBERS))
@KINDS
def test_numbers_that_cannot_be_are_refused(kind: str, what: str) -> None:
    values = values_of(unfinished(kind)[0][unfinished(kind)[1]])
    CHANGED_NUMBERS[what](values[-1])
    tree, _ = with_journal(kind, b"".join(map(line, values)))
    assert not resume(kind, tree, same_content=None)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a": ' * 50_000, b"9" * 5_000, b"x" * (1 << 24)], ids=len)
def test_a_line_that_no_parser_takes_ends_the_journal(text: bytes) -> None:
    raw = unfinished("sft")[0][unfinished("sft")[1]]
    assert isinstance(raw, bytes)
    tree, content = with_journal("sft", raw + b"%08x %s\n" % (zlib.crc32(text), text))
    assert resume("sft", tree, same_content=content)


# --- links and pipes --------------------------------------------------------------------------------------------------


def planted(path: Path, where: str) -> None:
    """Put a link to a folder or file outside in the place of one of a build."""
    if path.is_dir():
        shutil.rmtree(path)
        path.symlink_to(where)
    else:
        path.unlink()
        path.symlink_to(f"{where}/precious")


@KINDS
def test_nothing_is_opened_or_changed_behind_a_link(kind: str) -> None:
    tree, name, content = unfinished(kind)
    journal = name.rsplit("/", 1)[0]
    extra = [journal, journal.removesuffix(".journal"), f"{journal.removesuffix('.journal')}/index"]
    places = sorted({*extra, *(found for found in tree if "/building-" in found)})
    for place in places:
        with quick_folder() as path:
            put(tree, path / "cache")
            if place in extra:
                (path / "cache" / place).mkdir(exist_ok=True)
            planted(path / "cache" / place, str(path / "outside"))
            with watched(path / "outside"):
                try:
                    BUILDERS[kind](path / "cache" / "c")
                except CacheError as error:
                    assert str(path / "cache") in str(error)
                else:
                    assert whole_version(path / "cache" / "c") == content
                    assert not [found for found in (path / "cache" / "c").resolve().rglob("*") if found.is_symlink()]


@KINDS
def test_a_pipe_in_the_place_of_a_file_is_an_error_and_no_wait(kind: str) -> None:
    def too_long(number: int, frame: Any) -> None:
        raise AssertionError("waited for a pipe")

    tree, _, content = unfinished(kind)
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


def test_an_unfinished_build_is_resumed_at_all() -> None:
    tree, _, content = unfinished("pretrain")
    assert resume("pretrain", tree, same_content=content)
