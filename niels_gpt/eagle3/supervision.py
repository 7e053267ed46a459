"""A batch of the target's outputs -> the fields of the cache, with the zeros of the padding and what to count.

All slots are shifted ones, as `HFEagle3TargetModel.generate_batch` returns them. Of a sample of L tokens:

    slots 0 .. L-2   what the target says
    slot  L-1        the hidden states; there is no next token, so the logits count as zeros: a uniform distribution
    slots L ..       zeros, whatever the target made of the padding
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.cache import compress_target_probs, is_compressed
from niels_gpt.eagle3.target import Eagle3TargetBatch

MASS_VALUES = 1 << 24
"""Logits that become float32 at a time where the draft vocabulary's share is measured: 64 MiB."""


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
    first_choice = logits.argmax(dim=-1)
    known = selected_token_mask.to(logits.device)[first_choice]
    drafted = logits.index_select(-1, selected_token_ids.to(logits.device))
    return torch.softmax(drafted.float(), dim=-1), (known & (loss_mask == 1)).unsqueeze(-1)


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
    real, inner, last = _slots(batch, lengths)
    probs, position_mask = draft_distribution(batch.logits, batch.loss_mask, selected_token_ids, selected_token_mask)
    position_mask &= inner.unsqueeze(-1)
    rows = torch.arange(len(last), device=last.device)
    probs[rows, last] = torch.softmax(torch.zeros_like(probs[0, 0]), dim=-1)
    probs.masked_fill_(~real.unsqueeze(-1), 0)
    fields = {
        name: getattr(batch, name).to("cpu", torch.int64) for name in ("input_ids", "attention_mask", "loss_mask")
    }
    fields["aux_hidden_states"] = batch.aux_hidden_states.masked_fill(~real.unsqueeze(-1), 0).to(dtype).cpu()
    fields["position_mask"] = position_mask.cpu()
    supervised = (batch.loss_mask == 1) & inner
    facts: dict[str, list[Any] | None] = {
        "supervised": supervised.sum(1).tolist(),
        "positions": position_mask.sum((1, 2)).tolist(),
        "kept_mass": None,
        "draft_mass": _draft_mass(batch.logits, supervised, selected_token_ids.to(last.device)),
    }
    if is_compressed(topk, probs.shape[-1]):
        values, indices = compress_target_probs(probs, topk)
        indices.masked_fill_(~real.unsqueeze(-1), 0)  # the first k of equal zeros are any
        fields["target_probs_values"], fields["target_probs_indices"] = values.to(dtype).cpu(), indices.cpu()
        kept = probs.gather(-1, indices.long()).sum(-1, dtype=torch.float64)
        facts["kept_mass"] = (kept * position_mask.squeeze(-1)).sum(1).tolist()
    else:
        fields["target_probs"] = probs.to(dtype).cpu()
    return fields, facts


def _slots(batch: Eagle3TargetBatch, lengths: Sequence[int] | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which slots are of a token, and of one with a next one (bool [B, W] each), and each row's last slot."""
    (num_rows, width), device = batch.input_ids.shape, batch.logits.device
    found = torch.as_tensor(lengths, dtype=torch.int64)
    if found.shape != (num_rows,) or not bool(((found >= 1) & (found <= width)).all()):
        raise ValueError(
            f"lengths={found.tolist()}: expected one for each of {num_rows} rows, each from 1 to the batch's width "
            f"{width}"
        )
    last = (found - 1).to(device)
    slot = torch.arange(width, device=device)
    return slot <= last[:, None], slot < last[:, None], last


def _draft_mass(logits: Tensor, supervised: Tensor, selected_token_ids: Tensor) -> list[float]:
    """Return, for each row, the probability of the draft's tokens among all, summed over the supervised slots."""
    row, slot = supervised.nonzero(as_tuple=True)
    sums = torch.zeros(len(supervised), dtype=torch.float64, device=logits.device)
    if len(selected_token_ids) == logits.shape[-1]:
        return sums.index_add_(0, row, torch.ones_like(row, dtype=torch.float64)).tolist()
    at_once = max(1, MASS_VALUES // logits.shape[-1])
    masses = [torch.zeros(0, device=logits.device)]
    for part in range(0, len(row), at_once):
        some = logits[row[part : part + at_once], slot[part : part + at_once]].float()
        masses.append((some.index_select(-1, selected_token_ids).logsumexp(-1) - some.logsumexp(-1)).exp())
    mass = torch.cat(masses).double().cpu()
    # On the CPU, where sums are made in one order.
    return sums.cpu().index_add_(0, row.cpu(), mass).tolist()


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
    real, inner, _ = _slots(batch, lengths)
    aux = batch.aux_hidden_states.view(*real.shape, len(aux_layer_ids), -1)
    bad_aux = ~aux.to(stored_aux).isfinite().all(-1) & real.unsqueeze(-1)
    bad_logits = ~batch.logits.isfinite().all(-1) & inner
    # Per row, slot and place: the layers in their order, then the logits.
    places = torch.cat((bad_aux, bad_logits.unsqueeze(-1)), dim=-1).nonzero()
    if not len(places):
        return
    row, slot, place = places[0].tolist()
    if place < len(aux_layer_ids):
        name, found = f"block {aux_layer_ids[place]}", aux[row, slot, place]
        wrong = found[~found.to(stored_aux).isfinite()][0]
    else:
        name, found = "logits", batch.logits[row, slot]
        wrong = found[~found.isfinite()][0]
    samples = len(set(places[:, 0].tolist()))
    raise NonFiniteError(
        f"sample {sample_ids[row]!r}, slot {slot}, {name}: {wrong.item()}, expected a finite number"
        f"{f' that fits into {stored_aux}' if bool(wrong.isfinite()) else ''}; {len(places)} such places in {samples} "
        f"of {len(sample_ids)} samples of the batch. Run the target in another dtype, store another one, or leave the "
        "sample out"
    )
