"""Shares of a mixture as docs/reading.md has them, in plain integers: how many of a block are whose, and where."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.number_caches import plain_mix

from niels_gpt.sampling.permutation import random_keys
from niels_gpt.sampling.shares import Phase, whole_weights


def plain_counts(weights, samples):
    """Share out the first samples as docs/reading.md says, in plain integers: the slow oracle."""
    exact = {source: Fraction(str(float(weight))) for source, weight in enumerate(weights)}
    counts = [0] * len(weights)
    left, weight_left = Fraction(samples), sum(exact.values())
    for source in sorted(exact, key=lambda source: (-exact[source], source)):
        counts[source] = int(left * exact[source] / weight_left + Fraction(1, 2))
        left, weight_left = left - counts[source], weight_left - exact[source]
    return counts


@settings(derandomize=True, max_examples=40)
@given(
    weights=st.lists(st.floats(0.05, 20) | st.integers(1, 5), min_size=1, max_size=6),
    block_size=st.integers(1, 300),
    first=st.just(0) | st.integers(0, 10**12),
)
def test_counts_are_exact_never_fall_and_follow_from_the_block(weights, block_size, first):
    phase = Phase(0, 0, block_size, None, [0] * len(weights), whole_weights(list(map(float, weights))))
    counts = [phase.before(block) for block in range(first, first + 12)]
    share = [Fraction(str(float(weight))) for weight in weights]
    furthest = Fraction(1, 2) + sum(Fraction(1, number) for number in range(1, len(weights))) / 2
    for block, found in enumerate(counts, first):
        assert found == plain_counts(weights, block * block_size) and sum(found) == block * block_size
        exact = [block * block_size * one / sum(share) for one in share]
        assert max(abs(one - other) for one, other in zip(found, exact, strict=True)) <= furthest
    assert (np.diff(np.array(counts), axis=0) >= 0).all()


def plain_drawn(places, counts, key, block):
    """Spell out whose each place of a block is, by docs/reading.md, and how many of its source come before it."""
    salt = plain_mix((key + block) % 2**64)

    def run(node, size, counts):
        if size == 1:
            return [source for source, count in enumerate(counts) if count]
        half, drawn = size // 2, plain_mix((salt + node) % 2**64) % size
        upto = [(half * sum(counts[: source + 1]) + drawn) // size for source in range(len(counts))]
        left = [end - begin for begin, end in pairwise([0, *upto])]
        right = [count - one for count, one in zip(counts, left, strict=True)]
        return run(2 * node, half, left) + run(2 * node + 1, size - half, right)

    order = run(1, places, counts)
    return [(source, order[:place].count(source)) for place, source in enumerate(order)]


@settings(derandomize=True, max_examples=40)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    seed=st.integers(0, 2**32),
    block=st.integers(0, 10**12),
)
def test_the_places_of_a_block_are_the_documented_ones(counts, seed, block):
    size = sum(counts)
    phase = Phase(7, block, size, 1, [3] * len(counts), counts, counts)
    (key,) = random_keys(seed, 1, purpose=1)
    sources, numbers = phase.located(7 + np.arange(size), key)
    expected = plain_drawn(size, counts, int(key), block)
    assert list(zip(sources.tolist(), (numbers - 3).tolist(), strict=True)) == expected
    assert [sources.tolist().count(source) for source in range(len(counts))] == counts
    alone = [phase.located(np.array([7 + place]), key) for place in range(0, size, 7)]
    assert [(int(source[0]), int(number[0]) - 3) for source, number in alone] == expected[::7]


def test_the_places_of_seed_0_never_change():
    (key,) = random_keys(0, 1, purpose=1)
    phase = Phase(0, 0, 12, None, [0, 0, 0], [3, 2, 1])
    sources, numbers = phase.located(np.arange(24), key)
    assert sources.tolist() == [1, 0, 2, 0, 0, 1, 0, 0, 1, 0, 2, 1, 0, 0, 1, 0, 2, 1, 0, 0, 1, 0, 1, 2]
    assert numbers.tolist() == [0, 0, 0, 1, 2, 1, 3, 4, 2, 5, 1, 3, 6, 7, 4, 8, 2, 5, 9, 10, 6, 11, 7, 3]
