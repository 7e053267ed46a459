"""What the loaders yield (PR-02)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PretrainSample:
    """Hold one document, or one wikitext line, as the source gave it.

    `meta` has the row's small fields and "index", the row's number within its source and split.
    """

    text: str
    source: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatMessage:
    """Hold one turn; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatSample:
    """Hold one conversation in reading order."""

    messages: list[ChatMessage]
    source: str
    meta: dict[str, Any] = field(default_factory=dict)
