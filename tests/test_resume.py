"""A build that was interrupted goes on where it was, with the source that it had, or says what is not as it was.

Run: pytest tests/test_resume.py
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from power_loss import Disk, put, recorded_below, tree_of
from small_builds import BATCH_ITEMS, BUILDERS, ITEMS, Counted, counting, pretrain, sft, whole_version

from niels_gpt.build import resume, stream
from niels_gpt.build.describe import Source
from niels_gpt.cache import CacheError
from niels_gpt.fileio import Operation

KINDS = pytest.mark.parametrize("kind", sorted(BUILDERS))
IN_ORDER: dict[str, Any] = {"shuffle_buffer": None}
"""Changes the pretrain build so that the number of a document is its number in the list."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BATCH_ITEMS", BATCH_ITEMS)


def cut_off(items: list[Any], at: int) -> Iterator[Any]:
    """Yield some items, then fail as a network does."""
    yield from items[:at]
    raise ConnectionError("upstream is gone")


def interrupt(kind: str, path: Path, at: int, items: list[Any] | None = None, **changed: Any) -> None:
    """Leave a build unfinished behind `at` items of its source."""
    with pytest.raises(ConnectionError, match="upstream is gone"):
        BUILDERS[kind](path, items=cut_off(ITEMS[kind](0) if items is None else items, at), **changed)


def committed(path: Path) -> dict[str, Any]:
    """Return all that lies below the parent of a cache, but the lock and the count of the runs that gained nothing."""
    found = tree_of(path.parent).items()
    return {name: content for name, content in found if not name.endswith(("/lock", "/attempts.json"))}


def uninterrupted(kind: str, folder: Path, **changed: Any) -> dict[str, Any]:
    """Return what a build leaves that nothing happens to."""
    BUILDERS[kind](folder / "whole" / "c", **changed)
    return committed(folder / "whole" / "c")


def unfinished(path: Path, suffix: str = "") -> Path:
    """Return the folder of the unfinished build of a cache, or of its journal."""
    found = [entry for entry in (path.parent / ".versions" / "c").glob("building-*") if entry.suffix == suffix]
    assert len(found) == 1, found
    return found[0]


def checkpoints(path: Path) -> list[dict[str, Any]]:
    """Return the checkpoints of an unfinished build."""
    lines = (unfinished(path, ".journal") / "journal.jsonl").read_bytes().splitlines()
    return [json.loads(line[9:]) for line in lines[1:]]


def killed_behind(kind: str, folder: Path, is_last: Callable[[Operation], bool], **changed: Any) -> Path:
    """Return the path of a cache whose build was killed behind the first operation that `is_last` is true of."""
    (folder / "recorded").mkdir()
    trace = recorded_below(folder / "recorded", lambda: BUILDERS[kind](folder / "recorded" / "c", **changed))
    disk = Disk({})
    disk.apply(trace[: next(number for number, operation in enumerate(trace) if is_last(operation)) + 1])
    put(disk.left("kill"), folder / "killed")
    return folder / "killed" / "c"


def says(part: str) -> Callable[[Operation], bool]:
    """Return what is true of the line of the journal that holds some text."""
    return lambda operation: (
        operation[0] == "write" and "journal.jsonl" in operation[1] and part.encode() in operation[3]
    )


# --- it goes on -------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("at", [18, 27, 39])
def test_a_build_goes_on_and_tokenizes_only_what_was_not_done(folder: Path, kind: str, at: int) -> None:
    first, second, all_at_once = Counted(), Counted(), Counted()
    interrupt(kind, folder / "c", at, tokenizer=first)
    done = checkpoints(folder / "c")[-1]["documents"]
    assert done > 0 and done % BATCH_ITEMS == 0
    BUILDERS[kind](folder / "c", tokenizer=second)
    assert committed(folder / "c") == uninterrupted(kind, folder / "other", tokenizer=all_at_once)
    assert [text for text in first.texts + second.texts if text] == [text for text in all_at_once.texts if text]


@KINDS
@pytest.mark.parametrize("how", [{"num_threads": 0}, {"num_threads": 1}, {"num_threads": 2}, "an executor"], ids=str)
def test_what_was_done_before_the_source_broke_is_kept(folder: Path, kind: str, how: Any) -> None:
    items = ITEMS[kind](0)
    with ThreadPoolExecutor(2) as executor:
        workers = {"executor": executor} if how == "an executor" else how
        done = [0]
        for at in (30, 34, 38, 39):
            interrupt(kind, folder / "c", at, items, **workers)
            done.append(checkpoints(folder / "c")[-1]["documents"])
        BUILDERS[kind](folder / "c", **workers)
    assert done == sorted(done) and done[1] > 0
    assert committed(folder / "c") == uninterrupted(kind, folder / "other")


@KINDS
def test_an_interrupted_build_goes_on_with_other_batches_threads_and_checkpoints(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(kind, folder / "c", 18, num_threads=2)
    monkeypatch.setattr(stream, "BATCH_ITEMS", 3)
    interrupt(kind, folder / "c", 33, num_threads=1)
    assert checkpoints(folder / "c")[-1]["documents"] > 15
    monkeypatch.setattr(stream, "BATCH_CHARS", 40)
    BUILDERS[kind](folder / "c", num_threads=0, checkpoint_seconds=100)
    assert committed(folder / "c") == uninterrupted(kind, folder / "other")


@KINDS
def test_the_account_of_a_build_is_the_same_whatever_the_moment(folder: Path, kind: str) -> None:
    meta = BUILDERS[kind](folder / "whole" / "c")
    assert 0 < meta["source"]["counters"]["rows"] <= len(ITEMS[kind](0))
    for at in range(BATCH_ITEMS, 40, 4):
        path = folder / str(at) / "c"
        interrupt(kind, path, at)
        interrupt(kind, path, at + 1)
        assert BUILDERS[kind](path) == meta


def test_a_build_that_ends_by_its_budget_reads_no_further_when_it_goes_on(folder: Path) -> None:
    def read(path: Path) -> tuple[int, Any]:
        counters: dict[str, int] = {}
        items = counting(ITEMS["pretrain"](0), counters)
        meta = pretrain(path, items=items, source=Source(name="small", counters=counters))
        return counters["rows"], meta["source"]["counters"]

    path = killed_behind("pretrain", folder, says('"ended": true'))
    rows, counters = read(folder / "whole" / "c")
    assert read(path) == (counters["rows"], counters) and counters["rows"] <= rows < len(ITEMS["pretrain"](0))


@KINDS
def test_a_build_that_was_killed_after_its_last_checkpoint_tokenizes_nothing(folder: Path, kind: str) -> None:
    path = killed_behind(kind, folder, says('"ended": true'))
    tokenizer = Counted()
    BUILDERS[kind](path, tokenizer=tokenizer)
    assert tokenizer.texts == [] and committed(path) == uninterrupted(kind, folder)


@KINDS
def test_without_its_journal_a_build_begins_anew(folder: Path, kind: str) -> None:
    interrupt(kind, folder / "c", 30)
    shutil.rmtree(unfinished(folder / "c", ".journal"))
    tokenizer, all_at_once = Counted(), Counted()
    BUILDERS[kind](folder / "c", tokenizer=tokenizer)
    assert committed(folder / "c") == uninterrupted(kind, folder / "other", tokenizer=all_at_once)
    assert tokenizer.texts == all_at_once.texts


@KINDS
def test_other_settings_are_another_build_and_leave_the_unfinished_one(folder: Path, kind: str) -> None:
    interrupt(kind, folder / "c", 30)
    before = {name: content for name, content in committed(folder / "c").items() if "/building-" in name}
    other = BUILDERS[kind](folder / "c", seed=1)
    assert whole_version(folder / "c") == other["content_sha256"]
    assert {name: content for name, content in committed(folder / "c").items() if "/building-" in name} == before
    tokenizer = Counted()
    meta = BUILDERS[kind](folder / "c", tokenizer=tokenizer)
    assert whole_version(folder / "c") == meta["content_sha256"] != other["content_sha256"]
    assert 0 < len(tokenizer.texts) < len(ITEMS[kind](0))
    assert meta == BUILDERS[kind](folder / "other" / "c")


# --- the source is not what it was ------------------------------------------------------------------------------------

CHANGES: dict[str, tuple[str, Callable[[list[Any]], Any], str]] = {
    "a text": ("pretrain", lambda items: items.__setitem__(7, (None, "other", "page\n7")), "has changed at"),
    "an id": ("pretrain", lambda items: items.__setitem__(0, (*items[0][:2], "x")), "has changed at"),
    "a split": ("pretrain", lambda items: items.__setitem__(9, ("val", *items[9][1:])), "has changed at"),
    "a dropped text": ("pretrain", lambda items: items.__setitem__(5, (None, "good", items[5][2])), "has changed at"),
    "the order": ("pretrain", lambda items: items.insert(3, items.pop(4)), "has changed at"),
    "one more before": ("pretrain", lambda items: items.insert(2, (None, "new", "new")), "has changed at"),
    "one less before": ("pretrain", lambda items: items.pop(2), "has changed at"),
    "less": ("pretrain", lambda items: items.__delitem__(slice(11, None)), "ends after 11 documents, and 20 had"),
    "nothing": ("pretrain", lambda items: items.clear(), "ends after 0 documents, and 20 had"),
    "a message": ("sft", lambda items: items[7][1][0].update(content="other"), "has changed at"),
    "a role": ("sft", lambda items: items[8][1][0].update(role="system"), "has changed at"),
    "a message more": ("sft", lambda items: items[9][1].append(items[9][1][0]), "has changed at"),
    "the id of a chat": ("sft", lambda items: items.__setitem__(3, ("x", items[3][1])), "has changed at"),
    "less chats": ("sft", lambda items: items.__delitem__(slice(11, None)), "ends after 11 documents, and 20 had"),
    "no id": ("sft", lambda items: items.__setitem__(0, items[0][1]), "has changed at"),
}


@pytest.mark.parametrize("what", sorted(CHANGES))
def test_a_source_that_changed_is_refused_and_nothing_on_disk_changes(folder: Path, what: str) -> None:
    kind, change, message = CHANGES[what]
    settings = IN_ORDER if kind == "pretrain" else {}
    interrupt(kind, folder / "c", 23, **settings)
    before = committed(folder / "c")
    for _ in range(2):
        items = ITEMS[kind](0)
        change(items)
        with pytest.raises(CacheError, match=message) as error:
            BUILDERS[kind](folder / "c", items=items, **settings)
        assert str(error.value).endswith(f": rm -r {unfinished(folder / 'c', '.journal')}")
        assert committed(folder / "c") == before
    BUILDERS[kind](folder / "c", **settings)
    assert committed(folder / "c") == uninterrupted(kind, folder / "other", **settings)


@KINDS
def test_a_source_that_goes_on_where_it_had_ended_is_refused(folder: Path, kind: str) -> None:
    settings = {**IN_ORDER, "max_train_tokens": 10**6, "max_val_tokens": 10**5} if kind == "pretrain" else {}
    path = killed_behind(kind, folder, says('"ended": true'), **settings)
    before = committed(path)
    with pytest.raises(CacheError, match="had ended, and has one more document"):
        BUILDERS[kind](path, items=[*ITEMS[kind](0), ITEMS[kind](0)[0]], **settings)
    after = committed(path)
    BUILDERS[kind](path, **settings)
    assert committed(path) == uninterrupted(kind, folder, **settings)
    assert {name.rsplit("/", 1)[-1] for name in before} == {name.rsplit("/", 1)[-1] for name in after}


def test_a_change_behind_what_was_read_is_no_change(folder: Path) -> None:
    interrupt("pretrain", folder / "mine" / "c", 23, **IN_ORDER)
    items = ITEMS["pretrain"](0)
    items[20:] = ITEMS["pretrain"](1)[20:]
    pretrain(folder / "mine" / "c", items=items, **IN_ORDER)
    pretrain(folder / "other" / "c", items=items, **IN_ORDER)
    assert committed(folder / "mine" / "c") == committed(folder / "other" / "c")


def test_a_text_that_cannot_be_kept_may_be_mended_and_the_build_goes_on(folder: Path) -> None:
    items = [(None, f"{number} good", None) for number in range(40)]
    bad = [*items[:33], (None, "x<|eot|>", None), *items[34:]]
    settings = {**IN_ORDER, "on_special": "raise"}
    with pytest.raises(ValueError, match="reserved"):
        pretrain(folder / "mine" / "c", items=bad, **settings)
    assert checkpoints(folder / "mine" / "c")[-1]["documents"] == 30
    pretrain(folder / "mine" / "c", items=items, **settings)
    pretrain(folder / "other" / "c", items=items, **settings)
    assert committed(folder / "mine" / "c") == committed(folder / "other" / "c")


# --- a run that gains nothing -----------------------------------------------------------------------------------------


@KINDS
def test_runs_that_are_killed_while_they_read_again_are_counted_and_the_next_one_says_so(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(kind, folder / "c", 30)

    def killed(at: int) -> None:
        pid = os.fork()
        if not pid:
            BUILDERS[kind](folder / "c", items=killing(ITEMS[kind](0), at))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL

    def killing(items: list[Any], at: int) -> Iterator[Any]:
        yield from items[:at]
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(2):
        killed(5)
        assert "gains nothing" not in caplog.text
    with pytest.raises(KeyboardInterrupt):
        BUILDERS[kind](folder / "c", items=interrupting(ITEMS[kind](0), 5))
    assert "the last 2 runs of this build came no further" in caplog.text
    assert "has gained nothing" in caplog.text
    caplog.clear()
    BUILDERS[kind](folder / "c")
    assert "the last 3 runs" in caplog.text
    assert committed(folder / "c") == uninterrupted(kind, folder / "other")
    assert not list(folder.glob("**/attempts.json"))


def test_a_replay_says_how_far_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt("sft", folder / "c", 34)
    monkeypatch.setattr(resume, "_TOLD_SECONDS", 0.0)
    told: list[int] = []
    with caplog.at_level("INFO"):
        sft(folder / "c", progress=lambda examples, tokens, expected: told.append(examples))
    assert re.search(r"re-read \d+ of 30 documents", caplog.text) and told[0] < 30
    assert "read again" in caplog.text


def interrupting(items: list[Any], at: int) -> Iterator[Any]:
    yield from items[:at]
    raise KeyboardInterrupt


def test_runs_that_are_killed_before_their_first_checkpoint_are_counted_too(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sft(folder / "c", items=interrupting(ITEMS["sft"](0), 5))
    assert "the last run of this build came no further than its start" in caplog.text


# --- what lies on disk is not what it was -----------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "missing": lambda path: path.unlink(),
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
@KINDS
def test_a_damaged_file_of_an_unfinished_build_is_named(folder: Path, kind: str, damage: str) -> None:
    interrupt(kind, folder / "whole" / "c", 34)
    last = checkpoints(folder / "whole" / "c")[-1]
    names = [f"{unfinished(folder / 'whole' / 'c', '.journal').name}/{name}" for name in last["files"]]
    names += [
        str(file.relative_to(folder / "whole" / ".versions" / "c"))
        for file in unfinished(folder / "whole" / "c").rglob("*")
        if file.is_file()
    ]
    sizes = {name: (folder / "whole" / ".versions" / "c" / name).stat().st_size for name in names}
    assert len([name for name in names if sizes[name]]) >= 4
    for number, name in enumerate(name for name in names if sizes[name]):
        shutil.copytree(folder / "whole", folder / str(number))
        path = folder / str(number) / ".versions" / "c" / name
        DAMAGES[damage](path)
        with pytest.raises(CacheError) as error:
            BUILDERS[kind](folder / str(number) / "c")
        assert str(path) in str(error.value) and "To start this build from scratch: " in str(error.value)
        shutil.rmtree(unfinished(folder / str(number) / "c", ".journal"))
        BUILDERS[kind](folder / str(number) / "c")
        assert whole_version(folder / str(number) / "c")


@KINDS
def test_a_torn_last_line_of_the_journal_is_as_if_it_had_not_been_written(folder: Path, kind: str) -> None:
    interrupt(kind, folder / "whole" / "c", 34)
    expected = uninterrupted(kind, folder / "other")
    lines = (unfinished(folder / "whole" / "c", ".journal") / "journal.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) > 4
    for number, kept in enumerate((0, 1, 8, 9, 40, len(lines[-1]) // 2, len(lines[-1]) - 1)):
        shutil.copytree(folder / "whole", folder / str(number))
        path = folder / str(number) / "c"
        journal = unfinished(path, ".journal") / "journal.jsonl"
        journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept])
        tokenizer = Counted()
        BUILDERS[kind](path, tokenizer=tokenizer)
        assert committed(path) == expected
        assert 0 < len(tokenizer.texts) < len(ITEMS[kind](0))


def test_a_version_that_is_gone_between_commit_and_the_last_word_is_named(folder: Path) -> None:
    path = killed_behind("sft", folder, lambda operation: operation[0] == "rename" and operation[2] == "c")
    shutil.rmtree(path.resolve())
    with pytest.raises(
        CacheError, match=r"no such file, expected a finished version by the journal\. To start .*: rm -r .*journal"
    ):
        sft(path)


# --- the end ----------------------------------------------------------------------------------------------------------


@KINDS
def test_where_the_last_callback_raises_the_next_call_only_replays_and_commits(folder: Path, kind: str) -> None:
    def fail(meta: dict[str, Any]) -> None:
        raise RuntimeError("no room for the record")

    with pytest.raises(RuntimeError, match="no room"):
        BUILDERS[kind](folder / "c", committed=fail)
    content = whole_version(folder / "c")
    tokenizer = Counted()
    told: list[dict[str, Any]] = []
    meta = BUILDERS[kind](folder / "c", tokenizer=tokenizer, committed=told.append)
    assert tokenizer.texts == [] and told == [meta] and meta["content_sha256"] == content
    assert committed(folder / "c") == uninterrupted(kind, folder / "other")


@KINDS
def test_a_process_that_is_killed_in_the_last_callback_leaves_only_the_callback_to_do(folder: Path, kind: str) -> None:
    child = os.fork()
    if not child:
        BUILDERS[kind](folder / "c", committed=lambda meta: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    tokenizer = Counted()
    told: list[dict[str, Any]] = []
    BUILDERS[kind](folder / "c", tokenizer=tokenizer, committed=told.append)
    assert tokenizer.texts == [] and len(told) == 1
    assert committed(folder / "c") == uninterrupted(kind, folder / "other")


@pytest.mark.faults  # some seconds of work, three times and more
def test_a_build_killed_again_and_again_at_a_third_of_its_time_finishes(tiny_model_path: Path, folder: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("kill_builds.py")), str(folder)]
    done = subprocess.run([*program, "--thirds", str(tiny_model_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["equal"] and 2 <= found["pretrain"] <= 60 and 2 <= found["sft"] <= 60
