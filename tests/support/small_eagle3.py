"""Tiny EAGLE-3 caches for tests: random fields of the right forms, written by the project's own writers."""

import torch

from niels_gpt.eagle3.cache import (
    DTYPE_MAP,
    compress_target_probs,
    write_manifest,
    write_shard,
    write_target_embeddings,
)

HIDDEN, DRAFT_VOCAB, TARGET_VOCAB = 2, 8, 20


def fields_of(samples, *, slots=4, dtype=torch.float32, topk=0, seed=0):
    """Return stacked fields [samples, slots, ...] of random numbers: ids below TARGET_VOCAB, rows that sum to 1."""
    chance = torch.Generator().manual_seed(seed)
    shape = (samples, slots)
    probs = torch.softmax(torch.randn(*shape, DRAFT_VOCAB, generator=chance), -1)
    fields = {
        "input_ids": torch.randint(TARGET_VOCAB, shape, generator=chance),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
        "loss_mask": torch.randint(2, shape, generator=chance),
        "aux_hidden_states": torch.randn(*shape, 3 * HIDDEN, generator=chance).to(dtype),
        "position_mask": torch.rand(*shape, 1, generator=chance) < 0.5,
    }
    fields["loss_mask"][:, -1] = 0  # there is no token behind
    if topk:
        values, indices = compress_target_probs(probs, topk)
        return {**fields, "target_probs_values": values.to(dtype), "target_probs_indices": indices}
    return {**fields, "target_probs": probs.to(dtype)}


def manifest_of(*, samples, shard_size, slots=4, dtype="fp32", topk=0):
    """Return the manifest of a cache of such fields, without its version."""
    manifest = {
        "target_model": "tiny",
        "target_vocab_size": TARGET_VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "seq_length": slots,
        "dtype": dtype,
        "num_samples": samples,
        "shard_size": shard_size,
        "aux_hidden_dim": 3 * HIDDEN,
        "aux_layer_ids": [1, 3, 4],
        "selected_token_ids": list(range(DRAFT_VOCAB)),
    }
    return {**manifest, "target_probs_topk": topk} if topk else manifest


def write_cache(folder, *, samples, shard_size, slots=4, dtype="fp32", topk=0, seed=0):
    """Write a whole cache; returns its fields, all samples stacked."""
    fields = fields_of(samples, slots=slots, dtype=DTYPE_MAP[dtype], topk=topk, seed=seed)
    for index, begin in enumerate(range(0, samples, shard_size)):
        write_shard(str(folder), index, {key: tensor[begin : begin + shard_size] for key, tensor in fields.items()})
    write_manifest(
        str(folder), manifest_of(samples=samples, shard_size=shard_size, slots=slots, dtype=dtype, topk=topk)
    )
    weight = torch.randn(TARGET_VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))
    write_target_embeddings(str(folder), weight)
    return fields
