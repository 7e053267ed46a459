"""Native caches of random states, written by the project's writer."""

import itertools

import numpy as np
import torch

from niels_gpt.eagle3.format import weights
from niels_gpt.eagle3.format.drafters import manifest_keys
from niels_gpt.eagle3.format.layout import AUX_DTYPES, DTYPES
from niels_gpt.eagle3.format.manifest import read_manifest, write_manifest
from niels_gpt.eagle3.format.native import NativeLayout, NativeSample, quantized, row_counts, target_positions
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.format.shard_writer import NativeShardWriter
from niels_gpt.eagle3.format.shards import shards_of
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.target import capture

VOCAB = 50


def manifest_of(samples, shards, **changed):
    """Return a native manifest: two layers of four values, a target of 50 tokens, a draft of 20."""
    return {
        "format_version": "native-1",
        "target_model": "t",
        "target_vocab_size": VOCAB,
        "hidden_size": 4,
        "aux_layer_ids": [3, 1],
        "aux_dtype": "bf16",
        "dtype": "bf16",
        "seq_length": 64,
        "num_samples": samples,
        "num_shards": shards,
        "draft_vocab_size": 20,
        "selected_token_ids": [*range(0, 40, 2)],
        "shard_bytes": 1 << 30,
        "conventions": {
            "layer_index": "block_output_0based",
            "last_hidden": "pre_norm",
            "shift": "none",
            "loss_mask": "raw",
        },
        "head": {
            "norm": "rms",
            "eps": 1e-6,
            "logit_scale": 1.0,
            "softcap": None,
            "tied": False,
            "compute_dtype": "fp32",
        },
        **manifest_keys(changed.get("targets", "loss"), changed.get("aux_layer_ids", [3, 1])),
        **changed,
    }


def random_sample(mask, manifest, seed=0):
    """Return a sample of random ids and states with this raw loss mask."""
    torch.manual_seed(seed)
    loss = np.array(mask, np.bool_)
    targets = manifest.get("targets", "loss")
    ((tokens, aux_rows, target_rows),) = row_counts(np.array([0, len(loss)]), loss, targets).tolist()
    hidden, vocab = manifest["hidden_size"], manifest["target_vocab_size"]
    aux, scales = torch.randn(aux_rows, len(manifest["aux_layer_ids"]), hidden), None
    if manifest["aux_dtype"] == "fp8":
        aux, scales = quantized(aux)
    return NativeSample(
        input_ids=torch.randint(vocab, (tokens,)).numpy().astype(np.uint32),
        loss_mask=loss,
        aux_hidden_states=aux.to(AUX_DTYPES[manifest["aux_dtype"]]),
        aux_scales=scales,
        last_hidden_states=torch.randn(target_rows, hidden).to(DTYPES[manifest["dtype"]]),
        log_normalizers=torch.randn(target_rows),
        argmax_ids=torch.randint(vocab, (target_rows,)),
        targets=targets,
    )


def write_native(folder, masks, cuts=(), **changed):
    """Write a native cache of samples with these raw loss masks and return them.

    cuts: first samples of the shards after the first. changed: other values of the manifest.
    """
    manifest = manifest_of(len(masks), len(cuts) + 1, **changed)
    samples = [random_sample(mask, manifest, seed) for seed, mask in enumerate(masks)]
    starts = np.cumsum([0, *map(len, masks)])
    mask = np.array([value for mask in masks for value in mask])
    counts = row_counts(starts, mask, manifest.get("targets", "loss"))
    firsts = [0, *cuts, len(masks)]
    for shard, (first, behind) in enumerate(itertools.pairwise(firsts)):
        writer = NativeShardWriter(folder, shard, NativeLayout.of(manifest), counts[first:behind])
        for row in reversed(range(behind - first)):
            writer.write(row, samples[first + row])
        writer.commit()
    write_manifest(folder, manifest)
    return samples


def capture_native(folder, model, rows, **manifest):
    """Write a native cache of what a model says about samples, one at a time, in one shard and without a plan."""
    samples = Samples.of_rows(rows)
    head, size = TargetHead.of_model(model), model.config.hidden_size
    sizes = {"target_vocab_size": head.vocab_size, "hidden_size": size, "head": head.facts()}
    whole = manifest_of(len(samples), 1, **{**sizes, **manifest})
    layout, counts = NativeLayout.of(whole), row_counts(samples.starts, samples.loss_mask)
    writer = NativeShardWriter(folder, 0, layout, counts)
    for index in range(len(samples)):
        ids, mask = samples.row(index)
        given = torch.from_numpy(ids.astype(np.int64))[None]
        aux, last, _ = (part[0] for part in capture(model, given, torch.ones_like(given), whole["aux_layer_ids"]))
        rows = last[target_positions(mask)]
        aux, scales = aux[: counts[index, 1]], None
        if whole["aux_dtype"] == "fp8":
            aux, scales = quantized(aux)
        states = aux.to(AUX_DTYPES[whole["aux_dtype"]]), scales, rows.to(DTYPES[whole["dtype"]])
        says = head.log_normalizer_and_argmax(rows)
        writer.write(index, NativeSample(ids.astype(np.uint32), mask != 0, *states, *says))
    writer.commit()
    write_manifest(folder, whole)
    write_weights(folder, head.weights())


def damaged_samples(cache, shard=0):
    """The samples of a shard that are not as its receipt says; None for what is of no sample."""
    return [row for row, _ in shards_of(cache, read_manifest(cache)).damage(shard)]


def write_weights(folder, tensors):
    """Write the weights of a target that a native cache holds."""
    weights.write_weights(folder, tensors)


def read_weights(folder, *names):
    """Read them, or those of these names."""
    return weights.read_weights(folder, *names)


def has_weights(folder):
    """Whether they are there and undamaged."""
    return weights.has_weights(folder, native=True)
