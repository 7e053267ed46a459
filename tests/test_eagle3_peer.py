"""Caches go both ways between this project and nemo-automodel, whose own code runs beside ours and is asked.

Where its wheels lie unpacked in folders named 0.5.0 (it writes version 1) and 0.7.0 (version 2), and NIELS_GPT_PEERS
names the folder above them. .ci/run makes it so; elsewhere these tests are left out.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_automodel import CACHE, CORE, TARGET, VOCAB, Peer, PeerError

from niels_gpt.eagle3 import cache, vocab
from niels_gpt.eagle3.models import load_target
from niels_gpt.eagle3.small_target import write_small_target
from niels_gpt.eagle3.supervision import draft_distribution
from niels_gpt.eagle3.target import HFEagle3TargetModel, default_eagle3_aux_layer_ids
from niels_gpt.recipes.eagle3 import carry_out, prepare, resolve
from niels_gpt.recipes.eagle3_options import Options
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import SentencePieceTokenizer

PEERS = os.environ.get("NIELS_GPT_PEERS")
pytestmark = [
    pytest.mark.skipif(
        PEERS is None, reason="nemo-automodel is not here: set NIELS_GPT_PEERS to a folder with its wheels, see .ci/run"
    ),
    pytest.mark.usefixtures("one_thread"),  # as in the peer's process: with others, sums have other last bits
]

S, H3, D, V, K = 12, 24, 20, 50, 5
SHARD_SIZE, SAMPLES = 4, 10
LATER_KEYS = {
    "input_data": "chats.jsonl",
    "split": None,
    "shuffle_seed": 42,
    "mask_reasoning_content": False,
    "mask_generation_prompt": True,
}
DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])


def running(version: str) -> Iterator[Peer]:
    folder = Path(str(PEERS)) / version
    assert (folder / "nemo_automodel").is_dir(), f"{folder} has no package nemo_automodel, and NIELS_GPT_PEERS is set"
    peer = Peer(folder)
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def old() -> Iterator[Peer]:
    """The version that writes and reads version 1."""
    yield from running("0.5.0")


@pytest.fixture(scope="module")
def new() -> Iterator[Peer]:
    """The version that writes and reads version 2."""
    yield from running("0.7.0")


def made_up(dtype: str = "bf16", topk: int = 0) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]], torch.Tensor]:
    """Return a manifest, its shards (the last one short) and embeddings. Every bit pattern that is a number occurs."""
    generator = torch.Generator().manual_seed(0)
    number = cache.DTYPE_MAP[dtype]
    manifest = {
        "target_model": "somebody/model",
        "target_vocab_size": V,
        "draft_vocab_size": D,
        "seq_length": S,
        "dtype": dtype,
        "num_samples": SAMPLES,
        "shard_size": SHARD_SIZE,
        "aux_hidden_dim": H3,
        "aux_layer_ids": [1, 3, 4],
        "selected_token_ids": torch.randperm(V, generator=generator)[:D].tolist(),
        **({"target_probs_topk": topk} if topk else {}),
    }
    shards = []
    for begin in range(0, SAMPLES, SHARD_SIZE):
        n = min(SHARD_SIZE, SAMPLES - begin)
        shard = {
            name: torch.randint(high, (n, S), generator=generator)
            for name, high in (("input_ids", V), ("attention_mask", 2), ("loss_mask", 2))
        }
        hidden = torch.randn(n, S, H3, generator=generator)
        hidden[0, 0, :4] = torch.tensor([0.0, -0.0, torch.finfo(number).tiny, torch.finfo(number).min])
        shard["aux_hidden_states"] = hidden.to(number)
        shard["position_mask"] = torch.rand(n, S, 1, generator=generator) < 0.5
        probs = torch.softmax(4 * torch.randn(n, S, D, generator=generator), dim=-1)
        if topk:
            values, indices = cache.compress_target_probs(probs, topk)
            shard |= {"target_probs_values": values.to(number), "target_probs_indices": indices}
        else:
            shard["target_probs"] = probs.to(number)
        shards.append(shard)
    return manifest, shards, torch.randn(V, H3 // 3, generator=generator).to(torch.bfloat16)


def items_of(shards: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Return what a reader has to give for some shards, worked out here."""
    items = []
    for shard in shards:
        for row in range(len(shard["input_ids"])):
            item = {name: tensor[row] for name, tensor in shard.items()}
            if "target_probs" not in item:
                values, indices = item.pop("target_probs_values"), item.pop("target_probs_indices")
                dense = torch.zeros(S, D, dtype=values.dtype)
                for slot in range(S):
                    dense[slot, indices[slot].long()] = values[slot]
                item["target_probs"] = dense
            items.append(item)
    return items


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Two nests of dicts, lists and tensors are equal: keys, lengths, dtypes, shapes, and every bit."""
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(bits(found), bits(expected)), (
            f"{where}: {(bits(found) != bits(expected)).sum()} bytes differ"
        )
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_same(found[name], expected[name], f"{where}/{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert found == expected, where


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def write_ours(folder: Path, version: int, dtype: str, topk: int = 0) -> list[dict[str, torch.Tensor]]:
    """Write a cache with our functions; returns its shards."""
    manifest, shards, embeddings = made_up(dtype, topk)
    keys = {"target_probs_topk": topk, **LATER_KEYS} if version == 2 else {}
    cache.write_manifest(str(folder), {**manifest, **keys, "format_version": version})
    cache.write_target_embeddings(str(folder), embeddings)
    for index, shard in enumerate(shards):
        cache.write_shard(str(folder), index, shard)
    return shards


def write_theirs(peer: Peer, folder: Path, manifest: dict[str, Any], shards: list[Any], embeddings: Any) -> None:
    peer.call(CACHE, "write_manifest", str(folder), manifest)
    peer.call(CACHE, "write_target_embeddings", str(folder), embeddings)
    for index, shard in enumerate(shards):
        peer.call(CACHE, "write_shard", str(folder), index, shard)


def read_ours(folder: Path) -> list[dict[str, torch.Tensor]]:
    dataset = cache.CachedEagle3Dataset(str(folder))
    return [dataset[index] for index in range(len(dataset))]


def files_of(folder: Path) -> dict[str, bytes]:
    """Return what the peer knows of a cache folder, byte for byte: not the sidecar, not meta.json."""
    names = ["manifest.json", "target_embeddings.safetensors", *sorted(path.name for path in folder.glob("shard-*"))]
    return {name: (folder / name).read_bytes() for name in names}


# --- caches of ours in the peer's hands ------------------------------------------------------------------------------


@DTYPES
def test_the_peer_reads_our_version_1_bit_for_bit(old: Peer, tmp_path: Path, dtype: str) -> None:
    shards = write_ours(tmp_path / "c", 1, dtype)
    read = old.call("", "read", str(tmp_path / "c"))
    assert_same(read["items"], items_of(shards))
    assert_same(read["manifest"], {**made_up(dtype)[0], "format_version": 1})
    assert_same(read["embeddings"], made_up()[2].float())


@DTYPES
@pytest.mark.parametrize("topk", [0, K])
def test_the_peer_reads_our_version_2_bit_for_bit(new: Peer, tmp_path: Path, dtype: str, topk: int) -> None:
    shards = write_ours(tmp_path / "c", 2, dtype, topk)
    read = new.call("", "read", str(tmp_path / "c"))
    assert_same(read["items"], items_of(shards))
    assert read["manifest"]["target_probs_topk"] == topk
    assert_same(read["embeddings"], made_up()[2].float())


def test_a_converted_cache_is_read_by_the_other_version_of_the_peer(old: Peer, new: Peer, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shards = write_ours(folder, 1, "bf16")
    with pytest.raises(PeerError, match="format_version=1, expected 2"):
        new.call("", "read", str(folder))
    cache.convert(str(folder), 2)
    assert_same(new.call("", "read", str(folder))["items"], items_of(shards))
    cache.convert(str(folder), 1)
    assert_same(old.call("", "read", str(folder))["items"], items_of(shards))


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_peers_dataloader_gives_the_batches_that_ours_gives(new: Peer, tmp_path: Path, shuffle: bool) -> None:
    write_ours(tmp_path / "c", 2, "bf16", K)
    options = {"batch_size": 3, "shuffle": shuffle}
    theirs = new.call("", "batches", str(tmp_path / "c"), 7, num_workers=0, **options)
    torch.manual_seed(7)
    ours = list(cache.build_cached_eagle3_dataloader(str(tmp_path / "c"), **options))
    assert [len(batch["input_ids"]) for batch in theirs] == [3, 3, 3, 1]
    assert_same(ours, theirs)


def test_workers_of_the_peers_dataloader_read_our_cache(old: Peer, tmp_path: Path) -> None:
    shards = write_ours(tmp_path / "c", 1, "fp32")
    theirs = old.call("", "batches", str(tmp_path / "c"), 0, batch_size=1, shuffle=False, num_workers=2)
    assert_same([{name: t[0] for name, t in batch.items()} for batch in theirs], items_of(shards))


# --- caches of the peer's in ours -------------------------------------------------------------------------------------


@DTYPES
def test_ours_reads_what_the_peer_wrote_in_version_1(old: Peer, tmp_path: Path, dtype: str) -> None:
    manifest, shards, embeddings = made_up(dtype)
    write_theirs(old, tmp_path, manifest, shards, embeddings)
    assert_same(read_ours(tmp_path), items_of(shards))
    assert_same(cache.read_manifest(str(tmp_path)), {**manifest, "format_version": 1})
    assert_same(cache.read_target_embeddings(str(tmp_path)), embeddings.float())


@DTYPES
@pytest.mark.parametrize("topk", [0, K])
@pytest.mark.parametrize("keys", [{}, {"target_probs_topk": None}, LATER_KEYS], ids=["none", "topk", "later"])
def test_ours_reads_what_the_peer_wrote_in_version_2(
    new: Peer, tmp_path: Path, dtype: str, topk: int, keys: dict[str, Any]
) -> None:
    manifest, shards, embeddings = made_up(dtype, topk)
    if keys == {"target_probs_topk": None}:
        keys = {"target_probs_topk": topk}
    write_theirs(new, tmp_path, {**manifest, **keys}, shards, embeddings)
    assert_same(read_ours(tmp_path), items_of(shards))
    read = cache.read_manifest(str(tmp_path))
    assert {name: read[name] for name in manifest} == manifest and read["format_version"] == 2
    assert_same(cache.read_target_embeddings(str(tmp_path)), embeddings.float())


@DTYPES
def test_both_write_the_same_files(old: Peer, new: Peer, tmp_path: Path, dtype: str) -> None:
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


DENSE_EVEN_SO = [{"target_probs_topk": topk} for topk in (None, 0, D, D + 1)]


@pytest.mark.parametrize("keys", [*DENSE_EVEN_SO, {"made_by": "somebody", "shard_size": SAMPLES + 1}], ids=str)
def test_odd_manifests_mean_the_same_to_both(new: Peer, tmp_path: Path, keys: dict[str, Any]) -> None:
    manifest, shards, embeddings = made_up()
    if "shard_size" in keys:
        shards = [{name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}]
    write_theirs(new, tmp_path, {**manifest, **keys}, shards, embeddings)
    assert_same(read_ours(tmp_path), items_of(shards))
    assert_same(read_ours(tmp_path), new.call("", "read", str(tmp_path))["items"])


def test_version_1_needs_two_keys_and_knows_no_top_k(old: Peer, tmp_path: Path) -> None:
    _, shards, embeddings = made_up()
    manifest = {"num_samples": SAMPLES, "shard_size": SHARD_SIZE, "target_probs_topk": 3}
    write_theirs(old, tmp_path, manifest, shards, embeddings)
    assert_same(read_ours(tmp_path), items_of(shards))
    assert_same(read_ours(tmp_path), old.call("", "read", str(tmp_path))["items"])


def test_a_cache_without_samples_is_empty_to_both(new: Peer, tmp_path: Path) -> None:
    manifest, _, embeddings = made_up()
    write_theirs(new, tmp_path, {**manifest, "num_samples": 0}, [], embeddings)
    assert read_ours(tmp_path) == new.call("", "read", str(tmp_path))["items"] == []


def test_names_of_files_and_constants_are_the_peers(old: Peer, new: Peer, tmp_path: Path) -> None:
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


# --- the functions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("draft", [1, 7, 40, V - 1, V, V + 3, None])
def test_both_choose_the_same_draft_vocabulary(new: Peer, old: Peer, seed: int, draft: int | None) -> None:
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


def test_each_loads_the_vocabulary_file_of_the_other(new: Peer, tmp_path: Path) -> None:
    ids, sizes = torch.tensor([7, 2, 9, 0]), {"target_vocab_size": V, "draft_vocab_size": 4}
    vocab.save_token_mapping(tmp_path / "ours.pt", ids, V)
    new.call(VOCAB, "save_eagle3_token_mapping", str(tmp_path / "theirs.pt"), ids, V)
    theirs = new.call(VOCAB, "load_eagle3_token_mapping", str(tmp_path / "ours.pt"), **sizes)
    assert_same(vocab.load_token_mapping(tmp_path / "theirs.pt", **sizes), theirs)
    assert_same(theirs[0], ids)


@pytest.mark.parametrize("k", [1, K, D, D + 1])
@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16, torch.float16])
def test_both_factor_and_rebuild_probabilities_alike(new: Peer, k: int, number: torch.dtype) -> None:
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


def test_both_make_the_same_draft_distribution(new: Peer, old: Peer) -> None:
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


# --- errors -----------------------------------------------------------------------------------------------------------


def break_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def break_version(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": 9}))


def break_embeddings(folder: Path) -> None:
    (folder / "target_embeddings.safetensors").unlink()


def break_last_shard(folder: Path) -> None:
    (folder / "shard-000002.safetensors").unlink()


def break_middle_shard(folder: Path) -> None:
    (folder / "shard-000001.safetensors").unlink()


def break_too_many(folder: Path) -> None:
    shutil.copy(folder / "shard-000002.safetensors", folder / "shard-000003.safetensors")


def ours_read(folder: str) -> None:
    cache.read_manifest(folder)
    cache.CachedEagle3Dataset(folder)
    cache.read_target_embeddings(folder)


FAULTS = {
    break_manifest: ("FileNotFoundError", ["manifest not found", "{folder}/manifest.json"]),
    break_version: ("ValueError", ["{folder}", "format_version=9"]),
    break_embeddings: ("FileNotFoundError", ["{folder}/target_embeddings.safetensors not found"]),
    break_last_shard: ("ValueError", ["{folder}", "declares 10 samples (3 shards) but found", "[0, 1]"]),
    break_middle_shard: ("ValueError", ["{folder}", "declares 10 samples (3 shards) but found", "[0, 2]"]),
    break_too_many: ("ValueError", ["{folder}", "declares 10 samples (3 shards) but found", "[0, 1, 2, 3]"]),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_broken_cache_gives_the_peers_error(new: Peer, tmp_path: Path, fault: Any) -> None:
    folder = tmp_path / "c"
    write_ours(folder, 2, "bf16")
    fault(folder)
    expected, words = FAULTS[fault]
    with pytest.raises(PeerError) as theirs:
        new.call("", "read", str(folder))
    with pytest.raises((ValueError, OSError)) as ours:
        ours_read(str(folder))
    assert expected in theirs.value.classes and expected in [cls.__name__ for cls in type(ours.value).__mro__]
    for text in (theirs.value.text, str(ours.value)):
        assert [word for word in words if word.format(folder=folder) not in text] == []


def test_an_index_out_of_range_and_one_from_the_end(new: Peer, tmp_path: Path) -> None:
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
    ],
)
def test_a_shard_without_its_fields_gives_the_peers_error(
    new: Peer, tmp_path: Path, drop: list[str], words: list[str]
) -> None:
    shard = {name: tensor for name, tensor in made_up()[1][0].items() if name not in drop}
    with pytest.raises(PeerError) as theirs:
        new.call(CACHE, "write_shard", str(tmp_path), 0, shard)
    with pytest.raises(ValueError) as ours:
        cache.write_shard(str(tmp_path), 0, shard)
    assert theirs.value.classes[0] == "ValueError"
    for text in (theirs.value.text, str(ours.value)):
        assert [word for word in words if word not in text] == []
    assert list(tmp_path.glob("*.safetensors")) == []


def test_a_shard_with_both_representations_gives_the_peers_error(new: Peer, tmp_path: Path) -> None:
    both = made_up()[1][0] | made_up(topk=K)[1][0]
    with pytest.raises(PeerError, match="exactly one target_probs representation"):
        new.call(CACHE, "write_shard", str(tmp_path), 0, both)
    with pytest.raises(ValueError, match="exactly one target_probs representation"):
        cache.write_shard(str(tmp_path), 0, both)


@pytest.mark.parametrize("sizes", [(0, 4), (-1, 4), (V, 0), (V, -1), (V, 2.5), ("50", 4)])
def test_sizes_of_vocabularies_that_make_no_sense_give_the_peers_error(new: Peer, sizes: Any) -> None:
    options = {"target_vocab_size": sizes[0], "draft_vocab_size": sizes[1]}
    with pytest.raises(PeerError) as theirs:
        new.call(VOCAB, "build_eagle3_token_mapping", [], **options)
    with pytest.raises(ValueError) as ours:
        vocab.build_eagle3_token_mapping([], **options)
    name = "draft_vocab_size" if sizes[0] == V else "target_vocab_size"
    assert theirs.value.classes[0] == "ValueError" and name in theirs.value.text and name in str(ours.value)


# --- the target -------------------------------------------------------------------------------------------------------


def tiny_target(kind: str, number: torch.dtype = torch.float32, layers: int = 8) -> Any:
    """Return a causal language model of random weights, the same at every call."""
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {
        "vocab_size": V,
        "hidden_size": H3 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "max_position_embeddings": 2 * S,
    }
    if kind != "GPT2":
        sizes |= {"intermediate_size": 12, "num_key_value_heads": 1, "head_dim": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        model = getattr(transformers, name)(config)
    # Far from the start of a training, where all logits are nearly equal.
    for parameter in model.parameters():
        parameter.data.mul_(8)
    return model.to(number).eval()


def raw_batch(lengths: list[int], width: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return unshifted ids, attention and loss masks of rows of some lengths, padded on the right with id 0."""
    generator = torch.Generator().manual_seed(seed)
    attention = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    return {
        "input_ids": torch.randint(1, V, attention.shape, generator=generator) * attention,
        "attention_mask": attention,
        "loss_mask": torch.randint(2, attention.shape, generator=generator) * attention,
    }


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "GPT2"])
@pytest.mark.parametrize("layers", [None, [5, 0, 2]])
def test_both_make_the_same_batch_of_a_target(new: Peer, old: Peer, kind: str, layers: list[int] | None) -> None:
    model = tiny_target(kind, torch.bfloat16 if layers else torch.float32)
    raw = raw_batch([S, 5, 1, 9], S)
    ours = HFEagle3TargetModel(model, aux_layer_ids=layers)
    made = vars(ours.generate_batch(**raw))
    assert made["logits"].std() > 0.1 and made["aux_hidden_states"].shape == (4, S, H3)
    for peer in (old, new):
        assert_same([ours.aux_layer_ids, made], list(peer.call("", "generate", model, layers, **raw)))


@pytest.mark.parametrize(
    ("count", "layers", "words"),
    [
        (6, None, ["too shallow", "num_hidden_layers=6", "aux_layer_ids"]),
        (8, [1, 2], ["exactly 3", "[1, 2]"]),
        (8, [1, 2, 2], ["distinct", "[1, 2, 2]"]),
        (8, [1, 2, 8], ["out of bounds", "8 layers"]),
        (8, [-1, 2, 3], ["out of bounds", "-1"]),
    ],
)
def test_layers_that_cannot_be_captured_give_the_peers_error(
    new: Peer, old: Peer, count: int, layers: list[int] | None, words: list[str]
) -> None:
    model = tiny_target("Llama", layers=count)
    with pytest.raises(ValueError) as ours:
        HFEagle3TargetModel(model, aux_layer_ids=layers)
    texts = [str(ours.value)]
    for peer in (old, new):
        with pytest.raises(PeerError) as theirs:
            peer.call("", "generate", model, layers, **raw_batch([S], S))
        assert theirs.value.classes[0] == "ValueError"
        texts.append(theirs.value.text)
    for text in texts:
        assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("count", range(1, 40))
def test_the_default_layers_are_the_peers(new: Peer, count: int) -> None:
    def layers(choose: Any) -> list[int] | str:
        try:
            return list(choose(count))
        except (ValueError, PeerError) as error:
            return "too shallow" if "too shallow" in str(error) else str(error)

    theirs = partial(new.call, TARGET, "default_eagle3_aux_layer_ids")
    assert layers(default_eagle3_aux_layer_ids) == layers(theirs)


# --- the producer, and what a draft learns ----------------------------------------------------------------------------

LENGTH, DRAFT, BATCH = 24, 90, 4  # samples of at most 24 tokens; 90 tokens that the draft knows; 4 rows a forward


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: SentencePieceTokenizer) -> Path:
    """A Llama of random weights in a folder, with the tests' tiny tokenizer."""
    return write_small_target(tmp_path_factory.mktemp("target") / "llama", tiny_tokenizer)


class Made:
    """A cache of ours made from rows of given lengths, and the same rows padded as the peer's loader gives them."""

    def __init__(self, folder: Path, target: Path, lengths: list[int], **options: Any) -> None:
        self.folder, self.target, self.rows_path = folder, target, folder.with_suffix(".jsonl")
        vocab_size = json.loads((target / "config.json").read_bytes())["vocab_size"]
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(4, vocab_size, (len(lengths), LENGTH), generator=generator)
        mask = torch.randint(2, ids.shape, generator=generator)
        mask[:, 1] = 1  # a row without any would be left out
        lines = [
            json.dumps({"input_ids": ids[row, :length].tolist(), "loss_mask": mask[row, :length].tolist()}) + "\n"
            for row, length in enumerate(lengths)
        ]
        self.rows_path.write_text("".join(lines))
        self.options = Options(
            target_model=str(target),
            input_data=str(self.rows_path),
            output_dir=folder,
            seq_length=LENGTH,
            draft_vocab_size=DRAFT,
            batch_size=BATCH,
            threads=1,
            device="cpu",
            **options,
        )
        resolved = resolve(self.options, Settings(source_root="sample"))
        carry_out(prepare(resolved), folder)
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
        self.specials = dict(zip(names, resolved.tokenizer.special_token_ids, strict=True))
        present = torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None]
        self.rows = {
            "input_ids": torch.where(present, ids, resolved.tokenizer.pad_id),
            "loss_mask": mask * present,
            "attention_mask": present.long(),
        }

    def by_the_peer(self, peer: Peer, folder: Path, *more: str) -> Path:
        """Let the peer's producer make the cache of the same rows, with the same options, in another folder."""
        argv = [
            *("--target-model", self.options.target_model, "--input-data", self.options.input_data),
            *("--output-dir", str(folder), "--device", "cpu", "--seq-length", str(LENGTH), "--shuffle-seed", "0"),
            *("--draft-vocab-size", str(DRAFT), "--batch-size", str(BATCH), "--dtype", self.options.dtype),
            *("--shard-size", str(self.options.shard_size), *more),
        ]
        if peer.version != "0.5.0":
            argv += ["--target-probs-topk", str(self.options.target_probs_topk), "--mask-generation-prompt"]
        assert peer.call("", "precompute", argv, str(self.target), self.rows, self.specials) == 0
        return folder


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("0.5.0", {"format_version": 1, "dtype": "fp32"}),
        ("0.5.0", {"format_version": 1, "dtype": "bf16"}),
        ("0.7.0", {"format_version": 2, "dtype": "fp16"}),
        ("0.7.0", {"target_probs_topk": K, "dtype": "bf16"}),
    ],
    ids=["1-fp32", "1-bf16", "2-fp16", "2-topk-bf16"],
)
def test_both_producers_write_the_same_files(
    version: str, options: dict[str, Any], old: Peer, new: Peer, small_target: Path, tmp_path: Path
) -> None:
    """All samples as long as a row, so that there is no padding, and the batches are the same."""
    made = Made(tmp_path / "ours", small_target, [LENGTH] * 10, shard_size=BATCH, **options)
    theirs = files_of(made.by_the_peer(old if version == old.version else new, tmp_path / "theirs"))
    ours = files_of(made.folder)
    assert list(ours) == list(theirs) and len(ours) == 5
    for name, content in theirs.items():
        assert ours[name] == content, name


def test_both_producers_make_the_same_rows_of_samples_of_many_lengths(
    old: Peer, small_target: Path, tmp_path: Path
) -> None:
    """The longest sample of a batch fills its row, so the batches are the same; what ours adds is zeros in the padding.

    The slot of a sample's last token is followed by none: there the peer has what its target says of the padding.
    """
    lengths = [LENGTH, 17, 9, 3, LENGTH, LENGTH, 2, 2]
    made = Made(tmp_path / "ours", small_target, lengths, shard_size=BATCH, dtype="fp32")
    theirs = old.call("", "read", str(made.by_the_peer(old, tmp_path / "theirs")))["items"]
    for length, item, other in zip(lengths, read_ours(made.folder), theirs, strict=True):
        for name in ("input_ids", "attention_mask", "loss_mask", "position_mask"):
            assert_same(item[name], other[name], name)
        assert_same(item["aux_hidden_states"][:length], other["aux_hidden_states"][:length])
        assert_same(item["target_probs"][: length - 1], other["target_probs"][: length - 1])
        assert not item["aux_hidden_states"][length:].any() and not item["target_probs"][length:].any()
        assert_same(item["target_probs"][length - 1], torch.softmax(torch.zeros(DRAFT), 0))


def test_the_peer_goes_on_with_a_cache_of_ours(new: Peer, small_target: Path, tmp_path: Path) -> None:
    made = Made(tmp_path / "c", small_target, [LENGTH] * 10, shard_size=BATCH, format_version=2)
    before = files_of(made.folder)
    with pytest.raises(PeerError, match=r"mismatched fields: \['shuffle_seed'\]"):
        made.by_the_peer(new, made.folder, "--resume", "--shuffle-seed", "7")
    (made.folder / "shard-000002.safetensors").unlink()
    made.by_the_peer(new, made.folder, "--resume")
    assert files_of(made.folder) == before


@pytest.mark.parametrize("version", [1, 2])
def test_a_draft_learns_the_same_from_our_cache_as_from_the_live_target(
    old: Peer, new: Peer, small_target: Path, tmp_path: Path, version: int
) -> None:
    """The peer's draft and trainer, three steps deep: the loss and every gradient, bit for bit."""
    lengths = [LENGTH, 17, 9, 3]
    made = Made(tmp_path / "c", small_target, lengths, shard_size=BATCH, dtype="fp32", format_version=version)
    model = load_target(str(small_target), revision=None, dtype=torch.float32, attention="sdpa", device="cpu")
    found = (old if version == 1 else new).call("", "train", str(made.folder), model, made.rows, [0, 1, 2, 3])
    cached, live = found["cached"], found["live"]
    assert cached["valid"] > 10 and 1 < cached["loss"] < 20
    assert len(cached["gradients"]) >= 12 and all(gradient.any() for gradient in cached["gradients"].values())
    assert_same(cached, live)
