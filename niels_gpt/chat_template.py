"""Chats as ids (PR-01): every message is its role's sentinel, the content, and the end-of-turn sentinel.

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
_MAX_NAMES = 20  # counted under one prefix: a role or a field's name is any string of an untrusted file
_NAME = re.compile(r"[\w.:/-]{1,40}")  # without spaces, which texts have


class ChatTokenizer(Protocol):
    """The methods of a tokenizer that this module uses."""

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text, without BOS or EOS."""

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of the sentinels by sys, usr, asst and eot."""


def format_chat(tokenizer: ChatTokenizer, messages: Iterable[Message]) -> list[int]:
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


def format_prompt(tokenizer: ChatTokenizer, messages: Iterable[Message]) -> list[int]:
    """Return the ids of a chat and the assistant's sentinel, after which a model replies. Raises as `format_chat`."""
    return [*format_chat(tokenizer, messages), tokenizer.special_token_ids()["asst"]]


def extract_assistant_reply(tokenizer: ChatTokenizer, ids: Sequence[int]) -> list[int]:
    """Return the ids after the last assistant sentinel, up to the next end of turn or the end; [] if there is none."""
    special = tokenizer.special_token_ids()
    values = [int(token) for token in ids]  # elements of tensors and arrays compare by value only as ints
    if special["asst"] not in values:
        return []
    start = len(values) - values[::-1].index(special["asst"])
    end = values.index(special["eot"], start) if special["eot"] in values[start:] else len(values)
    return values[start:end]


def is_weight(value: Any) -> bool:
    """Whether a value may be a message's weight in the loss: 0, 1, or None, which is 1."""
    return value is None or (type(value) in (int, float) and value in (0, 1))


def count_names(counters: Counter[str], prefix: str, names: Collection[str]) -> list[str]:
    """Count names, each once, under a prefix, as `unknown_role:tool`; returns the keys that were counted.

    What is no name, as a text in its place, and names after the first 20 of the prefix, count once as
    `unknown_role:others`.
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
    """Return counts of several builds, added up, with no more names of a prefix than `count_names` takes: those that
    are counted most often. The others are one number, as there."""
    found: dict[str, int] = {}
    names = Counter[str]()
    for key, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        prefix, colon, name = key.partition(":")
        names[prefix] += bool(colon) and name != "others"
        kept = key if names[prefix] <= _MAX_NAMES else f"{prefix}:others"
        found[kept] = found.get(kept, 0) + number
    return found


def roles_counted(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of roles, by `count_names`, among others."""
    return {key: number for key, number in counts.items() if key.startswith(f"{UNKNOWN_ROLE}:")}


def roles_of(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the roles among the counts: role -> chats."""
    return {key.partition(":")[2]: number for key, number in roles_counted(counts).items()}
