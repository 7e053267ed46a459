"""What loaders yield: PretrainSample, TextBlock, ChatSample, and the id that a sample has in its source (PR-02)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PretrainSample:
    """One document, or one wikitext line, as the source has it.

    `meta` has the row's small fields and "index", the row's number within its source and split.
    """

    text: str
    source: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TextBlock:
    """Consecutive documents of one file as columns, in place of a PretrainSample for each."""

    source: str
    texts: list[bytes]
    """Each document's text in valid UTF-8."""
    ids: list[str]
    """Each document's id in its source: see source_id."""
    position: dict[str, list[int]] = field(default_factory=dict)
    """Each document's position: see data.files.rows.Position; {} if nobody records it."""


@dataclass(frozen=True)
class ChatMessage:
    """One turn; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatSample:
    """One conversation, its turns in order."""

    messages: list[ChatMessage]
    source: str
    meta: dict[str, Any] = field(default_factory=dict)


def source_id(sample: PretrainSample | ChatSample) -> str:
    """Return the name by which a document or chat can be found in its source.

    The row's id; for an oasst1 thread those of the tree and the last message; the file's path, with `#` and the row's
    number if it has rows; otherwise the row's number within its source and split.
    """
    meta = sample.meta
    if meta.get("id") is not None:
        return str(meta["id"])
    if isinstance(meta.get("message_ids"), list) and meta["message_ids"]:
        return f"{meta.get('message_tree_id')}/{meta['message_ids'][-1]}"
    if "path" in meta:
        return f"{meta['path']}#{meta['row']}" if "row" in meta else str(meta["path"])
    return str(meta.get("index"))
