"""Draw the lengths of the documents of a cache, and the supervised share of each sft example."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.documents import lengths, supervised_counts
from niels_gpt.cache.formats import SPLITS
from niels_gpt.display.pictures import new_figure, plain_axes, png
from niels_gpt.kinds.kind import Cache
from niels_gpt.storage.meta_json import printable

if TYPE_CHECKING:  # at run time imported by the functions that draw: matplotlib takes long to load
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 7.2, 2.8  # inches
_COLOURS = {"train": "#9ec5e8", "val": "#c2410c"}  # light and dark, to be told apart without colour vision
_MEDIANS = {"train": "#1d5f9e", "val": "#c2410c"}
_MIN_BINS, _MAX_BINS = 8, 32  # more documents, more bins
_LEAST_RANGE = 8  # of the axis: its longest length is at least 8 times its shortest
_COLOURS_IN_FILE = 32

_BySplit = dict[str, NDArray[Any]]


def plot(cache: Cache, name: str) -> bytes:
    """Return a PNG of 720 x 280 pixels, about 10 kB: the distribution of the lengths of a cache's documents.

    Each split is shown as shares of its documents, so that a small val is as tall as train. An sft cache has a second
    panel: the share of each example's tokens that is supervised. For a cache without documents a smaller picture says
    so. name: of the cache, for the title.
    """
    folder, meta = cache.folder, cache.meta
    name = printable(name).replace("$", r"\$")  # two of them would be a formula
    title = f"{meta['kind']}/{name}"
    sizes = {split: values for split in SPLITS if len(values := lengths(folder, meta, split))}
    if not sizes:
        return _notice(f"{title}: {'not built' if cache.is_stub else f'no {cache.kind.unit}s'}")
    if meta["kind"] == "sft":
        counts = {split: supervised_counts(folder, meta, split) for split in sizes}
        return png(_examples_figure(title, sizes, counts), _COLOURS_IN_FILE)
    return png(_documents_figure(title, sizes), _COLOURS_IN_FILE)


def _documents_figure(title: str, sizes: _BySplit) -> Figure:
    together = np.concatenate(list(sizes.values()))
    figure = _figure(f"{title}: {len(together):,} documents, median {np.median(together):,.0f} tokens")
    axes = figure.subplots()
    labels = {
        split: f"{split}: {len(found):,} documents, median {np.median(found):,.0f}" for split, found in sizes.items()
    }
    _draw_lengths(axes, sizes, labels, max_ticks=8)
    axes.set_xlabel("tokens of a document (logarithmic; dashed: the median)")
    axes.set_ylabel("share of documents")
    return figure


def _examples_figure(title: str, sizes: _BySplit, counts: _BySplit) -> Figure:
    loss, total = (sum(int(found.sum()) for found in group.values()) for group in (counts, sizes))
    examples = " and ".join(f"{len(found):,} {split}" for split, found in sizes.items()) + " examples"
    figure = _figure(f"{title}: {examples}, {100 * loss / total:.0f} % of all tokens with loss")
    left, right = figure.subplots(1, 2)
    labels = {split: f"{split}: median {np.median(found):,.0f}" for split, found in sizes.items()}
    _draw_lengths(left, sizes, labels, max_ticks=5)
    left.set_xlabel("tokens of an example (log.; dashed: the median)")
    left.set_ylabel("share of examples")
    shares = {split: 100 * counts[split] / sizes[split] for split in sizes}
    labels = {split: f"{split}: median {np.median(found):.0f} %" for split, found in shares.items()}
    _draw(right, shares, np.linspace(0, 100, 21), labels)
    right.set_xlim(0, 100)
    right.set_xlabel("tokens with loss in an example")
    right.xaxis.set_major_formatter("{x:.0f} %")
    return figure


def _figure(title: str) -> Figure:
    figure = new_figure(_WIDTH, _HEIGHT, layout="constrained")
    figure.suptitle(title, fontsize=min(11, 850 / len(title)), fontweight="bold")  # 850: as wide as the picture
    return figure


def _draw_lengths(axes: Axes, sizes: _BySplit, labels: dict[str, str], max_ticks: int) -> None:
    low, high = min(int(found.min()) for found in sizes.values()), max(int(found.max()) for found in sizes.values())
    if high < _LEAST_RANGE * low:  # otherwise a difference of a few tokens would fill the picture
        middle = (low * high) ** 0.5
        low, high = int(middle / _LEAST_RANGE**0.5) or 1, math.ceil(middle * _LEAST_RANGE**0.5)
    bins = min(_MAX_BINS, max(_MIN_BINS, round(2 * max(map(len, sizes.values())) ** (1 / 3))))
    # Edges at half numbers: each bin holds at least one whole number, so a gap means that no document has that length.
    edges = np.unique(np.floor(np.geomspace(low, high + 1, bins + 1))) - 0.5
    _draw(axes, sizes, edges, labels)
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1])
    ticks = _ticks(edges[0], edges[-1], max_ticks)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)


def _draw(axes: Axes, values: _BySplit, edges: NDArray[Any], labels: dict[str, str]) -> None:
    for split, found in values.items():
        heights = 100 * np.histogram(found, edges)[0] / len(found)
        style: dict[str, Any] = {"fill": True} if split == "train" else {"linewidth": 1.6}
        axes.stairs(heights, edges, color=_COLOURS[split], label=labels[split], **style)
        axes.axvline(float(np.median(found)), color=_MEDIANS[split], linestyle="--", linewidth=1.2)
    axes.yaxis.set_major_formatter("{x:.0f} %")
    plain_axes(axes, ticks=8)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}  # never over the bars
    look: dict[str, Any] = {"frameon": False, "handlelength": 1.2, "handletextpad": 0.5, "columnspacing": 1.2}
    legend = axes.legend(**place, **look, ncols=2, fontsize=8)
    legend.set_in_layout(False)  # otherwise a wide legend makes the panel narrow
    axes.set_title(" ", fontsize=8)  # room for the legend


def _ticks(low: float, high: float, max_ticks: int) -> list[int]:
    """Return at most `max_ticks` round numbers from low to high."""
    found: list[int] = []
    for steps in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [step * 10**power for power in range(16) for step in steps if low <= step * 10**power <= high]
        if len(found) <= max_ticks:
            break
    return found


def _notice(text: str) -> bytes:
    figure = new_figure(_WIDTH, 0.6)
    figure.text(0.5, 0.5, text, ha="center", va="center", fontsize=11)
    return png(figure, _COLOURS_IN_FILE)
