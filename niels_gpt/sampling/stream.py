"""SampleStream: where samples are cut into batches, which rank and DataLoader worker reads which, and the state.

A stream is an endless or finite list of samples 0, 1, 2, ..., each computed from its number alone. A global batch is
the next `global_batch_size` samples, of which each rank gets an equal, consecutive part; DataLoader worker w of W gets
the batches w, w + W, w + 2W, ... So the number of samples that all ranks together have consumed is the whole state, and
a run may resume with other ranks, workers and batch sizes.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from niels_gpt.cache.formats import Ids
from niels_gpt.cache.mmap import TokenFiles
from niels_gpt.cache.pretrain_dataset import gathered, split_rows
from niels_gpt.display.tables import html_table
from niels_gpt.sampling.state import check_checksum, check_identity, identity_crc, sealed, state_count
from niels_gpt.storage.codes import CodedWarning, coded
from niels_gpt.storage.meta_json import checked_int, shortened

STREAM_VERSION = 1
"""Version of the order: increased when the same seed and number mean another window."""

_BLOCK = 16384  # samples located at once: 0.1 to 0.9 us each, but about 1 ms for a few: cycles are walked together
_MAX_WORKERS = 1024


@dataclass(eq=False, repr=False)
class Batch:
    """x, y: int64 [B, T], y one token later; state: the stream's `state_dict` after this batch, the same on every rank.

    source: in a mixture, the index of the stream of each row: int64 [B], on the CPU; else None.
    Unpacks as `x, y = batch`. It is not a tuple: DataLoader(batch_size=None) rebuilds tuples and would lose the state.
    """

    x: torch.Tensor
    y: torch.Tensor
    state: dict[str, Any]
    source: torch.Tensor | None = None

    def __repr__(self) -> str:
        """Return shape, dtype and device: `Batch(x, y: int64 [8, 256] on cpu, consumed_samples=48)`."""
        dtype, shape = str(self.x.dtype).removeprefix("torch."), list(self.x.shape)
        source = "" if self.source is None else f"source: int64 {list(self.source.shape)}, "
        consumed = self.state.get("consumed_samples")
        return f"Batch(x, y: {dtype} {shape} on {self.x.device}, {source}consumed_samples={consumed})"

    def _repr_html_(self) -> str:
        tensors = {"x": self.x, "y": self.y, **({} if self.source is None else {"source": self.source})}
        forms = {name: f"{str(each.dtype)[6:]} {list(each.shape)} on {each.device}" for name, each in tensors.items()}
        return html_table("Batch", [*forms.items(), ("consumed samples", self.state.get("consumed_samples"))])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.x, self.y))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.x, self.y)[index]

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; DataLoader(pin_memory=True) calls this."""
        return Batch(self.x.pin_memory(), self.y.pin_memory(), self.state, self.source)

    def to(self, device: str | torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch with x and y on another device."""
        x, y = (tensor.to(device, non_blocking=non_blocking) for tensor in self)
        return Batch(x, y, self.state, self.source)


class Places(NamedTuple):
    """Where samples begin, as arguments of `TokenFiles.gather`, and in a mixture the stream of each. All int64 [n]."""

    shards: NDArray[np.int64]
    places: NDArray[np.int64]
    sources: NDArray[np.int64] | None = None

    def part(self, first: int, last: int) -> Places:
        """Return the places of the samples first to last - 1."""
        sources = None if self.sources is None else self.sources[first:last]
        return Places(self.shards[first:last], self.places[first:last], sources)


class SampleStream(IterableDataset[Batch], ABC):
    """Batches of numbered samples. Iterating continues from the current position; it does not start over."""

    T: int
    files: TokenFiles
    """The files of all samples."""
    vocab_size: int | None
    num_samples: int | None
    """Samples until the stream ends; None: without end."""

    def __init__(
        self, *, global_batch_size: int, rank: int, world_size: int, device: str, drop_last: bool = False
    ) -> None:
        global_batch_size = checked_int("global_batch_size", global_batch_size, 1)
        rank, world_size = checked_int("rank", rank, 0), checked_int("world_size", world_size, 1)
        if rank >= world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: expected 0 <= rank < world_size")
        if global_batch_size % world_size:
            raise ValueError(
                f"global_batch_size={global_batch_size}: expected a multiple of world_size={world_size}, so that each "
                "rank has equally many rows"
            )
        if not isinstance(drop_last, bool):
            raise ValueError(f"drop_last={drop_last!r}: expected True or False")
        torch.device(device)  # raises for an unknown one
        self.global_batch_size, self.rank, self.world_size, self.device = global_batch_size, rank, world_size, device
        self.drop_last = drop_last
        self._consumed = 0
        self._has_ended = self._is_loaded = False
        self._worker_base: int | None = None
        self._iterator: object = None
        self._started = _shared_bytes(_MAX_WORKERS)
        """Shared memory, one byte per DataLoader worker, which has a copy of self and sets its byte when it starts.

        A loaded state gets new bytes: a worker of an earlier DataLoader that starts late sets one that nobody reads.
        """

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _iterator=None)
        # Bytes that are not shared: the copy was not made for a worker, and may get its own workers.
        if not self._started.is_shared():  # type: ignore[no-untyped-call]
            self._started = _shared_bytes(_MAX_WORKERS)

    def _check_last_batch(self) -> None:
        """Warn if ranks get unequal numbers of rows of the last batch. Raises: ValueError if drop_last leaves none."""
        if self.num_samples is None:
            return
        short = self.num_samples % self.global_batch_size
        if self.drop_last and self.num_samples < self.global_batch_size:
            raise ValueError(
                f"drop_last=True, global_batch_size={self.global_batch_size}: no batch is left of {self.num_samples} "
                "samples, expected a smaller batch or more epochs"
            )
        if short % self.world_size and not self.drop_last:
            rows = short // self.world_size
            text = (
                f"the last batch has {short} of {self.global_batch_size} rows, so some of {self.world_size} ranks get "
                f"{rows} rows and others {rows + 1}; a mean over 0 rows is nan, and an average of the ranks' means is "
                "wrong. Pass drop_last=True, or sum the losses and divide by the number of all targets"
            )
            warnings.warn(CodedWarning("W101", text), stacklevel=3)

    def __len__(self) -> int:
        """Return the number of batches from the first sample to the end, the same on every rank.

        Raises: TypeError for a stream without end.
        """
        if self.num_samples is None:
            raise TypeError(f"this {type(self).__name__} has no end and no length. Count steps instead")
        return (self.num_samples + (0 if self.drop_last else self.global_batch_size - 1)) // self.global_batch_size

    def _described(self) -> str:
        rows = self.global_batch_size // self.world_size
        return (
            f"x, y: int64 [{rows}, {self.T}] on {self.device}, rank {self.rank} of {self.world_size}, "
            f"consumed_samples={self._consumed}"
        )

    def _repr_html_(self) -> str:
        rows = self.global_batch_size // self.world_size
        end = "without end" if self.num_samples is None else f"of {self.num_samples:,}"
        described = {
            **self._sources(),
            "batch": f"x, y: int64 [{rows}, {self.T}] on {self.device}, rank {self.rank} of {self.world_size}",
            "samples": f"{self._consumed:,} consumed, {end}",
        }
        return html_table(type(self).__name__, described.items())

    def __bool__(self) -> bool:
        return True

    @abstractmethod
    def _sources(self) -> dict[str, object]:
        """Return what the samples are drawn from, for a table: names and values."""

    @abstractmethod
    def locate(self, samples: NDArray[np.int64]) -> Places:
        """Return where the samples with these numbers begin: [n]."""

    def rows(self, places: Places) -> Ids:
        """Return the tokens of samples, [n, T + 1], of the widest dtype of the files.

        Raises: CacheError for an id outside the vocabulary.
        """
        return gathered(self.files, self.vocab_size, places.shards, places.places, self.T + 1)

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what decides which sample a number means, fit for JSON."""

    @abstractmethod
    def _progress(self, consumed: int) -> dict[str, int]:
        """Return the part of a state that changes."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's rows of each global batch, in a DataLoader worker those of every num_workers-th batch.

        Raises: RuntimeError if another iterator was started or a state loaded since, if the stream has ended, or if
            workers had batches of it, so that its position is not known.
        """
        info, identity, base = get_worker_info(), self.identity(), self._consumed
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._check_may_start(None if info is None else info.id)
        this, crc = object(), identity_crc(identity)
        self._iterator, self._is_loaded = this, False
        for number, (places, consumed) in enumerate(self._steps(base, worker, workers), 1):
            if self._iterator is not this:
                raise RuntimeError("another iterator of this stream was started, or a state was loaded: iterate again")
            x, y = split_rows(self.rows(places), self.device)
            if info is None:
                self._consumed = consumed
            else:
                self._worker_base = base + number * workers * self.global_batch_size
            source = None if places.sources is None else torch.from_numpy(places.sources)
            yield Batch(x, y, sealed(identity, crc, self._progress(consumed)), source)
        self._has_ended = info is None and self._iterator is this

    def _check_may_start(self, worker: int | None) -> None:
        """Raise RuntimeError if a new iterator would repeat batches, or yield none. worker: its number, in a worker."""
        if self._has_ended:
            raise RuntimeError(
                f"this stream has ended: all of its {self.num_samples} samples were served. For several epochs in one "
                "pass open it with epochs=3 (a mixture: when_exhausted=3); to start over open a new stream, or load a "
                "state of its start"
            )
        if worker is not None:
            self._check_cpu()
        started = self._started.any() if worker is None else self._started[worker] and not self._is_loaded
        if self._worker_base is not None or started:
            raise RuntimeError(
                "DataLoader workers had batches of this stream; it does not know their position, and would give the "
                "same batches again. Load batch.state of the last batch that was used into the stream, and make a new "
                "DataLoader"
            )
        if worker is not None:
            self._started[worker] = 1

    def _check_cpu(self) -> None:
        if torch.device(self.device).type != "cpu":
            raise RuntimeError(
                f"device={self.device!r} in a DataLoader worker: open the stream with device='cpu' and move the "
                "batches (pin_memory=True, then batch.to), or take num_workers=0"
            )

    def _steps(self, base: int, worker: int, workers: int) -> Iterator[tuple[Places, int]]:
        """Yield for each batch of a worker the places of this rank's rows, and the samples consumed after it.

        base: the first sample of worker 0.
        """
        size, rank, world = self.global_batch_size, self.rank, self.world_size
        least = size if self.drop_last else 1
        at_once = max(1, _BLOCK * world // size)
        begin = base + worker * size
        while True:
            begins = begin + workers * size * np.arange(at_once)
            last = begins + size if self.num_samples is None else np.minimum(begins + size, self.num_samples)
            sizes = np.maximum(last - begins, 0)
            first, end_of_rank = begins + rank * sizes // world, begins + (rank + 1) * sizes // world
            counts = end_of_rank - first
            ends = np.cumsum(counts)
            places = self.locate(np.repeat(end_of_rank - ends, counts) + np.arange(ends[-1]))
            for end, count, consumed, rows in zip(*(a.tolist() for a in (ends, counts, last, sizes)), strict=True):
                if rows < least:
                    return
                yield places.part(end - count, end), consumed
            begin += workers * size * at_once

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch: a few scalars, fit for JSON, the same on every rank.

        Every batch has it as `batch.state`, which is also right where DataLoader workers have read ahead.
        Raises: RuntimeError if DataLoader workers iterate over copies of the stream: it does not know their position.
        """
        identity, info = self.identity(), get_worker_info()
        if info is None and self._started.any():
            raise RuntimeError(
                "DataLoader workers iterate over copies of this stream; its own position does not change. Keep "
                "batch.state of the last batch that was used, or use torchdata's StatefulDataLoader"
            )
        if info is not None and self._worker_base is not None:
            # For StatefulDataLoader: the position of this worker alone.
            worker = [info.id, info.num_workers, self.global_batch_size]
            return sealed(identity, identity_crc(identity), self._progress(self._worker_base), worker)
        return sealed(identity, identity_crc(identity), self._progress(self._consumed))

    def load_state_dict(self, state: Mapping[str, Any], *, allow_other_content: bool = False) -> None:
        """Resume exactly where a state was taken, with any rank, world_size, global_batch_size and number of workers.

        allow_other_content: resume in a cache of other content at the same number of samples, which then means other
            text; a cache of another tokenizer is always refused.
        Raises: CacheError for other content or another tokenizer; ValueError for a state of a stream with other
            arguments (seed, T, ...), for a wrong checksum (a state without one, from an earlier release, is accepted),
            for anything that is not a state, and for the state of a StatefulDataLoader worker except in the same worker
            of equally many.
        """
        identity = self.identity()
        check_identity(state, identity, "state", allow_other_content)
        consumed = state_count(state, "consumed_samples")
        for key, value in self._progress(consumed).items():
            if state_count(state, key) != value and not allow_other_content:
                raise coded(
                    "E108", ValueError(f"state: {key} is {state[key]}, expected {value} after {consumed} samples")
                )
        if self.num_samples is not None and consumed > self.num_samples:
            raise coded(
                "E108",
                ValueError(f"state: consumed_samples is {consumed}, but this stream ends after {self.num_samples}"),
            )
        info = get_worker_info()
        worker = None if info is None else [info.id, info.num_workers, self.global_batch_size]
        if "worker" in state and state["worker"] != worker:
            raise coded(
                "E108",
                ValueError(
                    f"state: of the DataLoader's [worker, workers, global_batch_size] {shortened(state['worker'])}, "
                    f"expected {worker}. Only batch.state can be resumed with another number of workers"
                ),
            )
        check_checksum(state, identity, self._progress(consumed))
        self._consumed, self._worker_base, self._iterator = consumed, None, None
        self._has_ended, self._is_loaded = False, info is not None  # a worker that loads a state may start
        if info is None:
            self._started = _shared_bytes(_MAX_WORKERS)


def _shared_bytes(count: int) -> torch.Tensor:
    shared: torch.Tensor = torch.zeros(count, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    return shared
