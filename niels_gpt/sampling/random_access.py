"""RandomAccess: rows of a stream by their numbers, for a trainer that itself decides which process reads which.

A number alone takes long to locate: 60 us, in a mixture 300 us. In a block of 4,096 it takes 0.1 us, or 0.3. So numbers
that come in steps, such as each eighth one for a rank of eight, are located in blocks of such steps, and others alone.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from itertools import pairwise
from math import gcd
from operator import index
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.sampling.stream import Located, Samples, Stream
from niels_gpt.storage.errors import NoLength, OutOfRange, PositionError
from niels_gpt.storage.meta_json import checked_int

BLOCK = 4096
"""Numbers that are located together."""
_KEPT = 4  # blocks: threads may still read in the one before
_RECENT, _LEAST = 16, 4  # numbers that were asked for last, from which steps are known; how many must be known


class _Block(NamedTuple):
    """Numbers first, first + step, ..., located."""

    first: int
    step: int
    size: int
    located: Located


class RandomAccess:
    """The rows of a stream as a sequence in the stream's order, epoch after epoch: `[k]` is sample k of all ranks.

    Of the stream only its samples count, as they are now, not its position, rank or batch size. Several threads may
    read. It may be pickled; a copy opens the cache itself, and raises CacheError if the content is another. A stream
    that continues a changed run (`changed=True`) has no rows before the change.
    """

    def __init__(self, stream: Stream[Any], *, length: int | None = None) -> None:
        """stream: one whose rows have numbers, so not a RolloutStream.

        length: how many rows of it, from row 0 on; None: all.
        Raises: NoLength (a TypeError, E109) for all rows of a stream without end; ValueError for another stream, for a
            length above the stream's, and for one that leaves no row after a change.
        """
        samples = getattr(stream, "samples", None)
        if not isinstance(samples, Samples):
            raise ValueError(f"{type(stream).__name__}: its rows have no numbers, expected a stream of rows of a cache")
        end = samples.num_samples
        if length is None:
            if end is None:
                raise NoLength(
                    f"this {type(stream).__name__} has no end, and so no length: open it with epochs= (a mixture: with "
                    "when_exhausted=), or pass length="
                )
            length = end
        self._length = checked_int("length", length, samples.origin.sample + 1)
        if end is not None and length > end:
            raise ValueError(f"length={length}: expected at most the {end} samples of the stream")
        self.samples = copy(samples)  # a state that the stream loads may change them
        self._begin()

    def _begin(self) -> None:
        self._kept: tuple[_Block, ...] = ()
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_length": self._length, "samples": self.samples}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        """Return a row, as a batch of the stream's class with one row, on the CPU; its `state` is {}.

        number: from 0; negative: from the end. Raises: IndexError (E106); ValueError (E106) for a row before the change
            of a run; CacheError for an id outside the vocabulary.
        """
        number = index(number)
        if number < 0:
            number += self._length
        if not 0 <= number < self._length:
            raise OutOfRange(f"row {number}: expected 0 to {self._length - 1}")
        if number < (first := self.samples.origin.sample):  # an IndexError would end `for row in self` without a row
            raise PositionError(f"row {number} is before the change of this run: expected {first} or more")
        self._recent.append(number)
        block = self._block_of(number) or self._located(number)
        return block.located.read((number - block.first) // block.step, 1, "cpu").batch({})

    def _block_of(self, number: int) -> _Block | None:
        for block in self._kept:
            place, rest = divmod(number - block.first, block.step)
            if not rest and 0 <= place < block.size:
                return block
        return None

    def _located(self, number: int) -> _Block:
        """Return a block of a number that no block has; of this number alone if its neighbours are not asked for."""
        step = self._recent_step()
        if not step:
            return _Block(number, 1, 1, self.samples.locate(np.array([number])))
        with self._lock:
            if (block := self._block_of(number)) is None:  # no other thread has located it in the meantime
                # Blocks begin at multiples of their length, so that threads agree on them.
                begin = number - number % (BLOCK * step)
                first = max(begin, self.samples.origin.sample)
                first += (number - first) % step
                numbers = np.arange(first, min(begin + BLOCK * step, self._length), step)
                block = _Block(first, step, len(numbers), self.samples.locate(numbers))
                self._kept = (block, *self._kept[: _KEPT - 1])
        return block

    def _recent_step(self) -> int:
        """Return the step of the single rows that are asked for, also by threads out of order; 0: unknown."""
        recent = sorted(set(self._recent))
        step = gcd(*(after - before for before, after in pairwise(recent)))
        is_dense = len(recent) >= _LEAST and recent[-1] - recent[0] < 4 * len(recent) * step
        return step if is_dense else 0
