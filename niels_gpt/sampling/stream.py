"""Stream: where numbered samples are cut into batches; which rank and DataLoader worker reads which; the state.

    Samples     what each number means: Epochs (epochs.py) or Mixture (mixture.py)
    Located     samples that were looked up together, thousands at once, and are read batch by batch
    Stream      global batches of samples, ranks, workers, the position and its state

A stream is an endless or finite list of samples 0, 1, 2, ..., each computed only from its number. A global batch is
the next `global_batch_size` samples; each rank gets an equal, consecutive part of it; DataLoader worker w of W gets
the batches w, w + W, w + 2W, ... So the number of samples that all ranks together have consumed is the whole state, and
a run may resume with other ranks, workers and batch sizes.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from threading import get_ident, local
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from niels_gpt.display.tables import html_table
from niels_gpt.sampling.state import (
    AS_IT_WAS,
    MAX_SAMPLES,
    Origin,
    check_checksum,
    check_identity,
    continued,
    copied,
    copier,
    identity_crc,
    is_unchanged,
    origin_of,
    sealed,
    state_count,
    state_numbers,
)
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.errors import NoLength, StateError, StreamUseError
from niels_gpt.storage.meta_json import checked_int, shortened

_MAX_WORKERS = 1024
_PREPARED = 256  # batches: the first one costs far more than a further one

B = TypeVar("B")
Numbers = NDArray[np.int64]


class Located(Protocol):
    """Samples that were located together, in the order in which their numbers were given."""

    def read(self, first: int, count: int, device: str) -> Any:
        """Return samples first to first + count - 1 of these, whose `batch(state)` is what a stream yields.

        Rows after them may be read ahead. Raises: CacheError for an id outside the vocabulary, also of such a row.
        """


class Samples(ABC):
    """Numbered samples: what each number means. May be pickled."""

    num_samples: int | None
    """Number of the last one + 1; None: without end."""
    origin: Origin
    """Where they begin in a run that changed; else sample 0."""

    @abstractmethod
    def begin(self, origin: Origin) -> None:
        """Begin at a sample of a run. Raises: ValueError if no sample is left of its sources there."""

    @abstractmethod
    def limits(self) -> list[int | None]:
        """Return the total number of samples of each source; None: without end."""

    @property
    @abstractmethod
    def sources(self) -> list[Any]:
        """What the samples are drawn from, each an `Epochs`. One cache is a single source."""

    def names(self) -> list[str]:
        """Return the name of each source, for messages."""
        return [source.units.name for source in self.sources]

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what decides which sample a number means, fit for JSON."""

    @abstractmethod
    def progress(self, consumed: int) -> dict[str, Any]:
        """Return the part of a state that changes: integers, and lists of integers that are the caller's."""

    @abstractmethod
    def locate(self, numbers: Numbers) -> Located:
        """Look up samples by their numbers: int64 [n], in any order.

        Ask for thousands at once: one sample takes as long as hundreds.
        """

    def prepare(self, consumed: Numbers) -> None:  # noqa: B027 - where `progress` costs little there is nothing to do
        """Prepare `progress` for these numbers, the next that it is asked for."""


class _Reader(local):
    """What a stream tells of itself to the thread that iterates it, if that thread reads ahead."""

    lend: Callable[[Stream[Any]], None] | None = None


READER = _Reader()


class Stream(IterableDataset[B], Generic[B]):
    """Batches of numbered samples. Iterating continues from the current position; it does not start over."""

    samples: Samples
    T: int
    """Tokens of a row, in streams of tokens."""
    _BLOCK = 16384  # samples located at once: a few take as long as hundreds, because cycles are walked together

    def __init__(
        self,
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        epochs: int | None = None,
        device: str = "cpu",
        drop_last: bool = False,
    ) -> None:
        """Check the numbers. A subclass then opens its cache, and calls `_serve`. Raises: ValueError."""
        self.global_batch_size = checked_int("global_batch_size", global_batch_size, 1)
        rank, world_size = checked_int("rank", rank, 0), checked_int("world_size", world_size, 1)
        if rank >= world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: expected 0 <= rank < world_size")
        if self.global_batch_size % world_size:
            raise ValueError(
                f"global_batch_size={global_batch_size}: expected a multiple of world_size={world_size}, so that each "
                "rank has equally many rows"
            )
        if not isinstance(drop_last, bool):
            raise ValueError(f"drop_last={drop_last!r}: expected True or False")
        torch.device(device)  # raises for an unknown one
        self.rank, self.world_size, self.device, self.drop_last = rank, world_size, device, drop_last
        self.seed = checked_int("seed", seed, -(2**63))
        self.epochs = None if epochs is None else checked_int("epochs", epochs, 1)
        """How many until the stream ends; None: never."""
        self._consumed = 0
        self._has_ended = self._is_loaded = False
        self._worker_base: int | None = None
        self._iterator: object = None
        self._ahead: int | None = None  # the thread that reads ahead
        self._started = _shared_bytes(_MAX_WORKERS)
        """Shared memory, one byte per DataLoader worker, which has a copy of self and sets its byte when it starts.

        A loaded state gets new bytes: a worker of an earlier DataLoader that starts late sets one that nobody reads.
        """

    def _serve(self, samples: Samples) -> None:
        """Take the samples. Raises ValueError if drop_last leaves no batch; warns (W101) of ranks with unequal rows."""
        self.samples = samples
        self._check_left()
        self._warn_of_last_batch(stacklevel=4)

    def __setstate__(self, state: dict[str, Any]) -> None:
        lacks_origin = "samples" in state and not hasattr(state["samples"], "origin")
        if lacks_origin or "_ahead" not in state or "epochs" not in state:
            raise ValueError("a stream pickled by an earlier release: open it again and load its state")
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

    def __len__(self) -> int:
        """Return the number of batches of this size from sample 0 to the end, the same on every rank.

        Raises: TypeError for a stream without end.
        """
        if self.num_samples is None:
            raise NoLength(f"this {type(self).__name__} has no end and no length. Count steps instead")
        return (self.num_samples + (0 if self.drop_last else self.global_batch_size - 1)) // self.global_batch_size

    @property
    def num_samples(self) -> int | None:
        """Samples until the stream ends; None: without end."""
        return self.samples.num_samples

    @property
    def consumed_samples(self) -> int:
        """Return the position: samples that all ranks together have consumed, also in a stream that is read ahead."""
        return self._consumed

    def identity(self) -> dict[str, Any]:
        """Return what decides which sample a number means, fit for JSON: arguments, and the content of the cache."""
        identity, origin = self.samples.identity(), self.samples.origin
        if origin.sample:
            identity["origin"] = {"sample": origin.sample, "positions": list(origin.positions)}
        return identity

    def _progress(self, consumed: int) -> dict[str, Any]:
        return self.samples.progress(consumed)

    def _sources(self) -> dict[str, object]:
        """Return what the samples are drawn from, for a table: names and values."""
        return {}

    def _rows(self) -> str:
        """Describe the tensors of a batch."""
        return f"x, y: int64 [{self.global_batch_size // self.world_size}, {self.T}] on {self.device}"

    def _described(self) -> str:
        return f"{self._rows()}, rank {self.rank} of {self.world_size}, consumed_samples={self._consumed}"

    def _repr_html_(self) -> str:
        end = "without end" if self.num_samples is None else f"of {self.num_samples:,}"
        described = {
            **self._sources(),
            "batch": f"{self._rows()}, rank {self.rank} of {self.world_size}",
            "samples": f"{self._consumed:,} consumed, {end}",
        }
        return html_table(type(self).__name__, described.items())

    # --- batches ------------------------------------------------------------------------------------------------------

    def _check_left(self, first: int = 0) -> None:
        """Raise ValueError if drop_last leaves no batch of the samples from `first` on."""
        if self.drop_last and self.num_samples is not None and self.num_samples - first < self.global_batch_size:
            raise ValueError(
                f"drop_last=True, global_batch_size={self.global_batch_size}: no batch is left of "
                f"{self.num_samples - first} samples, expected a smaller batch or more epochs"
            )

    def _warn_of_last_batch(self, stacklevel: int = 3) -> None:
        """Warn (W101) if ranks get unequal numbers of rows of the last batch, counted from the position.

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

    def _work(self, base: int, worker: int, workers: int) -> Iterator[tuple[Any, int, int]]:
        """Yield for each batch of a worker its rows, the samples consumed after it, and the next base.

        The rows of this rank: located samples, the first of them, and how many. base: the first sample of worker 0. The
        next one: the base of the round after this batch, in which each worker has a batch.
        """
        size, rank, world = self.global_batch_size, self.rank, self.world_size
        least, stride = size if self.drop_last else 1, workers * size
        at_once = max(1, self._BLOCK * world // size)
        begin = prepared = base + worker * size
        next_base = base
        while True:
            begins = begin + stride * np.arange(at_once)
            last = begins + size if self.num_samples is None else np.minimum(begins + size, self.num_samples)
            sizes = np.maximum(last - begins, 0)
            first, end_of_rank = begins + rank * sizes // world, begins + (rank + 1) * sizes // world
            counts = end_of_rank - first
            ends = np.cumsum(counts)
            if begin >= prepared:
                prepared = begin + stride * max(at_once, _PREPARED)
                firsts = np.arange(begin, prepared, stride)
                after = firsts + size if self.num_samples is None else np.minimum(firsts + size, self.num_samples)
                self.samples.prepare(np.union1d(after, firsts + (workers - worker) * size))
            located = self.samples.locate(np.repeat(end_of_rank - ends, counts) + np.arange(ends[-1]))
            for end, count, consumed, rows in zip(*(a.tolist() for a in (ends, counts, last, sizes)), strict=True):
                if rows < least:
                    return
                next_base += stride
                yield (located, end - count, count), consumed, next_base
            begin += stride * at_once

    def _batch(self, work: Any, state: dict[str, Any]) -> B:
        """Return this rank's part of a batch."""
        located, first, count = work
        made: B = located.read(first, count, self.device).batch(state)
        return made

    def __iter__(self) -> Iterator[B]:
        """Yield this rank's rows of each global batch; in a DataLoader worker only every num_workers-th batch.

        Raises: RuntimeError if another iterator was started or a state loaded since, if the stream has ended, or if
            workers had batches of it, so that its position is not known.
        """
        info, identity, base = get_worker_info(), self.identity(), self._consumed
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._check_may_start(None if info is None else info.id)
        this, crc, copy = object(), identity_crc(identity), copier(identity)
        self._iterator, self._is_loaded = this, False
        for work, consumed, next_base in self._work(base, worker, workers):
            if self._iterator is not this:
                raise StreamUseError(
                    "another iterator of this stream was started, or a state was loaded: iterate again"
                )
            if info is None and READER.lend is not None:
                READER.lend(self)
            made = [self._batch(work, sealed(copy(), crc, self._progress(consumed)))]
            if info is None:
                self._consumed = consumed
            else:
                self._worker_base = next_base if self.num_samples is None else min(next_base, self.num_samples)
            yield made.pop()  # no reference stays here: the caller decides how many batches there are
        self._has_ended = info is None and self._iterator is this

    def part(self, worker: int = 0, workers: int = 1) -> Iterator[B]:
        """Yield batches worker, worker + workers, ... of this rank, counted from the position, which stays.

        For a trainer with worker processes of its own, each with a copy of the stream. In turns they give what
        iterating the stream gives. `batch.state` is right where all workers are taken in turns. Raises: ValueError for
        another worker; RuntimeError if `prefetch` reads ahead in the stream.
        """
        if not 0 <= worker < workers:
            raise ValueError(f"worker={worker}, workers={workers}: expected 0 <= worker < workers")
        self.check_not_ahead()
        identity = self.identity()
        crc, copy = identity_crc(identity), copier(identity)
        for work, consumed, _ in self._work(self._consumed, worker, workers):
            yield self._batch(work, sealed(copy(), crc, self._progress(consumed)))

    def _check_may_start(self, worker: int | None) -> None:
        """Raise RuntimeError if a new iterator would repeat batches, or yield none. worker: its number, in a worker."""
        self.check_not_ahead()
        if self._has_ended:
            raise StreamUseError(
                f"this stream has ended: all of its {self.num_samples} samples were served. For several epochs in one "
                "pass open it with epochs=3 (a mixture: when_exhausted=3); to start over open a new stream, or load a "
                "state of its start"
            )
        if worker is not None and torch.device(self.device).type != "cpu":
            raise StreamUseError(
                f"device={self.device!r} in a DataLoader worker: open the stream with device='cpu' and move the "
                "batches (pin_memory=True, then batch.to), or take num_workers=0"
            )
        started = self._started.any() if worker is None else self._started[worker] and not self._is_loaded
        if self._worker_base is not None or started:
            raise StreamUseError(
                "DataLoader workers had batches of this stream; it does not know their position, and would give the "
                "same batches again. Load batch.state of the last batch that was used into the stream, and make a new "
                "DataLoader"
            )
        if worker is not None:
            self._started[worker] = 1

    # --- the position -------------------------------------------------------------------------------------------------

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
        """Raise RuntimeError if another thread reads ahead: the stream's position is then not the consumer's."""
        if self._ahead not in (None, get_ident()) and get_worker_info() is None:
            raise StreamUseError(
                "prefetch reads ahead in this stream: its position is ahead of the batch in use. Save batch.state, "
                "and close the prefetch before the stream is used or copied otherwise"
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
            return sealed(copied(identity), identity_crc(identity), self._progress(self._worker_base), worker)
        return sealed(copied(identity), identity_crc(identity), self._progress(self._consumed))

    def state_at(self, consumed: int) -> dict[str, Any]:
        """Return the state after `consumed` samples of all ranks: `batch.state` of a batch that ends there.

        For a reader by number, who counts samples itself; the stream's own position stays. Raises: StateError (a
        ValueError) for a number after the stream's end, or before the change of a run.
        """
        identity, end = self.identity(), MAX_SAMPLES if self.num_samples is None else self.num_samples
        first = identity.get("origin", {"sample": 0})["sample"]
        if not first <= checked_int("consumed", consumed, 0) <= end:
            raise StateError(f"consumed={consumed}: expected {first} to {end}, the samples of this stream")
        return sealed(copied(identity), identity_crc(identity), self._progress(consumed))

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_other_content: bool = False, changed: bool = False
    ) -> None:
        """Resume exactly where a state was taken, with any rank, world_size, global_batch_size and number of workers.

        Warns (W101) of ranks with unequal rows of the last batch.
        allow_other_content: resume in a cache of other content at the same number of samples, which then means other
            text; a cache of another tokenizer is always refused.
        changed: continue the run of a stream with another T, seed or content, or of a mixture with other weights,
            sources, block_size or when_exhausted; also of a stream as a mixture, or the reverse. The sources of the
            state that are here too, with equal content, T, seed and other arguments, continue from their positions:
            each sample once an epoch across the change. Others begin at 0: a new source, and one of the same content
            with other arguments, which begins a new epoch. Warns of all that differs (W103). consumed_samples continues
            to count, and numbers of epochs count from the source's very beginning. Later states load plainly into a
            stream with these arguments. A state of a stream with the same arguments is loaded plainly.
        Raises: CacheError E108 for other content or another tokenizer; ValueError for a state of a stream with other
            arguments (seed, T, ...), for a wrong checksum (a state without one, from an earlier release, is accepted),
            for anything that is not a state, and for the state of a StatefulDataLoader worker except in the same worker
            of equally many; with changed also for a state without positions, of an earlier release, and if no source is
            left or one with "stop" has had its epoch; RuntimeError if `prefetch` reads ahead in the stream.
        """
        self.check_not_ahead()
        samples, before, report = self.samples, self.samples.origin, ""
        if changed and allow_other_content:
            raise ValueError("changed=True with allow_other_content=True: a source of other content is a new source")
        identity = samples.identity()
        is_change = changed and not is_unchanged(state, identity)
        if is_change:
            origin, report = continued(state, identity, samples.names(), samples.limits())
        else:
            remedy = f"To continue its run with these arguments, load it with changed=True. {AS_IT_WAS}"
            check_identity(state, identity, "state", allow_other_content, remedy)
            origin = origin_of(state, len(before.positions))
        try:
            if origin != before:
                samples.begin(origin)
            if is_change:
                self._check_left(origin.sample)
                self._resume_at(origin.sample)
            else:
                self._load(state, allow_other_content)
        except ValueError:
            if samples.origin != before:
                samples.begin(before)
            raise
        if report:
            what = "mixture" if "sources" in identity else "stream"
            text = f"the {what} changes at sample {origin.sample:,}: {report}"
            warnings.warn(CodedWarning("W103", text), stacklevel=2)
        if origin != before or self._consumed % self.global_batch_size:  # else opening has warned of the same batch
            self._warn_of_last_batch()

    def _load(self, state: Mapping[str, Any], allow_other_content: bool) -> None:
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


SampleStream = Stream
"""The earlier name of `Stream`."""
