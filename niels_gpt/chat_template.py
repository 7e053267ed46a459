"""Chats as ids (PR-01): every message is its role's sentinel, the content, and the end-of-turn sentinel.

<usr> hello <eot> <asst> hi <eot>
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, Protocol, TypedDict


class Message(TypedDict):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


ROLE_TO_NAME: Final[Mapping[str, str]] = {"system": "sys", "user": "usr", "assistant": "asst"}
"""Which sentinel opens a role's turn: a key of `special_token_ids`."""
UNKNOWN_ROLE: Final = "unknown_role"
_MAX_ROLES, _MAX_ROLE_CHARS = 20, 40  # that are counted by name: a role is any string of a stranger's file


class ChatTokenizer(Protocol):
    """What this module needs of a tokenizer."""

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text, without BOS or EOS."""

    def special_token_ids(self) -> dict[str, int]:
        """Return the ids of the sentinels by sys, usr, asst and eot."""


def format_chat(tokenizer: ChatTokenizer, messages: Iterable[Message]) -> list[int]:
    """Return the ids of a chat; no messages give no ids.

    Contents are taken as they are: sentinel text in one becomes a sentinel id, so guard foreign chats first.
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
    """Return the ids of a chat and the assistant's sentinel, after which a model writes its reply. As format_chat."""
    return [*format_chat(tokenizer, messages), tokenizer.special_token_ids()["asst"]]


def extract_assistant_reply(tokenizer: ChatTokenizer, ids: Sequence[int]) -> list[int]:
    """Return what follows the last assistant sentinel, up to the next end of turn or else to the end.

    Without an assistant sentinel there is no reply: [].
    """
    special = tokenizer.special_token_ids()
    values = [int(token) for token in ids]  # tensors and arrays compare by value only as plain ints
    if special["asst"] not in values:
        return []
    start = len(values) - values[::-1].index(special["asst"])
    end = values.index(special["eot"], start) if special["eot"] in values[start:] else len(values)
    return values[start:end]


def count_role(counters: Counter[str], role: str) -> None:
    """Count a chat that is left out for a role under the role's name, as `unknown_role:tool`.

    Of a role the first 40 characters count; of roles beyond the first 20 all are counted as `unknown_role:others`.
    """
    shown = role[:_MAX_ROLE_CHARS].encode("utf-8", "backslashreplace").decode()  # meta.json holds no lone surrogate
    name = f"{UNKNOWN_ROLE}:{shown}"
    known = name in counters or len(roles_counted(counters)) < _MAX_ROLES
    counters[name if known else f"{UNKNOWN_ROLE}:others"] += 1


def roles_counted(counts: Mapping[str, int]) -> dict[str, int]:
    """Return those of some counts that `count_role` has made."""
    return {key: number for key, number in counts.items() if key.startswith(f"{UNKNOWN_ROLE}:")}


def roles_of(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the roles that `count_role` has counted: role -> chats."""
    return {key.partition(":")[2]: number for key, number in roles_counted(counts).items()}
