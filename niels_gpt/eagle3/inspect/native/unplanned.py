"""`recomputed` of a native cache without a plan, as imports make it: samples are run one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from niels_gpt.eagle3.format.native import NativeSample, dequantized
from niels_gpt.eagle3.format.weights import read_weights
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.inspect.compare import WRONG_SHARE, differing, other_rows, vector_length
from niels_gpt.eagle3.inspect.native.opened import NativeCache, NativeRow
from niels_gpt.eagle3.inspect.native.row_checks import tokens
from niels_gpt.eagle3.target import capture
from niels_gpt.progress import Progress
from niels_gpt.storage.errors import CacheError

_FP8_ROUNDING = 0.03  # of a vector's length: each value is off by a sixteenth of itself at most


def differences(
    cache: NativeCache, model: Any, device: torch.device, k: int, seed: int, progress: Progress
) -> Iterator[CacheError]:
    """Yield where `k` samples, drawn by `seed`, are not what a target gives for their ids.

    The raw ids are stored, so each sample is run alone. How the cache was computed is not known, so whole rows are
    compared within a tolerance. model: on `device`. progress: its items and units are samples.
    """
    try:
        head = TargetHead.of_model(model)
    except ValueError as error:
        yield CacheError(cache.folder, f"the target cannot be run again: {error}", code="E706")
        return
    if cache.last_hidden == "post_norm" != head.last_hidden:  # imported: other tools store what lm_head takes
        head = head.after_norm()
    yield from other_head(cache, head, is_rounded=True)
    if (head.vocab_size, head.last_hidden) != (cache.vocab_size, cache.last_hidden):
        return
    order = torch.randperm(cache.num_samples, generator=torch.Generator().manual_seed(seed))
    numbers = sorted(order[:k].tolist())
    for done, number in enumerate(numbers):
        progress(done, done, len(numbers))
        yield from _differing_sample(cache.row(number), model.eval(), head, device)


def _differing_sample(row: NativeRow, model: Any, head: TargetHead, device: torch.device) -> Iterator[CacheError]:
    sample, layers = row.sample, list(row.cache.aux_layer_ids)
    if int(sample.input_ids.max()) >= row.cache.vocab_size:
        yield row.problem(f"input_ids up to {int(sample.input_ids.max())}", f"0 to {row.cache.vocab_size - 1}")
        return
    if not len(sample.argmax_ids):
        return
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None].to(device)
    aux, pre_norm, post_norm = (each[0] for each in capture(model, ids, torch.ones_like(ids), layers))
    states = (post_norm if head.last_hidden == "post_norm" else pre_norm)[torch.from_numpy(sample.positions).to(device)]
    normalizers, argmax = (each.cpu() for each in head.log_normalizer_and_argmax(states))
    places, computed = sample.positions.tolist(), aux[: len(sample.aux_hidden_states)].float().cpu()
    apart = vector_length(values_of(sample, "aux_hidden_states").float() - computed) / vector_length(computed)
    rounding = 0.0 if sample.aux_scales is None else _FP8_ROUNDING
    for place, layer in enumerate(layers):
        name = f"aux_hidden_states of block {layer}"
        yield from differing(row, name, apart[:, place], what="token", rounding=rounding)
    last = states.float().cpu()
    apart = vector_length(sample.last_hidden_states.float() - last) / vector_length(last)
    yield from differing(row, "last_hidden_states", apart, what="token", places=places)
    apart = (sample.log_normalizers - normalizers).abs() / normalizers.abs().max().clamp_min(1)
    yield from differing(row, "log_normalizers", apart, what="token", places=places)
    different, allowed = int((sample.argmax_ids != argmax).sum()), 1 + int(WRONG_SHARE * len(argmax))
    if different > allowed:
        yield row.problem(f"argmax_ids differs at {tokens(different)}", f"{allowed} at most")


def other_head(cache: NativeCache, head: TargetHead, *, is_rounded: bool = False) -> Iterator[CacheError]:
    """Yield where target_weights.safetensors, bit for bit, or the manifest's head is not the target's.

    is_rounded: whether the weights may be those of a target that was loaded in another dtype.
    """
    if missing := cache.weights_missing():
        yield missing
        return
    stated, found = dict(cache.manifest["head"]), head.facts()
    if is_rounded:
        found["compute_dtype"] = stated["compute_dtype"]
    if (stated, cache.last_hidden) != (found, head.last_hidden):
        yield CacheError(
            cache.folder, f"head is {stated}, {cache.last_hidden}", f"{found}, {head.last_hidden}", code="E706"
        )
    path, loaded = cache.folder / cache.WEIGHTS, head.weights()
    stored = read_weights(cache.folder, follow_links=cache.follow_links)
    for name in sorted({*stored, *loaded}):
        shapes = [list(each[name].shape) if name in each else "absent" for each in (stored, loaded)]
        if shapes[0] != shapes[1]:
            yield CacheError(path, f"{name} is {shapes[0]}, the target's {shapes[1]}", "", cache.remedy(), code="E706")
            continue
        kept, weight = (each[name].reshape(len(each[name]), -1) for each in (stored, loaded))
        if wrong := other_rows(kept, weight, is_rounded=is_rounded):
            of = f"the embedding of token {wrong[0]}" if name == "embeddings" else f"row {wrong[0]} of {name}"
            expected = f"equal bits; wrong for {len(wrong):,} of {len(kept):,}"
            yield CacheError(path, f"{of} is not the target's", expected, cache.remedy(), code="E706")


def values_of(sample: NativeSample, name: str) -> Tensor:
    """Return the values of a tensor, [rows, ..., n], as they are compared."""
    values: Tensor = getattr(sample, name)
    if name == "aux_hidden_states" and sample.aux_scales is not None:
        return dequantized(values, sample.aux_scales, torch.float32)
    return values[:, None] if values.dim() == 1 else values
