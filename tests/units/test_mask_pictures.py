"""The picture of a forest's attention mask."""

import io

import numpy as np
import pytest
from PIL import Image
from support.errors import refused

from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.plot import MOST_DRAWN, plot_mask

pytest.importorskip("matplotlib", reason="the extra `plot` brings it")


def test_the_picture_of_the_mask_is_dark_where_a_query_sees_a_key():
    png = plot_mask(PrefixForest.from_sequences([[1, 2, 10, 11], [1, 2, 20, 21, 22]]))
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    blue = pixels[..., 2] - pixels[..., 0]  # 8 of the palest blue of the colour map, more of darker ones
    drawn = (pixels == [247, 251, 255]).all(-1) | (blue > 100)
    (top, *_, bottom), (left, *_, right) = (np.flatnonzero(drawn.sum(axis) > 50) for axis in (1, 0))
    rows, columns = (
        [int(a + (b - a) * (cell + 0.5) / 7) for cell in range(7)] for a, b in ((top, bottom), (left, right))
    )
    seen = ["".join("#" if blue[row, column] > 100 else "." for column in columns) for row in rows]
    # The prompt 1 2, then 10 11, and 20 21 22, which do not see 10 11.
    assert seen == ["#......", "##.....", "###....", "####...", "##..#..", "##..##.", "##..###"]
    with refused("E801", "2,049 tokens"):
        plot_mask(PrefixForest.from_sequences([list(range(MOST_DRAWN + 1))]))
