"""JSON values out of a file that is read block by block: an array of any length passes through bounded memory.

The window of text holds one value, however large, and at most about as much again or one block after it.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 20
UNSETTLED = 16  # characters before a window's end that more text may give another meaning: tru|e, 1.|5, "\ud8|3d"
_WHITESPACE = re.compile(r"[ \t\r\n]*")  # JSON's own, RFC 8259 section 2
_DECODE = json.JSONDecoder().raw_decode


def spans_lines(file: BinaryIO) -> bool:
    """Whether a file holds an array, or an object over several lines, and not one value a line. Moves the position."""
    window = _Window(file)
    if window.peek() != "{":
        return window.peek() == "["
    try:
        return "\n" in window.take()[1]
    except ValueError:
        return False  # line by line, a broken first line does no harm to the others


def iter_values(file: BinaryIO, name: str) -> Iterator[tuple[int, Any, str]]:
    """Yield the items of an array, or the values of a file that is none: each with its number from 1, and its JSON.

    Bytes that are not utf-8 stand in the JSON as `errors="surrogateescape"` puts them, which also gives them back.
    name: of the file, for messages.
    Raises: ValueError naming the item at which the JSON is broken; what comes after that cannot be told apart.
    """
    window = _Window(file)
    if window.peek() == "[":
        window.skip()
        yield from _items(window, name)
        if window.peek():
            raise ValueError(f"{name}, after its array: expected nothing, {window.found()}")
        return
    for number in itertools.count(1):
        if not window.peek():
            return
        yield number, *_value(window, f"{name}, item {number}")


def _items(window: _Window, name: str) -> Iterator[tuple[int, Any, str]]:
    if window.peek() == "]":
        window.skip()
        return
    for number in itertools.count(1):
        yield number, *_value(window, f"{name}, item {number}")
        separator = window.peek()
        if separator not in (",", "]"):
            raise ValueError(f"{name}, after item {number}: expected , or ] in a JSON array, {window.found()}")
        window.skip()
        if separator == "]":
            return


def _value(window: _Window, where: str) -> tuple[Any, str]:
    window.peek()
    try:
        return window.take()
    except ValueError as error:
        reason = getattr(error, "msg", error)  # a JSONDecodeError's line and column would count from the window's start
        complaint = f"{where}: expected JSON ({reason}), {window.found()}"
        raise ValueError(f"{complaint}. Mend the file: what follows in it cannot be read") from error


class _Window:
    """The text of a file from the next unread character on, as far as it has been needed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._text = ""
        self._at = 0
        self._ended = False

    def peek(self) -> str:
        """Go to the next character that is no white space and return it, at the end of the file ""."""
        while True:
            blank = _WHITESPACE.match(self._text, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def skip(self) -> None:
        """Go past the character that `peek` returned."""
        self._at += 1

    def take(self) -> tuple[Any, str]:
        """Decode the value that begins here, go past it, and return it and its JSON; ValueError if there is none."""
        while True:
            try:
                value, end = _DECODE(self._text, self._at)
            except RecursionError:
                raise ValueError("nested too deeply") from None
            except json.JSONDecodeError as error:
                if not self._may_go_on(error) or not self._more():
                    raise
                continue
            whole = isinstance(value, dict | list | str)  # its last character says so, while 12 may go on as 123
            if whole or end + UNSETTLED <= len(self._text) or not self._more():
                source, self._at = self._text[self._at : end], end
                return value, source

    def found(self) -> str:
        """Say what stands here, for messages."""
        self.peek()
        while len(self._text) < self._at + 60 and self._more():
            pass
        return f"found {self._text[self._at : self._at + 60]!r}" if self.peek() else "found the end of the file"

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        # An unterminated string is reported at its start; everything else where the text stops making sense.
        return error.msg.startswith("Unterminated string") or error.pos + UNSETTLED >= len(self._text)

    def _more(self) -> bool:
        """Read on, as much again as is held at least, so that a long value is not decoded over and over."""
        if self._ended:
            return False
        held = self._text[self._at :]
        block = self._file.read(max(BLOCK_BYTES, len(held)))
        self._ended = not block
        self._text, self._at = held + self._decoder.decode(block, final=self._ended), 0
        return True
