"""The shuffle buffer: every item once, in an order that the seed decides, in bounded memory.

Run: pytest tests/test_shuffle_buffer.py
"""

from collections.abc import Iterator
from itertools import count, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.build.shuffle import shuffled

ITEMS, SIZES, SEEDS = st.integers(0, 60), st.integers(2, 20), st.integers(0, 2**32)


def order(num_items: int, size: int | None, seed: int = 0) -> list[int]:
    """Return the order in which 0, 1, 2, ... come out."""
    return list(shuffled(range(num_items), size=size, generator=torch.Generator().manual_seed(seed)))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(num_items=ITEMS, size=SIZES, seed=SEEDS)
def test_every_item_comes_once(num_items: int, size: int, seed: int) -> None:
    assert sorted(order(num_items, size, seed)) == list(range(num_items))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(num_items=ITEMS, size=SIZES, seed=SEEDS)
def test_the_same_seed_gives_the_same_order(num_items: int, size: int, seed: int) -> None:
    assert order(num_items, size, seed) == order(num_items, size, seed)


def test_another_seed_gives_another_order() -> None:
    assert order(100, 10, seed=1) != order(100, 10, seed=2)


@pytest.mark.parametrize("size", [None, 0, 1])
def test_no_buffer_keeps_the_order(size: int | None) -> None:
    assert order(50, size) == list(range(50))


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="shuffle_buffer=-1"):
        order(3, -1)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(num_items=ITEMS, size=SIZES, seed=SEEDS)
def test_no_item_comes_earlier_than_the_buffer_allows(num_items: int, size: int, seed: int) -> None:
    assert all(place >= item - size + 1 for place, item in enumerate(order(num_items, size, seed)))


def test_a_buffer_larger_than_the_stream_is_a_plain_permutation() -> None:
    expected = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()
    assert order(20, 1000) == expected


def test_a_buffer_of_2_over_4_items_by_hand() -> None:
    generator = torch.Generator().manual_seed(3)
    draws = torch.randint(2, (1024,), generator=generator).tolist()  # used from the end
    held, expected = [0, 1], []
    for item in (2, 3):
        slot = draws.pop()
        expected.append(held[slot])
        held[slot] = item
    expected += [held[slot] for slot in torch.randperm(2, generator=generator).tolist()]
    assert order(4, 2, seed=3) == expected


def test_more_items_than_draws_made_at_once_still_come_once() -> None:
    assert sorted(order(5000, 7)) == list(range(5000))


@pytest.mark.parametrize(("size", "ahead"), [(None, 0), (1, 0), (2, 2), (5, 5)])
def test_an_endless_stream_is_read_only_a_buffer_ahead(size: int | None, ahead: int) -> None:
    consumed: list[int] = []

    def endless() -> Iterator[int]:
        for item in count():
            consumed.append(item)
            yield item

    stream = shuffled(endless(), size=size, generator=torch.Generator().manual_seed(0))
    for taken in range(1, 30):
        assert len(list(islice(stream, 1))) == 1
        assert len(consumed) == taken + ahead
