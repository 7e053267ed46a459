"""Tables of text and small HTML tables for notebooks; every value is escaped, and there are no scripts.

Decides how wide what commands print may be: 100 columns; the last column of a table continues on more lines. And how
long: `cut` keeps some thousand characters of one text, and says how many are left out.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable, Sequence

from niels_gpt.storage.meta_json import printable

# C0, DEL and C1; what is not seen but changes what is: bidi controls, line separators, tags; lone surrogates. The
# joiners U+200C and U+200D stay: scripts and emoji need them.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    r"\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)

WIDTH = 100
"""Columns of what commands print."""
_LEAST_ROOM = 30  # columns of a last column that is folded
_MOST_CHARACTERS = 4_000
_OF_TOKEN = 16  # characters


def table(rows: Sequence[tuple[str, ...]], width: int = WIDTH) -> str:
    """Return rows as aligned columns, two spaces apart; control characters are escaped.

    The last column is folded at spaces where a line would be wider than `width`.
    """
    rows = [tuple(printable(cut(cell)) for cell in row) for row in rows]
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    start = sum(widths[:-1]) + 2 * (len(widths) - 1)
    lines = []
    for *cells, last in rows:
        left = "".join(cell.ljust(size + 2) for cell, size in zip(cells, widths[:-1], strict=True))
        first, *more = folded(last, max(_LEAST_ROOM, width - start))
        lines += [(left + first).rstrip(), *(" " * start + part for part in more)]
    return "\n".join(lines)


def folded(text: str, width: int = WIDTH, indent: str = "") -> list[str]:
    """Return a text as lines of at most `width` columns, cut at spaces; the lines after the first are indented."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def html_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values."""
    cells = [(_cell(name), _cell(str(value))) for name, value in rows]
    lines = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in cells)
    return f"<table><caption>{_cell(title)}</caption>{lines}</table>"


def _cell(text: str) -> str:
    return html.escape(printable(text))


def escaped_html(text: str, style: str = "") -> str:
    """Return a text as HTML, its control characters escaped as in `shown`. style: CSS of a span around it."""
    escaped = html.escape(shown(text))
    return f'<span style="{style}">{escaped}</span>' if style else escaped


def shown(text: str) -> str:
    """Return a text for a terminal: control and format characters other than line ends and tabs are escaped."""
    return _CONTROLS.sub(lambda found: ascii(found.group())[1:-1], text)


def cut(text: str, most: int = _MOST_CHARACTERS, *, end: int = 0, where: str = "; --json has them all") -> str:
    """Return the beginning of a text for a terminal, and how many characters are left out.

    most: characters that are kept; `end` of them are the text's last. where: what gives the others.
    """
    if len(text) <= most:
        return text
    end = min(end, most)
    parts = text[: most - end], f"{len(text) - most:,} more characters{where}", text[len(text) - end :]
    return " ... ".join(filter(None, parts))


def most_of(num_tokens: int) -> int:
    """Return how many characters of the text of some tokens are shown: more than any language has."""
    return max(_MOST_CHARACTERS, _OF_TOKEN * num_tokens)
