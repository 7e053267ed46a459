"""What begins another build, what goes on with the one that was killed, and what is refused.

Run: pytest tests/test_build_identity.py
"""

import dataclasses
import json
import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numbered_datasets
import pytest
from byte_tokenizer import ByteTokenizer
from loopback_hub import LoopbackHub
from power_loss import tree_of
from small_builds import BATCH_ITEMS, BUILDERS, ITEMS, Counted, documents, pretrain, sft, whole_version

from niels_gpt import versions
from niels_gpt.build import stream
from niels_gpt.cache import CacheError
from niels_gpt.cache.meta import read_meta, write_meta
from niels_gpt.recipes import origins, produce, sources
from niels_gpt.recipes.plan import recipes
from niels_gpt.recipes.produce import Outcome, cache_root, recorded_recipe
from niels_gpt.settings import Settings
from niels_gpt.versions import versions_dir

DOLLY = "databricks/databricks-dolly-15k"
KINDS = pytest.mark.parametrize("kind", sorted(BUILDERS))
NOTES = {f"n{number:02}.txt": f"This is the note {number}: " + "word " * (number % 7) for number in range(40)}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(stream, "BATCH_ITEMS", BATCH_ITEMS)
    caplog.set_level(logging.INFO, logger="niels_gpt")


@pytest.fixture
def files(mirror: Path, folder: Path) -> Path:
    """A mirror, and notes of one's own beside it, that a test may change."""
    shutil.copytree(mirror, folder / "mirror")
    (folder / "notes").mkdir()
    for name, text in NOTES.items():
        (folder / "notes" / name).write_text(text)
    return folder


@pytest.fixture
def given(files: Path, tiny_model_path: Path) -> Settings:
    """Settings that build from them. One thread: the order in which a build comes forward is always the same."""
    places = {"source_root": str(files / "mirror"), "pretrain": f"notes={files / 'notes'}"}
    return Settings(cache_dir=str(files / "cache"), tokenizer_model=str(tiny_model_path), threads=1, **places)


class Stopped(Exception):
    """Raised where a build is to be stopped."""


def run(settings: Settings, key: str, **arguments: Any) -> Outcome:
    outcome: Outcome = recipes(settings)[key](settings, **arguments)
    return outcome


def stop(settings: Settings, key: str, *, after: int = 10, **arguments: Any) -> None:
    """Leave the build of a recipe unfinished, with five documents at least in its journal."""

    def progress(documents: int, tokens: int, expected: int | None) -> None:
        if documents >= after:
            raise Stopped

    with pytest.raises(Stopped):
        run(settings, key, progress=progress, **arguments)
    assert unfinished(settings, key)


def unfinished(settings: Settings, key: str) -> dict[str, Any]:
    """Return all unfinished builds of a cache: what lies in their folders, by folder."""
    folder = versions_dir(cache_root(settings) / key)
    return {entry.name: tree_of(entry) for entry in folder.glob("building-*")}


def anew(settings: Settings, key: str, **arguments: Any) -> dict[str, Any]:
    """Return the meta of the same build in a cache folder of its own, to which nothing happens."""
    elsewhere = dataclasses.replace(settings, cache_dir=f"{settings.cache_dir}-anew")
    try:
        return run(elsewhere, key, **arguments).meta
    finally:
        shutil.rmtree(elsewhere.cache_dir)


def goes_on(caplog: pytest.LogCaptureFixture, settings: Settings, key: str, **arguments: Any) -> Outcome:
    """Run a recipe that goes on with what was stopped."""
    caplog.clear()
    outcome = run(settings, key, **arguments)
    assert re.search(r"resuming after \d+ documents of an earlier run", caplog.text)
    assert whole_version(outcome.path) == outcome.meta["content_sha256"]
    return outcome


# --- settings ---------------------------------------------------------------------------------------------------------

CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("pretrain/notes", {"own_val_frac": 0.5}),
    ("pretrain/notes", {"seed": 7}),
    ("pretrain/roam", {"roam_val_frac": 0.4}),
    ("pretrain/roam", {"seed": 7}),
    ("pretrain/fineweb_edu", {"shuffle_buffer": 9}),
    ("pretrain/fineweb_edu", {"seed": 7}),
    ("pretrain/wikitext", {"seed": 7}),
    ("sft/dolly15k", {"dolly_include_system": True}),
    ("sft/dolly15k", {"sft_val_frac": 0.4}),
    ("sft/oasst1", {"oasst1_max_messages": 2}),
    ("sft/oasst1", {"oasst1_english_only": False}),
]


@pytest.mark.parametrize(("key", "change"), CHANGES, ids=lambda value: str(value))
def test_another_setting_is_another_build_and_leaves_the_first_one(
    given: Settings, caplog: pytest.LogCaptureFixture, key: str, change: dict[str, Any]
) -> None:
    changed = dataclasses.replace(given, **change)
    stop(given, key)
    first = unfinished(given, key)
    stop(changed, key)
    assert "an unfinished build that differs in " in caplog.text and "recipe" in caplog.text
    both = unfinished(given, key)
    assert len(both) == 2 * len(first) and both.items() >= first.items()
    assert goes_on(caplog, changed, key).meta == anew(changed, key)
    assert unfinished(given, key) == first
    assert goes_on(caplog, given, key).meta == anew(given, key)
    assert unfinished(given, key) == {}


@pytest.mark.parametrize("change", [{"licence": "notes=CC0 1.0"}, {"attribution": "notes=N. Otes"}, {"threads": 2}])
def test_what_is_only_said_of_a_source_is_no_part_of_the_key(
    given: Settings, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    stop(given, "pretrain/notes")
    changed = dataclasses.replace(given, **change)
    assert goes_on(caplog, changed, "pretrain/notes").meta == anew(changed, "pretrain/notes")
    assert unfinished(given, "pretrain/notes") == {}


# --- tokenizers -------------------------------------------------------------------------------------------------------


class Shifted(ByteTokenizer):
    """Without a model, and with the vocabulary of the other one: only the ids of a text tell them apart."""

    def encode(self, text: str) -> list[int]:
        return [byte + 11 for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(id - 11 for id in ids if 11 <= id < 267).decode(errors="ignore")


def interrupt(kind: str, path: Path, at: int = 35, items: list[Any] | None = None, **changed: Any) -> None:
    """Leave a build unfinished behind some items of its source."""

    def cut_off() -> Iterator[Any]:
        yield from (ITEMS[kind](0) if items is None else items)[:at]
        raise Stopped

    with pytest.raises(Stopped):
        BUILDERS[kind](path, items=cut_off(), **changed)


@KINDS
def test_a_build_does_not_go_on_with_another_tokenizer_that_has_no_model(folder: Path, kind: str) -> None:
    ours = BUILDERS[kind](folder / "ours")
    theirs = BUILDERS[kind](folder / "theirs", tokenizer=Shifted())
    assert ours["content_sha256"] != theirs["content_sha256"]
    assert {ours["tokenizer_sha256"], theirs["tokenizer_sha256"]} == {None}
    interrupt(kind, folder / "c")
    before = {entry.name: tree_of(entry) for entry in versions_dir(folder / "c").glob("building-*")}
    assert BUILDERS[kind](folder / "c", tokenizer=Shifted()) == theirs
    assert whole_version(folder / "c") == theirs["content_sha256"]
    assert {entry.name: tree_of(entry) for entry in versions_dir(folder / "c").glob("building-*")} == before
    tokenizer = Counted()
    assert BUILDERS[kind](folder / "c", tokenizer=tokenizer) == ours
    assert 0 < len(tokenizer.texts) < len(ITEMS[kind](0))


# --- files ------------------------------------------------------------------------------------------------------------

Change = Callable[[Path], Any]
"""Changes one of the files of a source, given the folder of all of them."""

OF_NOTES: dict[str, tuple[Change, str]] = {
    "changed": (lambda notes: (notes / "n03.txt").write_text("another note"), "has changed at "),
    "longer": (lambda notes: (notes / "n03.txt").write_text(NOTES["n03.txt"] + "."), "has changed at "),
    "added": (lambda notes: (notes / "n02a.txt").write_text("one more note"), "has changed at "),
    "removed": (lambda notes: (notes / "n03.txt").unlink(), "has changed at "),
    "renamed": (lambda notes: (notes / "n03.txt").rename(notes / "n03a.txt"), "has changed at "),
    "swapped": (
        lambda notes: [(notes / f"n0{number}.txt").write_text(NOTES[f"n0{7 - number}.txt"]) for number in (3, 4)],
        "has changed at ",
    ),
}


def journals(builds: dict[str, Any]) -> list[bytes]:
    return [tree["journal.jsonl"] for name, tree in sorted(builds.items()) if name.endswith(".journal")]


def refused_until_put_back(
    caplog: pytest.LogCaptureFixture, settings: Settings, key: str, folder: Path, change: Change, message: str
) -> None:
    """Stop a build, change its files, see that it is refused and untouched, put the files back, and see it go on."""
    expected = anew(settings, key)
    stop(settings, key)
    shutil.copytree(folder, folder.parent / "kept")
    before = unfinished(settings, key)
    change(folder)
    with pytest.raises(CacheError, match=f"its source {message}"):
        run(settings, key)
    refused = unfinished(settings, key)  # cut to what the journal speaks of, which is as it was
    assert journals(refused) == journals(before) and not (cache_root(settings) / key).exists()
    with pytest.raises(CacheError, match=f"its source {message}"):
        run(settings, key)
    assert unfinished(settings, key) == refused
    shutil.rmtree(folder)
    (folder.parent / "kept").rename(folder)
    assert goes_on(caplog, settings, key).meta == expected
    assert unfinished(settings, key) == {}


@pytest.mark.parametrize("what", sorted(OF_NOTES))
def test_files_of_ones_own_that_change_under_a_killed_build_are_refused_by_document(
    given: Settings, files: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    refused_until_put_back(caplog, given, "pretrain/notes", files / "notes", *OF_NOTES[what])


def test_files_of_ones_own_that_are_gone_under_a_killed_build_are_refused_by_document(
    given: Settings, files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def most_go(notes: Path) -> None:
        for name in sorted(NOTES)[4:]:
            (notes / name).unlink()

    message = r"ends after 4 documents, and \d+ had been read"
    without_val = dataclasses.replace(given, own_val_frac=0.0)  # else one of the four documents goes to val
    refused_until_put_back(caplog, without_val, "pretrain/notes", files / "notes", most_go, message)


def in_row(pattern: str, edit: Callable[[list[str]], Any]) -> Change:
    """Return a change of the lines of the one file of a mirror that a pattern names."""

    def change(mirror: Path) -> None:
        (path,) = mirror.glob(pattern)
        lines = path.read_text().splitlines(keepends=True)
        edit(lines)
        path.write_text("".join(lines))

    return change


def changed_row(lines: list[str]) -> None:
    row = json.loads(lines[3])
    key = "text" if "text" in row else "response"
    lines[3] = json.dumps({**row, key: "another text"}) + "\n"


def added_row(lines: list[str]) -> None:
    lines.insert(0, lines[9])


def removed_row(lines: list[str]) -> None:
    del lines[0]


def added_file(mirror: Path) -> None:
    row = {"text": "a page that was not there", "id": "new"}
    (mirror / "HuggingFaceFW" / "fineweb-edu" / "train-0.jsonl").write_text(json.dumps(row) + "\n")


def added_note(mirror: Path) -> None:
    (mirror / "roam" / "A note that was not there.md").write_text("A note that was not there.\n")


FINEWEB, ROWS = "HuggingFaceFW/fineweb-edu/*.jsonl", "databricks/**/*.jsonl"
OF_A_MIRROR: list[tuple[str, Change, str]] = [
    ("sft/dolly15k", in_row(ROWS, changed_row), "has changed at "),
    ("sft/dolly15k", in_row(ROWS, added_row), "has changed at "),
    ("sft/dolly15k", in_row(ROWS, removed_row), "has changed at "),
    ("pretrain/fineweb_edu", in_row(FINEWEB, changed_row), "has changed at "),
    ("pretrain/fineweb_edu", in_row(FINEWEB, removed_row), "has changed at "),
    ("pretrain/fineweb_edu", added_file, "has changed at "),
    ("pretrain/roam", added_note, "has changed at "),
]


@pytest.mark.parametrize(
    ("key", "change", "message"),
    OF_A_MIRROR,
    ids=[
        f"{key}-{what}"
        for (key, _, _), what in zip(
            OF_A_MIRROR, ("row", "row more", "row less", "row", "row less", "file more", "note more"), strict=True
        )
    ],
)
def test_files_of_a_mirror_that_change_under_a_killed_build_are_refused_by_document(
    given: Settings, files: Path, caplog: pytest.LogCaptureFixture, key: str, change: Change, message: str
) -> None:
    in_order = dataclasses.replace(given, shuffle_buffer=0)
    refused_until_put_back(caplog, in_order, key, files / "mirror", change, message)


def test_a_shuffled_mirror_that_changes_is_refused_too(
    given: Settings, files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change = in_row(FINEWEB, removed_row)
    shuffled = dataclasses.replace(given, shuffle_buffer=4)
    message = "has changed at "
    refused_until_put_back(caplog, shuffled, "pretrain/fineweb_edu", files / "mirror", change, message)


def test_a_change_behind_what_was_read_is_taken_as_it_is(
    given: Settings, files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop(given, "pretrain/notes")
    (files / "notes" / "n38.txt").write_text("another note")
    assert goes_on(caplog, given, "pretrain/notes").meta == anew(given, "pretrain/notes")
    assert run(given, "pretrain/notes").reused


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(folder: Path, tiny_model_path: Path, quick_retries: None) -> Settings:
    """Settings of the hub."""
    return Settings(cache_dir=str(folder / "cache"), tokenizer_model=str(tiny_model_path), threads=1)


def add(loopback_hub: LoopbackHub, start: int) -> str:
    return loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=30, start=70_000 + start))


@pytest.mark.parametrize("refresh", [False, True])
def test_a_killed_build_goes_on_with_its_revision_when_main_has_moved(
    loopback_hub: LoopbackHub, hub: Settings, caplog: pytest.LogCaptureFixture, refresh: bool
) -> None:
    first = add(loopback_hub, 1_000)
    expected = anew(hub, "sft/dolly15k")
    stop(hub, "sft/dolly15k", refresh=refresh)
    second = add(loopback_hub, 1_100)
    meta = goes_on(caplog, hub, "sft/dolly15k", refresh=refresh).meta
    assert meta["source"]["revision"] == first and meta == expected
    assert run(hub, "sft/dolly15k").reused
    assert run(hub, "sft/dolly15k", refresh=True).meta["source"]["revision"] == second


def test_a_killed_refresh_goes_on_with_its_revision_over_a_committed_older_one(
    loopback_hub: LoopbackHub, hub: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    committed = add(loopback_hub, 2_000)
    assert run(hub, "sft/dolly15k").meta["source"]["revision"] == committed
    first = add(loopback_hub, 2_100)
    stop(hub, "sft/dolly15k", refresh=True)
    second = add(loopback_hub, 2_200)
    assert run(hub, "sft/dolly15k").reused
    assert read_meta(f"{hub.cache_dir}/sft/dolly15k/meta.json")["source"]["revision"] == committed
    meta = goes_on(caplog, hub, "sft/dolly15k", refresh=True).meta
    assert meta["source"]["revision"] == first and unfinished(hub, "sft/dolly15k") == {}
    assert meta["source"]["licence"] == "cc-by-sa-3.0"
    assert run(hub, "sft/dolly15k", refresh=True).meta["source"]["revision"] == second


def test_a_killed_build_of_other_settings_has_no_say_in_the_revision(loopback_hub: LoopbackHub, hub: Settings) -> None:
    add(loopback_hub, 3_000)
    stop(dataclasses.replace(hub, sft_val_frac=0.4), "sft/dolly15k")
    second = add(loopback_hub, 3_100)
    assert run(hub, "sft/dolly15k").meta["source"]["revision"] == second


def test_a_killed_build_of_a_revision_that_was_asked_for_goes_on_with_it_when_the_tag_has_moved(
    loopback_hub: LoopbackHub, hub: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    first = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=30, start=74_000), ref="v1")
    tagged = dataclasses.replace(hub, revision="dolly15k=v1")
    stop(tagged, "sft/dolly15k")
    loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=30, start=74_100), ref="v1")
    source = goes_on(caplog, tagged, "sft/dolly15k").meta["source"]
    assert (source["revision"], source["asked_revision"]) == (first, "v1")


def test_the_version_of_datasets_and_the_card_are_no_part_of_the_key(
    loopback_hub: LoopbackHub, hub: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(loopback_hub, 5_000)
    stop(hub, "sft/dolly15k")
    monkeypatch.setattr(origins, "version", lambda name: "99.0")
    said = dataclasses.replace(hub, licence="dolly15k=CC0 1.0", attribution="dolly15k=N. Obody")
    source = goes_on(caplog, said, "sft/dolly15k").meta["source"]
    assert source["datasets_version"] == "99.0"
    assert (source["licence"], source["attribution"]) == ("CC0 1.0", "N. Obody")


# --- committed, and not recorded --------------------------------------------------------------------------------------


def not_recorded(settings: Settings, key: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Build a cache that is committed, and killed before its recipe is written down; returns its meta."""

    def fail(*_: Any) -> None:
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(produce, "record_recipe", fail)
        with pytest.raises(Stopped):
            run(settings, key)
    path = cache_root(settings) / key
    assert path.is_symlink() and recorded_recipe(path) == {}
    assert len(unfinished(settings, key)) == 1  # the journal
    return read_meta(str(path / "meta.json"))


def unreadable(*_: Any, **__: Any) -> Iterator[Any]:
    raise AssertionError("the source was read")
    yield


READERS = {"pretrain/notes": "own_texts", "pretrain/roam": "roam_texts", "sft/dolly15k": "chats", "sft/oasst1": "chats"}


@pytest.mark.parametrize("key", sorted(READERS))
def test_a_committed_build_is_recorded_without_a_look_at_its_source(
    given: Settings, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    before = not_recorded(given, key, monkeypatch)
    version = os.readlink(cache_root(given) / key)
    with monkeypatch.context() as patched:
        patched.setattr(sources, READERS[key], unreadable)
        outcome = run(given, key)
    assert outcome.meta == before and os.readlink(outcome.path) == version
    assert recorded_recipe(outcome.path)["fingerprint"] == outcome.fingerprint
    assert unfinished(given, key) == {} and run(given, key).reused


@pytest.mark.parametrize("key", ["pretrain/notes", "sft/dolly15k"])
def test_a_committed_build_whose_source_has_changed_since_is_done_with_and_a_new_one_begins(
    given: Settings, files: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    before = not_recorded(given, key, monkeypatch)
    (files / "notes" / "n03.txt").write_text("another note")
    in_row(ROWS, changed_row)(files / "mirror")
    outcome = run(given, key)
    assert outcome.meta == anew(given, key) != before
    assert whole_version(outcome.path) == outcome.meta["content_sha256"]
    assert recorded_recipe(outcome.path)["fingerprint"] == outcome.fingerprint
    assert unfinished(given, key) == {} and run(given, key).reused


def test_a_committed_build_of_the_hub_is_recorded_with_the_revision_that_it_is_of(
    loopback_hub: LoopbackHub, hub: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = add(loopback_hub, 6_000)
    before = not_recorded(hub, "sft/dolly15k", monkeypatch)
    add(loopback_hub, 6_100)
    with monkeypatch.context() as patched:
        patched.setattr(sources, "chats", unreadable)
        assert run(hub, "sft/dolly15k").meta == before
    assert recorded_recipe(Path(hub.cache_dir) / "sft" / "dolly15k")["source"]["revision"] == first
    assert run(hub, "sft/dolly15k").reused


# --- what somebody else has written -----------------------------------------------------------------------------------


def sealed(path: Path, **changed: Any) -> Path:
    """Leave a build that is committed and was not recorded; returns its version."""

    def fail(meta: dict[str, Any]) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        pretrain(path, committed=fail, **changed)
    return path.resolve(strict=True)


@pytest.mark.parametrize("content", ["../../../x", "../" * 20 + "x", "0" * 64, "", 3, None, ["x"], "/dev/shm"], ids=str)
def test_a_version_that_says_another_content_than_the_journal_is_refused(folder: Path, content: Any) -> None:
    version = sealed(folder / "cache" / "c")
    (folder / "x").mkdir()
    (folder / "x" / ".precious.tmp").write_text("precious")
    meta = json.loads((version / "meta.json").read_bytes())
    write_meta(str(version / "meta.json"), {**meta, "content_sha256": content})
    before = {name: found for name, found in tree_of(folder).items() if not name.endswith("/lock")}
    with pytest.raises(CacheError, match=r"meta\.json: another content_sha256 than its build had\. To start "):
        pretrain(folder / "cache" / "c")
    assert {name: found for name, found in tree_of(folder).items() if not name.endswith("/lock")} == before


@pytest.mark.parametrize("content", ["../../x", "0" * 63, "0" * 65, "G" * 64, "0" * 64 + "\n", ""], ids=repr)
def test_a_commit_takes_no_content_that_is_no_sha256(folder: Path, content: str) -> None:
    work = versions_dir(folder / "c") / "building"
    work.mkdir(parents=True)
    (work / "meta.json").write_text("{}")
    before = tree_of(folder)
    with pytest.raises(CacheError, match=r"content_sha256 is .*, expected 64 hex digits"):
        versions.commit(work, folder / "c", content)
    assert tree_of(folder) == before


@pytest.mark.parametrize("place", ["train", "val", "index"])
def test_nothing_is_moved_out_of_a_folder_that_a_linked_one_stands_for(folder: Path, place: str) -> None:
    interrupt("pretrain", folder / "cache" / "c", at=60)
    (work,) = (path for path in versions_dir(folder / "cache" / "c").glob("building-*") if path.suffix == "")
    if (work / place).exists():
        (work / place).rename(folder / "outside")
    else:
        (folder / "outside").mkdir()
    names = {"index": ["train_ids.txt", "val_ids.txt"]}.get(place, [f"shard_{number:05}.bin" for number in range(9)])
    for name in names:
        if not (folder / "outside" / name).exists():
            (folder / "outside" / name).write_bytes(b"precious")
    (work / place).symlink_to(folder / "outside")
    before = tree_of(folder / "outside")
    with pytest.raises(CacheError, match=rf"{place}: a symbolic link, .*from scratch: rm -r .*journal"):
        pretrain(folder / "cache" / "c")
    assert tree_of(folder / "outside") == before


# --- adopted folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "no meta.json", "meta.json cut"])
def test_a_good_folder_in_the_way_takes_the_place_of_a_damaged_version_of_its_content(
    folder: Path, damage: str
) -> None:
    content = pretrain(folder / "c")["content_sha256"]
    version = (folder / "c").resolve()
    shutil.copytree(version, folder / "good")
    good = tree_of(folder / "good")
    shard = next(version.rglob("shard*"))
    if damage == "meta.json cut":
        (version / "meta.json").write_bytes((version / "meta.json").read_bytes()[:40])
    elif damage in ("changed", "cut"):
        shard.write_bytes(shard.read_bytes()[1:] + b"\0" * (damage == "changed"))
    else:
        (shard if damage == "missing" else version / "meta.json").unlink()
    (folder / "c").unlink()
    (folder / "good").rename(folder / "c")
    newest = pretrain(folder / "c", 5)["content_sha256"]
    assert whole_version(folder / "c") == newest != content
    assert tree_of(version) == good
    names = {entry.name for entry in versions_dir(folder / "c").iterdir()}
    assert names == {"lock", content[:12], newest[:12]}


def test_adoption_takes_the_first_number_that_is_free(folder: Path) -> None:
    def adopted(seed: int) -> Any:
        """Put a folder without a content sha256 into the way, and build over it; returns what the folder held."""
        pretrain(folder / "elsewhere", seed)
        shutil.copytree((folder / "elsewhere").resolve(), folder / "foreign")
        meta = json.loads((folder / "foreign" / "meta.json").read_bytes())
        del meta["content_sha256"]
        write_meta(str(folder / "foreign" / "meta.json"), meta)
        (folder / "c").unlink(missing_ok=True)
        (folder / "foreign").rename(folder / "c")
        held = tree_of(folder / "c")
        pretrain(folder / "c", seed + 10)
        return held

    first, second = adopted(0), adopted(1)
    place = versions_dir(folder / "c")
    assert [tree_of(place / f"adopted{number}") for number in (0, 1)] == [first, second]
    shutil.rmtree(place / "adopted0")
    third = adopted(2)
    assert [tree_of(place / f"adopted{number}") for number in (0, 1)] == [third, second]
    adopted(3)
    assert {path.name for path in place.glob("adopted*")} == {"adopted0", "adopted1", "adopted2"}


# --- documents and chats that are none --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (("test", "abc", "1"), "document 1: its split is 'test', expected 'train', 'val' or None"),
        (("", "abc"), "document 1: its split is '', expected"),
        ((None, None, "1"), "document 1: its text is a NoneType, expected a str"),
        ((None, b"abc"), "document 1: its text is a bytes, expected a str"),
    ],
    ids=["test", "no split", "None", "bytes"],
)
def test_a_document_of_no_good_form_is_named(folder: Path, document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        pretrain(folder / "c", items=[(None, "abc", "0"), document, *documents(0)], shuffle_buffer=None)
    assert not (folder / "c").exists()


class Picture:
    """Of which nobody has defined how it is shown: by its address."""


class Rows(list[Any]):
    """A list that shows its address."""

    __repr__ = object.__repr__


ODD: dict[str, Callable[[], Any]] = {
    "a content": lambda: [{"role": "user", "content": [Picture()]}, {"role": "assistant", "content": "x"}],
    "a role": lambda: [{"role": Picture(), "content": "x"}],
    "a message": lambda: [Picture()],
    "a chat": Picture,
    "a set": lambda: [{"role": "user", "content": {str(number) for number in range(50)}}],
    "a list of its own": lambda: Rows([{"role": "nobody", "content": "x"}]),
    "no reply": lambda: Rows([{"role": "user", "content": "x"}]),
}


def odd_chats(what: str) -> list[Any]:
    """Return chats of which one is dropped, and looks different in each process."""
    found = ITEMS["sft"](0)
    found[3] = ("odd", ODD[what]())
    return found


STOP_HERE = """
import sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from niels_gpt.build import stream
import test_build_identity as here
stream.BATCH_ITEMS = here.BATCH_ITEMS
for what in here.ODD:
    here.interrupt("sft", Path(sys.argv[2]) / what / "c", items=here.odd_chats(what))
"""


def test_a_chat_that_is_dropped_and_shows_its_address_goes_on_in_another_process(folder: Path) -> None:
    command = [sys.executable, "-c", STOP_HERE, str(Path(__file__).parent), str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "1"})
    held = [odd_chats(what) for what in ODD]  # at other addresses than those of the builds below
    for what in ODD:
        tokenizer = Counted()
        meta = sft(folder / what / "c", items=odd_chats(what), tokenizer=tokenizer)
        assert meta == sft(folder / what / "whole", items=odd_chats(what))
        assert 0 < len(tokenizer.texts) < 2 * len(held[0]) - 20, what


# --- errors of workers ------------------------------------------------------------------------------------------------


class NotUnpickled(Exception):
    """Python cannot make it anew from its one argument."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} {number}")


class NotPickled(Exception):
    """Holds what no other process can have."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.held = lambda: message


class Failing(ByteTokenizer):
    """Raises an error at one text of the small builds' documents."""

    def __init__(self, error: str) -> None:
        self.error = error

    def encode(self, text: str) -> list[int]:
        if text.startswith("33:"):
            errors = {
                "not unpickled": lambda: NotUnpickled("number", 33),
                "not pickled": lambda: NotPickled("number 33"),
            }
            raise errors.get(self.error, lambda: OverflowError("number 33"))()
        return super().encode(text)


def test_an_error_of_a_worker_comes_back_with_its_type_and_text(folder: Path) -> None:
    expected = {
        "not unpickled": (RuntimeError, "NotUnpickled: number 33"),
        "not pickled": (RuntimeError, "NotPickled: number 33"),
        "of Python's own": (OverflowError, "number 33"),
    }
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as executor:
        for error, (kind, text) in expected.items():
            with pytest.raises(kind, match=f"^{text}$") as caught:
                pretrain(folder / "c", tokenizer=Failing(error), executor=executor)
            assert type(caught.value) is kind
        whole = pretrain(folder / "c", executor=executor)  # the pool is alive
    assert whole_version(folder / "c") == whole["content_sha256"]
