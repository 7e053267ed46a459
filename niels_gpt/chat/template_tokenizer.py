"""Encodes chats to ids and loss mask by a chat template, with the tokenizer of transformers or of a cache.

Which roles are accepted: those that the template raises no error for; of these `assistant` carries loss. template.py
finds which characters of a chat carry loss; a token is supervised if it holds one of them, by its offsets, so a token
that merges across the edge of a reply is supervised.
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

from niels_gpt.chat.chats import UNUSABLE_VALUE, UnusableValueError, check_loss_on, lost, texts_of, usable
from niels_gpt.chat.protocol import (
    REFUSED_BY_TEMPLATE,
    SPECIAL_TEXT,
    TOO_LARGE,
    Chat,
    ChatTokenizer,
    EncodedChat,
    RefusedChat,
)
from niels_gpt.chat.rendering import PROCESS, Job, TemplateLimitError
from niels_gpt.chat.template import DATE, MAX_TEMPLATE, REMEDY, ChatTemplate, Rendered, Spans, asks_for_date
from niels_gpt.storage.errors import TemplateError, errors_as
from niels_gpt.tokenizers.document_tokens import DocumentToken

T = TypeVar("T")
Tokens = tuple[list[int], list[tuple[int, int]]]
"""Ids of a text, and start and end of each token in characters."""

_BRACKETS = "<>|[]/_ "
_USUAL_ROLES = frozenset(
    ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation", "environment")
)
_PROMPT = "add_generation_prompt"
_WORDS = "71930 46258", "58291 60374"  # of a probe chat: no template's own text is made of them
_DECODED, _SHOWN = 8, 80  # tokens whose text is shown in a message about a difference, and characters of it
_ALL_CHECKED, _CHECKED_EVERY = 1000, 100  # the chats whose prefixes are tokenized too: the first ones, then every 100th
_TOGETHER = 1 << 20  # characters that are tokenized at once: each may be a token, and one with offsets takes 230 bytes


class Backend(Protocol):
    """What a template needs of a tokenizer."""

    name: str
    """Folder or hub id, for messages."""
    sha256: str
    """Of the tokenizer."""
    template: str | None
    """Its own chat template."""
    tool_template: str
    """How to name the other one that it has for chats with tools; "": it has none."""
    variables: Mapping[str, str]
    """Of a template: bos_token and so on."""
    added_tokens: Sequence[str]
    """Literals of all added tokens."""
    special_tokens: frozenset[str]
    """Literals of those that are special, and of the variables."""
    vocab_size: int
    """All ids are below it."""
    special_token_ids: list[int | None]
    """bos, eos, pad, unk."""

    def encoded(self, texts: list[str]) -> list[Tokens]:
        """Return the tokens of each text, without BOS and EOS of a post-processor."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""


def _in_groups(items: Iterable[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in order, in groups that end when their texts have _TOGETHER characters."""
    group: list[T] = []
    num_chars = 0
    for item in items:
        group.append(item)
        num_chars += length(item)
        if num_chars >= _TOGETHER:
            yield group
            group, num_chars = [], 0
    yield group


def problem_of(template: str) -> tuple[str, str] | None:
    """Return what is wrong with a template by itself, and what is expected; None where a tokenizer is needed to know.

    That is: its length, jinja's syntax, the date, and the limits of time and memory, by a chat without messages.
    """
    if len(template) > MAX_TEMPLATE:
        return f"the chat template has {len(template):,} characters", f"{MAX_TEMPLATE:,} at most"
    try:
        ((kind, text),) = PROCESS.render(template, {}, [Chat("", [])], [(0, 0, {})])
    except TemplateLimitError as error:
        return f"the chat template {error}", "one that renders a chat without messages"
    if kind == "syntax":
        return f"the chat template is no jinja, {text}", "a chat template in jinja"
    if asks_for_date(template):
        return f"the chat template asks for the date ({DATE})", "a date written out: the ids would differ tomorrow"
    return None


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
        """template: text of a jinja template; None: the tokenizer's own, if it has one. file: its own, for messages.

        start, usual_starts: as of ChatTokenizer.

        Raises: ValueError for a template that is too long, and for another `loss_on` than those of chats.LOSS_ON.
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
        # Some templates write <| and |> around a role, so that a role may become any token of this form.
        self._inner = {literal.strip(_BRACKETS) for literal in literals}
        self.vocab_size = backend.vocab_size
        self.special_token_ids = backend.special_token_ids
        self.special_ids = frozenset(ids[0] for ids, _ in backend.encoded(literals) if len(ids) == 1)
        _, eos, pad, _ = self.special_token_ids
        self.pad_id = next(token for token in (pad, eos, 0) if token is not None)

    def encode_chats(self, chats: Sequence[Chat]) -> Iterator[EncodedChat | RefusedChat]:
        """Encode chats; one that holds a special token's literal, or that the template refuses, is refused.

        Where the template has no marks, this checks that tokenization is prefix-stable: the tokens of a chat's text up
        to each reply, and up to its end, must be the first tokens of the whole chat. The last word before the edge and
        the white space around it may differ, for they can merge with what follows. The mask does not depend on it. The
        check takes half as long as tokenizing for chats of one reply, and four times as long for four replies. So it is
        made for the first 1000 chats and then for every 100th, at the first 16 edges and the last.

        Raises: ValueError without a template; for one that `ChatTemplate` refuses; and for a tokenizer that is not
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
        """Return the ids of chats without a mask; one that `encode_chats` would refuse by its text is refused.

        Raises: ValueError for a template that `ChatTemplate` refuses.
        """
        self._template.check()
        checked = [self._checked(chat) for chat in chats]
        usable_chats = [chat for chat in checked if isinstance(chat, Chat)]
        rendered = iter(self._rendered(usable_chats, prompt))
        results: list[str | RefusedChat] = [next(rendered) if isinstance(chat, Chat) else chat for chat in checked]
        tokens = iter(self._backend.encoded([each for each in results if isinstance(each, str)]))
        found = [next(tokens)[0] if isinstance(each, str) else each for each in results]
        return [each if isinstance(each, RefusedChat) else [*self.missing_start(each), *each] for each in found]

    def turn_ends(self) -> tuple[int, ...]:
        """Return the id of the token that the template writes behind a reply, and EOS."""
        probe = Chat("", [{"role": "user", "content": _WORDS[0]}, {"role": "assistant", "content": _WORDS[1]}])
        (text,) = self._rendered([probe], prompt=False)
        behind = text.rpartition(_WORDS[1])[2].lstrip() if isinstance(text, str) and _WORDS[1] in text else ""
        literals = sorted((literal for literal in self._template.ends if behind.startswith(literal)), key=len)
        ids = [ids for ids, _ in self._backend.encoded(literals[-1:])]
        eos = self.special_token_ids[1]
        return tuple(dict.fromkeys([*(each[0] for each in ids if len(each) == 1), *([] if eos is None else [eos])]))

    def _rendered(self, chats: Sequence[Chat], prompt: bool) -> list[str | RefusedChat]:
        """Return the text of each chat, as the template renders it."""
        jobs: list[Job] = [(at, len(chat.messages), {_PROMPT: prompt}) for at, chat in enumerate(chats)]
        try:
            outcomes = list(PROCESS.render(str(self._template.text), self._template.variables, chats, jobs))
        except TemplateLimitError as error:
            raise TemplateError(f"{self.name}: its chat template {error}. {REMEDY}") from None
        results: list[str | RefusedChat] = []
        for chat, (kind, text) in zip(chats, outcomes, strict=True):
            subject = f"chat {chat.name!r}"
            if kind != "text":
                reason = TOO_LARGE if kind == "long" else REFUSED_BY_TEMPLATE
                results.append(RefusedChat(reason, f"{subject}: {text}"))
            elif (found := lost(chat.messages, text, str(self._template.text))) is not None:
                results.append(RefusedChat(found[0], f"{subject}: {found[1]}"))
            else:
                results.append(text)
        return results

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self._backend.decode(ids)

    def _checked(self, chat: Chat) -> Chat | RefusedChat:
        """Return a chat that can be rendered."""
        try:
            plain = usable(chat)
        except UnusableValueError as error:
            return RefusedChat(UNUSABLE_VALUE, f"chat {chat.name!r}: {error}")
        made = [role for role in self._roles_of(plain) if role in self._inner and role not in _USUAL_ROLES]
        if made:
            found = f"a role of chat {chat.name!r}, {made[0][:_SHOWN]!r}, may become a special token"
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

    @staticmethod
    def _roles_of(chat: Chat) -> list[str]:
        roles = (message.get("role") for message in chat.messages)
        return [role.strip() for role in roles if isinstance(role, str)]

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
            mask, merged = mask_of(offsets, each.spans)
            start = self.missing_start(ids)
            bits = [0] * len(start) + mask.astype(np.uint8).tolist()
            if number < _ALL_CHECKED or number % _CHECKED_EVERY == 0:
                self._check_prefixes(name, each, ids, offsets)
            yield EncodedChat([*start, *ids], bits, merged, each.unsupervised, each.turns_without_loss)

    def _check_prefixes(self, name: str, rendered: Rendered, ids: list[int], offsets: NDArray[np.int64]) -> None:
        text = rendered.text
        edges = checked_edges(rendered.edges, text)
        tokens = (self._backend.encoded([text[:edge] for edge in group]) for group in _in_groups(edges, int))
        for edge, (alone, _) in zip(edges, chain.from_iterable(tokens), strict=True):
            at = first_difference(ids, offsets, text, edge, alone)
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
        """Return the text of some ids for a message."""
        return self.decode(ids[at : at + _DECODED])[:_SHOWN]


_CHECKED_EDGES = 16


def mask_of(offsets: NDArray[np.int64], spans: Spans) -> tuple[NDArray[np.bool_], bool]:
    """Return which tokens hold a character of a span, bool [tokens], and whether one holds others as well.

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


def checked_edges(edges: Sequence[int], text: str) -> list[int]:
    """Return the ends of the prefixes whose tokens are compared: the first 16 and the last, without the whole text."""
    inner = [edge for edge in edges if 0 < edge < len(text)]
    return sorted({*inner[:_CHECKED_EDGES], *inner[-1:]})


def first_difference(
    ids: Sequence[int], offsets: NDArray[np.int64], text: str, edge: int, alone: Sequence[int]
) -> int | None:
    """Return the first token in which `alone`, the ids of text[:edge], is not a prefix of the text's ids, or None.

    ids, offsets: of the text, offsets as of `mask_of`.
    The last word of the prefix, with the white space around it, may have other tokens: it can merge with what follows,
    and white space at an end of a text is one token where before a word it may be two.
    """
    at = next((place for place, (one, two) in enumerate(zip(ids, alone, strict=False)) if one != two), None)
    if at is None:
        return None if len(alone) <= len(ids) else len(ids)
    words = text[:edge].rsplit(maxsplit=1)
    last_word = len(words[0].rstrip()) if len(words) > 1 else 0
    return None if offsets[at, 0] >= last_word else at
