"""ResumableStream: the position of a stream, with any number of ranks and DataLoader workers; its state.

A stream is a list of numbered samples, and its position the number that all ranks together have consumed. What a batch
is made of is left to the streams: SampleStream of stream.py, and RolloutStream of niels_gpt.prefix_tree.rollouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from threading import get_ident, local
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from niels_gpt.sampling.state import check_checksum, check_identity, identity_crc, sealed, state_count, state_numbers
from niels_gpt.storage.errors import StateError, StreamUseError
from niels_gpt.storage.meta_json import checked_int, shortened

STREAM_VERSION = 1
"""Version of the order: increased when the same seed and number mean another sample."""

_MAX_WORKERS = 1024

B = TypeVar("B")


class _Reader(local):
    """Of a thread: what a stream that is iterated in it tells of itself, if the thread reads ahead."""

    lend: Callable[[ResumableStream[Any]], None] | None = None


READER = _Reader()


class ResumableStream(IterableDataset[B], ABC, Generic[B]):
    """Batches of numbered samples. Iterating continues from the current position; it does not start over."""

    num_samples: int | None
    """Samples until the stream ends; None: without end."""
    device: str

    def __init__(self, *, global_batch_size: int, rank: int, world_size: int) -> None:
        self.global_batch_size = checked_int("global_batch_size", global_batch_size, 1)
        rank, world_size = checked_int("rank", rank, 0), checked_int("world_size", world_size, 1)
        if rank >= world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: expected 0 <= rank < world_size")
        self.rank, self.world_size = rank, world_size
        self._consumed = 0
        self._has_ended = self._is_loaded = False
        self._worker_base: int | None = None
        self._iterator: object = None
        self._ahead: int | None = None  # the thread that reads ahead
        self._started = _shared_bytes(_MAX_WORKERS)
        """Shared memory, one byte per DataLoader worker, which has a copy of self and sets its byte when it starts.

        A loaded state gets new bytes: a worker of an earlier DataLoader that starts late sets one that nobody reads.
        """

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _iterator=None, _ahead=None)
        # Bytes that are not shared: the copy was not made for a worker, and may get its own workers.
        if not self._started.is_shared():  # type: ignore[no-untyped-call]
            self._started = _shared_bytes(_MAX_WORKERS)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies of a stream that is read ahead, also one with its __getstate__: they would skip batches."""
        self.check_not_ahead()
        return super().__reduce_ex__(protocol)

    def __bool__(self) -> bool:
        return True

    @property
    def consumed_samples(self) -> int:
        """Return the position: samples that all ranks together have consumed, also in a stream that is read ahead."""
        return self._consumed

    def lend_to(self, thread: int) -> None:
        """Let only this thread, which reads ahead, use the stream until `take_back`. thread: its `ident`."""
        self.check_not_ahead()
        self._ahead = thread

    def take_back(self, consumed: int | None) -> None:
        """End `lend_to`, and set the position to a sample; None: leave it where the thread ended."""
        self._ahead = None
        if consumed is not None:
            self._resume_at(consumed)

    def check_not_ahead(self) -> None:
        """Raise RuntimeError if another thread reads ahead: the position of the stream is not that of its user."""
        if self._ahead not in (None, get_ident()) and get_worker_info() is None:
            raise StreamUseError(
                "prefetch reads ahead in this stream: its position is not that of the batch in use. Save batch.state, "
                "and close the prefetch before the stream is used or copied otherwise"
            )

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what decides which sample a number means, fit for JSON."""

    @abstractmethod
    def _progress(self, consumed: int) -> dict[str, Any]:
        """Return the part of a state that changes: integers, and lists of integers that are the caller's."""

    @abstractmethod
    def _work(self, base: int, worker: int, workers: int) -> Iterator[tuple[Any, int, int]]:
        """Yield for each batch of a worker what it is made of, the samples consumed after it, and the next base.

        base: the first sample of worker 0. The next one: that of the round after this batch, in which each worker has a
        batch.
        """

    @abstractmethod
    def _batch(self, work: Any, state: dict[str, Any]) -> B:
        """Return this rank's part of a batch."""

    def __iter__(self) -> Iterator[B]:
        """Yield this rank's rows of each global batch, in a DataLoader worker those of every num_workers-th batch.

        Raises: RuntimeError if another iterator was started or a state loaded since, if the stream has ended, or if
            workers had batches of it, so that its position is not known.
        """
        info, identity, base = get_worker_info(), self.identity(), self._consumed
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._check_may_start(None if info is None else info.id)
        this, crc = object(), identity_crc(identity)
        self._iterator, self._is_loaded = this, False
        for work, consumed, next_base in self._work(base, worker, workers):
            if self._iterator is not this:
                raise StreamUseError(
                    "another iterator of this stream was started, or a state was loaded: iterate again"
                )
            if info is None and READER.lend is not None:
                READER.lend(self)
            made = [self._batch(work, sealed(identity, crc, self._progress(consumed)))]
            if info is None:
                self._consumed = consumed
            else:
                self._worker_base = next_base
            yield made.pop()  # no reference stays here: the caller decides how many batches there are
        self._has_ended = info is None and self._iterator is this

    def _check_may_start(self, worker: int | None) -> None:
        """Raise RuntimeError if a new iterator would repeat batches, or yield none. worker: its number, in a worker."""
        self.check_not_ahead()
        if self._has_ended:
            raise StreamUseError(
                f"this stream has ended: all of its {self.num_samples} samples were served. For several epochs in one "
                "pass open it with epochs=3 (a mixture: when_exhausted=3); to start over open a new stream, or load a "
                "state of its start"
            )
        if worker is not None:
            self._check_cpu()
        started = self._started.any() if worker is None else self._started[worker] and not self._is_loaded
        if self._worker_base is not None or started:
            raise StreamUseError(
                "DataLoader workers had batches of this stream; it does not know their position, and would give the "
                "same batches again. Load batch.state of the last batch that was used into the stream, and make a new "
                "DataLoader"
            )
        if worker is not None:
            self._started[worker] = 1

    def _check_cpu(self) -> None:
        if torch.device(self.device).type != "cpu":
            raise StreamUseError(
                f"device={self.device!r} in a DataLoader worker: open the stream with device='cpu' and move the "
                "batches (pin_memory=True, then batch.to), or take num_workers=0"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch: a few scalars, fit for JSON, the same on every rank.

        Every batch has it as `batch.state`, which is also right where DataLoader workers have read ahead.
        Raises: RuntimeError if DataLoader workers iterate over copies of the stream, so that it does not know their
            position, or if `prefetch` reads ahead in it.
        """
        self.check_not_ahead()
        identity, info = self.identity(), get_worker_info()
        if info is None and self._started.any():
            raise StreamUseError(
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
            of equally many; RuntimeError if `prefetch` reads ahead in the stream.
        """
        self.check_not_ahead()
        identity = self.identity()
        check_identity(state, identity, "state", allow_other_content)
        consumed = state_count(state, "consumed_samples")
        if self.num_samples is not None and consumed > self.num_samples:
            raise StateError(f"state: consumed_samples is {consumed}, but this stream ends after {self.num_samples}")
        progress = self._progress(consumed)
        for key, value in progress.items():
            if isinstance(value, list) and key not in state:
                continue  # a state of an earlier release
            found = state_numbers(state, key, len(value)) if isinstance(value, list) else state_count(state, key)
            if found != value and not allow_other_content:
                raise StateError(f"state: {key} is {found}, expected {value} after {consumed} samples")
        info = get_worker_info()
        worker = None if info is None else [info.id, info.num_workers, self.global_batch_size]
        if "worker" in state and state["worker"] != worker:
            raise StateError(
                f"state: of the DataLoader's [worker, workers, global_batch_size] {shortened(state['worker'])}, "
                f"expected {worker}. Only batch.state can be resumed with another number of workers"
            )
        check_checksum(state, identity, progress)
        self._resume_at(consumed)

    def _resume_at(self, consumed: int) -> None:
        """Let the next iterator begin at a sample, as if nothing had been iterated before."""
        in_worker = get_worker_info() is not None
        self._consumed, self._worker_base, self._iterator = consumed, None, None
        self._has_ended, self._is_loaded = False, in_worker  # a worker that loads a state may start
        if not in_worker:
            self._started = _shared_bytes(_MAX_WORKERS)


def _shared_bytes(count: int) -> torch.Tensor:
    shared: torch.Tensor = torch.zeros(count, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    return shared
