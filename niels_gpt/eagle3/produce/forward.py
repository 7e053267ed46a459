"""A planned batch of version 1 or 2: through the target, into its shard, and what the shard's receipt counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from niels_gpt.eagle3.format.layout import DTYPES, INT_FIELDS, PathLike, row_bytes_of
from niels_gpt.eagle3.format.plan import Batch, Plan
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.format.shard_writer import ShardWriter
from niels_gpt.eagle3.produce.supervision import cache_fields, check_finite
from niels_gpt.eagle3.target import HFEagle3TargetModel, _shift_left_with_zero

_COUNTS = ("tokens", "supervised", "positions")


class PlannedForward:
    """Runs planned batches through a target; the same batch gives the same bytes."""

    sums = (*_COUNTS, "kept_mass", "draft_mass")
    """What is added up over a shard, of the facts of its batches."""

    def __init__(self, plan: Plan, samples: Samples, model: Any, device: torch.device | str = "cpu") -> None:
        """model: the plan's target, on `device` and of the plan's compute dtype."""
        self._plan, self._samples, self._device = plan, samples, torch.device(device)
        self.target = HFEagle3TargetModel(model, plan.manifest["aux_layer_ids"])
        self._selected = torch.tensor(plan.manifest["selected_token_ids"], device=self._device)
        self._mask = torch.zeros(plan.manifest["target_vocab_size"], dtype=torch.bool, device=self._device)
        self._mask[self._selected] = True

    def lengths(self, shard: int, batch: Batch) -> list[int]:
        """Return the tokens of each row of a batch."""
        return [len(self._samples.row(index)[0]) for index in self._indices(shard, batch)]

    def __call__(self, shard: int, batch: Batch) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return what `ShardWriter.write` takes for the rows of a batch, and the facts of `cache_fields`.

        Raises: NonFiniteError naming sample and layer.
        """
        width, _ = batch
        manifest, layout = self._plan.manifest, self._plan.layout
        names = [self._samples.source_ids[index] for index in self._indices(shard, batch)]
        lengths, dtype = self.lengths(shard, batch), DTYPES[layout.dtype]
        raw = self._inputs(shard, batch)
        with torch.no_grad():
            outputs = self.target.generate_batch(**{name: raw[name][:, :width].to(self._device) for name in raw})
            check_finite(outputs, names, lengths, manifest["aux_layer_ids"], dtype)
            tensors, facts = cache_fields(outputs, lengths, self._selected, self._mask, topk=layout.topk, dtype=dtype)
        # At full width, padded with the pad id, as if the target had run on all of it.
        tensors |= {name: raw[name] if name == "attention_mask" else _shift_left_with_zero(raw[name]) for name in raw}
        return tensors, {"tokens": lengths, **facts}

    def open_shard(self, cache_dir: PathLike, shard: int) -> ShardWriter:
        """Return the writer of a shard."""
        return ShardWriter(cache_dir, shard, self._plan.layout.fields, self._plan.rows_of(shard))

    def write(
        self, writer: ShardWriter, rows: Sequence[int], lengths: Sequence[int], tensors: Mapping[str, torch.Tensor]
    ) -> int:
        """Write a batch of `lengths` tokens to the rows `rows` of a shard; return its bytes, padding left out."""
        writer.write(rows, lengths, tensors)
        int_bytes, slot_bytes = self._sizes
        return len(rows) * int_bytes + sum(lengths) * slot_bytes

    def receipt_facts(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """Return a receipt's facts. sums: over the shard, of `self.sums`."""
        counts = {name: int(sums[name]) for name in _COUNTS}
        kept = sums["kept_mass"] if self._plan.layout.topk > 0 else None
        return {"plan": self._plan.sha256, **counts, "kept_mass": kept, "draft_mass": sums["draft_mass"]}

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Bytes of a row's ids and masks, which are written whole, and of a slot's other fields."""
        layout = self._plan.layout
        int_bytes = sum(row_bytes_of(field) for name, field in layout.fields.items() if name in INT_FIELDS)
        return int_bytes, (layout.row_bytes - int_bytes) // layout.seq_length

    def _indices(self, shard: int, batch: Batch) -> list[int]:
        return [self._plan.first_of(shard) + row for row in batch[1]]

    def _inputs(self, shard: int, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the target's inputs, not shifted, padded to the full width S: int64 [rows, S] each."""
        _, rows = batch
        ids = torch.full((len(rows), self._plan.layout.seq_length), int(self._plan.tokenizer["pad_id"]))
        present, loss = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, index in enumerate(self._indices(shard, batch)):
            raw, mask = self._samples.row(index)
            ids[row, : len(raw)] = torch.from_numpy(raw)
            present[row, : len(raw)] = 1
            loss[row, : len(raw)] = torch.from_numpy(mask)
        return {"input_ids": ids, "attention_mask": present, "loss_mask": loss}
