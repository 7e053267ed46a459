"""Render chats by a template of transformers, and find which characters of the text carry loss.

The template decides how:

    generation   It has marks, {% generation %} and {% endgeneration %}: the text between them carries loss. A second
                 rendering has a private character at each mark; without these characters it must equal the plain one.
                 If only some of the assistant's turns carry loss, a third rendering has another private character in
                 the words and calls of each turn, so that each marked part names its turn. A chat is refused if a part
                 names no turn, or two.
    prefix       It has no marks. A reply carries loss from the end of the rendering of the messages before it, with a
                 generation prompt, to the end of the rendering that includes it, without white space after the token
                 that ends the turn. Both renderings must be prefixes of the whole chat's, else the chat is refused. A
                 reply carries no loss if it is the first message, or if it is empty and the generation prompt is empty
                 too: its words then cannot be told from its header.

Cost: jinja renders from scratch, so a chat of n replies is rendered 2 n times by prefixes, and n times more if a
template has no generation prompt or rewrites replies. By marks it is rendered twice.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, groupby, islice, pairwise
from typing import Any, NamedTuple, TypeVar

from niels_gpt.chat.chats import (
    assistant_turns,
    calls_tools,
    changed,
    labelled,
    lost,
    supervised_turns,
    texts_of,
    words_of,
)
from niels_gpt.chat.protocol import (
    EMPTY_REPLY,
    LEADING_REPLY,
    NOT_STABLE,
    REFUSED_BY_TEMPLATE,
    TOO_LARGE,
    UNKNOWN_TURNS,
    Chat,
    RefusedChat,
)
from niels_gpt.chat.rendering import PROCESS, Job, Outcome, TemplateLimitError
from niels_gpt.storage.errors import TemplateError

logger = logging.getLogger(__name__)

T = TypeVar("T")

Spans = list[tuple[int, int]]
"""Start and end of each part that carries loss, in characters of a text, ascending."""
MAX_TEMPLATE = 1 << 20
"""The most characters of a template."""
MAX_RENDERED = 1 << 29
"""The most characters of a chat times the number of its renderings."""
_PER_MESSAGE = 64  # characters that cost a template as much time as a message does
_PROMPT = "add_generation_prompt"
_SHOWN = 80  # characters of a text in a message
_GROUP_COST = 2000  # messages, or thousands of characters, of the chats that are rendered together

REMEDY = (
    "Name a file with a template that puts {% generation %} and {% endgeneration %} around the assistant's words: "
    "--chat-template FILE"
)
# The probe chats' words are digits: a filter for upper or lower case keeps them, and no template writes them itself.
_WORDS = {"system": "40317 62958", "user": "71930 46258", "assistant": "58291 60374"}
_PROBES = {
    "a probe chat of two turns": ("user", "assistant", "user", "assistant"),
    "a probe chat of two turns with a system message": ("system", "user", "assistant", "user", "assistant"),
}
_DATE = "strftime_now"
"""The function that returns the date in a template."""
_OPENS, _CLOSES = "loss_begins_here", "loss_ends_here"
"""Variables that the template of `_marked` writes at the start and the end of each marked part."""
_MACRO = "words_that_carry_loss"
_MARK = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))  # private use: no text needs them


class Rendered(NamedTuple):
    """The text of a chat, and the parts of it that carry loss."""

    text: str
    spans: Spans
    edges: tuple[int, ...] = ()
    """Ends of the renderings of fewer messages, in characters, ascending; () for a template with marks."""
    unsupervised: tuple[str, ...] = ()
    """Counters: LEADING_REPLY, EMPTY_REPLY and members of CHANGED (protocol.py)."""
    turns_without_loss: int = 0
    """How many of the assistant's turns carry no loss by their weight or by `loss_on`."""


class _RefusedError(Exception):
    """One chat cannot be used; others may be."""

    def __init__(self, reason: str, found: str) -> None:
        super().__init__(found)
        self.reason = reason


@dataclass(frozen=True)
class ChatTemplate:
    """The template of one tokenizer."""

    name: str
    """The target's name, for messages."""
    text: str | None
    """Jinja; None if the tokenizer has no template, so that no chat can be rendered."""
    variables: Mapping[str, Any]
    """The template's variables, such as bos_token."""
    ends: tuple[str, ...]
    """Literals of the tokens that may end a turn."""
    difference: Callable[[str, str], tuple[int, str, str]]
    """Takes two texts; returns the number of the first token that differs, and each text from there, shortened."""
    loss_on: str = "assistant"
    """A member of LOSS_ON (chats.py)."""
    _ahead: list[Iterator[tuple[Job, Outcome]]] = field(default_factory=list, init=False, repr=False, compare=False)
    """The current chat's outcomes, rendered together with other chats, in the order in which they are used: of the
    template, and of the template with marks."""

    def __post_init__(self) -> None:
        """Raise TemplateError E407 if the template is too long."""
        if self.text is not None and len(self.text) > MAX_TEMPLATE:
            long = f"has {len(self.text):,} characters, expected {MAX_TEMPLATE:,} at most"
            raise TemplateError(f"{self.name}: its chat template {long}. {REMEDY}")

    @property
    def sha256(self) -> str | None:
        """Hex sha256 of the text; None without a template."""
        return None if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def mask_by(self) -> str:
        """How supervised tokens are found: generation or prefix; given without a template."""
        return "given" if self.text is None else "generation" if _has_marks(self.text) else "prefix"

    def check(self) -> None:
        """Try the template once, with a probe chat of two turns, and keep the result.

        A template that is not prefix-stable for the probe may be so for the real chats, such as chats of one turn: a
        warning, W409, says so.
        Raises: TemplateError E407 if there is no template, it is not jinja, it asks for the date (even if it also has a
            fixed one), it ends a chat with text that is absent when the chat continues (a generation prompt that nobody
            asked for), it writes a header that is in no generation prompt, it changes the text at its marks, or no
            character carries loss.
        """
        if self.text is None:
            raise TemplateError(f"{self.name}: its tokenizer has no chat template. {REMEDY}")
        _ = self._checked

    @cached_property
    def _checked(self) -> None:
        import jinja2

        if _asks_for_date(str(self.text)):
            raise TemplateError(
                f"{self.name}: its chat template asks for the date ({_DATE}), so the same chats would give other ids "
                "tomorrow. Name a file with the template and a date written out in it: --chat-template FILE"
            )
        raised = []
        for probe, roles in _PROBES.items():
            try:
                self._try(probe, Chat(probe, [{"role": role, "content": _WORDS[role]} for role in roles]))
            except jinja2.TemplateError as error:
                raised.append(f"for {probe}: {error}")
            except _RefusedError as error:
                if error.reason != NOT_STABLE:
                    found = f"its chat template cannot be used. In {probe} {error}"
                    raise TemplateError(f"{self.name}: {found}. {REMEDY}") from None
                logger.warning(
                    "%s: %s. An sft cache leaves out each chat that shows it, a run of eagle3 ends at the first. %s",
                    *(probe, error, REMEDY),
                    extra={"code": "W409"},
                )
        if len(raised) == len(_PROBES):  # a template may refuse system messages; one that refuses both is unknown
            logger.warning(
                "%s: its chat template could not be tried. It raises an error %s",
                self.name,
                raised[0],
                extra={"code": "W409"},
            )

    def _try(self, probe: str, chat: Chat) -> None:
        number = len(chat.messages)
        if self.mask_by == "generation":
            self._check_spans(probe, self._by_marks(probe, chat, range(number)))
            return
        word = _WORDS["assistant"]
        last, inner = (self._text(chat, end).rpartition(word) for end in (number - 2, number - 1))
        if last[1] and not inner[2].startswith(last[2]):
            raise TemplateError(
                f"{self.name}: its chat template writes {last[2][:_SHOWN]!r} after a reply that ends a chat, and "
                f"{inner[2][:_SHOWN]!r} where a user's message follows, so the end of a reply is not known. {REMEDY}"
            )
        self._check_spans(probe, self._by_prefixes(probe, chat, assistant_turns(chat.messages)))

    def _check_spans(self, probe: str, found: Rendered) -> None:
        if not any(start < end for start, end in found.spans):
            raise TemplateError(
                f"{self.name}: its chat template marks not one of the {len(found.text)} characters of {probe}. {REMEDY}"
            )

    # --- rendering ---

    def too_large(self, chat: Chat) -> str | None:
        """Return the problem of a chat with too many or too long renderings; None for any other chat."""
        size = _PER_MESSAGE * len(chat.messages) + sum(map(len, texts_of([chat.messages, chat.tools])))
        number = 3 if self.mask_by == "generation" else 1 + 2 * len(supervised_turns(chat.messages, self.loss_on))
        if size * number <= MAX_RENDERED:
            return None
        return f"it would be rendered {number:,} times, with more than {MAX_RENDERED:,} characters together"

    def rendered_all(self, chats: Sequence[Chat]) -> Iterator[Rendered | RefusedChat]:
        """Yield text and spans of each chat, or RefusedChat if the template fails on it, drops a call, or is not
        prefix-stable for it.

        chats: from `chats.usable`. Chats with short texts are rendered together.
        Raises: TemplateError E407 if the template is not jinja, exceeds a limit, or changes the text at its marks.
        """
        for group in _groups(chats):
            made = [
                groupby(zip(jobs, self._outcomes(template, group, jobs), strict=True), key=lambda pair: pair[0][0])
                for template, jobs in self._jobs(group).items()
            ]
            for chat, *by_template in zip(group, *made, strict=True):
                self._ahead[:] = [pairs for _, pairs in by_template]
                found = self._or_refused(chat, partial(self._rendered, chat))
                self._ahead.clear()
                yield found

    def texts(self, chats: Sequence[Chat], *, prompt: bool) -> list[str | RefusedChat]:
        """Return the text of each whole chat, without spans, so the template need not be prefix-stable.

        prompt: end each text with a generation prompt.
        Raises: TemplateError E407 if the template is not jinja, or exceeds a limit.
        """
        jobs: list[Job] = [(at, len(chat.messages), {_PROMPT: prompt}) for at, chat in enumerate(chats)]
        outcomes = self._outcomes(str(self.text), chats, jobs)
        return [
            self._or_refused(chat, partial(self._complete_text, chat, outcome))
            for chat, outcome in zip(chats, outcomes, strict=True)
        ]

    def end_of_turn(self) -> str:
        """Return the literal of the token that the template writes after a reply; "" if it writes none."""
        words = _WORDS["assistant"]
        probe = [{"role": role, "content": _WORDS[role]} for role in ("user", "assistant")]
        (text,) = self.texts([Chat("", probe)], prompt=False)
        if isinstance(text, RefusedChat) or words not in text:
            return ""
        behind = text.rpartition(words)[2].lstrip()
        return max((literal for literal in self.ends if behind.startswith(literal)), key=len, default="")

    def _or_refused(self, chat: Chat, make: Callable[[], T]) -> T | RefusedChat:
        import jinja2

        try:
            return make()
        except jinja2.TemplateError as error:
            return RefusedChat(REFUSED_BY_TEMPLATE, f"chat {chat.name!r}: {error}")
        except _RefusedError as error:
            return RefusedChat(error.reason, f"chat {chat.name!r}: {error}")

    def _rendered(self, chat: Chat) -> Rendered:
        wanted = supervised_turns(chat.messages, self.loss_on)
        by = self._by_marks if self.mask_by == "generation" else self._by_prefixes
        found = by(f"chat {chat.name!r}", chat, wanted)
        left_out = tuple(changed(chat, found.text, str(self.text)))
        without_loss = len(assistant_turns(chat.messages)) - len(wanted)
        return found._replace(unsupervised=(*found.unsupervised, *left_out), turns_without_loss=without_loss)

    def _complete_text(self, chat: Chat, outcome: Outcome) -> str:
        """Return the text of a whole chat. Raises: _RefusedError if the text lacks a call or distorts a content."""
        text = self._text_of(outcome)
        if (found := lost(chat.messages, text, str(self.text))) is not None:
            raise _RefusedError(*found)
        return text

    def _jobs(self, chats: Sequence[Chat]) -> dict[str, list[Job]]:
        """Return the renderings that these chats need, by the template to render, in the order of `_ahead`."""
        plain: list[Job] = []
        jobs = {str(self.text): plain, **({self._marked: []} if self.mask_by == "generation" else {})}
        for number, chat in enumerate(chats):
            length = len(chat.messages)
            plain.append((number, length, {_PROMPT: False}))
            if self.mask_by == "generation":
                jobs[self._marked].append((number, length, _mark_variables(self._characters(chat, 2) or ["", ""])))
                continue
            for end in supervised_turns(chat.messages, self.loss_on):
                if end:
                    plain.append((number, end, {_PROMPT: True}))
                    if end + 1 < length:
                        plain.append((number, end + 1, {_PROMPT: False}))
        return jobs

    def _whole(self, chat: Chat) -> str:
        """Return the text of a whole chat, after the check of `_complete_text`."""
        return self._complete_text(chat, self._outcome(chat, len(chat.messages)))

    def _text(self, chat: Chat, end: int, *, prompt: bool = False) -> str:
        """Return the text of the first `end` messages."""
        return self._text_of(self._outcome(chat, end, prompt=prompt))

    def _outcome(self, chat: Chat, end: int, *, prompt: bool = False) -> Outcome:
        more = {_PROMPT: prompt}
        return self._next(0, end, more) or self._rendered_alone(str(self.text), chat, end, more)

    def _next(self, template: int, end: int, more: Mapping[str, Any]) -> Outcome | None:
        """Return the next outcome of `_ahead`, checked to be of this job; None for a chat that is rendered alone."""
        if not self._ahead:
            return None
        job, outcome = next(self._ahead[template])
        assert job[1:] == (end, more), f"{job[1:]} was rendered ahead, expected {(end, more)}"
        return outcome

    def _rendered_alone(self, template: str, chat: Chat, end: int, more: dict[str, Any]) -> Outcome:
        return next(self._outcomes(template, [chat], [(0, end, more)]))

    def _text_of(self, outcome: Outcome) -> str:
        import jinja2

        kind, text = outcome
        if kind == "text":
            return text
        if kind == "syntax":
            raise TemplateError(f"{self.name}: its chat template is no jinja, {text}")
        if kind == "long":
            raise _RefusedError(TOO_LARGE, f"the template makes {text} characters of it")
        raise jinja2.TemplateRuntimeError(text)

    def _outcomes(self, template: str, chats: Sequence[Chat], jobs: Sequence[Job]) -> Iterator[Outcome]:
        try:
            yield from PROCESS.render(template, self.variables, chats, jobs)
        except TemplateLimitError as error:
            raise TemplateError(f"{self.name}: its chat template {error}. {REMEDY}") from None

    # --- with marks ---

    @cached_property
    def _marked(self) -> str:
        return _marked(str(self.text))

    def _characters(self, chat: Chat, number: int) -> list[str] | None:
        return _free_characters((str(self.text), *texts_of(chat.messages), *texts_of(chat.tools)), number)

    def _by_marks(self, subject: str, chat: Chat, wanted: Sequence[int]) -> Rendered:
        # The mask of transformers is not used: it assumes that a marked text follows the text before its outermost
        # block, so marks within a macro, a {% set %} or a {% filter %} give other characters than they enclose.
        whole, marks = self._whole(chat), self._characters(chat, 2)
        if marks is None:
            raise _RefusedError(UNKNOWN_TURNS, "it has every private character")
        found = self._with_marks(chat, marks, self._next(1, len(chat.messages), _mark_variables(marks)))
        # A filter around marked text, such as trim or upper, sees the private characters too, and may then write other
        # text. Only if both texts are equal do the marks stand at positions of the plain text.
        if found is None or found[0] != whole:
            raise TemplateError(
                f"{self.name}: its chat template works on text that holds its own marks (by a filter, or a mark within "
                f"another one), so the assistant's tokens are not known. In {subject} the text with marks, "
                f"without the marks, is not the plain text. Put {{% generation %}} only around text that is written "
                "unchanged: --chat-template FILE"
            )
        if set(wanted).issuperset(assistant_turns(chat.messages)):
            return Rendered(whole, found[1])
        turns = self._turns_of(chat, whole, found[1])
        return Rendered(whole, [span for span, turn in zip(found[1], turns, strict=True) if turn in wanted])

    def _with_marks(self, chat: Chat, marks: Sequence[str], known: Outcome | None = None) -> tuple[str, Spans] | None:
        """Render the template with marks. Returns the text without them and the marked parts; None if it fails."""
        import jinja2

        try:
            variables = _mark_variables(marks)
            outcome = known or self._rendered_alone(self._marked, chat, len(chat.messages), variables)
            text = self._text_of(outcome)
        except jinja2.TemplateError:  # due to the marks alone: the plain rendering succeeded
            return None
        return _unmarked(text, marks)

    def _turns_of(self, chat: Chat, whole: str, spans: Spans) -> list[int]:
        """Return the number of each marked part's message. Raises: _RefusedError if one is unknown."""
        turns = assistant_turns(chat.messages)
        characters = self._characters(chat, 2 + len(turns))
        if characters is None:
            raise _RefusedError(UNKNOWN_TURNS, "it has too many private characters, or too many turns")
        turn_of = dict(zip(characters[2:], turns, strict=True))
        said = labelled(chat.messages, {turn: label for label, turn in turn_of.items()})
        found = self._with_marks(chat._replace(messages=said), characters[:2])
        unlabelled = dict.fromkeys(map(ord, turn_of))
        if found is None or found[0].translate(unlabelled) != whole or len(found[1]) != len(spans):
            raise _RefusedError(UNKNOWN_TURNS, "one more character in each of the assistant's turns changes the others")
        numbers: list[int] = []
        for start, end in found[1]:
            of_span = {turn_of[char] for char in found[0][start:end] if char in turn_of}
            if len(of_span) != 1:
                raise _RefusedError(UNKNOWN_TURNS, f"a marked part has words of {len(of_span)} turns of the assistant")
            numbers += of_span
        return numbers

    # --- by prefixes ---

    def _by_prefixes(self, subject: str, chat: Chat, wanted: Sequence[int]) -> Rendered:
        whole, length = self._whole(chat), len(chat.messages)
        spans: Spans = []
        edges: list[int] = []
        unsupervised: set[str] = set()
        for number in wanted:
            if number == 0:  # the rendering of no messages need be no prefix of a chat, or may be an error
                unsupervised.add(LEADING_REPLY)
                continue
            before = self._text(chat, number, prompt=True)
            after = whole if number + 1 == length else self._text(chat, number + 1)
            of_before = f"of messages 1 to {number} with a generation prompt"
            of_after = f"of messages 1 to {number + 1}"
            self._check_prefix(before, of_before, after, of_after)
            self._check_prefix(after, of_after, whole, f"of all {length}")
            if spans and len(before) < spans[-1][1]:
                raise self._unstable(f"the rendering {of_before} is shorter than one of fewer messages")
            edges += [len(before), len(after)]
            reply = after[len(before) :]
            if self._starts_with_words(subject, chat, number, before, reply):
                # After the token that ends a turn a template may write white space, which the target never has to.
                spoken = reply.rstrip()
                spans.append((len(before), len(before) + len(spoken if spoken.endswith(self.ends) else reply)))
            else:
                unsupervised.add(EMPTY_REPLY)
        return Rendered(whole, spans, tuple(edges), tuple(sorted(unsupervised)))

    def _starts_with_words(self, subject: str, chat: Chat, number: int, before: str, reply: str) -> bool:
        """Return whether `reply` begins with the assistant's words; False for an empty reply where that is unknown.

        Raises: TemplateError E407 if the generation prompt is empty and something stands before the words.
        """
        message = chat.messages[number]
        words, has_calls = words_of(message).strip(), calls_tools(message)
        if words and not has_calls and reply.lstrip().startswith(words):
            return True
        if not self._unprompted(chat, number).startswith(before):
            return True  # a generation prompt holds the header, so what follows it is the assistant's
        if has_calls and self._has_no_header(chat, number, before):
            return True
        if words or has_calls:
            raise TemplateError(
                f"{self.name}: its chat template does not tell where a reply begins. In {subject} a generation prompt "
                f"adds nothing to the messages before it, and the reply after them is {reply[:40]!r}, which does not "
                f"begin with its text. {REMEDY}"
            )
        return False

    def _has_no_header(self, chat: Chat, number: int, before: str) -> bool:
        """Return whether words in place of this message would directly follow the messages before it."""
        words = _WORDS["assistant"]
        messages = [*chat.messages[:number], {"role": "assistant", "content": words}]
        text = self._unprompted(chat._replace(messages=messages), number + 1)
        return text.startswith(before) and text[len(before) :].lstrip().startswith(words)

    def _unprompted(self, chat: Chat, end: int) -> str:
        """Render the first `end` messages alone: `_ahead` has only the renderings that every chat needs."""
        return self._text_of(self._rendered_alone(str(self.text), chat, end, {_PROMPT: False}))

    def _check_prefix(self, text: str, what: str, longer: str, what_longer: str) -> None:
        if longer.startswith(text):
            return
        at, one, other = self.difference(text, longer)
        found = f"the rendering {what} continues at token {at} with {one!r}, and that {what_longer} with {other!r}"
        raise self._unstable(found)

    def _unstable(self, found: str) -> _RefusedError:
        why = "is not prefix-stable, so the assistant's tokens are not known"
        return _RefusedError(NOT_STABLE, f"the chat template of {self.name} {why}: {found}")


def problem_of(template: str) -> tuple[str, str] | None:
    """Return the problem of a template and the expected state; None if it has none that shows without a tokenizer.

    Checks the length, jinja's syntax, the date, and the limits of time and memory with a chat without messages.
    """
    if len(template) > MAX_TEMPLATE:
        return f"the chat template has {len(template):,} characters", f"{MAX_TEMPLATE:,} at most"
    try:
        ((kind, text),) = PROCESS.render(template, {}, [Chat("", [])], [(0, 0, {})])
    except TemplateLimitError as error:
        return f"the chat template {error}", "one that renders a chat without messages"
    if kind == "syntax":
        return f"the chat template is no jinja, {text}", "a chat template in jinja"
    if _asks_for_date(template):
        return f"the chat template asks for the date ({_DATE})", "a date written out: the ids would differ tomorrow"
    return None


def _mark_variables(marks: Sequence[str]) -> dict[str, str]:
    return {_OPENS: marks[0], _CLOSES: marks[1]}


def _groups(chats: Sequence[Chat]) -> Iterator[list[Chat]]:
    """Yield the chats in order, in groups that take about a second to render."""
    group: list[Chat] = []
    cost = 0
    for chat in chats:
        length = len(chat.messages)
        cost += 1 + length * (length + sum(map(len, texts_of([chat.messages, chat.tools]))) // 1000)
        group.append(chat)
        if cost > _GROUP_COST:
            yield group
            group, cost = [], 0
    if group:
        yield group


def _has_marks(template: str) -> bool:
    """Return whether a template has {% generation %} outside of comments."""
    return any(one[0] == "block_begin" and two == ("name", "generation") for one, two in pairwise(_code(template)))


def _asks_for_date(template: str) -> bool:
    """Return whether a template uses strftime_now, not counting tests of whether it is defined."""
    code = _code(template)
    for at, token in enumerate(code):
        after = [value for _, value in code[at + 1 : at + 4]]
        if token == ("name", _DATE) and after[:2] != ["is", "defined"] and after != ["is", "not", "defined"]:
            return True
    return False


def _marked(template: str) -> str:
    """Return a template that also writes the variables _OPENS and _CLOSES around each marked part."""
    # A {% call %} block has the scope of a generation block, and jinja strips white space around both alike.
    macro = f"{{% macro {_MACRO}() %}}{{{{ {_OPENS} }}}}{{{{ caller() }}}}{{{{ {_CLOSES} }}}}{{% endmacro %}}\n"
    return macro + _MARK.sub(lambda tag: f"{tag[1]}{'endcall' if tag[2] else f'call {_MACRO}()'}{tag[3]}", template)


def _free_characters(texts: Iterable[str], number: int) -> list[str] | None:
    """Return `number` private characters that no text contains; None if too few are free."""
    text = "".join(texts)
    taken = set() if text.isascii() else set(text)
    free = (chr(code) for code in chain(*_PRIVATE) if chr(code) not in taken)
    found = list(islice(free, number))
    return found if len(found) == number else None


def _unmarked(text: str, marks: Sequence[str]) -> tuple[str, list[tuple[int, int]]] | None:
    """Return a text without its marks, and start and end of each marked part, without empty ones.

    Returns None unless marks open and close in turn.
    """
    parts = re.split(f"([{''.join(marks)}])", text)
    if parts[1::2] != list(marks) * (len(parts) // 4):
        return None
    plain, ends = parts[::2], [0]
    for part in plain:
        ends.append(ends[-1] + len(part))
    spans = zip(ends[1::2], ends[2::2], strict=False)
    return "".join(plain), [(start, end) for start, end in spans if start < end]


def _code(template: str) -> list[tuple[str, str]]:
    """Return kind and text of each jinja token, without comments and white space; [] if it is not jinja."""
    import jinja2

    try:
        found = [(kind, value) for _, kind, value in jinja2.Environment().lex(template)]
    except jinja2.TemplateSyntaxError:  # reported when it is rendered
        return []
    return [(kind, value) for kind, value in found if kind not in ("whitespace", "data", "comment")]
