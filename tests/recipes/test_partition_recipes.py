"""Partitions by the recipe: any order, any process, killed and repeated, give the bytes of one command; refusals."""

import dataclasses
import itertools
import json
import logging
import os
import random
import re
import shlex
import shutil
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.data_files import write
from support.disk import versions_dir
from support.errors import refused
from support.kinds import TEMPLATE
from support.made_tokenizers import made_tokenizer
from support.partition_builds import be_other_code, forget_prepared, prepared_partitions
from support.small_builds import locked
from support.tiny_texts import TINY_TEXTS

from niels_gpt.cache.meta import read_meta
from niels_gpt.commands.console import ExitCode
from niels_gpt.commands.main import main
from niels_gpt.engine.build import NoTextError
from niels_gpt.kinds.kind import Cache
from niels_gpt.kinds.look import stats
from niels_gpt.kinds.verify import find_damage
from niels_gpt.recipes.gc import collect
from niels_gpt.recipes.plan import RECIPES, plan, recipes
from niels_gpt.recipes.records import cache_root
from niels_gpt.recipes.request import restart
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.recipes.units import Units, build_token_cache
from niels_gpt.settings import Settings
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import UsageError
from niels_gpt.storage.remedies import build_command

TOTAL = 4
PATTERN = "texts/*.jsonl"


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Six files of rows below the current folder."""
    for number in range(6):
        rows = [{"text": f"{text} {number} {row}"} for row, text in enumerate(TINY_TEXTS[:12])]
        write(tmp_path / f"texts/{number}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "texts"


@pytest.fixture
def notes(texts, tiny_model_path):
    """Settings of pretrain/notes in partitions."""
    return own("cache", tiny_model_path)


def own(cache_dir, model, **given):
    pretrain = f"notes={PATTERN}"
    how = {
        "cache_dir": cache_dir,
        "tokenizer": str(model),
        "pretrain": pretrain,
        "partitions": TOTAL,
        "shard_bytes": 900,
    }
    return Settings(**{**how, **given})


def content_of(outcome):
    """Return the bytes of every file of a cache, by name."""
    return content_of_folder(outcome.path.resolve())


def content_of_folder(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def documents_of(path):
    """Return how often each document is in each split, as the bytes of its ids."""
    meta, found = read_meta(str(path / "meta.json")), Counter[tuple[str, bytes]]()
    for split in ("train", "val"):
        names = [record["name"] for record in meta["shards"][split]]
        ids = np.concatenate([np.empty(0, "u1"), *(np.fromfile(path / name, "u1") for name in names)])
        size = np.dtype(meta["token_dtype"].removesuffix("-le")).itemsize
        starts = np.load(path / "index" / f"{split}_docs.npy")
        found.update((split, ids[size * a : size * b].tobytes()) for a, b in itertools.pairwise(starts.tolist()))
    return found


def killed(settings, number, seconds, name="notes"):
    """Build a partition in a child and kill it after some time; return whether it had ended before."""
    child = os.fork()
    if child == 0:
        try:
            Units(settings, name).build(number)
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return bool(os.waitpid(child, 0)[1] == 0)


@pytest.mark.parametrize("kills", [0, pytest.param(8, marks=pytest.mark.slow)])
def test_any_order_and_kills_give_the_bytes_of_one_command(kills, notes, tiny_model_path):
    by_one = build_token_cache(own("one", tiny_model_path), "notes")
    drawn = random.Random(5)
    for _ in range(kills):
        killed(notes, drawn.randrange(TOTAL), drawn.uniform(0, 0.06))
    made = [Units(notes, "notes").build(number) for number in (2, 0, 3, 1)]
    assert [each.partition.number for each in made] == [2, 0, 3, 1]
    sealed = Units(notes, "notes", fixes=False).seal()
    assert content_of(sealed) == content_of(by_one) and not sealed.reused
    assert os.readlink(sealed.path) == os.readlink(by_one.path), "the version is named by its content"
    assert not list(versions_dir(sealed.path).glob("partitions-*"))
    assert all(each.reused for each in (build_token_cache(notes, "notes"), Units(notes, "notes", fixes=False).seal()))
    again = Units(notes, "notes").build(2)
    assert again.reused and again.meta["partitions"]["total"] == TOTAL and Units(notes, "notes").plan is None


def test_a_repeat_does_nothing_and_restart_builds_one_again(notes):
    first = Units(notes, "notes").build(1)
    plan = Units(notes, "notes").plan
    assert plan is not None and not first.reused and first.meta["partition"]["plan"] == plan.sha256
    assert Units(notes, "notes").build(1).reused
    Units(notes, "notes").restart(1)
    again = Units(notes, "notes").build(1)
    assert not again.reused and again.meta == first.meta


def test_two_at_once_on_one_partition(notes):
    plan = Units(notes, "notes").plan
    assert plan is not None
    path, made = plan.unit_path(0), []
    waiting = threading.Thread(target=lambda: made.append(Units(notes, "notes").build(0, wait=True)))
    with locked(path):
        with refused("E503", f"pid {os.getpid()}") as caught:
            Units(notes, "notes").build(0)
        assert caught.value.code == "E503"
        Units(notes, "notes").build(1)
        waiting.start()
    waiting.join()
    assert made[0].partition.number == 0


def test_two_commands_that_build_all_share_the_work(notes, tiny_model_path):
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda _: build_token_cache(notes, "notes"), range(2)))
    one = build_token_cache(own("one", tiny_model_path), "notes")
    assert [content_of(each) for each in outcomes] == [content_of(one)] * 2


def test_text_that_changes_while_partitions_are_built_is_refused(notes, texts):
    plan, changed = Units(notes, "notes").plan, texts / "1.jsonl"

    def change(*_):
        changed.write_text(json.dumps({"text": "in front"}) + "\n" + changed.read_text())

    assert plan is not None
    Units(notes, "notes").build(0)
    before = changed.read_bytes()
    made = prepared_partitions(notes, "notes")
    change()
    with refused("E306", "partition 1") as caught:
        made.build(1)
    assert caught.value.code == "E306" and not os.path.lexists(plan.unit_path(1))
    changed.write_bytes(before)  # the same bytes, written later: the plan stays
    assert not made.build(1).reused


def test_who_comes_after_the_seal_of_another_builds_nothing(notes):
    made = prepared_partitions(notes, "notes")
    assert made.plan is not None
    sealed = build_token_cache(notes, "notes")
    for again in (made.build(3, wait=True), made.seal()):
        assert again.reused and again.meta == sealed.meta
    assert not made.plan.folder.exists()
    restart(notes, "pretrain/notes")
    with refused("E511", "plan.json") as caught:
        made.build(3, wait=True)
    assert caught.value.code == "E511" and not made.plan.folder.exists()


def test_seal_names_what_is_missing_and_its_commands_work(notes):
    with refused("E510", "pretrain/notes", "Build them") as caught:
        Units(notes, "notes", fixes=False).seal()
    assert caught.value.code == "E510"
    Units(notes, "notes").build(2)
    with refused("E510", "0-1, 3") as caught:
        Units(notes, "notes", fixes=False).seal()
    assert caught.value.code == "E510"
    _, *commands = caught.value.remedy.splitlines()
    assert len(commands) == TOTAL
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
    assert Units(notes, "notes", fixes=False).seal(deep=False).meta["partitions"]["total"] == TOTAL
    many = replace(notes, partitions=30)
    assert Units(many, "notes").plan is not None
    with refused("E510", "0-29") as caught:
        Units(many, "notes", fixes=False).seal()
    (command,) = caught.value.remedy.splitlines()[1:]
    assert command.startswith("niels-gpt build notes ") and "--partition " not in command


def test_seal_with_other_settings_names_them_and_those_of_the_plan(notes, tiny_model_path):
    for number in range(TOTAL):
        Units(notes, "notes").build(number)
    with refused("E511", "seed: 42 there, 7 here") as caught:
        Units(own("cache", tiny_model_path, seed=7), "notes", fixes=False).seal()
    assert caught.value.code == "E511"
    command = caught.value.remedy.partition("niels-gpt ")[2]
    assert main(shlex.split(command)) == 0
    with refused("E101", kind=UsageError):
        Units(own("cache", tiny_model_path, partitions=1), "notes", fixes=False).seal()


def test_seal_without_the_tokenizer_of_its_builds_trains_none(notes, tmp_path):
    without = dataclasses.replace(notes, tokenizer=None)
    with refused("E510") as caught:
        Units(without, "notes", fixes=False).seal()
    assert caught.value.code == "E510" and not (tmp_path / "cache/tokenizer").exists()
    for number in range(TOTAL):
        Units(notes, "notes").build(number)
    for settings in (without, dataclasses.replace(without, seed=7)):
        with refused("E511") as caught:
            Units(settings, "notes", fixes=False).seal()
        assert caught.value.code == "E511" and not (tmp_path / "cache/tokenizer").exists()
    assert main(shlex.split(caught.value.remedy.partition("niels-gpt ")[2])) == 0


def test_a_remedy_has_the_flags_of_the_plan_alone(notes, tiny_model_path, tmp_path):
    ids = write(tmp_path / "ids.txt", "0.jsonl#1\n")
    Units(dataclasses.replace(notes, exclude=str(ids)), "notes")
    with refused("E511", "--exclude") as caught:
        Units(notes, "notes", fixes=False).seal()
    assert caught.value.code == "E511" and "niels-gpt" not in caught.value.remedy
    other = own("other", tiny_model_path)
    Units(other, "notes")
    with refused("E511") as caught:
        Units(dataclasses.replace(other, exclude=str(ids)), "notes", fixes=False).seal()
    assert "--exclude" not in caught.value.remedy and "niels-gpt seal" in caught.value.remedy


def test_changed_text_has_a_plan_of_its_own(notes, texts, caplog, monkeypatch):
    Units(notes, "notes").build(0)
    old = Units(notes, "notes").plan
    os.utime(texts / "1.jsonl")  # the same bytes: read once more, and the plan stays
    assert Units(notes, "notes").plan == old
    with monkeypatch.context() as patched:
        forget_prepared(patched)
        assert Units(notes, "notes").plan == old
    write(texts / "1.jsonl", json.dumps({"text": "another"}) + "\n")
    with caplog.at_level(logging.WARNING):
        new = Units(notes, "notes").plan
    assert old is not None and new is not None and new.fingerprint != old.fingerprint
    warned = [record for record in caplog.records if getattr(record, "code", "") == "W507"]
    assert len(warned) == 1 and old.folder.name in warned[0].getMessage() and "the text" in warned[0].getMessage()
    assert not Units(notes, "notes").build(0).reused


def test_other_code_is_refused_and_restart_starts_over(notes, monkeypatch, tiny_model_path):
    with monkeypatch.context() as patched:
        be_other_code(patched)
        Units(notes, "notes").build(0)
    with refused("E511", "torch 0, here") as caught:
        Units(notes, "notes").build(1)
    assert caught.value.code == "E511"
    command = caught.value.remedy.splitlines()[0].rpartition("niels-gpt ")[2]
    assert "--restart" in command and main(shlex.split(command)) == 0
    assert Units(notes, "notes", fixes=False).seal().reused


def test_accepted_code_is_recorded(notes, monkeypatch):
    with monkeypatch.context() as patched:
        be_other_code(patched)
        Units(notes, "notes").build(0)
    with refused("E511", "torch 0, here") as caught:
        Units(notes, "notes")
    command = caught.value.remedy.rpartition("niels-gpt ")[2]
    assert "--accept-code" in command and main(shlex.split(command)) == 0
    meta = read_meta("cache/pretrain/notes/meta.json")
    assert meta["source"]["accepted_code"]["torch"][0] == "0" and meta["partitions"]["total"] == TOTAL
    assert dict(stats(cache_root(notes) / "pretrain/notes"))["accepted code"].startswith("partitions were built with")
    assert "accepted_code" not in build_token_cache(replace(notes, cache_dir="other"), "notes").meta["source"]


def test_other_numbers_of_partitions_between_change_no_bytes(notes, tiny_model_path):
    whole = own("cache", tiny_model_path, partitions=1)
    before, first = content_of(build_token_cache(whole, "notes")), content_of(build_token_cache(notes, "notes"))
    assert before != first
    build_token_cache(own("cache", tiny_model_path, partitions=3), "notes")
    assert content_of(build_token_cache(notes, "notes")) == first
    assert content_of(build_token_cache(whole, "notes")) == before


def test_partitions_hold_the_documents_of_the_whole_in_the_same_splits(notes, tiny_model_path):
    whole = documents_of(build_token_cache(own("whole", tiny_model_path, partitions=1), "notes").path)
    assert documents_of(build_token_cache(notes, "notes").path) == whole
    many = own("many", tiny_model_path, partitions=9)  # more than there are files
    assert documents_of(build_token_cache(many, "notes").path) == whole


def test_what_is_built_whole_is_said(tmp_path, tiny_model_path, caplog):
    settings = Settings(source_root="sample", cache_dir=str(tmp_path), tokenizer=str(tiny_model_path), partitions=TOTAL)
    with caplog.at_level(logging.WARNING):
        outcomes = [RECIPES[key](settings) for key in ("trees/oasst1", "pretrain/gutenberg")]
    assert [record.code for record in caplog.records if getattr(record, "code", "") == "W505"] == ["W505"]
    with refused("E101", "trees/oasst1", kind=UsageError):
        Units(settings, "trees/oasst1")
    assert ["partitions" in outcome.meta for outcome in outcomes] == [False, True]


def test_a_listing_spares_reading_the_text_again(notes, texts):
    """Files of the same names, sizes and times are not read for their fingerprint."""
    plan = Units(notes, "notes").plan
    path = texts / "0.jsonl"
    about, text = path.stat(), path.read_bytes()
    path.write_bytes(text[::-1])
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert Units(notes, "notes").plan == plan
    observed = str(resolve_source(notes, "notes").provenance(None)["fingerprint"])
    new = Units(notes, "notes", observed=observed).plan
    assert new is not None and new != plan and Units(notes, "notes").plan == new
    path.write_bytes(text)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert plan is not None and Units(notes, "notes", observed=plan.content["source"]["fingerprint"]).plan == plan
    assert Units(notes, "notes").plan == plan
    os.utime(path)
    for number in range(TOTAL):
        Units(notes, "notes").build(number)
    assert plan.folder.joinpath("listings").is_file() and not Units(notes, "notes", fixes=False).seal().reused
    os.utime(path)
    assert all(Units(notes, "notes", fixes=False).seal().reused for _ in range(2))


# --- one damaged file of a sealed cache ---


def plans():
    """Return the folders of the plans of pretrain/notes."""
    return list(versions_dir(Path("cache/pretrain/notes")).glob("partitions-*"))


def sealed(notes):
    """Build and seal pretrain/notes; return its folder and the bytes of all its files."""
    outcome = build_token_cache(notes, "notes")
    return outcome.path.resolve(), content_of(outcome)


def flipped(path, at):
    """Flip a bit of a file that other names share: the other names keep the good bytes."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.unlink()
    path.write_bytes(content)


def told(capsys, command):
    """Run a command; return its status, the command that it names as next, and the partitions that it built."""
    capsys.readouterr()
    status = main(shlex.split(command)[1:])
    out = "".join(capsys.readouterr())
    named = re.findall(r"^next: (.*)$", out, re.MULTILINE)
    return status, named[0] if named else "", [int(found) for found in re.findall(r"partition (\d+) of 4:.* in ", out)]


def mended(capsys, cache):
    """Run what verify prints, and what that prints, until verify finds nothing; return which partitions were built."""
    verify, built = f"niels-gpt verify {cache} --deep", []
    status, command, _ = told(capsys, verify)
    assert status == ExitCode.DAMAGED and "--partition " in command, command
    for _ in range(TOTAL + 2):
        status, command, some = told(capsys, command)
        built += some
        assert status == 0
        if not command or not command.startswith("niels-gpt build"):
            break
    assert told(capsys, verify)[0] == 0
    return built


def before(meta, key, number):
    """Return how many documents or shards of a split the partitions before one have."""
    return sum(each[key] for each in meta["partitions"]["of_each"][:number])


def shard_of(root, meta, split, number):
    """Return the first shard of a partition."""
    return root / meta["shards"][split][before(meta, f"{split}_shards", number)]["name"]


DAMAGES = {
    "a bit of a shard": lambda root, meta: flipped(shard_of(root, meta, "train", 2), 9),
    "no shard": lambda root, meta: shard_of(root, meta, "train", 2).unlink(),
    "a short shard": lambda root, meta: os.truncate(shard_of(root, meta, "val", 2), 1),
    "checksums": lambda root, meta: flipped(root / "index/crc32.bin", 4 * before(meta, "train_shards", 2)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_names_the_command_that_mends_one_partition(damage, notes, capsys):
    root, good = sealed(notes)
    DAMAGES[damage](root, read_meta(root / "meta.json"))
    assert mended(capsys, "cache/pretrain/notes") == [2]
    assert content_of_folder(root) == good and not plans()
    assert Units(notes, "notes").plan is None


@pytest.mark.parametrize("split", ["train", "val"])
def test_index_and_ids_are_mended_by_the_partitions_that_have_their_block(split, notes, capsys):
    root, good = sealed(notes)
    meta = read_meta(root / "meta.json")
    at = 128 + 8 * before(meta, f"{split}_docs", 1)
    flipped(root / f"index/{split}_docs.npy", at)
    assert mended(capsys, "cache/pretrain/notes") == [0, 1] and content_of_folder(root) == good
    ids = (root / f"index/{split}_ids.txt").read_bytes().splitlines(keepends=True)
    first = before(meta, f"{split}_docs", 3)
    for wrong in (0, sum(map(len, ids[:first]))):  # of the first partition, and of the first and the last
        flipped(root / f"index/{split}_ids.txt", wrong)
    assert mended(capsys, "cache/pretrain/notes") == [0, 1, 2, 3] and content_of_folder(root) == good
    flipped(root / f"index/{split}_docs.npy", 3)  # the header
    flipped(root / f"index/{split}_docs.npy", len(good[f"index/{split}_docs.npy"]) - 8)
    flipped(root / "index/crc32.bin", len(good["index/crc32.bin"]) - 1)
    assert mended(capsys, "cache/pretrain/notes") == [0] and content_of_folder(root) == good


def test_of_several_damaged_files_each_is_mended_by_its_partition(notes, capsys):
    root, good = sealed(notes)
    meta = read_meta(root / "meta.json")
    for number in (1, 3):
        shard_of(root, meta, "train", number).unlink()
    _, found = Units(notes, "notes").mend(1)
    assert len(found.files) == 1 and plans(), "the cache is not whole yet"
    assert mended(capsys, "cache/pretrain/notes") == [3] and content_of_folder(root) == good and not plans()
    for number in (1, 3):  # nothing tells the second one: the cache is built again
        flipped(root / "index/crc32.bin", 4 * before(meta, "train_shards", number))
    assert mended(capsys, "cache/pretrain/notes") == [1] and content_of_folder(root) == good and not plans()
    os.truncate(root / "index/train_docs.npy", 200)
    _, command, _ = told(capsys, "niels-gpt verify cache/pretrain/notes --deep")
    assert "--restart" in command and "--partition " not in command, "bytes of several partitions are lost"
    assert told(capsys, command)[0] == 0 and content_of_folder(Path("cache/pretrain/notes").resolve()) == good


def test_nothing_is_written_through_a_link(notes, tmp_path):
    root, _ = sealed(notes)
    flipped(sorted(root.glob("train/*"))[0], 5)
    shutil.copytree(root, tmp_path / root.name)
    wrong = content_of_folder(tmp_path / root.name)
    Path("cache/pretrain/notes").unlink()
    Path("cache/pretrain/notes").symlink_to(tmp_path / root.name)
    with refused("E205", "one of its versions"):
        Units(notes, "notes").mend(0)
    assert content_of_folder(tmp_path / root.name) == wrong


def test_a_file_that_an_export_shares_is_replaced_and_not_written(notes, tmp_path):
    root, good = sealed(notes)
    shard = next(path for path in sorted(root.glob("train/*")))
    flipped(shard, 5)
    os.link(shard, tmp_path / "other")
    wrong = shard.read_bytes()
    _, found = Units(notes, "notes").mend(0)
    assert found == ([f"train/{shard.name}"], [], None) and content_of_folder(root) == good
    assert (tmp_path / "other").read_bytes() == wrong
    made, found = Units(notes, "notes").mend(3)
    assert found == ([], [], None) and not made.reused and content_of_folder(root) == good


def test_other_bytes_of_the_text_mend_nothing(notes, texts, capsys):
    root, _ = sealed(notes)
    flipped(sorted(root.glob("train/*"))[0], 5)
    wrong = content_of_folder(root)
    for path in texts.iterdir():  # of the same size and time: nobody sees that they were changed
        about, text = path.stat(), path.read_text()
        path.write_text(text.replace("a", "e"))
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    for _ in range(2):
        with refused("E306", "partition 0", "niels-gpt build notes --restart"):
            Units(notes, "notes").mend(0)
    assert content_of_folder(root) == wrong and not plans()
    write(texts / "1.jsonl", json.dumps({"text": "another"}) + "\n")
    assert Units(notes, "notes").mend(0) is None and content_of_folder(root) == wrong


def test_a_killed_mending_goes_on_and_other_commands_keep_its_plan(notes, capsys, monkeypatch):
    root, good = sealed(notes)
    flipped(sorted(root.glob("train/*"))[0], 5)
    wrong = content_of_folder(root)
    with monkeypatch.context() as patched:
        patched.setattr("niels_gpt.storage.fileio.rename", stopped_at("mended"))
        with pytest.raises(KeyboardInterrupt):
            Units(notes, "notes").mend(0)
    assert content_of_folder(root) == wrong
    assert build_token_cache(notes, "notes").reused and Units(notes, "notes").build(0).reused
    assert not [
        line for line in collect(cache_root(notes), dry_run=False) if "removed" in line and "partitions" in line
    ]
    made, found = Units(notes, "notes").mend(0)
    assert made.reused and len(found.files) == 1 and content_of_folder(root) == good
    assert not plans()


def stopped_at(name):
    """Return a rename that is stopped before it moves a file of this name."""
    rename = fileio.rename

    def stop(path, new):
        if Path(path).name == name:
            raise KeyboardInterrupt
        rename(path, new)

    return stop


# --- chats and recorded rollouts --------------------------------------------------------------------------------------

FAMILIES = ("sft", "templated", "rollouts")


def rows_of(number, count):
    """Return chats and, for each, a group of one or two samples."""
    chats, samples = [], []
    for row in range(count):
        turns = (f"{TINY_TEXTS[row % 12]} {number} {row}", f"answer {number} {row}")
        chats.append([{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns, strict=True)])
        ids = {"group": f"{number} {row}", "prompt_ids": [1, row, number], "reward": 0.5 * row}
        samples += [{**ids, "completion_ids": [2, each]} for each in range(row % 2 + 1)]
    return [{"messages": messages} for messages in chats], samples


@pytest.fixture
def of_family(tmp_path, monkeypatch, tiny_model_path, request):
    """Settings of own chats, of the same by a chat template, or of rollouts, and the key of their cache."""
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        chats, samples = rows_of(number, 30)
        write(tmp_path / f"chats/{number}.jsonl", "".join(json.dumps(row) + "\n" for row in chats) + "no row\n")
        write(tmp_path / f"steps/{number}.jsonl", "no row\n" + "".join(json.dumps(row) + "\n" for row in samples))
    how = {"cache_dir": "cache", "partitions": TOTAL, "sft_val_frac": 0.2, "rollouts_val_frac": 0.2}
    if request.param == "rollouts":
        return Settings(rollouts="steps=steps/*.jsonl", **how), "rollouts/steps"
    if request.param == "templated":
        write(tmp_path / "marks.jinja", TEMPLATE)
        how |= {"chat_template": "marks.jinja", "tokenizer": str(made_tokenizer("small qwen2"))}
    return Settings(sft="chats=chats/*.jsonl", **{"tokenizer": str(tiny_model_path), **how}), "sft/chats"


each_family = pytest.mark.parametrize("of_family", FAMILIES, indirect=True)


def built(settings, key):
    return recipes(settings)[key](settings)


def items_of(path):
    """Return how often each item is in each split."""
    cache = Cache.open(path)
    return {split: Counter(cache.kind.digests(cache, split)) for split in ("train", "val")}


@each_family
@pytest.mark.parametrize("kills", [0, pytest.param(8, marks=pytest.mark.slow)])
def test_partitions_of_chats_and_rollouts_in_any_order_have_the_bytes_of_one_command(kills, of_family):
    settings, key = of_family
    name, drawn = key.rpartition("/")[2], random.Random(5)
    for _ in range(kills):
        killed(settings, drawn.randrange(TOTAL), drawn.uniform(0, 0.06), name)
    made = [Units(settings, name).build(number) for number in (2, 0, 3, 1)]
    assert not any(each.reused for each in made) or kills
    assert Units(settings, name).build(2).reused
    sealed = Units(settings, name, fixes=False).seal()
    by_one = built(replace(settings, cache_dir="one"), key)
    assert content_of(sealed) == content_of(by_one) and not sealed.reused and built(settings, key).reused
    assert not list(versions_dir(sealed.path).glob("partitions-*"))
    if key == "rollouts/steps":
        assert not Path("cache/tokenizer").exists() and sealed.meta["tokenizer_sha256"] is None


@each_family
def test_partitions_of_chats_and_rollouts_hold_what_the_whole_holds_in_the_same_splits(of_family):
    settings, key = of_family
    whole = built(replace(settings, cache_dir="whole", partitions=1), key)
    items, meta = items_of(whole.path), whole.meta
    same = ("totals", "dropped", "duplicates", "supervised_tokens", "loss_tokens", "pairs_after", "utf8_bytes")
    for total in (3, 8):
        many = built(replace(settings, cache_dir=str(total), partitions=total), key)
        assert items_of(many.path) == items and min(map(len, items.values())) > 3
        assert {each: many.meta.get(each) for each in same} == {each: meta.get(each) for each in same}
        assert many.meta["source"]["counters"] == meta["source"]["counters"] == {"unreadable_row": 3}
        assert many.meta["partitions"]["total"] == total and find_damage(many.path, deep=True) == []


@each_family
def test_a_seal_of_chats_and_rollouts_names_what_is_missing_and_its_commands_work(of_family):
    settings, key = of_family
    name = key.rpartition("/")[2]
    Units(settings, name).build(2)
    with refused("E510", "0-1, 3") as caught:
        Units(settings, name, fixes=False).seal()
    for command in caught.value.remedy.splitlines()[1:]:
        assert main(shlex.split(command)[1:]) == 0
    assert Units(settings, name, fixes=False).seal().reused
    with refused("E510") as caught:
        Units(replace(settings, seed=7), name, fixes=False).seal()
    assert main(shlex.split(caught.value.remedy.partition("niels-gpt ")[2])) == 0


@each_family
def test_a_damaged_cache_of_chats_or_rollouts_is_built_again_as_a_whole(of_family, capsys):
    settings, key = of_family
    root = built(settings, key).path.resolve()
    good = content_of_folder(root)
    flipped(root / "train_tokens.bin", 9)
    status, command, _ = told(capsys, f"niels-gpt verify cache/{key} --deep")
    assert status == ExitCode.DAMAGED and "--partitions 4" in command and "--partition " not in command
    assert told(capsys, build_command(settings, key, "--partition", "2", "--restart"))[0] == ExitCode.USAGE
    assert told(capsys, command)[0] == 0 and content_of_folder(Path(f"cache/{key}").resolve()) == good


@each_family
def test_a_dry_run_and_the_last_lines_count_what_partitions_hold(of_family, capsys):
    settings, key = of_family
    thing = "group" if key == "rollouts/steps" else "example"
    assert main(shlex.split(build_command(settings, key, "--partition", "1"))[1:]) == 0
    assert re.search(rf"{key}: partition 1 of 4: \d+ {thing}s, ", capsys.readouterr().out)
    (item,) = [each for each in plan(settings, [key]) if each.key == key]
    assert item.action == "build in 4 partitions: 1 finished, 3 missing"
    built(settings, key)
    (item,) = [each for each in plan(settings, [key]) if each.key == key]
    assert item.action == "up to date"


@pytest.mark.parametrize("of_family", ["templated"], indirect=True)
def test_partitions_without_a_chat_that_is_kept_say_what_helps(of_family):
    settings, key = of_family
    lone = {"messages": [{"role": "user", "content": "a question without a reply"}]}
    write(Path("lone.jsonl"), f"{json.dumps(lone)}\n" * 9)
    for partitions in (1, 4):
        with pytest.raises(NoTextError, match=r"'no_supervised': 9.*--loss-on") as caught:
            built(replace(settings, sft="chats=lone.jsonl", partitions=partitions), key)
        assert caught.value.code == "E303"


@pytest.mark.parametrize("of_family", ["rollouts"], indirect=True)
def test_a_seal_says_what_is_a_matter_of_all_rollouts(of_family, caplog):
    settings, key = of_family
    write(Path("big.jsonl"), "".join(json.dumps({"ids": [1, 2, number]}) + "\n" for number in range(4_990, 5_001)))
    built(replace(settings, tokenizer=str(made_tokenizer("t5")), rollouts="steps=big.jsonl"), key)
    said = [record.getMessage() for record in caplog.records if "ids_beyond_tokenizer" in record.getMessage()]
    assert len(said) == 1 and "5,000" in said[0]


# --- real sources -----------------------------------------------------------------------------------------------------

PRETRAIN = ("fineweb_edu", "wikitext", "roam", "gutenberg")
CHATS = ("dolly15k", "oasst1")


def _same_documents(name, one, many):
    if name in CHATS:
        whole, parts = (build_token_cache(each, name) for each in (one, many))
        assert items_of(parts.path) == items_of(whole.path)
        assert [parts.meta[key] for key in ("totals", "dropped")] == [whole.meta[key] for key in ("totals", "dropped")]
        assert parts.meta["source"]["counters"] == whole.meta["source"]["counters"]
        return
    whole, parts = (documents_of(build_token_cache(each, name).path) for each in (one, many))
    meta = read_meta(str(cache_root(one) / f"pretrain/{name}/meta.json"))
    if "nearest" in meta["split_rule"] and min(meta["docs"].values()) < 2:  # the whole moved one to an empty split
        whole, parts = (Counter({("", ids): count for (_, ids), count in each.items()}) for each in (whole, parts))
    assert parts == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PRETRAIN, *CHATS])
def test_the_sample_in_partitions_has_the_documents_of_the_whole(name, tmp_path, tiny_model_path):
    common = {"source_root": "sample", "tokenizer": str(tiny_model_path)}
    one = Settings(cache_dir=str(tmp_path / "one"), **common)
    _same_documents(name, one, Settings(cache_dir=str(tmp_path / "many"), partitions=8, **common))


@pytest.mark.real_text
@pytest.mark.skipif("NIELS_GPT_TEST_DATA" not in os.environ, reason="NIELS_GPT_TEST_DATA names no mirror")
@pytest.mark.parametrize("name", [*PRETRAIN, *CHATS])
def test_a_mirror_in_partitions_has_the_documents_of_the_whole(name, tmp_path, tiny_model_path):
    common = {"source_root": os.environ["NIELS_GPT_TEST_DATA"], "tokenizer": str(tiny_model_path)}
    one = Settings(cache_dir=str(tmp_path / "one"), **common)
    _same_documents(name, one, Settings(cache_dir=str(tmp_path / "many"), partitions=8, **common))
