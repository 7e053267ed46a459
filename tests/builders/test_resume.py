"""An interrupted or killed build resumes from its last checkpoint, with the source that it had, or says what changed.

Run: pytest tests/builders/test_resume.py, and with -m faults for two hundred kills at random moments.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import LONG, SUPPORT
from support.errors import refused
from support.fault_builds import (
    KINDS,
    checkpoints,
    interrupt,
    journals,
    killed_after,
    left,
    place_of,
    unfinished,
    uninterrupted,
)
from support.small_builds import (
    BATCH_ITEMS,
    BUILDERS,
    ITEMS,
    Counted,
    batches_of,
    counting,
    log_always,
    pretrain,
    sft,
    whole_version,
)

from niels_gpt.cache import CacheError
from niels_gpt.engine.meta import Source

pytestmark = pytest.mark.usefixtures("small_batches")
IN_ORDER = {"shuffle_buffer": None}
"""Changes the pretrain build so that the number of a document is its number in the list."""


@KINDS
@pytest.mark.parametrize("at", [18, 27, 39])
def test_a_build_goes_on_and_tokenizes_only_what_was_not_done(folder: Path, kind: str, at: int) -> None:
    first, second, all_at_once = Counted(), Counted(), Counted()
    interrupt(kind, folder / "c", at, tokenizer=first)
    done = checkpoints(folder / "c")[-1]["documents"]
    assert done > 0 and done % BATCH_ITEMS == 0
    BUILDERS[kind](folder / "c", tokenizer=second)
    assert left(folder / "c") == uninterrupted(kind, folder / "other", tokenizer=all_at_once)
    found, expected = ([text for text in texts if text] for texts in (first.texts + second.texts, all_at_once.texts))
    both = min(len(found), len(expected))  # the last batch may end elsewhere, behind the document that fills the budget
    assert found[:both] == expected[:both] and max(len(found), len(expected)) < both + BATCH_ITEMS


@KINDS
def test_it_goes_on_with_other_batches_and_threads(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(kind, folder / "c", 18, num_threads=2)
    batches_of(monkeypatch, 3)
    interrupt(kind, folder / "c", 33, num_threads=1)
    assert checkpoints(folder / "c")[-1]["documents"] > 15
    batches_of(monkeypatch, 3, chars=40)
    BUILDERS[kind](folder / "c", num_threads=0, checkpoint_seconds=100)
    assert left(folder / "c") == uninterrupted(kind, folder / "other")


def test_a_build_that_ends_by_its_budget_reads_less_than_a_batch_further_when_it_goes_on(folder):
    def read(path):
        counters = {}
        items = counting(ITEMS["pretrain"](0), counters)
        meta = pretrain(path, items=items, source=Source(name="small", counters=counters))
        return counters["rows"], meta["source"]["counters"]

    path = killed_after("pretrain", folder, journals('"ended": true'))
    rows, counters = read(folder / "whole" / "c")
    again, same = read(path)
    assert same == counters and counters["rows"] <= again < counters["rows"] + BATCH_ITEMS
    assert counters["rows"] <= rows < len(ITEMS["pretrain"](0))


@KINDS
def test_a_build_that_was_killed_after_its_last_checkpoint_tokenizes_nothing(folder: Path, kind: str) -> None:
    path = killed_after(kind, folder, journals('"ended": true'))
    tokenizer = Counted()
    BUILDERS[kind](path, tokenizer=tokenizer)
    assert tokenizer.texts == [] and left(path) == uninterrupted(kind, folder)


CHANGES = {
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
def test_a_source_that_changed_is_refused_and_nothing_on_disk_changes(folder, what):
    kind, change, message = CHANGES[what]
    settings = IN_ORDER if kind == "pretrain" else {}
    interrupt(kind, folder / "c", 23, **settings)
    before = left(folder / "c")
    for _ in range(2):
        items = ITEMS[kind](0)
        change(items)
        with pytest.raises(CacheError, match=message) as error:
            BUILDERS[kind](folder / "c", items=items, **settings)
        assert str(error.value).endswith(f": rm -r {unfinished(folder / 'c', '.journal')}")
        assert left(folder / "c") == before
    BUILDERS[kind](folder / "c", **settings)
    assert left(folder / "c") == uninterrupted(kind, folder / "other", **settings)


@KINDS
def test_a_source_that_goes_on_where_it_had_ended_is_refused(folder: Path, kind: str) -> None:
    settings = {**IN_ORDER, "max_train_tokens": 10**6, "max_val_tokens": 10**5} if kind == "pretrain" else {}
    path = killed_after(kind, folder, journals('"ended": true'), **settings)
    before = left(path)
    with pytest.raises(CacheError, match="had ended, and has one more document"):
        BUILDERS[kind](path, items=[*ITEMS[kind](0), ITEMS[kind](0)[0]], **settings)
    after = left(path)
    BUILDERS[kind](path, **settings)
    assert left(path) == uninterrupted(kind, folder, **settings)
    assert {name.rsplit("/", 1)[-1] for name in before} == {name.rsplit("/", 1)[-1] for name in after}


def test_a_change_behind_what_was_read_is_no_change(folder):
    interrupt("pretrain", folder / "mine" / "c", 23, **IN_ORDER)
    items = ITEMS["pretrain"](0)
    items[20:] = ITEMS["pretrain"](1)[20:]
    pretrain(folder / "mine" / "c", items=items, **IN_ORDER)
    pretrain(folder / "other" / "c", items=items, **IN_ORDER)
    assert left(folder / "mine" / "c") == left(folder / "other" / "c")


def test_a_text_that_cannot_be_kept_may_be_mended_and_the_build_goes_on(folder):
    items = [(None, f"{number} good", None) for number in range(40)]
    bad = [*items[:33], (None, "x<|eot|>", None), *items[34:]]
    settings = {**IN_ORDER, "on_special": "raise"}
    with refused("E305", "document '33'", "<|eot|>"):
        pretrain(folder / "mine" / "c", items=bad, **settings)
    assert checkpoints(folder / "mine" / "c")[-1]["documents"] == 30
    pretrain(folder / "mine" / "c", items=items, **settings)
    pretrain(folder / "other" / "c", items=items, **settings)
    assert left(folder / "mine" / "c") == left(folder / "other" / "c")


@KINDS
def test_runs_killed_while_they_reread_are_counted(folder: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    interrupt(kind, folder / "c", 30)

    def killed(at):
        pid = os.fork()
        if not pid:
            BUILDERS[kind](folder / "c", items=killing(ITEMS[kind](0), at))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL

    def killing(items, at):
        yield from items[:at]
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(2):
        killed(5)
        assert "gains nothing" not in caplog.text
    with pytest.raises(KeyboardInterrupt):
        BUILDERS[kind](folder / "c", items=interrupting(ITEMS[kind](0), 5))
    assert "the last 2 runs of this build came no further" in caplog.text
    assert "made no progress" in caplog.text
    caplog.clear()
    BUILDERS[kind](folder / "c")
    assert "the last 3 runs" in caplog.text
    assert left(folder / "c") == uninterrupted(kind, folder / "other")
    assert not list(folder.glob("**/attempts.json"))


def test_a_replay_says_where(folder, monkeypatch, caplog):
    interrupt("sft", folder / "c", 34)
    log_always(monkeypatch)
    told = []
    with caplog.at_level("INFO"):
        sft(folder / "c", progress=lambda examples, tokens, expected: told.append(examples))
    assert re.search(r"re-read \d+ of 30 documents", caplog.text) and told[0] < 30
    assert "read again" in caplog.text


def interrupting(items, at):
    yield from items[:at]
    raise KeyboardInterrupt


def test_runs_killed_before_their_first_checkpoint_are_counted(folder, caplog):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sft(folder / "c", items=interrupting(ITEMS["sft"](0), BATCH_ITEMS - 1))
    assert "the last run of this build came no further than its start" in caplog.text


DAMAGES = {
    "flipped": lambda content: bytes([content[0] ^ 4]) + content[1:],
    "cut": lambda content: content[:-1],
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("damage", [*DAMAGES, "missing"])
@KINDS
def test_a_damaged_file_of_an_unfinished_build_is_named(folder: Path, kind: str, damage: str) -> None:
    interrupt(kind, folder / "whole" / "c", 34)
    place, expected = folder / "whole" / ".versions" / "c", uninterrupted(kind, folder / "other")
    done, journal = checkpoints(folder / "whole" / "c"), unfinished(folder / "whole" / "c", ".journal").name
    files = {str(file.relative_to(place)) for file in place.rglob("*") if file.is_file()}
    written = {place_of(name, journal, done, files.__contains__): size for name, (size, _) in done[-1]["files"].items()}
    finished = [f"{journal.removesuffix('.journal')}/{record['name']}" for each in done for record in each["finished"]]
    names = [name for name, size in written.items() if size] + finished
    assert len(names) >= 4
    for number, name in enumerate(names):
        shutil.copytree(folder / "whole", folder / str(number))
        path = folder / str(number) / ".versions" / "c" / name
        content = path.read_bytes()
        path.unlink() if damage == "missing" else path.write_bytes(DAMAGES[damage](content))
        with refused("E505") as error:
            BUILDERS[kind](folder / str(number) / "c")
        assert str(path) in str(error.value) and "To start this build from scratch: " in str(error.value)
        shutil.rmtree(unfinished(folder / str(number) / "c", ".journal"))
        tokenizer = Counted()
        BUILDERS[kind](folder / str(number) / "c", tokenizer=tokenizer)
        assert left(folder / str(number) / "c") == expected
        assert kind == "rollouts" or len(tokenizer.texts) > len(ITEMS[kind](0)) // 2


@KINDS
def test_a_finished_file_that_the_journal_does_not_name_is_removed(folder: Path, kind: str) -> None:
    interrupt(kind, folder / "c", 34)
    (unfinished(folder / "c") / "shard_00099.bin").write_bytes(b"of a run that was killed later")
    BUILDERS[kind](folder / "c")
    assert left(folder / "c") == uninterrupted(kind, folder / "other")


def test_a_version_that_is_gone_between_commit_and_the_last_word_is_named(folder):
    path = killed_after("sft", folder, lambda operation: operation[0] == "rename" and operation[2] == "c")
    shutil.rmtree(path.resolve())
    with refused("E505", "meta.json", "rm -r", ".journal"):
        sft(path)


@pytest.mark.parametrize("how", ["raises", "killed"])
@KINDS
def test_a_process_that_ends_in_the_last_callback_leaves_only_that_to_do(folder: Path, kind: str, how: str) -> None:
    if how == "raises":
        with pytest.raises(ZeroDivisionError):
            BUILDERS[kind](folder / "c", committed=lambda meta: 1 / 0)
    elif (child := os.fork()) == 0:
        BUILDERS[kind](folder / "c", committed=lambda meta: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(1)
    else:
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    content, tokenizer, metas = whole_version(folder / "c"), Counted(), list[dict[str, Any]]()
    meta = BUILDERS[kind](folder / "c", tokenizer=tokenizer, committed=metas.append)
    assert tokenizer.texts == [] and metas == [meta] and meta["content_sha256"] == content
    assert left(folder / "c") == uninterrupted(kind, folder / "other")


def run_kills(*arguments):
    """Run support/kill_builds.py; returns what it prints."""
    program = [sys.executable, str(SUPPORT / "kill_builds.py"), *map(str, arguments)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout)
    return printed


@pytest.mark.faults
def test_killed_builds_end_with_the_same_bytes(tmp_path):
    kills = 200 if LONG else 30
    found = run_kills(tmp_path, "--kills", kills)
    assert sum(found["kills"].values()) == kills
    assert found["different"] == found["strange"] == found["wrong"] == []
    assert min(found["looks"].values()) > 0 and min(found["versions_seen"].values()) > 0
    if LONG:
        assert min(found["kills"].values()) > 25 and {"while filling", "in the end"} <= set(found["where"])


@pytest.mark.faults  # some seconds of work, three times and more
def test_a_build_killed_again_and_again_at_a_third_of_its_time_finishes(tiny_model_path, folder):
    found = run_kills(folder, "--thirds", tiny_model_path)
    assert found["equal"] and 2 <= found["pretrain"] <= 60 and 2 <= found["sft"] <= 60
