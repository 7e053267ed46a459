"""Encode chats to ids and loss mask by a chat template, with the tokenizer of transformers or of a cache.

The template decides the roles: it raises an error for one that it does not know. `assistant` carries loss. template.py
finds the characters that carry loss. A token is supervised if it holds one of them, even if it reaches beyond the edge
of a reply.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from niels_gpt.chat.chats import UnusableValueError, check_loss_on, texts_of, usable
from niels_gpt.chat.protocol import (
    SPECIAL_TEXT,
    TOO_LARGE,
    UNUSABLE_VALUE,
    Chat,
    ChatTokenizer,
    EncodedChat,
    RefusedChat,
)
from niels_gpt.chat.template import REMEDY, ChatTemplate, Rendered, Spans
from niels_gpt.storage.errors import TemplateError, errors_as
from niels_gpt.tokenizers.document_tokens import DocumentToken

T = TypeVar("T")
Tokens = tuple[list[int], list[tuple[int, int]]]
"""The ids of a text, and start and end of each token in its characters."""

_BRACKETS = "<>|[]/_ "
_USUAL_ROLES = frozenset(
    ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation", "environment")
)
_DECODED, _SHOWN = 8, 80  # tokens, and characters of their text, in a message about a difference
_ALL_CHECKED, _CHECKED_EVERY = 1000, 100  # the first chats, and then every 100th, are checked for stable tokens
_TOGETHER = 1 << 20  # characters tokenized at once: each may be a token, and a token with offsets takes 230 bytes
_CHECKED_EDGES = 16  # prefixes of a chat that are checked, beside its longest


class Backend(Protocol):
    """The tokenizer beneath a template, of transformers or of a cache. Equal files give equal ids."""

    name: str
    """Folder or hub id, for messages."""
    sha256: str
    """Hex sha256 of the tokenizer."""
    template: str | None
    """The tokenizer's own chat template."""
    tool_template: str
    """The command or flag that selects its second template, for chats with tools; "" without one."""
    variables: Mapping[str, str]
    """The template's variables, such as bos_token."""
    added_tokens: Sequence[str]
    """Literals of all added tokens."""
    special_tokens: frozenset[str]
    """Literals of the special tokens and of the variables."""
    vocab_size: int
    """All ids are below it."""
    special_token_ids: list[int | None]
    """The ids of bos, eos, pad and unk; None for an absent one."""

    def encoded(self, texts: list[str]) -> list[Tokens]:
        """Return the tokens of each text, without the BOS and EOS of a post-processor."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""


def _in_groups(items: Iterable[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in order, in groups of at least _TOGETHER characters; the last group may be smaller or empty."""
    group: list[T] = []
    num_chars = 0
    for item in items:
        group.append(item)
        num_chars += length(item)
        if num_chars >= _TOGETHER:
            yield group
            group, num_chars = [], 0
    yield group


class TemplateTokenizer(ChatTokenizer):
    """A tokenizer of Hugging Face with a chat template."""

    def __init__(
        self,
        backend: Backend,
        template: str | None,
        *,
        loss_on: str,
        file: str | None = None,
        start: DocumentToken | None = None,
        usual_starts: Sequence[DocumentToken] = (),
    ) -> None:
        """Take a tokenizer and a template.

        template: text of a jinja template; None for the tokenizer's own, if it has one.
        file: the template's file, for messages.
        start, usual_starts: see ChatTokenizer.
        Raises: TemplateError E407 if the template is too long; ValueError E407 for an unknown `loss_on`.
        """
        with errors_as("E407", (ValueError,)):
            self.loss_on = check_loss_on(loss_on)
        self.name, self.sha256 = backend.name, backend.sha256
        self.start, self.usual_starts = start, usual_starts
        self._backend = backend
        self._num_read = 0
        self._tool_template = backend.tool_template if template is None else ""
        ends = tuple(literal for literal in backend.added_tokens if literal.strip())
        text = backend.template if template is None else template
        self._template = ChatTemplate(file or self.name, text, backend.variables, ends, self._difference, self.loss_on)
        self.template_sha256 = self._template.sha256
        self.mask_by = self._template.mask_by
        # Added tokens that are not special, such as <think>, are text that a chat may hold.
        literals = sorted(literal for literal in backend.special_tokens if literal.strip())
        names = json.dumps([sorted(backend.variables.items()), literals])
        self.names_sha256 = hashlib.sha256(names.encode()).hexdigest()
        self._literal = re.compile("|".join(map(re.escape, literals)) or r"(?!)")
        # Some templates write <| and |> around a role, so a role may become any token of this form.
        self._inner = {literal.strip(_BRACKETS) for literal in literals}
        self.vocab_size = backend.vocab_size
        self.special_token_ids = backend.special_token_ids
        self.special_ids = frozenset(ids[0] for ids, _ in backend.encoded(literals) if len(ids) == 1)
        _, eos, pad, _ = self.special_token_ids
        self.pad_id = next(token for token in (pad, eos, 0) if token is not None)

    def encode_chats(self, chats: Sequence[Chat]) -> Iterator[EncodedChat | RefusedChat]:
        """Encode chats; refuse a chat that holds a special token's literal, or on which the template fails.

        Without marks in the template, the tokenizer must be prefix-stable: the tokens of the text up to each reply, and
        up to its end, must be the first tokens of the whole chat. Only the last word before the edge and the white
        space around it may differ, since they can merge with the next text. The mask does not depend on this check. It
        tokenizes the text up to each edge again, so it is made for the first 1000 chats and then for every 100th, at
        the first 16 edges and the last.

        Raises: TemplateError E407 without a template, if the template cannot be used, or if the tokenizer is not
            prefix-stable.
        """
        self._template.check()
        first, self._num_read = self._num_read, self._num_read + len(chats)
        checked = [self._checked(chat) for chat in chats]
        rendered = self._template.rendered_all([chat for chat in checked if isinstance(chat, Chat)])
        results = (next(rendered) if isinstance(chat, Chat) else chat for chat in checked)
        named = zip(count(first), (chat.name for chat in chats), results, strict=False)
        groups = _in_groups(named, lambda each: len(each[2].text) if isinstance(each[2], Rendered) else 0)
        return chain.from_iterable(map(self._encoded, groups))

    def plain_ids(self, chats: Sequence[Chat], *, prompt: bool) -> list[list[int] | RefusedChat]:
        """Return the ids of chats without a mask; refuse a chat that holds a special token's literal."""
        self._template.check()
        checked = [self._checked(chat) for chat in chats]
        rendered = iter(self._template.texts([chat for chat in checked if isinstance(chat, Chat)], prompt=prompt))
        results: list[str | RefusedChat] = [next(rendered) if isinstance(chat, Chat) else chat for chat in checked]
        tokens = iter(self._backend.encoded([each for each in results if isinstance(each, str)]))
        found = [next(tokens)[0] if isinstance(each, str) else each for each in results]
        return [each if isinstance(each, RefusedChat) else [*self.missing_start(each), *each] for each in found]

    def turn_ends(self) -> tuple[int, ...]:
        """Return the id of the token that the template writes after a reply, then EOS."""
        end, eos = self._template.end_of_turn(), self.special_token_ids[1]
        ids = self._backend.encoded([end])[0][0] if end else []
        return tuple(dict.fromkeys([*(ids if len(ids) == 1 else []), *([] if eos is None else [eos])]))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self._backend.decode(ids)

    def _checked(self, chat: Chat) -> Chat | RefusedChat:
        """Return a copy that can be rendered, or the reason why the chat is refused."""
        try:
            plain = usable(chat)
        except UnusableValueError as error:
            return RefusedChat(UNUSABLE_VALUE, f"chat {chat.name!r}: {error}")
        for role in (message.get("role") for message in plain.messages):
            if isinstance(role, str) and (name := role.strip()) in self._inner and name not in _USUAL_ROLES:
                found = f"a role of chat {chat.name!r}, {name[:_SHOWN]!r}, may become a special token"
                return RefusedChat(SPECIAL_TEXT, found)
        if (large := self._template.too_large(plain)) is not None:
            return RefusedChat(TOO_LARGE, f"chat {chat.name!r}: {large}")
        for text in texts_of([plain.messages, plain.tools]):
            if literal := self._literal.search(text):
                found = f"a message or tool of chat {chat.name!r} holds the special token {literal.group()[:_SHOWN]}"
                return RefusedChat(SPECIAL_TEXT, found)
        if plain.tools is not None and self._tool_template:
            raise TemplateError(
                f"{self.name}: its tokenizer has two chat templates, default and, for chats with tools, tool_use, and "
                f"chat {chat.name!r} has tools. Use one for all chats, such as tool_use: {self._tool_template}"
            )
        return plain

    def _encoded(self, group: list[tuple[int, str, Rendered | RefusedChat]]) -> Iterator[EncodedChat | RefusedChat]:
        encoded = self._backend.encoded([each.text for *_, each in group if isinstance(each, Rendered)])
        # As arrays, the offsets take a ninth of the memory.
        tokens = iter([(ids, np.asarray(offsets, dtype=np.int64).reshape(-1, 2)) for ids, offsets in encoded])
        del encoded
        for number, name, each in group:
            if isinstance(each, RefusedChat):
                yield each
                continue
            ids, offsets = next(tokens)
            mask, merged = _mask_of(offsets, each.spans)
            start = self.missing_start(ids)
            bits = [0] * len(start) + mask.astype(np.uint8).tolist()
            if number < _ALL_CHECKED or number % _CHECKED_EVERY == 0:
                self._check_prefixes(name, each, ids, offsets)
            yield EncodedChat([*start, *ids], bits, merged, each.unsupervised, each.turns_without_loss)

    def _check_prefixes(self, name: str, rendered: Rendered, ids: list[int], offsets: NDArray[np.int64]) -> None:
        text = rendered.text
        edges = _checked_edges(rendered.edges, text)
        tokens = (self._backend.encoded([text[:edge] for edge in group]) for group in _in_groups(edges, int))
        for edge, (alone, _) in zip(edges, chain.from_iterable(tokens), strict=True):
            at = _first_difference(ids, offsets, text, edge, alone)
            if at is not None:
                one, all_of = (self._shown(each, at) for each in (alone, ids))
                raise TemplateError(
                    f"{self.name}: its tokenizer gives the beginning of a chat other tokens than the chat. Chat "
                    f"{name!r}, token {at}: {one!r} in its first {edge} characters alone, and {all_of!r} in all of it. "
                    f"{REMEDY}"
                )

    def _difference(self, text: str, other: str) -> tuple[int, str, str]:
        (left, _), (right, _) = (self._backend.encoded([each])[0] for each in (text, other))  # both need twice as much
        pairs = enumerate(zip(left, right, strict=False))
        at = next((place for place, (one, two) in pairs if one != two), min(len(left), len(right)))
        return at, self._shown(left, at), self._shown(right, at)

    def _shown(self, ids: Sequence[int], at: int) -> str:
        """Return the text of a few ids from `at` on, for a message."""
        return self.decode(ids[at : at + _DECODED])[:_SHOWN]


def _mask_of(offsets: NDArray[np.int64], spans: Spans) -> tuple[NDArray[np.bool_], bool]:
    """Return the tokens that hold a character of a span, bool [tokens], and whether one also holds other characters.

    offsets: int64 [tokens, 2], start and end of each token in characters of the text.
    """
    starts, ends = offsets[:, 0].copy(), offsets[:, 1]
    # Some tokenizers leave white space out of the offsets. A token of spaces alone starts where the last one ended.
    blank = np.flatnonzero(starts == ends)
    starts[blank[blank > 0]] = ends[blank[blank > 0] - 1]
    mask = np.zeros(len(offsets), dtype=np.bool_)
    merged = False
    for first, last in spans:
        inside = (starts < last) & (ends > first)
        merged = merged or bool((inside & ((starts < first) | (ends > last))).any())
        mask |= inside
    return mask, merged


def _checked_edges(edges: Sequence[int], text: str) -> list[int]:
    """Return the ends of the prefixes to compare: the first 16 and the last, without the whole text."""
    inner = [edge for edge in edges if 0 < edge < len(text)]
    return sorted({*inner[:_CHECKED_EDGES], *inner[-1:]})


def _first_difference(
    ids: Sequence[int], offsets: NDArray[np.int64], text: str, edge: int, alone: Sequence[int]
) -> int | None:
    """Return the number of the first token that differs between a text and its prefix; None if none does.

    ids, offsets: the text's tokens, offsets int64 [tokens, 2]. alone: the ids of text[:edge].
    The last word of the prefix and the white space around it may have other tokens: they can merge with the next text,
    and white space at the end of a text is one token, but before a word it may be two.
    """
    at = next((place for place, (one, two) in enumerate(zip(ids, alone, strict=False)) if one != two), None)
    if at is None:
        return None if len(alone) <= len(ids) else len(ids)
    words = text[:edge].rsplit(maxsplit=1)
    last_word = len(words[0].rstrip()) if len(words) > 1 else 0
    return None if offsets[at, 0] >= last_word else at
