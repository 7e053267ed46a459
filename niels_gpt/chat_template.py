"""Chats as ids (PR-01): every message is its role's sentinel, the content, and the end-of-turn sentinel.

<usr> hello <eot> <asst> hi <eot>
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, Protocol, TypedDict


class Message(TypedDict):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


ROLE_TO_NAME: Final[Mapping[str, str]] = {"system": "sys", "user": "usr", "assistant": "asst"}
"""Which sentinel opens a role's turn: a key of `special_token_ids`."""


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
