"""What encodes chats, what it returns for each, and the counters of chats that are dropped or changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from niels_gpt.tokenizers.document_tokens import DocumentToken

Messages = Sequence[Mapping[str, Any]]
"""Of a chat. Each has `role`, and most have `content`; the values are those of JSON."""
SPECIAL_TEXT: Final = "special_text"
"""Counter of chats in which a text holds the literal of a special token, which would become that token's id."""
REFUSED_BY_TEMPLATE: Final = "refused_by_template"
"""Counter of chats that the template raises an error for, such as two user messages in a row."""
NOT_STABLE: Final = "not_prefix_stable"
"""Counter of chats that the template renders otherwise once further messages follow, such as one that takes the
thinking out of all turns but the last: it is not known which tokens are the assistant's."""
UNUSED_CALLS: Final = "unused_tool_calls"
"""Counter of chats in which the template leaves out a call of a tool."""
UNKNOWN_TURNS: Final = "unknown_turns"
"""Counter of chats in which it is not known which of the assistant's turns a marked part belongs to."""
NOT_AS_TEXT: Final = "content_not_as_text"
"""Counter of chats in which the template writes a list of parts, or an object, as Python would print it, or leaves out
the words of a list."""
TOO_LARGE: Final = "too_large"
"""Counter of chats whose renderings together, or one of which, have more characters than are made."""
LEADING_REPLY, EMPTY_REPLY = "leading_reply", "empty_reply"
"""Counters of chats with a reply that carries no loss, since its header cannot be told from it."""
UNUSED_TOOLS, UNUSED_REASONING = "unused_tools", "unused_reasoning"
"""Counters of chats that are kept, and in which the template leaves out all tools, or some of the reasoning."""
UNUSED_WORDS: Final = "unused_words"
"""Counter of chats that are kept, and in which the template changes or leaves out the words of a message."""
ARGUMENTS_AS_TEXT: Final = "arguments_as_text"
"""Counter of chats that are kept, and in which a call's arguments are a text of JSON that is written as a string."""
CHANGED: Final = (UNUSED_TOOLS, UNUSED_REASONING, UNUSED_WORDS, ARGUMENTS_AS_TEXT)
"""Counters of chats that are kept, of what the template does with them."""


class Chat(NamedTuple):
    """One conversation, for a chat template."""

    name: str
    """Its id in the source."""
    messages: Messages
    tools: list[Any] | None = None
    """The functions that the assistant may call, as JSON schemas; None: not stated."""


class RefusedChat(NamedTuple):
    """A chat that cannot be used."""

    reason: str
    """The counter under which it is dropped."""
    found: str
    """What is wrong with it, for a message."""


class EncodedChat(NamedTuple):
    """One chat."""

    ids: list[int]
    """Of the whole chat, neither shifted nor padded nor truncated."""
    mask: list[int]
    """1 at each id that carries loss, 0 elsewhere; as long as `ids`."""
    merged: bool = False
    """Whether a supervised token also holds characters outside of the replies."""
    unsupervised: tuple[str, ...] = ()
    """Counters of what happened to it: LEADING_REPLY, EMPTY_REPLY and those of CHANGED."""
    turns_without_loss: int = 0
    """How many turns of the assistant carry no loss by their weight, or by the choice of `loss_on`."""


class ChatTokenizer(Protocol):
    """A target's tokenizer together with its chat template."""

    name: str
    """Folder or hub id that it was opened from."""
    sha256: str
    """Of the tokenizer."""
    template_sha256: str | None
    """Of the template's text; None for the project's chat format, and where there is no template."""
    mask_by: str
    """How the supervised tokens are found: generation, prefix, sentinels, or given where there is no template."""
    loss_on: str
    """Which turns of the assistant carry loss: one of chats.LOSS_ON."""
    vocab_size: int
    """All ids are below it."""
    pad_id: int
    """The id that rows are padded with."""
    special_token_ids: list[int | None]
    """bos, eos, pad, unk."""
    names_sha256: str | None = None
    """Of the named tokens that a template may write, and of the literals that no chat may hold; None without one."""
    special_ids: frozenset[int] = frozenset()
    """Ids of the special tokens, whose literals no chat may hold."""

    start: DocumentToken | None = None
    """What begins each chat, without loss, where the template does not write it there; None: nothing."""
    usual_starts: Sequence[DocumentToken] = ()
    """What the tokenizer's own post-processor writes before a text; () for the project's chat format."""

    def missing_start(self, ids: Sequence[int]) -> list[int]:
        """Return the id of `start`, for a chat whose ids by the template do not begin with it; else []."""
        return [] if self.start is None or not ids or ids[0] == self.start.id else [self.start.id]

    def encode_chats(self, chats: Sequence[Chat]) -> Iterable[EncodedChat | RefusedChat]:
        """Encode chats together, as they are asked for.

        Raises: ValueError for a template that cannot be used; as far as that is known without a chat, at once.
        """

    def plain_ids(self, chats: Sequence[Chat], *, prompt: bool) -> list[list[int] | RefusedChat]:
        """Return the ids of chats without a mask, so a template need not be prefix-stable.

        prompt: with a generation prompt, after which the assistant's next turn follows.
        Raises: ValueError as `encode_chats`.
        """

    def turn_ends(self) -> tuple[int, ...]:
        """Return the ids that end a turn of the assistant: of the template's token, and EOS; () if not known."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""

    def encode_chat(self, messages: Messages, tools: list[Any] | None = None) -> tuple[list[int], list[int]]:
        """Return ids and mask of one chat. Raises: ValueError for a chat or a template that cannot be used."""
        (encoded,) = self.encode_chats([Chat("0", messages, tools)])
        if isinstance(encoded, RefusedChat):
            raise ValueError(f"{self.name}: {encoded.reason}: {encoded.found}")
        return encoded.ids, encoded.mask
