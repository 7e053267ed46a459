"""Disks that are full or read-only, and sources that vanish: the error names them, and nothing that was done is lost.

The disks are real ones: small tmpfs in a mount namespace of a process of their own, which is this file as a script.
"""

import contextlib
import errno
import functools
import gc
import json
import logging
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.byte_tokenizer import build, train_text
from support.disk import versions_dir
from support.errors import refused
from support.fault_builds import (
    OLD,
    TEXTS,
    Heard,
    answer,
    asking,
    build_new,
    documents_in_journal,
    error_of,
    said_to_be_kept,
    skip_unless,
)
from support.power_loss import tree_of
from support.readings import read_in_small_batches
from support.small_builds import batches_of

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.recipes.plan import recipes
from niels_gpt.settings import Settings

PAGE = 4096


@pytest.fixture
def batches_of_ten(monkeypatch):
    batches_of(monkeypatch, 10)


def mount(folder, *options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)], check=True)


def with_less_and_less_room(name, kind, unit):
    """Build on a disk with 0, 1, 2, ... pages (or inodes) left, until it is enough; returns what happened each time."""
    folder, heard, found = Path(name), Heard(), []
    cache = folder / "c"
    mount(folder, "size=8m")
    build(cache, [OLD])
    build_new(cache, kind)
    expected = tree_of(folder)
    subprocess.run(["umount", str(folder)], check=True)
    for room in range(200):
        mount(folder, "size=8m")
        build(cache, [OLD])
        old = tree_of(cache.resolve())
        disk = os.statvfs(folder)
        used = disk.f_blocks - disk.f_bfree if unit == "pages" else disk.f_files - disk.f_ffree
        limit = f"size={(used + room) * PAGE}" if unit == "pages" else f"nr_inodes={used + room}"
        mount(folder, "remount", limit)
        outcome = None
        try:
            build_new(cache, kind)
        except OSError as error:  # which holds open files, so long as it is there
            outcome = {
                "errno": error.errno,
                "file": str(error.filename),
                "message": str(error),
                "kept": documents_in_journal(cache) if any(folder.glob(".versions/c/*.journal/journal.jsonl")) else 0,
                "said": said_to_be_kept(error),
                "old is readable": train_text(cache) == OLD and tree_of(cache.resolve()) == old,
            }
        if outcome is not None:
            mount(folder, "remount", "size=8m" if unit == "pages" else "nr_inodes=0")
            heard.numbers.clear()
            build_new(cache, kind)
            found.append({**outcome, "resumed": list(heard.numbers), "same bytes": tree_of(folder) == expected})
        gc.collect()  # Python 3.13 leaves the error, and with it open files, in a cycle
        subprocess.run(["umount", str(folder)], check=True)
        if outcome is None:
            return found
    raise AssertionError(f"200 {unit} were not enough")


@pytest.fixture(scope="module")
def namespace():
    """Asks this file as a script, as root of a namespace in which it may mount."""
    skip_unless("unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
    with asking("unshare", "-rm", sys.executable, __file__) as ask:
        yield ask


META, BEGIN, SPLITS = r"\.meta\.json\.\w+\.tmp", r"building-\w{12}(\.journal)?", r"(train|val)_tokens\.bin"
DOCS, SHARD = r"(train|val)_docs\.npy", r"shard_\d{5}\.bin"
PHASES = {  # the files that some disk has to be too small for
    ("pretrain", "pages"): (SHARD, rf"{DOCS}|crc32\.bin|(train|val)_docs\.bin", META),
    ("sft", "pages"): (SPLITS, r"(train|val)_idx\.npy|\w+\.(bin|txt)", META),
    ("templated", "pages"): (SPLITS, r"(train|val)_loss\.bin", r"(train|val)_loss\.bits|(train|val)_idx\.npy", META),
    ("pretrain", "inodes"): (BEGIN, SHARD, DOCS, META, "link"),
    ("sft", "inodes"): (BEGIN, SPLITS, r"(train|val)_idx\.npy", META, "link"),
}


@pytest.mark.parametrize(
    ("kind", "unit"), [pytest.param(*each, marks=[pytest.mark.faults] * (each != ("sft", "pages"))) for each in PHASES]
)
def test_a_disk_full_at_any_moment_costs_nothing_done(namespace, tmp_path, kind, unit):
    found = namespace("full", tmp_path, kind, unit)
    for outcome in found:
        assert outcome["errno"] == errno.ENOSPC and outcome["old is readable"], outcome
        assert outcome["file"].startswith(str(tmp_path)) and outcome["file"] in outcome["message"], outcome
        assert "No space left on device" in outcome["message"], outcome
        assert outcome["said"] == outcome["kept"], outcome
        only_the_link = Path(outcome["file"]).name == "link"  # the version is there, so nothing of the build is left
        expected = [outcome["kept"]] if outcome["kept"] and not only_the_link else []
        assert outcome["resumed"] == expected and outcome["same bytes"], outcome
    names = {Path(outcome["file"]).name for outcome in found}
    for pattern in PHASES[kind, unit]:
        assert any(re.fullmatch(pattern, name) for name in names), (pattern, names)
    kept = [outcome["kept"] for outcome in found]
    assert kept == sorted(kept) and kept[-1] == len(TEXTS)  # at the end all is done but the description and the commit


@pytest.mark.usefixtures("batches_of_ten")
def test_a_file_that_may_not_grow_is_named_and_goes_on_later(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for name in ("expected", "found"):
        build(tmp_path / name / "c", [OLD])
    build_new(tmp_path / "expected" / "c", shard_bytes=1 << 16)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, hard))
    try:
        with pytest.raises(
            OSError, match=r"File too large\. \d+ documents are done and kept.*train/shard_00000\.bin"
        ) as error:
            build_new(tmp_path / "found" / "c", shard_bytes=1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG
    assert 0 < said_to_be_kept(error.value) == documents_in_journal(tmp_path / "found" / "c") < len(TEXTS)
    assert train_text(tmp_path / "found" / "c") == OLD
    build_new(tmp_path / "found" / "c", shard_bytes=1 << 16)
    assert f"resuming after {said_to_be_kept(error.value)} documents" in caplog.text
    assert tree_of(tmp_path / "found") == tree_of(tmp_path / "expected")


def on_a_full_disk(name):
    """Fill a disk to the last byte, and make room with gc."""
    folder = Path(name)
    mount(folder, "size=1m")
    for text in ("one", "two", "three", OLD):
        build(folder / "c", [text])
    with open(folder / "filling", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * PAGE):
            pass
    free = os.statvfs(folder).f_bfree
    command = [sys.executable, "-m", "niels_gpt.cache.cli", "gc", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    left = [entry.name for entry in versions_dir(folder / "c").iterdir() if entry.is_dir()]
    return {
        "free": free,
        "status": done.returncode,
        "error": done.stderr,
        "left": left,
        "text": train_text(folder / "c"),
    }


def test_gc_makes_room_on_a_disk_that_is_full_to_the_last_byte(namespace, tmp_path):
    found = namespace("gc", tmp_path)
    assert found["free"] == 0 and found["text"] == OLD
    assert (found["status"], len(found["left"])) == (0, 2), found["error"]


def on_a_read_only_disk(name):
    """Build on a disk that is read-only, and on the same one when it may be written again."""
    folder = Path(name)
    mount(folder, "size=1m")
    build(folder / "c", [OLD])
    before = tree_of(folder)
    mount(folder, "remount", "ro")
    found = error_of(folder / "c")
    found["same"] = tree_of(folder) == before and train_text(folder / "c") == OLD
    mount(folder, "remount", "rw")
    build(folder / "c", ["new"])
    return {**found, "then": train_text(folder / "c")}


def test_a_read_only_disk_is_named_and_left_as_it_is(namespace, tmp_path):
    found = namespace("read-only", tmp_path)
    assert found["errno"] == errno.EROFS and found["same"] and found["then"] == "new"
    assert re.search(
        r"Read-only file system; user \S+ cannot write there\. Give it the permission",
        found["message"],
    )
    assert str(tmp_path / ".versions" / "c" / "lock") in found["message"]


@pytest.fixture
def quick_checkpoints(monkeypatch):
    """Let the recipes, too, make a batch of each document and a checkpoint after each batch."""
    batches_of(monkeypatch, 1)
    for module, builder in (("documents", build_pretrain), ("chats", build_sft)):
        quick = functools.partial(builder, checkpoint_seconds=0)
        monkeypatch.setattr(f"niels_gpt.recipes.{module}.{builder.__name__}", quick)


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mirror_of(key, root):
    """Make a mirror of two files, or of many notes, and return the file that is read last."""
    rows = [{"text": f"Page {number} of the book."} for number in range(30)]
    if key == "pretrain/fineweb_edu":
        jsonl(root / "HuggingFaceFW/fineweb-edu/a.jsonl", rows)
        return jsonl(root / "HuggingFaceFW/fineweb-edu/b.jsonl", rows)
    if key == "sft/dolly15k":
        chats = [{"instruction": row["text"], "context": "", "response": "Yes."} for row in rows]
        jsonl(root / "databricks/databricks-dolly-15k/a.jsonl", chats)
        return jsonl(root / "databricks/databricks-dolly-15k/b.jsonl", chats)
    (root / "roam").mkdir(parents=True)
    for number, row in enumerate(rows):
        (root / "roam" / f"{number:02d}.md").write_text(row["text"])
    return root / "roam" / "29.md"


@pytest.mark.usefixtures("quick_checkpoints")
@pytest.mark.parametrize("key", ["pretrain/fineweb_edu", "pretrain/roam", "sft/dolly15k"])
def test_a_file_of_a_mirror_that_is_removed_in_mid_build_is_named_and_the_recipe_goes_on_with_it_back(
    tmp_path,
    tiny_model_path,
    caplog,
    monkeypatch,
    key,
):
    caplog.set_level(logging.INFO)
    read_in_small_batches(monkeypatch, documents=4)  # the last file is read after the first documents
    last, away = mirror_of(key, tmp_path / "m"), tmp_path / "away"
    # No note at the end of the list may be of val, which is read behind train.
    common = {"tokenizer": str(tiny_model_path), "shuffle_buffer": 0, "roam_val_frac": 0}
    settings = Settings(source_root=str(tmp_path / "m"), threads=1, cache_dir=str(tmp_path / "found"), **common)

    def progress(documents, tokens, expected):
        if documents == 5 and last.exists():
            last.rename(away)

    with refused("E301", str(last), kind=FileNotFoundError):
        recipes(settings)[key](settings, progress=progress)
    cache = tmp_path / "found" / key
    kept = documents_in_journal(cache)
    assert 5 <= kept <= 30 and not cache.exists()
    away.rename(last)
    outcome = recipes(settings)[key](settings)
    assert f"resuming after {kept} documents of an earlier run" in caplog.text
    elsewhere = Settings(source_root=settings.source_root, cache_dir=str(tmp_path / "expected"), **common)
    whole = recipes(settings)[key](elsewhere)
    assert outcome.meta == whole.meta and tree_of(tmp_path / "found" / key) == tree_of(tmp_path / "expected" / key)
    assert [entry.name for entry in versions_dir(cache).iterdir() if "building" in entry.name] == []


if __name__ == "__main__":
    batches_of(pytest.MonkeyPatch(), 10)
    answer({"full": with_less_and_less_room, "gc": on_a_full_disk, "read-only": on_a_read_only_disk})
