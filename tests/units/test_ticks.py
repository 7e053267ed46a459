"""The numbers beside the axis of a picture."""

import pytest

from niels_gpt.cache.kind.plot import _ticks


@pytest.mark.parametrize(
    ("low", "high", "most", "ticks"),
    [
        (20, 200, 8, [20, 30, 50, 70, 100, 200]),
        (3, 3000, 9, [5, 10, 20, 50, 100, 200, 500, 1000, 2000]),
        (3, 3000, 8, [3, 10, 30, 100, 300, 1000, 3000]),
        (3, 3000, 5, [10, 100, 1000]),
        (1, 10**6, 5, [1, 10, 100, 1000, 10**4, 10**5, 10**6]),
    ],
)
def test_ticks_are_round_numbers(low, high, most, ticks):
    assert _ticks(low, high, most) == ticks
