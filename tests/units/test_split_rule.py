"""Which side of an exact share a key is on, and how equal keys are counted in passes or ranges."""

import random
from fractions import Fraction

import numpy as np
import pytest

from niels_gpt.engine.split import TextSplit, count_duplicates


def test_a_share_is_compared_exactly():
    """The bound of a third is no float; its neighbours are told apart."""
    rule = TextSplit(Fraction(1, 3), seed=0)
    assert rule.bound == 6148914691236517206  # ceil(2**64 / 3)
    assert rule.in_val(np.array([rule.bound - 1, rule.bound], dtype=np.uint64)).tolist() == [True, False]
    ends = np.array([0, 2**64 - 1], dtype=np.uint64)
    assert not TextSplit(Fraction(0), 0).in_val(ends).any()
    assert TextSplit(Fraction(1), 0).in_val(ends).all()


@pytest.mark.parametrize("by_ranges", [False, True])
@pytest.mark.parametrize("most", [1, 100, 1 << 24])
def test_duplicates_are_counted_in_passes_or_ranges(tmp_path, most, by_ranges):
    folder = tmp_path if by_ranges else None
    digests = np.random.default_rng(0).integers(0, 2**64, 300, dtype=np.uint64)
    found = np.concatenate([digests, digests[:50], np.repeat(digests[:1], 100)])
    found.tofile(tmp_path / "texts.bin")
    digests[::2].tofile(tmp_path / "more.bin")
    paths = [tmp_path / "texts.bin", tmp_path / "more.bin"]
    assert count_duplicates(paths[0], folder=folder, max_digests=most) == 150
    assert count_duplicates(*paths, folder=folder, max_digests=most) == 300
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    np.empty(0, np.uint64).tofile(paths[0])
    assert count_duplicates(paths[0], folder=folder, max_digests=most) == 0


def test_duplicates_of_several_files_are_counted_in_passes(tmp_path):
    chance, digests = random.Random(0), []
    for number in range(3):
        some = [chance.randrange(1 << 10) << 54 for _ in range(700)]
        (tmp_path / str(number)).write_bytes(b"".join(digest.to_bytes(8, "little") for digest in some))
        digests += some
    paths = [tmp_path / str(number) for number in range(3)]
    for most in (1 << 20, 100, 7):
        assert count_duplicates(*paths, max_digests=most) == len(digests) - len(set(digests))
