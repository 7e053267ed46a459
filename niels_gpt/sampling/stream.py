"""SampleStream: where samples are cut into batches, which rank and DataLoader worker reads which, and the state.

A stream is an endless or finite list of samples 0, 1, 2, ..., each computed from its number alone. A global batch is
the next `global_batch_size` samples, of which each rank gets an equal, consecutive part; DataLoader worker w of W gets
the batches w, w + W, w + 2W, ... So the number of samples that all ranks together have consumed is the whole state, and
a run may resume with other ranks, workers and batch sizes.
"""

from __future__ import annotations

import itertools
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.display.tables import html_table
from niels_gpt.sampling.batch import Batch, Rows
from niels_gpt.sampling.permutation import permute
from niels_gpt.sampling.position import STREAM_VERSION, ResumableStream
from niels_gpt.sampling.state import limited
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.errors import NoLength
from niels_gpt.storage.meta_json import checked_int

__all__ = ["STREAM_VERSION", "Batch", "CacheStream", "MadeAhead", "SampleStream"]

Made = TypeVar("Made")

_PREPARED = 256  # batches; the first one costs as much as a hundred
_TOKENS_AHEAD = 1 << 20  # 2 MiB of ids of 16 bits: a half and the double take more time
_BATCHES_AHEAD = 64  # so that the first batch of a stream of short rows does not wait for thousands


class SampleStream(ResumableStream[Batch]):
    """Batches of numbered samples. Iterating continues from the current position; it does not start over."""

    T: int
    _BLOCK = 16384  # samples located at once: 0.1 to 0.9 us each, but about 1 ms for a few: cycles are walked together

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_ahead" not in state:
            raise ValueError("a stream pickled by an earlier release: open it again and load its state")
        super().__setstate__(state)

    def _check_left(self, first: int = 0) -> None:
        """Raise ValueError if drop_last leaves no batch of the samples from `first` on."""
        if self.drop_last and self.num_samples is not None and self.num_samples - first < self.global_batch_size:
            raise ValueError(
                f"drop_last=True, global_batch_size={self.global_batch_size}: no batch is left of "
                f"{self.num_samples - first} samples, expected a smaller batch or more epochs"
            )

    def _warn_of_last_batch(self, stacklevel: int = 3) -> None:
        """Warn if ranks get unequal numbers of rows of the last batch, counted from the position.

        stacklevel: of the warning; 3: the caller of the function that calls this.
        """
        if self.num_samples is None:
            return
        short = (self.num_samples - self._consumed) % self.global_batch_size
        if short % self.world_size and not self.drop_last:
            rows = short // self.world_size
            text = (
                f"the last batch has {short} of {self.global_batch_size} rows, so some of {self.world_size} ranks get "
                f"{rows} rows and others {rows + 1}; a mean over 0 rows is nan, and an average of the ranks' means is "
                "wrong. Pass drop_last=True, or sum the losses and divide by the number of all targets"
            )
            warnings.warn(CodedWarning("W101", text), stacklevel=stacklevel)

    def __len__(self) -> int:
        """Return the number of batches of this size from sample 0 to the end, the same on every rank.

        Raises: TypeError for a stream without end.
        """
        if self.num_samples is None:
            raise NoLength(f"this {type(self).__name__} has no end and no length. Count steps instead")
        return (self.num_samples + (0 if self.drop_last else self.global_batch_size - 1)) // self.global_batch_size

    def load_state_dict(self, state: Mapping[str, Any], *, allow_other_content: bool = False) -> None:
        """Resume as `ResumableStream.load_state_dict`; warns of ranks with unequal rows of the last batch."""
        super().load_state_dict(state, allow_other_content=allow_other_content)
        if self._consumed % self.global_batch_size:  # else the last batch is that of which opening warned
            self._warn_of_last_batch()

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
    def locate(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the samples with these numbers are, for `read`: int64 [columns, n]."""

    @abstractmethod
    def read(self, places: NDArray[np.int64]) -> Rows:
        """Return samples as rows. places: int64 [columns, n], from `locate`.

        Raises: CacheError for an id outside the vocabulary.
        """

    def _work(self, base: int, worker: int, workers: int) -> Iterator[tuple[NDArray[np.int64], int, int]]:
        steps = self._steps(base, worker, workers)
        for number, (places, consumed) in enumerate(steps, 1):
            yield places, consumed, base + number * workers * self.global_batch_size

    def _batch(self, work: NDArray[np.int64], state: dict[str, Any]) -> Batch:
        return Batch.of_rows(self.read(work), state)

    def _prepare(self, consumed: NDArray[np.int64]) -> None:
        """Prepare `_progress` for these numbers of consumed samples, which are the next that it is asked for."""

    def _steps(self, base: int, worker: int, workers: int) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Yield for each batch of a worker the places of this rank's rows, and the samples consumed after it.

        base: the first sample of worker 0.
        """
        size, rank, world = self.global_batch_size, self.rank, self.world_size
        least = size if self.drop_last else 1
        at_once = max(1, self._BLOCK * world // size)
        begin = prepared = base + worker * size
        while True:
            begins = begin + workers * size * np.arange(at_once)
            last = begins + size if self.num_samples is None else np.minimum(begins + size, self.num_samples)
            sizes = np.maximum(last - begins, 0)
            first, end_of_rank = begins + rank * sizes // world, begins + (rank + 1) * sizes // world
            counts = end_of_rank - first
            ends = np.cumsum(counts)
            if begin >= prepared:
                prepared = begin + workers * size * max(at_once, _PREPARED)
                firsts = np.arange(begin, prepared, workers * size)
                after = firsts + size if self.num_samples is None else np.minimum(firsts + size, self.num_samples)
                self._prepare(np.union1d(after, firsts + (workers - worker) * size))
            places = self.locate(np.repeat(end_of_rank - ends, counts) + np.arange(ends[-1]))
            for end, count, consumed, rows in zip(*(a.tolist() for a in (ends, counts, last, sizes)), strict=True):
                if rows < least:
                    return
                yield places[:, end - count : end], consumed
            begin += workers * size * at_once


class MadeAhead(Generic[Made]):
    """What a stream makes of the samples of several batches at once, where the calls of each batch would cost more."""

    _blocks = itertools.count(1)  # of the class, so that no two samples in a process have one number

    def __init__(self) -> None:
        self._located: NDArray[np.int64] = np.zeros((1, 0), dtype=np.int64)
        self._made: tuple[NDArray[np.int64], Made] | None = None

    def numbered(self, *columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what `locate` returns of some samples, with a last row, by which `of` finds those that follow them."""
        block = (next(self._blocks) << 32) + np.arange(len(columns[0]))
        self._located = np.stack((*columns, block))
        return self._located

    def of(self, places: NDArray[np.int64], T: int, make: Callable[[NDArray[np.int64]], Made]) -> tuple[Made, int]:
        """Return what `make` made of places from `numbered` and of what follows them, and where in it they begin.

        It is made of up to _BATCHES_AHEAD batches, or of as many as have _TOKENS_AHEAD tokens, and kept.
        """
        numbers = places[-1]
        kept = self._made  # once: another thread may replace it meanwhile
        if kept is not None and (at := _found(numbers, kept[0])) is not None:
            return kept[1], at
        located, count = self._located, places.shape[1]
        at = _found(numbers, located[-1])
        if at is not None:
            batches = min(max(1, _TOKENS_AHEAD // max(1, count * T)), _BATCHES_AHEAD)
            places = located[:, at : at + batches * count]
        made = make(places)
        self._made = places[-1], made  # replaced: threads may read too
        return made, 0


def _found(numbers: NDArray[np.int64], within: NDArray[np.int64]) -> int | None:
    """Return where these numbers stand, one after the other, in ascending ones without gaps; None: they do not."""
    if not len(numbers) or not len(within):
        return None
    at = numbers.item(0) - within.item(0)
    is_there = at >= 0 and numbers.tobytes() == within[at : at + len(numbers)].tobytes()
    return at if is_there else None


class Split(Protocol):
    """The split of a cache that a stream reads: `PretrainSplit`, `SFTSplit`."""

    vocab_size: int | None

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of its tokens."""


class CacheStream(SampleStream):
    """Samples of one split, epoch after epoch: each exactly once an epoch."""

    COLUMNS = 2
    """Rows of what `locate` returns."""
    split: Split
    folder: Path
    """Of the split's cache, or of the split in it, for messages."""
    samples_per_epoch: int
    epochs: int | None
    """How many until the stream ends; None: never."""
    _keys: NDArray[np.uint64]
    """Of the order: uint64 [ROUNDS]."""

    def __init__(
        self,
        *,
        T: int,
        global_batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        device: str,
        epochs: int | None,
        drop_last: bool,
    ) -> None:
        super().__init__(
            global_batch_size=global_batch_size, rank=rank, world_size=world_size, device=device, drop_last=drop_last
        )
        self.T, self.seed = checked_int("T", T, 1), checked_int("seed", seed, -(2**63))
        self.epochs = None if epochs is None else checked_int("epochs", epochs, 1)

    def _set_samples(self, samples_per_epoch: int) -> None:
        """Set how many samples an epoch has, and where the stream ends. Raises: as `_check_left`."""
        self.samples_per_epoch = samples_per_epoch
        self.num_samples = None if self.epochs is None else limited("epochs", self.epochs, samples_per_epoch)
        self._check_left()
        self._warn_of_last_batch(stacklevel=4)

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the cache, its version and the split, for messages."""

    def _in_order(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the epoch of each sample, and its number within an epoch in the seeded order: int64 [n] each."""
        epochs, positions = np.divmod(samples, self.samples_per_epoch)
        is_one = len(epochs) and epochs.min() == epochs.max()  # a single tweak takes less time
        tweaks = epochs[:1] if is_one else epochs
        return epochs, permute(positions, self.samples_per_epoch, self._keys, tweaks)

    def _progress(self, consumed: int) -> dict[str, int]:
        return {"epoch": consumed // self.samples_per_epoch, "consumed_samples": consumed}
