"""Checks of one stored sample: finite numbers (`finite`), the ids of its source (`ids_match`), distributions that are
distributions (`distribution`).

A row's fields are views of the mapped shard. No check holds more than a few megabytes of it in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from niels_gpt.eagle3.format.layout import EMBEDDINGS_NAME, INT_FIELDS
from niels_gpt.eagle3.format.weights import read_target_embeddings
from niels_gpt.eagle3.inspect.open_cache import OpenCache, slots
from niels_gpt.eagle3.inspect.published.opened import INDICES, PROBS, VALUES, Row
from niels_gpt.storage.errors import CacheError

_CHUNK_ELEMENTS = 1 << 21  # 8 MiB in float32
_EMBEDDING_ROWS = 4096  # read at a time
_SOFTMAX_ERROR = 2**-14  # of a sum in float32 over a vocabulary, with room


def embeddings_not_finite(cache: OpenCache) -> Iterator[CacheError]:
    """Yield the first of the target's embeddings that is not finite."""
    if missing := cache.weights_missing():
        yield missing
        return
    table = read_target_embeddings(cache.folder, follow_links=cache.follow_links)
    for start in range(0, len(table), _EMBEDDING_ROWS):
        wrong = (~torch.isfinite(table[start : start + _EMBEDDING_ROWS])).any(dim=-1).nonzero()
        if len(wrong):
            found = f"the embedding of token {start + int(wrong[0])} is not finite"
            yield CacheError(cache.folder / EMBEDDINGS_NAME, found, "numbers", code="E701")
            return


def not_finite(row: Row) -> Iterator[CacheError]:
    """Yield the first NaN or infinity of each float field, with the number of slots that hold one."""
    for name, tensor in row.fields.items():
        if not tensor.is_floating_point():
            continue
        wrong_slots, first = 0, ""
        for start, part in _parts(tensor):
            low, high = torch.aminmax(part)  # both are NaN where one is there; no copy is made
            if torch.isfinite(low) and torch.isfinite(high):
                continue
            wrong = ~torch.isfinite(part)
            slot, column = wrong.nonzero()[0].tolist()
            value = float(part[slot, column])
            first = first or f"{row.layer(name, column)} is {value} at slot {start + slot}, column {column}"
            wrong_slots += int(wrong.any(dim=-1).sum())
        if wrong_slots:
            yield row.problem(f"{first} (so in {slots(wrong_slots)})", "finite numbers")


def other_ids(row: Row) -> Iterator[CacheError]:
    """Yield where the stored ids and masks are not those of the source's row, shifted and padded."""
    ids, loss_mask = (torch.from_numpy(part.astype("int64")) for part in row.cache.samples.row(row.number))
    width, length = len(row.fields["input_ids"]), len(ids)
    if length > width:
        yield row.problem(f"{width:,} slots", f"{length:,} tokens by sidecar/samples.safetensors")
        return
    raw = {name: torch.zeros(width + 1, dtype=torch.int64) for name in INT_FIELDS}
    raw["input_ids"][:width] = int(row.cache.plan["tokenizer"]["pad_id"])
    raw["input_ids"][:length], raw["loss_mask"][:length], raw["attention_mask"][:length] = ids, loss_mask, 1
    for name, unshifted in raw.items():
        stored, wanted = row.fields[name], unshifted[:width] if name == "attention_mask" else unshifted[1:]
        for slot, so in _first(stored != wanted):
            expected = f"{int(wanted[slot])} by sidecar/samples.safetensors{so}"
            yield row.problem(f"{name} is {int(stored[slot])} at slot {slot}", expected)


def not_distributions(row: Row) -> Iterator[CacheError]:
    """Yield what is wrong with the target's distribution and with the mask that says where it counts."""
    length, supervised, loss = row.length, row.fields["position_mask"][:, 0], row.fields["loss_mask"]
    for slot, so in _first(supervised & (loss != 1)):
        yield row.problem(f"position_mask is true at slot {slot} where loss_mask is 0", f"false{so}")
    last = max(0, length - 1)
    for slot, _ in _first(loss[last:] == 1):
        yield row.problem(
            f"loss_mask is 1 at slot {last + slot}",
            f"0: after its {length:,} tokens there is none to predict. It must be shifted as input_ids are: slot p has "
            "the mask of token p+1",
        )
    yield from _wrong_sums(row, length, supervised)
    if VALUES in row.fields:
        yield from _wrong_top_k(row, length)
    if row.cache.is_planned:  # other tools store what the target gives for the padding
        for name, tensor in row.fields.items():
            padding = tensor[length:]
            if name not in INT_FIELDS and padding.numel() and bool(padding.any()):
                for slot, _ in _first(padding.reshape(len(padding), -1).any(dim=-1)):
                    expected = f"zeros after its {length:,} tokens"
                    yield row.problem(f"{name} is not zero at slot {length + slot}", expected)


def tolerance(dtype: torch.dtype, width: int) -> float:
    """Return how far a sum of `width` probabilities, each rounded to a dtype, may be from 1."""
    about = torch.finfo(dtype)
    return about.eps / 2 + width * about.smallest_normal * about.eps / 2 + _SOFTMAX_ERROR


def _wrong_sums(row: Row, length: int, supervised: Tensor) -> Iterator[CacheError]:
    probs = row.fields[VALUES if VALUES in row.fields else PROBS]
    allowed = tolerance(probs.dtype, probs.shape[-1])
    lowest = torch.cat([part.amin(dim=-1) for _, part in _parts(probs)])
    sums = torch.cat([part.sum(dim=-1, dtype=torch.float32) for _, part in _parts(probs)])
    # In the padding other tools store a distribution, and this project stores zeros.
    is_padding = (sums == 0) & (torch.arange(len(sums)) >= length) & ~supervised
    for slot, so in _first(lowest < 0):
        yield row.problem(f"a probability is {float(lowest[slot]):g} at slot {slot}", f"none below 0{so}")
    for slot, so in _first(~((sums - 1).abs() <= allowed) & ~is_padding):
        yield row.problem(f"probabilities sum to {float(sums[slot]):.6g} at slot {slot}", f"1 within {allowed:.2g}{so}")


def _wrong_top_k(row: Row, length: int) -> Iterator[CacheError]:
    values, indices = row.fields[VALUES][:length], row.fields[INDICES][:length]
    size = row.cache.layout.draft_vocab_size
    for slot, so in _first(((indices < 0) | (indices >= size)).any(dim=-1)):
        outside = next(index for index in indices[slot].tolist() if not 0 <= index < size)
        yield row.problem(f"draft id {outside} at slot {slot}", f"0 to {size - 1}{so}")
    ordered = indices.sort(dim=-1).values
    for slot, so in _first((ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)):
        yield row.problem(f"a draft id is there twice at slot {slot}", f"different ones{so}")
    for slot, so in _first((values[:, 1:] > values[:, :-1]).any(dim=-1)):
        yield row.problem(f"{VALUES} rise at slot {slot}", f"the largest first{so}")


def _first(wrong: Tensor) -> Iterator[tuple[int, str]]:
    """Yield the first slot where `wrong`, bool [S], is true, and a note on how many there are; nothing without one."""
    found = wrong.nonzero()[:, 0]
    if len(found):
        yield int(found[0]), f"; wrong in {slots(len(found))}"


def _parts(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield a field [S, width] in pieces of at most _CHUNK_ELEMENTS: the number of the first slot, and the piece."""
    step = max(1, _CHUNK_ELEMENTS // max(1, tensor.shape[-1]))
    for start in range(0, len(tensor), step):
        yield start, tensor[start : start + step]
