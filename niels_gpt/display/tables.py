"""Tables of text and small HTML tables for notebooks; every value is escaped, and there are no scripts.

Decides how wide what commands print may be: 100 columns; the last column of a table continues on more lines.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable, Sequence

from niels_gpt.storage.meta_json import printable

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0, DEL and C1

WIDTH = 100
"""Columns of what commands print."""
_LEAST_ROOM = 30  # columns of a last column that is folded


def table(rows: Sequence[tuple[str, ...]], width: int = WIDTH) -> str:
    """Return rows as aligned columns, two spaces apart; control characters are escaped.

    The last column is folded at spaces where a line would be wider than `width`.
    """
    rows = [tuple(map(printable, row)) for row in rows]
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
    cells = [(escaped_html(name), escaped_html(str(value))) for name, value in rows]
    cells = [(escaped_html(name), escaped_html(str(value))) for name, value in rows]
    lines = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in cells)
    return f"<table><caption>{escaped_html(title)}</caption>{lines}</table>"


def escaped_html(text: str, style: str = "") -> str:
    """Return a text as HTML, its control characters escaped as well. style: CSS of a span around it."""
    escaped = html.escape(shown(text))
    return f'<span style="{style}">{escaped}</span>' if style else escaped


def shown(text: str) -> str:
    """Return a text for a terminal: control characters other than line ends and tabs are escaped."""
    return _CONTROLS.sub(lambda found: ascii(found.group())[1:-1], text)
