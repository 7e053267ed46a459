"""`recomputed`: runs some samples, drawn by a seed, through the target again and compares them with what is stored.

A sample's numbers depend on the other samples in its batch, on the padded width and on the number of threads, so whole
batches of the plan are run. In the environment of the plan every bit must be equal; in another one numbers may differ
by `TOLERANCE`. A cache without a plan is compared by unplanned.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.format.embeddings import read_target_embeddings
from niels_gpt.eagle3.format.layout import EMBEDDINGS_NAME, INT_FIELDS
from niels_gpt.eagle3.format.plan import Batch, Plan, differing_fields, open_plan
from niels_gpt.eagle3.inspect.open_cache import slots
from niels_gpt.eagle3.inspect.opening import open_cache
from niels_gpt.eagle3.inspect.published.opened import (
    AUX,
    INDICES,
    PROBS,
    VALUES,
    PublishedCache,
    Row,
    comparable_probs,
)
from niels_gpt.eagle3.inspect.published.unplanned import differences
from niels_gpt.eagle3.inspect.report import Report
from niels_gpt.eagle3.produce.forward import PlannedForward
from niels_gpt.eagle3.produce.supervision import NonFiniteError
from niels_gpt.eagle3.produce.workers import Load, torch_threads
from niels_gpt.progress import Progress
from niels_gpt.storage.checks import Verdict
from niels_gpt.storage.errors import CacheError

TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""Allowed in another environment, by the dtype that the target runs in: for a hidden state as a share of its layer's
largest in the sample, for a probability in absolute terms. The rounding to the stored dtype comes on top."""
_MASK_SHARE = 0.02  # of the slots with loss: where two tokens are nearly as likely, the first choice may change
_IDENTITY = ("revision", "weights_sha256", "config_sha256")
_CHUNK_SLOTS = 64
_CHUNK_TOKENS = 1024  # of the embeddings, compared at a time


@dataclass(frozen=True)
class Target:
    """The target to run."""

    facts: Mapping[str, Any]
    """Its revision, weights_sha256 and config_sha256, as in a plan."""
    load: Load
    """Loads it on a device; called only where it is the plan's."""
    run: Mapping[str, Any]
    """The environment that it will run in, as in a plan: device, processor, torch, transformers and so on."""


def recomputed(
    path: Path,
    target: Target,
    *,
    k: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    follow_links: bool = False,
) -> Verdict:
    """Return the verdict on `k` samples (all, where there are fewer) that are drawn by `seed`.

    progress: its items and units are batches; samples in a cache without a plan.
    Raises: FileNotFoundError, CacheError where the manifest cannot be read; ValueError for k below 1; what
        `target.load` raises.
    """
    if k < 1:
        raise ValueError(f"k={k}: expected the number of samples to compare, 1 or more")
    cache = open_cache(path, follow_links=follow_links)
    report, compare = Report(cache), _with_plan if cache.is_planned else _without_plan
    report.ask(compare, cache, target, k, seed, progress or (lambda items, done, total: None))
    return report.verdict()


def _with_plan(cache: PublishedCache, target: Target, k: int, seed: int, progress: Progress) -> Iterator[CacheError]:
    _ = cache.plan, cache.samples  # fail early: these errors say more than those of what needs the files
    plan = open_plan(cache.folder, follow_links=cache.follow_links)
    other = [name for name in _IDENTITY if target.facts.get(name) != plan.target.get(name)]
    if other:
        of_plan, given = plan.target.get("name"), target.facts.get("name")
        found = f"made from another target: {', '.join(other)} of {of_plan} in the plan differ from those of {given}"
        yield CacheError(cache.folder, found, remedy="Name the target that the cache was made from", code="E706")
        return
    changed = differing_fields(plan.run, target.run)
    device = torch.device(target.run["device"])
    with torch_threads(plan.run["threads"]):
        forward = PlannedForward(plan, cache.samples, target.load(device), device)
        yield from _other_embeddings(cache, forward.target.get_input_embeddings())
        batches = _drawn(plan, k, seed)
        for number, (shard, batch, rows) in enumerate(batches):
            progress(number, number, len(batches))
            try:
                tensors, _ = forward(shard, batch)
            except NonFiniteError as error:
                yield CacheError(cache.folder, f"run again, {error}", code="E706")
                continue
            tables = cache.tables(shard)
            for row in rows:
                stored = cache.row(shard * cache.shard_size + row, tables)
                again = {name: tensor[batch[1].index(row)] for name, tensor in tensors.items()}
                yield from _compared(stored, again, plan.run["compute_dtype"], changed)


def _without_plan(cache: PublishedCache, target: Target, k: int, seed: int, progress: Progress) -> Iterator[CacheError]:
    device = torch.device(target.run["device"])
    with torch_threads(target.run["threads"]):
        model = target.load(device)
        yield from _other_embeddings(cache, model.get_input_embeddings(), is_rounded=True)
        yield from differences(cache, model, device, k, seed, progress)


def _other_embeddings(
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
    wrong: list[int] = []
    for start in range(0, len(stored), _CHUNK_TOKENS):
        part = slice(start, start + _CHUNK_TOKENS)
        expected = weight[part].detach().float().cpu()
        differs = (_bits(stored[part]) != _bits(expected)).any(dim=-1)
        for dtype in (torch.bfloat16, torch.float16) if is_rounded else ():
            differs &= (stored[part].to(dtype) != expected.to(dtype)).any(dim=-1)
        wrong += (start + differs.nonzero()[:, 0]).tolist()
    if wrong:
        found = f"the embedding of token {wrong[0]} is not the target's"
        yield CacheError(
            path, found, f"equal bits; wrong for {len(wrong):,} of {len(stored):,} tokens", cache.remedy(), code="E706"
        )


def _drawn(plan: Plan, k: int, seed: int) -> list[tuple[int, Batch, list[int]]]:
    """Return the batches that hold `k` samples drawn by the seed: shard, batch, and which of its rows were drawn."""
    size, count = plan.manifest["shard_size"], plan.manifest["num_samples"]
    drawn = set(torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:k].tolist())
    return [
        (shard, batch, rows)
        for shard in sorted({number // size for number in drawn})
        for batch in plan.batches[shard]
        if (rows := sorted(row for row in batch[1] if shard * size + row in drawn))
    ]


def _compared(row: Row, again: Mapping[str, Tensor], compute_dtype: str, changed: list[str]) -> Iterator[CacheError]:
    """Yield the fields in which a sample differs from `again`, [slots, ...] of its tokens alone.

    changed: the parts of the environment in which this run differs from the plan's.
    """
    for name, computed in again.items():
        stored = row.fields[name][: len(computed)]
        differs = (_bits(stored) != _bits(computed)).any(dim=-1)
        if not differs.any():
            continue
        elsewhere = f" where the environment has another {', '.join(changed)}"
        if not changed or name in INT_FIELDS:
            why = "" if name in INT_FIELDS else ", for the environment is that of the plan"
            yield row.problem(_largest_difference(row, name, stored, computed, differs), f"equal bits{why}")
        elif name == "position_mask":
            allowed = 1 + int(_MASK_SHARE * int(row.fields["loss_mask"].sum()))
            if int(differs.sum()) > allowed:
                found = f"{name} differs in {slots(int(differs.sum()))}"
                yield row.problem(found, f"{allowed} at most{elsewhere}")
        elif name != INDICES:
            yield from _beyond_tolerance(row, again, name, compute_dtype, elsewhere)


def _beyond_tolerance(
    row: Row, again: Mapping[str, Tensor], name: str, compute_dtype: str, elsewhere: str
) -> Iterator[CacheError]:
    """Yield the first chunk of slots in which a float field differs by more than TOLERANCE."""
    allowed = TOLERANCE[compute_dtype] + torch.finfo(again[name].dtype).eps
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
    stored, computed = (tensor.reshape(len(tensor), -1) for tensor in (stored, computed))
    apart = (stored.double() - computed.double()).abs().nan_to_num(torch.inf)
    apart[~differs] = -1  # the difference may be no more than the sign of a zero
    slot, column = divmod(int(apart.argmax()), apart.shape[-1])
    return (
        f"{row.layer(name, column)} is {stored[slot, column].item():g} at slot {slot}, column {column}, run again "
        f"{computed[slot, column].item():g}; {name} differs in {slots(int(differs.sum()))}"
    )


def _bits(tensor: Tensor) -> Tensor:
    """Return a field as bytes [slots, bytes]: NaN is equal to itself, and zeros of two signs are not."""
    return tensor.contiguous().view(torch.uint8).view(len(tensor), -1)
