"""`recomputed` of the native form: a batch of the plan is run again, and its samples compared part by part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from niels_gpt.eagle3.format.layout import AUX_DTYPES
from niels_gpt.eagle3.format.native.sample import NativeSample
from niels_gpt.eagle3.format.plan import Batch, Plan
from niels_gpt.eagle3.forward import NativeForward
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.inspect.compare import (
    MASK_SHARE,
    TOLERANCE,
    bits,
    largest_difference,
)
from niels_gpt.eagle3.inspect.native.opened import NativeCache, NativeRow
from niels_gpt.eagle3.inspect.native.row_checks import part_name, tokens
from niels_gpt.eagle3.inspect.native.unplanned import other_head, values_of
from niels_gpt.storage.errors import CacheError

_CHUNK_ROWS = 64


class NativeAgain:
    """Runs planned batches and compares their samples."""

    def __init__(self, cache: NativeCache, plan: Plan, model: Any, device: torch.device, changed: list[str]) -> None:
        """changed: the parts of the environment in which this run differs from the plan's."""
        self._cache, self._plan, self._changed = cache, plan, changed
        self._model, self._device, self._head = model, device, TargetHead.of_model(model)

    def other_weights(self) -> Iterator[CacheError]:
        """Yield where the stored weights and the manifest's head are not the target's."""
        return other_head(self._cache, self._head)

    def differences(self, shard: int, batch: Batch, rows: list[int]) -> Iterator[CacheError]:
        """Yield where some samples of a shard, all of one batch, differ. Raises: NonFiniteError."""
        forward = NativeForward(self._plan, self._cache.samples, self._model, self._device, head=self._head)
        made, _ = forward(shard, batch)
        mapped, first = self._cache.mapped(shard), self._cache.first_of(shard)
        for row in rows:
            stored = NativeRow(self._cache, shard, first + row, mapped.sample(row))
            yield from _compared(stored, made[batch[1].index(row)], self._plan.run["compute_dtype"], self._changed)


def _compared(row: NativeRow, again: NativeSample, compute_dtype: str, changed: list[str]) -> Iterator[CacheError]:
    """Yield the parts in which a sample differs from `again`."""
    same_ids = np.array_equal(row.sample.input_ids, again.input_ids)
    if not same_ids or not np.array_equal(row.sample.loss_mask, again.loss_mask):
        yield row.problem("input_ids or loss_bits are not those of the plan's samples", "equal bits")
        return
    elsewhere = f" where the environment has another {', '.join(changed)}"
    computed = NativeRow(row.cache, row.shard, row.number, again).tensors()
    for name, (stored, positions) in row.tensors().items():
        other = computed[name][0]
        differs = (bits(stored) != bits(other)).any(dim=-1) if len(stored) else torch.zeros(0)
        if not differs.any():
            continue
        if not changed:
            kept, made = values_of(row.sample, name), values_of(again, name)
            at, column = largest_difference(kept, made, differs)
            one, two = (float(each.reshape(len(each), -1)[at, column]) for each in (kept, made))
            found = f"{part_name(row, name, column)} is {one:g} at token {positions[at]}, run again {two:g}"
            so = f"; {name} differs at {tokens(int(differs.sum()))}"
            yield row.problem(f"{found}{so}", "equal bits, for the environment is that of the plan")
        elif name != "aux_scales":
            yield from _beyond_tolerance(row, again, name, compute_dtype, elsewhere)
    different = int((row.sample.argmax_ids != again.argmax_ids).sum())
    allowed = 1 + int(MASK_SHARE * len(again.argmax_ids)) if changed else 0
    if different > allowed:
        yield row.problem(f"argmax_ids differs at {tokens(different)}", f"{allowed} at most{elsewhere * bool(changed)}")


def _beyond_tolerance(
    row: NativeRow, again: NativeSample, name: str, compute_dtype: str, elsewhere: str
) -> Iterator[CacheError]:
    """Yield the first chunk of rows in which a tensor differs by more than TOLERANCE."""
    positions = row.tensors()[name][1]
    one, other = values_of(row.sample, name), values_of(again, name)
    dtype = AUX_DTYPES[row.cache.manifest["aux_dtype"]] if name == "aux_hidden_states" else one.dtype
    allowed = TOLERANCE[compute_dtype] + torch.finfo(dtype).eps
    largest = other.float().abs().amax(dim=(0, -1), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    if name == "log_normalizers":
        largest = largest.clamp_min(1)
    for start in range(0, len(one), _CHUNK_ROWS):
        stored, computed = (each[start : start + _CHUNK_ROWS].float() for each in (one, other))
        apart = ((stored - computed).abs() / largest).nan_to_num(torch.inf)
        if (most := float(apart.max())) > allowed:
            at, column = divmod(int(apart.argmax()), apart[0].numel())
            before, now = (float(each.reshape(len(each), -1)[at, column]) for each in (stored, computed))
            yield row.problem(
                f"{part_name(row, name, column)} is {before:g} at token {positions[start + at]}, run again {now:g}: "
                f"{most:.2g} apart (1: the sample's largest)",
                f"{allowed:.2g} at most{elsewhere}",
            )
            return
