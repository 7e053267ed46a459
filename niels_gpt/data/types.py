"""What loaders yield: documents, chats, groups of recorded sequences; and the id of each in its source (PR-02)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from niels_gpt.documents import Rollout


@dataclass(frozen=True)
class PretrainSample:
    """One document, or one wikitext line, as the source has it.

    `meta` has the row's small fields and "index": the row's number within its source and split, or in a partition of a
    built-in source PATH#ROW, since the rows before it are not all read.
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
    """Each document's position: see data.reader.Position; {} if nobody records it."""


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
    """One conversation as its row has it, for a chat template: any roles, calls of tools and further fields."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    """The functions that the assistant may call; None: the row states none."""
    source: str
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """The words of each message that has some: its content, or the texts of its parts end to end."""
        contents = [message.get("content") for message in self.messages]
        parts = [[part["text"] for part in each] if isinstance(each, list) else each for each in contents]
        return ["".join(each) for each in parts if isinstance(each, str | list)]


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """Recorded sequences that belong together, such as the completions of one prompt."""

    samples: list[Rollout]
    source: str
    meta: dict[str, Any] = field(default_factory=dict)
    """With "id", the group's name, if the source has one."""


def source_id(sample: PretrainSample | ChatSample | RawChat | SequenceGroup) -> str:
    """Return the name by which a document, chat or group can be found in its source.

    The row's id; for an oasst1 thread those of the tree and the last message; the file's path, with `#` and the row's
    number if it has rows; otherwise the sample's "index".
    """
    meta = sample.meta
    if meta.get("id") is not None:
        return str(meta["id"])
    if isinstance(meta.get("message_ids"), list) and meta["message_ids"]:
        return f"{meta.get('message_tree_id')}/{meta['message_ids'][-1]}"
    if "path" in meta:
        return f"{meta['path']}#{meta['row']}" if "row" in meta else str(meta["path"])
    return str(meta.get("index"))
