"""Chats as ids (PR-01): every message is its role's sentinel, the content, and the end-of-turn sentinel.

<usr> hello <eot> <asst> hi <eot>
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, Protocol, TypedDict


class Message(TypedDict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


ROLE_TO_NAME: Final[Mapping[str, str]] = {"system": "sys", "user": "usr", "assistant": "asst"}
"""The sentinel that begins a role's message, as a key of `special_token_ids`."""
UNKNOWN_ROLE: Final = "unknown_role"
_MAX_ROLES = 20  # counted by name: a role is any string of an untrusted file
_ROLE = re.compile(r"[\w .:/-]{1,40}")
OTHERS: Final = f"{UNKNOWN_ROLE}:others"


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


def count_role(counters: Counter[str], role: str) -> str:
    """Count a chat that is dropped because of a role, under the role's name, as `unknown_role:tool`; returns the name.

    What is no name of a role, as a text in its place, and roles after the first 20, count as `unknown_role:others`.
    """
    name = f"{UNKNOWN_ROLE}:{role}" if _ROLE.fullmatch(role) else OTHERS
    if name not in counters and len(roles_counted(counters)) >= _MAX_ROLES:
        name = OTHERS
    counters[name] += 1
    return name


def roles_counted(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of `count_role` among others."""
    return {key: number for key, number in counts.items() if key.startswith(f"{UNKNOWN_ROLE}:")}


def roles_of(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the roles counted by `count_role`: role -> chats."""
    return {key.partition(":")[2]: number for key, number in roles_counted(counts).items()}
