"""Items of a JSON array of any length, in bounded memory: the file is read block by block.

The window of text holds one value, up to the limit, and at most about as much again or one more block. A value that is
larger, or valid JSON that Python cannot decode, is skipped without being held.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES, Problem
from niels_gpt.storage.errors import SourceError

BLOCK_BYTES = 1 << 20
MAX_LISTS = 1 << 20
"""Limit of lists and objects in a row. One takes three bytes of a file, and up to 250 in Python."""
TOO_MANY = f"more than {MAX_LISTS:,} lists and objects"
UNSETTLED = 16  # characters at a window's end whose meaning may change with more text: tru|e, 1.|5, "\ud8|3d"
_WHITESPACE = re.compile(r"[ \t\r\n]*")  # JSON's own, RFC 8259 section 2
_DECODE = json.JSONDecoder().raw_decode
# What ends or nests a skipped value, inside a string and outside. A whole run is matched at once.
_IN_STRING, _OUTSIDE = re.compile(r'["\\]'), re.compile(r'["\[\]{}]')  # one class each, which is searched fast
_RUN = re.compile(r'"|(?:\\.)+|\\\Z|[\[{]+|[\]}]+', re.DOTALL)
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_AFTER_SCALAR = re.compile(r"[,\]}\s]")


def has_many_lists(text: str, start: int = 0) -> bool:
    """Return whether the JSON value at a place of a text has more than MAX_LISTS, as far as the text goes."""
    lists = depth = 0
    for found in _STRING_OR_BRACKET.finditer(text, start):
        if found[0] in ("[", "{"):
            lists, depth = lists + 1, depth + 1
        elif found[0] in ("]", "}"):
            depth -= 1
        if lists > MAX_LISTS or depth < 1:
            break
    return lists > MAX_LISTS


def spans_lines(file: BinaryIO, limit: int = MAX_DOCUMENT_BYTES) -> bool:
    """Return whether a file is an array or has an object over several lines. Moves the file's position."""
    window = _Window(file, limit)
    if window.peek() != "{":
        return window.peek() == "["
    try:
        return "\n" in window.take()[1]
    except _SkipError as error:
        return error.too_large and window.holds_line_end()
    except ValueError:
        return False  # read line by line, so that a broken first line does not affect the others


def iter_values(file: BinaryIO, name: str, limit: int = MAX_DOCUMENT_BYTES) -> Iterator[tuple[int, Any, str]]:
    """Yield (number from 1, value, JSON) for each item of an array; for each value of a file that is no array.

    An item of more than `limit` bytes, or nested too deeply for Python, is a `Problem` without JSON. Invalid UTF-8
    stays in the JSON by `errors="surrogateescape"`.
    name: names the file in messages.
    Raises: SourceError E302, which names the first broken item; later items cannot be found.
    """
    window = _Window(file, limit)
    if window.peek() == "[":
        window.advance()
        yield from _items(window, name)
        if window.peek():
            raise SourceError(f"{name}, after its array: expected nothing, {window.found()}")
        return
    for number in itertools.count(1):
        if not window.peek():
            return
        yield number, *_value(window, f"{name}, item {number}")


def _items(window: _Window, name: str) -> Iterator[tuple[int, Any, str]]:
    if window.peek() == "]":
        window.advance()
        return
    for number in itertools.count(1):
        yield number, *_value(window, f"{name}, item {number}")
        separator = window.peek()
        if separator not in (",", "]"):
            raise SourceError(f"{name}, after item {number}: expected , or ] in a JSON array, {window.found()}")
        window.advance()
        if separator == "]":
            return


def _value(window: _Window, where: str) -> tuple[Any, str]:
    window.peek()
    try:
        return window.take()
    except _SkipError as error:
        found = window.found()
        if not window.skip_value():
            raise SourceError(f"{where}: expected JSON ({error}), {found}, which does not end") from error
        if error.too_large:
            return Problem.too_large(where, window.limit), ""
        return Problem(f"{where}: expected a JSON object ({error}), {found}"), ""
    except ValueError as error:
        reason = getattr(error, "msg", error)  # a JSONDecodeError's line and column count from the window's start
        complaint = f"{where}: expected JSON ({reason}), {window.found()}"
        raise SourceError(f"{complaint}. Repair the file: later items cannot be read") from error


class _SkipError(ValueError):
    """A value may be valid JSON, but cannot be decoded or is too large."""

    def __init__(self, reason: str, *, too_large: bool = False) -> None:
        super().__init__(reason)
        self.too_large = too_large


class _Window:
    """The text of a file from the next unread character on, as far as it was read."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self.limit = limit
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._text = ""
        self._at = self._brackets = 0
        self._ended = False

    def peek(self) -> str:
        """Move to the next character that is no white space and return it; "" at the end of the file."""
        while True:
            blank = _WHITESPACE.match(self._text, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def advance(self) -> None:
        """Move past the character that `peek` returned."""
        self._at += 1

    def take(self) -> tuple[Any, str]:
        """Decode the value that begins here, move past it, and return it and its JSON.

        Raises: _SkipError, without moving, for a value that `skip_value` can skip; ValueError for invalid JSON.
        """
        while True:
            if self._brackets > MAX_LISTS and has_many_lists(self._text, self._at):
                raise ValueError(TOO_MANY)  # to skip it would take a second for each megabyte
            try:
                value, end = _DECODE(self._text, self._at)
            except RecursionError:
                raise _SkipError("nested too deeply") from None
            except json.JSONDecodeError as error:
                if not self._may_continue(error):
                    raise
                if len(self._text) - self._at > self.limit:
                    raise _SkipError("too large", too_large=True) from None
                if not self._more():
                    raise
                continue
            except ValueError as error:  # an integer of more digits than Python reads
                raise _SkipError(str(error)) from None
            whole = isinstance(value, dict | list | str)  # they have a last character; 12 may continue as 123
            if whole or end + UNSETTLED <= len(self._text) or not self._more():
                source = self._text[self._at : end]
                if len(source) * 4 > self.limit and len(source.encode("utf-8", "surrogateescape")) > self.limit:
                    raise _SkipError("too large", too_large=True)
                self._at = end
                return value, source

    def skip_value(self) -> bool:
        """Move past the value that begins here without holding it. Returns False if the file ends first."""
        if self.peek() not in tuple('{["'):
            while (found := _AFTER_SCALAR.search(self._text, self._at)) is None:
                if not self._next_block():
                    return True
            self._at = found.start()
            return True
        depth, in_string = 0, False
        while True:
            found = (_IN_STRING if in_string else _OUTSIDE).search(self._text, self._at)
            if found is None:
                if not self._next_block():
                    return False
                continue
            run = _RUN.match(self._text, found.start())
            assert run is not None
            what, self._at = run.group(), run.end()
            if what == "\\":  # the escaped character is in the next block
                self._at = found.start()
                if not self._more():
                    return False
            elif in_string or what == '"':
                in_string = not in_string if what == '"' else in_string
            elif what[0] in "[{":
                depth += len(what)
            else:
                self._at -= max(0, len(what) - depth)
                depth = max(0, depth - len(what))
            if not depth and not in_string:
                return True

    def holds_line_end(self) -> bool:
        """Return whether the held part of the value that begins here has a line end."""
        return "\n" in self._text[self._at :]

    def found(self) -> str:
        """Describe the next characters, for messages."""
        self.peek()
        while len(self._text) < self._at + 60 and self._more():
            pass
        return f"found {self._text[self._at : self._at + 60]!r}" if self.peek() else "found the end of the file"

    def _may_continue(self, error: json.JSONDecodeError) -> bool:
        # An unterminated string is reported at its start; any other error where the text is invalid.
        return error.msg.startswith("Unterminated string") or error.pos + UNSETTLED >= len(self._text)

    def _more(self) -> bool:
        """Read at least as much as is held, so that a long value is not decoded again and again."""
        if self._ended:
            return False
        held = self._text[self._at :]
        # At most up to the limit, or a block: a larger value is not decoded.
        block = self._file.read(max(BLOCK_BYTES, min(len(held), self.limit + 1 - len(held))))
        self._ended = not block
        self._text, self._at = held + self._decoder.decode(block, final=self._ended), 0
        self._brackets = self._text.count("[") + self._text.count("{")
        return True

    def _next_block(self) -> bool:
        self._at = len(self._text)
        return self._more()
