"""Best-fit decreasing: the rows that placing one piece after the other makes, and every piece once in every epoch."""

from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.number_caches import WRAP, plain_mix

from niels_gpt.cache import CacheError
from niels_gpt.sampling.packing.pieces import Pieces
from niels_gpt.sampling.packing.plan import MAX_PIECES, Plan, Turn

LENGTHS = st.integers(1, 30).flatmap(lambda T: st.tuples(st.just(T), st.lists(st.integers(1, T), min_size=1)))


def naive_rows(lengths, T):
    """Place the pieces one by one, the longest first, each in the fullest row that has room, the one so for longest."""
    rows = []
    rooms = []  # room, since when, row
    for time, piece in enumerate(sorted(range(len(lengths)), key=lambda piece: -lengths[piece])):
        fitting = [room for room in rooms if room[0] >= lengths[piece]]
        best = min(fitting, default=(T, 0, len(rows)))
        if fitting:
            rooms.remove(best)
        else:
            rows.append([])
        rows[best[2]].append(piece)
        rooms.append((best[0] - lengths[piece], time, best[2]))
    return rows


def test_a_plan_on_paper():
    """T = 10. 7; 6 opens a row; 4 fills 6 up; 3 fills 7 up; 2 2 2 2 2 fill a row together, and one begins the last."""
    plan = Plan(np.array([2, 3, 2, 7, 2, 6, 2, 4, 2, 2]), 10)
    assert [plan.lengths[one].tolist() for one in np.split(np.arange(10), plan.ends[:-1])] == [
        [7, 3],
        [6, 4],
        [2, 2, 2, 2, 2],
        [2],
    ]
    assert plan.pieces.tolist() == [3, 5, 7, 1, 0, 2, 4, 6, 8, 9]
    assert plan.slots.tolist() == [0, 3, 1, 2, 4, 5, 6, 7, 8, 9]


@settings(derandomize=True, max_examples=60)
@given(LENGTHS)
def test_lengths_placed_together_make_the_rows_of_pieces_placed_one_by_one(drawn):
    T, lengths = drawn
    plan = Plan(np.array(lengths), T)
    assert [plan.pieces[row].tolist() for row in np.split(plan.slots, plan.ends[:-1])] == naive_rows(lengths, T)


@settings(derandomize=True, max_examples=30)
@given(LENGTHS, st.integers(0, 2**40), st.integers(0, 2**64 - 1))
def test_in_every_epoch_each_piece_stands_once_in_a_place_of_its_length(drawn, epoch, key):
    T, lengths = drawn
    plan = Plan(np.array(lengths), T)
    counts, places = plan.located(np.arange(len(plan)))
    pieces = plan.pieces_at(places, Turn.of(epoch, plan.counts, np.array([key], dtype=np.uint64)))
    assert counts.sum() == len(lengths)
    assert sorted(pieces.tolist()) == list(range(len(lengths)))
    assert [lengths[piece] for piece in pieces] == plan.lengths[places].tolist()


def test_the_turn_of_an_epoch_is_as_the_format_says():
    """In plain integers, of lengths of 0, 1, 2, 12 and 30 pieces."""
    key, epoch, counts = 2**64 - 3, 5, [0, 1, 2, 12, 30]
    turn = Turn.of(epoch, np.array(counts), np.array([key], dtype=np.uint64))
    for length, count in enumerate(counts[1:], 1):
        h = plain_mix((plain_mix((key + epoch) % WRAP) + length) % WRAP)
        tried = (1 + plain_mix((h + j) % WRAP) % count for j in range(1, 65))
        a = next((a for a in tried if gcd(a, count) == 1), 1) if count > 2 else 1
        assert (turn.factors[length], turn.offsets[length]) == (a, plain_mix(h) % count)


def test_pieces_of_a_frequent_length_meet_others_in_each_epoch():
    """100 pairs of a 6 and a 4: in 20 epochs a piece of 6 has at least 10 different companions of 4."""
    plan = Plan(np.repeat([6, 4], 100), 10)
    places = np.arange(200)
    met = {}
    for epoch in range(20):
        pairs = plan.pieces_at(places, Turn.of(epoch, plan.counts, np.array([7], dtype=np.uint64))).reshape(-1, 2)
        for six, four in pairs.tolist():
            met.setdefault(six, set()).add(four)
    assert min(map(len, met.values())) >= 10


def test_a_plan_grows_with_the_longest_piece_and_not_with_the_row():
    plan = Plan(np.array([3, 9, 3]), 10**9)
    assert len(plan.counts) == len(plan.firsts) == 10 and plan.slots.tolist() == [0, 1, 2] and len(plan) == 1


def test_more_pieces_than_a_plan_numbers_are_refused(tmp_path):
    with pytest.raises(CacheError, match=f"at most {MAX_PIECES}"):
        Pieces(np.array([0, 2**32]), 1, "split", tmp_path)
