"""The shuffle buffer: every item once, in an order that the seed decides, in bounded memory."""

import hashlib
from itertools import count, groupby, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LONG
from support.errors import refused
from support.small_builds import batches_of

from niels_gpt.engine.stream import Change, Chunk, Shuffled, chunked

ITEMS, SIZES, SEEDS = st.integers(0, 60), st.integers(2, 20), st.integers(0, 2**32)


def order(num_items, size, seed=0):
    """Return the order in which 0, 1, 2, ... come out."""
    return [item for chunk in shuffled(num_items, size, seed) for item in chunk.items]


def shuffled(num_items, size, seed=0, each=7):
    """Yield the chunks that come out, where `each` items at a time go in."""
    chunks = (
        Chunk(list(range(first, min(first + each, num_items))), [Change(0, {}, None)])
        for first in range(0, num_items, each)
    )
    return Shuffled(size, seed).of(chunks, {})


@settings(derandomize=True, max_examples=100)
@given(num_items=ITEMS, size=SIZES, seed=SEEDS)
def test_every_item_comes_once_as_seed_and_buffer_allow(num_items, size, seed):
    found = order(num_items, size, seed)
    assert sorted(found) == list(range(num_items)) and found == order(num_items, size, seed)
    assert all(place >= item - size + 1 for place, item in enumerate(found))


def test_another_seed_gives_another_order_of_every_item_of_a_long_stream():
    found = [order(5000, 7, seed) for seed in (1, 2)]  # more than the 1,024 draws that are made at once
    assert found[0] != found[1] and [sorted(items) for items in found] == [list(range(5000))] * 2


@pytest.mark.parametrize("size", [None, 0, 1])
def test_no_buffer_keeps_the_order_and_nothing_is_drawn(size):
    assert order(50, size) == list(range(50)) and states(50, size) == [None] * 50
    with refused("E102", "shuffle_buffer=-1"):
        order(3, -1)


def test_a_buffer_of_2_over_4_items_by_hand():
    generator = torch.Generator().manual_seed(3)
    draws = torch.randint(2, (1024,), generator=generator).tolist()  # used from the end
    held, expected = [0, 1], []
    for item in (2, 3):
        slot = draws.pop()
        expected.append(held[slot])
        held[slot] = item
    expected += [held[slot] for slot in torch.randperm(2, generator=generator).tolist()]
    assert order(4, 2, seed=3) == expected
    expected = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()
    assert order(20, 1000) == expected


@pytest.mark.parametrize(("size", "ahead"), [(None, 0), (1, 0), (2, 2), (5, 5)])
def test_an_endless_stream_is_read_only_a_buffer_ahead(size, ahead):
    consumed = []

    def endless():
        for item in count():
            consumed.append(item)
            yield item

    stream = Shuffled(size, 0).of((Chunk([item], [Change(0, {}, None)]) for item in endless()), {})
    for taken in range(1, 30):
        assert len(next(stream).items) == 1
        assert len(consumed) == taken + ahead


def states(num_items, size, seed=0, each=7):
    """Return the generator's state as of each item that comes out."""
    chunks = shuffled(num_items, size, seed, each)
    return [chunk.state(number).generator for chunk in chunks for number in range(len(chunk.items))]


def test_the_state_is_that_of_the_generator_after_so_many_draws():
    generator = torch.Generator().manual_seed(5)
    expected = [sha256_of(generator)]
    for draw in (1, 2):
        torch.randint(4, (1024,), generator=generator)
        expected.append(sha256_of(generator))
        assert states(1500, 4, seed=5)[(draw - 1) * 1024] == expected[draw]
    torch.randperm(4, generator=generator)
    assert states(1500, 4, seed=5)[-1] == sha256_of(generator)


def sha256_of(generator):
    return hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()


def test_the_state_changes_only_with_a_draw():
    found = states(3000, 7)
    assert len(list(groupby(found))) == len(set(found)) == 4
    assert states(3000, 7, seed=1)[0] != found[0] and states(3000, 7) == found


@settings(derandomize=True, max_examples=100 if LONG else 30)
@given(count=st.integers(0, 3000), size=st.integers(2, 40), cuts=st.lists(st.integers(0, 3000), max_size=9))
def test_the_shuffle_does_not_depend_on_chunks(count, size, cuts):
    def outcome(edges):
        chunks = [
            Chunk(list(range(a, b)), [Change(n, {"read": a + n}, None) for n in range(b - a)])
            for a, b in pairwise(edges)
            if a < b
        ]
        found = Shuffled(size, 7).of(chunks, {"end": 1})
        return [(item, chunk.state(number)) for chunk in found for number, item in enumerate(chunk.items)]

    one = outcome(list(range(count + 1)))
    assert outcome(sorted({0, count, *(cut for cut in cuts if cut < count)})) == one


def test_chunks_of_single_documents_close_by_number_and_by_characters(monkeypatch):
    batches_of(monkeypatch, 3, chars=10)
    counters, position = {"n": 0}, {"row": 0}

    def texts():
        for number, text in enumerate(["a", "b", "c", "d" * 10, "e", "f"]):
            counters["n"], position["row"] = number // 2, number
            yield text

    chunks = list(chunked(texts(), counters, position, len))
    assert [chunk.items for chunk in chunks] == [["a", "b", "c"], ["d" * 10], ["e", "f"]]
    states = [chunk.state(number) for chunk in chunks for number in range(len(chunk.items))]
    assert [(state.counters["n"], state.position["row"]) for state in states] == [(n // 2, n) for n in range(6)]
