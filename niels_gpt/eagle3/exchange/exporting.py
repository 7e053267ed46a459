"""A native cache -> a folder of another tool: every state in its place, zeros where the cache has none.

A native cache has no state where no loss can need it: its auxiliary states end before the last target row, and target
rows are stored where a loss mask, shifted or not, can be 1. All other states are zeros in the folder, and the loss of
EAGLE-3, of either tool, looks at none of them. Drafts of other kinds, such as MTP and DFlash, read more states than
these. The masks and ids are whole.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from niels_gpt.eagle3.exchange.foreign import BadSample, ForeignSample, checked_sample
from niels_gpt.eagle3.exchange.specforge import NUM_LAYERS, SpecForgeWriter
from niels_gpt.eagle3.exchange.speculators import SpeculatorsWriter
from niels_gpt.eagle3.format.layout import DTYPES, row_bytes_of
from niels_gpt.eagle3.format.manifest import is_native, read_manifest
from niels_gpt.eagle3.format.native import NativeSample, dequantized
from niels_gpt.eagle3.format.shards import NativeShards
from niels_gpt.eagle3.format.torch_files import MAX_INFLATED
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.progress import Progress
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fresh_folder import fresh_folder

WRITERS: dict[str, Callable[[Path, int], Any]] = {"specforge": SpecForgeWriter, "speculators": SpeculatorsWriter}
"""The tools whose files are written."""


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    samples: int
    tokens: int
    without_aux: int
    """Tokens whose auxiliary states are zeros."""
    without_last: int
    """Tokens whose last hidden state is zeros."""
    num_bytes: int
    """Of the files with states."""
    last_hidden: str
    """pre_norm or post_norm: what the last hidden states are in the folder."""
    notes: tuple[str, ...]
    """What was changed on the way."""


def export_cache(
    cache: Path, tool: str, out: Path, *, progress: Progress | None = None, follow_links: bool = False
) -> Exported:
    """Write the folder that another tool reads.

    tool: a key of WRITERS. out: must not exist, or be an empty folder; it is there whole or not at all.
    progress: items and units are samples.
    Raises: CacheError for a cache of version 1 or 2, for one that lacks what the tool needs, and for a sample that no
        import would take.
    """
    manifest = read_manifest(cache, follow_links=follow_links)
    _refuse(cache, manifest, tool)
    stored = NativeShards.of_cache(cache, follow_links=follow_links)
    _refuse_large(cache, stored)
    kind = WRITERS[tool]
    to_post_norm = tool == "specforge" and manifest["conventions"]["last_hidden"] == "pre_norm"
    head = TargetHead.of_cache(cache, follow_links=follow_links) if to_post_norm else None
    num_bytes = 0
    with fresh_folder(out, sources=[cache]) as work:
        writer = kind(work, stored.num_samples)
        for index in range(stored.num_samples):
            sample = _whole(stored.sample(index), manifest, head, one_dtype=tool != "specforge")
            _refuse_bad(cache, manifest, index, sample)
            num_bytes += writer.write(index, sample)
            if progress is not None:
                progress(index + 1, index + 1, stored.num_samples)
        writer.finish()
    tokens, aux_rows, target_rows = stored.counts.sum(axis=0).tolist()
    return Exported(
        stored.num_samples,
        tokens,
        tokens - aux_rows,
        tokens - target_rows,
        num_bytes,
        writer.last_hidden,
        tuple(_notes(manifest, to_post_norm)),
    )


def _refuse(cache: Path, manifest: dict[str, Any], tool: str) -> None:
    """Raise CacheError for a cache that cannot become such a folder."""
    if not is_native(manifest):
        found = (
            f"is version {manifest['format_version']}: it has the target's probabilities, not its last hidden states"
        )
        remedy = f"Produce it with --format native; {tool} computes probabilities itself"
        raise CacheError(cache, found, "a native cache", remedy, code="E710")
    layers, last = len(manifest["aux_layer_ids"]), manifest["conventions"]["last_hidden"]
    if tool == "specforge" and layers != NUM_LAYERS:
        found = f"has {layers} auxiliary layers"
        raise CacheError(cache, found, f"{NUM_LAYERS}, which SpecForge's EAGLE-3 takes", code="E710")
    if tool == "speculators" and last == "post_norm":
        found = "has last hidden states after the final norm, which cannot be undone"
        raise CacheError(cache, found, "those before it, which speculators takes", "Export to specforge", code="E710")


def _refuse_large(cache: Path, stored: NativeShards) -> None:
    """Raise CacheError for a sample that would be larger than an import takes: it has few states, and gets them all."""
    states = len(stored.manifest["aux_layer_ids"]) + 1, stored.manifest["hidden_size"]
    longest = int(stored.counts[:, 0].max(initial=0))
    size = longest * row_bytes_of((DTYPES[stored.manifest["dtype"]], states))
    if size > MAX_INFLATED:
        found = f"a sample of {longest:,} tokens would have {size:,} bytes with a state for each"
        raise CacheError(cache, found, f"{MAX_INFLATED:,} at most", "Make the cache of shorter samples", code="E710")


def _refuse_bad(cache: Path, manifest: dict[str, Any], index: int, sample: ForeignSample) -> None:
    """Raise CacheError for states that are not finite, and for token ids that the target does not have."""
    parts, sizes = (sample.input_ids, sample.loss_mask, sample.aux, sample.last), ("hidden_size", "target_vocab_size")
    try:
        checked_sample(f"sample {index}", *parts, *(manifest[size] for size in sizes))
    except BadSample as error:
        remedy = f"Find all damage: {shlex.join(['niels-gpt', 'eagle3', 'verify', str(cache)])}"
        found = f"{error.name} is {error.reason}: {error.found}"
        raise CacheError(cache, found, remedy=remedy, code="E701") from error


def _whole(
    sample: NativeSample, manifest: dict[str, Any], head: TargetHead | None, *, one_dtype: bool
) -> ForeignSample:
    """Return a sample with a state for every token; head: applies its norm."""
    number, length = DTYPES[manifest["dtype"]], len(sample.loss_mask)
    aux, last = sample.aux_hidden_states, sample.last_hidden_states
    if sample.aux_scales is not None:
        aux = dequantized(aux, sample.aux_scales, number)
    if head is not None:
        last = head.normed(last).to(number)
    if one_dtype:
        number = torch.promote_types(aux.dtype, last.dtype)
        aux, last = aux.to(number), last.to(number)
    return ForeignSample(
        torch.from_numpy(sample.input_ids.astype(np.int64)),
        torch.from_numpy(sample.loss_mask.copy()),
        _spread(aux, torch.arange(len(aux)), length),
        _spread(last, torch.from_numpy(sample.positions), length),
    )


def _spread(states: Tensor, positions: Tensor, length: int) -> Tensor:
    """Return states [length, ...] with the given ones at their positions, and zeros elsewhere."""
    whole = states.new_zeros((length, *states.shape[1:]))
    whole[positions] = states
    return whole


def _notes(manifest: dict[str, Any], to_post_norm: bool) -> list[str]:
    notes = ["for EAGLE-3 only: drafts such as MTP and DFlash read states that are zeros here"]
    if to_post_norm:
        notes.append("the final norm was applied to the last hidden states")
    if manifest["aux_dtype"] == "fp8":
        notes.append(f"the auxiliary states were dequantized from float8 to {manifest['dtype']}")
    return notes
