"""JSON values out of a file that is read block by block: an array of any length passes through bounded memory.

The window of text holds one value, up to the limit, and at most about as much again or one block after it. A value that
is larger, or that Python cannot decode though it may be JSON, is passed over without being held.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from niels_gpt.data.text_files import MAX_DOCUMENT_BYTES, Problem

BLOCK_BYTES = 1 << 20
UNSETTLED = 16  # characters before a window's end that more text may give another meaning: tru|e, 1.|5, "\ud8|3d"
_WHITESPACE = re.compile(r"[ \t\r\n]*")  # JSON's own, RFC 8259 section 2
_DECODE = json.JSONDecoder().raw_decode
# While a value is passed over: what counts inside a string and outside, in runs, for there may be nothing else.
_IN_STRING, _OUTSIDE = re.compile(r'["\\]'), re.compile(r'["\[\]{}]')  # one class each: that is searched fast
_RUN = re.compile(r'"|(?:\\.)+|\\\Z|[\[{]+|[\]}]+', re.DOTALL)
_AFTER_SCALAR = re.compile(r"[,\]}\s]")


def spans_lines(file: BinaryIO, limit: int = MAX_DOCUMENT_BYTES) -> bool:
    """Whether a file holds an array, or an object over several lines, and not one value a line. Moves the position."""
    window = _Window(file, limit)
    if window.peek() != "{":
        return window.peek() == "["
    try:
        return "\n" in window.take()[1]
    except _PassOverError as error:
        return error.too_large and window.holds_line_end()
    except ValueError:
        return False  # line by line, a broken first line does no harm to the others


def iter_values(file: BinaryIO, name: str, limit: int = MAX_DOCUMENT_BYTES) -> Iterator[tuple[int, Any, str]]:
    """Yield the items of an array, or the values of a file that is none: each with its number from 1, and its JSON.

    In place of an item of more than `limit` bytes, or one nested too deeply for Python, comes a `Problem` without JSON.
    Bytes that are not utf-8 stand in the JSON as `errors="surrogateescape"` puts them, which also gives them back.
    name: of the file, for messages.
    Raises: ValueError naming the item at which the JSON is broken; what comes after that cannot be told apart.
    """
    window = _Window(file, limit)
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
    except _PassOverError as error:
        found = window.found()
        if not window.pass_over():
            raise ValueError(f"{where}: expected JSON ({error}), {found}, which does not end") from error
        if error.too_large:
            return Problem.too_large(where, window.limit), ""
        return Problem(f"{where}: expected a JSON object ({error}), {found}"), ""
    except ValueError as error:
        reason = getattr(error, "msg", error)  # a JSONDecodeError's line and column would count from the window's start
        complaint = f"{where}: expected JSON ({reason}), {window.found()}"
        raise ValueError(f"{complaint}. Mend the file: what follows in it cannot be read") from error


class _PassOverError(ValueError):
    """A value that may be good JSON cannot be decoded, or must not be."""

    def __init__(self, reason: str, *, too_large: bool = False) -> None:
        super().__init__(reason)
        self.too_large = too_large


class _Window:
    """The text of a file from the next unread character on, as far as it has been needed."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self.limit = limit
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
        """Decode the value that begins here, go past it, and return it and its JSON.

        Raises: _PassOverError, having gone nowhere, for a value that `pass_over` may go past; ValueError for no JSON.
        """
        while True:
            try:
                value, end = _DECODE(self._text, self._at)
            except RecursionError:
                raise _PassOverError("nested too deeply") from None
            except json.JSONDecodeError as error:
                if not self._may_go_on(error):
                    raise
                if len(self._text) - self._at > self.limit:
                    raise _PassOverError("too large", too_large=True) from None
                if not self._more():
                    raise
                continue
            except ValueError as error:  # an integer of more digits than Python reads
                raise _PassOverError(str(error)) from None
            whole = isinstance(value, dict | list | str)  # its last character says so, while 12 may go on as 123
            if whole or end + UNSETTLED <= len(self._text) or not self._more():
                source = self._text[self._at : end]
                if len(source) * 4 > self.limit and len(source.encode("utf-8", "surrogateescape")) > self.limit:
                    raise _PassOverError("too large", too_large=True)
                self._at = end
                return value, source

    def pass_over(self) -> bool:
        """Go past the value that begins here without holding it; returns whether it ends before the file does."""
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
            if what == "\\":  # what it escapes is in the next block
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
        """Whether there is a line end in what is held of the value that begins here."""
        return "\n" in self._text[self._at :]

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
        # No more than the limit allows, and a block: what is larger is not decoded.
        block = self._file.read(max(BLOCK_BYTES, min(len(held), self.limit + 1 - len(held))))
        self._ended = not block
        self._text, self._at = held + self._decoder.decode(block, final=self._ended), 0
        return True

    def _next_block(self) -> bool:
        self._at = len(self._text)
        return self._more()
