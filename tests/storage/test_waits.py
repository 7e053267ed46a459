"""Waits between attempts: how long, and for how long a server may ask."""

import pytest

from niels_gpt.storage.waits import Waits, asked_seconds, causes, is_passing


def test_a_wait_doubles_up_to_the_longest_and_is_no_shorter_than_the_server_asks():
    waits = Waits(1.0, 10.0)
    assert [waits.after(failures) for failures in range(1, 7)] == [1, 2, 4, 8, 10, 10]
    assert waits.after(1, asked=300) == 300
    assert waits.after(3, asked=0) == waits.after(3, asked=-5) == 4
    assert [Waits(1.0, 100.0, factor=3).after(failures) for failures in (1, 2, 3)] == [1, 3, 9]


def test_jitter_makes_a_wait_longer_or_shorter_by_its_part():
    waits = {Waits(4.0, 10.0, jitter=0.25).after(2) for _ in range(200)}
    assert 6 <= min(waits) < 7 and 9 < max(waits) <= 10


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        ("30", 30, 30),
        ("Wed, 21 Oct 2015 07:28:00 GMT", -1e10, -1e8),
        ("Wed, 21 Oct 2015 07:28:00", -1e10, -1e8),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 1e9, 1e12),
    ],
)
def test_what_a_server_asks_for_is_seconds_or_a_date(value, low, high):
    seconds = asked_seconds({"Retry-After": value})
    assert seconds is not None and low <= seconds <= high
    assert asked_seconds({"retry-after": value}) is not None


@pytest.mark.parametrize("value", ["", "soon", "\u00b2", "9" * 400, "-1", "Mon, 01 Jan 2026 00:00:00 +" + "9" * 17])
def test_anything_else_is_nothing(value):
    assert asked_seconds({"Retry-After": value}) is None and asked_seconds({}) is None


def test_causes_of_an_error_are_found_also_in_a_circle():
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__context__ = second, first
    assert list(causes(first)) == [first, second]
    assert [status for status in (400, 404, 408, 416, 425, 429, 500, 503) if is_passing(status)] == [
        *(408, 425, 429, 500, 503)
    ]
