"""A bounded shuffle of a stream: `size` items are held, each next item takes the place of a random one of them.

The algorithm is named in meta.json (`shuffle.algorithm`), for other algorithms give other bytes from the same seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

ALGORITHM = "replace-random-slot, drain by randperm, torch.Generator"
_DRAWS = 1024  # indices drawn at once: one torch call costs about as much as a thousand of them


class Shuffled(Generic[T]):
    """Yields every item once, in a random order of bounded memory."""

    def __init__(self, items: Iterable[T], *, size: int | None, seed: int) -> None:
        """size: items held at once; None, 0 and 1 keep the order. seed: of the torch.Generator."""
        if size is not None and size < 0:
            raise ValueError(f"shuffle_buffer={size}: expected 0 or more documents")
        import torch

        self._items, self._size = items, size or 1
        self._generator = torch.Generator().manual_seed(seed)
        self.draws = 0
        """Calls of the generator so far: its state is a new one when this number is."""

    @property
    def in_order(self) -> bool:
        """Whether items come in the order of the stream, one for one."""
        return self._size == 1

    def state_sha256(self) -> str | None:
        """Return the sha256 of the generator's state; None where nothing is ever drawn."""
        if self._size == 1:
            return None
        return hashlib.sha256(self._generator.get_state().numpy().tobytes()).hexdigest()

    def __iter__(self) -> Iterator[T]:
        """Yield the items; to be called once."""
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
