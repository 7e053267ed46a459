"""The EAGLE-3 cache's names, forms and errors: what a reader of the published contract expects of them."""

import inspect
import json
import os
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.eagle3_runs import cache_lock
from support.errors import refused
from support.small_eagle3 import fields_of, manifest_of, write_cache

from niels_gpt.eagle3 import cache
from niels_gpt.eagle3.cache import (
    CACHE_KEYS,
    CachedEagle3Dataset,
    build_cached_eagle3_dataloader,
    compress_target_probs,
    convert,
    read_manifest,
    reconstruct_target_probs,
    shard_path,
    write_manifest,
    write_shard,
)

FLOAT_KEYS, INT_KEYS = ("aux_hidden_states", "target_probs"), ("input_ids", "attention_mask", "loss_mask")


def test_the_names_of_the_spec_are_there_with_their_values_and_arguments():
    values = {
        "_FLOAT_KEYS": FLOAT_KEYS,
        "_INT_KEYS": INT_KEYS,
        "_BOOL_KEYS": ("position_mask",),
        "CACHE_KEYS": (*FLOAT_KEYS, *INT_KEYS, "position_mask"),
        "DTYPE_MAP": {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32},
        "_FORMAT_VERSION": 1,
        "_MANIFEST_NAME": "manifest.json",
        "_EMBEDDINGS_NAME": "target_embeddings.safetensors",
        "_SHARD_RE": re.compile(r"^shard-(\d{6})\.safetensors$"),
    }
    assert {name: getattr(cache, name) for name in values} == values
    arguments = {
        "_atomic_write": ["path", "write_fn"],
        "_collate_cached": ["features"],
        "_load_safetensors": [],
        "build_cached_eagle3_dataloader": ["cache_dir", "batch_size", "shuffle", "num_workers", "distributed"],
        "existing_shard_indices": ["cache_dir"],
        "manifest_path": ["cache_dir"],
        "read_manifest": ["cache_dir"],
        "read_target_embeddings": ["cache_dir"],
        "shard_path": ["cache_dir", "shard_index"],
        "write_manifest": ["cache_dir", "manifest"],
        "write_shard": ["cache_dir", "shard_index", "samples"],
        "write_target_embeddings": ["cache_dir", "weight"],
    }
    for name, expected in arguments.items():
        found = inspect.signature(getattr(cache, name)).parameters.values()
        assert [each.name for each in found if each.kind is not each.KEYWORD_ONLY] == expected, name


def test_an_item_is_what_the_trainer_takes_and_equals_what_was_written(folder):
    written = write_cache(folder, samples=5, shard_size=2)
    dataset = CachedEagle3Dataset(str(folder))
    assert len(dataset) == 5
    for index in (0, 3, 4, -1, -5):
        item = dataset[index]
        assert set(item) == set(CACHE_KEYS)
        for key in CACHE_KEYS:
            assert item[key].dtype == written[key].dtype
            assert torch.equal(item[key], written[key][index]), key
    batches = list(build_cached_eagle3_dataloader(str(folder), 2, False))
    named = list(build_cached_eagle3_dataloader(cache_dir=str(folder), batch_size=2, shuffle=False, num_workers=0))
    assert [batch["input_ids"].shape[0] for batch in batches] == [2, 2, 1]
    for key in CACHE_KEYS:
        assert torch.equal(torch.cat([batch[key] for batch in batches]), written[key])
        assert torch.equal(torch.cat([batch[key] for batch in named]), written[key])
    torch.manual_seed(0)
    shuffled = torch.cat([batch["input_ids"] for batch in build_cached_eagle3_dataloader(str(folder), 2, True)])
    assert sorted(shuffled[:, 0].tolist()) == sorted(written["input_ids"][:, 0].tolist())
    for index in (5, -6):
        with refused("E102", index, kind=IndexError):
            dataset[index]


def test_a_cache_is_shown_by_its_path_its_samples_and_their_form(folder):
    write_cache(folder, samples=5, shard_size=2, topk=3)
    dataset = CachedEagle3Dataset(folder)
    form = "4 slots, 6 aux values, 8 draft ids, top 3, fp32"
    assert repr(dataset) == f"CachedEagle3Dataset({folder}, 5 samples in 3 shards, {form}, 'tiny')"
    table = dataset._repr_html_()
    assert f"<td>{folder}</td>" in table and "<th>a sample</th>" in table and "&#x27;tiny&#x27;" in table
    bare = {
        key: dataset.manifest[key] for key in ("num_samples", "shard_size", "draft_vocab_size", "target_probs_topk")
    }
    write_manifest(folder, {**bare, "format_version": 2})
    assert repr(CachedEagle3Dataset(folder)).endswith(", 5 samples in 3 shards, 8 draft ids, top 3)")


def test_a_cache_of_version_1_is_shown_without_the_key_of_version_2(folder):
    write_cache(folder, samples=5, shard_size=2)
    manifest = {key: value for key, value in CachedEagle3Dataset(folder).manifest.items() if key != "target_probs_topk"}
    write_manifest(folder, {**manifest, "format_version": 1})
    dataset = CachedEagle3Dataset(folder)
    assert repr(dataset).endswith("8 draft ids, fp32, 'tiny')") and "8 draft ids, fp32" in dataset._repr_html_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("topk", [0, 3])
def test_a_shard_has_the_bytes_that_safetensors_writes(folder, dtype, topk):
    fields = fields_of(4, dtype=dtype, topk=topk)
    write_shard(folder, 0, {**fields, "unknown": torch.zeros(4, 1)})
    save_file(fields, folder / "theirs.safetensors")
    assert Path(shard_path(folder, 0)).read_bytes() == (folder / "theirs.safetensors").read_bytes()


def test_the_manifest_has_sorted_keys_and_the_version_that_it_needs(folder):
    write_manifest(folder, {"b": 1, "a": [2]})
    text = (folder / "manifest.json").read_text()
    assert text == '{\n  "a": [\n    2\n  ],\n  "b": 1,\n  "format_version": 1\n}'
    for manifest, version in (
        ({"target_probs_topk": 3, "draft_vocab_size": 8}, 2),
        ({"target_probs_topk": 8, "draft_vocab_size": 8}, 1),
        ({"target_probs_topk": 0, "draft_vocab_size": 8, "format_version": 2}, 2),
    ):
        write_manifest(folder, manifest)
        assert read_manifest(folder)["format_version"] == version


def test_a_version_1_cache_becomes_one_of_version_2_and_back_by_its_manifest_alone(folder):
    written = write_cache(folder, samples=3, shard_size=2)
    before = (folder / "manifest.json").read_bytes()
    shard = Path(shard_path(folder, 0)).read_bytes()
    assert convert(folder, 2)
    assert not convert(folder, 2)
    assert json.loads((folder / "manifest.json").read_text())["target_probs_topk"] == 0
    assert torch.equal(CachedEagle3Dataset(folder)[2]["target_probs"], written["target_probs"][2])
    assert convert(folder, 1)
    assert (folder / "manifest.json").read_bytes() == before
    assert Path(shard_path(folder, 0)).read_bytes() == shard
    with refused("E102", "format_version 3"):
        convert(folder, 3)
    (folder / "meta.json").write_text('{"kind": "other"}')  # of another tool
    assert convert(folder, 2)
    assert (folder / "meta.json").read_text() == '{"kind": "other"}'
    with cache_lock(folder), refused("E503", folder, str(os.getpid())):
        convert(folder, 1)
    later = {"input_data": "x", "split": None, "shuffle_seed": 42, "mask_reasoning_content": False, "new": 1}
    minimal = {"num_samples": 3, "shard_size": 2}  # keys that came later and keys that are missing do no harm
    for manifest in (manifest_of(samples=3, shard_size=2) | later, minimal, minimal | {"format_version": 2}):
        write_manifest(folder, manifest)
        assert torch.equal(CachedEagle3Dataset(folder)[1]["target_probs"], written["target_probs"][1])


def test_a_top_k_cache_is_read_at_full_width_and_never_becomes_version_1(folder):
    written = write_cache(folder, samples=3, shard_size=2, topk=3)
    item = CachedEagle3Dataset(folder)[1]
    values, indices = written["target_probs_values"][1], written["target_probs_indices"][1]
    assert set(item) == set(CACHE_KEYS)
    assert item["target_probs"].shape == (4, 8)
    assert torch.equal(item["target_probs"].gather(-1, indices.long()), values)
    assert (item["target_probs"] != 0).sum() == (values != 0).sum()
    fields = fields_of(2, topk=3)
    fields["target_probs_indices"][1, 0, 0] = 8
    write_shard(folder, 0, fields)
    assert CachedEagle3Dataset(folder)[0]["target_probs"].shape == (4, 8)
    with refused("E701", "sample 1 of", "shard-000000.safetensors", "target_probs_indices"):
        CachedEagle3Dataset(folder)[1]
    with refused("E710", "target_probs_topk is 3"):
        convert(folder, 1)
    assert not convert(folder, 2)


def test_top_k_on_paper():
    probs = torch.tensor([[0.1, 0.5, 0.0, 0.4]])
    values, indices = compress_target_probs(probs, 2)
    assert indices.tolist() == [[1, 3]]
    assert indices.dtype == torch.int32
    torch.testing.assert_close(values, torch.tensor([[5 / 9, 4 / 9]]))
    torch.testing.assert_close(reconstruct_target_probs(values, indices, 4), torch.tensor([[0, 5 / 9, 0, 4 / 9]]))
    values, indices = compress_target_probs(probs, 9)
    torch.testing.assert_close(reconstruct_target_probs(values, indices, 4), probs)
    assert [cache.is_compressed(k, 4) for k in (None, 0, 1, 3, 4, 5)] == [False, False, True, True, False, False]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_any_start_method_read_what_the_parent_has_opened(folder, method):
    written = write_cache(folder, samples=5, shard_size=2)
    dataset = CachedEagle3Dataset(folder)
    dataset[0]
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=2,
        num_workers=1,
        multiprocessing_context=method,
        collate_fn=build_cached_eagle3_dataloader(folder, 2, False).collate_fn,
    )
    read = torch.cat([batch["aux_hidden_states"] for batch in loader])
    assert torch.equal(read, written["aux_hidden_states"])


def test_threads_share_a_dataset_that_opens_fewer_shards_than_they_read(folder):
    written = write_cache(folder, samples=6, shard_size=1)
    dataset = CachedEagle3Dataset(folder, max_open_shards=2)
    items = [dataset[index] for index in range(6)]  # a view outlives its handle
    assert sorted(dataset._shards._open) == [4, 5]
    assert all(torch.equal(item["target_probs"], written["target_probs"][i]) for i, item in enumerate(items))
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[0]["input_ids"], written["input_ids"][0])
    dataset = CachedEagle3Dataset(folder, max_open_shards=1)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            read = list(pool.map(lambda number: (number % 6, dataset[number % 6]["input_ids"]), range(3_000)))
    finally:
        sys.setswitchinterval(before)
    assert all(torch.equal(ids, written["input_ids"][index]) for index, ids in read)
    with refused("E102", "max_open_shards=0"):
        CachedEagle3Dataset(folder, max_open_shards=0)


def test_a_shard_that_is_replaced_by_another_form_after_the_open_is_refused(folder):
    write_cache(folder, samples=5, shard_size=2)
    dataset = CachedEagle3Dataset(folder)
    write_shard(folder, 1, fields_of(2, slots=6))
    with refused("E701", "shard-000001.safetensors", "shard 0"):
        dataset[2]
    os.truncate(shard_path(folder, 2), 40)
    with refused("E701", "shard-000002.safetensors"):
        dataset[4]


WRONG = {"num_samples": [10**18, 5.0], "shard_size": [0, True], "seq_length": ["4"], "draft_vocab_size": [None, 8.0]}
WRONG |= {"target_probs_topk": [[1]], "aux_hidden_dim": [{}], "dtype": [["fp32"]], "format_version": [2.0]}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_value_of_a_wrong_type_in_the_manifest_is_named(folder, key, value):
    write_cache(folder, samples=5, shard_size=2)
    manifest = json.loads((folder / "manifest.json").read_text()) | {key: value}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    expected = "500,000,000,000,000,000 shards" if value == 10**18 else key
    code = "E208" if key == "format_version" else "E701"
    for opening in (CachedEagle3Dataset, lambda where: convert(where, 2)):
        if value in (10**18, 0) and opening is not CachedEagle3Dataset:  # convert does not need it
            continue
        with refused(code, expected):
            opening(folder)


def rewritten(**how):
    """Return what writes each shard again, in another form."""
    return lambda folder: [write_shard(folder, index, fields_of(rows, **how)) for index, rows in enumerate((2, 2, 1))]


DAMAGES = {
    "a shard less": (
        lambda folder: os.remove(shard_path(folder, 1)),
        ["E702", "5 samples (3 shards)", "2 shard files", "[0, 2]"],
    ),
    "another shard": (
        lambda folder: os.rename(shard_path(folder, 2), shard_path(folder, 3)),
        ["E702", "5 samples (3 shards)", "3 shard files", "[0, 1, 3]"],
    ),
    "a sample less": (
        lambda folder: write_shard(folder, 1, fields_of(1)),
        ["E701", "shard-000001.safetensors", "1 samples", "expected 2 of", "5"],
    ),
    "other slots": (
        lambda folder: write_shard(folder, 2, fields_of(1, slots=5)),
        ["E701", "shard-000002.safetensors", "shard 0"],
    ),
    "another dtype": (
        rewritten(dtype=torch.bfloat16),
        ["E701", "shard-000000.safetensors", "aux_hidden_states is bfloat16"],
    ),
    "another form": (rewritten(topk=3), ["E701", "shard-000000.safetensors", "target_probs is absent"]),
    "a byte less": (
        lambda folder: os.truncate(shard_path(folder, 1), os.path.getsize(shard_path(folder, 1)) - 1),
        ["E701", "shard-000001.safetensors", "1,087 bytes, expected 1,088"],
    ),
    "another version": (
        lambda folder: write_manifest(folder, manifest_of(samples=5, shard_size=2) | {"format_version": 3}),
        ["E208", "format_version=3", "expected 1 or 2, or native-1"],
    ),
    "no JSON": (lambda folder: (folder / "manifest.json").write_text("{"), ["E701", "manifest.json", "line 1"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_as_the_manifest_says_is_refused_when_the_cache_is_opened(folder, damage):
    write_cache(folder, samples=5, shard_size=2)
    change, found = DAMAGES[damage]
    change(folder)
    with refused(*found):
        CachedEagle3Dataset(folder)


def test_missing_files_are_named_and_names_that_only_look_like_shards_passed_over(folder):
    with refused("E105", "manifest.json", kind=FileNotFoundError):
        CachedEagle3Dataset(folder)
    with refused("E702", "target_embeddings.safetensors", kind=FileNotFoundError):
        cache.read_target_embeddings(str(folder))
    assert cache.existing_shard_indices(str(folder / "nowhere")) == set()
    write_cache(folder, samples=2, shard_size=2)
    for name in ("shard-00000\u0661.safetensors", "shard-000001.safetensors\n", "shard-000001.safetensors.tmp"):
        (folder / name).touch()
    assert cache.existing_shard_indices(folder) == {0}
    assert len(CachedEagle3Dataset(folder)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.pop("target_probs"), "neither"),
        (
            lambda f: f.update(fields_of(2, topk=3)),
            "['target_probs', 'target_probs_values', 'target_probs_indices']",
        ),
        (lambda f: f.update({key: tensor[:0] for key, tensor in f.items()}), "[0, 4], [0, 4, 6], [0, 4, 8]"),
        (lambda f: f.pop("loss_mask"), "['loss_mask']"),
        (lambda f: f.update(position_mask=f["position_mask"][:, :, 0]), "position_mask"),
        (lambda f: f.update(input_ids=f["input_ids"][0]), "input_ids, aux_hidden_states and target_probs are [4]"),
        (lambda f: f.update(loss_mask=f["loss_mask"][:1]), "torch.int64 [1, 4], expected torch.int64 [2, 4]"),
        (lambda f: f.update(loss_mask=f["loss_mask"].to(torch.float64)), "float64"),
    ],
)
def test_a_shard_of_another_form_is_not_written(folder, change, message):
    fields = fields_of(2)
    change(fields)
    with refused("E102", message):
        write_shard(folder, 0, fields)
    assert not [name for name in os.listdir(folder) if "shard" in name]


def test_embeddings_are_float32_whatever_they_were_and_of_two_dimensions(folder):
    weight = torch.randn(5, 3).to(torch.bfloat16).requires_grad_()
    path = cache.write_target_embeddings(str(folder), weight)
    assert path == str(folder / "target_embeddings.safetensors")
    read = cache.read_target_embeddings(str(folder))
    assert read.dtype == torch.float32 and torch.equal(read, weight.detach().float())
    save_file({"weight": weight.detach().float()}, folder / "theirs")
    assert (folder / "theirs").read_bytes() == Path(path).read_bytes()
    for wrong in (torch.zeros(5, 3, dtype=torch.bfloat16), torch.zeros(5)):
        save_file({"weight": wrong}, path)
        with refused("E701", "torch.float32"):
            cache.read_target_embeddings(folder)


def test_a_failed_write_leaves_what_was_there(folder):
    def half(path):
        Path(path).write_text("half")
        raise OSError("no space left")

    (folder / "file").write_text("old")
    with pytest.raises(OSError, match="no space"):
        getattr(cache, "_atomic_write")(str(folder / "file"), half)  # noqa: B009 - a name of the spec
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"file": "old"}


def test_every_flipped_byte_of_a_shard_is_found_and_the_sample_named(folder):
    write_cache(folder, samples=3, shard_size=2)
    assert cache.verify(folder) == []
    for index in (0, 1):
        path = Path(shard_path(folder, index))
        content = path.read_bytes()
        tensors = 8 + int.from_bytes(content[:8], "little")  # behind the header
        for place in range(tensors, len(content), 7):
            path.write_bytes(content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :])
            (said,) = cache.verify(folder)
            assert re.search(rf"shard-00000{index}\.safetensors: sample [01] of the shard", said)
        path.write_bytes(content)
    assert cache.verify(folder) == []
