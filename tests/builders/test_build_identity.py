"""What starts another build, what resumes a killed one, and what is refused."""

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import numbered_datasets
from support.byte_tokenizer import ByteTokenizer
from support.disk import read_recipe, versions_dir
from support.fault_builds import ENCODED_KINDS, die_at, interrupt
from support.power_loss import tree_of
from support.readings import forbid_reading, say_version_of_datasets
from support.small_builds import BUILDERS, ITEMS, Counted, whole_version

from niels_gpt.cache import CacheError
from niels_gpt.cache.meta import read_meta
from niels_gpt.recipes.plan import recipes
from niels_gpt.recipes.records import cache_root
from niels_gpt.settings import Settings

DOLLY = "databricks/databricks-dolly-15k"
NOTES = {f"n{number:02}.txt": f"This is the note {number}: " + "word " * (number % 7) for number in range(40)}


@pytest.fixture(autouse=True)
def logged(small_batches, caplog):
    caplog.set_level(logging.INFO, logger="niels_gpt")


@pytest.fixture
def files(mirror, folder):
    """A mirror, and user-defined notes beside it, that a test may change."""
    shutil.copytree(mirror, folder / "mirror")
    (folder / "notes").mkdir()
    for name, text in NOTES.items():
        (folder / "notes" / name).write_text(text)
    return folder


@pytest.fixture
def given(files, tiny_model_path):
    """Settings that build from them. One thread: the order in which a build comes forward is always the same."""
    places = {"source_root": str(files / "mirror"), "pretrain": f"notes={files / 'notes'}"}
    return Settings(cache_dir=str(files / "cache"), tokenizer=str(tiny_model_path), threads=1, **places)


class Stopped(Exception):
    """Raised where a build is to be stopped."""


def run(settings, key, **arguments):
    outcome = recipes(settings)[key](settings, **arguments)
    return outcome


def stop(settings, key, *, after=10, **arguments):
    """Leave the build of a recipe unfinished, with five documents at least in its journal."""

    def progress(documents, tokens, expected):
        if documents >= after:
            raise Stopped

    with pytest.raises(Stopped):
        run(settings, key, progress=progress, **arguments)
    assert unfinished(settings, key)


def unfinished(settings, key):
    """Return all unfinished builds of a cache: what lies in their folders, by folder."""
    folder = versions_dir(cache_root(settings) / key)
    return {entry.name: tree_of(entry) for entry in folder.glob("building-*")}


def from_scratch(settings, key, **arguments):
    """Return the meta of the same build in a cache folder of its own, to which nothing happens."""
    elsewhere = dataclasses.replace(settings, cache_dir=f"{settings.cache_dir}-from-scratch")
    try:
        return run(elsewhere, key, **arguments).meta
    finally:
        shutil.rmtree(elsewhere.cache_dir)


def resumed(caplog, settings, key, **arguments):
    """Run a recipe that resumes a stopped build."""
    caplog.clear()
    outcome = run(settings, key, **arguments)
    assert re.search(r"resuming after \d+ documents of an earlier run", caplog.text)
    assert whole_version(outcome.path) == outcome.meta["content_sha256"]
    return outcome


CHANGES = [
    ("pretrain/notes", {"own_val_frac": 0.5}),
    ("pretrain/notes", {"seed": 7}),
    ("pretrain/roam", {"roam_val_frac": 0.4}),
    ("pretrain/fineweb_edu", {"shuffle_buffer": 9}),
    ("sft/dolly15k", {"dolly_include_system": True}),
    ("sft/dolly15k", {"sft_val_frac": 0.4}),
    ("sft/oasst1", {"oasst1_max_messages": 2}),
    ("sft/oasst1", {"oasst1_english_only": False}),
]


@pytest.mark.parametrize(("key", "change"), CHANGES, ids=lambda value: str(value))
def test_another_setting_is_another_build_and_leaves_the_first_one(given, caplog, key, change):
    changed = dataclasses.replace(given, **change)
    stop(given, key)
    first = unfinished(given, key)
    stop(changed, key)
    assert "an unfinished build that differs in " in caplog.text and "recipe" in caplog.text
    both = unfinished(given, key)
    assert len(both) == 2 * len(first) and both.items() >= first.items()
    assert resumed(caplog, changed, key).meta == from_scratch(changed, key)
    assert unfinished(given, key) == first
    assert resumed(caplog, given, key).meta == from_scratch(given, key)
    assert unfinished(given, key) == {}


@pytest.mark.parametrize("change", [{"licence": "notes=CC0 1.0"}, {"attribution": "notes=N. Otes"}, {"threads": 2}])
def test_what_is_only_said_is_no_key(given, caplog, change):
    stop(given, "pretrain/notes")
    changed = dataclasses.replace(given, **change)
    assert resumed(caplog, changed, "pretrain/notes").meta == from_scratch(changed, "pretrain/notes")
    assert unfinished(given, "pretrain/notes") == {}


class Shifted(ByteTokenizer):
    """Without a model, and with the vocabulary of the other one: only the ids of a text tell them apart."""

    def encode(self, text):
        return [byte + 11 for byte in text.encode()]

    def decode(self, ids):
        return bytes(id - 11 for id in ids if 11 <= id < 267).decode(errors="ignore")


@ENCODED_KINDS
def test_a_build_does_not_go_on_with_another_tokenizer_that_has_no_model(folder: Path, kind: str) -> None:
    ours = BUILDERS[kind](folder / "ours")
    theirs = BUILDERS[kind](folder / "theirs", tokenizer=Shifted())
    assert ours["content_sha256"] != theirs["content_sha256"]
    assert {ours["tokenizer_sha256"], theirs["tokenizer_sha256"]} == {None}
    interrupt(kind, folder / "c", 35)
    before = {entry.name: tree_of(entry) for entry in versions_dir(folder / "c").glob("building-*")}
    assert BUILDERS[kind](folder / "c", tokenizer=Shifted()) == theirs
    assert whole_version(folder / "c") == theirs["content_sha256"]
    assert {entry.name: tree_of(entry) for entry in versions_dir(folder / "c").glob("building-*")} == before
    tokenizer = Counted()
    assert BUILDERS[kind](folder / "c", tokenizer=tokenizer) == ours
    assert 0 < len(tokenizer.texts) < len(ITEMS[kind](0))


Change = Callable[[Path], Any]
"""Changes one of the files of a source, given the folder of all of them."""


def journals(builds):
    return [tree["journal.jsonl"] for name, tree in sorted(builds.items()) if name.endswith(".journal")]


def in_rows(pattern, edit):
    """Return a change of the lines of the one file of a mirror that a pattern names."""

    def change(mirror):
        (path,) = mirror.glob(pattern)
        lines = path.read_text().splitlines(keepends=True)
        edit(lines)
        path.write_text("".join(lines))

    return change


def other_response(lines):
    lines[3] = json.dumps({**json.loads(lines[3]), "response": "another text"}) + "\n"


FINEWEB, ROWS = "HuggingFaceFW/fineweb-edu", "databricks/**/*.jsonl"


NOTE, ROW = "A note that was not there.\n", json.dumps({"text": "a page that was not there", "id": "new"}) + "\n"
CHANGED_FILES = {
    "a file changed": ("pretrain/notes", "notes", 0, lambda notes: (notes / "n03.txt").write_text("another note")),
    "a file added": ("pretrain/notes", "notes", 0, lambda notes: (notes / "n02a.txt").write_text("one more note")),
    "a file renamed": ("pretrain/notes", "notes", 0, lambda notes: (notes / "n03.txt").rename(notes / "n03a.txt")),
    "a row": ("sft/dolly15k", "mirror", 0, in_rows(ROWS, other_response)),
    "a row more": ("sft/dolly15k", "mirror", 0, in_rows(ROWS, lambda lines: lines.insert(0, lines[9]))),
    "a row less": ("pretrain/fineweb_edu", "mirror", 0, in_rows(f"{FINEWEB}/*.jsonl", lambda lines: lines.pop(0))),
    "one less, shuffled": (
        "pretrain/fineweb_edu",
        "mirror",
        4,
        in_rows(f"{FINEWEB}/*.jsonl", lambda lines: lines.pop(0)),
    ),
    "rows": ("pretrain/fineweb_edu", "mirror", 0, lambda mirror: (mirror / FINEWEB / "train-0.jsonl").write_text(ROW)),
    "a note": ("pretrain/roam", "mirror", 0, lambda mirror: (mirror / "roam" / "A note more.md").write_text(NOTE)),
}


@pytest.mark.parametrize("what", CHANGED_FILES)
def test_files_that_change_under_a_killed_build_are_refused_until_they_are_put_back(given, files, caplog, what):
    key, name, shuffle_buffer, change = CHANGED_FILES[what]
    settings, folder = dataclasses.replace(given, shuffle_buffer=shuffle_buffer), files / name
    expected = from_scratch(settings, key)
    stop(settings, key)
    shutil.copytree(folder, files / "kept")
    before = unfinished(settings, key)
    change(folder)
    with pytest.raises(CacheError, match="its source has changed at "):
        run(settings, key)
    refused = unfinished(settings, key)  # cut to what the journal speaks of, which is as it was
    assert journals(refused) == journals(before) and not (cache_root(settings) / key).exists()
    with pytest.raises(CacheError, match="its source has changed at "):
        run(settings, key)
    assert unfinished(settings, key) == refused
    shutil.rmtree(folder)
    (files / "kept").rename(folder)
    assert resumed(caplog, settings, key).meta == expected
    assert unfinished(settings, key) == {}


@pytest.fixture
def hub(folder, tiny_model_path, quick_retries):
    """Settings of the hub."""
    return Settings(cache_dir=str(folder / "cache"), tokenizer=str(tiny_model_path), threads=1)


def add(loopback_hub, start):
    return loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=30, start=70_000 + start))


@pytest.mark.parametrize("refresh", [False, True])
def test_a_killed_build_goes_on_with_its_revision_when_main_has_moved(loopback_hub, hub, caplog, refresh):
    first = add(loopback_hub, 1_000)
    expected = from_scratch(hub, "sft/dolly15k")
    stop(hub, "sft/dolly15k", refresh=refresh)
    second = add(loopback_hub, 1_100)
    meta = resumed(caplog, hub, "sft/dolly15k", refresh=refresh).meta
    assert meta["source"]["revision"] == first and meta == expected
    assert run(hub, "sft/dolly15k").reused
    assert run(hub, "sft/dolly15k", refresh=True).meta["source"]["revision"] == second


def test_a_killed_refresh_goes_on(loopback_hub, hub, caplog):
    committed = add(loopback_hub, 2_000)
    assert run(hub, "sft/dolly15k").meta["source"]["revision"] == committed
    first = add(loopback_hub, 2_100)
    stop(hub, "sft/dolly15k", refresh=True)
    second = add(loopback_hub, 2_200)
    assert run(hub, "sft/dolly15k").reused
    assert read_meta(f"{hub.cache_dir}/sft/dolly15k/meta.json")["source"]["revision"] == committed
    meta = resumed(caplog, hub, "sft/dolly15k", refresh=True).meta
    assert meta["source"]["revision"] == first and unfinished(hub, "sft/dolly15k") == {}
    assert meta["source"]["licence"] == "cc-by-sa-3.0"
    assert run(hub, "sft/dolly15k", refresh=True).meta["source"]["revision"] == second


def test_a_killed_build_of_other_settings_has_no_say_in_the_revision(loopback_hub, hub):
    add(loopback_hub, 3_000)
    stop(dataclasses.replace(hub, sft_val_frac=0.4), "sft/dolly15k")
    second = add(loopback_hub, 3_100)
    assert run(hub, "sft/dolly15k").meta["source"]["revision"] == second


def test_a_killed_build_of_a_tag_goes_on_when_the_tag_the_card_and_the_version_of_datasets_have_moved(
    loopback_hub, hub, caplog, monkeypatch
):
    first = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=30, start=74_000), ref="v1")
    tagged = dataclasses.replace(hub, revision="dolly15k=v1")
    stop(tagged, "sft/dolly15k")
    loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=30, start=74_100), ref="v1")
    say_version_of_datasets(monkeypatch, "99.0")
    said = dataclasses.replace(tagged, licence="dolly15k=CC0 1.0", attribution="dolly15k=N. Obody")
    source = resumed(caplog, said, "sft/dolly15k").meta["source"]
    assert (source["revision"], source["asked_revision"], source["datasets_version"]) == (first, "v1", "99.0")
    assert (source["licence"], source["attribution"]) == ("CC0 1.0", "N. Obody")


def not_recorded(settings, key, monkeypatch):
    """Build a cache that is committed, and killed before its recipe is written down; returns its meta."""

    with monkeypatch.context() as patched:
        die_at(patched, "record", Stopped())
        with pytest.raises(Stopped):
            run(settings, key)
    path = cache_root(settings) / key
    assert path.is_symlink() and read_recipe(path) == {}
    assert len(unfinished(settings, key)) == 1  # the journal
    return read_meta(str(path / "meta.json"))


@pytest.mark.parametrize("key", ["pretrain/notes", "pretrain/roam", "sft/dolly15k", "sft/oasst1"])
def test_a_committed_build_is_recorded_unread(given, monkeypatch, key):
    before = not_recorded(given, key, monkeypatch)
    version = os.readlink(cache_root(given) / key)
    with monkeypatch.context() as patched:
        forbid_reading(patched)
        outcome = run(given, key)
    assert outcome.meta == before and os.readlink(outcome.path) == version
    assert read_recipe(outcome.path)["fingerprint"] == outcome.fingerprint
    assert unfinished(given, key) == {} and run(given, key).reused


@pytest.mark.parametrize("key", ["pretrain/notes", "sft/dolly15k"])
def test_a_committed_build_whose_source_has_changed_since_is_done_with_and_a_new_one_begins(
    given, files, monkeypatch, key
):
    before = not_recorded(given, key, monkeypatch)
    (files / "notes" / "n03.txt").write_text("another note")
    in_rows(ROWS, other_response)(files / "mirror")
    outcome = run(given, key)
    assert outcome.meta == from_scratch(given, key) != before
    assert whole_version(outcome.path) == outcome.meta["content_sha256"]
    assert read_recipe(outcome.path)["fingerprint"] == outcome.fingerprint
    assert unfinished(given, key) == {} and run(given, key).reused


def test_a_committed_build_of_the_hub_is_recorded_with_the_revision_that_it_is_of(loopback_hub, hub, monkeypatch):
    first = add(loopback_hub, 6_000)
    before = not_recorded(hub, "sft/dolly15k", monkeypatch)
    add(loopback_hub, 6_100)
    with monkeypatch.context() as patched:
        forbid_reading(patched)
        assert run(hub, "sft/dolly15k").meta == before
    assert read_recipe(Path(hub.cache_dir) / "sft" / "dolly15k")["source"]["revision"] == first
    assert run(hub, "sft/dolly15k").reused
