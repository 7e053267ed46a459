"""The project's chat format (PR-01): each message is its role's sentinel, the content, and the end-of-turn sentinel.

<usr> hello <eot> <asst> hi <eot>
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypedDict


class Message(TypedDict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


ROLE_TO_NAME: Final[Mapping[str, str]] = {"system": "sys", "user": "usr", "assistant": "asst"}
"""The sentinel that begins a role's message, as a key of `special_token_ids`."""
UNKNOWN_ROLE: Final = "unknown_role"
_MAX_NAMES = 20  # of one prefix: a role or a field's name is any string of an untrusted file
_NAME = re.compile(r"[\w.:/-]{1,40}")  # without spaces, which texts have


class SentinelTokenizer(Protocol):
    """The methods of a tokenizer that this module uses."""

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text, without BOS or EOS."""

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of the sentinels by sys, usr, asst and eot."""


def format_chat(tokenizer: SentinelTokenizer, messages: Iterable[Message]) -> list[int]:
    """Return the ids of a chat; without messages [].

    Sentinel text in a content becomes a sentinel id, so check untrusted chats first.
    Raises: ValueError for a role other than system, user and assistant.
    """
    special = tokenizer.special_token_ids()
    ids: list[int] = []
    for index, message in enumerate(messages):
        name = ROLE_TO_NAME.get(message["role"])
        if name is None:
            raise ValueError(f"message {index}: role {message['role']!r}, expected one of {', '.join(ROLE_TO_NAME)}")
        ids += [special[name], *tokenizer.encode(message["content"]), special["eot"]]
    return ids


def format_prompt(tokenizer: SentinelTokenizer, messages: Iterable[Message]) -> list[int]:
    """Return the ids of a chat and the assistant's sentinel, after which a model replies.

    Raises: ValueError for a role other than system, user and assistant.
    """
    return [*format_chat(tokenizer, messages), tokenizer.special_token_ids()["asst"]]


def extract_assistant_reply(tokenizer: SentinelTokenizer, ids: Sequence[int]) -> list[int]:
    """Return the ids after the last assistant sentinel, up to the next end of turn or the end; [] without one."""
    special = tokenizer.special_token_ids()
    values = [int(token) for token in ids]  # elements of tensors and arrays compare by value only as ints
    if special["asst"] not in values:
        return []
    start = len(values) - values[::-1].index(special["asst"])
    end = values.index(special["eot"], start) if special["eot"] in values[start:] else len(values)
    return values[start:end]


def is_weight(value: Any) -> bool:
    """Return whether a value may be a message's weight in the loss: 0, 1, or None, which is 1."""
    return value is None or (type(value) in (int, float) and value in (0, 1))


def count_names(counters: Counter[str], prefix: str, names: Collection[str]) -> list[str]:
    """Count each name once under a prefix, as `unknown_role:tool`; return the counted keys.

    Texts that are no names, and names after the first 20 of the prefix, count together once as `unknown_role:others`.
    """
    if not names:
        return []
    others, keys = f"{prefix}:others", dict[str, None]()
    for name in sorted(set(names)):
        key = f"{prefix}:{name}" if _NAME.fullmatch(name) else others
        if key not in counters and sum(each.startswith(f"{prefix}:") for each in {*counters, *keys}) >= _MAX_NAMES:
            key = others
        keys[key] = None
    counters.update(list(keys))
    return list(keys)


def few_names(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the summed counts of several builds with at most 20 names of each prefix: the most frequent ones. The
    counts of the other names are summed as `prefix:others`."""
    found: dict[str, int] = {}
    names = Counter[str]()
    for key, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        prefix, colon, name = key.partition(":")
        names[prefix] += bool(colon) and name != "others"
        kept = key if names[prefix] <= _MAX_NAMES else f"{prefix}:others"
        found[kept] = found.get(kept, 0) + number
    return found


def roles_counted(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the entries `unknown_role:...` of the counts."""
    return {key: number for key, number in counts.items() if key.startswith(f"{UNKNOWN_ROLE}:")}


def roles_of(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the number of chats by unknown role."""
    return {key.partition(":")[2]: number for key, number in roles_counted(counts).items()}
