"""benchmarks.svg: one panel of bars for each section of docs/benchmarks.md that has a table for it.

The numbers are read from the page, so the picture and the page cannot differ.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.pictures.svg import BLUE, INK, MUTED, PALE, Picture

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
COLUMNS, WIDTH, BAR, HEAD = 2, 400, 21, 62
NAMES, SCALE = 176, 160  # pixels of the names, and of the longest bar


class Panel(NamedTuple):
    """A section of the page: its heading, what its first column of numbers is, and a bar for each row of the table."""

    title: str
    unit: str
    bars: list[tuple[str, float, bool]]


def panels(page: str) -> Iterator[Panel]:
    """Yield the sections whose table has its first heading in italics. A row in bold is this project's."""
    for section in page.split("\n## ")[1:]:
        table = re.search(r"^\| _(.+?)_ \|.*\n\|[-|: ]+\n((?:\|.*\n)+)", section, re.MULTILINE)
        if table:
            rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table[2].splitlines()]
            bars = [(name.strip("*"), float(value.strip("*")), name.startswith("**")) for name, value in rows]
            yield Panel(section.splitlines()[0], table[1], bars)


def draw(target: Path) -> None:
    """Write benchmarks.svg into the folder `target`."""
    found = list(panels(PAGE.read_text(encoding="utf-8")))
    rows = [found[first : first + COLUMNS] for first in range(0, len(found), COLUMNS)]
    heights = [HEAD + BAR * max(len(panel.bars) for panel in row) + 14 for row in rows]
    picture = Picture(COLUMNS * WIDTH, sum(heights) + 12, "How fast: " + ", ".join(panel.title for panel in found))
    top = 6
    for row, height in zip(rows, heights, strict=True):
        for column, panel in enumerate(row):
            draw_panel(picture, panel, 20 + column * (WIDTH - 8), top)
        top += height
    picture.write(target / "benchmarks.svg")


def draw_panel(picture: Picture, panel: Panel, left: float, top: float) -> None:
    """Draw one section; a dashed line at 1: the speed of the limit, or of the step that is not folded."""
    picture.text(left, top + 26, panel.title, size=14, bold=True)
    picture.text(left, top + 45, panel.unit, size=11.5, fill=MUTED)
    longest = max(1, *(value for _, value, _ in panel.bars))
    one, bottom = left + NAMES + SCALE / longest, top + HEAD + BAR * len(panel.bars)
    picture.path(f"M{one:g} {top + HEAD - 4:g}V{bottom:g}", stroke=MUTED, weight=1, dash=True)
    picture.text(one, top + HEAD - 7, "1", size=11, fill=MUTED, anchor="middle")
    for number, (name, value, is_ours) in enumerate(panel.bars):
        y, width = top + HEAD + number * BAR, max(1.5, value / longest * SCALE)
        picture.text(left, y + 12, name, size=12, bold=is_ours, fill=BLUE if is_ours else INK)
        fill, stroke = (BLUE, BLUE) if is_ours else (PALE[MUTED], MUTED)
        picture.box(left + NAMES, y, width, 15, fill=fill, stroke=stroke, radius=2)
        inside = width > 40
        x, colour = left + NAMES + width + (-6 if inside else 6), "#ffffff" if inside and is_ours else MUTED
        picture.text(x, y + 12, f"{value:.2f}", size=11.5, fill=colour, anchor="end" if inside else "start")
