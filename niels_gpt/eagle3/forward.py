"""Runs a planned batch through the target, and makes its stored fields and the counts for the shard's receipt.

`DenseForward` makes the fields of versions 1 and 2, `NativeForward` the native ones; equal batches give equal bytes. In
versions 1 and 2 all slots are shifted, as `HFEagle3TargetModel.generate_batch` returns them. Slots of a sample of L
tokens:

    slots 0 .. L-2   the target's outputs
    slot  L-1        the hidden states; without a next token the logits count as zeros, a uniform distribution
    slots L ..       zeros; the target's outputs for padding are not used

A batch's logits take gigabytes, so they are processed in chunks of `CHUNK_VALUES`. In the native form the target's head
computes logits for the target rows only, in chunks; the lm_head of the model's own forward gets one slot a sample. A
GPU's tensors are copied into pinned memory, which torch reuses for the next batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from niels_gpt.eagle3.cache import compress_target_probs, is_compressed
from niels_gpt.eagle3.format.layout import AUX_DTYPES, DTYPES, INT_FIELDS, PathLike, row_bytes_of
from niels_gpt.eagle3.format.native import NativeSample, quantized, target_positions
from niels_gpt.eagle3.format.plan import Batch, TargetPlan
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.format.shard_writer import NativeShardWriter, ShardWriter
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.target import (
    CHUNK_VALUES,
    Eagle3TargetBatch,
    HFEagle3TargetModel,
    _shift_left_with_zero,
    capture,
    most_probable,
    pieces,
)
from niels_gpt.storage.errors import CodedError, TargetError


class NonFiniteError(CodedError, RuntimeError, code="E708"):
    """The target's output is not finite, or the cache's dtype cannot hold it."""


class Forward(ABC):
    """Runs planned batches of one form through a target and writes them to a shard."""

    sums: tuple[str, ...]
    """Names of batch facts that are summed over a shard."""
    counts: tuple[str, ...]
    """Names in `sums` that are integers."""

    def __init__(self, plan: TargetPlan, samples: Samples, model: Any, device: torch.device | str = "cpu") -> None:
        """model: the plan's target, on `device`, in the plan's compute dtype."""
        self._plan, self._samples, self._device = plan, samples, torch.device(device)
        self.model: nn.Module = model.eval()

    @abstractmethod
    def __call__(self, shard: int, batch: Batch) -> tuple[Any, dict[str, Any]]:
        """Run a batch; return the fields for `write`, and its facts by name: a list with one number a row, or None.

        Raises: NonFiniteError naming sample and layer.
        """

    @abstractmethod
    def open_shard(self, cache_dir: PathLike, shard: int) -> Any:
        """Return the writer of a shard."""

    @abstractmethod
    def write(self, writer: Any, rows: Sequence[int], lengths: Sequence[int], made: Any) -> int:
        """Write a batch to the rows `rows` of a shard; return its bytes without padding. lengths: tokens per row."""

    def receipt_facts(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """Return a receipt's facts. sums: the shard's total of each name in `self.sums`."""
        return {"plan": self._plan.sha256, **{name: int(sums[name]) for name in self.counts}}

    def lengths(self, shard: int, batch: Batch) -> list[int]:
        """Return the tokens of each row of a batch."""
        return [len(ids) for ids, _ in self._rows(shard, batch)]

    def _rows(self, shard: int, batch: Batch) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return ids and loss mask of each row of a batch."""
        return [self._samples.row(index) for index in self._indices(shard, batch)]

    def _names(self, shard: int, batch: Batch) -> list[str]:
        return [self._samples.source_ids[index] for index in self._indices(shard, batch)]

    def _indices(self, shard: int, batch: Batch) -> list[int]:
        return [self._plan.first_of(shard) + row for row in batch[1]]

    def _inputs(self, shard: int, batch: Batch, width: int) -> dict[str, Tensor]:
        """Return the target's inputs, unshifted and padded to `width`: int64 [rows, width] each, on the CPU."""
        ids = torch.full((len(batch[1]), width), int(self._plan.tokenizer["pad_id"]))
        present, loss = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, (raw, mask) in enumerate(self._rows(shard, batch)):
            ids[row, : len(raw)] = torch.from_numpy(raw)
            present[row, : len(raw)] = 1
            loss[row, : len(raw)] = torch.from_numpy(mask)
        return {"input_ids": ids, "attention_mask": present, "loss_mask": loss}


class DenseForward(Forward):
    """Batches of version 1 or 2."""

    counts = ("tokens", "supervised", "positions")
    sums = (*counts, "kept_mass", "draft_mass")

    def __init__(self, plan: TargetPlan, samples: Samples, model: Any, device: torch.device | str = "cpu") -> None:
        super().__init__(plan, samples, model, device)
        self.target = HFEagle3TargetModel(model, plan.manifest["aux_layer_ids"])
        self._selected = torch.tensor(plan.manifest["selected_token_ids"], device=self._device)
        self._mask = torch.zeros(plan.manifest["target_vocab_size"], dtype=torch.bool, device=self._device)
        self._mask[self._selected] = True

    def __call__(self, shard: int, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Run a batch; return the fields for `ShardWriter`, padded to full width, and the facts of `cache_fields`."""
        width, _ = batch
        layout, layers = self._plan.layout, self._plan.manifest["aux_layer_ids"]
        lengths, dtype = self.lengths(shard, batch), DTYPES[layout.dtype]
        raw = self._inputs(shard, batch, layout.seq_length)
        with torch.no_grad():
            outputs = self.target.generate_batch(**{name: raw[name][:, :width].to(self._device) for name in raw})
            check_finite(outputs, self._names(shard, batch), lengths, layers, dtype, model=self.model)
            tensors, facts = cache_fields(outputs, lengths, self._selected, self._mask, topk=layout.topk, dtype=dtype)
        # At full width, padded with the pad id, as if the target had run on all of it.
        tensors |= {name: raw[name] if name == "attention_mask" else _shift_left_with_zero(raw[name]) for name in raw}
        return tensors, {"tokens": lengths, **facts}

    def open_shard(self, cache_dir: PathLike, shard: int) -> ShardWriter:
        """Return the writer of a shard with rows of equal size."""
        return ShardWriter(cache_dir, shard, self._plan.layout.fields, self._plan.rows_of(shard))

    def write(
        self, writer: ShardWriter, rows: Sequence[int], lengths: Sequence[int], made: Mapping[str, Tensor]
    ) -> int:
        """Write a batch: ids and masks whole, the other fields without padding."""
        writer.write(rows, lengths, made)
        int_bytes, slot_bytes = self._sizes
        return len(rows) * int_bytes + sum(lengths) * slot_bytes

    def receipt_facts(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """Add the probability mass that the draft's vocabulary and the top k keep."""
        kept = sums["kept_mass"] if self._plan.layout.topk > 0 else None
        return {**super().receipt_facts(sums), "kept_mass": kept, "draft_mass": sums["draft_mass"]}

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Bytes of a row's ids and masks, which are written whole, and of one slot's other fields."""
        layout = self._plan.layout
        int_bytes = sum(row_bytes_of(field) for name, field in layout.fields.items() if name in INT_FIELDS)
        return int_bytes, (layout.row_bytes - int_bytes) // layout.seq_length


class NativeForward(Forward):
    """Batches of the native form; format/native.py selects the stored rows."""

    counts = sums = ("tokens", "supervised", "aux_rows", "target_rows")

    def __init__(
        self,
        plan: TargetPlan,
        samples: Samples,
        model: Any,
        device: torch.device | str = "cpu",
        *,
        head: TargetHead | None = None,
    ) -> None:
        """head: the target's own; None: find it.

        Raises: ValueError (E705) if the head's logits differ from the model's, or the head from the plan's manifest.
        """
        super().__init__(plan, samples, model, device)
        self.head = TargetHead.of_model(model) if head is None else head
        found = self.head.last_hidden, self.head.facts()
        if found != (plan.manifest["conventions"]["last_hidden"], plan.manifest["head"]):
            stated = plan.manifest["conventions"]["last_hidden"], plan.manifest["head"]
            problem = f"{plan.target.get('name')}: its head is {found}, expected {stated} by manifest.json"
            raise TargetError(f"{problem}. Remove manifest.json, and run the same command with --resume")
        self._in_draft = np.zeros(plan.manifest["target_vocab_size"], np.bool_)
        self._in_draft[plan.manifest["selected_token_ids"]] = True

    def __call__(self, shard: int, batch: Batch) -> tuple[list[NativeSample], dict[str, Any]]:
        """Run a batch; return its samples, and its facts: tokens, supervised, aux_rows, target_rows, positions.

        supervised counts the tokens with loss from the second one on; positions, the supervised tokens whose most
        probable token is in the draft's vocabulary.

        Raises: NonFiniteError naming sample and layer.
        """
        raw, counts = self._rows(shard, batch), self._plan.counts[self._indices(shard, batch)]
        rule = self._plan.native_layout.targets
        positions = [target_positions(loss, rule) for _, loss in raw]
        with torch.no_grad():
            inputs = self._inputs(shard, batch, batch[0])
            ids, present = (inputs[name].to(self._device) for name in ("input_ids", "attention_mask"))
            aux, pre_norm, post_norm = capture(self.model, ids, present, self._plan.manifest["aux_layer_ids"])
            states = post_norm if self.head.last_hidden == "post_norm" else pre_norm
            names = self._names(shard, batch)
            parts = self._aux(aux, counts[:, 1], names)
            targets = self._targets(states, positions, names)
        made, known = [], []
        for (own, loss), (values, scales), (last, normalizers, argmax) in zip(raw, parts, targets, strict=True):
            made.append(NativeSample(own.astype(np.uint32), loss != 0, values, scales, last, normalizers, argmax, rule))
            known.append(int((self._in_draft[argmax.numpy()] & made[-1].with_loss).sum()))
        supervised = [int(loss[1:].sum()) for _, loss in raw]
        numbers = dict(zip(("tokens", "aux_rows", "target_rows"), counts.T.tolist(), strict=True))
        return made, {**numbers, "supervised": supervised, "positions": known}

    def open_shard(self, cache_dir: PathLike, shard: int) -> NativeShardWriter:
        """Return the writer of a shard with samples of any length."""
        plan = self._plan
        counts = plan.counts[plan.first_of(shard) : plan.first_of(shard + 1)]
        return NativeShardWriter(cache_dir, shard, plan.native_layout, counts)

    def write(
        self, writer: NativeShardWriter, rows: Sequence[int], lengths: Sequence[int], made: Sequence[NativeSample]
    ) -> int:
        """Write the samples of a batch."""
        for row, sample in zip(rows, made, strict=True):
            writer.write(row, sample)
        counts = [[n, len(each.aux_hidden_states), len(each.argmax_ids)] for n, each in zip(lengths, made, strict=True)]
        return int(self._plan.native_layout.sample_bytes(np.array(counts, np.int64)).sum())

    def _aux(self, aux: Tensor, rows: NDArray[np.int64], names: Sequence[str]) -> list[tuple[Tensor, Tensor | None]]:
        """Return each sample's stored auxiliary states [A, K, H], and for fp8 their scales [A, K]."""
        sizes: list[int] = rows.tolist()
        flat = torch.cat([states[:count] for states, count in zip(aux, sizes, strict=True)])
        name = self._plan.manifest["aux_dtype"]
        stored = flat if name == "fp8" else flat.to(AUX_DTYPES[name])
        layers = [f"block {layer}" for layer in self._plan.manifest["aux_layer_ids"]]
        self._check_finite(flat, stored, names, [range(count) for count in sizes], layers)
        if name != "fp8":
            return [(values, None) for values in torch.split(on_cpu(stored), sizes)]
        parts = (torch.split(on_cpu(each), sizes) for each in quantized(flat))
        return list(zip(*parts, strict=True))

    def _targets(
        self, states: Tensor, positions: Sequence[NDArray[np.int64]], names: Sequence[str]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return each sample's target rows: last hidden states [R, H], log-normalizers [R], argmax [R]."""
        sizes = [len(each) for each in positions]
        rows = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(states.device)
        flat = states[rows, torch.from_numpy(np.concatenate(positions)).to(states.device)]
        stored = flat.to(DTYPES[self._plan.manifest["dtype"]])
        normalizers, argmax = self.head.log_normalizer_and_argmax(flat)
        places = [each.tolist() for each in positions]
        self._check_finite(flat[:, None], stored[:, None], names, places, ["last hidden state"])
        bad = normalizers[:, None, None]
        self._check_finite(bad, bad, names, places, ["log-normalizer of the logits"])
        last, sums, most = (torch.split(on_cpu(each), sizes) for each in (stored, normalizers, argmax))
        return list(zip(last, sums, most, strict=True))

    def _check_finite(
        self,
        values: Tensor,
        stored: Tensor,
        names: Sequence[str],
        positions: Sequence[Sequence[int]],
        layers: Sequence[str],
    ) -> None:
        """Raise NonFiniteError, naming the first place and a count, unless all numbers are finite.

        values, stored: [rows, layers, ...] as computed and in the stored dtype; the rows of all samples, concatenated.
        names, positions: of each sample. layers: name of each layer.
        """
        if not len(stored) or bool(stored.isfinite().all()):
            return
        places = [(sample, position) for sample, each in enumerate(positions) for position in each]
        bad = (~stored.isfinite().all(-1)).nonzero().tolist()
        row, layer = bad[0]
        where = f"position {places[row][1]}, {layers[layer]}"
        raise not_finite(values[row, layer], stored.dtype, where, names, [places[row][0] for row, _ in bad], self.model)


# --- the fields of version 1 and 2 ------------------------------------------------------------------------------------


def draft_distribution(
    logits: Tensor, loss_mask: Tensor, selected_token_ids: Tensor, selected_token_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the draft's training signal: the target's distribution over the draft's tokens, and where it counts.

    logits: [B, S, V]. loss_mask: [B, S]. selected_token_ids: int64 [D]. selected_token_mask: bool [V].
    Returns target_probs float32 [B, S, D], summing to 1, and position_mask bool [B, S, 1]: true where the loss mask is
    1 and the target's most probable token is in the draft's vocabulary.
    """
    draft, mask = _columns(selected_token_ids, logits), selected_token_mask.to(logits.device)
    slots, shape = logits.flatten(0, 1), logits.shape[:2]
    probs = torch.empty(len(slots), len(selected_token_ids), device=logits.device)
    known = torch.empty(len(slots), dtype=torch.bool, device=logits.device)
    for chunk in _chunks(torch.ones(shape, dtype=torch.bool), logits.shape[-1]):
        probs[chunk] = _probs(slots[chunk], draft)
        known[chunk] = mask[slots[chunk].argmax(dim=-1)]
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
    """Return a batch's fields as a dense cache stores them, and its counts for the receipt.

    lengths: tokens of each row, from 1 to the batch's width W.
    topk: 0 for the whole distribution. dtype: of the float fields.
    Returns (fields, facts). The fields are on the CPU: input_ids, attention_mask and loss_mask int64 [B, W] unchanged,
    aux_hidden_states [B, W, 3H], position_mask bool [B, W, 1], and either target_probs [B, W, D] or target_probs_values
    [B, W, k] and target_probs_indices int32 [B, W, k].

    The facts have one number a row: supervised, the slots whose shifted loss mask is 1; positions, the slots whose
    position mask is true; draft_mass, the probability inside the draft's vocabulary, summed over the supervised slots;
    kept_mass, the share that the top k keep, summed over the positions, or None for topk 0.

    Raises: ValueError for lengths that do not fit.
    """
    real, inner = _slots(batch, lengths)
    logits, draft = batch.logits.flatten(0, 1), _columns(selected_token_ids, batch.logits)
    mask = selected_token_mask.to(logits.device)
    supervised = (batch.loss_mask == 1) & inner.to(logits.device)
    known, mass = torch.zeros_like(supervised).flatten(), supervised.flatten().float()
    kept = torch.zeros_like(mass, dtype=torch.float64)
    # Without logits: a softmax of zeros, like the others.
    end = _stored(torch.zeros(1, len(selected_token_ids), device=logits.device).softmax(-1), topk, dtype)[0]
    fields = _padded(batch, real, inner, end, dtype)
    stored = {name: fields[name].flatten(0, 1) for name in end}
    for piece, is_supervised in _pieces(inner, supervised.cpu(), logits):
        some = logits[piece]
        own = (some if draft is None else some.index_select(-1, draft)).float()
        if is_supervised:
            known[piece] = mask[most_probable(some)]
            if len(selected_token_ids) < logits.shape[-1]:
                mass[piece] = (own.logsumexp(-1) - some.float().logsumexp(-1)).exp()
        values, kept[piece] = _stored(own.softmax(-1), topk, dtype)
        for name, all_slots in stored.items():
            all_slots[piece] = values[name] if all_slots.is_cuda else on_cpu(values[name])
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
    """Return which slots hold a token, and which hold a token with a next one: bool [B, W] each, on the CPU."""
    num_rows, width = batch.input_ids.shape
    tokens = torch.as_tensor(lengths, dtype=torch.int64).cpu()
    if tokens.shape != (num_rows,) or not bool(((tokens >= 1) & (tokens <= width)).all()):
        raise ValueError(
            f"lengths={tokens.tolist()}: expected one for each of {num_rows} rows, each from 1 to the batch's width "
            f"{width}"
        )
    slot = torch.arange(width)
    return slot < tokens[:, None], slot < tokens[:, None] - 1


def _pieces(inner: Tensor, supervised: Tensor, logits: Tensor) -> Iterator[tuple[slice | Tensor, bool]]:
    """Yield slots as indices into [B * W], as `pieces` does, and whether they are supervised.

    inner, supervised: bool [B, W] on the CPU. Slots are taken from `CHUNK_VALUES` logits at a time.
    """
    for chunk in _indices(inner, logits.shape[-1]):
        is_supervised = supervised.flatten()[chunk]
        for which in (True, False):
            for piece in pieces(chunk[is_supervised == which], logits):
                yield piece, which


def _chunks(slots: Tensor, values: int) -> Iterator[slice | Tensor]:
    """Yield the true slots of bool [B, W] as indices into [B * W], in chunks of at most `CHUNK_VALUES` values.

    values: values of one slot. Consecutive slots become a slice, since indexing with a slice makes no copy.
    """
    for chunk in _indices(slots, values):
        start, stop = (int(chunk[0]), int(chunk[-1]) + 1) if len(chunk) else (0, 0)
        yield slice(start, stop) if stop - start == len(chunk) else chunk


def _indices(slots: Tensor, values: int) -> Iterator[Tensor]:
    """Yield the true slots of bool [B, W] as indices into [B * W], int64, of at most `CHUNK_VALUES` values a time."""
    yield from torch.split(slots.flatten().nonzero().squeeze(-1), max(1, CHUNK_VALUES // max(1, values)))


def _columns(selected_token_ids: Tensor, logits: Tensor) -> Tensor | None:
    """Return the ids of the draft's logits, on their device; None if these are all logits in order."""
    ids = selected_token_ids.to(logits.device)
    whole = len(ids) == logits.shape[-1] and torch.equal(ids, torch.arange(len(ids), device=ids.device))
    return None if whole else ids


def _probs(logits: Tensor, draft: Tensor | None) -> Tensor:
    """Return the distribution over the draft's tokens, float32 [n, D], for logits [n, V]."""
    return torch.softmax((logits if draft is None else logits.index_select(-1, draft)).float(), dim=-1)


def _stored(probs: Tensor, topk: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor | float]:
    """Return distributions [n, D] in the stored fields, and the share [n] that is kept of each."""
    if not is_compressed(topk, probs.shape[-1]):
        return {"target_probs": probs.to(dtype)}, 1.0
    values, indices = compress_target_probs(probs, topk)
    kept = probs.gather(-1, indices.long()).sum(-1, dtype=torch.float64)
    return {"target_probs_values": values.to(dtype), "target_probs_indices": indices}, kept


def _padded(
    batch: Eagle3TargetBatch, real: Tensor, inner: Tensor, end: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the fields that do not depend on the logits; the distributions of the inner slots are unset.

    end: the stored distribution of a last slot, [1, ...] each. Top-k fields stay on its device until the batch is
        complete; whole distributions take gigabytes and go to the CPU chunk by chunk.
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


def _sums(values: Tensor) -> list[float]:
    """Return the sum of each row, computed on the CPU, where the order of addition is fixed."""
    return [float(total) for total in values.cpu().double().sum(1).tolist()]


# --- numbers that are not finite --------------------------------------------------------------------------------------


def check_finite(
    batch: Eagle3TargetBatch,
    sample_ids: Sequence[str],
    lengths: Sequence[int] | Tensor,
    aux_layer_ids: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    model: nn.Module | None = None,
) -> None:
    """Raise NonFiniteError, naming the first sample and layer and a count, if a stored number would not be finite.

    Only stored slots count; outputs for padding may be anything.

    dtype: of the cache; hidden states must fit into it (float16 ends at 65,504). model: see `not_finite`.
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
    for chunk in _chunks(real, max(vocab_size, aux.shape[-1])):
        by_layer = aux[chunk].view(-1, layers, aux.shape[-1] // layers)
        bad_aux = ~by_layer.to(stored_aux).isfinite().all(-1)
        bad_logits = ~logits[chunk].isfinite().all(-1) & inner.flatten()[chunk].to(logits.device)
        # Per slot, the layers in order and then the logits.
        bad = torch.cat((bad_aux, bad_logits.unsqueeze(-1)), dim=-1).nonzero().tolist()
        places += [(*divmod(int(slots[chunk][slot]), real.shape[1]), place) for slot, place in bad]
    if places:
        row, slot, place = places[0]
        if place < layers:
            values, kind = batch.aux_hidden_states[row, slot].view(layers, -1)[place], stored_aux
            where = f"slot {slot}, block {aux_layer_ids[place]}"
        else:
            values, kind, where = batch.logits[row, slot], batch.logits.dtype, f"slot {slot}, logits"
        raise not_finite(values, kind, where, sample_ids, [row for row, *_ in places], model)


def not_finite(
    values: Tensor,
    stored: torch.dtype,
    where: str,
    names: Sequence[str],
    rows: Sequence[int],
    model: nn.Module | None = None,
) -> NonFiniteError:
    """Return the error for numbers that are not finite.

    values: of the first place, as computed; at least one is not finite in the dtype `stored`. where: that place.
    names: samples of the batch. rows: for each place the index of its sample; the first place comes first.
    model: the target; a weight of it that is not finite is named.
    """
    wrong = values[~values.to(stored).isfinite()][0]
    fits = f" that fits into {stored}" if bool(wrong.isfinite()) else ""
    samples = len({*rows})
    found = (
        f"sample {names[rows[0]]!r}, {where}: {wrong.item()}, expected a finite number{fits}; {len(rows)} such places "
        f"in {samples} of {len(names)} samples of the batch"
    )
    advice = "Run the target in another dtype (--compute-dtype), store another one (--dtype), or leave the sample out"
    return NonFiniteError(f"{found}. {(model and broken_weight(model)) or advice}")


def broken_weight(model: nn.Module) -> str:
    """Return a sentence naming the first weight of a model that is not finite; "" if none is known.

    Offloaded and quantized weights are left out: their numbers are not here.
    """
    for name, weight in model.named_parameters():
        is_plain = type(weight.data) is Tensor and weight.is_floating_point() and not weight.is_meta
        if is_plain and not bool(weight.isfinite().all()):
            return f"A weight of the target is broken: {name} is not finite. Download the target again"
    return ""


# --- memory -----------------------------------------------------------------------------------------------------------


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU; a CPU tensor is returned itself."""
    if not tensor.is_cuda:
        return tensor.cpu()
    return empty_on_cpu(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def empty_on_cpu(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized CPU memory for data from a device, pinned if that is a GPU.

    Fresh memory gets its pages one by one while it is filled, which takes longer than the copy itself: it doubled the
    time of a native cache. torch reuses pinned memory for the next batch; it holds the batches that wait for the
    writer, rounded up to powers of two.
    """
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")
