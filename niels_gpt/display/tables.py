"""Tables and lines of text that fit a terminal, and small HTML tables for notebooks. Every value is escaped.

Decides how wide printed text is (`width`), where a long line is folded (`folded`: at spaces, never in a word or in a
command), which columns of a table give way (`table`), and how many characters of a long text are printed (`cut`).
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from shutil import get_terminal_size
from typing import TextIO

from niels_gpt.storage.meta_json import printable

# C0, DEL and C1; characters that are invisible and change the visible ones: bidi controls, line separators, tags; lone
# surrogates. The joiners U+200C and U+200D stay: scripts and emoji need them.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    r"\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)

WIDTH = 100
"""Columns of printed text without a terminal."""
_WIDEST, _NARROWEST = 120, 40
_LEAST_ROOM = 30  # columns of a last column before others give way
_MOST_CHARACTERS = 4_000
_OF_TOKEN = 16  # characters
_COLOUR = r"\x1b\[[0-9;]*m"
# A command is one word, to the end of its sentence: people copy it.
_COMMAND = r"(?:niels-gpt|pip install|python -m|rm) \S.*?(?:[.;,](?=\s|$)|(?=\s\s)|$)"
_WORDS = re.compile(rf"{_COMMAND}|(?:{_COLOUR}|\S)+|\s+")


def width(stream: TextIO | None = None) -> int:
    """Return how many columns a line printed to a stream may have: 40 to 120; WIDTH without a terminal.

    The environment's COLUMNS counts first, then the terminal of stdout, then the stream's own. stream: default stdout.
    """
    columns = WIDTH
    with suppress(OSError, ValueError):  # no terminal, or no file
        columns = os.get_terminal_size((stream or sys.stdout).fileno()).columns or WIDTH
    return min(max(get_terminal_size((columns, 0)).columns, _NARROWEST), _WIDEST)


def table(rows: Sequence[tuple[str, ...]], columns: int | None = None) -> str:
    """Return rows as aligned columns, two spaces apart; control characters are escaped.

    Cells are folded at spaces until the lines fit: first headers that are longer than their columns' cells, then the
    last column, then the columns with the fewest long cells; before these, three columns and more stand one space
    apart. A word is never cut, so that long ones make a line too wide. columns: of a line; `width()` if not given.
    """
    rows = [tuple(printable(cut(cell)) for cell in row) for row in rows]
    if not rows:
        return ""
    sizes, gap = _fitting(rows, width() if columns is None else columns)
    lines = []
    for row in rows:
        cells = [folded(cell, size) for cell, size in zip(row, sizes, strict=True)]
        for number in range(max(map(len, cells))):
            parts = (cell[number] if number < len(cell) else "" for cell in cells)
            lines.append(gap.join(map(_padded, parts, sizes)).rstrip())
    return "\n".join(lines)


def _fitting(rows: Sequence[tuple[str, ...]], columns: int) -> tuple[list[int], str]:
    """Return the width of each column of a table that fits into `columns` characters, and the space between two."""
    sizes, least, longer = list[int](), list[int](), list[list[int]]()
    for cells in zip(*rows, strict=True):
        longer.append(sorted(map(size_of, cells)))
        sizes.append(longer[-1][-1])
        least.append(max((size_of(word) for cell in cells for word in _WORDS.findall(cell) if word.strip()), default=0))
    gap, last = 2, len(sizes) - 1
    least[last] = min(least[last], _LEAST_ROOM)  # a long path overflows its own line, and narrows no other column

    def cost(column: int) -> tuple[int, int]:
        """Return how readily a column gives way, and how many of its cells a narrower column would fold."""
        size = sizes[column]
        cells = len(longer[column]) - bisect_right(longer[column], size - 1)
        is_header = cells == 1 and size_of(rows[0][column]) == size
        return (0 if is_header else 1 if column == last and size > _LEAST_ROOM else 2), cells

    while sum(sizes) + gap * last > columns:
        foldable = [column for column, size in enumerate(sizes) if size > least[column]]
        best = min(foldable, key=cost, default=None)
        if last > 1 and gap > 1 and (best is None or cost(best)[0] == 2):
            gap = 1
        elif best is None:
            break
        else:
            sizes[best] -= 1
    return sizes, " " * gap


def folded(text: str, columns: int | None = None, indent: str = "") -> list[str]:
    """Cut a line of text at spaces into lines of at most `columns` characters; indent all but the first.

    A longer word has a line of its own, and so has a command such as `niels-gpt verify CACHE`. Colours take no column.
    columns: `width()` if not given.
    """
    columns = width() if columns is None else columns
    if size_of(text) <= columns:
        return [text]
    lines, line, size, space = list[str](), "", 0, ""
    for word in _WORDS.findall(text):
        if word.isspace():
            space = word
            continue
        if size + len(space) + size_of(word) > columns and line.strip():
            lines.append(line)
            line, size, space = indent, len(indent), ""
        line += space + word
        size, space = size + len(space) + size_of(word), ""
    return [*lines, line]


def hints(lines: Sequence[tuple[str, str]], columns: int | None = None) -> str:
    """Return commands, each with its purpose beside it; below it where a line would be wider than `columns`.

    columns: `width()` if not given.
    """
    room = max(size_of(command) for command, _ in lines) + 2
    beside = [_padded(command, room) + why for command, why in lines]
    if max(map(size_of, beside)) + 2 <= (width() if columns is None else columns):
        return "\n".join(f"  {line.rstrip()}" for line in beside)
    return "\n".join(f"  {line}" for command, why in lines for line in (command, f"    {why}") if line.strip())


def size_of(text: str) -> int:
    """Return how many columns of a terminal a text takes: a wide character two, a colour and an accent none."""
    if "\x1b" in text:
        text = re.sub(_COLOUR, "", text)
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def _padded(text: str, size: int) -> str:
    return text + " " * (size - size_of(text))


def html_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values."""
    cells = [(_cell(name), _cell(str(value))) for name, value in rows]
    lines = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in cells)
    return f"<table><caption>{_cell(title)}</caption>{lines}</table>"


def _cell(text: str) -> str:
    from html import escape

    return escape(printable(text))


def escaped_html(text: str, style: str = "") -> str:
    """Return a text as HTML, control characters escaped. style: CSS for a span around it; "" for none."""
    from html import escape

    escaped = escape(shown(text))
    return f'<span style="{style}">{escaped}</span>' if style else escaped


def shown(text: str) -> str:
    """Return a text with control and format characters escaped; line ends and tabs stay."""
    return _CONTROLS.sub(lambda found: ascii(found.group())[1:-1], text)


def cut(text: str, most: int = _MOST_CHARACTERS, *, end: int = 0, where: str = "; --json has them all") -> str:
    """Return a text shortened to `most` characters, with the number of those left out.

    end: how many of the kept characters are the text's last. where: says how to get the others.
    """
    if len(text) <= most:
        return text
    end = min(end, most)
    parts = text[: most - end], f"{len(text) - most:,} more characters{where}", text[len(text) - end :]
    return " ... ".join(filter(None, parts))


def most_of(num_tokens: int) -> int:
    """Return how many characters the text of some tokens may have at most: more than in any language."""
    return max(_MOST_CHARACTERS, _OF_TOKEN * num_tokens)
