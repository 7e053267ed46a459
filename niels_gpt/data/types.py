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


def source_id(sample: PretrainSample | ChatSample) -> str:
    """Return the name that a document or chat has in its source: where to look for it there.

    The row's own id; of an oasst1 thread, the tree's and the last message's; a file's path, with `#` and the row's
    number if it has rows; else the row's number within its source and split.
    """
    meta = sample.meta
    if meta.get("id") is not None:
        return str(meta["id"])
    if meta.get("message_ids"):
        return f"{meta.get('message_tree_id')}/{meta['message_ids'][-1]}"
    if "path" in meta:
        return f"{meta['path']}#{meta['row']}" if "row" in meta else str(meta["path"])
    return str(meta.get("index"))
