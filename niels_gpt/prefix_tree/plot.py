"""Pictures: what folding would save, by forest and in all; and the attention mask of one forest."""

from __future__ import annotations

import io
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from niels_gpt.fileio import check_png
from niels_gpt.prefix_tree.attention import dense_mask
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.savings import Savings, fewer, many

if TYPE_CHECKING:  # at run time inside the functions: who does not plot does not wait for matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_DRAWN = 2048
"""Tokens of the largest mask that is drawn."""
_WIDTH, _HEIGHT, _MASK, _DPI = 7.2, 2.8, 6.0, 100  # inches, and pixels per inch
_FILL, _DARK, _LINE = "#9ec5e8", "#1d5f9e", "#c2410c"  # light and dark too, for eyes that do not tell blue from orange
_DOTS = 40  # forests that are drawn as dots, too; of more, the line is enough


def check_picture(target: Path, tokens: int = 0) -> None:
    """Raise what would keep a picture from being drawn: call it before the work that the picture shows.

    tokens: of the forest, if its mask is drawn. Raises: ValueError for a name that is not of a .png, and for more than
    MOST_DRAWN tokens; FileNotFoundError if there is no folder for it; ImportError without matplotlib.
    """
    check_png(target)
    _check_size(tokens)
    _figure(_MASK, _MASK)


def plot(found: Savings, name: str) -> bytes:
    """Return a PNG of 720 x 280 pixels. name: of the rollouts, for the title.

    Raises: ImportError without matplotlib, which the extra `pipelines` brings.
    """
    figure = _figure(_WIDTH, _HEIGHT)
    title = f"{name}: {many(found.sums.samples, 'sample')} in {many(len(found.token_factors), 'forest')}"
    title = "".join(letter if letter.isprintable() else "?" for letter in title).replace("$", r"\$")
    figure.suptitle(title, fontsize=min(11, 850 / len(title)), fontweight="bold")  # 850: as wide as the picture
    each, all_of_them = figure.subplots(1, 2)
    _by_forest(each, {"tokens": found.token_factors, "training FLOPs": found.flop_factors})
    _in_all(all_of_them, found)
    return _png(figure)


def plot_mask(forest: PrefixForest) -> bytes:
    """Return a PNG of 600 x 600 pixels: which query sees which key, with the borders of the nodes.

    Raises: ValueError for more than MOST_DRAWN tokens; ImportError as `plot`.
    """
    _check_size(forest.num_tokens)
    figure = _figure(_MASK, _MASK)
    axes = figure.subplots()
    axes.imshow(dense_mask(forest).cpu().numpy(), cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest")
    for start in forest.node_starts[1:].tolist():
        axes.axhline(start - 0.5, color=_LINE, linewidth=0.6)
        axes.axvline(start - 0.5, color=_LINE, linewidth=0.6)
    axes.set_xlabel("key")
    axes.set_ylabel("query: sees the keys in blue")
    counts = {"sample": forest.num_samples, "node": len(forest.node_starts), "token": forest.num_tokens}
    axes.set_title(", ".join(many(count, name) for name, count in counts.items()))
    return _png(figure)


def _check_size(tokens: int) -> None:
    if tokens > MOST_DRAWN:
        raise ValueError(f"a mask of {tokens:,} tokens is not drawn. Expected {MOST_DRAWN:,} at most")


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install 'niels_gpt[pipelines]'") from error
    return Figure(figsize=(width, height), dpi=_DPI, facecolor="white", layout="constrained")


def _png(figure: Figure) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    return png.getvalue()


def _by_forest(axes: Axes, factors: dict[str, array[float]]) -> None:
    """Draw the factors of the forests, each kind sorted, over the share of the forests that have more."""
    for (label, values), colour, line in zip(factors.items(), (_DARK, _LINE), ("-", "--"), strict=True):
        ordered = np.sort(np.asarray(values))[::-1]
        shares = (np.arange(len(ordered)) + 0.5) * 100 / len(ordered)
        dots = "o" if len(ordered) <= _DOTS else ""
        axes.plot(shares, ordered, line, marker=dots, markersize=3, color=colour, linewidth=1.4, label=label)
    axes.set_xlim(0, 100)
    axes.set_ylim(0.9, max(1.5, 1.1 * max(map(max, factors.values()))))
    axes.axhline(1, color="#888888", linewidth=0.8)
    axes.set_xlabel("forests, those that gain most first")
    axes.set_ylabel("times fewer after folding\n(1: no gain)")
    axes.xaxis.set_major_formatter("{x:.0f} %")
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.legend(frameon=False, fontsize=7, loc="best")
    _plain(axes)


def _in_all(axes: Axes, found: Savings) -> None:
    """Draw what is left of tokens, attention pairs and FLOPs, as shares of what there was."""
    sums = found.sums
    assert sums.flops_before is not None and sums.flops_after is not None
    bars = {
        "tokens": (sums.tokens_before, sums.tokens_after),
        "attention\npairs": (sums.pairs_before, sums.pairs_after),
        "training\nFLOPs": (sums.flops_before, sums.flops_after),
    }
    for place, (before, after) in enumerate(bars.values()):
        left = 100 * after / before
        axes.barh(place, 100, height=0.7, color=_FILL, label="before" if place == 0 else None)
        axes.barh(place, left, height=0.7, color=_DARK, label="after" if place == 0 else None)
        where, colour = (2.0, "white") if left > 50 else (left + 2, "black")  # in the wider part of the bar
        said = f"{_short(after)} of {_short(before)}, {fewer(before / after)}"
        axes.text(where, place, said, color=colour, fontsize=7, va="center")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("left of all forests together")
    axes.xaxis.set_major_formatter("{x:.0f} %")
    axes.legend(frameon=False, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 0.98), ncols=2)
    _plain(axes)


def _short(number: float) -> str:
    """Return a count in a few characters: 940, 12.3k, 4.56M, 7.8P."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=7)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(8)
    axes.spines[["top", "right"]].set_visible(False)
