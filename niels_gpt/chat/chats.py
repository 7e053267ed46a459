"""Check what a chat may hold, decide which turns carry loss, and find what a rendered text leaves out.

`loss_on` says which of the assistant's turns carry loss; a turn of weight 0 carries none.

    assistant             turns that call no tool
    assistant,tool_calls  every turn
    tool_calls            turns that call a tool
    last                  only the last turn, with or without a call

A turn with both words and calls is one that calls a tool. A call counts without a function name too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from niels_gpt.chat.protocol import (
    ARGUMENTS_AS_TEXT,
    NOT_AS_TEXT,
    UNUSED_CALLS,
    UNUSED_REASONING,
    UNUSED_TOOLS,
    UNUSED_WORDS,
    Chat,
    Messages,
)
from niels_gpt.chat_template import is_weight

MAX_DEPTH: Final = 100
"""The most levels of lists and objects in a message or a tool."""
MAX_VALUES: Final = 1 << 20
"""The most values in a chat."""
MAX_CHARS: Final = 1 << 23
"""The most characters in a chat. Each takes twelve bytes on the way to the template's process, which has 512 MiB."""
_MAX_INTEGER = 1 << 64


class UnusableValueError(ValueError):
    """A chat has a value that cannot reach a template. The message says which."""


def usable(chat: Chat) -> Chat:
    """Return a copy of a chat with plain lists and dicts, and U+FFFD for each lone surrogate, which UTF-8 cannot hold.

    Raises: UnusableValueError for a value outside of JSON, such as NaN, an integer beyond 64 bits or a key that is no
        string; for messages or tools that are no objects, a call without a function's name, a weight other than 0 and
        1; and for more than MAX_DEPTH levels, MAX_VALUES values or MAX_CHARS characters.
    """
    left = [MAX_VALUES]
    messages = [_object(message, "message", left) for message in chat.messages]
    if not isinstance(chat.tools, list | tuple | None):
        raise UnusableValueError(f"tools are a value of type {type(chat.tools).__name__}, expected a list")
    tools = None if chat.tools is None else [_object(tool, "tool", left) for tool in chat.tools]
    for number, message in enumerate(messages, 1):
        if not is_weight(weight := message.get("weight")):
            raise UnusableValueError(f"message {number} has the weight {weight!r:.40}, expected 0 or 1")
        calls = message.get("tool_calls")
        if calls and not (isinstance(calls, list) and len(called_names(message)) == len(calls)):
            raise UnusableValueError(f"message {number} has a call without the name of a function")
    if sum(map(len, texts_of([messages, tools]))) > MAX_CHARS:
        raise UnusableValueError(f"it has more than {MAX_CHARS:,} characters")
    return Chat(chat.name, messages, tools)


def texts_of(value: Any) -> Iterator[str]:
    """Yield every string of a JSON value, keys too, and the texts of a list of parts joined, as templates do."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)
        parts = [item["text"] for item in value if isinstance(item, dict) and isinstance(item.get("text"), str)]
        if len(parts) > 1:
            yield "".join(parts)


def _encodable(text: str) -> str:
    """Return a text with U+FFFD for each lone surrogate."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _object(value: Any, what: str, left: list[int]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UnusableValueError(f"a {what} is a value of type {type(value).__name__}, expected an object")
    copy: dict[str, Any] = _plain(value, MAX_DEPTH, left)
    return copy


def _plain(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise UnusableValueError(f"it has more than {MAX_VALUES:,} values")
    if isinstance(value, str):
        return _encodable(str(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if abs(value) >= _MAX_INTEGER:
            raise UnusableValueError("an integer beyond 64 bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UnusableValueError(f"the number {value}")
        return float(value)
    if not isinstance(value, Mapping | list | tuple):
        raise UnusableValueError(f"a value of type {type(value).__name__}, which JSON does not have")
    if depth == 0:
        raise UnusableValueError(f"values in more than {MAX_DEPTH} levels")
    if not isinstance(value, Mapping):
        return [_plain(item, depth - 1, left) for item in value]
    if not all(isinstance(key, str) for key in value):
        raise UnusableValueError("an object with a key that is not a string")
    return {_encodable(key): _plain(item, depth - 1, left) for key, item in value.items()}


LOSS_ON: Final = ("assistant", "assistant,tool_calls", "tool_calls", "last")
"""The values of `loss_on`."""
REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that may hold the assistant's thinking."""


def check_loss_on(loss_on: str) -> str:
    """Return `loss_on`. Raises: ValueError unless it is in LOSS_ON."""
    if loss_on not in LOSS_ON:
        raise ValueError(f"loss_on={loss_on!r}: expected one of {', '.join(map(repr, LOSS_ON))}")
    return loss_on


def assistant_turns(messages: Messages) -> list[int]:
    """Return the numbers of the assistant's messages, from 0."""
    return [number for number, message in enumerate(messages) if message.get("role") == "assistant"]


def supervised_turns(messages: Messages, loss_on: str) -> list[int]:
    """Return the numbers of the messages that carry loss, from 0."""
    turns = assistant_turns(messages)
    if loss_on == "last":
        turns = turns[-1:]
    wanted = {"assistant": (False,), "tool_calls": (True,)}.get(loss_on, (False, True))
    return [number for number in turns if calls_tools(messages[number]) in wanted and has_weight(messages[number])]


def has_weight(message: Mapping[str, Any]) -> bool:
    """Return whether a message may carry loss: weight 0 forbids it, whatever the template marks."""
    return message.get("weight") != 0


def calls_tools(message: Mapping[str, Any]) -> bool:
    """Return whether a message calls a tool."""
    return bool(message.get("tool_calls"))


def words_of(message: Mapping[str, Any]) -> str:
    """Return the words of a message: its content, or the joined texts of a list of parts; "" for other content."""
    content = message.get("content")
    return "" if isinstance(content, Mapping) else "".join(_texts(content))


def called_names(message: Mapping[str, Any]) -> list[str]:
    """Return the names of the functions that a message calls; calls of another form are skipped."""
    calls = message.get("tool_calls")
    return _function_names(calls if isinstance(calls, list) else [])


def _function_names(functions: Sequence[Any]) -> list[str]:
    """Return the names in a list of tools or calls: {"name": ...} or {"function": {"name": ...}}."""
    inner = [each.get("function", each) for each in functions if isinstance(each, Mapping)]
    names = [each.get("name") for each in inner if isinstance(each, Mapping)]
    return [name for name in names if isinstance(name, str)]


def _is_in(name: str, text: str) -> bool:
    """Return whether a text contains a name, literally or escaped as JSON escapes it."""
    return any(each in text for each in (name, json.dumps(name)[1:-1], json.dumps(name, ensure_ascii=False)[1:-1]))


def lost(messages: Messages, text: str, template: str) -> tuple[str, str] | None:
    """Return counter and problem of a chat's text that lacks a call or the words of a list of parts, or shows a content
    in Python's notation; None for a text without such a problem."""
    for number, message in enumerate(messages, 1):
        knows_calls = any(word in template for word in ("tool_calls", "tojson"))
        if calls_tools(message) and not (knows_calls and all(_is_in(name, text) for name in called_names(message))):
            return UNUSED_CALLS, f"the template leaves out a call of message {number}"
        content = message.get("content")
        if content and isinstance(content, list | dict) and str(content) in text:
            kind = "a list of parts" if isinstance(content, list) else "an object"
            return NOT_AS_TEXT, f"the template writes message {number}, {kind}, as Python prints it"
        # Thinking is removed from lists as from texts: only what stands after it must be there.
        parts = (part.rpartition("</think>")[2] for part in _texts(content)) if isinstance(content, list) else ()
        if not all(_is_in(part.strip(), text) for part in parts):
            return NOT_AS_TEXT, f"the template leaves out words of message {number}, a list of parts"
    return None


def changed(chat: Chat, text: str, template: str) -> Iterator[str]:
    """Yield the members of CHANGED (protocol.py) that apply to a chat's text."""
    names = _function_names(chat.tools or ())
    if names and not ("tools" in template and any(_is_in(name, text) for name in names)):
        yield UNUSED_TOOLS
    reasoning = (message.get(name) for message in chat.messages for name in REASONING_FIELDS)
    if any(isinstance(each, str) and each.strip() not in text for each in reasoning):
        yield UNUSED_REASONING
    if not _has_words(chat.messages, text):
        yield UNUSED_WORDS
    given = (each for message in chat.messages if calls_tools(message) for each in _arguments(message["tool_calls"]))
    if any(
        '"' in each and any(json.dumps(each, ensure_ascii=ascii) in text for ascii in (True, False)) for each in given
    ):
        yield ARGUMENTS_AS_TEXT


def _has_words(messages: Messages, text: str) -> bool:
    at = 0
    for message in messages:
        for part in _texts(message.get("content")):
            found = text.find(
                part.strip(), at
            )  # most parts stand in order: searching from `at` keeps long chats linear
            if found < 0 and not _is_in(part.strip(), text):
                return False
            at = max(at, found)
    return True


def _texts(content: Any) -> list[str]:
    """Return the strings of a content: the content itself, the texts of a list of parts, or the values of an object."""
    if isinstance(content, Mapping):
        return [value for value in content.values() if isinstance(value, str)]
    if isinstance(content, list):
        return [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return [content] if isinstance(content, str) else []


def _arguments(calls: Any) -> Iterator[str]:
    for call in calls if isinstance(calls, list) else ():
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(inner, Mapping) and isinstance(inner.get("arguments"), str):
            yield inner["arguments"]


def labelled(messages: Messages, labels: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the messages with labels in the words, the thinking and the calls of some of them.

    labels: message number -> character. It is put after the last character that is not white space, so a template that
        strips a text strips the same with and without it.
    """
    return [
        _labelled(message, labels[number]) if number in labels else dict(message)
        for number, message in enumerate(messages)
    ]


def _labelled(message: Mapping[str, Any], label: str) -> dict[str, Any]:
    said = dict(message)
    for name in ("content", *REASONING_FIELDS):
        said[name] = _with_label(message.get(name), label)
    if calls_tools(message):
        said["tool_calls"] = _with_labelled_names(message["tool_calls"], label)
        said["content"] = said["content"] if words_of(message) else message.get("content")
    return {name: value for name, value in said.items() if name in message}


def _with_label(value: Any, label: str) -> Any:
    if isinstance(value, str):
        words = value.rstrip()
        return words + label + value[len(words) :]
    if isinstance(value, list):
        return [
            {**part, "text": _with_label(part["text"], label)} if isinstance(part, Mapping) and "text" in part else part
            for part in value
        ]
    return value


def _with_labelled_names(calls: Any, label: str) -> Any:
    if isinstance(calls, list):
        return [_with_labelled_names(call, label) for call in calls]
    if not isinstance(calls, Mapping):
        return calls
    if isinstance(calls.get("name"), str):
        return {**calls, "name": calls["name"] + label}
    return {**calls, "function": _with_labelled_names(calls["function"], label)} if "function" in calls else calls
