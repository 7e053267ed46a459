"""Caches go both ways between this project and nemo-automodel, whose own code runs beside ours and is asked.

Where its wheels lie unpacked in folders named 0.5.0 (it writes version 1) and 0.7.0 (version 2), and NIELS_GPT_PEERS
names the folder above them. .ci/run makes it so; elsewhere these tests are left out.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from support.commands import niels_gpt
from support.peer_automodel import CACHE, CORE, VOCAB, Peer, PeerError
from support.peer_caches import (
    LATER_KEYS,
    NO_PEERS,
    PEERS,
    SAMPLES,
    SHARD_SIZE,
    D,
    K,
    S,
    V,
    assert_same,
    files_of,
    items_of,
    made_up,
    read_ours,
    write_ours,
    write_theirs,
)

from niels_gpt.eagle3 import cache, vocab
from niels_gpt.eagle3.forward import draft_distribution

pytestmark = [
    pytest.mark.skipif(PEERS is None, reason=NO_PEERS),
    pytest.mark.usefixtures("one_thread"),  # as in the peer's process: another number changes the last bits of sums
]
DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])


def test_a_converted_cache_is_read_by_the_other_version_of_the_peer(old, new, tmp_path):
    folder = tmp_path / "c"
    shards = write_ours(folder, 1, "bf16")
    with pytest.raises(PeerError, match="format_version=1, expected 2"):
        new.call("", "read", str(folder))
    cache.convert(str(folder), 2)
    assert_same(new.call("", "read", str(folder))["items"], items_of(shards))
    cache.convert(str(folder), 1)
    assert_same(old.call("", "read", str(folder))["items"], items_of(shards))


@pytest.mark.parametrize("made", [2, 1])
def test_the_line_that_is_printed_opens_a_cache_in_the_peers_trainer(old, new, run, tmp_path, made):
    """made: the version that precompute writes. After 1, convert writes 2, whose manifest then lacks the options."""
    status, out, _ = run("--format", str(made))
    folder, version_1 = tmp_path / "c", tmp_path / "c"
    if made == 1:
        version_1 = shutil.copytree(folder, tmp_path / "one")
        done = niels_gpt("eagle3", "convert", folder, "--format", 2)
        status, out = done.status, done.out
    assert status == 0
    manifest = cache.read_manifest(folder)
    sizes = manifest["target_vocab_size"], manifest["aux_hidden_dim"] // 3
    recipe = yaml.safe_load(next(line for line in out.splitlines() if "recipe_args" in line).partition("recipe: ")[2])
    options = recipe["recipe_args"]
    assert Path(options.pop("cached_target_path")) == folder
    named = {"cache_name": "EAGLE-3", "cache_dir": str(folder), "producer_name": "precompute_eagle3"}
    read = new.call(CACHE, "read_manifest", str(folder))
    new.call("components.datasets.llm.offline_cache", "ensure_supervision_options_match", read, options, **named)
    expected = (manifest["num_samples"], manifest["selected_token_ids"])
    assert new.call("", "set_up", str(folder), *sizes, **options) == expected
    if made == 2:
        with pytest.raises(PeerError, match="mask_generation_prompt=True, but the recipe sets"):
            new.call("", "set_up", str(folder), *sizes)
    else:
        assert new.call("", "set_up", str(folder), *sizes) == expected
        assert old.call("", "set_up", str(version_1), *sizes) == expected
        with pytest.raises(PeerError, match="format_version=1, expected 2"):
            new.call("", "set_up", str(version_1), *sizes)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_peers_dataloader_gives_the_batches_that_ours_gives(new, tmp_path, shuffle):
    write_ours(tmp_path / "c", 2, "bf16", K)
    options = {"batch_size": 3, "shuffle": shuffle}
    theirs = new.call("", "batches", str(tmp_path / "c"), 7, num_workers=0, **options)
    torch.manual_seed(7)
    ours = list(cache.build_cached_eagle3_dataloader(str(tmp_path / "c"), **options))
    assert [len(batch["input_ids"]) for batch in theirs] == [3, 3, 3, 1]
    assert_same(ours, theirs)
    assert_same(new.call("", "batches", str(tmp_path / "c"), 7, num_workers=2, **options), theirs)


@DTYPES
def test_both_write_the_same_files_and_read_them_alike(old: Peer, new: Peer, tmp_path: Path, dtype: str) -> None:
    for peer, version, topk in ((old, 1, 0), (new, 2, 0), (new, 2, K)):
        manifest, shards, embeddings = made_up(dtype, topk)
        folder = tmp_path / f"{version}-{topk}"
        write_ours(folder / "ours", version, dtype, topk)
        keys = {"target_probs_topk": topk, **LATER_KEYS} if version == 2 else {}
        write_theirs(peer, folder / "theirs", {**manifest, **keys}, shards, embeddings)
        ours, theirs = files_of(folder / "ours"), files_of(folder / "theirs")
        assert list(ours) == list(theirs) and len(ours) == 5
        for name, content in theirs.items():
            assert ours[name] == content, f"{name} of version {version}, top-k {topk}"
        read = peer.call("", "read", str(folder / "ours"))  # and each reads the other's bit for bit
        assert_same(read["items"], items_of(shards))
        assert_same(read_ours(folder / "theirs"), items_of(shards))
        assert_same(read["manifest"], {**manifest, **keys, "format_version": version})
        assert_same(cache.read_manifest(str(folder / "theirs")), read["manifest"])
        assert_same(cache.read_target_embeddings(str(folder / "theirs")), embeddings.float())
        assert_same(read["embeddings"], embeddings.float())


DENSE_EVEN_SO = [{"target_probs_topk": topk} for topk in (None, 0, D, D + 1)]


@pytest.mark.parametrize("keys", [{}, *DENSE_EVEN_SO, {"made_by": "somebody", "shard_size": SAMPLES + 1}], ids=str)
def test_odd_manifests_mean_the_same_to_both(new, tmp_path, keys):
    manifest, shards, embeddings = made_up()
    if "shard_size" in keys:
        shards = [{name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}]
    write_theirs(new, tmp_path, {**manifest, **keys}, shards, embeddings)
    assert_same(read_ours(tmp_path), items_of(shards))
    assert_same(read_ours(tmp_path), new.call("", "read", str(tmp_path))["items"])


def test_version_1_needs_two_keys_and_knows_no_top_k_and_a_cache_may_be_empty(old, new, tmp_path):
    made, shards, embeddings = made_up()
    manifest = {"num_samples": SAMPLES, "shard_size": SHARD_SIZE, "target_probs_topk": 3}
    write_theirs(old, tmp_path / "1", manifest, shards, embeddings)
    assert_same(read_ours(tmp_path / "1"), items_of(shards))
    assert_same(read_ours(tmp_path / "1"), old.call("", "read", str(tmp_path / "1"))["items"])
    write_theirs(new, tmp_path / "2", {**made, "num_samples": 0}, [], embeddings)
    assert read_ours(tmp_path / "2") == new.call("", "read", str(tmp_path / "2"))["items"] == []


def test_names_of_files_and_constants_are_the_peers(old, new, tmp_path):
    hidden = ["BOOL_KEYS", "EMBEDDINGS_NAME", "FLOAT_KEYS", "FORMAT_VERSION", "INT_KEYS", "MANIFEST_NAME", "SHARD_RE"]
    names = ["CACHE_KEYS", "DTYPE_MAP", *(f"_{name}" for name in hidden)]
    assert old.call("", "constants", names) == {name: getattr(cache, name) for name in names}
    for name in ("shard-000007.safetensors", "shard-000007.safetensors.tmp", "shard-7.safetensors", "a-shard-000001"):
        (tmp_path / name).touch()
    for peer in (old, new):
        assert peer.call(CACHE, "shard_path", "folder", 7) == cache.shard_path("folder", 7)
        assert peer.call(CACHE, "manifest_path", "folder") == cache.manifest_path("folder")
        for folder in (tmp_path, tmp_path / "none"):
            found = cache.existing_shard_indices(str(folder))
            assert (
                peer.call(CACHE, "existing_shard_indices", str(folder)) == found == ({7} if folder.exists() else set())
            )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("draft", [1, 7, 40, V - 1, V, V + 3, None])
def test_both_choose_the_same_draft_vocabulary(new, old, seed, draft):
    """Few ids, so that most counts are tied; ids outside the vocabulary; specials twice, missing and outside."""
    generator = torch.Generator().manual_seed(seed)
    batches = [
        {
            "input_ids": torch.randint(-3, V + 3, (3, 11), generator=generator),
            "loss_mask": torch.randint(2, (3, 11), generator=generator),
        }
        for _ in range(seed)  # none at all with the first seed
    ]
    specials = [5, None, 5, -1, V, 2]
    options = {"target_vocab_size": V, "draft_vocab_size": draft, "special_token_ids": specials}
    ours = vocab.build_eagle3_token_mapping(batches, **options)
    for peer in (old, new):
        assert_same(ours, peer.call(VOCAB, "build_eagle3_token_mapping", batches, **options))


def test_each_loads_the_vocabulary_file_of_the_other(new, tmp_path):
    ids, sizes = torch.tensor([7, 2, 9, 0]), {"target_vocab_size": V, "draft_vocab_size": 4}
    vocab.save_token_mapping(tmp_path / "ours.pt", ids, V)
    new.call(VOCAB, "save_eagle3_token_mapping", str(tmp_path / "theirs.pt"), ids, V)
    theirs = new.call(VOCAB, "load_eagle3_token_mapping", str(tmp_path / "ours.pt"), **sizes)
    assert_same(vocab.load_token_mapping(tmp_path / "theirs.pt", **sizes), theirs)
    assert_same(theirs[0], ids)


@pytest.mark.parametrize("k", [1, K, D, D + 1])
@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16, torch.float16])
def test_both_factor_and_rebuild_probabilities_alike(new, k, number):
    """A row of zeros and rows of ties among them."""
    probs = torch.softmax(3 * torch.randn(3, S, D, generator=torch.Generator().manual_seed(1)), dim=-1)
    probs[0, 0], probs[0, 1] = 0.0, 1 / D
    probs = probs.to(number)
    ours = cache.compress_target_probs(probs, k)
    assert_same(ours, new.call(CACHE, "compress_target_probs", probs, k))
    rebuilt = cache.reconstruct_target_probs(*ours, D)
    assert_same(rebuilt, new.call(CACHE, "reconstruct_target_probs", *ours, D))
    for topk in (None, 0, 1, D - 1, D, D + 1):
        assert cache.is_compressed(topk, D) == new.call(CACHE, "is_compressed", topk, D)


def test_both_make_the_same_draft_distribution(new, old):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randperm(V, generator=generator)[:D]
    mask = torch.zeros(V, dtype=torch.bool)
    mask[ids] = True
    loss_mask = torch.randint(2, (3, S), generator=generator)
    for number in (torch.float32, torch.bfloat16):
        logits = torch.randn(3, S, V, generator=generator).mul(5).to(number)
        logits[:, -1] = 0  # as behind the shift
        ours = draft_distribution(logits, loss_mask, ids, mask)
        for peer in (old, new):
            assert_same(ours, peer.call(CORE, "_compute_target_distribution", logits, ids, mask, loss_mask))


MISSING, DECLARES = "FileNotFoundError", "declares 10 samples (3 shards) but found"
SHARDS = [f"shard-{number:06d}.safetensors" for number in range(4)]
FAULTS = {
    "manifest": (lambda c: (c / "manifest.json").unlink(), MISSING, ["manifest not found", "{folder}/manifest.json"]),
    "version": (
        lambda c: (c / "manifest.json").write_text(
            json.dumps(json.loads((c / "manifest.json").read_bytes()) | {"format_version": 9})
        ),
        *("ValueError", ["{folder}", "format_version=9"]),
    ),
    "embeddings": (
        lambda c: (c / "target_embeddings.safetensors").unlink(),
        *(MISSING, ["{folder}/target_embeddings.safetensors not found"]),
    ),
    "last shard": (lambda c: (c / SHARDS[2]).unlink(), "ValueError", ["{folder}", DECLARES, "[0, 1]"]),
    "middle shard": (lambda c: (c / SHARDS[1]).unlink(), "ValueError", ["{folder}", DECLARES, "[0, 2]"]),
    "too many": (
        lambda c: shutil.copy(c / SHARDS[2], c / SHARDS[3]),
        "ValueError",
        ["{folder}", DECLARES, "[0, 1, 2, 3]"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_cache_gives_the_peers_error(new, tmp_path, fault):
    folder = tmp_path / "c"
    write_ours(folder, 2, "bf16")
    damage, expected, words = FAULTS[fault]
    damage(folder)
    with pytest.raises(PeerError) as theirs:
        new.call("", "read", str(folder))
    with pytest.raises((ValueError, OSError)) as ours:
        cache.read_manifest(str(folder))
        cache.CachedEagle3Dataset(str(folder))
        cache.read_target_embeddings(str(folder))
    assert expected in theirs.value.classes and expected in [cls.__name__ for cls in type(ours.value).__mro__]
    for text in (theirs.value.text, str(ours.value)):
        assert [word for word in words if word.format(folder=folder) not in text] == []


def test_an_index_out_of_range_and_one_from_the_end(new, tmp_path):
    shards = write_ours(tmp_path, 2, "bf16")
    dataset = cache.CachedEagle3Dataset(str(tmp_path))
    for index in (-1, -SAMPLES):
        assert_same(dataset[index], items_of(shards)[index])
        assert_same(new.call("", "item", str(tmp_path), index), dataset[index])
    for index in (SAMPLES, -SAMPLES - 1):
        with pytest.raises(IndexError):
            dataset[index]
        with pytest.raises(PeerError) as theirs:
            new.call("", "item", str(tmp_path), index)
        assert theirs.value.classes[0] == "IndexError"


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        (["loss_mask", "input_ids"], ["missing required cache fields", "input_ids", "loss_mask"]),
        (["target_probs"], ["exactly one target_probs representation"]),
        (["target_probs", "loss_mask"], ["exactly one target_probs representation"]),
        ([], ["exactly one target_probs representation"]),
    ],
)
def test_a_shard_without_its_fields_gives_the_peers_error(new, tmp_path, drop, words):
    shard = {name: tensor for name, tensor in made_up()[1][0].items() if name not in drop}
    shard |= {} if drop else made_up(topk=K)[1][0]
    with pytest.raises(PeerError) as theirs:
        new.call(CACHE, "write_shard", str(tmp_path), 0, shard)
    with pytest.raises(ValueError) as ours:
        cache.write_shard(str(tmp_path), 0, shard)
    assert theirs.value.classes[0] == "ValueError"
    for text in (theirs.value.text, str(ours.value)):
        assert [word for word in words if word not in text] == []
    assert list(tmp_path.glob("*.safetensors")) == []


@pytest.mark.parametrize("sizes", [(0, 4), (-1, 4), (V, 0), (V, -1), (V, 2.5), ("50", 4)])
def test_sizes_of_vocabularies_that_make_no_sense_give_the_peers_error(new, sizes):
    options = {"target_vocab_size": sizes[0], "draft_vocab_size": sizes[1]}
    with pytest.raises(PeerError) as theirs:
        new.call(VOCAB, "build_eagle3_token_mapping", [], **options)
    with pytest.raises(ValueError) as ours:
        vocab.build_eagle3_token_mapping([], **options)
    name = "draft_vocab_size" if sizes[0] == V else "target_vocab_size"
    assert theirs.value.classes[0] == "ValueError" and name in theirs.value.text and name in str(ours.value)
