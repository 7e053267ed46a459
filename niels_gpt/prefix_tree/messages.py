"""Trees of messages, such as OASST1's, as the sequences of their threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# A message -> its ids, role tags included, and a mask with 1 for each id that is a target.
Encode = Callable[[Mapping[str, Any]], tuple[Sequence[int], Sequence[int]]]


def threads(tree: Mapping[str, Any], encode: Encode, counters: Counter[str]) -> Iterator[tuple[list[int], list[int]]]:
    """Give ids and mask of each thread from the root to a leaf, replies in their order, cut behind its last target.

    `PrefixForest.from_message_tree` describes the arguments. A message is encoded once.
    """
    root = tree.get("prompt", tree)
    encoded: list[tuple[Sequence[int], Sequence[int], int]] = []  # ids, mask, index of the message above
    waiting: list[tuple[Mapping[str, Any], int]] = [(root, -1)]
    while waiting:
        message, above = waiting.pop()
        ids, mask = encode(message)
        if len(ids) != len(mask):
            raise ValueError(
                f"encode gave {len(ids)} ids and a mask of {len(mask)} for the message {dict(message)!r:.200}"
            )
        encoded.append((ids, mask, above))
        replies = message.get("replies") or ()
        waiting += [(reply, len(encoded) - 1) for reply in reversed(replies)]
        if replies:
            continue
        path = _path(encoded)
        used = max((depth for depth, (_, mask) in enumerate(path, start=1) if any(mask)), default=0)
        if not used:
            counters["no_target"] += 1
            continue
        counters["cut_messages"] += len(path) - used
        yield [id for ids, _ in path[:used] for id in ids], [bit for _, mask in path[:used] for bit in mask]


def _path(encoded: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return ids and masks of the messages from the root to the last one encoded."""
    path, index = [], len(encoded) - 1
    while index >= 0:
        ids, mask, index = encoded[index]
        path.append((ids, mask))
    return path[::-1]
