"""Documents as columns, which a loader gives to a builder; a sampled sequence; and partitions of a source.

A loader that reads rows one by one yields (split, text, id) instead. A builder takes both.
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

    A document's counters and position are the loader's at the time it yielded this document: they include drops before
    it, and no drops after it. So they do not depend on the end of a batch.
    """

    texts: Sequence[bytes]
    """Texts in valid UTF-8; the loader has repaired invalid ones."""
    ids: Sequence[str]
    """Document ids in the source."""
    split: str | None = None
    """"train" or "val" for the whole batch; None: text and seed decide for each document."""
    counters: Sequence[tuple[int, Mapping[str, int]]] = NO_COUNTERS
    """(n, the loader's counters from document n of this batch on), ascending; the first n is 0."""
    position: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """A column for each key of data.reader.Position, with the position at each document; {} without positions."""
    is_checked: bool = False
    """Whether the loader vouches for the batch, as the project's loaders do. A builder checks other batches."""

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
    """One of the parts of a source, each read and built by itself. data/files/part.py decides its files and rows."""

    number: int
    """Number of this partition, from 0."""
    total: int
    """Number of all partitions of the source: 2 to MAX_PARTITIONS."""

    @classmethod
    def checked(cls, number: int, total: int) -> Partition:
        """Return a partition.

        Raises: ValueError unless total is 2 to MAX_PARTITIONS and number is 0 to total - 1.

        >>> Partition.checked(0, 3).budget(100)
        34
        """
        if not 2 <= total <= MAX_PARTITIONS:
            raise ValueError(f"{total} partitions: expected 2 to {MAX_PARTITIONS:,}")
        if not 0 <= number < total:
            raise ValueError(f"partition {number} of {total}: expected 0 to {total - 1}")
        return cls(number, total)

    def seed(self, seed: int) -> int:
        """Derive the seed of this partition's own shuffle, 0 to 2**63 - 1, from the common seed and its number."""
        digest = hashlib.sha256(f"{seed}\npartition {self.number}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def budget(self, tokens: int | None) -> int | None:
        """Return this partition's part of a token budget. Parts differ by one token at most. None: no limit."""
        return None if tokens is None else (tokens + self.total - 1 - self.number) // self.total
