"""A picture of an EAGLE-3 cache: lengths of its samples, entropy of the target's distributions, mass by shard."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.eagle3.stats import Stats

if TYPE_CHECKING:  # at run time inside the functions: who does not plot does not wait for matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _DPI = 7.2, 2.8, 100  # inches, and pixels per inch
_FILL, _LINE = "#9ec5e8", "#c2410c"  # light and dark too, for eyes that do not tell blue from orange
_BINS = 24
_COLOURS_IN_FILE = 32


def plot(found: Stats, name: str) -> bytes:
    """Return a PNG of 720 x 280 pixels, some 10 kB. name: of the cache, for the title.

    Raises: ImportError without matplotlib, which the extra `pipelines` brings.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install 'niels_gpt[pipelines]'") from error
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, facecolor="white", layout="constrained")
    supervised = 100 * found.share(int(found.supervised.sum()))
    title = f"{name}: {len(found.lengths):,} samples, {found.tokens:,} tokens, {supervised:.0f} % with loss"
    title = "".join(letter if letter.isprintable() else "?" for letter in title).replace("$", r"\$")
    figure.suptitle(title, fontsize=min(11, 850 / len(title)), fontweight="bold")  # 850: as wide as the picture
    panels = figure.subplots(1, 3 if found.draft_mass else 2)
    _histogram(panels[0], found.lengths, "tokens of a sample", "samples")
    _histogram(panels[1], found.entropy, "entropy of the target, nats", "positions")
    if found.draft_mass:
        _by_shard(panels[2], {"in the draft vocabulary": found.draft_mass, "kept by top k": found.kept_mass or []})
    return _png(figure)


def _histogram(axes: Axes, values: NDArray[Any], label: str, what: str) -> None:
    axes.set_xlabel(f"{label}\n(dashed: the median)" if len(values) else f"{label}: none")
    axes.set_ylabel(f"share of {what}")
    if len(values):
        heights, edges = np.histogram(values, bins=_BINS, range=(0, float(values.max()) or 1))
        axes.stairs(100 * heights / len(values), edges, color=_FILL, fill=True)
        axes.axvline(float(np.median(values)), color=_LINE, linestyle="--", linewidth=1.2)
    axes.yaxis.set_major_formatter("{x:.0f} %")
    _plain(axes)


def _by_shard(axes: Axes, masses: dict[str, list[float]]) -> None:
    for (label, values), colour, marker in zip(masses.items(), (_LINE, "#1d5f9e"), "ox", strict=True):
        if values:
            axes.plot(range(len(values)), values, marker, color=colour, markersize=4, label=label)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("shard")
    axes.set_ylabel("mean share of mass")
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.legend(frameon=False, fontsize=7, loc="lower left")
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=7)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(8)
    axes.spines[["top", "right"]].set_visible(False)


def _png(figure: Figure) -> bytes:
    from PIL import Image  # matplotlib itself writes PNGs with it

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    picture = Image.open(drawn).convert("RGB").quantize(_COLOURS_IN_FILE, dither=Image.Dither.NONE)
    picture.save(small, "png", optimize=True)  # a palette makes it a third as large
    return small.getvalue()
