"""The order of an epoch: docs/reading.md's rules spelled out in plain integers beside the vectorized code."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.number_caches import WRAP, plain_mix

from niels_gpt.sampling.permutation import ROUNDS, mix, permute, random_keys


def plain_permute(index, size, keys, tweak):
    half = 1
    while 4**half < size:
        half += 1
    while True:
        left, right = divmod(index, 2**half)
        for key in keys:
            left, right = right, left ^ plain_mix((right + plain_mix((key + tweak) % WRAP)) % WRAP) % 2**half
        index = left * 2**half + right
        if index < size:
            return index


@settings(derandomize=True, max_examples=60)
@given(size=st.integers(1, 10**12), seed=st.integers(-(2**63), 2**64 - 1), data=st.data())
def test_the_vectorized_order_is_the_documented_one(size, seed, data):
    drawn = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 2**40)), min_size=1, max_size=8))
    indices, tweaks = (np.array([pair[i] for pair in drawn], dtype=np.int64) for i in (0, 1))
    keys = random_keys(seed, ROUNDS)
    expected = [plain_permute(index, size, keys.tolist(), tweak) for index, tweak in drawn]
    assert permute(indices, size, keys, tweaks).tolist() == expected
    alone = [int(permute(indices[i : i + 1], size, keys, tweaks[i : i + 1])[0]) for i in range(len(drawn))]
    assert alone == expected


@pytest.mark.parametrize("tweaks", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 65, 1000, 5000])
def test_many_indices_have_the_places_that_each_has_alone(size, tweaks):
    # So many that the rounds look F up instead of computing it.
    samples, keys = np.arange(4000) % (tweaks * size), random_keys(7, ROUNDS)
    tweak_of, indices = np.divmod(samples, size)
    found = permute(indices, size, keys, tweak_of[:1] + 5 if tweaks == 1 else tweak_of + 5)
    for place in range(0, 4000, 97):
        index, tweak = int(indices[place]), int(tweak_of[place]) + 5
        assert found[place] == plain_permute(index, size, keys.tolist(), tweak), place


@settings(derandomize=True, max_examples=40)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32), tweak=st.integers(0, 2**32))
def test_every_index_has_one_place(size, seed, tweak):
    found = permute(np.arange(size), size, random_keys(seed, ROUNDS), np.array([tweak]))
    assert sorted(found.tolist()) == list(range(size))


def test_the_order_of_seed_0_never_changes():
    keys = random_keys(0, ROUNDS)
    assert [permute(np.arange(10), 10, keys, np.array([epoch])).tolist() for epoch in (0, 1)] == [
        [3, 6, 1, 2, 0, 4, 5, 8, 9, 7],
        [3, 8, 1, 6, 2, 4, 5, 0, 7, 9],
    ]


def test_keys_are_those_of_a_torch_generator():
    drawn = torch.randint(-(2**63), 2**63 - 1, (9,), generator=torch.Generator().manual_seed(5)).tolist()
    assert random_keys(5, 9).tolist() == [number % WRAP for number in drawn]


def test_all_64_bits_of_a_seed_matter():
    assert len({tuple(random_keys(seed, 2).tolist()) for seed in (0, 2**32, 2**40, 2**63, -1, 2**32 - 1)}) == 6
    upper = plain_mix(2**8)  # 2 ** 40 shifted right by 32
    assert random_keys(2**40, 1).tolist() == [(random_keys(0, 1).tolist()[0] + upper) % WRAP]


def test_another_purpose_has_other_keys():
    one, other = (random_keys(5, 3, purpose=purpose).tolist() for purpose in (0, 1))
    assert other == [(key + plain_mix(1)) % WRAP for key in one]


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_that_torch_does_not_take_is_refused(seed):
    with pytest.raises(ValueError, match=r"seed=.*expected an integer from -2\*\*63 to 2\*\*64 - 1"):
        random_keys(seed, 1)


def test_mix_is_the_finalizer_of_splitmix64():
    # SplitMix64 with seed 0 begins so: its outputs are mix of the multiples of its increment.
    steps = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(steps).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
