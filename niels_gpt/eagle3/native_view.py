"""A native cache as version 1 has it: the six keys of CachedEagle3Dataset, shifted and padded to seq_length.

Ids and masks are those of version 1 of the same input, bit for bit. Auxiliary states after the last target row, and the
distributions of slots without loss, which no draft's loss depends on, are not in a native cache: they are zeros here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from niels_gpt.eagle3.format.layout import DTYPES, PathLike
from niels_gpt.eagle3.format.manifest import manifest_path
from niels_gpt.eagle3.format.native.fp8 import dequantized
from niels_gpt.eagle3.format.native.sample import NativeSample
from niels_gpt.eagle3.format.native.shard_reader import NativeShards
from niels_gpt.eagle3.format.plan import read_record
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.storage.errors import CacheError

Item = dict[str, Tensor]
_TARGETS = ("last_hidden_states", "target_slots")


class NativeView:
    """Makes items of version 1 of a native cache's samples. May be pickled; the head is then read again."""

    def __init__(
        self,
        cache_dir: PathLike,
        max_open_shards: int = 1024,
        *,
        follow_links: bool = False,
        device: str | torch.device | None = None,
        target_probs: bool = True,
    ) -> None:
        """device: on which target_probs are made, and left; None: the CPU. target_probs: False leaves the key out.

        Raises: as `NativeShards`; CacheError for a sample that is longer than seq_length.
        """
        self.shards = NativeShards(cache_dir, max_open_shards, follow_links=follow_links)
        self.manifest, self._follow_links = self.shards.manifest, follow_links
        self.device, self.has_probs = device, target_probs
        self._head: TargetHead | None = None
        self.seq_length: int = self.manifest["seq_length"]
        longest = int(self.shards.counts[:, 0].max(initial=0))
        if longest > self.seq_length:
            found, expected = f"a sample of {longest:,} tokens", f"seq_length, {self.seq_length:,}, at most"
            raise CacheError(manifest_path(cache_dir), found, expected, code="E701")
        record = read_record(cache_dir, follow_links=follow_links)
        self.pad_id = 0 if record is None else int(record["tokenizer"]["pad_id"])
        """What follows the last token in input_ids: as precompute pads; 0 where there is no plan."""
        self._known = torch.zeros(self.manifest["target_vocab_size"], dtype=torch.bool)
        self._known[self.manifest["selected_token_ids"]] = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_head": None}

    @property
    def dtype(self) -> torch.dtype:
        """Of the float fields."""
        return DTYPES[self.manifest["dtype"]]

    @property
    def head(self) -> TargetHead:
        """The target's head, read when first used."""
        if self._head is None:
            cache_dir = self.shards.cache_dir
            self._head = TargetHead.of_cache(cache_dir, device=self.device, follow_links=self._follow_links)
        return self._head

    def item(self, index: int) -> Item:
        """Return a sample by the keys of version 1, [S] and [S, width]; target_probs on `device`, the rest on the CPU.

        Raises: IndexError; CacheError.
        """
        return {name: tensor[0] for name, tensor in self.with_probs(stacked([self.parts(index)])).items()}

    def parts(self, index: int) -> Item:
        """Return a sample without target_probs, but with what they are made from.

        These are `last_hidden_states` [R', H] and `target_slots` int64 [R'], of the slots whose loss_mask is 1.
        """
        sample = self.shards.sample(index)
        loss = np.flatnonzero(sample.loss_mask[1:])
        slots = torch.from_numpy(loss)
        rows = torch.from_numpy(np.searchsorted(sample.positions, loss + 1))
        argmax = sample.argmax_ids[rows]
        if len(argmax) and int(argmax.max()) >= len(self._known):
            found = f"sample {index}: argmax id {int(argmax.max())}"
            raise CacheError(self.shards.cache_dir, found, f"ids below {len(self._known)}", code="E701")
        position_mask = torch.zeros(self.seq_length, 1, dtype=torch.bool)
        position_mask[slots, 0] = self._known[argmax]
        return {
            **self._ids_and_masks(sample),
            "aux_hidden_states": self._aux(sample),
            "position_mask": position_mask,
            "last_hidden_states": sample.last_hidden_states[rows],
            "target_slots": slots,
        }

    def with_probs(self, batch: Item) -> Item:
        """Return a batch of `stacked` with target_probs [B, S, D] in place of what they are made from."""
        fields = {name: tensor for name, tensor in batch.items() if name not in _TARGETS}
        if self.has_probs:
            probs = self.head.target_probs(batch, self.manifest["selected_token_ids"])
            fields["target_probs"] = probs.to(self.dtype)
        return fields

    def _ids_and_masks(self, sample: NativeSample) -> Item:
        length, width = len(sample.input_ids), self.seq_length
        ids = torch.full((width + 1,), self.pad_id)
        ids[:length] = torch.from_numpy(sample.input_ids.astype(np.int64))
        ids[width] = 0  # after the last slot, whatever pads
        loss, attention = torch.zeros(width + 1, dtype=torch.int64), torch.zeros(width, dtype=torch.int64)
        loss[:length] = torch.from_numpy(sample.loss_mask.astype(np.int64))
        attention[:length] = 1
        return {"input_ids": ids[1:], "attention_mask": attention, "loss_mask": loss[1:]}

    def _aux(self, sample: NativeSample) -> Tensor:
        stored, scales = sample.aux_hidden_states, sample.aux_scales
        aux = torch.zeros(self.seq_length, stored.shape[1] * stored.shape[2], dtype=self.dtype)
        values = stored if scales is None else dequantized(stored, scales, self.dtype)
        aux[: len(stored)] = values.flatten(1)
        return aux


def stacked(samples: Sequence[Item]) -> Item:
    """Return what `NativeView.parts` gives of some samples as a batch: [B, S, ...], target rows one after the other."""
    width = len(samples[0]["input_ids"])
    batch = {name: torch.stack([each[name] for each in samples]) for name in samples[0] if name not in _TARGETS}
    batch["last_hidden_states"] = torch.cat([each["last_hidden_states"] for each in samples])
    batch["target_slots"] = torch.cat([each["target_slots"] + row * width for row, each in enumerate(samples)])
    return batch


class NativeParts(Dataset[Item]):
    """The samples of a view without target_probs, as the workers of a DataLoader read them."""

    def __init__(self, view: NativeView) -> None:
        """view: of the cache."""
        self._view = view

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._view.shards.counts)

    def __getitem__(self, index: int) -> Item:
        """Return `NativeView.parts` of a sample."""
        return self._view.parts(index)


class NativeLoader(DataLoader[Item]):
    """A DataLoader over NativeParts that adds target_probs in the main process, where a GPU can be used."""

    def __init__(self, view: NativeView, **how: Any) -> None:
        """how: as DataLoader."""
        super().__init__(NativeParts(view), collate_fn=stacked, **how)
        self._view = view

    def __iter__(self) -> Iterator[Item]:  # type: ignore[override]
        """Yield batches of version 1."""
        for batch in super().__iter__():
            yield self._view.with_probs(batch)
