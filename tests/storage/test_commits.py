"""A build is committed whole or not at all, and nobody who reads at that moment sees anything else (D11)."""

import gc
import getpass
import json
import os
import re
import shutil
import socket
import warnings
from pathlib import Path

import pytest
import torch
from support.byte_tokenizer import ByteTokenizer, build, train_text
from support.disk import versions_dir
from support.errors import refused
from support.power_loss import tree_of
from support.processes import open_in

from niels_gpt.cache import CacheError, PretrainTokenStreamDataset
from niels_gpt.cache.build_pretrain import build_stub
from niels_gpt.engine.meta import Source
from niels_gpt.storage import fileio


def tree(folder):
    """Return every file and link below a folder with its content or target."""
    return {name: content for name, content in tree_of(folder).items() if content is not None}


def entries_of(path):
    """Return the names of the finished versions, and of anything else that lies with them."""
    return {entry.name for entry in versions_dir(path).iterdir()} - {"lock"}


def real_folder(path, texts):
    """Put a real folder with a cache at `path`, as a copy from another machine is."""
    elsewhere = path.parent / "elsewhere"
    build(elsewhere / "c", texts)
    shutil.copytree(elsewhere / "c", path)
    shutil.rmtree(elsewhere)


def test_the_public_path_is_a_relative_link_to_a_version_named_by_its_content(tmp_path):
    meta = build(tmp_path / "cache" / "notes", ["a" * 30])
    assert os.readlink(tmp_path / "cache" / "notes") == f".versions/notes/{meta['content_sha256'][:12]}"
    (tmp_path / "cache").rename(tmp_path / "moved")
    assert train_text(tmp_path / "moved" / "notes") == "a" * 30


def test_a_rebuild_switches_the_link_and_keeps_the_old_version_for_its_readers(tmp_path):
    old = build(tmp_path / "c", ["a" * 30])
    dataset = PretrainTokenStreamDataset(tmp_path / "c" / "train", T=4, device="cpu")
    new = build(tmp_path / "c", ["b" * 30])
    assert train_text(tmp_path / "c") == "b" * 30
    assert entries_of(tmp_path / "c") == {old["content_sha256"][:12], new["content_sha256"][:12]}
    x, _ = dataset.get_batch(B=8, generator=torch.Generator().manual_seed(0))
    assert set(x.flatten().tolist()) == {ord("a") + 10}


def test_equal_content_is_one_version_with_the_newest_description(tmp_path):
    build(tmp_path / "c", ["a" * 30], num_tokens=30)
    build(tmp_path / "c", ["a" * 30], num_tokens=50)
    assert len(entries_of(tmp_path / "c")) == 1
    assert json.loads((tmp_path / "c" / "meta.json").read_bytes())["max_train_tokens"] == 50


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "no meta.json"])
def test_a_rebuild_mends_a_damaged_version_of_the_same_content(tmp_path, damage):
    build(tmp_path / "c", ["a" * 30])
    healthy = tree(tmp_path)
    shard = tmp_path / "c" / "train" / "shard_00001.bin"
    if damage == "flipped":
        shard.write_bytes(b"\xff" + shard.read_bytes()[1:])
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-2])
    else:
        (shard if damage == "missing" else tmp_path / "c" / "meta.json").unlink()
    assert tree(tmp_path) != healthy
    build(tmp_path / "c", ["a" * 30])
    assert tree(tmp_path) == healthy


def breaking(error, texts=1500):
    """Yield more than a batch of documents, 1,024, then break."""
    for _ in range(texts):
        yield "z"
    raise error


@pytest.mark.parametrize(
    ("error", "texts"),
    [
        pytest.param(RuntimeError("upstream broke"), 1500, id="error-before a checkpoint"),
        pytest.param(RuntimeError("upstream broke"), 5000, marks=pytest.mark.slow, id="error-after some"),
        pytest.param(KeyboardInterrupt(), 1500, marks=pytest.mark.slow, id="ctrl-c-before a checkpoint"),
        pytest.param(KeyboardInterrupt(), 5000, id="ctrl-c-after some"),
    ],
)
def test_a_failing_build_leaves_the_committed_cache_as_it_was(tmp_path, error, texts):
    build(tmp_path / "c", ["a" * 30])
    before, names = tree(tmp_path), entries_of(tmp_path / "c")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(type(error)):
            build(tmp_path / "c", breaking(error, texts), num_tokens=10**6)
        gc.collect()
    found = tree(tmp_path)
    counted = found.pop(".versions/c/attempts.json", None)
    assert (counted is not None) == (isinstance(error, KeyboardInterrupt) and texts == 1500)
    unfinished = {name for name in found if name.startswith(".versions/c/building-")}
    assert {name: found[name] for name in found if name not in unfinished} == before
    assert bool(unfinished) == (texts == 5000) == (entries_of(tmp_path / "c") - {"attempts.json"} != names)
    assert open_in(tmp_path) == [] and caught == []


def test_a_failing_first_build_leaves_no_cache(tmp_path):
    with pytest.raises(RuntimeError):  # the source's own, and no error of the build
        build(tmp_path / "c", breaking(RuntimeError()), num_tokens=10**6)
    assert tree(tmp_path) == {".versions/c/lock": b""}
    build(tmp_path / "c", ["a" * 30])
    assert train_text(tmp_path / "c") == "a" * 30


def test_what_a_build_left_that_died_before_its_first_checkpoint_is_cleared_by_the_next(tmp_path):
    names = set()

    def texts():
        names.update(entries_of(tmp_path / "c") - {"attempts.json"})
        yield "a" * 30

    build(tmp_path / "c", texts())
    expected = tree(tmp_path)
    assert re.fullmatch(r"building-\w{12} building-\w{12}\.journal", " ".join(sorted(names)))
    for name in names:
        folder = versions_dir(tmp_path / "c") / name
        (folder / "train").mkdir(parents=True)
        for file in ("meta.json", "train/shard_00000.bin", "train.bin", "texts.bin"):
            (folder / file).write_text("half")
    build(tmp_path / "c", ["a" * 30])
    assert tree(tmp_path) == expected


def test_what_a_dead_stub_left_is_cleared_by_the_next(tmp_path):
    dead = versions_dir(tmp_path / "c") / "building"
    dead.mkdir(parents=True)
    (dead / "half").write_text("half")
    build_stub(tmp_path / "c", tokenizer=ByteTokenizer(), source=Source(), seed=0, shard_bytes=20)
    assert entries_of(tmp_path / "c") == {os.readlink(tmp_path / "c")[-12:]}
    assert not (tmp_path / "c" / "half").exists()


def test_an_empty_folder_in_the_way_is_replaced_and_one_of_a_cache_becomes_a_version(tmp_path):
    (tmp_path / "c" / "train").mkdir(parents=True)
    build(tmp_path / "c", ["a" * 30])
    assert (tmp_path / "c").is_symlink() and len(entries_of(tmp_path / "c")) == 1
    (tmp_path / "c").unlink()
    real_folder(tmp_path / "c", ["a" * 30])
    content = json.loads((tmp_path / "c" / "meta.json").read_bytes())["content_sha256"]
    build(tmp_path / "c", ["b" * 30])
    assert (tmp_path / "c").is_symlink() and train_text(tmp_path / "c") == "b" * 30
    assert train_text(versions_dir(tmp_path / "c") / content[:12]) == "a" * 30


@pytest.mark.parametrize("stranger", ["notes.md", "train/notes.md", "train/shard_00099.bin", "a link to a folder"])
def test_a_folder_with_files_of_somebody_else_is_refused_and_not_touched(tmp_path, stranger):
    if stranger == "a link to a folder":  # and no meta.json
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "val").symlink_to(tmp_path)
    else:
        real_folder(tmp_path / "c", ["a" * 30])
        (tmp_path / "c" / stranger).write_text("mine")
    before = tree(tmp_path)
    said = f"(such as {stranger})" if "link" not in stranger else ""
    with refused("E504", "contains 1 files", said):
        build(tmp_path / "c", ["b" * 30])
    assert tree(tmp_path) == before


@pytest.mark.parametrize("meta", ["no json", "[]", '{"shards": 3}'])
def test_a_folder_whose_meta_json_is_no_caches_is_refused(tmp_path, meta):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "meta.json").write_text(meta)
    with refused("E504", "meta.json"):
        build(tmp_path / "c", ["b" * 30])


@pytest.mark.parametrize("before", [True, False], ids=["before the build", "during it"])
def test_a_file_in_the_way_is_refused(tmp_path, before):
    def texts():
        yield "abc"
        (tmp_path / "c").write_text("mine")

    if before:
        (tmp_path / "c").write_text("mine")
    with pytest.raises(CacheError, match="c: is a file"):
        build(tmp_path / "c", texts())
    assert (tmp_path / "c").read_text() == "mine"


def test_a_folder_in_the_way_of_the_commits_link_is_refused_and_the_same_build_then_goes_on(tmp_path):
    stranger = versions_dir(tmp_path / "c") / "link"
    stranger.mkdir(parents=True)
    (stranger / "precious").write_text("precious")
    with pytest.raises(CacheError, match=r"link: .*Move it away"):
        build(tmp_path / "c", ["a" * 30])
    stranger.rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "precious").read_text() == "precious"
    build(tmp_path / "c", ["a" * 30])
    assert train_text(tmp_path / "c") == "a" * 30


def test_files_and_folders_honour_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        for _ in range(2):  # the second build rewrites meta.json in place
            build(tmp_path / "cache" / "c", ["a" * 30])
    finally:
        os.umask(before)
    paths = [path for path in (tmp_path / "cache").rglob("*") if not path.is_symlink()]
    assert len([path for path in paths if path.is_file()]) == 10  # 3 shards, 2 indexes, 2 ids, 3 more
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o640}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o750}


def test_what_is_committed_tells_not_where_when_or_by_whom(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "host-of-mine")
    monkeypatch.setattr(getpass, "getuser", lambda: "user-of-mine")
    meta = build(tmp_path / "c", ["a" * 30])
    for name, content in tree(tmp_path).items():
        for trace in ("host-of-mine", "user-of-mine", str(tmp_path), str(os.getcwd())):
            assert trace.encode() not in os.fsencode(content), name
    assert (versions_dir(tmp_path / "c") / "lock").read_bytes() == b""
    assert not {key for key in meta if any(word in key for word in ("time", "date", "host", "pid", "path", "user"))}


def test_write_bytes_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("disk gone")

    (tmp_path / "f").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk gone"):
        fileio.write_bytes(tmp_path / "f", b"new")
    assert tree(tmp_path) == {"f": b"old"}


def test_all_files_of_a_large_tree_are_synced_before_their_folder(tmp_path):
    names = {str(tmp_path / f"{number}.bin") for number in range(600)}
    for name in names:
        Path(name).write_bytes(b"x")
    trace = []
    with fileio.recorded(trace):
        fileio.sync_tree(tmp_path)
    assert {path for verb, path, *_ in trace[:-1] if verb == "fsync"} == names
    assert trace[-1] == ("fsync_dir", str(tmp_path)) and len(trace) == 601
