"""prefetch: batches made ahead in a thread, while the step before them runs.

    thread      makes batch k + 1, ..., k + n, one after the other, and copies them to the GPU on a stream of its own
    consumer    uses batch k, and batch.state, which is that of batch k

The stream's own position is that of the thread. So while it is read ahead, the stream refuses state_dict,
load_state_dict and other iterators; closing sets it back to the batch that was handed out last.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from queue import SimpleQueue
from threading import Semaphore, Thread, current_thread
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from niels_gpt.sampling.position import ResumableStream
from niels_gpt.storage.meta_json import checked_int

B = TypeVar("B")


def prefetch(stream: Iterable[B], n: int = 2, device: str | torch.device | None = None) -> Prefetched[B]:
    """Return an iterator over the batches of a stream, or of a DataLoader, which makes n of them ahead in a thread.

    n: at most n + 1 batches exist at a time, with the one in use. device: where to copy them; None: they stay where
    they are. To a CUDA device they are pinned, and copied on a CUDA stream of their own, for which the consumer's
    current stream waits.
    `batch.state` is that of the batch in use: save it. Until the iterator ends or is closed (`close()`, `with`, or
    when nothing refers to it any more), the stream refuses state_dict, load_state_dict and other iterators, also other
    prefetches; then it continues after the last batch that was handed out. Closing waits for the batch that is being
    made. An error of the stream is raised in place of the batch, with its traceback.
    Raises: ValueError for n below 1; RuntimeError for a stream that is read ahead already.
    """
    n, place = checked_int("n", n, 1), _Place(device)
    source = stream.dataset if isinstance(stream, DataLoader) and not stream.num_workers else stream
    return Prefetched(stream, source if isinstance(source, ResumableStream) else None, n, place)


class Prefetched(Iterator[B], Generic[B]):
    """Batches that a thread makes ahead; see `prefetch`."""

    def __init__(self, batches: Iterable[B], lent: ResumableStream[Any] | None, n: int, place: _Place) -> None:
        if lent is not None:
            lent.check_not_ahead()
        self._place, self._ahead = place, _Ahead(lent)
        thread = Thread(target=_make, args=(self._ahead, batches, place), name="niels_gpt.prefetch", daemon=True)
        thread.start()  # it waits for room
        if lent is not None:
            lent.lend_to(cast(int, thread.ident))
        self._close = weakref.finalize(self, _end, self._ahead, thread)  # also at the end of the process
        self._ahead.room.release(n)

    def __next__(self) -> B:
        if not self._close.alive:
            raise StopIteration
        error, batch, copied = self._ahead.made.get()
        if error is not None:
            self._ahead.is_through = True
            self.close()
            if isinstance(error, StopIteration):
                raise StopIteration
            raise error
        self._place.wait_for(batch, copied)
        if self._ahead.lent is not None:
            self._ahead.consumed = batch.state["consumed_samples"]
        self._ahead.room.release()
        return cast(B, batch)

    def close(self) -> None:
        """End the thread, drop the batches that it made ahead, and set the stream back to the last one handed out."""
        self._close()

    def __enter__(self) -> Prefetched[B]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Ahead:
    """What the thread and the consumer share."""

    def __init__(self, lent: ResumableStream[Any] | None) -> None:
        self.lent = lent
        self.room = Semaphore(0)  # for batches that may be made
        self.made: SimpleQueue[tuple[BaseException | None, Any, Any]] = SimpleQueue()
        self.consumed = None if lent is None else lent.consumed_samples
        self.has_begun = self.is_closed = self.is_through = False


def _make(ahead: _Ahead, batches: Iterable[Any], place: _Place) -> None:
    """Make batches while there is room, in the thread. It keeps none of them."""
    try:
        with place.thread():
            iterator = iter(batches)
            while True:
                ahead.room.acquire()
                if ahead.is_closed:
                    break
                batch = next(iterator)
                ahead.has_begun = True
                ahead.made.put((None, *place.copied(batch)))
                del batch
            if hasattr(iterator, "close"):
                iterator.close()
    except BaseException as error:
        ahead.made.put((error, None, None))


def _end(ahead: _Ahead, thread: Thread) -> None:
    """End the thread, and set the stream back. It holds no reference to the iterator, which may be gone."""
    ahead.is_closed = True
    ahead.room.release()
    if thread is not current_thread():  # the garbage collector may run there
        thread.join()
    while not ahead.made.empty():
        ahead.made.get()
    if ahead.lent is not None:
        ahead.lent.take_back(ahead.consumed if ahead.has_begun and not ahead.is_through else None)


class _Place:
    """Where batches are copied to. The part for CUDA was not run by the tests of machines without a GPU."""

    def __init__(self, device: str | torch.device | None) -> None:
        self.device = None if device is None else torch.device(device)
        is_cuda = self.device is not None and self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if is_cuda else None  # type: ignore[no-untyped-call]

    def thread(self) -> AbstractContextManager[Any]:
        """Return the context of the thread: its work on the GPU, also that of reading, is on the own stream."""
        if self.stream is None:
            return nullcontext()
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self.stream.device))
            stack.enter_context(torch.cuda.stream(self.stream))
            return stack.pop_all()

    def copied(self, batch: Any) -> tuple[Any, torch.cuda.Event | None]:
        """Return a batch on the device, and the event after which it is there."""
        if self.stream is None:
            return (batch if self.device is None else batch.to(self.device)), None
        if batch.x.device.type == "cpu":
            batch = batch.pin_memory().to(self.device, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return batch, event

    def wait_for(self, batch: Any, copied: torch.cuda.Event | None) -> None:
        """Let the current CUDA stream wait for a batch, and its memory for the work of that stream."""
        if copied is None:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        for tensor in vars(batch).values():
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(current)
