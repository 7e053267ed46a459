"""A bounded shuffle of a stream: `size` items are held, each next item takes the place of a random one of them.

The algorithm is named in meta.json (`shuffle.algorithm`), for other algorithms give other bytes from the same seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

ALGORITHM = "replace-random-slot, drain by randperm, torch.Generator"
_DRAWS = 1024  # indices drawn at once: one torch call costs about as much as a thousand of them


def shuffled(items: Iterable[T], *, size: int | None, generator: torch.Generator) -> Iterator[T]:
    """Yield every item once, in a random order of bounded memory.

    size: items held at once; None, 0 and 1 keep the order.
    """
    if size is not None and size < 0:
        raise ValueError(f"shuffle_buffer={size}: expected 0 or more documents")
    if not size or size == 1:
        yield from items
        return
    import torch

    held: list[T] = []
    draws: list[int] = []
    for item in items:
        if len(held) < size:
            held.append(item)
            continue
        if not draws:
            draws = torch.randint(size, (_DRAWS,), generator=generator).tolist()
        slot = draws.pop()
        yield held[slot]
        held[slot] = item
    for slot in torch.randperm(len(held), generator=generator).tolist():
        yield held[slot]
