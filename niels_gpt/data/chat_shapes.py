"""What a chat may look like in a user's file: a list of messages, ShareGPT's conversations, or a pair of fields.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]}
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hello."}], "system": "Be brief."}
    {"instruction": "Sum it up.", "input": "A long text.", "output": "A short one."}

The first of SHAPES that a row has is read. A field that is null is absent: rows of parquet have every field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from niels_gpt.data.types import ChatMessage

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "ai": "assistant",
}
LISTS = ("messages", "conversations", "conversation")
PAIRS = (  # of TRL and completion APIs; of Alpaca and Dolly; of question answering and OpenOrca
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "response"),
    ("instruction", "output"),
    ("question", "answer"),
    ("question", "response"),
)
SHAPES = ", ".join((*LISTS, *("+".join(pair) for pair in PAIRS)))
SYSTEM_FIELDS = ("system", "system_prompt")
CONTEXT_FIELDS = ("context", "input")
FIELDS = frozenset((*LISTS, *(name for pair in PAIRS for name in pair), *SYSTEM_FIELDS, *CONTEXT_FIELDS))
MISSING_FIELD, MALFORMED, UNKNOWN_ROLE = "missing_field", "malformed", "unknown_role"


class NotAChatError(ValueError):
    """A row is no chat that can be used."""

    def __init__(self, reason: str, found: str = "", *, role: str | None = None) -> None:
        super().__init__(f"{reason}: found {found or 'none of the known shapes'}")
        self.reason = reason
        """missing_field, malformed or unknown_role."""
        self.found = found
        """What was found instead of a turn or text, for messages; "" if the row has no known shape."""
        self.role = role
        """The unknown role."""


def messages_of(row: Mapping[str, Any]) -> list[ChatMessage]:
    """Return the turns of a row; its system field, if any, is the first. Blank contents are kept.

    Raises: NotAChatError "missing_field" for a row of no known shape; "unknown_role" for a turn with a role that is not
        in ROLES, such as a tool's; "malformed" for a turn or field that is no text, for a turn that calls a tool, and
        for a list without turns.
    """
    return _with_system(row, _turns_of(row))


def with_context(instruction: str, context: str) -> str:
    """Append the text that an instruction is about, as in Dolly (PR-02); a blank one is left out."""
    return f"{instruction}\n\ncontext:\n{context}" if context.strip() else instruction


def _turns_of(row: Mapping[str, Any]) -> list[ChatMessage]:
    for name in LISTS:
        if isinstance(row.get(name), list):
            return _read_turns(row[name])
    for asked, answered in PAIRS:
        match row.get(asked), row.get(answered):
            case str(question), str(answer):
                for name in CONTEXT_FIELDS:
                    question = with_context(question, _text_field(row, name))
                return [ChatMessage("user", question), ChatMessage("assistant", answer)]
            case list(question), list(answer):
                return _read_turns(question + answer)
    odd = next((name for name in LISTS if row.get(name) is not None), None)  # such as a list as a string
    raise NotAChatError(MISSING_FIELD, "" if odd is None else f"{_kind(row[odd])} in the field {odd}")


def _with_system(row: Mapping[str, Any], turns: list[ChatMessage]) -> list[ChatMessage]:
    prompts = [ChatMessage("system", _text_field(row, name)) for name in SYSTEM_FIELDS]
    prompt = next((prompt for prompt in prompts if prompt.content.strip()), None)
    return turns if prompt is None or prompt == turns[0] else [prompt, *turns]


def _text_field(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str | None):
        raise NotAChatError(MALFORMED, f"{_kind(value)} in the field {name}")
    return value or ""


def _read_turns(turns: Sequence[Any]) -> list[ChatMessage]:
    if not turns:
        raise NotAChatError(MALFORMED, "a list without turns")
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise NotAChatError(MALFORMED, f"{_kind(turn)} in place of a turn")
    roles = [_role_of(turn) for turn in turns]  # first: a turn of a tool is an unknown role, with any content
    return [ChatMessage(role, _content_of(turn)) for role, turn in zip(roles, turns, strict=True)]


def _role_of(turn: Mapping[str, Any]) -> str:
    role = _either(turn, "role", "from")
    if not isinstance(role, str):
        raise NotAChatError(MALFORMED, f"{_kind(role)} in place of a turn's role")
    if role.strip().lower() not in ROLES:
        raise NotAChatError(UNKNOWN_ROLE, f"a turn of role {role!r}", role=role)
    return ROLES[role.strip().lower()]


def _content_of(turn: Mapping[str, Any]) -> str:
    content = _either(turn, "content", "value")
    if turn.get("tool_calls"):
        raise NotAChatError(MALFORMED, "a turn that calls a tool")
    if not isinstance(content, str | list):
        raise NotAChatError(MALFORMED, f"{_kind(content)} in place of a turn's content")
    return content if isinstance(content, str) else "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise NotAChatError(MALFORMED, "a part of a turn's content that is no text")


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def _either(turn: Mapping[str, Any], name: str, other: str) -> Any:
    value = turn.get(name)
    return turn.get(other) if value is None else value
