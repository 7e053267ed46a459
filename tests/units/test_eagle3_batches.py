"""Which rows of a shard run through the target together, and by which fields two plans differ."""

from hypothesis import given
from hypothesis import strategies as st
from support.errors import refused

from niels_gpt.eagle3.format.plan import differing_fields, plan_batches


def batches(lengths, batch_size, max_batch_tokens, seq_length=24):
    return plan_batches(lengths, batch_size, max_batch_tokens, seq_length=seq_length)


def test_the_longest_rows_run_first_and_equally_long_ones_by_their_number():
    found = batches([5, 17, 8, 17, 1], batch_size=2, max_batch_tokens=1000)
    assert found == [(24, [1, 3]), (8, [2, 0]), (8, [4])]
    with refused("E102", "row 1", "25 tokens", "seq_length, 24"):
        batches([3, 25], batch_size=1, max_batch_tokens=8)


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 7), st.integers(1, 200), st.integers(40, 50))
def test_each_row_is_in_one_batch_that_holds_it(lengths, size, tokens, slots):
    found = batches(lengths, size, tokens, slots)
    assert sorted(row for _, rows in found for row in rows) == list(range(len(lengths)))
    for width, rows in found:
        longest = max(lengths[row] for row in rows)
        assert longest <= width <= slots and (width == slots or (width - longest < 8 and width % 8 == 0))
        assert len(rows) <= size and (len(rows) == 1 or len(rows) * width <= tokens)


def test_fields_that_differ_are_named_by_their_place_in_order():
    left = {"a": 1, "b": {"c": 1, "d": {"e": [1]}}, "g": None}
    right = {"a": 2, "b": {"c": 1, "d": {"e": [2]}, "f": 1}}
    assert differing_fields(left, right) == ["a", "b.d.e", "b.f", "g"]
    assert differing_fields(left, left) == []
