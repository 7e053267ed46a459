"""Work on batches in parallel, taken back in order: behind any `concurrent.futures.Executor`, and in bounded memory."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

AHEAD_CHARS = 8 << 20
"""Characters of text that are given out at once, at most, where a batch alone has no more."""
_AHEAD_OF_A_WORKER = 2  # batches: one that it works on, one that waits for it


class Batch(Protocol):
    """What is given out at once."""

    @property
    def payload(self) -> Any:
        """What a worker needs of it; pickled, where the worker is another process."""

    @property
    def num_chars(self) -> int:
        """Characters of text, which stand for the memory that it takes."""

    def __str__(self) -> str:
        """Name the batch: "documents 10 to 20"."""


B = TypeVar("B", bound=Batch)
R = TypeVar("R")


class InOrder(Generic[B, R]):
    """Yields (batch, work(batch.payload)) in the order of the batches, whatever the number and kind of the workers.

    Where a worker dies, its pool is lost with all that it had in work: this is said, the pool is replaced, and each of
    those batches is tried once more, alone. A second death is therefore the fault of the batch that is named.
    """

    def __init__(self, work: Callable[[Any], R], executor: Executor | None) -> None:
        """executor: None works in the caller's thread. It is left open; what replaces a broken one is closed."""
        self._work = work
        self._executor = executor
        self._replaced = False
        num_workers = getattr(executor, "_max_workers", None) or os.cpu_count() or 1
        self._max_ahead = _AHEAD_OF_A_WORKER * int(num_workers)

    def __call__(self, batches: Iterable[B]) -> Generator[tuple[B, R]]:
        """Take batches, as many as memory allows ahead of the consumer, and yield each with its result."""
        if self._executor is None:
            yield from ((batch, self._work(batch.payload)) for batch in batches)
            return
        stream = iter(batches)
        given: deque[tuple[B, Future[R]]] = deque()
        held: list[B] = []  # taken from the stream, and not given out yet
        try:
            while True:
                self._give(stream, held, given)
                if not given:
                    return
                batch, future = given[0]
                try:
                    result = future.result()
                except BrokenExecutor as error:
                    yield from self._again(given, error)
                    continue
                given.popleft()
                yield batch, result
        finally:
            for _, future in given:
                future.cancel()
            if self._replaced:
                self._executor.shutdown(wait=True, cancel_futures=True)

    def _give(self, stream: Iterator[B], held: list[B], given: deque[tuple[B, Future[R]]]) -> None:
        while len(given) < self._max_ahead:
            if not held:
                held.extend(batch for batch in [next(stream, None)] if batch is not None)
            ahead = sum(batch.num_chars for batch, _ in given)
            if not held or (given and ahead + held[0].num_chars > AHEAD_CHARS):
                return
            batch = held.pop()
            given.append((batch, self._submitted(batch)))

    def _submitted(self, batch: B) -> Future[R]:
        assert self._executor is not None
        try:
            return self._executor.submit(self._work, batch.payload)
        except BrokenExecutor as error:  # it broke since: to be found when the result is asked for
            failed: Future[R] = Future()
            failed.set_exception(error)
            return failed

    def _again(self, given: deque[tuple[B, Future[R]]], error: BrokenExecutor) -> Iterator[tuple[B, R]]:
        logger.warning(
            "a worker died while %d batches were in work, from %s on (%s); each of them is tried once more, alone",
            len(given),
            given[0][0],
            str(error) or type(error).__name__,
        )
        self._replace()
        while given:
            batch, before = given[0]
            done = before.done() and not before.cancelled() and before.exception() is None
            try:
                result = before.result() if done else self._submitted(batch).result()
            except BrokenExecutor as second:
                raise RuntimeError(
                    f"a worker died twice on {batch} ({str(second) or type(second).__name__}). Look for a text there "
                    "that takes more memory than there is, or encode in this process: no executor"
                ) from error
            given.popleft()
            yield batch, result

    def _replace(self) -> None:
        """Put a new pool in place of a broken one; another kind of executor may mend itself."""
        broken = self._executor
        if isinstance(broken, ProcessPoolExecutor):
            if self._replaced:
                broken.shutdown(wait=False)
            self._executor = ProcessPoolExecutor(
                getattr(broken, "_max_workers", None),
                mp_context=getattr(broken, "_mp_context", None),
                initializer=getattr(broken, "_initializer", None),
                initargs=getattr(broken, "_initargs", ()),
                max_tasks_per_child=getattr(broken, "_max_tasks_per_child", None),
            )
            self._replaced = True
