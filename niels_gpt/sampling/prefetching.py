"""prefetch: batches made ahead in a thread, while the step before them runs.

    thread      makes batch k + 1, ..., k + n, one after the other, and copies them to the GPU on a stream of its own
    consumer    uses batch k and its batch.state

The stream itself stands where the thread is. So while it is read ahead, the stream refuses state_dict,
load_state_dict and other iterators; closing sets it back to the batch that was handed out last.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from queue import SimpleQueue
from threading import Semaphore, Thread, get_ident
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader, get_worker_info

from niels_gpt.sampling.stream import READER, Stream
from niels_gpt.storage.meta_json import checked_int

B = TypeVar("B")


def prefetch(stream: Iterable[B], n: int = 2, device: str | torch.device | None = None) -> Prefetched[B]:
    """Return an iterator over the batches of a stream or a DataLoader. A thread makes n of them ahead.

    n: at most n + 1 batches exist at a time, with the one in use. device: where to copy batches that have `to`, and
    tuples and lists of tensors; None: nowhere. For a CUDA device they are pinned, and copied on a CUDA stream of their
    own, for which the consumer's current stream waits.

    `batch.state` belongs to the batch in use: save it. The state of a StatefulDataLoader is ahead. Until the iterator
    ends or is closed (`close()`, `with`, or when nothing refers to it any more), the stream refuses state_dict,
    load_state_dict and other iterators, also other prefetches; then it continues after the last batch that was handed
    out. The same holds, from their first batch on, for streams behind another iterator, such as `islice(stream, 20)`.
    Closing waits for the batch that is being made. An error of the stream is raised in place of the batch, with its
    traceback. In a notebook use `with`: the traceback of an interrupted cell keeps a loop's iterator.
    Raises: ValueError for n below 1, and for a prefetch; RuntimeError for a stream that is read ahead already.
    """
    if isinstance(stream, Prefetched):
        raise ValueError("stream is a prefetch already: pass the stream itself, and a larger n")
    n, place = checked_int("n", n, 1), _Place(device)
    source = stream.dataset if isinstance(stream, DataLoader) and not stream.num_workers else stream
    return Prefetched(stream, source if isinstance(source, Stream) else None, n, place)


class Prefetched(Iterator[B], Generic[B]):
    """Batches that a thread makes ahead; see `prefetch`."""

    def __init__(self, batches: Iterable[B], lent: Stream[Any] | None, n: int, place: _Place) -> None:
        if lent is not None:
            lent.check_not_ahead()
        self._place, self._ahead = place, _Ahead(lent)
        self._thread = thread = Thread(
            target=_make, args=(self._ahead, batches, place), name="niels_gpt.prefetch", daemon=True
        )
        thread.start()  # it waits for room
        if lent is not None:
            lent.lend_to(cast(int, thread.ident))
        self._close = weakref.finalize(self, _end, self._ahead, thread)  # also at the end of the process
        self._ahead.room.release(n)

    def __next__(self) -> B:
        if READER.lend is not None and get_worker_info() is None:
            raise ValueError("a prefetch within a prefetch: pass the stream itself, and a larger n")
        if self._ahead.is_closed:
            raise StopIteration
        try:
            return self._next()
        except BaseException:  # also of Ctrl-C, whose traceback may keep the iterator
            self.close()
            raise

    def _next(self) -> B:
        error, batch, copied, positions = self._ahead.made.get()
        if error is not None:
            self._ahead.is_through = True
            if isinstance(error, StopIteration):
                raise StopIteration
            raise error
        self._place.wait_for(batch, copied)
        self._ahead.room.release()
        self._ahead.lent.update(positions)
        return cast(B, batch)

    def close(self) -> None:
        """End the thread, drop the batches that it made ahead, and set the stream back to the last one handed out."""
        _end(self._ahead, self._thread)
        self._close.detach()  # not before: after Ctrl-C in the line above it may be closed again

    def __enter__(self) -> Prefetched[B]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Ahead:
    """What the thread and the consumer share."""

    def __init__(self, lent: Stream[Any] | None) -> None:
        self.lent: dict[Stream[Any], int | None] = {} if lent is None else {lent: None}
        """Each stream that the thread reads, and its position after the batch handed out last; None: not started."""
        self.room = Semaphore(0)  # for batches that may be made
        self.made: SimpleQueue[tuple[BaseException | None, Any, Any, Mapping[Any, int]]] = SimpleQueue()
        self.is_closed = self.is_through = self.is_made = False

    def lend(self, stream: Stream[Any]) -> None:
        """Lend a stream that is iterated in the thread, if that is new."""
        if self.lent.get(stream) is None:
            stream.lend_to(get_ident())
            self.lent[stream] = stream.consumed_samples

    def take_back(self) -> None:
        """Set the streams back. Nothing is left to do after the first time."""
        for stream, consumed in list(self.lent.items()):
            stream.take_back(None if self.is_through else consumed)
            self.lent.pop(stream, None)


def _make(ahead: _Ahead, batches: Iterable[Any], place: _Place) -> None:
    """Make batches while there is room, in the thread. It keeps none of them."""
    READER.lend = ahead.lend
    try:
        with place.thread():
            iterator = iter(batches)
            while True:
                ahead.room.acquire()
                if ahead.is_closed:
                    break
                batch = next(iterator)
                ahead.made.put((None, *place.copied(batch), {each: each.consumed_samples for each in ahead.lent}))
                del batch
            if hasattr(iterator, "close"):
                iterator.close()
    except BaseException as error:
        ahead.made.put((error, None, None, {}))
    finally:
        READER.lend = None
        ahead.is_made = True
        if ahead.is_closed:  # which may not have waited: on Ctrl-C, or in the garbage collector of this thread
            ahead.take_back()


def _end(ahead: _Ahead, thread: Thread) -> None:
    """End the thread, and set the stream back. It holds no reference to the iterator, which may be gone."""
    ahead.is_closed = True
    ahead.room.release()
    if thread.ident != get_ident():
        thread.join()
    elif not ahead.is_made:  # the garbage collector runs in the thread, which ends by itself
        return
    while not ahead.made.empty():
        ahead.made.get()
    ahead.take_back()


class _Place:
    """Where batches are copied to."""

    def __init__(self, device: str | torch.device | None) -> None:
        self.device = None if device is None else torch.device(device)
        is_cuda = self.device is not None and self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if is_cuda else None  # type: ignore[no-untyped-call]

    def thread(self) -> AbstractContextManager[Any]:
        """Return the context of the thread: all its work on the GPU, reading included, is on its own CUDA stream."""
        if self.stream is None:
            return nullcontext()
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self.stream.device))
            stack.enter_context(torch.cuda.stream(self.stream))
            return stack.pop_all()

    def copied(self, batch: Any) -> tuple[Any, torch.cuda.Event | None]:
        """Return a batch on the device, and the event after which it is there."""
        if self.stream is None:
            return (batch if self.device is None else _moved(batch, self.device)), None
        batch = _moved(batch, self.device, pin=not any(each.is_cuda for each in _tensors(batch)))
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return batch, event

    def wait_for(self, batch: Any, copied: torch.cuda.Event | None) -> None:
        """Let the current CUDA stream wait for a batch, and its memory for the work of that stream."""
        if copied is None:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        for tensor in _tensors(batch):
            if tensor.is_cuda:
                tensor.record_stream(current)


def _moved(value: Any, device: torch.device | None, pin: bool = False) -> Any:
    """Return a batch on a device: by its `to`, and tuples and lists element by element. Raises: ValueError."""
    if isinstance(value, tuple | list):
        moved = [_moved(each, device, pin) for each in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if not hasattr(value, "to"):
        found = f"the stream yields a {type(value).__name__}"
        raise ValueError(f"prefetch(device=...): {found}, expected batches with `to`, or tuples of tensors")
    if pin and hasattr(value, "pin_memory"):
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, also those in its parts."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, tuple | list | Mapping):
        parts = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    for part in parts:
        yield from _tensors(part)
