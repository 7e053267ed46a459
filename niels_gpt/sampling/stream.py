"""SampleStream: where samples are cut into batches, which rank and DataLoader worker reads which, and the state.

A stream is an endless or finite list of samples 0, 1, 2, ..., each computed from its number alone. A global batch is
the next `global_batch_size` samples, of which each rank gets an equal, consecutive part; DataLoader worker w of W gets
the batches w, w + W, w + 2W, ... So the number of samples that all ranks together have consumed is the whole state, and
a run may resume with other ranks, workers and batch sizes.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.formats import Ids
from niels_gpt.cache.mmap import TokenFiles
from niels_gpt.cache.pretrain_dataset import gathered, split_rows
from niels_gpt.display.tables import html_table
from niels_gpt.sampling.position import STREAM_VERSION, ResumableStream
from niels_gpt.storage.codes import CodedWarning

__all__ = ["STREAM_VERSION", "Batch", "Places", "SampleStream"]

_BLOCK = 16384  # samples located at once: 0.1 to 0.9 us each, but about 1 ms for a few: cycles are walked together


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


class SampleStream(ResumableStream[Batch]):
    """Batches of numbered samples. Iterating continues from the current position; it does not start over."""

    T: int
    files: TokenFiles
    """The files of all samples."""
    vocab_size: int | None

    def __init__(
        self, *, global_batch_size: int, rank: int, world_size: int, device: str, drop_last: bool = False
    ) -> None:
        super().__init__(global_batch_size=global_batch_size, rank=rank, world_size=world_size)
        if self.global_batch_size % self.world_size:
            raise ValueError(
                f"global_batch_size={global_batch_size}: expected a multiple of world_size={world_size}, so that each "
                "rank has equally many rows"
            )
        if not isinstance(drop_last, bool):
            raise ValueError(f"drop_last={drop_last!r}: expected True or False")
        torch.device(device)  # raises for an unknown one
        self.device, self.drop_last = device, drop_last

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

    def _work(self, base: int, worker: int, workers: int) -> Iterator[tuple[Places, int, int]]:
        steps = self._steps(base, worker, workers)
        for number, (places, consumed) in enumerate(steps, 1):
            yield places, consumed, base + number * workers * self.global_batch_size

    def _batch(self, work: Places, state: dict[str, Any]) -> Batch:
        x, y = split_rows(self.rows(work), self.device)
        return Batch(x, y, state, None if work.sources is None else torch.from_numpy(work.sources))

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
