"""What may stand in a chat: values of JSON, neither too deep nor too many, and texts that UTF-8 can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from niels_gpt.chat.template_process import Chat
from niels_gpt.chat.turns import called_names
from niels_gpt.chat_template import is_weight

UNUSABLE_VALUE: Final = "unusable_value"
"""Counter of chats with a value that no JSON has, such as NaN, or with too many or too deep ones."""
MAX_DEPTH: Final = 100
"""Levels of lists and objects in a message or a tool, at most."""
MAX_VALUES: Final = 1 << 20
"""Values of a chat, at most."""
MAX_CHARS: Final = 1 << 23
"""Characters of a chat, at most: twelve bytes each on the way to the template's process, whose memory is limited."""
_MAX_INTEGER = 1 << 64


class UnusableValueError(ValueError):
    """A chat has a value that cannot reach a template. The message says which."""


def usable(chat: Chat) -> Chat:
    """Return a copy of a chat of plain lists and dicts, with U+FFFD for each lone surrogate, which UTF-8 cannot hold.

    Raises: UnusableValueError for a float that is not finite, an integer beyond 64 bits, a key that is no string, a
        value that is none of JSON's, messages or tools that are no objects, a call of no function, a weight that is
        neither 0 nor 1, and more than MAX_DEPTH levels, MAX_VALUES values or MAX_CHARS characters.
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
    """Yield every string of a value of JSON, keys too, and the texts of a list of parts also as one string."""
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


def encodable(text: str) -> str:
    """Return a text with U+FFFD for each lone surrogate, which utf-8 cannot hold."""
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
        return encodable(str(value))
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
        raise UnusableValueError("an object with a key that is no string")
    return {encodable(key): _plain(item, depth - 1, left) for key, item in value.items()}
