"""The sketch of distributions: what Dagster shows without a click."""

import re
from itertools import pairwise
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest

from niels_gpt.display.sketch import sketch

INLINE = 1000
"""Characters of Markdown from which on Dagster shows a link."""


def drawn(text):
    """Return the paths and the texts of a sketch."""
    picture = ElementTree.fromstring(unquote(re.fullmatch("!.*<data:image/svg.xml,(.+)>.*", text, re.S)[1]))
    parts = [part for part in picture if part.tag.endswith("path")]
    return [part.get("d") for part in parts], [part.text for part in picture if part.tag.endswith("text")]


def heights(path):
    """Return the heights of a path's bars."""
    base, moves = re.match(r"M0 (\d+)(.*)", path).groups()
    level, found = int(base), []
    for move, number in re.findall(r"([Vh])(\d+)", moves):
        if move == "V":
            level = int(number)
        else:
            found.append(int(base) - level)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_two_panels_of_two_splits_stay_short_enough_to_be_shown(seed):
    random = np.random.default_rng(seed)
    lengths = {split: random.integers(1, 10 ** random.integers(1, 9), 1000) for split in ("train", "val")}
    shares = {split: random.uniform(0, 100, 1000) for split in lengths}
    text = sketch("examples", {"tokens per example": lengths, "times fewer after folding": shares})
    assert len(text) < INLINE and text.endswith("\n\nbars: train, line: val")
    paths, words = drawn(text)
    assert len(paths) == 4 and len(words) == 2
    assert all(max(heights(path)) == 40 for path in paths), "each split is as tall as the other one"


def test_the_bars_are_the_histogram_and_the_words_its_range():
    values = np.repeat(np.arange(1, 17), np.arange(1, 17))
    (path,), (words,) = drawn(sketch("documents", {"tokens per document": {"": values}}))
    assert words == "tokens per document: 1 to 16, median 12"
    counts = np.histogram(values, np.geomspace(1, 16, 17) + np.r_[np.zeros(16), 1e-9])[0]
    assert heights(path) == np.rint(40 * counts / counts.max()).astype(int).tolist()


@pytest.mark.parametrize("values", [[7], [0, 0], [0, 5], [3.5, 3.5]])
def test_few_values_have_a_sketch(values):
    (path,), (words,) = drawn(sketch("groups", {"tokens per group": {"": np.array(values)}}))
    bars = heights(path)
    assert max(bars) == 40 and f": {values[0]:.3g} to {values[-1]:.3g}," in words
    assert not any(first and second for first, second in pairwise(bars))
