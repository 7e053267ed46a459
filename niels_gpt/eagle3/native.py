"""Readers of native caches: samples, batches for EAGLE-3, a row for each token, and the six keys of version 1.

A batch of `native_batch` has the target's hidden states instead of distributions: `niels_gpt.eagle3.head.TargetHead`
computes `target_probs` from them on the training device. One of `token_batch` has the states of each token, for drafts
of other kinds. `niels_gpt.eagle3.cache.CachedEagle3Dataset` reads the same caches with the six keys of versions 1 and
2. docs/formats.md describes the files.

    dataset = NativeEagle3Dataset("targets")
    loader = build_native_dataloader("targets", batch_size=8, shuffle=True)
    head = TargetHead.of_cache("targets", device="cuda")
    for batch in loader:
        probs = head.target_probs(batch)  # [B, W, D]
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from niels_gpt.cache.checksums import Check
from niels_gpt.cache.meta import check_expected
from niels_gpt.cache.reader import AtURL, local_path
from niels_gpt.display.numbers import number_of
from niels_gpt.display.tables import html_table
from niels_gpt.eagle3.format.drafters import targets_of
from niels_gpt.eagle3.format.layout import DTYPES, SIDECAR, PathLike
from niels_gpt.eagle3.format.manifest import manifest_path
from niels_gpt.eagle3.format.meta import compare_once, fingerprint
from niels_gpt.eagle3.format.native import NativeSample, dequantize_into, has_target_row
from niels_gpt.eagle3.format.plan import PLAN_NAME, read_record
from niels_gpt.eagle3.format.shards import NativeShards, Shards
from niels_gpt.storage.errors import CacheError, UsageError
from niels_gpt.storage.meta_json import shortened
from niels_gpt.storage.versions import version_name

if TYPE_CHECKING:
    from niels_gpt.eagle3.head import TargetHead

__all__ = ["FIELDS", "NativeEagle3Dataset", "NativeSample", "build_native_dataloader", "native_batch", "token_batch"]


Item = TypeVar("Item")
_LOSS_ONLY = "target rows for loss only", "reply or all, for `last_hidden` of each token"
_KEPT = 2
"""Pieces of memory that wait for the next batch: a loop holds one batch while the next one is made."""


class CacheReader(Dataset[Item]):
    """Base class of the readers of all forms."""

    def _open(self, shards: Shards[Any], expect: Mapping[str, Any] | None) -> None:
        """Take the shards of a whole cache. Raises: CacheError if `expect` is another fingerprint."""
        self._shards = shards
        self.cache_dir, self.manifest = shards.cache_dir, shards.manifest
        self.num_samples, self.num_shards = shards.num_samples, shards.num_shards
        if expect is not None:
            check_expected(self.fingerprint(), expect, self.cache_dir)

    def fingerprint(self) -> dict[str, Any]:
        """Return the cache's identity for a checkpoint: samples, and sha256 of manifest, content and tokenizer."""
        return fingerprint(self.cache_dir, self.num_samples, follow_links=self._shards.follow_links)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def __getitems__(self, numbers: Sequence[int]) -> list[Item]:
        """Return samples, as a DataLoader asks for those of a batch."""
        size = len(self)
        self.will_read([number % size for number in numbers if -size <= number < size], len(numbers))
        return [self[number] for number in numbers]

    def will_read(self, numbers: Sequence[int], least: int) -> int:
        """Say that samples are read next, in this order, so that those at a URL are fetched ahead.

        least: as many as are read now. Returns: the number of samples that are fetched ahead.
        """
        return self._shards.will_read(numbers, least)

    def __repr__(self) -> str:
        """Name the cache, its samples and their form."""
        return f"{type(self).__name__}({version_name(Path(self.cache_dir))}, {', '.join(self._described().values())})"

    def _repr_html_(self) -> str:
        rows = {"cache": version_name(Path(self.cache_dir)), **self._described()}
        return html_table(type(self).__name__, rows.items())

    @property
    def shard_rows(self) -> NDArray[np.int64]:
        """Samples of each shard: int64 [shards]."""
        return np.array([self._shards.rows_of(shard) for shard in range(self.num_shards)], dtype=np.int64)

    def _described(self) -> dict[str, str]:
        """Return what `repr` shows besides the path."""
        return {"samples": f"{number_of(self.num_samples, 'sample')} in {number_of(self.num_shards, 'shard')}"}


def loader_of(
    dataset: CacheReader[Any], collate: Callable[[list[Any]], Any], shuffle: bool, distributed: bool, **how: Any
) -> DataLoader[Any]:
    """Return a DataLoader over a cache; for a native cache with six keys this process computes target_probs.

    how: batch_size and num_workers.
    """
    sampler: DistributedSampler[Any] | None = DistributedSampler(dataset, shuffle=shuffle) if distributed else None
    how |= {"sampler": sampler, "shuffle": shuffle and sampler is None, "pin_memory": torch.cuda.is_available()}
    view = getattr(dataset, "view", None)
    return DataLoader(dataset, collate_fn=collate, **how) if view is None else NativeLoader(view, **how)


class NativeEagle3Dataset(CacheReader[Any]):
    """Reads a native cache. An item is one sample as stored, a NativeSample: raw and unpadded.

    With `fields` an item is a dict of these tensors of the sample's L tokens, in the order of `fields`:

        input_ids, loss_mask    int64 [L], not shifted
        aux_hidden_states       [L, K * H] in the stored dtype, bf16 if that is fp8; [L, 0] without layers
        last_hidden             [L, H] in the stored dtype, on the side of the final norm that
                                manifest["conventions"]["last_hidden"] names; `TargetHead.normed` applies the norm;
                                zeros where the cache has none
        last_hidden_mask        int64 [L]: 1 where it has one, by the rule of `targets` in docs/formats.md

    They are copies, which may be changed, kept and sent. aux_hidden_states are zeros behind those that the cache has:
    with targets `loss` and `reply` from the last target row on, where they reach no loss.

    Opening checks header, starts and loss bits of every shard. A shard is mapped when it is first read; at most
    `max_open_shards` are mapped at a time. The tensors of a NativeSample are views of the map: clone them before you
    change, keep, save or send them. The dataset may be pickled, for workers of any start method; each worker makes its
    own maps. Threads may share it. The path is resolved to a version once: a rebuild does not change an open dataset,
    and gc keeps its version.
    """

    def __init__(
        self,
        cache_dir: PathLike,
        *,
        fields: Iterable[str] | None = None,
        max_open_shards: int = 1024,
        follow_links: bool = False,
        expect: Mapping[str, Any] | None = None,
        check: Check = "ends",
        **at_url: Unpack[AtURL],
    ) -> None:
        """fields: names of FIELDS, one or more; None: items are NativeSamples.

        max_open_shards: the kernel allows a process about 65,000 maps.
        follow_links: read files that are symbolic links, as in a snapshot of the Hugging Face hub; by default they are
            refused.
        expect: an earlier `fingerprint`; opening fails unless the cache still has it.
        check: "ends": compare each shard's size and header with its receipt when it is first mapped; "blocks": also
            each sample with its checksum when it is first read. At a URL each is compared whenever it is read.
        at_url: local, max_bytes and max_ahead of a cache at a URL, see `niels_gpt.cache.reader.AtURL`.
        Raises: FileNotFoundError; CacheError (a ValueError) E208 for a cache of another form, else naming the file that
            does not fit the manifest; E710 for `last_hidden` of a cache with targets `loss`, which has it only where
            EAGLE-3 reads it; UsageError for names that FIELDS does not have.
        """
        self.fields = None if fields is None else _checked(fields)
        cache_dir = local_path(cache_dir, at_url)
        shards = NativeShards.of_cache(cache_dir, max_open_shards, follow_links=follow_links, check=check)
        self._shards: NativeShards
        self._open(shards, expect)
        if self.fields and "last_hidden" in self.fields and targets_of(self.manifest) == "loss":
            remedy = "Produce it with --targets reply or --targets all"
            raise CacheError(self.cache_dir, *_LOSS_ONLY, remedy, code="E710")

    @property
    def counts(self) -> NDArray[np.int64]:
        """Tokens, auxiliary rows and target rows of each sample, without reading one: int64 [n, 3]."""
        return self._shards.counts

    @property
    def selected_token_ids(self) -> torch.Tensor:
        """The draft's vocabulary: int64 [D], draft id -> target id."""
        return torch.tensor(self.manifest["selected_token_ids"])

    def __getitem__(self, index: int) -> Any:
        """Return one sample: a NativeSample, or a dict of `fields`. Raises: IndexError; CacheError."""
        position = index + self.num_samples if index < 0 else index
        if not 0 <= position < self.num_samples:
            raise IndexError(index)
        sample = self._shards.sample(position)
        if self.fields is None:
            return sample
        batch = token_batch([sample], self.fields)
        return {name: batch[name][0] for name in self.fields}

    def as_stored(self) -> NativeEagle3Dataset:
        """Return the same open cache with NativeSamples as items: what a `collate_fn` takes, without a copy before."""
        stored = copy.copy(self)
        stored.fields = None
        return stored

    def collate_fn(self, pad_to: int | None = None) -> Callable[[Sequence[NativeSample]], dict[str, Tensor]]:
        """Return what makes batches of samples of `as_stored`: `native_batch`, with `fields` `token_batch`.

        pad_to: see `native_batch`. It uses the memory of a batch again once nothing refers to it.
        """
        if self.fields is not None:
            return partial(token_batch, fields=self.fields, pad_to=pad_to, memory=BatchMemory())
        ids = self.selected_token_ids
        return partial(native_batch, selected_token_ids=ids, pad_to=pad_to, memory=BatchMemory())

    def _described(self) -> dict[str, str]:
        tokens, _, target_rows = map(int, self.counts.sum(0))
        layers, hidden = len(self.manifest["aux_layer_ids"]), self.manifest["hidden_size"]
        return super()._described() | {
            "tokens": f"{number_of(tokens, 'token')}, {number_of(target_rows, 'target row')}",
            "a token": f"{layers} x {hidden:,} {self.manifest['aux_dtype']}",
            "target": shortened(self.manifest["target_model"]),
            **({} if self.fields is None else {"an item": ", ".join(self.fields)}),
        }


def native_batch(
    samples: Sequence[NativeSample],
    *,
    selected_token_ids: Sequence[int] | torch.Tensor,
    pad_to: int | None = None,
    memory: BatchMemory | None = None,
) -> dict[str, torch.Tensor]:
    """Collate B samples of one cache to a batch of W slots; everything but the floats is shifted left as in version 1.

    selected_token_ids: [D], the draft's vocabulary. pad_to: W; None: the length of the longest sample.
    memory: of earlier batches, to be used again; None: new memory.
    Returns: a dict of

        input_ids, attention_mask, loss_mask   int64 [B, W]; ids are 0 from slot L - 1 on
        position_mask                          bool [B, W, 1]: loss_mask, where the draft knows the target's argmax
        aux_hidden_states                      [B, W, K * H] in the stored dtype, bf16 if that is fp8; zeros where
                                               none is stored, as no loss reaches there
        target_slots                           int64 [R]: index into the flattened [B * W] of each slot with loss
        last_hidden_states                     [R, H] in the stored dtype, for `TargetHead`
        log_normalizers, argmax_ids            float32 [R], int64 [R]

    Floats are copied once, from the map into the batch; a DataLoader's worker builds the batch in shared memory.
    Raises: ValueError for no samples, samples of several forms, and a sample longer than pad_to.
    """
    width, memory = _width_of(samples, pad_to), memory or BatchMemory()
    ids, masks, slots, rows = _integers(samples, width)
    argmax = torch.cat([sample.argmax_ids[keep] for sample, keep in zip(samples, rows, strict=True)])
    position_mask = torch.zeros(len(samples) * width, dtype=torch.bool)
    position_mask[slots] = _among(argmax, torch.as_tensor(selected_token_ids, device="cpu"))
    return {
        "input_ids": ids,
        "attention_mask": masks[0],
        "loss_mask": masks[1],
        "position_mask": position_mask.view(len(samples), width, 1),
        "aux_hidden_states": _aux_of(samples, width, memory),
        "target_slots": slots,
        "last_hidden_states": _last_of(samples, rows, memory),
        "log_normalizers": torch.cat([s.log_normalizers[keep] for s, keep in zip(samples, rows, strict=True)]),
        "argmax_ids": argmax,
    }


_INTEGERS: dict[str, Callable[[NativeSample], NDArray[Any]]] = {
    "input_ids": lambda sample: sample.input_ids,
    "loss_mask": lambda sample: sample.loss_mask,
    "last_hidden_mask": lambda sample: has_target_row(
        np.array([0, len(sample.loss_mask)]), sample.loss_mask, sample.targets
    ),
    "attention_mask": lambda sample: np.ones(len(sample.input_ids)),
}
FIELDS = ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden", "last_hidden_mask")
"""The fields of `NativeEagle3Dataset(fields=...)` and `token_batch`."""


def token_batch(
    samples: Sequence[NativeSample],
    fields: Iterable[str] = FIELDS,
    *,
    pad_to: int | None = None,
    memory: BatchMemory | None = None,
) -> dict[str, torch.Tensor]:
    """Collate B samples of one cache to a batch of W slots with a state for each token; nothing is shifted.

    fields: names of FIELDS. pad_to, memory: see `native_batch`.
    Returns: a dict of the fields, see `NativeEagle3Dataset`, each [B, W] or [B, W, width], and of attention_mask, int64
        [B, W]. Padding and states that are not stored are zeros.
    Raises: ValueError for other fields, no samples, samples of several forms, a sample longer than pad_to, and
        last_hidden of samples with targets `loss`.
    """
    width, memory, fields = _width_of(samples, pad_to), memory or BatchMemory(), _checked(fields)
    if "last_hidden" in fields and any(sample.targets == "loss" for sample in samples):
        raise ValueError(f"fields has last_hidden, and the samples have {_LOSS_ONLY[0]}, expected {_LOSS_ONLY[1]}")
    batch: dict[str, torch.Tensor] = {}
    for name in (*fields, "attention_mask"):
        if name in _INTEGERS:
            table = np.zeros((len(samples), width), np.int64)
            for row, sample in zip(table, samples, strict=True):
                row[: len(sample.input_ids)] = _INTEGERS[name](sample)
            batch[name] = torch.from_numpy(table)
        else:
            batch[name] = (_last_of_tokens if name == "last_hidden" else _aux_of)(samples, width, memory)
    return batch


def _checked(fields: Iterable[str]) -> tuple[str, ...]:
    """Return the fields, each once. Raises: UsageError unless they are names of FIELDS, one or more."""
    names = () if isinstance(fields, str) else tuple(dict.fromkeys(fields))
    if not names or {*names} - {*FIELDS}:
        raise UsageError(f"fields is {fields!r}, expected names of {', '.join(FIELDS)}, as a list")
    return names


def _last_of_tokens(samples: Sequence[NativeSample], width: int, memory: BatchMemory) -> torch.Tensor:
    """Return the last hidden states [B, W, H]; zeros where none is stored."""
    stored = samples[0].last_hidden_states
    batch, is_zero = memory.tensor((len(samples), width, stored.shape[1]), stored.dtype)
    for slots, sample in zip(batch.view(torch.uint8).numpy(), samples, strict=True):
        positions = sample.positions
        if not is_zero:
            slots[np.delete(np.arange(width), positions)] = 0
        slots[positions] = sample.last_hidden_states.view(torch.uint8).numpy()  # index_copy_ takes seven times as long
    return batch


def _width_of(samples: Sequence[NativeSample], pad_to: int | None) -> int:
    """Return the slots of a batch. Raises: ValueError; see `native_batch`."""
    longest = max((len(sample.input_ids) for sample in samples), default=0)
    width = longest if pad_to is None else pad_to
    forms = {(s.aux_hidden_states.dtype, s.aux_hidden_states.shape[1:], s.last_hidden_states.dtype) for s in samples}
    if len(forms) != 1 or longest > width:
        raise ValueError(
            f"{len(samples)} samples of {len(forms)} forms, the longest of {longest:,} tokens, expected one form and "
            f"{width:,} tokens at most"
        )
    return width


def _aux_of(samples: Sequence[NativeSample], width: int, memory: BatchMemory) -> torch.Tensor:
    """Return the auxiliary states [B, W, K * H]; zeros after each sample's own."""
    stored = samples[0].aux_hidden_states
    layers, hidden = stored.shape[1:]
    dtype = torch.bfloat16 if stored.dtype == torch.float8_e4m3fn else stored.dtype
    batch, is_zero = memory.tensor((len(samples), width, layers * hidden), dtype)
    for row, sample in enumerate(samples):
        end = len(sample.aux_hidden_states)
        if not is_zero:
            batch[row, end:] = 0
        if sample.aux_scales is None:
            batch[row, :end] = sample.aux_hidden_states.flatten(1)
        else:
            dequantize_into(batch[row, :end].view(-1, hidden), sample.aux_hidden_states, sample.aux_scales)
    return batch


def _last_of(samples: Sequence[NativeSample], rows: Sequence[torch.Tensor], memory: BatchMemory) -> torch.Tensor:
    """Return the rows `rows` of each sample's last hidden states, concatenated: [R, H]."""
    stored = samples[0].last_hidden_states
    batch, _ = memory.tensor((sum(map(len, rows)), stored.shape[1]), stored.dtype)
    begin = 0
    for sample, keep in zip(samples, rows, strict=True):
        end = begin + len(keep)
        torch.index_select(sample.last_hidden_states, 0, keep, out=batch[begin:end])
        begin = end
    return batch


def _integers(
    samples: Sequence[NativeSample], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the shifted ids [B, W], both masks [2, B, W], the target slots [R], and the rows kept of each sample."""
    ids = np.zeros((len(samples), width), np.int64)
    masks = np.zeros((2, len(samples), width), np.int64)
    slots, rows = [], []
    for row, sample in enumerate(samples):
        length, positions = len(sample.input_ids), sample.positions
        ids[row, : length - 1] = sample.input_ids[1:]
        masks[0, row, :length] = 1
        masks[1, row, : length - 1] = sample.loss_mask[1:]
        kept = np.flatnonzero(sample.with_loss)  # the others are for other tools and drafters
        rows.append(torch.from_numpy(kept))
        slots.append(positions[kept] - 1 + row * width)
    return torch.from_numpy(ids), torch.from_numpy(masks), torch.from_numpy(np.concatenate(slots)), rows


def _among(ids: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return whether each of the ids [R] is among the known ones [D]: bool [R]."""
    table = np.zeros(int(known.max()) + 2, np.bool_)  # pages that are not written take no memory
    table[known.numpy()] = True
    return torch.from_numpy(table[np.minimum(ids.numpy(), len(table) - 1)])


class BatchMemory:
    """Memory for the states of batches. A batch's is used again once nothing refers to the batch or a view of it.

    Fresh memory of this size comes from the system, which fills it with zeros first: that takes longer than the copy
    of the states. Threads may share it; a pickle of it is empty.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, int], deque[NDArray[np.uint8]]] = {}
        self._most: dict[tuple[int, int], int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchMemory, ()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        """Return a tensor, and whether it is all zeros; else it holds anything. Tensors of another number of
        dimensions, or of another width, are kept apart: the states differ in size.

        A DataLoader's worker allocates it in shared memory, so that the batch is not copied again. Elsewhere numpy
        does, and asks the kernel for huge pages: torch's own memory has more page faults. Untouched pages take none.
        """
        size, kind = math.prod(shape) * dtype.itemsize, (len(shape), shape[-1])
        if not size:
            return torch.empty(shape, dtype=dtype), True
        if get_worker_info() is not None:
            storages: Any = torch.UntypedStorage  # as torch's own collate
            batch = torch.empty(0, dtype=dtype)
            batch.set_(storages._new_shared(size))  # a new file of shared memory is zeros
            return batch.view(shape), True
        free = self._free.setdefault(kind, deque(maxlen=_KEPT))
        with suppress(IndexError):
            if len(buffer := free.pop()) >= size:
                return self._lent(buffer, size, free).view(dtype).view(shape), False
        self._most[kind] = max(size, self._most.get(kind, 0))
        return self._lent(np.zeros(self._most[kind], np.uint8), size, free).view(dtype).view(shape), True

    def _lent(self, buffer: NDArray[np.uint8], size: int, free: deque[NDArray[np.uint8]]) -> torch.Tensor:
        """Return the first bytes of a buffer, which `free` gets back once they are not used any more."""
        lent = buffer[:size]  # an array of its own, which the tensor's storage keeps alive
        weakref.finalize(lent, free.append, buffer).atexit = False
        return torch.from_numpy(lent)


def build_native_dataloader(
    cache_dir: PathLike,
    batch_size: int,
    shuffle: bool,
    num_workers: int = 0,
    distributed: bool = False,
    *,
    fields: Iterable[str] | None = None,
    pad_to: int | None = None,
    follow_links: bool = False,
    expect: Mapping[str, Any] | None = None,
    check: Check = "ends",
    **at_url: Unpack[AtURL],
) -> DataLoader[Any]:
    """Return a DataLoader over a native cache, with the batches of `native_batch`, or with `fields` of `token_batch`.

    shuffle: over all samples of all shards, by torch's global generator; with `distributed` by the sampler's seed and
        `sampler.set_epoch`.
    distributed: each rank of the default process group reads its share; DistributedSampler repeats samples where they
        do not divide evenly. The last batch may be short.
    pad_to: see `native_batch`. fields, follow_links, expect, check, at_url: see `NativeEagle3Dataset`.
    """
    how: dict[str, Any] = {"follow_links": follow_links, "expect": expect, "check": check}
    dataset = NativeEagle3Dataset(cache_dir, fields=fields, **how, **at_url)
    collate = dataset.collate_fn(pad_to)
    return loader_of(dataset.as_stored(), collate, shuffle, distributed, batch_size=batch_size, num_workers=num_workers)


# --- the keys of version 1 --------------------------------------------------------------------------------------------

Batch = dict[str, Tensor]
_FIELDS = ("input_ids", "attention_mask", "loss_mask", "position_mask", "aux_hidden_states")


class NativeView:
    """Turns samples of a native cache into items of version 1. May be pickled; each process reads the head again."""

    def __init__(
        self,
        cache_dir: PathLike,
        max_open_shards: int = 1024,
        *,
        follow_links: bool = False,
        device: str | torch.device | None = None,
        target_probs: bool = True,
        check: Check = "ends",
    ) -> None:
        """device: computes and keeps target_probs; None: the CPU. target_probs: False leaves the key out.

        Raises: FileNotFoundError; CacheError for a cache that is not native or damaged, and for a sample longer than
            seq_length (E701).
        """
        self.dataset = NativeEagle3Dataset(
            cache_dir, max_open_shards=max_open_shards, follow_links=follow_links, check=check
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
        """Id that pads input_ids, from the plan; 0 without a plan."""
        self._selected, self._memory = self.dataset.selected_token_ids, BatchMemory()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_head": None}

    @property
    def head(self) -> TargetHead:
        """The target's head; read on first use."""
        if self._head is None:
            from niels_gpt.eagle3.head import TargetHead  # versions 1 and 2 need none

            cache_dir = self.dataset.cache_dir
            self._head = TargetHead.of_cache(cache_dir, device=self.device, follow_links=self._follow_links)
        return self._head

    def item(self, index: int) -> Batch:
        """Return one sample with the keys of version 1, [S] and [S, width].

        target_probs is on `device`, the rest on the CPU. Raises: IndexError; CacheError.
        """
        return {name: tensor[0] for name, tensor in self.with_probs(self.collate([self.dataset[index]])).items()}

    def collate(self, samples: Sequence[NativeSample]) -> Batch:
        """Return a `native_batch` of S slots whose padding ids and float dtypes equal version 1.

        Raises: CacheError E708 for an auxiliary state that fp16 cannot hold.
        """
        given: dict[str, Any] = {"selected_token_ids": self._selected, "memory": self._memory}
        batch = native_batch(samples, pad_to=self.seq_length, **given)
        ids, attention = batch["input_ids"], batch["attention_mask"]
        ids[:, :-1].masked_fill_(attention[:, 1:] == 0, self.pad_id)  # after the last slot a 0, whatever pads
        states, dtype = batch["aux_hidden_states"], DTYPES[self.manifest["dtype"]]
        batch["aux_hidden_states"] = states.to(dtype)
        if dtype == torch.float16 != states.dtype and not bool(batch["aux_hidden_states"].isfinite().all()):
            found = f"an auxiliary state of {float(states.abs().max()):g}, too large for fp16, the manifest's dtype"
            raise CacheError(self.dataset.cache_dir, found, remedy="Read it with niels_gpt.eagle3.native", code="E708")
        return batch

    def with_probs(self, batch: Batch) -> Batch:
        """Return a batch of `collate` with the keys of version 1: [B, S] and [B, S, width]."""
        fields = {name: batch[name] for name in _FIELDS}
        if self.has_probs:
            probs = self.head.target_probs(batch)
            fields["target_probs"] = probs.to(DTYPES[self.manifest["dtype"]])
        return fields


class NativeLoader(DataLoader[Any]):
    """A DataLoader over a native cache that computes target_probs in the main process, where a GPU is usable."""

    def __init__(self, view: NativeView, **how: Any) -> None:
        """how: keyword arguments of DataLoader."""
        super().__init__(view.dataset, collate_fn=view.collate, **how)
        self._view = view

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Yield batches of version 1."""
        for batch in super().__iter__():
            yield self._view.with_probs(batch)
