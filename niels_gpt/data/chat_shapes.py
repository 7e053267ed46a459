"""The forms of a chat in a user's file: a list of messages, ShareGPT's conversations, or a pair of fields.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]}
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hello."}], "system": "Be brief."}
    {"instruction": "Sum it up.", "input": "A long text.", "output": "A short one."}

The first of SHAPES that a row has is read. A field that is null is absent: rows of parquet have every field.

There are two readings. `messages_of` is for the project's own chats: system, user and assistant, and only words.
`raw_chat_of` is for other chat templates: a turn keeps its role and all its fields. Both count the parts that a chat
loses: `unread_field:NAME`, and `contradicting_shape` where another shape of the row gives another chat.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from niels_gpt.chat_template import UNKNOWN_ROLE, count_names, is_weight
from niels_gpt.data.files.text import MISSING_FIELD, count, says_nothing
from niels_gpt.data.types import ChatMessage
from niels_gpt.signals import CONTRADICTING_SHAPE, UNREAD_FIELD

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
_TOOLS = ("tools", "functions")  # the latter is the earlier form of OpenAI
_NEVER_READ = ("system_message", "history")  # history: of Alpaca, the turns before
FIELDS = frozenset(
    (*LISTS, *(name for pair in PAIRS for name in pair), *SYSTEM_FIELDS, *CONTEXT_FIELDS, *_TOOLS, *_NEVER_READ)
)
"""Fields of a row that are read or counted."""
MALFORMED, NOT_TEXT, WEIGHT_0 = "malformed", "not_text", "weight_0"
_READ_OF_TURN = frozenset(("role", "from", "content", "value", "weight", "tool_calls"))  # a turn with calls is refused
_RESULTS = ("tool", "observation", "function_response", "tool_response")  # of ShareGPT: what a tool answered
_CALL = "function_call"  # of ShareGPT: the role of a turn whose value is a call, or a list of them, in JSON
_MAY_SAY_NOTHING = ("tool_calls", "reasoning_content", "thinking", "reasoning")  # content may be absent beside these


class NotAChatError(ValueError):
    """A row is no usable chat."""

    def __init__(self, reason: str, found: str = "", *, role: str | None = None) -> None:
        super().__init__(f"{reason}: found {found or 'none of the known shapes'}")
        self.reason = reason
        """missing_field, malformed, unknown_role, not_text or weight_0."""
        self.found = found
        """The value in place of a turn or text, for messages; "" if the row has no known shape."""
        self.role = role
        """The unknown role."""


def messages_of(row: Mapping[str, Any], counters: Counter[str] | None = None) -> list[ChatMessage]:
    """Return the turns of a row; its system field, if any, is the first. Blank contents are kept.

    counters: receives the parts that the chat loses.
    Raises: NotAChatError "missing_field" for a row of no known shape; "unknown_role" for a turn with a role that is not
        in ROLES, such as a tool's; "malformed" for a turn or field that is not text, a turn that calls a tool or has
        another weight than 0 and 1, and for a list without turns; "weight_0" for a reply of that weight, since every
        reply carries loss.

    >>> messages_of({"instruction": "Sum it up.", "input": "A long text.", "output": "A short one."})
    [ChatMessage(role='user', content='Sum it up.\\n\\ncontext:\\nA long text.'), ChatMessage(role='assistant', ...)]
    """

    def read(turns: _Turns) -> list[ChatMessage]:
        return _with_system(row, _read_turns(turns))

    shape, *others = _shapes_of(row)
    messages = read(turns := _turns_of(row, shape))
    if counters is not None:
        unread = _unread(row, (*_TOOLS, *_NEVER_READ))
        for turn in turns:
            if not turn.keys() <= _READ_OF_TURN:
                unread += _unread(turn, list(turn.keys() - _READ_OF_TURN))
        count_names(counters, UNREAD_FIELD, unread)
        count(counters, CONTRADICTING_SHAPE, _contradicted(messages, row, others, read))
    return messages


def _unread(given: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [name for name in names if not says_nothing(given.get(name))]


def _contradicted(chat: Any, row: Mapping[str, Any], others: Sequence[_Shape], read: Callable[[_Turns], Any]) -> bool:
    """Return whether one of the other shapes of a row gives another chat. A shape that gives none does not count."""
    for other in others:
        try:
            if read(_turns_of(row, other)) != chat:
                return True
        except NotAChatError:
            continue
    return False


def with_context(instruction: str, context: str) -> str:
    """Append the text that an instruction is about, as in Dolly (PR-02); a blank one is left out."""
    return f"{instruction}\n\ncontext:\n{context}" if context.strip() else instruction


_Shape = tuple[Any, ...]
"""One or two lists of turns that make a chat; or two texts, the question and the answer."""
_Turns = list[Mapping[str, Any]]


def _shapes_of(row: Mapping[str, Any]) -> list[_Shape]:
    """Return the known shapes of a row, at least one. Raises: NotAChatError "missing_field" if it has none."""
    shapes: list[_Shape] = [(row[name],) for name in LISTS if isinstance(row.get(name), list)]
    for asked, answered in PAIRS:
        match row.get(asked), row.get(answered):
            case (str(), str()) | (list(), list()) as pair:
                shapes.append(pair)
    if shapes:
        return shapes
    odd = next((name for name in LISTS if row.get(name) is not None), None)  # such as a list as a string
    raise NotAChatError(MISSING_FIELD, "" if odd is None else f"{_kind(row[odd])} in the field {odd}")


def _turns_of(row: Mapping[str, Any], shape: _Shape) -> _Turns:
    """Return the turns of a shape as the row has them, at least one. Raises: NotAChatError "malformed"."""
    if isinstance(shape[0], str):
        question, answer = shape
        for name in CONTEXT_FIELDS:
            question = with_context(question, _text_field(row, name))
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    turns = [turn for part in shape for turn in part]
    if not turns:
        raise NotAChatError(MALFORMED, "a list without turns")
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise NotAChatError(MALFORMED, f"{_kind(turn)} in place of a turn")
    return turns


def _with_system(row: Mapping[str, Any], turns: list[ChatMessage]) -> list[ChatMessage]:
    prompts = [ChatMessage("system", _text_field(row, name)) for name in SYSTEM_FIELDS]
    prompt = next((prompt for prompt in prompts if prompt.content.strip()), None)
    return turns if prompt is None or prompt == turns[0] else [prompt, *turns]


def _text_field(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str | None):
        raise NotAChatError(MALFORMED, f"{_kind(value)} in the field {name}")
    return value or ""


def _read_turns(turns: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    roles = [_role_of(turn) for turn in turns]  # first: a turn of a tool is an unknown role, with any content
    messages = [ChatMessage(role, _content_of(turn)) for role, turn in zip(roles, turns, strict=True)]
    weights = [_weight_of(turn) for turn in turns]
    if ("assistant", 0) in zip(roles, weights, strict=True):
        raise NotAChatError(WEIGHT_0, "a reply of weight 0, and here every reply carries loss")
    return messages


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


def _weight_of(turn: Mapping[str, Any]) -> float | None:
    weight = turn.get("weight")
    if is_weight(weight):
        return weight
    raise NotAChatError(MALFORMED, f"{_kind(weight)} in place of a turn's weight, 0 or 1")


def _part_text(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise NotAChatError(MALFORMED, "a part of a turn's content that is not text")


def _kind(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value!r:.40}"
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def _either(turn: Mapping[str, Any], name: str, other: str) -> Any:
    value = turn.get(name)
    return turn.get(other) if value is None else value


# --- for other chat templates ---


def raw_chat_of(
    row: Mapping[str, Any], *, sparse: bool, counters: Counter[str] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the turns of a row and its tools, with all their fields; its system field, if any, is the first turn.

    Roles with another name in ROLES become system, user or assistant; every other role stays. A turn of ShareGPT gets
    `role` and `content` in place of `from` and `value`. An empty list of calls is left out, and a `function_call`
    becomes an entry of `tool_calls`. `tools` is a list, or its JSON; without it, `functions` is the list of functions.
    sparse: leave out null fields at any depth, as in rows of parquet; else only null fields of a turn.
    counters: receives the parts that the row loses. Parts of a turn that a template ignores are counted elsewhere.
    Raises: NotAChatError "missing_field" for a row of no known shape; "not_text" for a content with a part that is no
        text, such as a picture; "unknown_role" for a `from` that has no known role; "malformed" for a turn or field of
        another type, for a weight other than 0 and 1, for a list without turns, for tools that are no list of objects,
        and for a turn without content that neither calls a tool nor has reasoning.
    """
    found = _without_nulls(row) if sparse else row
    system = next((text for name in SYSTEM_FIELDS if (text := _text_field(found, name)).strip()), None)
    prompt = {"role": "system", "content": system}

    def read(given: _Turns) -> list[dict[str, Any]]:
        turns = [_raw_turn(turn) for turn in given]
        return turns if system is None or turns[0] == prompt else [prompt, *turns]

    shape, *others = _shapes_of(found)
    turns = read(_turns_of(found, shape))
    tools, functions = (_tools_of(found.get(name), f"the field {name}") for name in _TOOLS)
    if counters is not None:
        count_names(counters, UNREAD_FIELD, _unread(found, _NEVER_READ))
        count(counters, CONTRADICTING_SHAPE, _contradicted(turns, found, others, read))
    return turns, [{"type": "function", "function": each} for each in functions] if functions and not tools else tools


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _raw_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    role, content = _either(turn, "role", "from"), _either(turn, "content", "value")
    _weight_of(turn)
    if not isinstance(role, str):
        raise NotAChatError(MALFORMED, f"{_kind(role)} in place of a turn's role")
    known = role.strip().lower()
    kept = {name: value for name, value in turn.items() if name not in ("from", "value") and value is not None}
    if kept.get("tool_calls") == []:
        del kept["tool_calls"]
    if kept.get(_CALL) and "tool_calls" not in kept:  # the earlier form of OpenAI
        kept["tool_calls"] = _calls(kept.pop(_CALL))
    if turn.get("role") is None and known == _CALL:
        return {**kept, "role": "assistant", "tool_calls": _calls(_json(content, "a turn's call"))}
    if turn.get("role") is None and known not in (*ROLES, *_RESULTS, "developer"):
        raise NotAChatError(UNKNOWN_ROLE, f"a turn of role {role!r}", role=role)
    kept["role"] = "tool" if turn.get("role") is None and known in _RESULTS else ROLES.get(known, role)
    _check_content(content, may_be_absent=any(kept.get(name) for name in _MAY_SAY_NOTHING))
    return kept if content is None else {**kept, "content": content}


def _check_content(content: Any, *, may_be_absent: bool) -> None:
    """Check that a content is text, a list of texts, or an object. Raises: NotAChatError."""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise NotAChatError(NOT_TEXT, "a part of a turn's content that is not text")
    elif not isinstance(content, str | Mapping) and not (content is None and may_be_absent):
        raise NotAChatError(MALFORMED, f"{_kind(content)} in place of a turn's content")


def _calls(found: Any) -> list[dict[str, Any]]:
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise NotAChatError(MALFORMED, "a turn's call without the name of a function")
    return [{"type": "function", "function": dict(call)} for call in calls]


def _tools_of(value: Any, where: str) -> list[dict[str, Any]] | None:
    if isinstance(value, str):
        value = _json(value, where) if value.strip() else None
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise NotAChatError(MALFORMED, f"{_kind(value)} in {where}")
    tools = [_json(tool, where) if isinstance(tool, str) else tool for tool in value]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise NotAChatError(MALFORMED, "a tool that is no object")
    return [dict(tool) for tool in tools]


def _json(value: Any, where: str) -> Any:
    try:
        return json.loads(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotAChatError(MALFORMED, f"no JSON in {where}") from error
