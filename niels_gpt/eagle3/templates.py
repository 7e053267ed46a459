"""A chat template of transformers: a chat -> its text, and which characters of it are the assistant's.

Two ways, in this order:

    generation   what the template puts between {% generation %} and {% endgeneration %}: it is rendered a second time
                 with a private character at each of these, and without them that must be the plain rendering
    prefix       what the rendering of the messages up to a reply has more than that of the messages before it with a
                 generation prompt, but for the white space that a template may put behind the token that ends the turn.
                 Both must be beginnings of the rendering of the whole chat, or the template is refused. A reply is
                 left without loss where its header cannot be told from it: with no message before it, and where it is
                 empty and a generation prompt adds nothing.

By prefixes a chat of n replies is rendered 2 n times, and n times more where no generation prompt stands in front of
them or the template rewrites them: 0.1 ms for one reply, 0.9 ms for four, 1.3 s for two hundred, since jinja cannot go
on with what it rendered before. With marks it is rendered twice: 0.3 ms, 0.7 ms and 23 ms.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from niels_gpt.eagle3.template_code import CLOSES, DATE, OPENS, asks_for_date, has_marks, marked, two_free, unmarked
from niels_gpt.eagle3.template_process import PROCESS, Job, Outcome, TemplateLimitError

logger = logging.getLogger(__name__)

Spans = list[tuple[int, int]]
"""Start and end of what carries loss, in characters of a text, in order."""
Turns = Sequence[Mapping[str, str]]
Key = tuple[bool, int, bool | None]
"""Whether it is the template as it is, how many messages, and whether with a generation prompt; None: not said."""
MAX_TEMPLATE = 1 << 20
"""Characters of a template."""
_PROMPT = "add_generation_prompt"
_GROUP_COST = 2000  # of chats that are rendered at a time, in messages or thousands of characters

REFUSED_BY_TEMPLATE = "refused_by_template"
"""Counter of chats that the template raises an error for, such as two turns of a user in a row."""
LEADING_REPLY, EMPTY_REPLY = "leading_reply", "empty_reply"
"""Counters of chats with a reply that carries no loss, since its header cannot be told from it."""
REMEDY = (
    "Name a file with a template that puts {% generation %} and {% endgeneration %} around the assistant's words: "
    "--chat-template FILE"
)
# Digits, which no filter for upper or lower case changes, and of which no template is made.
_WORDS = {"system": "40317 62958", "user": "71930 46258", "assistant": "58291 60374"}
_OPENED = ("user", "assistant", "user")
_PROBES = {
    "a probe chat of two turns": (*_OPENED, "assistant"),
    "a probe chat of two turns with a system message": ("system", *_OPENED, "assistant"),
}


class RefusedChat(NamedTuple):
    """A chat that cannot be used."""

    reason: str
    """The counter under which it is dropped."""
    found: str
    """What was found, for a message."""


class Rendered(NamedTuple):
    """The text of a chat."""

    text: str
    spans: Spans
    edges: tuple[int, ...] = ()
    """Where the renderings of fewer messages end, in characters, in order; none of them where there are marks."""
    unsupervised: tuple[str, ...] = ()
    """Why a reply carries no loss: LEADING_REPLY, EMPTY_REPLY."""


def _groups(chats: Sequence[tuple[str, Turns]]) -> Iterator[list[tuple[str, Turns]]]:
    """Yield the chats in order, as many at a time as take a second or so."""
    group: list[tuple[str, Turns]] = []
    cost = 0
    for chat in chats:
        turns = chat[1]
        cost += 1 + len(turns) * (len(turns) + sum(len(turn["content"]) for turn in turns) // 1000)
        group.append(chat)
        if cost > _GROUP_COST:
            yield group
            group, cost = [], 0
    if group:
        yield group


class _UnstableError(ValueError):
    """A template that is not prefix-stable for one chat, and may be so for others."""


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
    _ahead: dict[Key, Outcome] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was rendered already of the chat in work."""

    def __post_init__(self) -> None:
        """Raises: ValueError for a template that is too long to be one."""
        if self.text is not None and len(self.text) > MAX_TEMPLATE:
            raise ValueError(
                f"{self.name}: its chat template has {len(self.text):,} characters, expected {MAX_TEMPLATE:,} at most. "
                f"{REMEDY}"
            )

    @property
    def sha256(self) -> str | None:
        """Of the text; None without one."""
        return None if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def mask_by(self) -> str:
        """How the supervised tokens are found: generation, prefix, or given where there is no template."""
        return "given" if self.text is None else "generation" if has_marks(self.text) else "prefix"

    def check(self) -> None:
        """Raise ValueError for a template that can be used for no chat; it is looked at once.

        That is none at all; no jinja; one that uses strftime_now for more than whether it is defined, even where a
        fixed date stands in for it; and one that, tried with a chat of two turns, writes something behind the last
        reply that is not there when the chat goes on (a generation prompt that was not asked for), writes a header
        that no generation prompt has, or changes the text at its own marks. One that is not prefix-stable for this
        chat may yet be so for those that come, such as chats of one turn: that is logged as a warning.
        """
        if self.text is None:
            raise ValueError(f"{self.name}: its tokenizer has no chat template. {REMEDY}")
        _ = self._tried

    @cached_property
    def _tried(self) -> None:
        import jinja2

        assert self.text is not None
        if asks_for_date(self.text):
            raise ValueError(
                f"{self.name}: its chat template asks for the date ({DATE}), so the same chats would give other ids "
                "tomorrow. Name a file with the template and a date written out in it: --chat-template FILE"
            )
        raised = []
        for probe, roles in _PROBES.items():
            try:
                self._try(probe, [{"role": role, "content": _WORDS[role]} for role in roles])
            except _UnstableError as error:
                logger.warning("%s. The first chat that shows it ends the run", error)
            except jinja2.TemplateError as error:
                raised.append(f"for {probe}: {error}")
        if len(raised) == len(_PROBES):  # one of the two is a matter of chats with a system message
            logger.warning("%s: its chat template could not be tried. It raises an error %s", self.name, raised[0])

    def _try(self, probe: str, turns: Turns) -> None:
        if self.mask_by == "generation":
            self._by_marks(probe, turns)
            return
        word = _WORDS["assistant"]
        last, goes_on = (self._text(turns[:end]).rpartition(word) for end in (-2, -1))
        if last[1] and not goes_on[2].startswith(last[2]):
            raise ValueError(
                f"{self.name}: its chat template writes {last[2][:80]!r} behind a reply that ends a chat, and "
                f"{goes_on[2][:80]!r} where a user's turn follows, so where a reply ends cannot be told. {REMEDY}"
            )
        self._by_prefixes(probe, turns)

    def rendered(self, chat: str, turns: Turns) -> Rendered | RefusedChat:
        """Return the text of a chat and its spans; RefusedChat for one that the template raises an error for.

        chat: its id, for messages.
        Raises: ValueError for a template that is no jinja, is not prefix-stable, or changes the text at its marks.
        """
        import jinja2

        subject = f"chat {chat!r}"
        try:
            return (self._by_marks if self.mask_by == "generation" else self._by_prefixes)(subject, turns)
        except jinja2.TemplateError as error:
            return RefusedChat(REFUSED_BY_TEMPLATE, f"{subject}: {error}")

    def _text(self, turns: Turns, *, prompt: bool = False) -> str:
        assert self.text is not None
        return self._render(self.text, turns, add_generation_prompt=prompt)

    def _render(self, template: str, turns: Turns, **more: Any) -> str:
        import jinja2

        key = (template is self.text, len(turns), more.get(_PROMPT))
        known = self._ahead.get(key)
        kind, said = known or self._asked(template, [turns], [(0, len(turns), more)])[0]
        if kind == "text":
            return said
        if kind == "syntax":
            raise ValueError(f"{self.name}: its chat template is no jinja, {said}")
        if kind == "long":
            raise ValueError(f"{self.name}: its chat template makes {said} characters of one chat. {REMEDY}")
        raise jinja2.TemplateRuntimeError(said)

    def _asked(self, template: str, chats: Sequence[Turns], jobs: Sequence[Job]) -> list[Outcome]:
        try:
            return PROCESS.render(template, self.variables, chats, jobs)
        except TemplateLimitError as error:
            raise ValueError(f"{self.name}: its chat template {error}. {REMEDY}") from None

    def rendered_all(self, chats: Sequence[tuple[str, Turns]]) -> Iterator[Rendered | RefusedChat]:
        """Yield what `rendered` returns of each chat, id and messages; they are rendered many at a time."""
        for group in _groups(chats):
            ahead: list[dict[Key, Outcome]] = [{} for _ in group]
            for template, jobs in self._jobs([turns for _, turns in group]).items():
                outcomes = self._asked(template, [turns for _, turns in group], jobs)
                for (number, end, more), outcome in zip(jobs, outcomes, strict=True):
                    ahead[number][template == self.text, end, more.get(_PROMPT)] = outcome
            for (name, turns), known in zip(group, ahead, strict=True):
                self._ahead.clear()
                self._ahead.update(known)
                yield self.rendered(name, turns)
        self._ahead.clear()

    def _jobs(self, chats: Sequence[Turns]) -> dict[str, list[Job]]:
        """Return what all of these chats are going to need, by the template that it is made with."""
        plain: list[Job] = []
        found = {str(self.text): plain}
        for number, turns in enumerate(chats):
            plain.append((number, len(turns), {_PROMPT: False}))
            if self.mask_by == "generation":
                marks = dict(zip((OPENS, CLOSES), self._marks(turns), strict=True))
                found.setdefault(self._marked, []).append((number, len(turns), marks))
                continue
            for end in range(1, len(turns)):
                if turns[end]["role"] == "assistant":
                    plain.append((number, end, {_PROMPT: True}))
                    if end + 1 < len(turns):
                        plain.append((number, end + 1, {_PROMPT: False}))
        return found

    def _marks(self, turns: Turns) -> tuple[str, str]:
        return two_free([str(self.text), *(turn["content"] for turn in turns)])

    def _by_marks(self, subject: str, turns: Turns) -> Rendered:
        # Not the mask of transformers: it takes a marked text for what follows the text before its outermost block,
        # so that marks within a macro, a {% set %} or a {% filter %} give other characters than they enclose.
        import jinja2

        whole = self._text(turns)
        marks = self._marks(turns)
        try:
            found = unmarked(self._render(self._marked, turns, **{OPENS: marks[0], CLOSES: marks[1]}), marks)
        except jinja2.TemplateError:  # of marks alone: the chat as it is was rendered
            found = None
        if found is None or found[0] != whole:
            raise ValueError(
                f"{self.name}: its chat template works on text that holds its own marks (by a filter, or a mark within "
                f"another one), so which tokens are the assistant's cannot be told. In {subject} the text with marks, "
                f"less the marks, is not the text without them. Put {{% generation %}} around nothing but what is "
                "written as it is: --chat-template FILE"
            )
        return Rendered(whole, found[1])

    @cached_property
    def _marked(self) -> str:
        return marked(str(self.text))

    def _by_prefixes(self, subject: str, turns: Turns) -> Rendered:
        whole = self._text(turns)
        spans: Spans = []
        edges: list[int] = []
        unsupervised: set[str] = set()
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            if number == 0:  # what a template makes of no messages need be no beginning of a chat, or is an error
                unsupervised.add(LEADING_REPLY)
                continue
            before = self._text(turns[:number], prompt=True)
            after = whole if number + 1 == len(turns) else self._text(turns[: number + 1])
            what = f"of messages 1 to {number} with a generation prompt"
            self._check_beginning(subject, before, what, after, f"of messages 1 to {number + 1}")
            self._check_beginning(subject, after, f"of messages 1 to {number + 1}", whole, f"of all {len(turns)}")
            if spans and len(before) < spans[-1][1]:
                raise self._unstable(subject, f"the rendering {what} is shorter than that of fewer messages")
            edges += [len(before), len(after)]
            reply = after[len(before) :]
            if self._begins(subject, turns[:number], before, reply, turn["content"].strip()):
                spans.append((len(before), len(before) + self._spoken(reply)))
            else:
                unsupervised.add(EMPTY_REPLY)
        return Rendered(whole, spans, tuple(edges), tuple(sorted(unsupervised)))

    def _begins(self, subject: str, earlier: Turns, before: str, reply: str, said: str) -> bool:
        """Whether the assistant's words begin where `reply` does; False for an empty reply if that cannot be told.

        Raises: ValueError if a generation prompt adds nothing and something stands in front of the words.
        """
        if said and reply.lstrip().startswith(said):
            return True
        if not self._text(earlier).startswith(before):
            return True  # a generation prompt has the header, and what follows it is the assistant's
        if said:
            raise ValueError(
                f"{self.name}: its chat template does not tell where a reply begins. In {subject} a generation prompt "
                f"adds nothing to the messages before it, and the reply after them is {reply[:40]!r}, which does not "
                f"begin with its text. {REMEDY}"
            )
        return False

    def _spoken(self, reply: str) -> int:
        # Behind the token that ends a turn a template may put a line end, which the target never has to write.
        spoken = reply.rstrip()
        return len(spoken) if spoken.endswith(self.ends) else len(reply)

    def _check_beginning(self, subject: str, text: str, what: str, longer: str, what_longer: str) -> None:
        if longer.startswith(text):
            return
        at, some, more = self.difference(text, longer)
        found = f"the rendering {what} goes on at token {at} with {some!r}, and that {what_longer} with {more!r}"
        raise self._unstable(subject, found)

    def _unstable(self, subject: str, found: str) -> _UnstableError:
        return _UnstableError(
            f"{self.name}: its chat template is not prefix-stable, so which tokens are the assistant's cannot be told. "
            f"In {subject} {found}. {REMEDY}"
        )
