"""A planned batch of the native form: through the target, into its shard, and what the shard's receipt counts.

The rows that are stored are those of format/native/rows.py. Logits are made for the target rows only, by the target's
head in parts; the lm_head of the model's own forward gets one slot a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niels_gpt.eagle3.format.layout import AUX_DTYPES, DTYPES, PathLike
from niels_gpt.eagle3.format.native import NativeSample, quantized, target_positions
from niels_gpt.eagle3.format.plan import Batch, Plan
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.format.shard_writer import NativeShardWriter
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.produce.host_memory import on_cpu
from niels_gpt.eagle3.produce.supervision import NonFiniteError
from niels_gpt.eagle3.target import capture
from niels_gpt.storage.errors import TargetError

_COUNTS = ("tokens", "supervised", "aux_rows", "target_rows")


class NativeForward:
    """Runs planned batches through a target; the same batch gives the same bytes."""

    sums = _COUNTS
    """What is added up over a shard, of the facts of its batches."""

    def __init__(
        self,
        plan: Plan,
        samples: Samples,
        model: Any,
        device: torch.device | str = "cpu",
        *,
        head: TargetHead | None = None,
    ) -> None:
        """model: the plan's target, on `device` and of the plan's compute dtype. head: its own; None: it is found.

        Raises: ValueError as `TargetHead.of_model`, and where the head is not the one that the plan's manifest has.
        """
        self._plan, self._samples, self._device, self.model = plan, samples, torch.device(device), model.eval()
        self.head = TargetHead.of_model(model) if head is None else head
        found = self.head.last_hidden, self.head.facts()
        if found != (plan.manifest["conventions"]["last_hidden"], plan.manifest["head"]):
            stated = plan.manifest["conventions"]["last_hidden"], plan.manifest["head"]
            problem = f"{plan.target.get('name')}: its head is {found}, expected {stated}, as manifest.json has it"
            raise TargetError(f"{problem}. Remove manifest.json, and run again with --resume")
        self._in_draft = np.zeros(plan.manifest["target_vocab_size"], np.bool_)
        self._in_draft[plan.manifest["selected_token_ids"]] = True

    def lengths(self, shard: int, batch: Batch) -> list[int]:
        """Return the tokens of each row of a batch."""
        return [int(self._plan.counts[index, 0]) for index in self._indices(shard, batch)]

    def __call__(self, shard: int, batch: Batch) -> tuple[list[NativeSample], dict[str, list[int]]]:
        """Return the samples of a batch, and of each the facts: tokens, supervised, aux_rows, target_rows, positions.

        supervised: tokens with loss from the second one on. positions: those of them whose most probable token is in
        the draft's vocabulary.
        Raises: NonFiniteError naming sample and layer.
        """
        indices, manifest = self._indices(shard, batch), self._plan.manifest
        raw = [self._samples.row(index) for index in indices]
        counts = self._plan.counts[indices]
        positions = [target_positions(loss) for _, loss in raw]
        with torch.no_grad():
            aux, pre_norm, post_norm = capture(self.model, *self._inputs(raw, batch[0]), manifest["aux_layer_ids"])
            states = post_norm if self.head.last_hidden == "post_norm" else pre_norm
            names = [self._samples.source_ids[index] for index in indices]
            parts = self._aux(aux, counts[:, 1], names)
            targets = self._targets(states, positions, names)
        made, known = [], []
        for (ids, loss), (values, scales), (last, normalizers, argmax), at in zip(
            raw, parts, targets, positions, strict=True
        ):
            made.append(NativeSample(ids.astype(np.uint32), loss != 0, values, scales, last, normalizers, argmax))
            known.append(int((self._in_draft[argmax.numpy()] & (loss[at] != 0)).sum()))
        supervised = [int(loss[1:].sum()) for _, loss in raw]
        numbers = dict(zip(("tokens", "aux_rows", "target_rows"), counts.T.tolist(), strict=True))
        return made, {**numbers, "supervised": supervised, "positions": known}

    def open_shard(self, cache_dir: PathLike, shard: int) -> NativeShardWriter:
        """Return the writer of a shard."""
        plan = self._plan
        counts = plan.counts[plan.first_of(shard) : plan.first_of(shard + 1)]
        return NativeShardWriter(cache_dir, shard, plan.native_layout, counts)

    def write(
        self, writer: NativeShardWriter, rows: Sequence[int], lengths: Sequence[int], made: Sequence[NativeSample]
    ) -> int:
        """Write the samples of a batch of `lengths` tokens to the rows `rows` of a shard; return their bytes."""
        for row, sample in zip(rows, made, strict=True):
            writer.write(row, sample)
        counts = [[n, len(each.aux_hidden_states), len(each.argmax_ids)] for n, each in zip(lengths, made, strict=True)]
        return int(self._plan.native_layout.sample_bytes(np.array(counts, np.int64)).sum())

    def receipt_facts(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """Return a receipt's facts. sums: over the shard, of `self.sums`."""
        return {"plan": self._plan.sha256, **{name: int(sums[name]) for name in _COUNTS}}

    def _indices(self, shard: int, batch: Batch) -> list[int]:
        return [self._plan.first_of(shard) + row for row in batch[1]]

    def _inputs(self, raw: Sequence[tuple[NDArray[Any], NDArray[Any]]], width: int) -> tuple[Tensor, Tensor]:
        """Return ids and attention mask of a batch, int64 [b, width] on the device."""
        ids = torch.full((len(raw), width), int(self._plan.tokenizer["pad_id"]))
        present = torch.zeros_like(ids)
        for row, (own, _) in enumerate(raw):
            ids[row, : len(own)] = torch.from_numpy(own)
            present[row, : len(own)] = 1
        return ids.to(self._device), present.to(self._device)

    def _aux(self, aux: Tensor, rows: NDArray[np.int64], names: Sequence[str]) -> list[tuple[Tensor, Tensor | None]]:
        """Return the stored auxiliary states of each sample, [A, K, H] and perhaps [A, K], of those of a batch."""
        sizes: list[int] = rows.tolist()
        flat = torch.cat([states[:count] for states, count in zip(aux, sizes, strict=True)])
        name = self._plan.manifest["aux_dtype"]
        stored = flat if name == "fp8" else flat.to(AUX_DTYPES[name])
        if len(flat) and not bool(stored.isfinite().all()):
            layers = [f"block {layer}" for layer in self._plan.manifest["aux_layer_ids"]]
            _refuse_not_finite(flat, stored, names, [range(count) for count in sizes], layers)
        if name != "fp8":
            return [(values, None) for values in torch.split(on_cpu(stored), sizes)]
        parts = (torch.split(on_cpu(each), sizes) for each in quantized(flat))
        return list(zip(*parts, strict=True))

    def _targets(
        self, states: Tensor, positions: Sequence[NDArray[np.int64]], names: Sequence[str]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the target rows of each sample: last hidden states [R, H], log-normalizers [R], argmax [R]."""
        sizes = [len(each) for each in positions]
        rows = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(states.device)
        flat = states[rows, torch.from_numpy(np.concatenate(positions)).to(states.device)]
        stored = flat.to(DTYPES[self._plan.manifest["dtype"]])
        normalizers, argmax = self.head.log_normalizer_and_argmax(flat)
        places = [each.tolist() for each in positions]
        if len(flat) and not bool(stored.isfinite().all()):
            _refuse_not_finite(flat[:, None], stored[:, None], names, places, ["last hidden state"])
        if len(flat) and not bool(normalizers.isfinite().all()):
            bad = normalizers[:, None, None]
            _refuse_not_finite(bad, bad, names, places, ["log-normalizer of the logits"])
        last, sums, most = (torch.split(on_cpu(each), sizes) for each in (stored, normalizers, argmax))
        return list(zip(last, sums, most, strict=True))


def _refuse_not_finite(
    values: Tensor, stored: Tensor, names: Sequence[str], positions: Sequence[Sequence[int]], layers: Sequence[str]
) -> None:
    """Raise NonFiniteError, naming the first place and a count.

    values, stored: [rows, layers, ...] as computed and in the stored dtype, rows of all samples end to end.
    names, positions: of each sample. layers: what to call each layer.
    """
    places = [(name, position) for name, each in zip(names, positions, strict=True) for position in each]
    bad = (~stored.isfinite().all(-1)).nonzero().tolist()
    row, layer = bad[0]
    wrong = values[row, layer][~stored[row, layer].isfinite()][0]
    fits = f" that fits into {stored.dtype}" if bool(wrong.isfinite()) else ""
    samples = len({places[row][0] for row, _ in bad})
    name, position = places[row]
    raise NonFiniteError(
        f"sample {name!r}, position {position}, {layers[layer]}: {wrong.item()}, expected a finite number{fits}; "
        f"{len(bad)} such places in {samples} of {len(names)} samples of the batch. Run the target in another dtype "
        "(--compute-dtype), store another one (--dtype), or leave the sample out"
    )
