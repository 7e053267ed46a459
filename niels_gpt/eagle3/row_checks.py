"""What must hold of one stored sample: finite numbers, the ids of its source, distributions that are distributions.

A row is a sample's part of its shard, field by field, as views of the mapped file. Nothing here holds more of it in
memory than a few megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from niels_gpt.eagle3.layout import INT_FIELDS

_CHUNK_ELEMENTS = 1 << 21  # looked at in one piece: 8 MiB in float32
_SOFTMAX_ERROR = 2**-14  # of a sum in float32 over a vocabulary, with room
PROBS, VALUES, INDICES, AUX = "target_probs", "target_probs_values", "target_probs_indices", "aux_hidden_states"


@dataclass(frozen=True)
class Row:
    """One stored sample."""

    number: int
    """In the cache."""
    named: Callable[[], str]
    """Gives `where`; asked only where something is wrong, for the id is in another file."""
    fields: Mapping[str, Tensor]
    """Name -> [S, ...]: a row of the shard."""
    aux_layer_ids: tuple[int, ...]
    """Whose outputs lie side by side in aux_hidden_states."""
    draft_vocab_size: int
    padding_is_zero: bool
    """True for a cache that was made here: behind a sample's tokens its floats are zero. The peer's run over them."""

    @property
    def where(self) -> str:
        """Begins every sentence: the shard's file, the sample's number and its id."""
        return self.named()

    @property
    def length(self) -> int:
        """Slots of tokens: all up to the last one that attention_mask has."""
        attended = self.fields["attention_mask"].nonzero()
        return int(attended[-1]) + 1 if len(attended) else 0

    def layer(self, field: str, column: int) -> str:
        """Say what a column of a field is: a layer, or the field itself."""
        if field != AUX:
            return field
        width = self.fields[AUX].shape[-1] // max(1, len(self.aux_layer_ids))
        return f"{AUX} of block {self.aux_layer_ids[column // width]}" if width else field


def not_finite(row: Row) -> Iterator[str]:
    """Yield the first NaN or infinity of each float field, with the number of slots that hold one."""
    for name, tensor in row.fields.items():
        if not tensor.is_floating_point():
            continue
        bad, first = 0, ""
        for start, part in _parts(tensor):
            low, high = torch.aminmax(part)  # both are NaN where one is there; no copy is made
            if torch.isfinite(low) and torch.isfinite(high):
                continue
            wrong = ~torch.isfinite(part)
            slot, column = (int(number) for number in wrong.nonzero()[0])
            found = f"{float(part[slot, column])} at slot {start + slot}, column {column}"
            first = first or f"{row.layer(name, column)} is {found}"
            bad += int(wrong.any(dim=-1).sum())
        if bad:
            yield f"{row.where}: {first}, expected finite numbers; there are such in {slots(bad)} of {name}"


def other_ids(row: Row, ids: Tensor, loss_mask: Tensor, pad_id: int) -> Iterator[str]:
    """Yield where the stored ids and masks are not those of the source's row.

    ids, loss_mask: int64 [L], as they came from the source: neither shifted nor padded.
    """
    width, length = len(row.fields["input_ids"]), len(ids)
    raw = {name: torch.zeros(width + 1, dtype=torch.int64) for name in INT_FIELDS}
    raw["input_ids"][:width] = pad_id
    raw["input_ids"][:length], raw["loss_mask"][:length], raw["attention_mask"][:length] = ids, loss_mask, 1
    for name, unshifted in raw.items():
        found, wanted = row.fields[name], unshifted[:width] if name == "attention_mask" else unshifted[1:]
        wrong = (found != wanted).nonzero()
        if len(wrong):
            slot = int(wrong[0])
            yield (
                f"{row.where}: {name} is {int(found[slot])} at slot {slot}, expected {int(wanted[slot])} by "
                f"sidecar/samples.safetensors; it differs in {slots(len(wrong))}"
            )


def not_distributions(row: Row) -> Iterator[str]:
    """Yield what is wrong with the target's distribution and with the mask that says where it counts."""
    length, supervised = row.length, row.fields["position_mask"][:, 0]
    unwanted = (supervised & (row.fields["loss_mask"] != 1)).nonzero()
    if len(unwanted):
        yield (
            f"{row.where}: position_mask is true at slot {int(unwanted[0])} where loss_mask is 0, expected false; "
            f"it is so in {slots(len(unwanted))}"
        )
    behind = (row.fields["loss_mask"][max(0, length - 1) :] == 1).nonzero()
    if len(behind):
        slot = max(0, length - 1) + int(behind[0])
        yield (
            f"{row.where}: loss_mask is 1 at slot {slot}, expected 0: behind its {length:,} tokens there is none to "
            "predict. It must be shifted as input_ids are: slot p has the mask of token p+1"
        )
    probs = row.fields[VALUES if VALUES in row.fields else PROBS]
    yield from _no_sums_of_one(row, probs, length, supervised)
    if VALUES in row.fields:
        yield from _no_top_of_a_vocabulary(row, length)
    if row.padding_is_zero:
        for name, tensor in row.fields.items():
            beyond = tensor[length:]
            if name not in INT_FIELDS and beyond.numel() and bool(beyond.any()):
                slot = length + int(beyond.reshape(len(beyond), -1).any(dim=-1).nonzero()[0])
                yield f"{row.where}: {name} is not zero at slot {slot}, expected zeros behind its {length:,} tokens"


def tolerance(dtype: torch.dtype, width: int) -> float:
    """Return how far a sum of `width` probabilities, each rounded to a dtype, may be from 1."""
    about = torch.finfo(dtype)
    return about.eps / 2 + width * about.smallest_normal * about.eps / 2 + _SOFTMAX_ERROR


def _no_sums_of_one(row: Row, probs: Tensor, length: int, supervised: Tensor) -> Iterator[str]:
    allowed = tolerance(probs.dtype, probs.shape[-1])
    negative, wrong, first = 0, 0, ["", ""]
    for start, part in _parts(probs):
        real = torch.arange(start, start + len(part)) < length
        lowest, sums = part.amin(dim=-1), part.sum(dim=-1, dtype=torch.float32)
        # Behind the tokens the peer has distributions of its padding, and we have nothing.
        empty = (sums == 0) & ~real & ~supervised[start : start + len(part)]
        below = (lowest < 0).nonzero()
        off = (~((sums - 1).abs() <= allowed) & ~empty).nonzero()
        negative, wrong = negative + len(below), wrong + len(off)
        if len(below):
            first[0] = first[0] or f"{float(lowest[below[0]]):g} at slot {start + int(below[0])}"
        if len(off):
            first[1] = first[1] or f"{float(sums[off[0]]):.6g} at slot {start + int(off[0])}"
    if negative:
        yield f"{row.where}: a probability is {first[0]}, expected none below 0; there are such in {slots(negative)}"
    if wrong:
        yield f"{row.where}: probabilities sum to {first[1]}, expected 1 within {allowed:.2g}; wrong in {slots(wrong)}"


def _no_top_of_a_vocabulary(row: Row, length: int) -> Iterator[str]:
    values, indices = row.fields[VALUES][:length], row.fields[INDICES][:length]
    size = row.draft_vocab_size
    outside = ((indices < 0) | (indices >= size)).any(dim=-1).nonzero()
    if len(outside):
        slot = int(outside[0])
        worst = next(index for index in indices[slot].tolist() if not 0 <= index < size)
        yield f"{row.where}: draft id {worst} at slot {slot}, expected 0 to {size - 1}; wrong in {slots(len(outside))}"
    ordered = indices.sort(dim=-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(dim=-1).nonzero()
    if len(twice):
        yield f"{row.where}: a draft id is there twice at slot {int(twice[0])}; it is so in {slots(len(twice))}"
    rising = (values[:, 1:] > values[:, :-1]).any(dim=-1).nonzero()
    if len(rising):
        yield (
            f"{row.where}: {VALUES} rise at slot {int(rising[0])}, expected the largest first; "
            f"they do in {slots(len(rising))}"
        )


def _parts(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of its first slot, and the part of a field [S, width] that is looked at in one piece."""
    step = max(1, _CHUNK_ELEMENTS // max(1, tensor.shape[-1]))
    for start in range(0, len(tensor), step):
        yield start, tensor[start : start + step]


def slots(count: int) -> str:
    """Return "1 slot", "2 slots"."""
    return f"{count:,} slot{'' if count == 1 else 's'}"
