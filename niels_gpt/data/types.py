"""Samples that loaders yield (documents, chats, groups of recorded sequences), and their ids in the source (PR-02)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from niels_gpt.documents import Rollout


@dataclass(frozen=True)
class PretrainSample:
    """One document, or one wikitext line, unchanged.

    `meta` has the row's small fields and "index": the row's number within its source and split. In a partition of a
    built-in source, which does not read all rows before it, "index" is PATH#ROW.
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
    """Document ids in the source: see source_id."""
    position: dict[str, list[int]] = field(default_factory=dict)
    """A column for each key of data.reader.Position, with the position at each document; {} without a builder."""


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


@dataclass(frozen=True)
class RawChat:
    """One conversation with all fields of its row, for a chat template: any roles, calls of tools, further fields."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    """The functions that the assistant may call; None: the row states none."""
    source: str
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """The text of each message that has some: its content, or the texts of its parts end to end."""
        contents = [message.get("content") for message in self.messages]
        parts = [[part["text"] for part in each] if isinstance(each, list) else each for each in contents]
        return ["".join(each) for each in parts if isinstance(each, str | list)]


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """Recorded sequences that belong together, such as the completions of one prompt."""

    samples: list[Rollout]
    source: str
    meta: dict[str, Any] = field(default_factory=dict)
    """Has "id", the group's name, where the source names one."""


def source_id(sample: PretrainSample | ChatSample | RawChat | SequenceGroup) -> str:
    """Return the name that finds a document, chat or group in its source.

    It is the row's id; for an oasst1 thread TREE/LAST_MESSAGE; the file's path, followed by #ROW if the file has rows;
    otherwise the sample's "index".

    >>> source_id(PretrainSample("A text.", "own", {"index": 3, "path": "a.jsonl", "row": 4}))
    'a.jsonl#4'
    """
    meta = sample.meta
    if meta.get("id") is not None:
        return str(meta["id"])
    if isinstance(meta.get("message_ids"), list) and meta["message_ids"]:
        return f"{meta.get('message_tree_id')}/{meta['message_ids'][-1]}"
    if "path" in meta:
        return f"{meta['path']}#{meta['row']}" if "row" in meta else str(meta["path"])
    return str(meta.get("index"))
