"""A small writer of SVG pictures: a light card, readable on a dark page too. Coordinates are pixels."""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

INK, MUTED, LINE, CARD = "#1f2933", "#5b6b7f", "#c5ced9", "#ffffff"
BLUE, ORANGE, GREEN, VIOLET = "#1d4ed8", "#b45309", "#15803d", "#6d28d9"
PALE = {BLUE: "#e3ecfd", ORANGE: "#fdebd3", GREEN: "#ddf3e4", VIOLET: "#ece5fb", MUTED: "#eef1f5", INK: "#eef1f5"}
SANS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', 'DejaVu Sans Mono', monospace"


@dataclass
class Picture:
    """What is drawn so far. title: one sentence, for people who do not see it."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = LINE,
        radius: float = 6,
        dash: bool = False,
        weight: float = 1,
    ) -> None:
        """Draw a rectangle with round corners."""
        dashes = ' stroke-dasharray="4 3"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="{weight:g}"{dashes}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Write one line. y: its base line; anchor: start, middle or end."""
        style = ' font-weight="600"' if bold else ""
        family = f' font-family="{MONO}"' if mono else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{style}{family} '
            f'xml:space="preserve">{escape(words, quote=False)}</text>'
        )

    def lines(self, x: float, y: float, words: list[str], *, step: float = 17, **style: object) -> None:
        """Write several lines below each other."""
        for number, line in enumerate(words):
            self.text(x, y + number * step, line, **style)  # type: ignore[arg-type]

    def path(
        self,
        points: str,
        *,
        stroke: str = MUTED,
        weight: float = 1.4,
        head: bool = False,
        dash: bool = False,
        opacity: float = 1,
    ) -> None:
        """Draw a line by an SVG path. head: with an arrow at its end."""
        more = f' marker-end="url(#head-{stroke[1:]})"' if head else ""
        more += ' stroke-dasharray="4 3"' if dash else ""
        more += f' opacity="{opacity:g}"' if opacity != 1 else ""
        self.parts.append(f'<path d="{points}" fill="none" stroke="{stroke}" stroke-width="{weight:g}"{more}/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float, *, stroke: str = MUTED, dash: bool = False) -> None:
        """Draw a straight arrow."""
        self.path(f"M{x:g} {y:g}L{to_x:g} {to_y:g}", stroke=stroke, head=True, dash=dash)

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        """Draw a filled circle."""
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}"/>')

    def render(self) -> str:
        """Return the whole file."""
        heads = "".join(
            f'<marker id="head-{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0.5L8 4L0 7.5z" fill="{colour}"/></marker>'
            for colour in (MUTED, BLUE, ORANGE, GREEN, VIOLET)
        )
        card = (
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="10" '
            f'fill="{CARD}" stroke="{LINE}"/>'
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="{SANS}" role="img">\n<title>{escape(self.title)}</title>\n'
            f"<defs>{heads}</defs>\n{card}\n{body}\n</svg>\n"
        )

    def write(self, path: Path) -> None:
        """Write the picture."""
        path.write_text(self.render(), encoding="utf-8")
