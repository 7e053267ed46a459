"""`stats --plot`: draws lengths of the samples, entropy of the target's distributions, mass by shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.eagle3.inspect.figures import Stats
from niels_gpt.pictures import new_figure, plain_axes, png, set_title

if TYPE_CHECKING:  # at run time inside the functions: loading matplotlib takes a second
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 7.2, 2.8  # inches
_FILL, _LINE = "#9ec5e8", "#c2410c"  # one light and one dark, for readers who cannot tell blue from orange
_BINS = 24
_COLOURS_IN_FILE = 32


def plot(numbers: Stats, name: str) -> bytes:
    """Return a PNG of 720 x 280 pixels, some 10 kB. name: of the cache, for the title.

    Raises: ImportError without matplotlib, which the extra `pipelines` brings.
    """
    figure = new_figure(_WIDTH, _HEIGHT, layout="constrained")
    supervised = 100 * numbers.share(int(numbers.supervised.sum()))
    title = f"{name}: {len(numbers.lengths):,} samples, {numbers.tokens:,} tokens, {supervised:.0f} % with loss"
    set_title(figure, title)
    draft, kept = numbers.draft_mass, numbers.kept_mass
    panels = figure.subplots(1, 3 if draft else 2)
    _histogram(panels[0], numbers.lengths, "tokens of a sample", "samples")
    _histogram(panels[1], numbers.entropy, "entropy of the target, nats", "positions")
    if draft:
        masses = {"in the draft vocabulary": draft.by_shard, "kept by top k": kept.by_shard if kept else []}
        _by_shard(panels[2], masses)
    return png(figure, _COLOURS_IN_FILE)


def _histogram(axes: Axes, values: NDArray[Any], label: str, what: str) -> None:
    axes.set_xlabel(f"{label}\n(dashed: the median)" if len(values) else f"{label}: none")
    axes.set_ylabel(f"share of {what}")
    if len(values):
        heights, edges = np.histogram(values, bins=_BINS, range=(0, float(values.max()) or 1))
        axes.stairs(100 * heights / len(values), edges, color=_FILL, fill=True)
        axes.axvline(float(np.median(values)), color=_LINE, linestyle="--", linewidth=1.2)
    axes.yaxis.set_major_formatter("{x:.0f} %")
    plain_axes(axes)


def _by_shard(axes: Axes, masses: dict[str, list[float]]) -> None:
    for (label, values), colour, marker in zip(masses.items(), (_LINE, "#1d5f9e"), "ox", strict=True):
        if values:
            axes.plot(range(len(values)), values, marker, color=colour, markersize=4, label=label)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("shard")
    axes.set_ylabel("mean share of mass")
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.legend(frameon=False, fontsize=7, loc="lower left")
    plain_axes(axes)
