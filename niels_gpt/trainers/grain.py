"""Grain, and what stands on it: MaxText, torchtitan's main.

    StreamSource    rows by number, for `grain.MapDataset.source`, `grain.DataLoader` and Grain's `ElasticIterator`
    StreamDataset   whole batches of one rank, as an `IterDataset` whose state is the stream's
    maxtext         renames the arrays of rows or batches as MaxText's models take them

The order is the stream's, for all ranks: epoch after epoch, each in an order of its own. So Grain's `shuffle` and
`repeat` stay away: they would shuffle the epochs into each other, and serve each in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from typing import Any

import grain
import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import IGNORE_INDEX
from niels_gpt.sampling.batch import Batch
from niels_gpt.sampling.random_access import RandomAccess
from niels_gpt.sampling.stream import Stream
from niels_gpt.storage.errors import StateError, StreamUseError
from niels_gpt.storage.meta_json import shortened

Arrays = dict[str, NDArray[Any]]


class StreamSource:
    """The rows of a stream by number: a `grain.sources.RandomAccessDataSource`, in the stream's order.

    A row is a dict of arrays: `input_ids` and `labels`, int64 [T]; labels are shifted, -100 where there is no loss.
    Where the stream knows segments (documents=True, packed rows, chats) also `positions`, int64 [T], the place of each
    token in its segment, and `segment_ids`, int32 [T]: 1, 2, ... in a row, 0 in padding. Of a mixture also `source`,
    int64 []: the index of the row's stream. Threads may read it; a worker process opens the cache itself.
    """

    def __init__(self, stream: Stream[Batch], *, length: int | None = None) -> None:
        """stream: its rank, batch size and position do not count. length: see `RandomAccess`, which has the errors."""
        self._rows = RandomAccess(stream, length=length)
        self._identity = json.dumps(stream.identity(), sort_keys=True)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Arrays:
        """Return a row. Raises: IndexError (E106); CacheError for an id outside the vocabulary."""
        return {name: values[0] for name, values in arrays(self._rows[number]).items()}

    def __repr__(self) -> str:
        """Return what decides the rows, which `grain.DataLoader` puts into its state and compares on restore."""
        return f"StreamSource({len(self):,} rows of {self._identity})"


class StreamDataset(grain.IterDataset[Arrays]):
    """The batches of this rank of a stream, as dicts of arrays [B, ...] with the names that `StreamSource` has.

    The iterator's state is `batch.state`: the same on every rank, and it may be set with other ranks, workers and batch
    sizes. It is refused by a stream with another cache, seed or T.
    """

    def __init__(self, stream: Stream[Batch], *, multiprocessing_options: Any = None) -> None:
        """stream: iterators begin at its position, which stays.

        multiprocessing_options: `grain.multiprocessing.MultiprocessingOptions`: processes that make batches ahead.
            Grain's `mp_prefetch` of this dataset does so too, but then the state is Grain's, for equally many workers.
        Raises: StreamUseError (E109) for a stream of rollouts, and for one whose device is not the CPU.
        """
        super().__init__()
        device = getattr(stream, "device", None)
        if not hasattr(stream, "samples") or device != "cpu":
            found = f"a {type(stream).__name__} with device={device!r}"
            raise StreamUseError(f"{found}, expected a stream of rows of tokens with device='cpu': Grain's are arrays")
        self._stream, self._options = stream, multiprocessing_options
        self._worker: tuple[int, int] | None = None

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Serve batches sl.start, sl.start + sl.step, ...: what Grain's `mp_prefetch` calls in each of its workers."""
        if sequential_slice:
            raise StreamUseError("sequential_slice=True would give each worker a part of the epoch: leave it out")
        if self._options is not None:
            raise StreamUseError("mp_prefetch after multiprocessing_options: pass one of the two")
        self._worker = sl.start, sl.step

    def __iter__(self) -> grain.DatasetIterator[Arrays]:
        return _Batches(self._stream, self._options, self._worker)

    def __str__(self) -> str:
        return f"StreamDataset({type(self._stream).__name__})"


class _Batches(grain.DatasetIterator[Arrays]):
    """Batches from a position on, made in this process or by workers."""

    def __init__(self, stream: Stream[Batch], options: Any, worker: tuple[int, int] | None) -> None:
        """worker: its number and how many there are, in a process that Grain's mp_prefetch has started."""
        super().__init__()
        self._batches: Any = None
        self._stream, self._options, self._worker = copy(stream), options, worker
        self._stream.samples = copy(stream.samples)  # a state may change them
        self._consumed, self._is_closed = stream.consumed_samples, False

    def __next__(self) -> Arrays:
        if self._is_closed:
            raise StreamUseError("this iterator was closed: iterate again")
        worker, workers = self._worker or (0, 1)
        if self._batches is None and self._options is not None:
            self._batches = iter(StreamDataset(self._stream).mp_prefetch(self._options))
        elif self._batches is None:
            self._batches = (arrays(batch) for batch in self._stream.part(worker, workers))
        batch: Arrays = next(self._batches)
        self._consumed += workers * self._stream.global_batch_size
        return batch

    def get_state(self) -> dict[str, Any]:
        end = self._stream.num_samples
        state = self._stream.state_at(self._consumed if end is None else min(self._consumed, end))
        return state if self._worker is None else {**state, "worker": list(self._worker)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken. Raises: the errors of `Stream.load_state_dict`."""
        if self._worker is not None and "worker" in state:  # else of a worker that has given no batch yet
            if (given := state["worker"]) != list(self._worker):
                raise StateError(
                    f"state: of worker {shortened(given)} of mp_prefetch, expected {list(self._worker)}. For another "
                    "number of workers give them to StreamDataset(multiprocessing_options=)"
                )
            state = {key: value for key, value in state.items() if key != "worker"}
        self._stream.load_state_dict(state)
        self._consumed = self._stream.consumed_samples
        self._stop()

    def _stop(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches = None

    def close(self) -> None:
        self._is_closed = True
        self._stop()
        super().close()

    def __str__(self) -> str:
        return f"StreamDatasetIterator({type(self._stream).__name__})"


def arrays(batch: Batch) -> Arrays:
    """Return the arrays of a batch, [B, T] each, and `source` [B]: see `StreamSource`. No token is copied."""
    if not isinstance(batch, Batch):
        raise StreamUseError(f"a {type(batch).__name__}, expected batches of rows of tokens")
    found = {"input_ids": batch.x.numpy(), "labels": batch.y.numpy()}
    if (positions := batch.position_ids) is not None:
        found["positions"], found["segment_ids"] = positions.numpy(), _segment_ids(batch)
    if batch.source is not None:
        found["source"] = batch.source.numpy()
    return found


def _segment_ids(batch: Batch) -> NDArray[np.int32]:
    """Return the number of each token's segment in its row, from 1; 0: padding."""
    is_padding = batch.is_padding
    assert batch.cu_seqlens is not None and is_padding is not None
    starts, (rows, T) = batch.cu_seqlens.numpy(), batch.x.shape
    numbers = np.arange(1, len(starts), dtype=np.int32)
    if rows > 1:
        firsts = starts[:-1].searchsorted(np.arange(0, rows * T, T, dtype=np.int32))
        numbers -= firsts.repeat(np.diff(firsts, append=len(numbers))).astype(np.int32)
    numbers[is_padding.numpy()] = 0
    return numbers.repeat(starts[1:] - starts[:-1]).reshape(-1, T)


def maxtext(element: Mapping[str, Any]) -> Arrays:
    """Return a row or a batch with the names, int32, that MaxText's models take; for Grain's `.map`.

    `inputs`, `targets`, and of both `_position` and `_segmentation`, as Grain's packing and MaxText's `ShiftData` make
    them: positions are 0 in padding, and targets_segmentation is 0 where a target has no loss; the target there is 0.
    """
    labels = np.asarray(element["labels"])
    has_loss = labels != IGNORE_INDEX
    segments = element.get("segment_ids", np.ones(labels.shape))
    positions = element.get("positions", np.arange(labels.shape[-1])) * (segments > 0)
    found = {
        "inputs": element["input_ids"],
        "targets": labels * has_loss,
        "inputs_position": positions,
        "targets_position": positions,
        "inputs_segmentation": segments,
        "targets_segmentation": segments * has_loss,
    }
    return {name: np.asarray(values).astype(np.int32) for name, values in found.items()}
