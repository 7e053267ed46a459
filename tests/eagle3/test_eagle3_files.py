"""meta.json of a cache names all its files, and has the content_sha256 of builds that did not name the shards."""

import hashlib
import json
import os
import re

import pytest
from support.disk import META_NAME, change_meta, sha256
from support.eagle3_damage import ALL_FORMS, copy_of, flip_bit
from support.eagle3_runs import never, plan, run, samples_of, whole_tree

from niels_gpt.eagle3.cache import CachedEagle3Dataset, convert, verify

DECIDES = re.compile("manifest[.]json|target_(embeddings|weights)[.]safetensors|sidecar/shard-[0-9]{6}[.]json")


def meta_of(cache):
    return json.loads((cache / META_NAME).read_bytes())


def records_of(cache):
    """The record of each file by its bytes, in the order of docs/formats.md."""
    names = sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())
    order = ("manifest.json", "target_", "sidecar/", "shard-")
    names = [name for each in order for name in names if name.startswith(each) and name != "sidecar/lock"]
    return [{"bytes": os.stat(cache / name).st_size, "name": name, "sha256": sha256(cache / name)} for name in names]


def content_of(cache):
    """The content_sha256 by the bytes of the files, as docs/formats.md works it out."""
    sums = {record["name"]: record["sha256"] for record in records_of(cache) if DECIDES.fullmatch(record["name"])}
    return hashlib.sha256((json.dumps(sums, indent=2, sort_keys=True) + "\n").encode()).hexdigest()


def of_earlier_build(cache):
    """Take the shards out of meta.json."""
    files = [record for record in meta_of(cache)["files"] if not record["name"].startswith("shard-")]
    change_meta(cache, files=files)
    return cache


@pytest.mark.parametrize("form", ALL_FORMS)
def test_meta_json_names_every_file_and_its_content(eagle3_caches, form):
    meta = meta_of(eagle3_caches[form])
    assert meta["files"] == records_of(eagle3_caches[form])
    assert meta["content_sha256"] == content_of(eagle3_caches[form])
    assert meta["disk_bytes"] == sum(record["bytes"] for record in meta["files"])


DIGESTS = {
    "dense": "f059d705a8c9cf00",
    "topk": "5a17b1edfc8f05ce",
    "native": "ff8509e0c9f5e1d7",
    "fp8": "4cc2a988f6dd515c",
}
"""Of commit f83bdc2e, which had the target rows of `loss` alone."""
PLANNED = re.compile("manifest[.]json|sidecar/(plan[.]json|batches[.]jsonl|ids[.]txt|samples[.]safetensors)")


@pytest.mark.parametrize("form", DIGESTS)
def test_the_plan_and_the_layout_of_a_cache_are_those_of_earlier_versions(eagle3_caches, form):
    """States are left out: their last bits depend on the processor."""
    found, cache = hashlib.sha256(), eagle3_caches[form]
    for path in sorted(cache.rglob("*")):
        name, content = path.relative_to(cache).as_posix(), path.read_bytes() if path.is_file() else b""
        header = path.suffix == ".safetensors" and content[: 8 + int.from_bytes(content[:8], "little")]
        if decided := content if PLANNED.fullmatch(name) else header:
            found.update(f"{name} {hashlib.sha256(decided).hexdigest()}\n".encode())
    assert found.hexdigest()[:16] == DIGESTS[form]


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_resumed_run_adds_the_files_to_a_cache_of_an_earlier_build_without_the_target(eagle3_caches, tmp_path, form):
    samples, whole = samples_of(), whole_tree(eagle3_caches[form])
    cache = of_earlier_build(copy_of(eagle3_caches[form], tmp_path))
    assert verify(cache) == []
    given = plan(samples, **ALL_FORMS[form])
    done = run(cache, samples=samples, given=given, resume=True, load=never)
    assert (done.shards, done.is_described, whole_tree(cache)) == (0, True, whole)
    assert run(cache, samples=samples, given=given, resume=True, load=never).is_described is False


def test_another_draft_vocabulary_reads_no_shard_that_meta_json_names(eagle3_caches, tmp_path):
    cache, samples = copy_of(eagle3_caches["native"], tmp_path), samples_of()
    shard = cache / "shard-000001.safetensors"
    flip_bit(shard, shard.stat().st_size // 2)  # so that its bytes have another sha256 than meta.json says
    selected = [7, 3, 11, 0, 1, 2, 4, 5, 39, 20, 22, 8]
    given = plan(samples, **ALL_FORMS["native"], selected_token_ids=selected)
    run(cache, samples=samples, given=given, resume=True, load=never)
    shards = [
        [each for each in meta_of(folder)["files"] if "shard" in each["name"]]
        for folder in (cache, eagle3_caches["native"])
    ]
    assert shards[0] == shards[1] and meta_of(cache)["content_sha256"] == content_of(cache)
    (cache / META_NAME).unlink()
    run(cache, samples=samples, given=given, resume=True)
    assert meta_of(cache)["files"] == records_of(cache)


def test_a_conversion_of_a_cache_of_an_earlier_build_names_all_files_once_it_changes_one(finished, tmp_path):
    cache = of_earlier_build(copy_of(finished, tmp_path))
    before = (cache / META_NAME).read_bytes()
    assert convert(cache, 1) is False and (cache / META_NAME).read_bytes() == before
    assert convert(cache, 2) and meta_of(cache)["files"] == records_of(cache)
    assert meta_of(cache)["content_sha256"] == content_of(cache)
    assert convert(cache, 1) and meta_of(cache) == meta_of(finished)
    assert len(CachedEagle3Dataset(cache)) == 10
