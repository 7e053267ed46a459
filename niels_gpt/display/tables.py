"""Small HTML tables for notebooks, and text that is safe to show: every value is escaped, and there are no scripts."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0, DEL and C1


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
