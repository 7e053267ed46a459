"""A native cache as version 1 has it: the six keys of CachedEagle3Dataset, shifted and padded to seq_length.

Ids and masks are those of version 1 of the same input, bit for bit. Of two tokens that are nearly as likely in bf16, a
run for version 1 may find the other one to be the most probable; position_mask may then differ. Auxiliary states after
the last target row, and the distributions of slots without loss, which no draft's loss depends on, are zeros here: a
native cache does not have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from niels_gpt.cache.checksums import Check
from niels_gpt.eagle3.format.layout import DTYPES, SIDECAR, PathLike
from niels_gpt.eagle3.format.manifest import manifest_path
from niels_gpt.eagle3.format.native import NativeSample
from niels_gpt.eagle3.format.plan import PLAN_NAME, read_record
from niels_gpt.eagle3.format.receipts import compare_once
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.native import NativeEagle3Dataset, native_batch
from niels_gpt.storage.errors import CacheError

Batch = dict[str, Tensor]
_FIELDS = ("input_ids", "attention_mask", "loss_mask", "position_mask", "aux_hidden_states")


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
        expect: Mapping[str, Any] | None = None,
        check: Check = "ends",
    ) -> None:
        """device: on which target_probs are made, and left; None: the CPU. target_probs: False leaves the key out.

        expect, check: as for `NativeEagle3Dataset`.

        Raises: as `NativeEagle3Dataset`; CacheError for a sample that is longer than seq_length.
        """
        self.dataset = NativeEagle3Dataset(
            cache_dir, max_open_shards=max_open_shards, follow_links=follow_links, expect=expect, check=check
        )
        cache_dir = self.dataset.cache_dir
        self.manifest, self._follow_links = self.dataset.manifest, follow_links
        self.device, self.has_probs = device, target_probs
        self._head: TargetHead | None = None
        self.seq_length: int = self.manifest["seq_length"]
        longest = int(self.dataset.counts[:, 0].max(initial=0))
        if longest > self.seq_length:
            found, expected = f"a sample of {longest:,} tokens", f"seq_length, {self.seq_length:,}, at most"
            raise CacheError(manifest_path(cache_dir), found, expected, code="E701")
        compare_once(cache_dir, f"{SIDECAR}/{PLAN_NAME}", follow_links=follow_links)
        record = read_record(cache_dir, follow_links=follow_links)
        self.pad_id = 0 if record is None else int(record["tokenizer"]["pad_id"])
        """What follows the last token in input_ids: as precompute pads; 0 where there is no plan."""
        self._selected = self.dataset.selected_token_ids

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_head": None}

    @property
    def head(self) -> TargetHead:
        """The target's head, read when first used."""
        if self._head is None:
            cache_dir = self.dataset.cache_dir
            self._head = TargetHead.of_cache(cache_dir, device=self.device, follow_links=self._follow_links)
        return self._head

    def item(self, index: int) -> Batch:
        """Return a sample by the keys of version 1, [S] and [S, width]; target_probs on `device`, the rest on the CPU.

        Raises: IndexError; CacheError.
        """
        return {name: tensor[0] for name, tensor in self.with_probs(self.collate([self.dataset[index]])).items()}

    def collate(self, samples: Sequence[NativeSample]) -> Batch:
        """Return a batch of `native_batch`, S slots wide, with ids and float fields as version 1 has them."""
        batch = native_batch(samples, selected_token_ids=self._selected, pad_to=self.seq_length)
        ids, attention = batch["input_ids"], batch["attention_mask"]
        ids[:, :-1].masked_fill_(attention[:, 1:] == 0, self.pad_id)  # after the last slot a 0, whatever pads
        states, dtype = batch["aux_hidden_states"], DTYPES[self.manifest["dtype"]]
        batch["aux_hidden_states"] = states.to(dtype)
        if dtype == torch.float16 != states.dtype and not bool(batch["aux_hidden_states"].isfinite().all()):
            found = (
                f"an auxiliary state of {float(states.abs().max()):g}, which fp16, its manifest's dtype, cannot hold"
            )
            raise CacheError(self.dataset.cache_dir, found, remedy="Read it by niels_gpt.eagle3.native", code="E708")
        return batch

    def with_probs(self, batch: Batch) -> Batch:
        """Return the keys of version 1 of a batch of `collate`: [B, S] and [B, S, width]."""
        fields = {name: batch[name] for name in _FIELDS}
        if self.has_probs:
            probs = self.head.target_probs(batch)
            fields["target_probs"] = probs.to(DTYPES[self.manifest["dtype"]])
        return fields


class NativeLoader(DataLoader[Any]):
    """A DataLoader over a native cache that adds target_probs in the main process, where a GPU can be used."""

    def __init__(self, view: NativeView, **how: Any) -> None:
        """how: as DataLoader."""
        super().__init__(view.dataset, collate_fn=view.collate, **how)
        self._view = view

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Yield batches of version 1."""
        for batch in super().__iter__():
            yield self._view.with_probs(batch)
