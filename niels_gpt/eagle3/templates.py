"""A chat template of transformers: a chat -> its text, and which characters of it are the assistant's.

Two ways, in this order:

    generation   what the template puts between {% generation %} and {% endgeneration %}
    prefix       what the rendering of the messages up to a reply has more than that of the messages before it with a
                 generation prompt, but for the white space that a template may put behind the token that ends the turn.
                 Both must be beginnings of the rendering of the whole chat, or the template is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

Spans = list[tuple[int, int]]
"""Start and end of what carries loss, in characters of a text, in order."""
Turns = Sequence[Mapping[str, str]]

REFUSED_BY_TEMPLATE = "refused_by_template"
"""Counter of chats that the template raises an error for, such as two turns of a user in a row."""
REMEDY = (
    "Name a file with a template that puts {% generation %} and {% endgeneration %} around the assistant's words: "
    "--chat-template FILE"
)
_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_DATE = "strftime_now"  # what a template asks for the date with


class RefusedChat(NamedTuple):
    """A chat that cannot be used."""

    reason: str
    """The counter under which it is dropped."""
    found: str
    """What was found, for a message."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template of one tokenizer."""

    name: str
    """Of the target, for messages."""
    text: str | None
    """Jinja; None where the tokenizer has none, and no chat can be rendered."""
    variables: Mapping[str, Any]
    """What the template can use by name, such as bos_token."""
    ends: tuple[str, ...]
    """Literals of the tokens that may end a turn."""
    difference: Callable[[str, str], tuple[int, str, str]]
    """Of two texts: the first token that is not the same in both, and what each has from there."""

    @property
    def sha256(self) -> str | None:
        """Of the text; None without one."""
        return None if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def mask_by(self) -> str:
        """How the supervised tokens are found: generation, prefix, or given where there is no template."""
        return "given" if self.text is None else "generation" if _MARKS.search(self.text) else "prefix"

    def check(self) -> None:
        """Raise ValueError for no template, and for one that asks for the date."""
        if self.text is None:
            raise ValueError(f"{self.name}: its tokenizer has no chat template. {REMEDY}")
        if _DATE in self.text:
            raise ValueError(
                f"{self.name}: its chat template asks for the date ({_DATE}), so the same chats would give other ids "
                "tomorrow. Name a file with the template and a date written out in it: --chat-template FILE"
            )

    def rendered(self, chat: str, turns: Turns) -> tuple[str, Spans] | RefusedChat:
        """Return the text of a chat and its spans; RefusedChat for one that the template raises an error for.

        chat: its id, for messages.
        Raises: ValueError for a template that is no jinja, or is not prefix-stable.
        """
        import jinja2

        try:
            if self.mask_by == "generation":
                texts, spans = self._render(turns, return_assistant_tokens_mask=True)
                return texts[0], spans[0]
            return self._by_prefixes(chat, turns)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{self.name}: its chat template is no jinja, line {error.lineno}: {error}") from error
        except jinja2.TemplateError as error:
            return RefusedChat(REFUSED_BY_TEMPLATE, f"chat {chat!r}: {error}")

    def _render(self, turns: Turns, **how: bool) -> tuple[list[str], list[Spans]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        # Not apply_chat_template: where white space is dropped at a mark, its mask runs on to the end of the chat.
        options: Any = {**self.variables, **how}
        found: Any = render_jinja_template(
            conversations=[[dict(turn) for turn in turns]], chat_template=self.text, **options
        )
        return found[0], found[1]

    def _text(self, turns: Turns, *, prompt: bool = False) -> str:
        return self._render(turns, add_generation_prompt=prompt)[0][0]

    def _by_prefixes(self, chat: str, turns: Turns) -> tuple[str, Spans]:
        whole = self._text(turns)
        spans: Spans = []
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            before = self._text(turns[:number], prompt=True)
            after = whole if number + 1 == len(turns) else self._text(turns[: number + 1])
            what = f"of messages 1 to {number} with a generation prompt" if number else "of a generation prompt"
            self._check_beginning(chat, before, what, after, f"of messages 1 to {number + 1}")
            self._check_beginning(chat, after, f"of messages 1 to {number + 1}", whole, f"of all {len(turns)}")
            if spans and len(before) < spans[-1][1]:
                raise self._unstable(chat, f"the rendering {what} is shorter than that of fewer messages")
            reply = after[len(before) :]
            if not reply.lstrip().startswith(turn["content"].strip()):
                self._check_header(chat, turns[:number], before, whole)
            spans.append((len(before), len(before) + self._spoken(reply)))
        return whole, spans

    def _spoken(self, reply: str) -> int:
        # Behind the token that ends a turn a template may put a line end, which the target never has to write.
        spoken = reply.rstrip()
        return len(spoken) if spoken.endswith(self.ends) else len(reply)

    def _check_beginning(self, chat: str, text: str, what: str, longer: str, what_longer: str) -> None:
        if longer.startswith(text):
            return
        at, some, more = self.difference(text, longer)
        found = f"at token {at} the rendering {what} goes on with {some!r}, and that {what_longer} with {more!r}"
        raise self._unstable(chat, found)

    def _check_header(self, chat: str, earlier: Turns, before: str, whole: str) -> None:
        """Refuse a template that knows no generation prompt but writes something in front of the assistant's words."""
        if self._text(earlier).startswith(before):
            found = "a generation prompt adds nothing to the messages before it, and the reply after them is"
            shown = f"{whole[len(before) :][:40]!r}, which does not begin with its text"
            raise self._unstable(chat, f"{found} {shown}")

    def _unstable(self, chat: str, found: str) -> ValueError:
        return ValueError(
            f"{self.name}: its chat template is not prefix-stable, so which tokens are the assistant's cannot be told. "
            f"Chat {chat!r}: {found}. {REMEDY}"
        )
