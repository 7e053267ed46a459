"""A chat, the ids and mask that it becomes, what encodes it, and the counters of chats that are dropped or changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from niels_gpt.tokenizers.document_tokens import DocumentToken

Messages = Sequence[Mapping[str, Any]]
"""The messages of a chat: each has `role`, most have `content`, and all values are JSON values."""

# --- counters of dropped chats ---

SPECIAL_TEXT: Final = "special_text"
"""A text holds the literal of a special token, which the tokenizer would turn into that token's id."""
REFUSED_BY_TEMPLATE: Final = "refused_by_template"
"""The template raises an error, for example for two user messages in a row."""
NOT_STABLE: Final = "not_prefix_stable"
"""The template changes earlier text when messages follow, for example by removing the thinking from all turns but the
last. Which tokens are the assistant's is then unknown."""
UNUSED_CALLS: Final = "unused_tool_calls"
"""The template leaves out a tool call."""
UNKNOWN_TURNS: Final = "unknown_turns"
"""It is unknown which of the assistant's turns a marked part belongs to."""
NOT_AS_TEXT: Final = "content_not_as_text"
"""The template writes a list of parts, or an object, in Python's notation, or leaves out the words of a list."""
UNUSABLE_VALUE: Final = "unusable_value"
"""A value is no JSON value, such as NaN, or there are too many or too deep ones."""
TOO_LARGE: Final = "too_large"
"""One rendering of the chat, or all together, would have more characters than the limit."""

# --- counters of kept chats ---

LEADING_REPLY, EMPTY_REPLY = "leading_reply", "empty_reply"
"""A reply at the start of the chat, or an empty one, carries no loss, since it cannot be told from its header."""
UNUSED_TOOLS, UNUSED_REASONING = "unused_tools", "unused_reasoning"
"""The template leaves out all tools, or some of the reasoning."""
UNUSED_WORDS: Final = "unused_words"
"""The template changes or leaves out the words of a message."""
ARGUMENTS_AS_TEXT: Final = "arguments_as_text"
"""The arguments of a call are JSON in a string, which the template writes as a quoted string."""
CHANGED: Final = (UNUSED_TOOLS, UNUSED_REASONING, UNUSED_WORDS, ARGUMENTS_AS_TEXT)
"""The template changes or leaves out a part of the chat."""


class Chat(NamedTuple):
    """One conversation, for a chat template."""

    name: str
    """Its id in the source."""
    messages: Messages
    tools: list[Any] | None = None
    """JSON schemas of the functions that the assistant may call; None if the source has no such field."""


class RefusedChat(NamedTuple):
    """A chat that cannot be used."""

    reason: str
    """The counter under which it is dropped."""
    found: str
    """The problem, for a message."""


class EncodedChat(NamedTuple):
    """The ids of one chat and their loss mask."""

    ids: list[int]
    """The whole chat: not shifted, padded or truncated."""
    mask: list[int]
    """1 at each id that carries loss, 0 elsewhere; as long as `ids`."""
    merged: bool = False
    """Whether a supervised token also holds characters outside of the replies."""
    unsupervised: tuple[str, ...] = ()
    """Counters: LEADING_REPLY, EMPTY_REPLY and members of CHANGED."""
    turns_without_loss: int = 0
    """How many of the assistant's turns carry no loss by their weight or by `loss_on`."""


class ChatTokenizer(Protocol):
    """A target's tokenizer together with its chat template."""

    name: str
    """Folder or hub id that it was opened from."""
    sha256: str
    """Hex sha256 of the tokenizer."""
    template_sha256: str | None
    """Hex sha256 of the template's text; None for the project's chat format, and without a template."""
    mask_by: str
    """How supervised tokens are found: generation, prefix, sentinels; given if there is no template."""
    loss_on: str
    """Which of the assistant's turns carry loss: a member of LOSS_ON (chats.py)."""
    vocab_size: int
    """All ids are below it."""
    pad_id: int
    """The id that pads rows."""
    special_token_ids: list[int | None]
    """The ids of bos, eos, pad and unk; None for an absent one."""
    names_sha256: str | None = None
    """Hex sha256 of the template's named tokens and of the literals no chat may hold; None without a template."""
    special_ids: frozenset[int] = frozenset()
    """Ids of the special tokens; no chat may hold their literals."""

    start: DocumentToken | None = None
    """A token to put before each chat, without loss, unless the template writes it there; None: no token."""
    usual_starts: Sequence[DocumentToken] = ()
    """The tokens that the tokenizer's own post-processor writes before a text; () for the project's chat format."""

    def missing_start(self, ids: Sequence[int]) -> list[int]:
        """Return [id of `start`] for ids that do not begin with it, else []."""
        return [] if self.start is None or not ids or ids[0] == self.start.id else [self.start.id]

    def encode_chats(self, chats: Sequence[Chat]) -> Iterable[EncodedChat | RefusedChat]:
        """Encode chats; many are rendered and tokenized together.

        Raises: TemplateError E407 or TokenizerError E408: at once for a template that fits no chat, during iteration
            where a chat shows that it cannot be used.
        """

    def plain_ids(self, chats: Sequence[Chat], *, prompt: bool) -> list[list[int] | RefusedChat]:
        """Return the ids of chats without a mask, so the template need not be prefix-stable.

        prompt: end each chat with a generation prompt, which the assistant's next turn follows.
        Raises: TemplateError E407 if the template cannot be used.
        """

    def turn_ends(self) -> tuple[int, ...]:
        """Return the ids that end a turn of the assistant: the template's own token, then EOS; () if unknown."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""

    def encode_chat(self, messages: Messages, tools: list[Any] | None = None) -> tuple[list[int], list[int]]:
        """Return ids and mask of one chat.

        Raises: ValueError if the chat is refused; TemplateError E407 if the template cannot be used.
        """
        (encoded,) = self.encode_chats([Chat("0", messages, tools)])
        if isinstance(encoded, RefusedChat):
            raise ValueError(f"{self.name}: {encoded.reason}: {encoded.found}")
        return encoded.ids, encoded.mask
