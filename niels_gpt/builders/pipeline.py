"""From a source to encoded batches, in order: compared with an earlier run, then encoded in parallel.

Decides how many batches are encoded ahead, in bounded memory, and what happens when a worker dies.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Generic, TypeVar

from niels_gpt.builders import source
from niels_gpt.builders.build import Build
from niels_gpt.builders.resume import check_ended, compare_consumed
from niels_gpt.builders.source import Batch, Chunk, Encoder, ItemKind
from niels_gpt.encoding import TextError
from niels_gpt.storage.errors import WorkerDied
from niels_gpt.tokenizers.engine import EngineDifference

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

AHEAD_CHARS = 8 << 20
"""At most this many characters of text are encoded ahead, unless a single batch has more."""
_AHEAD_PER_WORKER = 2  # batches: one in work, one waiting


@contextmanager
def encoded(
    build: Build,
    items: Iterable[T | Chunk[T]],
    counters: Mapping[str, int],
    encoder: Encoder[R],
    kind: ItemKind[T],
    *,
    exhausted: bool,
    num_threads: int,
    executor: Executor | None,
    report: Callable[[int], None],
    shuffled: Callable[[Iterator[Chunk[T]], Mapping[str, int]], Iterator[Chunk[T]]] = lambda chunks, _: chunks,
    settled: Callable[[Iterator[Chunk[T]]], Iterator[Chunk[T]]] = iter,
) -> Iterator[Iterator[tuple[Batch[T], R]]]:
    """Yield the batches after the last checkpoint of a build, in order; none if the build has ended.

    counters: the loader's, updated as the items are read.
    exhausted: True if the finished build stopped because the source ran out; then more documents are an error.
    num_threads: threads that encode; 0: the caller's own. executor: encodes instead; it is left open.
    report: called with the number of documents that were read again.
    shuffled: passes the items on in another order. settled: passes them on; it may read ahead before it yields the
        first one.
    """
    read = source.chunked(items, counters, build.position, lambda item: sum(map(len, kind.texts(item))))
    documents = settled(shuffled(build.checked_for_forks(read), counters))
    documents = compare_consumed(build, documents, kind, encoder, report)
    if build.last.ended:
        if exhausted and build.compares:
            check_ended(build, documents, kind)
        yield iter(())
        return
    with ExitStack() as stack:
        if executor is None and num_threads:
            executor = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")
            stack.callback(executor.shutdown, cancel_futures=True)
        encode: Callable[[list[bytes | str], int], R] = encoder.encode
        if executor is not None and not isinstance(executor, ThreadPoolExecutor):
            encode = partial(_encode_elsewhere, pickle.dumps(encoder))
        batches = source.batches(
            documents, texts=lambda items: list(map(kind.texts, items)), first=build.last.documents
        )
        yield stack.enter_context(closing(InOrder[T, R](encode, executor, kind)(batches)))


def _encode_elsewhere(encoder: bytes, texts: list[bytes | str], first: int) -> Any:
    try:
        return _unpickled(encoder).encode(texts, first)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an error that cannot be pickled would kill the worker
            raise WorkerDied(f"{type(error).__name__}: {error}") from None
        raise


@lru_cache(maxsize=4)
def _unpickled(encoder: bytes) -> Encoder[Any]:
    """Open a tokenizer once in each process. An error here reaches the caller; one while unpickling kills a worker."""
    opened: Encoder[Any] = pickle.loads(encoder)
    return opened


class InOrder(Generic[T, R]):
    """Yields (batch, work(batch.payload, batch.first)) in the order of the batches, with any executor.

    If a worker of a process pool dies, the pool breaks and loses its batches. This is logged, the pool is replaced, and
    each of those batches is tried once more, alone. So a second death is caused by the batch that the error names.
    """

    def __init__(
        self,
        work: Callable[[list[bytes | str], int], R],
        executor: Executor | None,
        kind: ItemKind[T] | None = None,
    ) -> None:
        """executor: None works in the caller's thread. It is left open; its replacement is closed.

        kind: names the document of an EngineDifference and of a TextError.
        """
        self._kind = kind
        self._work = work
        self._executor = executor
        self._replaced = False
        num_workers = getattr(executor, "_max_workers", None) or os.cpu_count() or 1
        self._max_ahead = _AHEAD_PER_WORKER * int(num_workers)

    def __call__(self, batches: Iterable[Batch[T]]) -> Generator[tuple[Batch[T], R]]:
        """Submit as many batches ahead as memory allows, and yield each with its result."""
        if self._executor is None:
            for batch in batches:
                with self._naming(batch):
                    result = self._work(batch.payload, batch.first)
                yield batch, result
            return
        stream = iter(batches)
        submitted: deque[tuple[Batch[T], Future[R]]] = deque()
        waiting: list[Batch[T]] = []  # read from the stream, not submitted yet
        try:
            while True:
                self._fill(stream, waiting, submitted)
                if not submitted:
                    return
                batch, future = submitted[0]
                try:
                    with self._naming(batch):
                        result = future.result()
                except BrokenExecutor as error:
                    yield from self._retried(submitted, error)
                    continue
                submitted.popleft()
                yield batch, result
        finally:
            for _, future in submitted:
                future.cancel()
            if self._replaced:
                self._executor.shutdown(wait=True, cancel_futures=True)

    @contextmanager
    def _naming(self, batch: Batch[T]) -> Iterator[None]:
        """Add the id and the beginning of its text to the error of a document: see EngineDifference and TextError."""
        try:
            yield
        except (EngineDifference, TextError) as error:
            if self._kind is None:
                raise
            place = error.number - batch.first  # of its text in the batch
            ends = accumulate(len(self._kind.texts(item)) for item in batch.items)
            index = next(index for index, end in enumerate(ends) if place < end)
            raise error.named(batch.first + index, self._kind.described(batch.items[index])) from None

    def _fill(
        self, stream: Iterator[Batch[T]], waiting: list[Batch[T]], submitted: deque[tuple[Batch[T], Future[R]]]
    ) -> None:
        while len(submitted) < self._max_ahead:
            if not waiting:
                waiting.extend(batch for batch in [next(stream, None)] if batch is not None)
            ahead = sum(batch.num_chars for batch, _ in submitted)
            if not waiting or (submitted and ahead + waiting[0].num_chars > AHEAD_CHARS):
                return
            batch = waiting.pop()
            submitted.append((batch, self._submit(batch)))

    def _submit(self, batch: Batch[T]) -> Future[R]:
        assert self._executor is not None
        try:
            return self._executor.submit(self._work, batch.payload, batch.first)
        except BrokenExecutor as error:  # handled when the result is asked for
            failed: Future[R] = Future()
            failed.set_exception(error)
            return failed

    def _retried(
        self, submitted: deque[tuple[Batch[T], Future[R]]], error: BrokenExecutor
    ) -> Iterator[tuple[Batch[T], R]]:
        logger.warning(
            "a worker died while %d batches were in work, from %s on (%s); each of them is tried once more, alone",
            len(submitted),
            submitted[0][0],
            str(error) or type(error).__name__,
            extra={"code": "W503"},
        )
        self._replace()
        while submitted:
            batch, before = submitted[0]
            done = before.done() and not before.cancelled() and before.exception() is None
            try:
                with self._naming(batch):
                    result = before.result() if done else self._submit(batch).result()
            except BrokenExecutor as second:
                raise WorkerDied(
                    f"a worker died twice on {batch} ({str(second) or type(second).__name__}). Look for a text there "
                    "that takes more memory than there is, or encode in this process: no executor"
                ) from error
            submitted.popleft()
            yield batch, result

    def _replace(self) -> None:
        """Replace a broken process pool; other executors recover by themselves or not at all."""
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
