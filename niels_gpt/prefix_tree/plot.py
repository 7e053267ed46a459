"""Pictures: the savings of folding, per forest and in total; and the attention mask of one forest."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from niels_gpt.display.numbers import many
from niels_gpt.display.pictures import check_matplotlib, check_png, new_figure, plain_axes, png, set_title
from niels_gpt.prefix_tree.attention import dense_mask
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.savings import Savings
from niels_gpt.storage.errors import TreeError

if TYPE_CHECKING:  # imported where a picture is drawn: loading matplotlib takes a second
    from matplotlib.axes import Axes

MOST_DRAWN = 2048
"""Tokens of the largest mask that is drawn."""
_WIDTH, _HEIGHT, _MASK = 7.2, 2.8, 6.0  # inches
_FILL, _DARK, _LINE = "#9ec5e8", "#1d5f9e", "#c2410c"  # of different lightness, for the colour-blind
_COLOURS_IN_FILE = 24  # Dagster's event log keeps a picture of each run
_DOTS = 40  # at most this many forests are drawn as dots too


def check_picture(target: Path) -> None:
    """Raise if a picture cannot be drawn; call it before the work that the picture shows.

    Raises: ValueError for a name that does not end in .png; FileNotFoundError if its folder does not exist; ImportError
        without matplotlib.
    """
    check_png(target)
    check_matplotlib()


def plot(savings: Savings, name: str) -> bytes:
    """Return a PNG of 720 x 280 pixels. name: the rollouts in the title.

    Raises: ImportError without matplotlib, which the extra `pipelines` brings.
    """
    figure = new_figure(_WIDTH, _HEIGHT, layout="constrained")
    title = f"{name}: {many(savings.sums.samples, 'sample')} in {many(len(savings.token_factors), 'forest')}"
    set_title(figure, title)
    per_forest, total = figure.subplots(1, 2)
    _draw_forests(per_forest, {"tokens": savings.token_factors, "training FLOPs": savings.flop_factors})
    _draw_total(total, savings)
    return png(figure, _COLOURS_IN_FILE)


def plot_mask(forest: PrefixForest) -> bytes:
    """Return a PNG of 600 x 600 pixels: which query sees which key, with the borders of the nodes.

    Raises: TreeError (E801) for more than MOST_DRAWN tokens; ImportError without matplotlib.
    """
    if forest.num_tokens > MOST_DRAWN:
        raise TreeError(f"a mask of {forest.num_tokens:,} tokens is not drawn. Expected {MOST_DRAWN:,} at most")
    figure = new_figure(_MASK, _MASK, layout="constrained")
    axes = figure.subplots()
    axes.imshow(dense_mask(forest).cpu().numpy(), cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest")
    for start in forest.node_starts[1:].tolist():
        axes.axhline(start - 0.5, color=_LINE, linewidth=0.6)
        axes.axvline(start - 0.5, color=_LINE, linewidth=0.6)
    axes.set_xlabel("key")
    axes.set_ylabel("query: sees the keys in blue")
    counts = {"sample": forest.num_samples, "node": len(forest.node_starts), "token": forest.num_tokens}
    axes.set_title(", ".join(many(count, name) for name, count in counts.items()))
    return png(figure)


def _draw_forests(axes: Axes, factors: dict[str, array[float]]) -> None:
    """Draw the factors of the forests, in falling order, over the share of the forests."""
    for (label, values), colour, line in zip(factors.items(), (_DARK, _LINE), ("-", "--"), strict=True):
        ordered = np.sort(np.asarray(values))[::-1]
        shares = (np.arange(len(ordered)) + 0.5) * 100 / len(ordered)
        dots = "o" if len(ordered) <= _DOTS else ""
        axes.plot(shares, ordered, line, marker=dots, markersize=3, color=colour, linewidth=1.4, label=label)
    axes.set_xlim(0, 100)
    axes.set_ylim(0.9, max(1.5, 1.1 * max(map(max, factors.values()))))
    axes.axhline(1, color="#888888", linewidth=0.8)
    axes.set_xlabel("forests, largest gain first")
    axes.set_ylabel("times fewer after folding\n(1: no gain)")
    axes.xaxis.set_major_formatter("{x:.0f} %")
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.legend(frameon=False, fontsize=7, loc="best")
    plain_axes(axes)


def _draw_total(axes: Axes, savings: Savings) -> None:
    """Draw tokens, attention pairs and FLOPs after folding as shares of the numbers before it."""
    sums = savings.sums
    ratios = {
        "tokens": sums.tree_token_ratio,
        "attention\npairs": savings.computed_pairs / sums.pairs_before,
        "training\nFLOPs": 1 / savings.flop_factor,
    }
    for place, ratio in enumerate(ratios.values()):
        left = 100 * ratio
        axes.barh(place, 100, height=0.7, color=_FILL, label="before" if place == 0 else None)
        axes.barh(place, left, height=0.7, color=_DARK, label="after" if place == 0 else None)
        x, colour = (2.0, "white") if left > 50 else (left + 2, "black")  # in the wider part of the bar
        axes.text(x, place, f"{left:.1f} %, {1 / ratio:.2f}x fewer", color=colour, fontsize=7, va="center")
    axes.set_yticks(range(len(ratios)), list(ratios))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("left of all forests together")
    axes.xaxis.set_major_formatter("{x:.0f} %")
    axes.legend(frameon=False, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 0.98), ncols=2)
    plain_axes(axes)
