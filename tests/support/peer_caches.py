"""Caches for the tests with nemo-automodel: written by either side, read by the other, compared bit for bit."""

import os

import torch

from niels_gpt.eagle3 import cache
from support.peer_automodel import CACHE

PEERS = os.environ.get("NIELS_GPT_PEERS")
NO_PEERS = "nemo-automodel is not here: set NIELS_GPT_PEERS to a folder with its wheels, see .ci/run"
S, H3, D, V, K = 12, 24, 20, 50, 5
SHARD_SIZE, SAMPLES = 4, 10
LATER_KEYS = {
    "input_data": "chats.jsonl",
    "split": None,
    "shuffle_seed": 42,
    "mask_reasoning_content": False,
    "mask_generation_prompt": True,
}


def made_up(dtype="bf16", topk=0):
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


def items_of(shards):
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


def assert_same(found, expected, where=""):
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


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def write_ours(folder, version, dtype, topk=0):
    """Write a cache with our functions; returns its shards."""
    manifest, shards, embeddings = made_up(dtype, topk)
    keys = {"target_probs_topk": topk, **LATER_KEYS} if version == 2 else {}
    cache.write_manifest(str(folder), {**manifest, **keys, "format_version": version})
    cache.write_target_embeddings(str(folder), embeddings)
    for index, shard in enumerate(shards):
        cache.write_shard(str(folder), index, shard)
    return shards


def write_theirs(peer, folder, manifest, shards, embeddings):
    peer.call(CACHE, "write_manifest", str(folder), manifest)
    peer.call(CACHE, "write_target_embeddings", str(folder), embeddings)
    for index, shard in enumerate(shards):
        peer.call(CACHE, "write_shard", str(folder), index, shard)


def read_ours(folder):
    dataset = cache.CachedEagle3Dataset(str(folder))
    return [dataset[index] for index in range(len(dataset))]


def files_of(folder):
    """Return what the peer knows of a cache folder, byte for byte: not the sidecar, not meta.json."""
    names = ["manifest.json", "target_embeddings.safetensors", *sorted(path.name for path in folder.glob("shard-*"))]
    return {name: (folder / name).read_bytes() for name in names}
