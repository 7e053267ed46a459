"""`recomputed` of versions 1 and 2 with a plan: a batch is run again, and its rows compared field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.format.embeddings import read_target_embeddings
from niels_gpt.eagle3.format.layout import EMBEDDINGS_NAME, INT_FIELDS
from niels_gpt.eagle3.format.plan import Batch, Plan
from niels_gpt.eagle3.format.run import CONVERTED_FROM
from niels_gpt.eagle3.forward import PlannedForward
from niels_gpt.eagle3.inspect.compare import MASK_SHARE, TOLERANCE, bits, largest_difference, other_rows
from niels_gpt.eagle3.inspect.open_cache import slots
from niels_gpt.eagle3.inspect.published.opened import (
    AUX,
    INDICES,
    PROBS,
    VALUES,
    PublishedCache,
    Row,
    comparable_probs,
)
from niels_gpt.storage.errors import CacheError

_CHUNK_SLOTS = 64
_FP8_ERROR = 1 / 16  # of a number, rounded to three bits behind the first


class PublishedAgain:
    """Runs planned batches and compares their rows."""

    def __init__(self, cache: PublishedCache, plan: Plan, model: Any, device: torch.device, changed: list[str]) -> None:
        """changed: the parts of the environment in which this run differs from the plan's."""
        self._cache, self._plan, self._model, self._changed = cache, plan, model, changed
        self._forward = PlannedForward(plan, cache.samples, model, device)

    def other_weights(self) -> Iterator[CacheError]:
        """Yield where the stored embeddings are not the target's."""
        return other_embeddings(self._cache, self._model.get_input_embeddings())

    def differences(self, shard: int, batch: Batch, rows: list[int]) -> Iterator[CacheError]:
        """Yield where some rows of a shard, all of one batch, differ. Raises: NonFiniteError."""
        tensors, _ = self._forward(shard, batch)
        tables = self._cache.tables(shard)
        for row in rows:
            stored = self._cache.row(self._cache.first_of(shard) + row, tables)
            again = {name: tensor[batch[1].index(row)] for name, tensor in tensors.items()}
            if CONVERTED_FROM in self._plan.run and PROBS in again:
                again = _as_converted(again)
            yield from _compared(stored, again, self._plan.run, self._changed)


def _as_converted(again: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a row as a conversion of a native cache writes it, which has nothing of the slots that no loss needs."""
    fields, loss = {name: tensor.clone() for name, tensor in again.items()}, again["loss_mask"] == 1
    width = len(again[PROBS])
    loss, real = loss[:width], again["attention_mask"][:width] == 1
    fields[PROBS][real & ~loss] = 1 / fields[PROBS].shape[-1]
    fields[AUX][int(loss.nonzero().max()) + 1 if loss.any() else 0 :] = 0
    return fields


def other_embeddings(
    cache: PublishedCache, module: torch.nn.Module, *, is_rounded: bool = False
) -> Iterator[CacheError]:
    """Yield where the stored table is not the target's, in any environment bit for bit, since nothing is computed.

    is_rounded: whether the table may be that of a target that was loaded in another dtype.
    """
    path, weight = cache.folder / EMBEDDINGS_NAME, module.weight
    assert isinstance(weight, Tensor)
    if missing := cache.weights_missing():
        yield missing
        return
    stored = read_target_embeddings(cache.folder, follow_links=cache.follow_links)
    if stored.shape != weight.shape:
        yield CacheError(
            path, f"weight is {list(stored.shape)}, the target's {list(weight.shape)}", "", cache.remedy(), code="E706"
        )
        return
    wrong = other_rows(stored, weight, is_rounded=is_rounded)
    if wrong:
        found = f"the embedding of token {wrong[0]} is not the target's"
        yield CacheError(
            path, found, f"equal bits; wrong for {len(wrong):,} of {len(stored):,} tokens", cache.remedy(), code="E706"
        )


def _compared(
    row: Row, again: Mapping[str, Tensor], run: Mapping[str, Any], changed: list[str]
) -> Iterator[CacheError]:
    """Yield the fields in which a sample differs from `again`, [slots, ...] of its tokens alone.

    run: of the plan. changed: the parts of the environment in which this run differs from the plan's.
    """
    for name, computed in again.items():
        stored = row.fields[name][: len(computed)]
        differs = (bits(stored) != bits(computed)).any(dim=-1)
        if not differs.any():
            continue
        elsewhere = f" where the environment has another {', '.join(changed)}"
        if not changed or name in INT_FIELDS:
            why = "" if name in INT_FIELDS else ", for the environment is that of the plan"
            yield row.problem(_largest_difference(row, name, stored, computed, differs), f"equal bits{why}")
        elif name == "position_mask":
            allowed = 1 + int(MASK_SHARE * int(row.fields["loss_mask"].sum()))
            if int(differs.sum()) > allowed:
                found = f"{name} differs in {slots(int(differs.sum()))}"
                yield row.problem(found, f"{allowed} at most{elsewhere}")
        elif name != INDICES:
            yield from _beyond_tolerance(row, again, name, run, elsewhere)


def _beyond_tolerance(
    row: Row, again: Mapping[str, Tensor], name: str, run: Mapping[str, Any], elsewhere: str
) -> Iterator[CacheError]:
    """Yield the first chunk of slots in which a float field differs by more than TOLERANCE."""
    allowed = TOLERANCE[run["compute_dtype"]] + torch.finfo(again[name].dtype).eps
    if name == AUX and run.get(CONVERTED_FROM) == "fp8":
        allowed += _FP8_ERROR
    scale = _scale(again[AUX], len(row.cache.aux_layer_ids)) if name == AUX else torch.ones(())
    of_layer = " (1: the largest of its layer)" if name == AUX else ""
    size = row.cache.layout.draft_vocab_size
    for start in range(0, len(again[name]), _CHUNK_SLOTS):
        part = slice(start, min(start + _CHUNK_SLOTS, len(again[name])))
        stored, computed = (
            comparable_probs({key: fields[key][part] for key in (PROBS, VALUES, INDICES) if key in fields}, size)
            if name in (PROBS, VALUES)
            else fields[name][part].float()
            for fields in (row.fields, again)
        )
        apart = ((stored - computed).abs() / scale).nan_to_num(torch.inf)
        if (largest := float(apart.max())) > allowed:
            slot, column = divmod(int(apart.argmax()), apart.shape[-1])
            yield row.problem(
                f"{row.layer(name, column)} is {float(stored[slot, column]):g} at slot {start + slot}, column {column},"
                f" run again {float(computed[slot, column]):g}: {largest:.2g} apart{of_layer}",
                f"{allowed:.2g} at most{elsewhere}",
            )
            return


def _scale(states: Tensor, layers: int) -> Tensor:
    """Return for each column of aux_hidden_states the largest value of its layer: [columns]."""
    largest = states.float().abs().amax(dim=0).view(max(1, layers), -1)
    return largest.amax(dim=-1, keepdim=True).expand_as(largest).reshape(-1).clamp_min(torch.finfo(torch.float32).tiny)


def _largest_difference(row: Row, name: str, stored: Tensor, computed: Tensor, differs: Tensor) -> str:
    """Return where a field differs most, as text. differs: bool [slots], the slots whose bits differ."""
    slot, column = largest_difference(stored, computed, differs)
    stored, computed = (tensor.reshape(len(tensor), -1) for tensor in (stored, computed))
    return (
        f"{row.layer(name, column)} is {stored[slot, column].item():g} at slot {slot}, column {column}, run again "
        f"{computed[slot, column].item():g}; {name} differs in {slots(int(differs.sum()))}"
    )
