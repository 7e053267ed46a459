"""Trees of messages, such as OASST1's, as the sequences of their threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]
# A message -> its ids, role tags included, and a mask with 1 for each id that is a target.
Encode = Callable[[Message], tuple[Sequence[int], Sequence[int]]]


class Thread(NamedTuple):
    """The messages from the root to one of them, encoded."""

    ids: list[int]
    mask: list[int]
    message: Message  # the last one


class _Encoded(NamedTuple):
    ids: Sequence[int]
    mask: Sequence[int]
    message: Message
    above: int  # index of the message that it replies to; -1 for the root


def threads(tree: Message, encode: Encode, counters: Counter[str]) -> Iterator[Thread]:
    """Give the thread to every message that has a target and none below it, replies in their order.

    So every target is in a thread, and no thread is a part of another. `PrefixForest.from_message_tree` describes the
    arguments. A message is encoded once.
    """
    found = list(_encoded(tree, encode))
    trains = [False] * len(found)  # at or below a message
    last: list[int] = []
    for index in range(len(found) - 1, -1, -1):  # replies come behind what they reply to
        message = found[index]
        if not trains[index] and any(message.mask):
            last.append(index)
            trains[index] = True
        if trains[index] and message.above >= 0:
            trains[message.above] = True
    counters["cut_messages"] += trains.count(False)
    for index in reversed(last):
        path = []
        at = index
        while at >= 0:
            path.append(found[at])
            at = found[at].above
        ids = [id for message in reversed(path) for id in message.ids]
        yield Thread(ids, [bit for message in reversed(path) for bit in message.mask], found[index].message)


def _encoded(tree: Message, encode: Encode) -> Iterator[_Encoded]:
    """Give the messages of a tree, each behind the one that it replies to."""
    waiting: list[tuple[Message, int]] = [(tree.get("prompt", tree), -1)]
    number = 0
    while waiting:
        message, above = waiting.pop()
        ids, mask = encode(message)
        if len(ids) != len(mask):
            raise ValueError(f"encode gave {len(ids)} ids and a mask of {len(mask)} for {dict(message)!r:.200}")
        yield _Encoded(ids, mask, message, above)
        waiting += [(reply, number) for reply in reversed(message.get("replies") or ())]
        number += 1
