"""A source as a stream of chunks with its state at each document; shuffled, and encoded in parallel batches, in order.

Decides the order of documents (Shuffled), where a batch ends (batches), where a resumed source begins (Seek), how many
batches are encoded ahead in bounded memory, and what happens if a worker dies (InOrder). For speed, documents move in
chunks, never one by one; the size of a chunk changes no byte.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain, islice, zip_longest
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from niels_gpt.encoding import DIGEST_BYTES, TextError
from niels_gpt.storage.errors import WorkerDied
from niels_gpt.storage.meta_json import checked_count
from niels_gpt.tokenizers.engine import EngineDifference

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

SHUFFLE_ALGORITHM = "replace-random-slot, drain by randperm, torch.Generator"
"""`shuffle.algorithm` in meta.json: another algorithm gives other bytes from the same seed."""
_DRAWS = 1024  # indices drawn at once: for a few, the call of torch costs more than the drawing

BATCH_CHARS = 1 << 20  # a batch is closed by characters, so that memory does not depend on document lengths ...
BATCH_ITEMS = 1024  # ... nor on their number

AHEAD_CHARS = 8 << 20
"""At most this many characters of text are encoded ahead, unless a single batch has more."""
_AHEAD_PER_WORKER = 2  # batches: one in work, one waiting

_DOCUMENTS = "documents"
"""Key in the position of a source that was not read yet: the number of documents before its first one."""
_NO_POSITION: Mapping[str, int] = {}


class SourceState(NamedTuple):
    """The state of a source just after one document; reading ahead does not change it."""

    counters: Mapping[str, int]
    """The loader's counters of dropped and repaired rows."""
    generator: str | None
    """sha256 of the shuffle generator's state; None without a shuffle."""
    position: Mapping[str, int] = _NO_POSITION
    """The loader's position in its files; {} without one, and after a shuffle."""


class Change(NamedTuple):
    """The state of a source from one item of a chunk up to the next change."""

    first: int
    """Number of that item in the chunk."""
    counters: Mapping[str, int]
    generator: str | None
    positions: Sequence[Mapping[str, int]] | Mapping[str, Sequence[int]] = ()
    """The positions of the items, from item `first` at index `offset`: a mapping for each item, or a column for each
    key. Empty without positions."""
    offset: int = 0


@dataclass
class Chunk(Generic[T]):
    """Consecutive items of a source, with its state after each."""

    items: list[T]
    changes: list[Change]
    """Ascending by `first`, which is 0 in the first."""

    def state(self, number: int) -> SourceState:
        """Return the state after item `number`."""
        change = self.changes[bisect_right(self.changes, number, key=lambda change: change.first) - 1]
        place, positions = change.offset + number - change.first, change.positions
        if isinstance(positions, Mapping):
            return SourceState(change.counters, change.generator, {k: int(v[place]) for k, v in positions.items()})
        return SourceState(change.counters, change.generator, positions[place] if positions else _NO_POSITION)

    def part(self, start: int, stop: int) -> Chunk[T]:
        """Return the items `start` to `stop` (exclusive). start <= stop."""
        if start == 0 and stop >= len(self.items):
            return self
        changes = []
        for change, after in zip_longest(self.changes, self.changes[1:]):
            if change.first < max(stop, 1) and (after is None or after.first > start):
                skipped = max(start - change.first, 0)
                moved = max(change.first - start, 0)
                changes.append(change._replace(first=moved, offset=change.offset + skipped))
        return Chunk(self.items[start:stop], changes)

    def extend(self, other: Chunk[T]) -> None:
        """Append the items of another chunk."""
        count = len(self.items)
        self.items.extend(other.items)
        self.changes += [change._replace(first=change.first + count) for change in other.changes]


def chunked(
    items: Iterable[T | Chunk[T]],
    counters: Mapping[str, int],
    position: Mapping[str, int] | None,
    size: Callable[[T], int],
) -> Iterator[Chunk[T]]:
    """Group items into chunks of about a batch. A chunk among the items passes unchanged.

    counters, position: the loader updates them while it is read. size: returns the characters of an item.
    """
    held: list[T] = []
    changes: list[Change] = []
    positions: list[Mapping[str, int]] = []
    total = 0
    for item in items:
        is_chunk = isinstance(item, Chunk)
        if held and (is_chunk or len(held) >= BATCH_ITEMS or total >= BATCH_CHARS):
            yield Chunk(held, changes)
            held, changes, positions, total = [], [], [], 0
        if isinstance(item, Chunk):
            yield item
            continue
        if not changes or changes[-1].counters != counters or bool(position) != bool(changes[-1].positions):
            positions = []
            changes.append(Change(len(held), dict(counters), None, positions))
        if position:
            positions.append(dict(position))
        held.append(item)
        total += size(item)
        if len(held) >= BATCH_ITEMS or total >= BATCH_CHARS:
            yield Chunk(held, changes)
            held, changes, positions, total = [], [], [], 0
    if held:
        yield Chunk(held, changes)


class Shuffled:
    """Yields every item once, shuffled.

    Holds `size` items. Each further item replaces a random one of them, which is yielded; the last `size` items come
    out in a random permutation.
    """

    def __init__(self, size: int | None, seed: int) -> None:
        """size: items held at once; None, 0 and 1 keep the order. seed: for the torch.Generator."""
        if size is not None and size < 0:
            raise ValueError(f"shuffle_buffer={size}: expected 0 or more documents")
        self._size = size or 1
        if self._size > 1:
            import torch  # only here: its import takes longer than to build a small cache

            self._generator = torch.Generator().manual_seed(seed)

    @property
    def in_order(self) -> bool:
        """Whether the items keep the order of the stream."""
        return self._size == 1

    def of(self, chunks: Iterable[Chunk[T]], counters: Mapping[str, int]) -> Iterator[Chunk[T]]:
        """Yield the items in chunks. Call it once.

        An item has the state after the item that replaced it, since that one was read before it came out. The items
        left at the end have `counters`, the loader's, which are final by then.
        """
        if self._size == 1:
            yield from chunks
            return
        import torch

        held: list[T] = []
        drawn: list[int] = []
        generator = self._state_sha256()
        for chunk in chunks:
            start = min(self._size - len(held), len(chunk.items))
            held += chunk.items[:start]
            rest = chunk.part(start, len(chunk.items))
            found: list[T] = []
            drawn_at: list[tuple[int, str]] = [(0, generator)]
            while len(found) < len(rest.items):
                if not drawn:
                    # SHUFFLE_ALGORITHM: draws of 1,024, used from the last to the first. Neither may change.
                    drawn = torch.randint(self._size, (_DRAWS,), generator=self._generator).tolist()
                    generator = self._state_sha256()
                    drawn_at.append((len(found), generator))
                for item in rest.items[len(found) : len(found) + len(drawn)]:
                    slot = drawn.pop()
                    found.append(held[slot])
                    held[slot] = item
            if found:
                yield Chunk(found, _with_generator(rest.changes, drawn_at))
        order = torch.randperm(len(held), generator=self._generator).tolist()
        left = Change(0, dict(counters), self._state_sha256())
        for first in range(0, len(order), BATCH_ITEMS):
            yield Chunk([held[slot] for slot in order[first : first + BATCH_ITEMS]], [left])

    def _state_sha256(self) -> str:
        return hashlib.sha256(self._generator.get_state().numpy().tobytes()).hexdigest()


def _with_generator(changes: list[Change], drawn_at: list[tuple[int, str]]) -> list[Change]:
    """Return `changes` with the generator's states added. drawn_at: (number of an item, the state from there on)."""
    states = dict(drawn_at)  # of two states at the same item, the later one
    firsts = sorted({*states, *(change.first for change in changes)})
    found, chunk = [], Chunk[Any]([], changes)
    generator: str | None = None
    for first in firsts:
        generator = states.get(first, generator)
        found.append(Change(first, chunk.state(first).counters, generator))
    return found


@dataclass
class Batch(Generic[T]):
    """Items that are encoded together."""

    first: int
    """Number of the first item in the source, from 0."""
    chunk: Chunk[T]
    payload: list[bytes | str]
    """The texts: one for each document, or for each message of a chat."""
    num_chars: int
    """Characters of `payload`."""

    @property
    def items(self) -> list[T]:
        """The items."""
        return self.chunk.items

    def __str__(self) -> str:
        """Return the numbers of the items and the beginning of their text, for messages."""
        begin = next((beginning(text) for text in self.payload if text), "")
        return f"documents {self.first} to {self.first + len(self.items) - 1} (the first begins {begin!r})"


def batches(
    chunks: Iterable[Chunk[T]], *, texts: Callable[[list[T]], list[list[bytes | str]]], first: int = 0
) -> Iterator[Batch[T]]:
    """Group items into batches of at most BATCH_ITEMS items and BATCH_CHARS characters. A longer item has its own.

    texts: returns the texts of each item. first: number of the first item.
    """
    batch: Batch[T] = Batch(first, Chunk([], []), [], 0)
    for chunk in chunks:
        start, payload = 0, texts(chunk.items)
        for number, of_item in enumerate(payload):
            size = len(of_item[0]) if len(of_item) == 1 else sum(map(len, of_item))
            count = len(batch.items) + number - start
            if count and (batch.num_chars + size > BATCH_CHARS or count >= BATCH_ITEMS):
                _take(batch, chunk, payload, start, number)
                yield batch
                batch, start = Batch(batch.first + len(batch.items), Chunk([], []), [], 0), number
            batch.num_chars += size
        _take(batch, chunk, payload, start, len(payload))
        if len(batch.items) >= BATCH_ITEMS or batch.num_chars >= BATCH_CHARS:
            yield batch
            batch = Batch(batch.first + len(batch.items), Chunk([], []), [], 0)
    if batch.items:
        yield batch


def _take(batch: Batch[T], chunk: Chunk[T], payload: list[list[bytes | str]], start: int, stop: int) -> None:
    if stop > start:
        batch.chunk.extend(chunk.part(start, stop))
        batch.payload.extend(chain.from_iterable(payload[start:stop]))


def beginning(text: bytes | str) -> str:
    """Return the beginning of a text, for messages."""
    return text[:80] if isinstance(text, str) else text[:320].decode(errors="ignore")[:80]


class Encoder(Protocol[R_co]):
    """Encodes the texts of a batch for a Writer."""

    def hashes(self, texts: Sequence[bytes | str]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the split keys and the digests of texts: uint64 [texts] each; the keys may be empty."""

    def encode(self, texts: Sequence[bytes | str], first: int = 0) -> R_co:
        """Return the encoded batch. first: number of its first text in the stream."""


@dataclass(frozen=True)
class ItemKind(Generic[T]):
    """How a builder reads an item of its source: a document or a chat."""

    texts: Callable[[T], list[bytes | str]]
    """The texts to encode."""
    label: Callable[[T], str]
    """Everything else of the item that enters a cache, as one string."""
    name: Callable[[T], str]
    """The item's id in its source."""

    def size(self, item: T) -> int:
        """Return the approximate number of characters of an item, which closes a chunk."""
        return sum(map(len, self.texts(item)))

    def digests(self, items: Sequence[T], encoder: Encoder[Any] | None) -> list[bytes]:
        """Return the digest of each item, by which a resumed build sees whether it has changed."""
        assert encoder is not None
        texts = list(map(self.texts, items))
        each = iter(digest_list(encoder.hashes(list(chain.from_iterable(texts)))[1]))
        return [item_digest(self.label(item), islice(each, len(of))) for item, of in zip(items, texts, strict=True)]

    def described(self, item: T) -> str:
        """Return the item's id and the beginning of its text, for messages."""
        begin = next((beginning(text) for text in self.texts(item) if text), "")
        return f"{self.name(item)!r} (it begins {begin!r})"


def digest_list(digests: NDArray[np.uint64]) -> list[bytes]:
    """Return digests (uint64) as bytes objects, DIGEST_BYTES each."""
    raw = digests.tobytes()
    return [raw[start : start + DIGEST_BYTES] for start in range(0, len(raw), DIGEST_BYTES)]


def item_digest(label: str, text_digests: Iterable[bytes]) -> bytes:
    """Return the digest of an item from its label (`ItemKind.label`) and the digests of its texts."""
    digests = b"".join(text_digests)
    return hashlib.sha256(label.encode(errors="surrogatepass") + b"\0" + digests).digest()[:DIGEST_BYTES]


@dataclass(frozen=True)
class Seek:
    """The place of a checkpoint in a source whose documents keep the order of its files.

    A resumed source begins again with the last document of the checkpoint, to compare it with its recorded digest. So
    the position to seek is the one after the document before it.
    """

    fingerprint: str
    """Hash of the files' names and bytes."""
    before: dict[str, int]
    """The loader's counters before the first row. They depend on more than the files, for example on --exclude."""
    counters: dict[str, int]
    position: dict[str, int]
    """Both after the last document but one."""
    last_counters: dict[str, int]
    last_position: dict[str, int]
    """Both after the last document."""

    @classmethod
    def between(
        cls, fingerprint: str, before: Mapping[str, int], previous: SourceState, last: SourceState
    ) -> Seek | None:
        """Return the Seek of a checkpoint, or None if a position is unknown."""
        if not previous.position or not last.position:
            return None
        parts = (before, previous.counters, previous.position, last.counters, last.position)
        return cls(fingerprint, *map(dict[str, int], parts))

    @classmethod
    def parsed(cls, value: Any, where: str) -> Seek | None:
        """Return the Seek in a line of a journal. Raises: TypeError, ValueError, LookupError for an invalid one."""
        if value is None:
            return None
        if set(value) != set(cls.__dataclass_fields__) or not isinstance(value["fingerprint"], str):
            raise ValueError("seek has unknown keys, or lacks some")
        numbers = {key: counts for key, counts in value.items() if key != "fingerprint"}
        for key, counts in numbers.items():
            for number in counts.values():
                checked_count(number, key, where)
        return cls(value["fingerprint"], **{key: dict(counts) for key, counts in numbers.items()})

    def as_json(self) -> dict[str, Any]:
        """Return the value for a line of a journal."""
        return asdict(self)

    def leads_to(self, state: SourceState) -> bool:
        """Return whether `state` is the recorded state after the last document."""
        return (dict(state.counters), dict(state.position), state.generator) == (
            self.last_counters,
            self.last_position,
            None,
        )

    def apply(self, documents: int, counters: dict[str, int], position: dict[str, int]) -> SourceState:
        """Let an unread source begin with the last of `documents` documents; return the state before it.

        counters, position: the source's, which are changed in place.
        """
        counters.clear()
        counters.update(self.counters)
        position.clear()
        position.update(self.position)
        position[_DOCUMENTS] = documents - 1
        return SourceState(self.counters, None, self.position)


def first_number(position: dict[str, int] | None) -> int:
    """Remove the number of a source's first document from its position, and return it; 0 without one."""
    return 0 if position is None else position.pop(_DOCUMENTS, 0)


@contextmanager
def encoded(
    chunks: Iterator[Chunk[T]],
    encoder: Encoder[R] | None,
    kind: ItemKind[T],
    *,
    first: int,
    num_threads: int,
    executor: Executor | None,
) -> Iterator[Iterator[tuple[Batch[T], R | None]]]:
    """Yield batches with their encoded results, in order.

    encoder: None stores items as they are; each chunk is a batch then. first: number of the first item.
    num_threads: threads that encode; 0 encodes in the caller's thread. executor: encodes instead, and is left open.
    """
    if encoder is None:
        yield _as_they_are(chunks, first)
        return
    with ExitStack() as stack:
        if executor is None and num_threads:
            executor = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")
            stack.callback(executor.shutdown, cancel_futures=True)
        encode: Callable[[list[bytes | str], int], R] = encoder.encode
        if executor is not None and not isinstance(executor, ThreadPoolExecutor):
            encode = partial(_encode_elsewhere, pickle.dumps(encoder))
        found = batches(chunks, texts=lambda items: list(map(kind.texts, items)), first=first)
        yield stack.enter_context(closing(InOrder[T, R](encode, executor, kind)(found)))


def _as_they_are(chunks: Iterable[Chunk[T]], first: int) -> Iterator[tuple[Batch[T], None]]:
    for chunk in chunks:
        yield Batch(first, chunk, [], 0), None
        first += len(chunk.items)


def _encode_elsewhere(encoder: bytes, texts: list[bytes | str], first: int) -> Any:
    try:
        return _unpickled(encoder).encode(texts, first)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an error that cannot be pickled would break the pool
            raise WorkerDied(f"{type(error).__name__}: {error}") from None
        raise


@lru_cache(maxsize=4)
def _unpickled(encoder: bytes) -> Encoder[Any]:
    """Unpickle an encoder once in each process.

    Done here, its error reaches the caller. An error while the executor unpickles arguments kills the worker.
    """
    opened: Encoder[Any] = pickle.loads(encoder)
    return opened


class InOrder(Generic[T, R]):
    """Yields (batch, work(batch.payload, batch.first)) in the order of the batches, with any executor."""

    def __init__(
        self,
        work: Callable[[list[bytes | str], int], R],
        executor: Executor | None,
        kind: ItemKind[T] | None = None,
    ) -> None:
        """executor: left open; None works in the caller's thread. kind: names the document of an error."""
        self._kind = kind
        self._work = work
        self._executor = executor
        num_workers = getattr(executor, "_max_workers", None) or os.cpu_count() or 1
        self._max_ahead = _AHEAD_PER_WORKER * int(num_workers)

    def __call__(self, batches: Iterable[Batch[T]]) -> Generator[tuple[Batch[T], R]]:
        """Submit as many batches ahead as memory allows, and yield each with its result.

        Raises: WorkerDied E506 with the batches that were lost with a worker.
        """
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
                    raise WorkerDied(
                        f"a worker died while {len(submitted)} batches were in work, from {batch} on "
                        f"({str(error) or type(error).__name__}). The same build resumes. Look there for "
                        "a text that takes more memory than there is, or encode in this process: no executor"
                    ) from error
                submitted.popleft()
                yield batch, result
        finally:
            for _, future in submitted:
                future.cancel()

    @contextmanager
    def _naming(self, batch: Batch[T]) -> Iterator[None]:
        """Add a document's id and the beginning of its text to its EngineDifference or TextError."""
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
