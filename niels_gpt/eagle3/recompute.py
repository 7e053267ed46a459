"""Does the target still say what is stored? Some samples, drawn by a seed, run through it once more and compared.

A sample's numbers depend on the others in its batch, on the padded width and on the number of threads, so whole planned
batches are run. In the environment of the plan every bit must be equal; in another one, numbers may differ by
`TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.cache import reconstruct_target_probs
from niels_gpt.eagle3.checks import RECOMPUTED
from niels_gpt.eagle3.forward import PlannedForward
from niels_gpt.eagle3.layout import INT_FIELDS
from niels_gpt.eagle3.manifest import EMBEDDINGS_NAME, read_target_embeddings
from niels_gpt.eagle3.opened import Opened, open_cache, tables_of
from niels_gpt.eagle3.plan import Batch, Plan, differing_fields, open_plan
from niels_gpt.eagle3.row_checks import AUX, INDICES, VALUES, Row, slots
from niels_gpt.eagle3.supervision import NonFiniteError
from niels_gpt.eagle3.unplanned import differences
from niels_gpt.eagle3.verify import Findings, Progress, Verdict
from niels_gpt.eagle3.workers import Load, torch_threads

TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""In another environment: of a hidden state as a share of its layer's largest in the sample, of a probability in
absolute terms; by the dtype that the target runs in. The rounding to the stored dtype comes on top."""
_MASK_SHARE = 0.02  # of the slots with loss: where two tokens are nearly as likely, the first choice may change
_IDENTITY = ("revision", "weights_sha256", "config_sha256")
_CHUNK_SLOTS = 64
_CHUNK_TOKENS = 1024  # of the embeddings, compared in one piece


@dataclass(frozen=True)
class Target:
    """The target to run."""

    facts: Mapping[str, Any]
    """Its revision, weights_sha256 and config_sha256, as in a plan."""
    load: Load
    """Gives it on a device; called only where it is the plan's."""
    run: Mapping[str, Any]
    """The environment that it will run in, as in a plan: device, processor, torch, transformers and so on."""


def recomputed(
    cache: Path,
    target: Target,
    *,
    k: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    follow_links: bool = False,
) -> Verdict:
    """Return how `k` samples (all, where there are fewer) that are drawn by `seed` compare.

    Raises: FileNotFoundError, CacheError where the manifest cannot be read; ValueError for k below 1; what
        `target.load` raises.
    """
    if k < 1:
        raise ValueError(f"k={k}: expected the number of samples to compare, 1 or more")
    opened = open_cache(cache, follow_links=follow_links)
    found = Findings(opened, cache)
    found.add(RECOMPUTED, _differences, opened, target, k, seed, progress)
    return found.verdict(RECOMPUTED)


def _differences(cache: Opened, target: Target, k: int, seed: int, progress: Progress | None) -> Iterator[str]:
    if not cache.is_planned:
        yield from _without_plan(cache, target, k, seed, progress)
        return
    _ = cache.plan, cache.samples  # what is missing is told better than by what needs it
    plan = open_plan(cache.folder, follow_links=cache.follow_links)
    other = [name for name in _IDENTITY if target.facts.get(name) != plan.target.get(name)]
    if other:
        yield (
            f"{cache.folder}: made from another target: {', '.join(other)} of {plan.target.get('name')} in the plan "
            f"differ from those of {target.facts.get('name')}. Name the target that the cache was made from"
        )
        return
    moved = differing_fields(plan.run, target.run)
    device = torch.device(target.run["device"])
    with torch_threads(plan.run["threads"]):
        forward = PlannedForward(plan, cache.samples, target.load(device), device)
        yield from _other_embeddings(cache, forward.target.get_input_embeddings())
        chosen = _drawn(plan, k, seed)
        for number, (shard, batch, rows) in enumerate(chosen):
            if progress is not None:
                progress(number, len(chosen))
            try:
                tensors, _ = forward(shard, batch)
            except NonFiniteError as error:
                yield f"{cache.folder}: run once more, {error}"
                continue
            tables = tables_of(cache, shard)
            for row in rows:
                again = {name: tensor[batch[1].index(row)] for name, tensor in tensors.items()}
                stored = cache.row(shard * cache.shard_size + row, tables)
                yield from _compared(stored, again, plan.run["compute_dtype"], moved)


def _without_plan(cache: Opened, target: Target, k: int, seed: int, progress: Progress | None) -> Iterator[str]:
    """Yield in what a cache of another tool, or of write_shard, is not what the target says."""
    device = torch.device(target.run["device"])
    with torch_threads(target.run["threads"]):
        model = target.load(device)
        yield from _other_embeddings(cache, model.get_input_embeddings(), rounded=True)
        yield from differences(cache, model, device, k, seed, progress or (lambda done, total: None))


def _other_embeddings(cache: Opened, module: torch.nn.Module, *, rounded: bool = False) -> Iterator[str]:
    """Yield in what the stored table is not the target's. No environment changes a bit of it: nothing is computed.

    rounded: whether it may be that of a target that was loaded in another dtype.
    """
    path, weight = cache.folder / EMBEDDINGS_NAME, module.weight
    assert isinstance(weight, Tensor)
    if not path.exists():
        yield cache.missing(path, "the target's input embeddings")
        return
    stored = read_target_embeddings(cache.folder, follow_links=cache.follow_links)
    if stored.shape != weight.shape:
        yield f"{path}: weight is {list(stored.shape)}, the target's {list(weight.shape)}. {cache.again()}"
        return
    wrong, first = 0, -1
    for start in range(0, len(stored), _CHUNK_TOKENS):
        part = slice(start, start + _CHUNK_TOKENS)
        its = weight[part].detach().float().cpu()
        other = (_bits(stored[part]) != _bits(its)).any(dim=-1)
        for dtype in (torch.bfloat16, torch.float16) if rounded else ():
            other &= (stored[part].to(dtype) != its.to(dtype)).any(dim=-1)
        if first < 0 and other.any():
            first = start + int(other.nonzero()[0])
        wrong += int(other.sum())
    if wrong:
        number = f"{wrong:,} of {len(stored):,} tokens"
        yield f"{path}: the embedding of token {first} is not the target's, expected equal bits; so of {number}. " + (
            cache.again()
        )


def _drawn(plan: Plan, k: int, seed: int) -> list[tuple[int, Batch, list[int]]]:
    """Return the batches that hold `k` samples drawn by the seed: shard, batch, and which of its rows were drawn."""
    size, count = plan.manifest["shard_size"], plan.manifest["num_samples"]
    drawn = set(torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:k].tolist())
    found = []
    for shard in sorted({number // size for number in drawn}):
        for batch in plan.batches[shard]:
            if rows := sorted(row for row in batch[1] if shard * size + row in drawn):
                found.append((shard, batch, rows))
    return found


def _compared(stored: Row, again: Mapping[str, Tensor], compute_dtype: str, moved: list[str]) -> Iterator[str]:
    """Yield the fields in which a sample differs. moved: what of the environment is not that of the plan."""
    for name, found in again.items():
        kept = stored.fields[name][: len(found)]
        other = (_bits(kept) != _bits(found)).any(dim=-1)
        if not other.any():
            continue
        if not moved or name in INT_FIELDS:
            why = "" if name in INT_FIELDS else ", for the environment is that of the plan"
            yield f"{stored.where}: {_largest(stored, name, kept, found, other)}, expected equal bits{why}"
        elif name == "position_mask":
            wrong, most = int(other.sum()), 1 + int(_MASK_SHARE * int(stored.fields["loss_mask"].sum()))
            if wrong > most:
                said = f"{name} differs in {slots(wrong)}, expected {most} at most{_for_other(moved)}"
                yield f"{stored.where}: {said}"
        elif name != INDICES:
            yield from _beyond_tolerance(stored, again, name, compute_dtype, moved)


def _beyond_tolerance(
    stored: Row, again: Mapping[str, Tensor], name: str, compute_dtype: str, moved: list[str]
) -> Iterator[str]:
    allowed = TOLERANCE[compute_dtype] + torch.finfo(again[name].dtype).eps
    scale = _scale(again[AUX], len(stored.aux_layer_ids)) if name == AUX else torch.ones(())
    for start in range(0, len(again[name]), _CHUNK_SLOTS):
        part = slice(start, start + _CHUNK_SLOTS)
        found = _comparable(again, name, part, stored.draft_vocab_size)
        kept = _comparable(stored.fields, name, part, stored.draft_vocab_size)[: len(found)]
        apart = ((kept - found).abs() / scale).nan_to_num(torch.inf)
        if (most := float(apart.max())) > allowed:
            slot, column = divmod(int(apart.argmax()), apart.shape[-1])
            yield (
                f"{stored.where}: {stored.layer(name, column)} is {float(kept[slot, column]):g} at slot "
                f"{start + slot}, column {column}, run once more {float(found[slot, column]):g}: {most:.2g} apart"
                f"{' (1: the largest of its layer)' if name == AUX else ''}, expected {allowed:.2g} at most"
                f"{_for_other(moved)}"
            )
            return


def _for_other(moved: list[str]) -> str:
    return f" where the environment has another {', '.join(moved)}"


def _comparable(fields: Mapping[str, Tensor], name: str, part: slice, draft_vocab_size: int) -> Tensor:
    """Return some slots of a field as float32. Of a top-k pair: all of the vocabulary, at least the k-th value each.

    Which of two tokens that are nearly as likely is the k-th may change; what is left out counts as the k-th.
    """
    values = fields[name][part].float()
    if name != VALUES:
        return values
    whole = reconstruct_target_probs(values, fields[INDICES][part], draft_vocab_size)
    return torch.maximum(whole, values.amin(dim=-1, keepdim=True))


def _scale(states: Tensor, layers: int) -> Tensor:
    """Return the largest hidden state of each layer, one for each column."""
    largest = states.float().abs().amax(dim=0).view(max(1, layers), -1)
    return largest.amax(dim=-1, keepdim=True).expand_as(largest).reshape(-1).clamp_min(torch.finfo(torch.float32).tiny)


def _largest(stored: Row, name: str, kept: Tensor, found: Tensor, other: Tensor) -> str:
    """Say where a field differs most from what it is when it is run once more. other: which slots differ."""
    kept, found = (tensor.reshape(len(tensor), -1) for tensor in (kept, found))
    apart = (kept.double() - found.double()).abs().nan_to_num(torch.inf)
    apart[~other] = -1  # what differs may be no more than the sign of a zero
    slot, column = divmod(int(apart.argmax()), apart.shape[-1])
    return (
        f"{stored.layer(name, column)} is {kept[slot, column].item():g} at slot {slot}, column {column}, run once more "
        f"{found[slot, column].item():g}; {name} differs in {slots(int(other.sum()))}"
    )


def _bits(tensor: Tensor) -> Tensor:
    """Return a field as bytes [slots, bytes]: NaN is equal to itself, and zeros of two signs are not."""
    return tensor.contiguous().view(torch.uint8).view(len(tensor), -1)
