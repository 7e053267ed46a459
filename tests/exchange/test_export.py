"""An export is whole or not there: its manifest, its links, and what `verify` says when somebody writes through one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.byte_tokenizer import ByteTokenizer
from support.errors import refused
from support.foreign import NAMES, no_chmod, small_limits
from support.small_caches import build_caches, build_notes

from niels_gpt.cache import write_meta
from niels_gpt.cache.build_pretrain import build_stub
from niels_gpt.engine.meta import Source
from niels_gpt.exchange.exporting import export_cache
from niels_gpt.kinds.kind import Limits
from niels_gpt.kinds.verify import find_damage, verify
from niels_gpt.storage.fileio import sha256_file

NOTES = "pretrain/notes"


@pytest.fixture
def root(tmp_path):
    """Build three small caches."""
    return build_caches(tmp_path / "cache")


def names(folder):
    """Return the names of all files below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", NAMES)
def test_the_manifest_names_the_cache_and_every_file(name, root, tmp_path):
    done = export_cache(root / NOTES, name, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "niels_gpt.json").read_bytes())
    meta = json.loads((root / NOTES / "meta.json").read_bytes())
    assert manifest["format"] == name and manifest["kind"] == "export"
    assert all(manifest["cache"][key] == meta[key] for key in ("content_sha256", "tokenizer_sha256", "vocab_size"))
    assert {record["name"] for record in manifest["files"]} | {"niels_gpt.json"} == names(tmp_path / "out")
    for record in manifest["files"]:
        path = tmp_path / "out" / record["name"]
        assert (record["bytes"], record["sha256"]) == (path.stat().st_size, sha256_file(path))
    held = [each["name"] for record in manifest["files"] for each in record.get("of", ())]
    shards = [f"train/shard_0000{number}.bin" for number in range(3)]
    assert sorted({*held}) == shards
    assert done.files == len(manifest["files"]) and done.tokens == 30
    assert not any(record.get("split") == "val" for record in manifest["files"])


def test_an_export_has_the_same_bytes_again(root, tmp_path):
    for name in NAMES:
        for out in ("one", "two"):
            export_cache(root / NOTES, name, tmp_path / out / name)
        for path in names(tmp_path / "one" / name):
            assert (tmp_path / "one" / name / path).read_bytes() == (tmp_path / "two" / name / path).read_bytes()


def test_a_folder_that_is_not_empty_is_refused(root, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with refused("E704") as error:
        export_cache(root / NOTES, "olmo", tmp_path / "out")
    assert error.value.code == "E704" and names(tmp_path / "out") == {"notes.txt"}


def test_an_empty_folder_becomes_the_export(root, tmp_path):
    (tmp_path / "out").mkdir()
    export_cache(root / NOTES, "olmo", tmp_path / "out")
    assert "train_00000.npy" in names(tmp_path / "out")


def test_a_stub_and_another_name_are_refused(tmp_path):
    source = Source(name="stub")
    build_stub(tmp_path / "cache/pretrain/books", tokenizer=ByteTokenizer(), source=source, seed=0, shard_bytes=8)
    with refused("E207") as error:
        export_cache(tmp_path / "cache/pretrain/books", "olmo", tmp_path / "out")
    assert error.value.code == "E207" and not (tmp_path / "out").exists()
    with refused("E102", "tape", "nanogpt"):
        export_cache(tmp_path / "cache/pretrain/books", "tape", tmp_path / "out")


def test_a_shard_too_long_for_a_header_is_refused(root, tmp_path):
    with small_limits("modded_nanogpt", _MAX=9), refused("E220", "--shard-bytes"):
        export_cache(root / NOTES, "modded-nanogpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- links ------------------------------------------------------------------------------------------------------------


def exported(root, out):
    """Export to Megatron-LM: three links and three indexes."""
    return export_cache(root / NOTES, "megatron", out)


def test_links_lose_the_right_to_write_and_no_other(root, tmp_path):
    shard = root / NOTES / "train" / "shard_00000.bin"
    shard.chmod(0o640)
    done = exported(root, tmp_path / "out")
    linked = tmp_path / "out" / "train_00000.bin"
    assert linked.samefile(shard) and linked.stat().st_mode & 0o777 == 0o440
    assert done.made == {"link": 3, "written": 3} and done.linked_bytes == 60


def test_a_link_that_cannot_be_made_read_only_is_a_copy(root, tmp_path):
    with no_chmod():
        assert exported(root, tmp_path / "out").made == {"copy": 3, "written": 3}
    shard, copy = root / NOTES / "train" / "shard_00000.bin", tmp_path / "out" / "train_00000.bin"
    assert not copy.samefile(shard) and copy.read_bytes() == shard.read_bytes()
    assert len(names(tmp_path / "out")) == 7


def test_a_failed_export_leaves_no_file_read_only(root, tmp_path):
    shards = sorted((root / NOTES / "train").iterdir())
    docs = next((root / NOTES / "index").glob("train_docs.npy"))
    docs.write_bytes(docs.read_bytes()[:-8])  # met when the first shard is linked already
    with refused("E203"):
        exported(root, tmp_path / "out")
    assert {shard.stat().st_mode & 0o777 for shard in shards} == {0o644} and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("code", "harm"),
    [
        ("E203", lambda path: os.truncate(path, path.stat().st_size - 2)),
        ("E205", lambda path: (path.unlink(), os.mkfifo(path))),
        ("E205", lambda path: (path.rename(f"{path}.moved"), path.symlink_to(f"{path}.moved"))),
    ],
    ids=["short", "FIFO", "link"],
)
def test_an_export_looks_at_every_file_before_it_links_one(name, code, harm, root, tmp_path):
    shards = sorted((root / NOTES / "train").iterdir())
    last = shards[-1].resolve()
    harm(last)
    with refused(code, last):
        export_cache(root / NOTES, name, tmp_path / "out")
    assert shards[0].stat().st_mode & 0o777 == 0o644 and not (tmp_path / "out").exists()


def test_another_file_system_gets_copies(root, tmp_path):
    elsewhere = next((path for path in (Path("/dev/shm"), Path("/tmp")) if path.is_dir() and other(path, root)), None)
    if elsewhere is None:
        pytest.skip("no second file system to write to")
    out = elsewhere / f"niels_gpt-export-{os.getpid()}"
    try:
        assert exported(root, out).made == {"copy": 3, "written": 3}
        shard = root / NOTES / "train" / "shard_00000.bin"
        assert (out / "train_00000.bin").read_bytes() == shard.read_bytes() and shard.stat().st_nlink == 1
    finally:
        shutil.rmtree(out, ignore_errors=True)


def other(path, root):
    """Whether a folder is on another file system."""
    return path.stat().st_dev != root.stat().st_dev and os.access(path, os.W_OK)


def write_through(path):
    """Write into a read-only link as a program with the right to do so can, after the build."""
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.write(b"\x0b\x00")
    later = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))


def test_verify_says_that_somebody_wrote_through_a_link(root, tmp_path):
    exported(root, tmp_path / "out")
    assert find_damage(root / NOTES, deep=False) == []
    write_through(tmp_path / "out" / "train_00001.bin")
    for deep in (False, True):
        [damage] = find_damage(root / NOTES, deep=deep)
        assert damage.file == "train/shard_00001.bin" and "sha256" in damage.problem
        assert "hard link" in damage.problem and "remove this name" in damage.problem
    [problem] = verify(root / NOTES, Limits(), names=["files_match_meta"])["files_match_meta"].problems
    assert "hard link" in problem


def test_a_file_cut_through_a_link_is_named_as_one(root, tmp_path):
    exported(root, tmp_path / "out")
    path = tmp_path / "out" / "train_00001.bin"
    write_through(path)
    with open(path, "r+b") as file:
        file.truncate(4)
    os.utime(path, ns=(2 * 10**18, 2 * 10**18))
    [damage] = find_damage(root / NOTES, deep=False)
    assert "4 bytes" in damage.problem and "hard link" in damage.problem


def test_a_touched_link_and_one_that_lost_its_other_name_are_no_damage(root, tmp_path):
    exported(root, tmp_path / "out")
    os.utime(tmp_path / "out" / "train_00000.bin")
    assert find_damage(root / NOTES, deep=False) == []


def test_a_build_repairs_the_cache_and_leaves_the_export(root, tmp_path):
    exported(root, tmp_path / "out")
    linked = tmp_path / "out" / "train_00001.bin"
    write_through(linked)
    wrong = linked.read_bytes()
    build_notes(root)
    assert find_damage(root / NOTES, deep=True) == [] and linked.read_bytes() == wrong
    assert linked.stat().st_nlink == 1 or not linked.samefile(root / NOTES / "train" / "shard_00001.bin")


# --- many shards, and killed exports ----------------------------------------------------------------------------------


def thousand_shards(root):
    """Give a cache 1,000 shards of 4 MiB with two documents in each: here they are one file of 1,000 names."""
    folder = (root / NOTES).resolve()
    meta, size = json.loads((folder / "meta.json").read_bytes()), 1 << 22
    (folder / "train" / "shard_00000.bin").write_bytes(bytes(size))
    record = {"tokens": size // 2, "bytes": size, "sha256": "0" * 64}
    meta["shards"]["train"] = [{**record, "name": f"train/shard_{number:05d}.bin"} for number in range(1_000)]
    for each in meta["shards"]["train"][1:]:
        (folder / each["name"]).unlink(missing_ok=True)
        os.link(folder / "train" / "shard_00000.bin", folder / each["name"])
    np.save(folder / "index" / "train_docs.npy", np.arange(0, 1_000 * (size // 2) + 1, size // 4))
    meta["totals"]["train_tokens"] = 1_000 * (size // 2)
    write_meta(str(folder / "meta.json"), meta)
    return root / NOTES


@pytest.mark.parametrize("name", ["megatron", "olmo", "datatrove"])
def test_a_thousand_shards_take_hardly_any_disk(name, root, tmp_path):
    cache = thousand_shards(root)
    linked = (cache / "train" / "shard_00000.bin").stat().st_ino
    assert export_cache(cache, name, tmp_path / "out").made["link"] == 1_000
    new = [about for path in (tmp_path / "out").rglob("*") if (about := path.stat()).st_ino != linked]
    assert 0 < 512 * sum(about.st_blocks for about in new) < 0.01 * (1_000 << 22)


@pytest.mark.slow
def test_a_killed_export_leaves_no_folder(root, tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from niels_gpt.exchange.exporting import export_cache\n"
        "kill = lambda files, done, total: files == 3 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "export_cache(Path(sys.argv[1]), 'megatron', Path(sys.argv[2]), progress=kill)"
    )
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", code, str(root / NOTES), str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL and not out.exists()
    assert exported(root, out).files == 6 and find_damage(root / NOTES, deep=True) == []
