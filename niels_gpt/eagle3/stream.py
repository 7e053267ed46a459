"""Eagle3Stream: the samples of a target's cache, each exactly once an epoch, over any ranks and workers, resumable.

rows of six keys    of CachedEagle3Dataset: what build_cached_eagle3_dataloader gives
native rows         of NativeEagle3Dataset: what native_batch gives, with fields what token_batch gives
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niels_gpt.eagle3.cache import CachedEagle3Dataset, _collate_cached
from niels_gpt.eagle3.native import NativeEagle3Dataset
from niels_gpt.sampling.epochs import Epochs, Units
from niels_gpt.sampling.stream import Numbers, Stream
from niels_gpt.sampling.stretches import Order
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import checked_int
from niels_gpt.storage.versions import version_name

ITEMS_VERSION = 1
"""Version of the order: increased when the same seed and number mean another sample."""


class Eagle3Batch(dict[str, Tensor]):
    """The tensors of a batch by name, for `model(**batch)`.

    state: of the stream after this batch, the same on every rank. source: in a mixture, the index of the stream of each
    sample: int64 [B], on the CPU; else None.
    """

    def __init__(self, tensors: dict[str, Tensor], state: dict[str, Any], source: Tensor | None = None) -> None:
        super().__init__(tensors)
        self.state, self.source = state, source

    def to(self, device: str | torch.device, non_blocking: bool = False) -> Eagle3Batch:
        """Return the batch on another device; `source` stays on the CPU."""
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.items()}
        return Eagle3Batch(moved, self.state, self.source)

    def pin_memory(self) -> Eagle3Batch:
        """Return the batch in pinned memory; DataLoader(pin_memory=True) calls this."""
        return Eagle3Batch({name: tensor.pin_memory() for name, tensor in self.items()}, self.state, self.source)

    def __repr__(self) -> str:
        """Return dtypes and shapes: `Eagle3Batch(input_ids: int64 [8, 256], ..., consumed_samples=8)`."""
        forms = (f"{name}: {str(tensor.dtype)[6:]} {list(tensor.shape)}" for name, tensor in self.items())
        return f"Eagle3Batch({', '.join(forms)}, consumed_samples={self.state.get('consumed_samples')})"


class Items(Units):
    """The samples of a cache, as its reader gives them."""

    version: ClassVar[dict[str, Any]] = {"kind": "eagle3", "stream": ITEMS_VERSION}
    purpose = 4

    def __init__(self, dataset: CachedEagle3Dataset | NativeEagle3Dataset, pad_to: int | None) -> None:
        """pad_to: see `native_batch`. Raises: CacheError E107 for a cache without samples; ValueError for pad_to."""
        self.split = self.dataset = dataset
        self.folder, self.vocab_size = Path(dataset.cache_dir), None
        self._fingerprint = dataset.fingerprint()
        self._collate: Callable[[Sequence[Any]], dict[str, Tensor]] = _collate_cached
        self._fields: tuple[str, ...] | None = getattr(dataset, "fields", None)
        if not len(dataset):
            raise CacheError(self.folder, "no sample", remedy="Run precompute over more chats", code="E107")
        if isinstance(dataset, NativeEagle3Dataset):
            self.T = 0 if pad_to is None else checked_int("pad_to", pad_to, 1)  # 0: each batch has a width of its own
            if 0 < self.T < (longest := int(dataset.counts[:, 0].max())):
                raise ValueError(f"pad_to={pad_to}: expected {longest} or more, the tokens of the longest sample")
            self.dataset, self._collate = dataset.as_stored(), dataset.collate_fn(pad_to)
        else:
            if pad_to is not None:
                raise ValueError(f"pad_to={pad_to}: expected None, a CachedEagle3Dataset pads its samples itself")
            self.T = int(dataset.manifest.get("seq_length") or 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def stretches(self) -> Numbers:
        return self.dataset.shard_rows

    @property
    def name(self) -> str:
        return version_name(self.folder)

    def settings(self) -> dict[str, Any]:
        return {}  # how samples are padded, or their distributions made, is no part of a position

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint  # read once: the dataset's own reads two files

    def form(self) -> dict[str, Any]:
        manifest = self.dataset.manifest
        is_native = isinstance(self.dataset, NativeEagle3Dataset)
        names = ["aux_dtype", "head", "target_vocab_size"] if is_native else []
        hidden, layers = manifest.get("hidden_size"), manifest.get("aux_layer_ids")
        form = {
            "rows": ", ".join(self._fields or ["native" if is_native else "samples of six keys"]),
            "auxiliary values": manifest.get("aux_hidden_dim") if hidden is None else hidden * len(layers or []),
            **{name: manifest.get(name) for name in ["dtype", *names]},
        }
        if self._fields is None:  # no field depends on it
            ids = np.array(manifest.get("selected_token_ids") or [], dtype="<i8")
            form["draft vocabulary"] = f"{len(ids)} ids with crc32 {zlib.crc32(ids.tobytes()):08x}"
        return form if layers is None else form | {"aux_layer_ids": layers}  # another tool's version 1 may lack them

    def locate(self, units: Numbers, epochs: Numbers, key: NDArray[np.uint64]) -> _LocatedItems:
        return _LocatedItems(self, units)

    def collate(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Return samples as a batch; of none, tensors of 0 rows."""
        if samples:
            return self._collate(samples)
        # ranks without rows call the model too, and need the form
        return {name: tensor[:0].clone() for name, tensor in self._collate([self.dataset[0]]).items()}


class _LocatedItems:
    def __init__(self, items: Items, units: Numbers) -> None:
        self._items, self._units = items, units
        self._next_plan = 0

    def read(self, first: int, count: int, device: str) -> _Read:
        dataset = self._items.dataset
        if first + count > self._next_plan:
            planned = dataset.will_read(self._units[first:].tolist(), count)
            self._next_plan = first + max(count, planned // 2)
        return _Read(self._items, [dataset[unit] for unit in self._units[first : first + count].tolist()])


class _Read:
    """The samples of a batch, not collated yet: a mixture first puts the samples of all its sources in order."""

    def __init__(self, items: Items, samples: Sequence[Any]) -> None:
        self._items, self._samples = items, samples

    @classmethod
    def interleaved(cls, parts: Sequence[tuple[Numbers, _Read]], has_segments: bool) -> _Read:
        """Return the samples of a batch. parts: the numbers of some of its rows, ascending, and these samples."""
        placed = {int(at): one for numbers, part in parts for at, one in zip(numbers, part._samples, strict=True)}
        return cls(parts[0][1]._items, [placed[at] for at in sorted(placed)])

    def batch(self, state: dict[str, Any], source: Tensor | None = None) -> Eagle3Batch:
        """Return these samples as a batch. state, source: see `Eagle3Batch`."""
        return Eagle3Batch(self._items.collate(self._samples), state, source)


class Eagle3Stream(Stream[Eagle3Batch]):
    """Batches of a target's cache: each sample exactly once an epoch, in a seeded order.

    Sample k is `dataset[permute(k % n)]` of epoch `k // n`. A global batch may hold the end of one epoch and the start
    of the next. Ranks, DataLoader workers and states work as in an EpochStream; see `Stream` and docs/reading.md.

        for batch in Eagle3Stream(CachedEagle3Dataset("cache/eagle3/targets"), global_batch_size=8, seed=0, epochs=1):
            loss = model(**batch)
    """

    def __init__(
        self,
        dataset: CachedEagle3Dataset | NativeEagle3Dataset,
        *,
        global_batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        drop_last: bool = False,
        pad_to: int | None = None,
        order: Order = "all",
        open_shards: int | None = None,
    ) -> None:
        """Serve the samples of an open cache.

        dataset: a CachedEagle3Dataset gives batches of CACHE_KEYS, each [B, S, ...]; a NativeEagle3Dataset gives the
            batches of `native_batch`, with `fields` of `token_batch`. target_probs are made by the dataset, a
            sample at a time and on its `device`.
        global_batch_size, epochs, drop_last: see `EpochStream`. A rank without rows gets tensors of 0 rows.
        pad_to: slots of a batch of a NativeEagle3Dataset; None: the tokens of its longest sample.
        order: "shards": shards in a random order, and samples of open_shards of them at a time, shuffled; for a cache
            in a bucket that does not fit its local folder.
        Raises: CacheError E107 for a cache without samples; ValueError for the numbers.
        """
        if not isinstance(dataset, CachedEagle3Dataset | NativeEagle3Dataset):
            found = type(dataset).__name__
            raise ValueError(f"dataset is a {found}, expected a CachedEagle3Dataset or a NativeEagle3Dataset")
        self.dataset = dataset
        view = getattr(dataset, "view", None)
        counts: dict[str, Any] = {"global_batch_size": global_batch_size, "rank": rank, "world_size": world_size}
        device = "cpu" if view is None or view.device is None else str(view.device)
        super().__init__(**counts, seed=seed, epochs=epochs, device=device, drop_last=drop_last)
        items = Items(dataset, pad_to)
        self.samples_per_epoch = len(items)
        self._serve(Epochs(items, seed=self.seed, epochs=self.epochs, order=order, open_shards=open_shards))

    def __repr__(self) -> str:
        """Return the cache, the size of a batch, the rank and the position."""
        epochs = "without end" if self.epochs is None else f"{self.epochs} epochs"
        return f"Eagle3Stream({self.dataset!r}, {epochs}, {self._described()})"

    def _sources(self) -> dict[str, object]:
        return {"cache": repr(self.dataset)}

    def _rows(self) -> str:
        return f"{self.global_batch_size // self.world_size} samples"
