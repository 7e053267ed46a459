"""A batch of the target's outputs -> the fields of the cache, with the zeros of the padding and what to count.

All slots are shifted ones, as `HFEagle3TargetModel.generate_batch` returns them. Of a sample of L tokens:

    slots 0 .. L-2   what the target says
    slot  L-1        the hidden states; there is no next token, so the logits count as zeros: a uniform distribution
    slots L ..       zeros, whatever the target made of the padding

The logits of a batch have gigabytes, so all work on them goes through parts of `PART_VALUES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.cache import compress_target_probs, is_compressed
from niels_gpt.eagle3.target import PART_VALUES, Eagle3TargetBatch


class NonFiniteError(RuntimeError):
    """The target gave a number that is not finite, or that the cache's dtype cannot hold."""


def draft_distribution(
    logits: Tensor, loss_mask: Tensor, selected_token_ids: Tensor, selected_token_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what a draft is trained on: the target's distribution over the draft's tokens, and where it counts.

    logits: [B, S, V]. loss_mask: [B, S]. selected_token_ids: int64 [D]. selected_token_mask: bool [V].
    Returns target_probs float32 [B, S, D], which sum to 1 among the draft's tokens, and position_mask bool [B, S, 1]:
    true where the loss mask is 1 and the target's first choice of all its tokens is one that the draft knows.
    """
    num_rows, width, vocab_size = logits.shape
    draft, known = _columns(selected_token_ids, logits), selected_token_mask.to(logits.device)
    probs = torch.empty(num_rows, width, len(selected_token_ids), device=logits.device)
    position_mask = loss_mask == 1
    for row, part in _parts([width] * num_rows, vocab_size):
        probs[row, part] = _probs(logits[row, part], draft)
        position_mask[row, part] &= known[logits[row, part].argmax(dim=-1)]
    return probs, position_mask.unsqueeze(-1)


def cache_fields(
    batch: Eagle3TargetBatch,
    lengths: Sequence[int] | Tensor,
    selected_token_ids: Tensor,
    selected_token_mask: Tensor,
    *,
    topk: int,
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], dict[str, list[Any] | None]]:
    """Return a batch as the cache stores it, and what the receipt counts.

    lengths: the number of tokens of each row, 1 or more and at most the batch's width W.
    topk: 0 for the whole distribution. dtype: of the float fields.
    Returns (fields, facts). The fields are on the CPU: input_ids, attention_mask and loss_mask int64 [B, W] as they
    are in the batch, aux_hidden_states [B, W, 3H], position_mask bool [B, W, 1], and either target_probs [B, W, D] or
    target_probs_values [B, W, k] and target_probs_indices int32 [B, W, k].
    facts has a list of B numbers each: supervised, the slots whose shifted loss mask is 1; positions, those whose
    position mask is true; draft_mass, the sum over the supervised slots of the probability that falls into the draft's
    vocabulary; kept_mass, the sum over the positions of the share that the top k keep, and None for topk 0.
    Raises: ValueError for lengths that do not fit.
    """
    tokens, logits = _checked_lengths(batch, lengths), batch.logits
    draft, mask = _columns(selected_token_ids, logits), selected_token_mask.to(logits.device)
    last = torch.tensor([length - 1 for length in tokens], device=logits.device)
    inner = torch.arange(logits.shape[1], device=logits.device) < last[:, None]
    supervised = (batch.loss_mask == 1) & inner
    known, mass = torch.zeros_like(supervised), torch.zeros_like(supervised, dtype=torch.float32)
    kept = torch.zeros_like(supervised, dtype=torch.float64)
    # Without logits: a softmax of zeros, like the others.
    end = _stored(torch.zeros(1, len(selected_token_ids), device=logits.device).softmax(-1), topk, dtype)[0]
    fields = _padded(batch, tokens, end, dtype)
    for row, part in _parts(last.tolist(), logits.shape[-1]):
        some = logits[row, part]
        known[row, part] = mask[some.argmax(dim=-1)]
        mass[row, part] = _draft_mass(some, supervised[row, part], selected_token_ids.to(some.device))
        stored, kept[row, part] = _stored(_probs(some, draft), topk, dtype)
        for name, values in stored.items():
            fields[name][row, part] = values.to("cpu")
    position_mask = supervised & known
    fields["position_mask"] = position_mask.unsqueeze(-1).cpu()
    facts: dict[str, list[Any] | None] = {
        "supervised": supervised.sum(1).tolist(),
        "positions": position_mask.sum(1).tolist(),
        "kept_mass": None if "target_probs" in fields else _sums(kept * position_mask),
        "draft_mass": _sums(mass),
    }
    return fields, facts


def _checked_lengths(batch: Eagle3TargetBatch, lengths: Sequence[int] | Tensor) -> list[int]:
    num_rows, width = batch.input_ids.shape
    found = torch.as_tensor(lengths, dtype=torch.int64)
    if found.shape != (num_rows,) or not bool(((found >= 1) & (found <= width)).all()):
        raise ValueError(
            f"lengths={found.tolist()}: expected one for each of {num_rows} rows, each from 1 to the batch's width "
            f"{width}"
        )
    return [int(length) for length in found.tolist()]


def _parts(slots: Sequence[int], values: int) -> Iterator[tuple[int, slice]]:
    """Yield rows and slices of their first `slots`, whose slots of `values` numbers are `PART_VALUES` at most."""
    at_once = max(1, PART_VALUES // max(1, values))
    for row, stop in enumerate(slots):
        for start in range(0, stop, at_once):
            yield row, slice(start, min(start + at_once, stop))


def _columns(selected_token_ids: Tensor, logits: Tensor) -> Tensor | None:
    """Return which logits are the draft's, on their device; None: all, in their order."""
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
    batch: Eagle3TargetBatch, tokens: Sequence[int], end: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the fields but for what the logits say: the distributions of the slots before each row's last are unset.

    end: what the distribution of a last slot is stored as, [1, ...] each.
    """
    fields = {
        name: getattr(batch, name).to("cpu", torch.int64) for name in ("input_ids", "attention_mask", "loss_mask")
    }
    shape = batch.input_ids.shape
    aux = torch.empty(*shape, batch.aux_hidden_states.shape[-1], dtype=dtype)
    probs = {name: torch.empty(*shape, value.shape[-1], dtype=value.dtype) for name, value in end.items()}
    for row, length in enumerate(tokens):
        aux[row, :length] = batch.aux_hidden_states[row, :length].to(dtype).cpu()
        aux[row, length:] = 0
        for name, value in end.items():
            probs[name][row, length - 1 : length] = value.cpu()
            probs[name][row, length:] = 0
    return {**fields, "aux_hidden_states": aux, **probs}


def _draft_mass(logits: Tensor, supervised: Tensor, selected_token_ids: Tensor) -> Tensor:
    """Return the probability [n] of the draft's tokens among all: of the supervised ones of some slots, else 0."""
    mass = supervised.float()
    if len(selected_token_ids) < logits.shape[-1]:
        some = logits[supervised].float()
        mass[supervised] = (some.index_select(-1, selected_token_ids).logsumexp(-1) - some.logsumexp(-1)).exp()
    return mass


def _sums(values: Tensor) -> list[float]:
    """Return the sum of each row, made on the CPU, where sums are made in one order."""
    return [float(total) for total in values.cpu().double().sum(1).tolist()]


def check_finite(
    batch: Eagle3TargetBatch,
    sample_ids: Sequence[str],
    lengths: Sequence[int] | Tensor,
    aux_layer_ids: Sequence[int],
    dtype: torch.dtype | None = None,
) -> None:
    """Raise NonFiniteError where a stored number would not be finite: it names the first sample, the layer and a count.

    Only slots that are stored count: what the target makes of padding may be anything.
    dtype: that of the cache, where hidden states have to fit into it: float16 ends at 65,504.
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
    tokens, places = _checked_lengths(batch, lengths), []
    for row, part in _parts(tokens, max(vocab_size, batch.aux_hidden_states.shape[-1])):
        aux = batch.aux_hidden_states[row, part].view(part.stop - part.start, layers, -1)
        bad_aux = ~aux.to(stored_aux).isfinite().all(-1)
        bad_logits = ~batch.logits[row, part].isfinite().all(-1)
        bad_logits[tokens[row] - 1 - part.start :] = False  # those of the last slot are not stored
        # Per slot and place: the layers in their order, then the logits.
        found = torch.cat((bad_aux, bad_logits.unsqueeze(-1)), dim=-1).nonzero().tolist()
        places += [(row, part.start + slot, place) for slot, place in found]
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
        name, found = f"block {aux_layer_ids[place]}", aux[place]
        wrong = found[~found.to(stored_aux).isfinite()][0]
    else:
        name, found = "logits", batch.logits[row, slot]
        wrong = found[~found.isfinite()][0]
    samples = len({row for row, _, _ in places})
    return (
        f"sample {sample_ids[row]!r}, slot {slot}, {name}: {wrong.item()}, expected a finite number"
        f"{f' that fits into {stored_aux}' if bool(wrong.isfinite()) else ''}; {len(places)} such places in {samples} "
        f"of {len(sample_ids)} samples of the batch. Run the target in another dtype, store another one, or leave the "
        "sample out"
    )
