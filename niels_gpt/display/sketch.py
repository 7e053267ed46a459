"""A sketch of distributions: an SVG in fewer than 1,000 characters of Markdown, which Dagster shows in its table."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

Distributions = Mapping[str, Mapping[str, NDArray[Any]]]
"""What the values are -> split -> values, at least one of them in each split."""
_BINS, _STEP, _HIGH, _PANEL = 16, 20, 40, 64  # pixels, but the bins
_WHOLE = 100  # from here on without decimals
_LEAST_RANGE = 8  # from the smallest to the largest value, of a logarithmic axis
_ROOT = "xmlns='http://www.w3.org/2000/svg' width='340' font-family='Arial' font-size='12' fill='gray'"
_LOOKS = ("fill='skyblue'", "fill='none' stroke='chocolate' stroke-width='2'")  # of the first split, and of the second
_SAFE = " '/:;=,.()"  # they mean nothing in an address, nor in Markdown between < and >


def sketch(name: str, distributions: Distributions) -> str:
    """Return Markdown with a histogram for each kind of value: the first split as bars, the second one as a line.

    Each split is as tall as the other one. name: of the items, which stands for a picture that is not shown.
    """
    drawn = [_panel(place * _PANEL, *each) for place, each in enumerate(distributions.items())]
    svg = f"<svg {_ROOT} height='{_PANEL * len(drawn)}'>{''.join(drawn)}</svg>"
    splits = next(iter(distributions.values()))
    legend = "\n\nbars: {}, line: {}".format(*splits) if len(splits) > 1 else ""
    return f"![{name}](<data:image/svg+xml,{quote(svg, safe=_SAFE)}>){legend}"


def _panel(y: int, title: str, splits: Mapping[str, NDArray[Any]]) -> str:
    values = np.concatenate([*splits.values()])
    low, high = values.min(), values.max()
    space = np.geomspace if high > _LEAST_RANGE * low > 0 else np.linspace
    edges = space(low, high, _BINS + 1)
    edges[[0, -1]] = low, high  # geomspace rounds
    paths = [
        f"<path {look} d='{_steps(y + _HIGH, np.histogram(found, edges)[0])}'/>"
        for look, found in zip(_LOOKS, splits.values(), strict=False)
    ]
    words = f"{title}: {_short(low)} to {_short(high)}, median {_short(np.median(values))}"
    return f"{''.join(paths)}<text y='{y + _HIGH + 16}'>{words}</text>"


def _steps(base: int, counts: NDArray[Any]) -> str:
    """Return an SVG path along the tops of the bars."""
    tops = [base, *(base - np.rint(_HIGH * counts / counts.max()).astype(int)).tolist()]
    moves = [f"V{top}" * (top != before) + f"h{_STEP}" for before, top in pairwise(tops)]
    return f"M0 {base}{''.join(moves)}V{base}"


def _short(value: Any) -> str:
    return f"{value:,.0f}" if value >= _WHOLE else f"{value:.3g}"
