"""What is read from a source on its way to the encoder: marked with the state of its source, and put into batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from niels_gpt.build.shuffle import Shuffled

T = TypeVar("T")
NOWHERE: Mapping[str, int] = {}

BATCH_CHARS = 1 << 20  # a batch is closed by characters, so that memory does not depend on document lengths ...
BATCH_ITEMS = 1024  # ... nor on their number
DIGEST_BYTES = 8


class Mark(NamedTuple):
    """The state of a source when a document left it: what is read ahead of its use changes nothing in it."""

    counters: Mapping[str, int]
    """What the loader had dropped or repaired by then."""
    generator: str | None
    """sha256 of the state of the shuffle's generator; None without a shuffle."""
    position: Mapping[str, int] = NOWHERE
    """Where a source of files was; {} where that is not known, or is not the item's, as behind a shuffle."""


def marked(
    items: Iterable[T], counters: Mapping[str, int], position: Mapping[str, int] | None = None
) -> Iterator[tuple[T, Mark]]:
    """Yield each item with the state of its source. Items that follow each other share one Mark while nothing changes.

    counters, position: filled by the loader while it is read.
    """
    shuffled = items if isinstance(items, Shuffled) else None
    mark, draws = Mark({}, None), -1
    for item in items:
        if shuffled is not None and draws != shuffled.draws:
            draws = shuffled.draws
            mark = Mark(dict(counters), shuffled.state_sha256())
        elif mark.counters != counters:
            mark = Mark(dict(counters), mark.generator)
        if position:
            mark = Mark(mark.counters, mark.generator, dict(position))
        yield item, mark


@dataclass
class Batch(Generic[T]):
    """Items that are encoded together."""

    first: int
    """Number of the first item, counted from the beginning of the source."""
    items: list[T] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    payload: list[str] = field(default_factory=list)
    """Their texts: one of each document, one of each message of a chat."""
    num_chars: int = 0
    """Characters of these texts."""

    def __str__(self) -> str:
        """Name the items, for a message."""
        begin = next((text[:80] for text in self.payload if text), "")
        return f"documents {self.first} to {self.first + len(self.items) - 1} (the first begins {begin!r})"


def batches(items: Iterable[tuple[T, Mark]], *, texts: Callable[[T], list[str]], first: int = 0) -> Iterator[Batch[T]]:
    """Group a stream into batches of at most BATCH_ITEMS items and BATCH_CHARS characters; a longer item goes alone."""
    batch: Batch[T] = Batch(first)
    for item, mark in items:
        found = texts(item)
        size = sum(map(len, found))
        if batch.items and (batch.num_chars + size > BATCH_CHARS or len(batch.items) >= BATCH_ITEMS):
            yield batch
            batch = Batch(batch.first + len(batch.items))
        batch.items.append(item)
        batch.marks.append(mark)
        batch.payload.extend(found)
        batch.num_chars += size
    if batch.items:
        yield batch


def text_digest(text: str) -> bytes:
    """Return the first bytes of the sha256 of a text's utf-8."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:DIGEST_BYTES]


def labelled_digest(label: str, digests: Iterable[bytes]) -> bytes:
    """Return the digest of an item from those of its texts, and from what else of it goes into a cache."""
    return hashlib.sha256(label.encode(errors="surrogatepass") + b"\0" + b"".join(digests)).digest()[:DIGEST_BYTES]
