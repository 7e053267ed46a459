"""Nothing outside the folder of an EAGLE-3 cache is read, written or removed: links are refused."""

import json
from pathlib import Path

import pytest
from support import eagle3_runs
from support.commands import niels_gpt
from support.eagle3_damage import copy_of
from support.eagle3_looks import problems_of, run_again, verdicts
from support.eagle3_runs import EAGLE3
from support.errors import refused
from support.small_eagle3 import fields_of

from niels_gpt.eagle3.cache import (
    CachedEagle3Dataset,
    build_cached_eagle3_dataloader,
    read_manifest,
    read_target_embeddings,
    write_manifest,
    write_shard,
)
from niels_gpt.eagle3.cache import verify as verify_checksums


def linked_elsewhere(cache, name):
    """Move a file or folder of a cache out of it, leave a link to it, and return where it is."""
    outside = cache.parent / "outside" / Path(name).name
    outside.parent.mkdir(exist_ok=True)
    (cache / name).rename(outside)
    (cache / name).symlink_to(outside)
    return outside


@pytest.fixture(params=["dense", "native"])
def snapshot(request, eagle3_caches, tmp_path):
    """A cache as the hub's client leaves it: folders, and in them links to files elsewhere."""
    cache = copy_of(eagle3_caches[request.param], tmp_path)
    for number, path in enumerate(sorted(path for path in cache.rglob("*") if path.is_file())):
        blob = cache.parent / "blobs" / f"{number:064x}"
        blob.parent.mkdir(exist_ok=True)
        path.rename(blob)
        path.symlink_to(blob)
    return cache


@pytest.mark.parametrize("resume", [True, False])
def test_a_sidecar_that_is_a_link_is_neither_written_nor_cleaned(cache, resume):
    outside = linked_elsewhere(cache, "sidecar")
    (outside / ".shard-000001.json.0123abcd.tmp").write_text("somebody's")
    (cache / "meta.json").unlink()
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in outside.iterdir()}
    with refused("E205", cache / "sidecar"):
        eagle3_runs.run(cache, resume=resume)
    with refused("E205", cache / "sidecar"):
        write_shard(cache, 3, fields_of(2))
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in outside.iterdir()} == before


READERS = {
    "dataset": lambda folder, links: CachedEagle3Dataset(folder, follow_links=links)[4],
    "loader": lambda folder, links: len(build_cached_eagle3_dataloader(str(folder), 2, False, follow_links=links)),
    "manifest": lambda folder, links: read_manifest(folder, follow_links=links),
    "embeddings": lambda folder, links: read_target_embeddings(folder, follow_links=links),
    "checksums": lambda folder, links: verify_checksums(folder, follow_links=links),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_snapshot_of_the_hub_is_read_on_request(snapshot, eagle3_caches, reader):
    with refused("E205", "follow_links=True"):
        READERS[reader](snapshot, False)
    form = "native" if (snapshot / "target_weights.safetensors").exists() else "dense"
    found, expected = READERS[reader](snapshot, True), READERS[reader](eagle3_caches[form], False)
    assert str(found) == str(expected)


def test_every_check_names_a_shard_that_is_a_link(cache):
    linked_elsewhere(cache, "shard-000001.safetensors")
    for name in ("complete", "checksums", "finite", "ids_match", "distribution"):
        (found,) = verdicts(cache, names=[name])[name].problems
        assert f"{cache}/shard-000001.safetensors: a symbolic link" in found
    linked_elsewhere(cache, "sidecar")
    assert any(f"{cache}/sidecar: a symbolic link" in found for found in verdicts(cache)["complete"].problems)


def test_verify_follows_links_on_request(snapshot):
    assert problems_of(snapshot, follow_links=True) == []
    plan = json.loads((snapshot / "sidecar" / "plan.json").read_text())
    again = run_again(snapshot, plan["target"], eagle3_runs.load, plan["run"], k=2, follow_links=True)
    assert again.problems == []


def test_every_command_reads_a_snapshot_on_request(snapshot):
    commands = [["inspect"], ["inspect", "--sample", "1"], ["stats"]]
    if not (is_native := (snapshot / "target_weights.safetensors").exists()):
        commands.append(["convert", "--format-version", "2"])
    for command, *more in commands:
        done = niels_gpt(command, snapshot, *more, module=EAGLE3)
        assert done.status == 1 and "--follow-links" in done.err
        done = niels_gpt(command, snapshot, *more, "--follow-links", module=EAGLE3)
        assert done.status == 0, done.err
    assert (snapshot / "manifest.json").is_symlink() == is_native, "what convert writes replaces the link"
    assert niels_gpt("verify", snapshot, "--follow-links", module=EAGLE3).status == 0


def test_a_name_of_a_cache_may_be_a_link(cache, tmp_path):
    (tmp_path / "link").symlink_to(cache)
    assert len(CachedEagle3Dataset(tmp_path / "link")) == 10
    eagle3_runs.run(tmp_path / "link", resume=True)
    write_manifest(tmp_path / "link", read_manifest(cache))
