"""Chats -> the same chats with the target's replies in place of the assistant's turns.

Each reply is conditioned on the replies before it. A chat ends early at the first reply that the target did not finish,
which is kept, or that no template could hold, which is not. What follows in the chat is left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from niels_gpt.chat.protocol import NOT_STABLE, SPECIAL_TEXT, ChatTokenizer, RefusedChat
from niels_gpt.chat.template_process import Chat, Messages
from niels_gpt.chat.turns import assistant_turns, calls_tools, supervised_turns
from niels_gpt.eagle3.replies.generate import CONTEXT, LENGTH, STOP, Prompt, Reply

TURNS: Final = ("all", "last")
"""Which of the assistant's turns are replaced: each of them, or the last alone, with the others as they are."""
FORMS: Final = ("messages", "ids")
"""A row for each chat, with its messages; or a row for each reply, with the ids of prompt and reply and a loss mask."""
MESSAGES: Final = FORMS[0]
NO_PROMPT, CALLS_TOOLS, OVER_CONTEXT, EMPTY_REPLY = "no_prompt", "calls_tools", "over_context", "empty_reply"
"""Why a chat, or its rest, has no reply: nobody asks, the turn calls a tool, the prompt leaves no room, the reply has
no words. Beside these: the reasons of the tokenizer's RefusedChat, SPECIAL_TEXT for a special token in it, and, of the
form "messages", NOT_STABLE: behind a reply the template writes the earlier turns otherwise."""
SOURCE_TURNS = "turns_of_the_source"
"""Counter of the assistant's turns of the form "messages" that the target did not write, and that get loss."""
CUT: Final = {LENGTH: "cut_at_max_new_tokens", CONTEXT: "cut_at_context"}
"""Counters of replies that are cut, by why."""
Generate = Callable[[Sequence[Prompt]], list[Reply]]
_ANY_REPLY = {"role": "assistant", "content": "Yes."}
_ASKING = frozenset({"user", "tool", "function", "ipython", "observation"})


@dataclass
class Answered:
    """A chat as far as the target has replied to it."""

    chat: Chat
    spots: list[int]
    """Numbers of the messages that are replies of the target, from 0."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    """Up to the last reply."""
    replies: list[dict[str, Any]] = field(default_factory=list)
    """Of each reply: message, its number; tokens; finish; exact, whether all messages, as text, have the ids up to its
    end that the target saw and chose."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of the form "ids"."""
    ended_by: str | None = None
    """Why the chat ends before its last spot, or with a cut reply."""
    counts: Counter[str] = field(default_factory=Counter)
    before: int = 0
    """Chats of the same name that stand before it in the source."""

    @property
    def next_prompt(self) -> Chat | None:
        """The messages before the next reply; None at the end."""
        if self.ended_by is not None or len(self.replies) == len(self.spots):
            return None
        spot = self.spots[len(self.replies)]
        messages = [*self.messages, *self.chat.messages[len(self.messages) : spot]]
        return Chat(self.chat.name, messages, self.chat.tools)

    def end(self, reason: str) -> None:
        """End the chat before its next reply."""
        self.ended_by = reason
        self.counts[reason] += 1

    def row(self) -> dict[str, Any]:
        """Return the row of the form "messages"."""
        tools = {} if self.chat.tools is None else {"tools": self.chat.tools}
        early = {} if self.ended_by is None else {"ended_by": self.ended_by}
        return {"id": self.chat.name, "messages": self.messages, **tools, "replies": self.replies, **early}


def reply_spots(messages: Messages, turns: str) -> list[int]:
    """Return the numbers of the messages that the target writes, from 0: in place of the assistant's, and at the end.

    turns: one of TURNS. A turn of the assistant that nothing stands before is kept as it is: there is no prompt.
    """
    spots = [number for number in assistant_turns(messages) if number]
    if messages and messages[-1].get("role") in _ASKING:
        spots.append(len(messages))
    return spots if turns == "all" else spots[-1:]


def started(chat: Chat, turns: str, before: int = 0) -> Answered:
    """Return a chat without replies, which has ended where there is nothing to reply to, or a turn calls a tool.

    before: chats of the same name that stand before it in the source.
    """
    answered = Answered(chat, reply_spots(chat.messages, turns), before=before)
    if not answered.spots:
        answered.end(NO_PROMPT)
    elif any(spot < len(chat.messages) and calls_tools(chat.messages[spot]) for spot in answered.spots):
        answered.end(CALLS_TOOLS)  # what the tool answered would not fit another call
    return answered


def next_prompts(
    chats: Sequence[Answered], tokenizer: ChatTokenizer, form: str
) -> list[tuple[Answered, Chat, list[int]]]:
    """Return the chats that go on, each with its next prompt and the ids of it; the others have ended. form: of FORMS.

    Raises: ValueError as ChatTokenizer.encode_chats.
    """
    waiting = [(each, prompt) for each in chats if (prompt := each.next_prompt) is not None]
    encoded = tokenizer.plain_ids([prompt for _, prompt in waiting], prompt=True)
    asked = []
    for (each, prompt), ids in zip(waiting, encoded, strict=True):
        if isinstance(ids, RefusedChat):
            each.end(ids.reason)
        elif form == MESSAGES and not _keeps_its_turns(prompt, tokenizer):
            each.end(NOT_STABLE)
        else:
            asked.append((each, prompt, ids))
    return asked


def _keeps_its_turns(prompt: Chat, tokenizer: ChatTokenizer) -> bool:
    """Whether the template writes the assistant's turns of a prompt as it did, once another one stands behind them.

    Else the chat has no further reply (NOT_STABLE): the file would be refused as input.
    """
    if not assistant_turns(prompt.messages):
        return True
    (found,) = tokenizer.encode_chats([prompt._replace(messages=[*prompt.messages, _ANY_REPLY])])
    return not isinstance(found, RefusedChat) or found.reason != NOT_STABLE


def reply_to_all(chats: Sequence[Answered], tokenizer: ChatTokenizer, generate: Generate, form: str = MESSAGES) -> None:
    """Let the target reply to chats until each has ended, one turn of all of them at a time. form: of FORMS.

    Raises: ValueError as `next_prompts`.
    """
    while asked := next_prompts(chats, tokenizer, form):
        replies = generate([Prompt(_name(each, prompt), ids) for each, prompt, ids in asked])
        for (each, prompt, ids), reply in zip(asked, replies, strict=True):
            _add(each, prompt, ids, reply, tokenizer)
    if form == MESSAGES:
        _compare_whole([each for each in chats if len(each.replies) > 1], tokenizer)
    for each in chats:
        left = len(each.spots) - len(each.replies)
        each.counts += Counter(replies=len(each.replies), replies_left_out=left if each.replies else 0)
        if form == MESSAGES and each.replies:
            turns = sum(number > 0 for number in supervised_turns(each.messages, "assistant"))  # a first one has none
            other = sum(not reply["exact"] for reply in each.replies)
            each.counts += Counter({"other_ids": other, SOURCE_TURNS: turns - len(each.replies)})


def _name(answered: Answered, prompt: Chat) -> str:
    """Return what a reply's random numbers depend on, beside the seed."""
    again = f" {answered.before}" if answered.before else ""
    return f"{len(prompt.messages)}{again}\n{prompt.name}"


def _compare_whole(chats: Sequence[Answered], tokenizer: ChatTokenizer) -> None:
    """Compare each reply's ids with those of all messages: a template may write a turn otherwise once others follow."""
    whole = tokenizer.plain_ids([each.chat._replace(messages=each.messages) for each in chats], prompt=False)
    for each, ids in zip(chats, whole, strict=True):
        for reply, row in zip(each.replies, each.rows, strict=True):
            own: list[int] = row["input_ids"]
            reply["exact"] = not isinstance(ids, RefusedChat) and ids[: len(own)] == own


def _add(answered: Answered, prompt: Chat, ids: list[int], reply: Reply, tokenizer: ChatTokenizer) -> None:
    """Add a reply to its chat, or end the chat before it."""
    if reply.finish == CONTEXT and not reply.ids:
        answered.end(OVER_CONTEXT)
        return
    if not tokenizer.special_ids.isdisjoint(reply.ids):
        answered.end(SPECIAL_TEXT)
        return
    text = tokenizer.decode(reply.ids)
    if not text.strip():
        answered.end(EMPTY_REPLY)
        return
    own = [*reply.ids, *([] if reply.end is None else [reply.end])]
    content, exact = _content(prompt, text, [*ids, *own], tokenizer)
    if isinstance(exact, RefusedChat):
        answered.end(exact.reason)
        return
    number = len(prompt.messages)
    answered.messages = [*prompt.messages, {"role": "assistant", "content": content}]
    facts = {"message": number, "tokens": len(own), "finish": reply.finish, "exact": exact}
    answered.replies.append(facts)
    row = {"id": f"{prompt.name}#{number}", "input_ids": [*ids, *own], "loss_mask": [0] * len(ids) + [1] * len(own)}
    answered.rows.append({**row, "finish": reply.finish})
    answered.counts["reply_tokens"] += len(own)
    if reply.finish != STOP:
        answered.end(CUT[reply.finish])


def _content(prompt: Chat, text: str, ids: list[int], tokenizer: ChatTokenizer) -> tuple[str, bool | RefusedChat]:
    """Return a reply's content, and whether the chat then has the ids that the target saw and chose.

    A template may write white space that the target writes itself: then it is the text without it that has them.
    """
    found: bool | RefusedChat = False
    for content in dict.fromkeys((text, text.strip())):
        messages = [*prompt.messages, {"role": "assistant", "content": content}]
        (whole,) = tokenizer.plain_ids([prompt._replace(messages=messages)], prompt=False)
        if isinstance(whole, RefusedChat):
            found = whole
        elif whole[: len(ids)] == ids:
            return content, True
    return text, found
