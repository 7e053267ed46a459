"""A batch of the target's outputs -> the stored fields, with zeros in the padding, and the counts of a receipt.

All slots are shifted, as `HFEagle3TargetModel.generate_batch` returns them. Of a sample of L tokens:

    slots 0 .. L-2   the target's outputs
    slot  L-1        the hidden states; without a next token the logits are taken as zeros, a uniform distribution
    slots L ..       zeros; the target's outputs for padding are not used

The logits of a batch take gigabytes, so they are processed in parts of `PART_VALUES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.cache import compress_target_probs, is_compressed
from niels_gpt.eagle3.produce.host_memory import empty_on_cpu, on_cpu
from niels_gpt.eagle3.target import PART_VALUES, Eagle3TargetBatch
from niels_gpt.storage.errors import CodedError


class NonFiniteError(CodedError, RuntimeError, code="E708"):
    """The target's output has a number that is not finite, or that the cache's dtype cannot hold."""


def draft_distribution(
    logits: Tensor, loss_mask: Tensor, selected_token_ids: Tensor, selected_token_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a draft's training signal: the target's distribution over the draft's tokens, and where it counts.

    logits: [B, S, V]. loss_mask: [B, S]. selected_token_ids: int64 [D]. selected_token_mask: bool [V].
    Returns target_probs float32 [B, S, D], which sum to 1 among the draft's tokens, and position_mask bool [B, S, 1]:
    true where the loss mask is 1 and the target's most probable token is in the draft's vocabulary.
    """
    draft, mask = _columns(selected_token_ids, logits), selected_token_mask.to(logits.device)
    slots, shape = logits.flatten(0, 1), logits.shape[:2]
    probs = torch.empty(len(slots), len(selected_token_ids), device=logits.device)
    known = torch.empty(len(slots), dtype=torch.bool, device=logits.device)
    for part in _parts(torch.ones(shape, dtype=torch.bool), logits.shape[-1]):
        probs[part] = _probs(slots[part], draft)
        known[part] = mask[slots[part].argmax(dim=-1)]
    return probs.view(*shape, -1), (known.view(shape) & (loss_mask == 1)).unsqueeze(-1)


def cache_fields(
    batch: Eagle3TargetBatch,
    lengths: Sequence[int] | Tensor,
    selected_token_ids: Tensor,
    selected_token_mask: Tensor,
    *,
    topk: int,
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], dict[str, list[Any] | None]]:
    """Return a batch as the cache stores it, and the counts for the receipt.

    lengths: the number of tokens of each row, 1 or more and at most the batch's width W.
    topk: 0 for the whole distribution. dtype: of the float fields.
    Returns (fields, facts). The fields are on the CPU: input_ids, attention_mask and loss_mask int64 [B, W] unchanged,
    aux_hidden_states [B, W, 3H], position_mask bool [B, W, 1], and either target_probs [B, W, D] or
    target_probs_values [B, W, k] and target_probs_indices int32 [B, W, k].
    facts has a list of B numbers each: supervised, the slots whose shifted loss mask is 1; positions, those whose
    position mask is true; draft_mass, the sum over the supervised slots of the probability that falls into the draft's
    vocabulary; kept_mass, the sum over the positions of the share that the top k keep, and None for topk 0.
    Raises: ValueError for lengths that do not fit.
    """
    real, inner = _slots(batch, lengths)
    logits, draft = batch.logits.flatten(0, 1), _columns(selected_token_ids, batch.logits)
    ids, mask = (tensor.to(logits.device) for tensor in (selected_token_ids, selected_token_mask))
    supervised = (batch.loss_mask == 1) & inner.to(logits.device)
    known, mass = torch.zeros_like(supervised).flatten(), supervised.flatten().float()
    kept = torch.zeros_like(mass, dtype=torch.float64)
    # Without logits: a softmax of zeros, like the others.
    end = _stored(torch.zeros(1, len(ids), device=logits.device).softmax(-1), topk, dtype)[0]
    fields = _padded(batch, real, inner, end, dtype)
    stored = {name: fields[name].flatten(0, 1) for name in end}
    for part in _parts(inner, logits.shape[-1]):
        some = logits[part]
        known[part] = mask[some.argmax(dim=-1)]
        mass[part] = _draft_mass(some, mass[part], ids)
        values, kept[part] = _stored(_probs(some, draft), topk, dtype)
        for name, all_slots in stored.items():
            all_slots[part] = values[name] if all_slots.is_cuda else on_cpu(values[name])
    fields |= {name: on_cpu(fields[name]) for name in end}
    position_mask = supervised & known.view_as(supervised)
    fields["position_mask"] = position_mask.unsqueeze(-1).cpu()
    facts: dict[str, list[Any] | None] = {
        "supervised": supervised.sum(1).tolist(),
        "positions": position_mask.sum(1).tolist(),
        "kept_mass": None if "target_probs" in end else _sums(kept.view_as(position_mask) * position_mask),
        "draft_mass": _sums(mass.view_as(supervised)),
    }
    return fields, facts


def _slots(batch: Eagle3TargetBatch, lengths: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Return, on the CPU, which slots hold a token, and a token with a next one: bool [B, W] each."""
    num_rows, width = batch.input_ids.shape
    tokens = torch.as_tensor(lengths, dtype=torch.int64).cpu()
    if tokens.shape != (num_rows,) or not bool(((tokens >= 1) & (tokens <= width)).all()):
        raise ValueError(
            f"lengths={tokens.tolist()}: expected one for each of {num_rows} rows, each from 1 to the batch's width "
            f"{width}"
        )
    slot = torch.arange(width)
    return slot < tokens[:, None], slot < tokens[:, None] - 1


def _parts(slots: Tensor, values: int) -> Iterator[slice | Tensor]:
    """Yield the true slots of bool [B, W] as indices into [B * W], in parts of at most `PART_VALUES` values.

    values: of each slot. Consecutive slots are a slice, as indexing with a slice makes no copy.
    """
    for part in torch.split(slots.flatten().nonzero().squeeze(-1), max(1, PART_VALUES // max(1, values))):
        start, stop = (int(part[0]), int(part[-1]) + 1) if len(part) else (0, 0)
        yield slice(start, stop) if stop - start == len(part) else part


def _columns(selected_token_ids: Tensor, logits: Tensor) -> Tensor | None:
    """Return the ids of the draft's logits, on their device; None: all, in order."""
    ids = selected_token_ids.to(logits.device)
    whole = len(ids) == logits.shape[-1] and torch.equal(ids, torch.arange(len(ids), device=ids.device))
    return None if whole else ids


def _probs(logits: Tensor, draft: Tensor | None) -> Tensor:
    """Return the distribution over the draft's tokens [n, D] in float32 of some slots' logits [n, V]."""
    return torch.softmax((logits if draft is None else logits.index_select(-1, draft)).float(), dim=-1)


def _stored(probs: Tensor, topk: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor | float]:
    """Return some slots' distributions [n, D] as the fields store them, and the share [n] that is kept of each."""
    if not is_compressed(topk, probs.shape[-1]):
        return {"target_probs": probs.to(dtype)}, 1.0
    values, indices = compress_target_probs(probs, topk)
    kept = probs.gather(-1, indices.long()).sum(-1, dtype=torch.float64)
    return {"target_probs_values": values.to(dtype), "target_probs_indices": indices}, kept


def _padded(
    batch: Eagle3TargetBatch, real: Tensor, inner: Tensor, end: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the fields that do not depend on the logits; the distributions of the inner slots are unset.

    end: the stored distribution of a last slot, [1, ...] each. The top k stay on its device until all parts of the
    batch are there; whole distributions are gigabytes, and go to the CPU part by part.
    """
    fields = {
        name: getattr(batch, name).to("cpu", torch.int64) for name in ("input_ids", "attention_mask", "loss_mask")
    }
    aux = batch.aux_hidden_states.to(dtype, copy=True)
    aux[~real.to(aux.device)] = 0
    fields["aux_hidden_states"] = on_cpu(aux)
    for name, value in end.items():
        shape = (*real.shape, value.shape[-1])
        if "target_probs" in end:
            slots = empty_on_cpu(shape, value.dtype, value.device)
        else:
            slots = torch.empty(shape, dtype=value.dtype, device=value.device)
        slots[(real & ~inner).to(slots.device)] = value.to(slots.device)
        slots[~real.to(slots.device)] = 0
        fields[name] = slots
    return fields


def _draft_mass(logits: Tensor, supervised: Tensor, selected_token_ids: Tensor) -> Tensor:
    """Return the probability [n] of the draft's tokens, in the slots where `supervised` is 1.0; else 0."""
    if len(selected_token_ids) < logits.shape[-1]:
        where = supervised.nonzero().squeeze(-1)
        some = logits[where].float()
        mass = (some.index_select(-1, selected_token_ids).logsumexp(-1) - some.logsumexp(-1)).exp()
        supervised = supervised.index_put((where,), mass)
    return supervised


def _sums(values: Tensor) -> list[float]:
    """Return the sum of each row, on the CPU, where the order of a sum is fixed."""
    return [float(total) for total in values.cpu().double().sum(1).tolist()]


def check_finite(
    batch: Eagle3TargetBatch,
    sample_ids: Sequence[str],
    lengths: Sequence[int] | Tensor,
    aux_layer_ids: Sequence[int],
    dtype: torch.dtype | None = None,
) -> None:
    """Raise NonFiniteError, naming the first sample and layer and a count, if a stored number would not be finite.

    Only stored slots count; the outputs for padding may be anything.
    dtype: of the cache, which hidden states must fit into (float16 ends at 65,504).
    """
    stored_aux = batch.aux_hidden_states.dtype if dtype is None else dtype
    extremes = [torch.aminmax(batch.aux_hidden_states), torch.aminmax(batch.logits)]
    good = torch.stack(
        [
            value.to(kind).isfinite()
            for pair, kind in zip(extremes, (stored_aux, batch.logits.dtype), strict=True)
            for value in pair
        ]
    )
    if bool(good.all()):
        return
    layers, vocab_size = len(aux_layer_ids), batch.logits.shape[-1]
    real, inner = _slots(batch, lengths)
    aux, logits = batch.aux_hidden_states.flatten(0, 1), batch.logits.flatten(0, 1)
    places: list[tuple[int, int, int]] = []
    slots = torch.arange(real.numel())
    for part in _parts(real, max(vocab_size, aux.shape[-1])):
        by_layer = aux[part].view(-1, layers, aux.shape[-1] // layers)
        bad_aux = ~by_layer.to(stored_aux).isfinite().all(-1)
        bad_logits = ~logits[part].isfinite().all(-1) & inner.flatten()[part].to(logits.device)
        # Per slot, the layers in order and then the logits.
        bad = torch.cat((bad_aux, bad_logits.unsqueeze(-1)), dim=-1).nonzero().tolist()
        places += [(*divmod(int(slots[part][slot]), real.shape[1]), place) for slot, place in bad]
    if places:
        raise NonFiniteError(_not_finite(batch, places, sample_ids, aux_layer_ids, stored_aux))


def _not_finite(
    batch: Eagle3TargetBatch,
    places: list[tuple[int, int, int]],
    sample_ids: Sequence[str],
    aux_layer_ids: Sequence[int],
    stored_aux: torch.dtype,
) -> str:
    row, slot, place = places[0]
    if place < len(aux_layer_ids):
        aux = batch.aux_hidden_states[row, slot].view(len(aux_layer_ids), -1)
        name, values = f"block {aux_layer_ids[place]}", aux[place]
        wrong = values[~values.to(stored_aux).isfinite()][0]
    else:
        name, values = "logits", batch.logits[row, slot]
        wrong = values[~values.isfinite()][0]
    samples = len({row for row, _, _ in places})
    return (
        f"sample {sample_ids[row]!r}, slot {slot}, {name}: {wrong.item()}, expected a finite number"
        f"{f' that fits into {stored_aux}' if bool(wrong.isfinite()) else ''}; {len(places)} such places in {samples} "
        f"of {len(sample_ids)} samples of the batch. Run the target in another dtype (--compute-dtype), store another "
        "one (--dtype), or leave the sample out"
    )
