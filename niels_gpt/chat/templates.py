"""Renders chats by a template of transformers, and finds which characters of the text carry loss.

There are two ways. A template decides by itself which one is used:

    generation   It has marks: {% generation %} and {% endgeneration %}. What stands between them carries loss. The
                 template is rendered a second time with a private character at each mark; without these characters the
                 text must equal the plain rendering.
    prefix       It has no marks. A reply carries loss from the end of the rendering of the messages before it, with a
                 generation prompt, to the end of the rendering that includes the reply; white space after the token
                 that ends the turn does not. Both renderings must be prefixes of that of the whole chat, else the
                 template is refused. A reply has no loss where its header cannot be told from its words: if no message
                 stands before it, and if it is empty and a generation prompt adds nothing.

Cost: by prefixes a chat of n replies is rendered 2 n times, and n times more where a template has no generation prompt
or rewrites replies, since jinja always starts from scratch: 0.1 ms for one reply, 0.9 ms for four, 1.3 s for two
hundred. With marks it is rendered twice: 0.3 ms, 0.7 ms and 23 ms.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from niels_gpt.chat.template_code import CLOSES, DATE, OPENS, asks_for_date, has_marks, marked, two_free, unmarked
from niels_gpt.chat.template_process import PROCESS, Job, Messages, Outcome, TemplateLimitError

logger = logging.getLogger(__name__)

Spans = list[tuple[int, int]]
"""Start and end of what carries loss, in characters of a text, in order."""
Key = tuple[bool, int, bool | None]
"""Of a rendering: is it by the template without marks, of how many messages, and with a generation prompt."""
MAX_TEMPLATE = 1 << 20
"""Characters of a template, at most."""
_PROMPT = "add_generation_prompt"
_GROUP_COST = 2000  # of chats that are rendered together, in messages or thousands of characters

REFUSED_BY_TEMPLATE = "refused_by_template"
"""Counter of chats that the template raises an error for, such as two user messages in a row."""
LEADING_REPLY, EMPTY_REPLY = "leading_reply", "empty_reply"
"""Counters of chats with a reply that carries no loss, since its header cannot be told from it."""
REMEDY = (
    "Name a file with a template that puts {% generation %} and {% endgeneration %} around the assistant's words: "
    "--chat-template FILE"
)
# Contents of the probe chats: digits, since case filters keep them and no template's own text is made of them.
_WORDS = {"system": "40317 62958", "user": "71930 46258", "assistant": "58291 60374"}
_PROBES = {
    "a probe chat of two turns": ("user", "assistant", "user", "assistant"),
    "a probe chat of two turns with a system message": ("system", "user", "assistant", "user", "assistant"),
}


class RefusedChat(NamedTuple):
    """A chat that cannot be used."""

    reason: str
    """The counter under which it is dropped."""
    found: str
    """What is wrong with it, for a message."""


class Rendered(NamedTuple):
    """The text of a chat."""

    text: str
    spans: Spans
    edges: tuple[int, ...] = ()
    """Where the renderings of fewer messages end, in characters, in order; () for a template with marks."""
    unsupervised: tuple[str, ...] = ()
    """Why a reply carries no loss: LEADING_REPLY, EMPTY_REPLY."""


class _UnstableError(ValueError):
    """A template is not prefix-stable for one chat; it may be for others."""


@dataclass(frozen=True)
class ChatTemplate:
    """The template of one tokenizer."""

    name: str
    """Of the target, for messages."""
    text: str | None
    """Jinja; None where the tokenizer has none, and no chat can be rendered."""
    variables: Mapping[str, Any]
    """Variables of the template, such as bos_token."""
    ends: tuple[str, ...]
    """Literals of the tokens that may end a turn."""
    difference: Callable[[str, str], tuple[int, str, str]]
    """Takes two texts; returns the first token that differs, and the text of each from there."""
    _known: dict[Key, Outcome] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Renderings of the current chat that were made together with those of other chats."""

    def __post_init__(self) -> None:
        """Raises: ValueError for a template that is too long."""
        if self.text is not None and len(self.text) > MAX_TEMPLATE:
            long = f"has {len(self.text):,} characters, expected {MAX_TEMPLATE:,} at most"
            raise ValueError(f"{self.name}: its chat template {long}. {REMEDY}")

    @property
    def sha256(self) -> str | None:
        """Of the text; None without one."""
        return None if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def mask_by(self) -> str:
        """How the supervised tokens are found: generation, prefix, or given where there is no template."""
        return "given" if self.text is None else "generation" if has_marks(self.text) else "prefix"

    def check(self) -> None:
        """Raise ValueError if no chat can be rendered by this template; the work is done once.

        That is: there is no template; it is no jinja; it uses strftime_now for more than whether it is defined, even if
        it has a fixed date as well. With a probe chat of two turns: it writes something after the last reply that is
        absent when the chat continues (a generation prompt without being asked), writes a header that is in no
        generation prompt, or changes the text at its own marks. One that is not prefix-stable for the probe chat may
        be for the chats to come, such as chats of one turn: that is logged as a warning.
        """
        if self.text is None:
            raise ValueError(f"{self.name}: its tokenizer has no chat template. {REMEDY}")
        _ = self._checked

    @cached_property
    def _checked(self) -> None:
        import jinja2

        if asks_for_date(str(self.text)):
            raise ValueError(
                f"{self.name}: its chat template asks for the date ({DATE}), so the same chats would give other ids "
                "tomorrow. Name a file with the template and a date written out in it: --chat-template FILE"
            )
        raised = []
        for probe, roles in _PROBES.items():
            try:
                self._try(probe, [{"role": role, "content": _WORDS[role]} for role in roles])
            except _UnstableError as error:
                logger.warning("%s. The first chat that shows it ends the run", error, extra={"code": "W409"})
            except jinja2.TemplateError as error:
                raised.append(f"for {probe}: {error}")
        if len(raised) == len(_PROBES):  # a template may refuse system messages; one that refuses both is unknown
            logger.warning(
                "%s: its chat template could not be tried. It raises an error %s",
                self.name,
                raised[0],
                extra={"code": "W409"},
            )

    def _try(self, probe: str, messages: Messages) -> None:
        if self.mask_by == "generation":
            self._by_marks(probe, messages)
            return
        word = _WORDS["assistant"]
        last, inner = (self._text(messages[:end]).rpartition(word) for end in (-2, -1))
        if last[1] and not inner[2].startswith(last[2]):
            raise ValueError(
                f"{self.name}: its chat template writes {last[2][:80]!r} after a reply that ends a chat, and "
                f"{inner[2][:80]!r} where a user's message follows, so the end of a reply is not known. {REMEDY}"
            )
        self._by_prefixes(probe, messages)

    # --- rendering ---

    def rendered_all(self, chats: Sequence[tuple[str, Messages]]) -> Iterator[Rendered | RefusedChat]:
        """Yield text and spans of each chat, id and messages; RefusedChat if the template raises an error for it.

        Many chats are rendered together.
        Raises: ValueError for a template that is no jinja, is not prefix-stable, or changes the text at its marks.
        """
        for group in _groups(chats):
            known: list[dict[Key, Outcome]] = [{} for _ in group]
            for template, jobs in self._jobs([messages for _, messages in group]).items():
                outcomes = self._outcomes(template, [messages for _, messages in group], jobs)
                for (number, end, more), outcome in zip(jobs, outcomes, strict=True):
                    known[number][template == self.text, end, more.get(_PROMPT)] = outcome
            for (name, messages), outcomes_of_chat in zip(group, known, strict=True):
                self._known.clear()
                self._known.update(outcomes_of_chat)
                yield self._rendered(f"chat {name!r}", messages)
        self._known.clear()

    def _rendered(self, subject: str, messages: Messages) -> Rendered | RefusedChat:
        import jinja2

        try:
            return (self._by_marks if self.mask_by == "generation" else self._by_prefixes)(subject, messages)
        except jinja2.TemplateError as error:
            return RefusedChat(REFUSED_BY_TEMPLATE, f"{subject}: {error}")

    def _jobs(self, chats: Sequence[Messages]) -> dict[str, list[Job]]:
        """Return the renderings that these chats are likely to need, by the template to render."""
        plain: list[Job] = []
        jobs = {str(self.text): plain}
        for number, messages in enumerate(chats):
            plain.append((number, len(messages), {_PROMPT: False}))
            if self.mask_by == "generation":
                marks = dict(zip((OPENS, CLOSES), self._marks(messages), strict=True))
                jobs.setdefault(self._marked, []).append((number, len(messages), marks))
                continue
            for end in range(1, len(messages)):
                if messages[end]["role"] == "assistant":
                    plain.append((number, end, {_PROMPT: True}))
                    if end + 1 < len(messages):
                        plain.append((number, end + 1, {_PROMPT: False}))
        return jobs

    def _text(self, messages: Messages, *, prompt: bool = False) -> str:
        return self._render(str(self.text), messages, add_generation_prompt=prompt)

    def _render(self, template: str, messages: Messages, **more: Any) -> str:
        import jinja2

        known = self._known.get((template is self.text, len(messages), more.get(_PROMPT)))
        kind, text = known or self._outcomes(template, [messages], [(0, len(messages), more)])[0]
        if kind == "text":
            return text
        if kind == "syntax":
            raise ValueError(f"{self.name}: its chat template is no jinja, {text}")
        if kind == "long":
            raise ValueError(f"{self.name}: its chat template makes {text} characters of one chat. {REMEDY}")
        raise jinja2.TemplateRuntimeError(text)

    def _outcomes(self, template: str, chats: Sequence[Messages], jobs: Sequence[Job]) -> list[Outcome]:
        try:
            return PROCESS.render(template, self.variables, chats, jobs)
        except TemplateLimitError as error:
            raise ValueError(f"{self.name}: its chat template {error}. {REMEDY}") from None

    # --- with marks ---

    @cached_property
    def _marked(self) -> str:
        return marked(str(self.text))

    def _marks(self, messages: Messages) -> tuple[str, str]:
        return two_free([str(self.text), *(message["content"] for message in messages)])

    def _by_marks(self, subject: str, messages: Messages) -> Rendered:
        # The mask of transformers is not used: it assumes that a marked text follows the text before its outermost
        # block, so marks within a macro, a {% set %} or a {% filter %} give other characters than they enclose.
        import jinja2

        whole, marks = self._text(messages), self._marks(messages)
        try:
            found = unmarked(self._render(self._marked, messages, **{OPENS: marks[0], CLOSES: marks[1]}), marks)
        except jinja2.TemplateError:  # due to the marks alone: the plain rendering succeeded
            found = None
        if found is None or found[0] != whole:
            raise ValueError(
                f"{self.name}: its chat template works on text that holds its own marks (by a filter, or a mark within "
                f"another one), so the assistant's tokens are not known. In {subject} the text with marks, "
                f"without the marks, is not the plain text. Put {{% generation %}} only around text that is written "
                "unchanged: --chat-template FILE"
            )
        return Rendered(whole, found[1])

    # --- by prefixes ---

    def _by_prefixes(self, subject: str, messages: Messages) -> Rendered:
        whole = self._text(messages)
        spans: Spans = []
        edges: list[int] = []
        unsupervised: set[str] = set()
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:  # the rendering of no messages need be no prefix of a chat, or may be an error
                unsupervised.add(LEADING_REPLY)
                continue
            before = self._text(messages[:number], prompt=True)
            after = whole if number + 1 == len(messages) else self._text(messages[: number + 1])
            of_before, of_after = (
                f"of messages 1 to {number} with a generation prompt",
                f"of messages 1 to {number + 1}",
            )
            self._check_prefix(subject, before, of_before, after, of_after)
            self._check_prefix(subject, after, of_after, whole, f"of all {len(messages)}")
            if spans and len(before) < spans[-1][1]:
                raise self._unstable(subject, f"the rendering {of_before} is shorter than that of fewer messages")
            edges += [len(before), len(after)]
            reply = after[len(before) :]
            if self._starts_with_words(subject, messages[:number], before, reply, message["content"].strip()):
                # After the token that ends a turn a template may write white space, which the target never has to.
                spoken = reply.rstrip()
                spans.append((len(before), len(before) + len(spoken if spoken.endswith(self.ends) else reply)))
            else:
                unsupervised.add(EMPTY_REPLY)
        return Rendered(whole, spans, tuple(edges), tuple(sorted(unsupervised)))

    def _starts_with_words(self, subject: str, earlier: Messages, before: str, reply: str, words: str) -> bool:
        """Whether the assistant's words start where `reply` does; False for an empty reply if that is not known.

        Raises: ValueError if a generation prompt adds nothing and something stands before the words.
        """
        if words and reply.lstrip().startswith(words):
            return True
        if not self._text(earlier).startswith(before):
            return True  # a generation prompt holds the header, so what follows it is the assistant's
        if words:
            raise ValueError(
                f"{self.name}: its chat template does not tell where a reply begins. In {subject} a generation prompt "
                f"adds nothing to the messages before it, and the reply after them is {reply[:40]!r}, which does not "
                f"begin with its text. {REMEDY}"
            )
        return False

    def _check_prefix(self, subject: str, text: str, what: str, longer: str, what_longer: str) -> None:
        if longer.startswith(text):
            return
        at, one, other = self.difference(text, longer)
        found = f"the rendering {what} continues at token {at} with {one!r}, and that {what_longer} with {other!r}"
        raise self._unstable(subject, found)

    def _unstable(self, subject: str, found: str) -> _UnstableError:
        return _UnstableError(
            f"{self.name}: its chat template is not prefix-stable, so the assistant's tokens are not known. "
            f"In {subject} {found}. {REMEDY}"
        )


def _groups(chats: Sequence[tuple[str, Messages]]) -> Iterator[list[tuple[str, Messages]]]:
    """Yield the chats in order, in groups that take a second or so to render."""
    group: list[tuple[str, Messages]] = []
    cost = 0
    for chat in chats:
        messages = chat[1]
        cost += 1 + len(messages) * (len(messages) + sum(len(message["content"]) for message in messages) // 1000)
        group.append(chat)
        if cost > _GROUP_COST:
            yield group
            group, cost = [], 0
    if group:
        yield group
