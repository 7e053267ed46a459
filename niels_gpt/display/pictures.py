"""PNG pictures by matplotlib: checks before the work, an empty figure, plain axes, and the bytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time inside the functions: loading matplotlib takes a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 100  # pixels per inch


def check_png(target: Path) -> None:
    """Check a picture's file name before the work that the picture shows.

    Raises: ValueError unless the name ends in .png; FileNotFoundError if its folder does not exist.
    """
    if target.suffix.lower() != ".png":
        raise ValueError(f"{target}: expected the name of a .png, the only kind of picture that is drawn")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target}: no folder {target.parent} to draw it in. Make it first")


def check_matplotlib() -> None:
    """Raise ImportError without matplotlib, before the work that a picture shows."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install 'niels-gpt[plot]'") from error


def new_figure(width: float, height: float, **style: Any) -> Figure:
    """Return an empty figure. width, height: inches of 100 pixels. Raises: ImportError without matplotlib."""
    check_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, facecolor="white", **style)


def set_title(figure: Figure, title: str) -> None:
    """Set the title of a figure 7.2 inches wide; a longer title has smaller letters."""
    title = "".join(letter if letter.isprintable() else "?" for letter in title).replace("$", r"\$")  # no formula
    figure.suptitle(title, fontsize=min(11, 850 / len(title)), fontweight="bold")  # 850: as wide as the picture


def plain_axes(axes: Axes, *, ticks: int = 7) -> None:
    """Remove the frame above and to the right. ticks: size of the ticks' letters; labels have one point more."""
    axes.tick_params(labelsize=ticks)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(ticks + 1)
    axes.spines[["top", "right"]].set_visible(False)


def png(figure: Figure, colours: int | None = None) -> bytes:
    """Return the figure as a PNG. colours: size of its palette, which makes the file a third as large; None for all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    if colours is None:
        return drawn.getvalue()
    from PIL import Image  # matplotlib itself writes PNGs with it

    small = io.BytesIO()
    picture = Image.open(drawn).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    picture.save(small, "png", optimize=True)
    return small.getvalue()
