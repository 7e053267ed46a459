"""An open EAGLE-3 cache: its version stays under it, it has an identity, and it is compared with its receipts."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from support.disk import link, meta_bytes, version_path
from support.eagle3_native import write_native
from support.errors import refused
from support.small_eagle3 import write_cache

from niels_gpt.eagle3.cache import CachedEagle3Dataset, build_cached_eagle3_dataloader, shard_path
from niels_gpt.eagle3.native import NativeEagle3Dataset, build_native_dataloader
from niels_gpt.recipes.gc import collect

MASKS = [[0, 0, 1, 1, 0, 0, 1, 0, 0, 0], [0, 1, 0], [0, 1, 1, 0, 1]]


def write(form, folder, seed=0):
    """Write three samples in two shards, or in one of the native form; returns the class that reads them."""
    if form == "native":
        write_native(folder, MASKS, cuts=[2])
        return NativeEagle3Dataset
    write_cache(folder, samples=3, shard_size=2, topk=3 * (form == "top k"), seed=seed)
    return CachedEagle3Dataset


FORMS = ["version 1", "top k", "native"]


def committed(root, seed, form="version 1"):
    """Commit a version of cache/eagle3/targets, as precompute does; returns its public name."""
    public, content = root / "eagle3" / "targets", hashlib.sha256(str(seed).encode()).hexdigest()
    folder = version_path(public, content)
    folder.mkdir(parents=True)
    write(form, folder, seed)
    meta = {"kind": "eagle3", "format_version": 1, "built": True, "content_sha256": content, "files": []}
    (folder / "meta.json").write_bytes(meta_bytes({**meta, "tokenizer_sha256": "ab" * 32, "meta_crc32": "0" * 8}))
    link(public, content[:12])
    os.utime(folder, ns=(seed * 10**9, seed * 10**9))
    return public


def opened_and_pickled(path):
    return pickle.loads(pickle.dumps(CachedEagle3Dataset(path)))


@pytest.mark.parametrize("opened", [CachedEagle3Dataset, opened_and_pickled])
def test_gc_leaves_a_version_alone_that_a_reader_has_open(tmp_path, opened):
    public = committed(tmp_path, 1)
    first, dataset = public.resolve(), opened(public)
    expected = CachedEagle3Dataset(first)[2]["input_ids"].clone()
    for seed in (2, 3, 4):
        committed(tmp_path, seed)
    assert any("open in a reader" in line for line in collect(tmp_path, dry_run=False)) and first.exists()
    assert dataset[2]["input_ids"].equal(expected), "the version that was opened, not the one of today"
    del dataset
    list(collect(tmp_path, dry_run=False))
    assert not first.exists()


@pytest.mark.parametrize("form", ["version 1", "native"])
def test_a_fingerprint_says_whether_it_is_the_same_cache(tmp_path, form):
    public = committed(tmp_path, 1, form)
    opened = NativeEagle3Dataset if form == "native" else CachedEagle3Dataset
    known = opened(public).fingerprint()
    assert known["content_sha256"] == hashlib.sha256(b"1").hexdigest() and known["samples"] == 3
    assert known["tokenizer_sha256"] == "ab" * 32 and json.loads(json.dumps(known)) == known
    assert opened(public, expect=known).fingerprint() == CachedEagle3Dataset(public).fingerprint() == known
    if form == "native":
        assert len(build_native_dataloader(public, 2, False, expect=known)) == 2
    else:
        assert len(build_cached_eagle3_dataloader(public, 2, False, expect=known, check="blocks")) == 2
    committed(tmp_path, 2, form)
    with refused("E213", "content_sha256", known["content_sha256"][:8]):
        opened(public, expect=known)
    with refused("E102", "lacks", kind=ValueError):
        opened(public, expect={"samples": 3})


def test_a_folder_of_another_tool_has_an_identity_too(tmp_path):
    write_cache(tmp_path, samples=3, shard_size=2)
    known = CachedEagle3Dataset(tmp_path).fingerprint()
    assert known["content_sha256"] is known["tokenizer_sha256"] is None and len(known["manifest_sha256"]) == 64


def flip_an_id(path):
    """Change the last id of the last sample of a shard."""
    raw = bytearray(path.read_bytes())
    size = 8 + int.from_bytes(raw[:8], "little")
    raw[size + json.loads(raw[8:size])["input_ids"]["data_offsets"][1] - 4] ^= 1
    path.chmod(0o644)
    path.write_bytes(raw)


@pytest.mark.parametrize("form", FORMS)
def test_each_sample_is_compared_when_it_is_read_if_asked_for(tmp_path, form):
    opened = write(form, tmp_path)
    good = [opened(tmp_path, check="blocks")[index] for index in range(3)]
    assert len(good) == 3
    flip_an_id(Path(shard_path(tmp_path, 0)))
    dataset, checked = opened(tmp_path), pickle.loads(pickle.dumps(opened(tmp_path, check="blocks")))
    for index in range(3):
        _ = dataset[index]
    _ = checked[0], checked[2]
    with refused("E701", shard_path(tmp_path, 0), "sample 1 of the shard", "shard-000000.json"):
        checked[1]


@pytest.mark.parametrize("form", FORMS)
def test_a_shard_with_another_header_or_size_than_its_receipt_is_refused_when_it_is_mapped(tmp_path, form):
    opened = write(form, tmp_path)
    receipt = tmp_path / "sidecar" / "shard-000001.json"
    good = json.loads(receipt.read_bytes())
    changes = {f"{good['bytes']} bytes": {"bytes": good["bytes"] + 8}, "bytes 0 to": {"header_sha256": "0" * 64}}
    for said, change in changes.items():
        receipt.write_text(json.dumps({**good, **change}))
        dataset = opened(tmp_path)
        _ = dataset[0]
        with refused("E701", "shard-000001.safetensors", said, "shard-000001.json"):
            dataset[2]
    receipt.unlink()  # as of another tool
    assert opened(tmp_path, check="blocks")[2] is not None
    with refused("E102", "check='all'", kind=ValueError):
        opened(tmp_path, check="all")


def test_the_items_of_a_native_cache_by_the_keys_of_version_1_are_compared_too(tmp_path):
    write("native", tmp_path)
    flip_an_id(Path(shard_path(tmp_path, 0)))
    dataset = CachedEagle3Dataset(tmp_path, target_probs=False, check="blocks")
    assert torch.is_tensor(dataset[0]["input_ids"])
    with refused("E701", "sample 1 of the shard"):
        dataset[1]
