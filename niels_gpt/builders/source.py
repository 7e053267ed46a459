"""Reads a source: shuffles it in bounded memory, records its state at each document, and cuts it into batches.

Decides the order of documents (Shuffled), where one batch ends (batches), and where a resumed source begins (Seek).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from niels_gpt.encoding import DIGEST_BYTES, TextEncoder
from niels_gpt.storage.meta_json import checked_count

T = TypeVar("T")

SHUFFLE_ALGORITHM = "replace-random-slot, drain by randperm, torch.Generator"
"""In meta.json (`shuffle.algorithm`): another algorithm gives other bytes from the same seed."""
_DRAWS = 1024  # indices drawn at once: one torch call costs about as much as a thousand of them

BATCH_CHARS = 1 << 20  # a batch is closed by characters, so that memory does not depend on document lengths ...
BATCH_ITEMS = 1024  # ... nor on their number

_DOCUMENTS = "documents"
"""Key in a position: the number of documents before the first one, for a source that has not been read yet."""
_NO_POSITION: Mapping[str, int] = {}


class Shuffled(Generic[T]):
    """Yields every item once, shuffled: `size` items are held, and each next item replaces a random one of them."""

    def __init__(self, items: Iterable[T], *, size: int | None, seed: int) -> None:
        """size: items held at once; None, 0 and 1 keep the order. seed: of the torch.Generator."""
        if size is not None and size < 0:
            raise ValueError(f"shuffle_buffer={size}: expected 0 or more documents")
        import torch

        self._items, self._size = items, size or 1
        self._generator = torch.Generator().manual_seed(seed)
        self.draws = 0
        """Number of generator calls: the generator's state changes only when this number does."""

    @property
    def in_order(self) -> bool:
        """Whether the items keep the order of the stream."""
        return self._size == 1

    def state_sha256(self) -> str | None:
        """Return the sha256 of the generator's state; None if the items keep their order."""
        if self._size == 1:
            return None
        return hashlib.sha256(self._generator.get_state().numpy().tobytes()).hexdigest()

    def __iter__(self) -> Iterator[T]:
        """Yield the items. Call it once."""
        if self._size == 1:
            yield from self._items
            return
        import torch

        held: list[T] = []
        drawn: list[int] = []
        for item in self._items:
            if len(held) < self._size:
                held.append(item)
                continue
            if not drawn:
                drawn = torch.randint(self._size, (_DRAWS,), generator=self._generator).tolist()
                self.draws += 1
            slot = drawn.pop()
            yield held[slot]
            held[slot] = item
        order = torch.randperm(len(held), generator=self._generator).tolist()
        self.draws += 1
        for slot in order:
            yield held[slot]


class SourceState(NamedTuple):
    """A snapshot of a source as of one document; reading ahead does not affect it."""

    counters: Mapping[str, int]
    """The loader's counters: what it has dropped or repaired so far."""
    generator: str | None
    """sha256 of the state of the shuffle's generator; None without a shuffle."""
    position: Mapping[str, int] = _NO_POSITION
    """The loader's position in its files; {} if it has none, or behind a shuffle."""


def with_states(
    items: Iterable[T], counters: Mapping[str, int], position: Mapping[str, int] | None = None
) -> Iterator[tuple[T, SourceState]]:
    """Yield each item with the state of its source; consecutive items share one SourceState while nothing changes.

    counters, position: updated by the loader as it is read.
    """
    shuffled = items if isinstance(items, Shuffled) else None
    state, draws = SourceState({}, None), -1
    for item in items:
        if shuffled is not None and draws != shuffled.draws:
            draws = shuffled.draws
            state = SourceState(dict(counters), shuffled.state_sha256())
        elif state.counters != counters:
            state = SourceState(dict(counters), state.generator)
        if position:
            state = SourceState(state.counters, state.generator, dict(position))
        yield item, state


@dataclass
class Batch(Generic[T]):
    """Items that are encoded together."""

    first: int
    """Number of the first item, counted from the beginning of the source."""
    items: list[T] = field(default_factory=list)
    states: list[SourceState] = field(default_factory=list)
    """Of each item."""
    payload: list[str] = field(default_factory=list)
    """Their texts: one for each document, one for each message of a chat."""
    num_chars: int = 0
    """Characters of these texts."""

    def __str__(self) -> str:
        """Name the items, for a message."""
        begin = next((text[:80] for text in self.payload if text), "")
        return f"documents {self.first} to {self.first + len(self.items) - 1} (the first begins {begin!r})"


def batches(
    items: Iterable[tuple[T, SourceState]], *, texts: Callable[[T], list[str]], first: int = 0
) -> Iterator[Batch[T]]:
    """Group items into batches of at most BATCH_ITEMS items and BATCH_CHARS characters; a longer item is alone."""
    batch: Batch[T] = Batch(first)
    for item, state in items:
        item_texts = texts(item)
        size = sum(map(len, item_texts))
        if batch.items and (batch.num_chars + size > BATCH_CHARS or len(batch.items) >= BATCH_ITEMS):
            yield batch
            batch = Batch(batch.first + len(batch.items))
        batch.items.append(item)
        batch.states.append(state)
        batch.payload.extend(item_texts)
        batch.num_chars += size
    if batch.items:
        yield batch


@dataclass(frozen=True)
class ItemKind(Generic[T]):
    """How a builder reads an item of its source: a document or a chat."""

    texts: Callable[[T], list[str]]
    """The texts to encode."""
    label: Callable[[T], str]
    """All else of the item that enters a cache."""
    name: Callable[[T], str]
    """The item's id in its source."""

    def digest(self, item: T, encoder: TextEncoder) -> bytes:
        """Return the digest that tells whether an item has changed."""
        return item_digest(self.label(item), digest_list(encoder.hashes(self.texts(item))[1]))

    def described(self, item: T) -> str:
        """Return the item's id and the beginning of its text, for messages."""
        begin = next((text[:80] for text in self.texts(item) if text), "")
        return f"{self.name(item)!r} (it begins {begin!r})"


def digest_list(digests: NDArray[np.uint64]) -> list[bytes]:
    """Return digests of texts as bytes."""
    raw = digests.tobytes()
    return [raw[start : start + DIGEST_BYTES] for start in range(0, len(raw), DIGEST_BYTES)]


def item_digest(label: str, text_digests: Iterable[bytes]) -> bytes:
    """Return the digest of an item: of its label, which is all but its texts that enters a cache, and its texts."""
    digests = b"".join(text_digests)
    return hashlib.sha256(label.encode(errors="surrogatepass") + b"\0" + digests).digest()[:DIGEST_BYTES]


@dataclass(frozen=True)
class Seek:
    """What a checkpoint records of a source whose documents keep the order of its files, so as to resume there.

    A resumed source begins with the last document of the checkpoint, which is compared with the one recorded. So the
    position to seek is that of the document before it.
    """

    fingerprint: str
    """Of the files' names and bytes."""
    before: dict[str, int]
    """The loader's counters before the first row: they depend on more than the files, such as on --exclude."""
    counters: dict[str, int]
    position: dict[str, int]
    """Both of the last document but one."""
    last_counters: dict[str, int]
    last_position: dict[str, int]
    """Both of the last document."""

    @classmethod
    def between(
        cls, fingerprint: str, before: Mapping[str, int], previous: SourceState, last: SourceState
    ) -> Seek | None:
        """Return what to record; None if a position is unknown."""
        if not previous.position or not last.position:
            return None
        parts = (before, previous.counters, previous.position, last.counters, last.position)
        return cls(fingerprint, *map(dict[str, int], parts))

    @classmethod
    def parsed(cls, value: Any, where: str) -> Seek | None:
        """Return the Seek of a journal line. Raises: TypeError, ValueError, LookupError for anything else."""
        if value is None:
            return None
        if set(value) != set(cls.__dataclass_fields__) or not isinstance(value["fingerprint"], str):
            raise ValueError("seek has other keys than it should have")
        numbers = {key: counts for key, counts in value.items() if key != "fingerprint"}
        for key, counts in numbers.items():
            for number in counts.values():
                checked_count(number, key, where)
        return cls(value["fingerprint"], **{key: dict(counts) for key, counts in numbers.items()})

    def as_json(self) -> dict[str, Any]:
        """Return the value in a journal line."""
        return asdict(self)

    def leads_to(self, state: SourceState) -> bool:
        """Whether a document has the state that the last one had."""
        return (dict(state.counters), dict(state.position), state.generator) == (
            self.last_counters,
            self.last_position,
            None,
        )

    def apply(self, documents: int, counters: dict[str, int], position: dict[str, int]) -> SourceState:
        """Make an unread source begin with the last of `documents` documents; returns the state before it."""
        counters.clear()
        counters.update(self.counters)
        position.clear()
        position.update(self.position)
        position[_DOCUMENTS] = documents - 1
        return SourceState(self.counters, None, self.position)


def first_number(position: dict[str, int] | None) -> int:
    """Remove the number of a source's first document from its position and return it."""
    return 0 if position is None else position.pop(_DOCUMENTS, 0)
