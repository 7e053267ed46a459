"""What a loader of files gives a builder: many documents as columns, a sampled sequence; and parts of a source.

A loader that reads rows one by one yields (split, text, id) instead; a builder takes both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NO_COUNTERS: tuple[tuple[int, Mapping[str, int]], ...] = ((0, {}),)


@dataclass(frozen=True)
class DocumentBatch:
    """Consecutive documents of a source, one entry each in `texts` and `ids`.

    A document's counters and position are those that the loader had when it gave this document: what was dropped before
    it is in them, what was dropped behind it is not. So they do not depend on where a batch ends.
    """

    texts: Sequence[bytes]
    """Each document's text in valid UTF-8, repaired by the loader where it was not."""
    ids: Sequence[str]
    """Each document's id in its source."""
    split: str | None = None
    """train or val, for all of them; None leaves the choice to the text and the seed."""
    counters: Sequence[tuple[int, Mapping[str, int]]] = NO_COUNTERS
    """(n, the loader's counters from document n of this batch on): ascending, the first n is 0."""
    position: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Each document's place in the files, a column for each key of data.reader.Position; {} if it has none."""
    is_checked: bool = False
    """Whether all of this is known to be true, as the project's loaders know it; a builder checks other batches."""

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.texts)


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled sequence of L tokens.

    Its scored tokens are the completion, or all L if it is not known where the completion begins.
    """

    ids: Any
    """Integers [L]: prompt and completion, as sampled."""
    prompt_length: int = -1
    """Tokens before the completion; -1: not known."""
    loss_mask: Any = None
    """0 and 1 [L]: which tokens are targets. None: the scored tokens."""
    logprobs: Any = None
    """float32 [scored tokens]: the log-prob of each, by the model that sampled it."""
    advantage: Any = None
    """One float, or float32 [scored tokens]."""
    reward: float | None = None
    """The score of the sample."""


MAX_PARTITIONS = 100_000


class Partition(NamedTuple):
    """One of the parts that a source is read in, and its cache is built in, each alone.

    Which files or rows it has is decided in data/files/part.py.
    """

    number: int
    """From 0."""
    total: int
    """Number of all partitions of the source: 2 to MAX_PARTITIONS."""

    @classmethod
    def checked(cls, number: int, total: int) -> Partition:
        """Return a partition. Raises: ValueError for numbers that there are not."""
        if not 2 <= total <= MAX_PARTITIONS:
            raise ValueError(f"{total} partitions: expected 2 to {MAX_PARTITIONS:,}")
        if not 0 <= number < total:
            raise ValueError(f"partition {number} of {total}: expected 0 to {total - 1}")
        return cls(number, total)

    def seed(self, seed: int) -> int:
        """Return the seed of this partition's own shuffle, 0 to 2**63 - 1: of the seed of all and its number."""
        digest = hashlib.sha256(f"{seed}\npartition {self.number}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def budget(self, tokens: int | None) -> int | None:
        """Return this partition's part of a token budget; the parts differ by a token at most. None: no limit."""
        return None if tokens is None else (tokens + self.total - 1 - self.number) // self.total
