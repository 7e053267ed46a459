"""Mixtures: exact shares, carried from block to block; each source in its own epochs; one order for all splits of work.

Source s holds the ids from 10,000 * s, so that a row tells both its source and its place.

Run: pytest tests/test_mixture_stream.py
"""

import json
import pickle
import tempfile
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_epoch_stream import GlobalBatch, firsts, joined, number_cache
from test_permutation import WRAP, plain_mix
from test_pretrain_window_sampling import write_shards

from niels_gpt.cache import CacheError
from niels_gpt.cache.meta import write_meta
from niels_gpt.sampling import EpochStream, MixtureStream
from niels_gpt.sampling.permutation import random_keys
from niels_gpt.sampling.shares import Phase, whole_weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:.*random_offset moves none"),
]
APART = 10_000


def sources(folder: Path, windows: Sequence[int]) -> list[Path]:
    """Write a split for each source, of so many windows of T = 1."""
    return [
        write_shards(folder / f"source_{source}" / "train", [range(source * APART, source * APART + count + 1)])
        for source, count in enumerate(windows)
    ]


def mixture(
    folders: Sequence[Path],
    weights: Sequence[float],
    *,
    G: int = 4,
    rank: int = 0,
    world: int = 1,
    seed: int = 0,
    streams: dict[str, Any] | None = None,
    **changed: Any,
) -> MixtureStream:
    common = {"T": 1, "global_batch_size": G, "rank": rank, "world_size": world, "seed": 0, **(streams or {})}
    return MixtureStream(
        [EpochStream(str(folder), **common) for folder in folders],
        weights,
        seed=seed,
        **{"block_size": 10, **changed},
    )


def run(
    folders: Sequence[Path],
    weights: Sequence[float],
    steps: int | None = None,
    *,
    world: int = 1,
    state: Any = None,
    **changed: Any,
) -> list[GlobalBatch]:
    """Take some steps of a mixture with all its ranks; None: all there are."""
    ranks = []
    for rank in range(world):
        one = mixture(folders, weights, rank=rank, world=world, **changed)
        if state is not None:
            one.load_state_dict(state)
        ranks.append(list(islice(one, steps)))
    batches = joined(ranks)
    for batch in batches:
        assert batch.source == [first // APART for first in batch.firsts], "source does not say where a row is from"
    return batches


def sources_of(batches: Sequence[GlobalBatch]) -> list[int]:
    return [first // APART for first in firsts(batches)]


def assert_in_epochs(taken: Sequence[int], windows: Sequence[int]) -> None:
    """Every source is seen whole before any window of it comes again."""
    for source, count in enumerate(windows):
        own = [first for first in taken if first // APART == source]
        for epoch in range(-(-len(own) // count)):
            part = own[epoch * count : (epoch + 1) * count]
            assert len(set(part)) == len(part)
        assert set(own) <= set(range(source * APART, source * APART + count))


def plain_counts(weights: Sequence[float], samples: int) -> list[int]:
    """Share out the first samples as docs/reading.md says, in plain integers: the slow oracle."""
    exact = {source: Fraction(str(float(weight))) for source, weight in enumerate(weights)}
    counts = [0] * len(weights)
    left, weight_left = Fraction(samples), sum(exact.values())
    for source in sorted(exact, key=lambda source: (-exact[source], source)):
        counts[source] = int(left * exact[source] / weight_left + Fraction(1, 2))
        left, weight_left = left - counts[source], weight_left - exact[source]
    return counts


# Counts.


def test_the_counts_of_a_block_are_the_weights_and_what_rounding_leaves_is_carried_over(tmp_path: Path) -> None:
    """Weights 5, 3 and 1: of 9 blocks of 10 exactly 50, 30 and 10; of each block 5.6, 3.3 and 1.1, up or down."""
    one = mixture(sources(tmp_path, [7, 7, 7]), [5, 3, 1])
    assert one.counts.tolist() == [6, 3, 1] and one.counts.dtype == np.int64
    batches = run(sources(tmp_path, [7, 7, 7]), [5, 3, 1], 27, G=10)
    found = [[Counter(sources_of([batch]))[source] for source in range(3)] for batch in batches]
    assert found == [one.counts_of(block).tolist() for block in range(27)]
    assert all(np.sum(found[first : first + 9], axis=0).tolist() == [50, 30, 10] for first in (0, 9, 18))
    assert [set(column) for column in zip(*found, strict=True)] == [{5, 6}, {3, 4}, {1, 2}]


def test_a_source_of_little_weight_has_its_exact_share(tmp_path: Path) -> None:
    """0.0007 of blocks of 2,048 is 1.4336 samples: 7 in 10,000, not 1 in 2,048, early and a million blocks later."""
    folders = sources(tmp_path, [50, 9])
    one = mixture(folders, [0.9993, 0.0007], block_size=2048)
    assert sum(int(one.counts_of(block)[1]) for block in range(625)) == 896  # of 1,280,000 samples
    for first in (0, 10**6):
        state = {**one.state_dict(), "consumed_samples": first * 2048}
        del state["checksum"]
        taken = sources_of(run(folders, [0.9993, 0.0007], 125, G=2048, state=state, block_size=2048))
        assert taken.count(1) in (179, 180) and len(taken) == 256_000  # 179.2
    rare = mixture(folders, [1, 0.001], block_size=10)
    assert sum(int(rare.counts_of(block)[1]) for block in range(1001)) == 10


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    weights=st.lists(st.floats(0.05, 20) | st.integers(1, 5), min_size=1, max_size=6),
    block_size=st.integers(1, 300),
    first=st.just(0) | st.integers(0, 10**12),
)
def test_the_counts_are_exact_never_fall_and_follow_from_the_number_of_the_block(
    weights: list[float], block_size: int, first: int
) -> None:
    phase = Phase(0, 0, block_size, None, [0] * len(weights), whole_weights(list(map(float, weights))))
    counts = [phase.before(block) for block in range(first, first + 12)]
    share = [Fraction(str(float(weight))) for weight in weights]
    furthest = Fraction(1, 2) + sum(Fraction(1, number) for number in range(1, len(weights))) / 2
    for block, found in enumerate(counts, first):
        assert found == plain_counts(weights, block * block_size) and sum(found) == block * block_size
        exact = [block * block_size * one / sum(share) for one in share]
        assert max(abs(one - other) for one, other in zip(found, exact, strict=True)) <= furthest
    assert (np.diff(np.array(counts), axis=0) >= 0).all()


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    weights=st.lists(st.floats(0.05, 20), min_size=1, max_size=5),
    block_size=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    world=st.sampled_from([1, 2, 3]),
)
def test_every_block_has_its_counts(weights: list[float], block_size: int, seed: int, world: int) -> None:
    windows = [3, 20, 1, 50, 9][: len(weights)]
    blocks = min(5, 1 + 600 // block_size)
    changed: dict[str, Any] = {"seed": seed, "block_size": block_size, "G": 6}
    with tempfile.TemporaryDirectory() as name:
        folders = sources(Path(name), windows)
        one = mixture(folders, weights, **changed)
        taken = firsts(run(folders, weights, -(-blocks * block_size // 6), world=world, **changed))
    for block in range(blocks):
        found = Counter(first // APART for first in taken[block * block_size : (block + 1) * block_size])
        assert [found[source] for source in range(len(weights))] == one.counts_of(block).tolist()
    assert_in_epochs(taken, windows)


def test_equal_weights_that_do_not_divide_a_block_still_fill_it(tmp_path: Path) -> None:
    one = mixture(sources(tmp_path, [5, 5, 5]), [1, 1, 1])
    assert sorted(one.counts.tolist()) == [3, 3, 4]
    assert sum(one.counts_of(block) for block in range(3)).tolist() == [10, 10, 10]


def test_a_block_may_have_fewer_places_than_there_are_sources(tmp_path: Path) -> None:
    taken = sources_of(run(sources(tmp_path, [5, 5, 5]), [1, 1, 2], 100, block_size=1))
    assert Counter(taken) == {0: 100, 1: 100, 2: 200}


def test_weights_need_not_sum_to_one(tmp_path: Path) -> None:
    folders = sources(tmp_path, [5, 5])
    one, other = (firsts(run(folders, weights, 20)) for weights in ([0.7, 0.3], [7000, 3000]))
    assert one == other


def test_one_source_is_a_mixture_too(tmp_path: Path) -> None:
    taken = firsts(run(sources(tmp_path, [6]), [3.0], 6, G=3))
    assert sorted(taken[:6]) == sorted(taken[6:12]) == sorted(taken[12:]) == list(range(6))


def test_the_default_block_has_2048_samples(tmp_path: Path) -> None:
    folders = sources(tmp_path, [9, 9])
    streams = [EpochStream(str(folder), T=1, global_batch_size=4, seed=0) for folder in folders]
    assert MixtureStream(streams, [3, 1], seed=0).counts.tolist() == [1536, 512]


# Order.


def test_each_source_comes_exactly_once_an_epoch_of_its_own(tmp_path: Path) -> None:
    windows = [3, 11, 40]
    taken = firsts(run(sources(tmp_path, windows), [1, 1, 2], 100))
    assert_in_epochs(taken, windows)
    for source, count in enumerate(windows):
        own = [first for first in taken if first // APART == source]
        orders = {tuple(own[epoch * count : (epoch + 1) * count]) for epoch in range(len(own) // count)}
        assert len(orders) > 1, "all epochs have one order"


def test_the_order_of_a_block_is_another_in_the_next_and_with_another_seed(tmp_path: Path) -> None:
    folders = sources(tmp_path, [50, 50])
    orders = []
    for seed in (0, 1):
        taken = sources_of(run(folders, [1, 1], 10, G=40, seed=seed, block_size=40))
        orders += [tuple(taken[block * 40 : (block + 1) * 40]) for block in range(10)]
    assert len(set(orders)) == 20


def plain_drawn(places: int, counts: list[int], key: int, block: int) -> list[tuple[int, int]]:
    """Spell out whose each place of a block is, by docs/reading.md, and how many of its source come before it."""
    salt = plain_mix((key + block) % WRAP)

    def run(node: int, size: int, counts: list[int]) -> list[int]:
        if size == 1:
            return [source for source, count in enumerate(counts) if count]
        half, drawn = size // 2, plain_mix((salt + node) % WRAP) % size
        upto = [(half * sum(counts[: source + 1]) + drawn) // size for source in range(len(counts))]
        left = [end - begin for begin, end in pairwise([0, *upto])]
        right = [count - one for count, one in zip(counts, left, strict=True)]
        return run(2 * node, half, left) + run(2 * node + 1, size - half, right)

    order = run(1, places, counts)
    return [(source, order[:place].count(source)) for place, source in enumerate(order)]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    seed=st.integers(0, 2**32),
    block=st.integers(0, 10**12),
)
def test_the_places_of_a_block_are_the_documented_ones(counts: list[int], seed: int, block: int) -> None:
    size = sum(counts)
    phase = Phase(7, block, size, 1, [3] * len(counts), counts, counts)
    (key,) = random_keys(seed, 1, purpose=1)
    sources, numbers = phase.located(7 + np.arange(size), key)
    expected = plain_drawn(size, counts, int(key), block)
    assert list(zip(sources.tolist(), (numbers - 3).tolist(), strict=True)) == expected
    assert [sources.tolist().count(source) for source in range(len(counts))] == counts
    alone = [phase.located(np.array([7 + place]), key) for place in range(0, size, 7)]
    assert [(int(source[0]), int(number[0]) - 3) for source, number in alone] == expected[::7]


def test_the_places_of_seed_0_never_change() -> None:
    (key,) = random_keys(0, 1, purpose=1)
    phase = Phase(0, 0, 12, None, [0, 0, 0], [3, 2, 1])
    sources, numbers = phase.located(np.arange(24), key)
    assert sources.tolist() == [1, 0, 2, 0, 0, 1, 0, 0, 1, 0, 2, 1, 0, 0, 1, 0, 2, 1, 0, 0, 1, 0, 1, 2]
    assert numbers.tolist() == [0, 0, 0, 1, 2, 1, 3, 4, 2, 5, 1, 3, 6, 7, 4, 8, 2, 5, 9, 10, 6, 11, 7, 3]


def test_each_place_of_a_block_is_of_each_source_by_its_share(tmp_path: Path) -> None:
    """500 blocks of 10, three of which are of source 0: at each place 150, give or take 10."""
    taken = np.array(sources_of(run(sources(tmp_path, [9, 9]), [3, 7], 50, G=100))).reshape(500, 10)
    firsts_of_0 = (taken == 0).sum(axis=0)
    assert firsts_of_0.sum() == 1500 and firsts_of_0.min() > 100 and firsts_of_0.max() < 200


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.integers(4, 40),
    parts=st.lists(st.tuples(st.sampled_from([1, 2, 3, 8]), st.integers(1, 3), st.integers(0, 4)), max_size=3),
    random_offset=st.booleans(),
)
def test_no_split_of_the_work_and_no_stop_changes_the_order(
    seed: int, block_size: int, parts: list[tuple[int, int, int]], random_offset: bool
) -> None:
    changed: dict[str, Any] = {"seed": seed, "block_size": block_size}
    changed["streams"] = {"T": 2, "random_offset": random_offset}
    with tempfile.TemporaryDirectory() as name:
        folders, weights = sources(Path(name), [5, 30, 12]), [1, 2.5, 1.5]
        undivided = run(folders, weights, 30, G=10, **changed)
        batches: list[GlobalBatch] = []
        for world, per_rank, steps in [*parts, (1, 1, 1)]:
            state = json.loads(json.dumps(batches[-1].state)) if batches else None
            batches += run(folders, weights, steps, G=world * per_rank, world=world, state=state, **changed)
    rows = [row for batch in batches for row in batch.rows]
    assert rows == [row for batch in undivided for row in batch.rows][: len(rows)] and len(rows) < 300


def test_a_run_that_is_stopped_at_any_step_goes_on_as_one_never_stopped(tmp_path: Path) -> None:
    folders = sources(tmp_path, [5, 13])
    whole = run(folders, [1, 2], 15, G=6)
    for step in range(1, 12):
        assert run(folders, [1, 2], 3, G=6, world=3, state=whole[step - 1].state) == whole[step : step + 3]


def test_a_new_iterator_goes_on_from_where_the_mixture_is(tmp_path: Path) -> None:
    folders = sources(tmp_path, [5, 13])
    one = mixture(folders, [1, 2])
    taken = [next(iter(one)).x[:, 0].tolist() for _ in range(6)]
    assert taken == [batch.firsts for batch in run(folders, [1, 2], 6)]


def test_a_mixture_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    run(sources(tmp_path, [5, 13]), [1, 2], 6)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pickled_mixture_goes_on_with_the_same_batches(tmp_path: Path) -> None:
    folders = sources(tmp_path, [5, 13])
    one = mixture(folders, [1, 2])
    list(islice(one, 3))
    expected = [batch.firsts for batch in run(folders, [1, 2], 6)][3:]
    for copy in (pickle.loads(pickle.dumps(one)), one):
        assert [batch.x[:, 0].tolist() for batch in islice(copy, 3)] == expected


# State.


def test_a_state_has_the_weights_the_block_and_each_source(tmp_path: Path) -> None:
    one = mixture(sources(tmp_path, [5, 13]), [1, 2], G=4)
    for step, batch in enumerate(islice(one, 6)):
        assert batch.state == one.state_dict() == json.loads(json.dumps(batch.state))
        assert (batch.state["stream"], batch.state["seed"], batch.state["block_size"]) == (2, 0, 10)
        assert batch.state["consumed_samples"] == 4 * (step + 1)
        assert len(batch.state["weights"]) == len(batch.state["sources"]) == 2
        assert {"content_sha256", "tokenizer_sha256"}.isdisjoint(batch.state)
        assert [source["tokens"] for source in batch.state["sources"]] == [6, 14]


def refused(one: MixtureStream, state: Any, **flags: Any) -> str:
    before = one.state_dict()
    with pytest.raises(ValueError) as caught:
        one.load_state_dict(state, **flags)
    assert one.state_dict() == before, "a refused state moved the mixture"
    return str(caught.value)


@pytest.mark.parametrize(
    ("weights", "changed", "named"),
    [
        ([2, 1], {}, "weights"),
        ([1, 2], {"block_size": 20}, "block_size"),
        ([1, 2], {"seed": 1}, "seed"),
        ([1, 2], {"streams": {"seed": 1}}, "seed"),
        ([1, 2], {"streams": {"T": 2}}, "T"),
        ([1, 2], {"streams": {"random_offset": True}}, "random_offset"),
    ],
)
@pytest.mark.parametrize("allow_other_content", [False, True])
def test_the_state_of_another_mixture_is_refused_by_name(
    tmp_path: Path, weights: list[float], changed: dict[str, Any], named: str, allow_other_content: bool
) -> None:
    folders = sources(tmp_path, [5, 13])
    state = run(folders, [1, 2], 3)[-1].state
    assert named in refused(mixture(folders, weights, **changed), state, allow_other_content=allow_other_content)


def test_the_state_of_other_or_more_or_swapped_sources_is_refused(tmp_path: Path) -> None:
    folders = sources(tmp_path, [5, 13, 8])
    state = run(folders[:2], [1, 1], 3)[-1].state
    refused(mixture(folders, [1, 1, 1]), state)
    refused(mixture(folders[:1], [1]), state)
    refused(mixture([folders[1], folders[0]], [1, 1]), state)
    message = refused(mixture([folders[0], folders[2]], [1, 1]), state)
    assert "14" in message and "9" in message
    one = mixture([folders[0], folders[2]], [1, 1])
    one.load_state_dict(state, allow_other_content=True)
    assert next(iter(one)).state["consumed_samples"] == 16


def test_a_state_of_the_order_before_is_refused_and_says_why(tmp_path: Path) -> None:
    """By the rules of version 1 the same number was another sample."""
    one = mixture(sources(tmp_path, [5, 13]), [1, 2])
    old = {key: value for key, value in one.state_dict().items() if key != "checksum"} | {"stream": 1}
    assert "stream is 1" in (message := refused(one, old)) and "another release" in message


def test_states_of_streams_and_mixtures_are_not_taken_for_each_other(tmp_path: Path) -> None:
    (folder,) = sources(tmp_path, [5])
    alone = EpochStream(str(folder), T=1, global_batch_size=4, seed=0)
    one = mixture([folder], [1])
    refused(one, alone.state_dict())
    with pytest.raises(ValueError):
        alone.load_state_dict(one.state_dict())


WRONG: dict[str, list[Any]] = {
    "stream": [None, 0, 1, "2", 2.0, True],
    "seed": [None, "0", 0.0, False],
    "consumed_samples": [None, "12", 12.0, True, -1, float("nan"), 2**63, 2**64, 10**40],
    "block_size": [None, "10", 10.0, True, 0, -10],
    "weights": [None, 3, "12", [1], [1, 2, 3], [1, None], ["1", "2"], [1, float("nan")], {}],
    "sources": [None, 3, "ab", [], [{}], [{}, {}], [None, None], {}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
@pytest.mark.parametrize("allow_other_content", [False, True])
def test_a_value_of_the_wrong_kind_is_refused(tmp_path: Path, key: str, value: Any, allow_other_content: bool) -> None:
    folders = sources(tmp_path, [5, 13])
    state = run(folders, [1, 2], 3)[-1].state
    refused(mixture(folders, [1, 2]), {**state, key: value}, allow_other_content=allow_other_content)


@pytest.mark.parametrize("key", ["stream", "seed", "consumed_samples", "block_size", "weights", "sources"])
def test_a_state_without_one_of_its_keys_is_refused(tmp_path: Path, key: str) -> None:
    folders = sources(tmp_path, [5, 13])
    state = run(folders, [1, 2], 3)[-1].state
    del state[key]
    assert key in refused(mixture(folders, [1, 2]), state)


@pytest.mark.parametrize("state", [None, [], "state", 3, {}])
def test_what_is_no_state_at_all_is_refused(tmp_path: Path, state: Any) -> None:
    refused(mixture(sources(tmp_path, [5, 13]), [1, 2]), state)


# Sources that end.


def test_stop_ends_the_mixture_with_the_last_window_of_that_source(tmp_path: Path) -> None:
    """Source 0 has 7 windows, 5 a block: its last is somewhere in the second block, and no row follows it."""
    folders = sources(tmp_path, [7, 50])
    batches = run(folders, [1, 1], G=4, when_exhausted=["stop", "repeat"])
    taken = firsts(batches)
    assert sorted(first for first in taken if first < APART) == list(range(7)) and taken[-1] < APART
    assert 10 < len(taken) <= 20
    assert taken[:10] == firsts(run(folders, [1, 1], 5, G=4))[:10]
    assert batches[-1].state["consumed_samples"] == len(taken)


def test_a_mixture_of_stops_ends_with_the_first_source_that_is_through(tmp_path: Path) -> None:
    taken = firsts(run(sources(tmp_path, [30, 6]), [1, 1], G=4, when_exhausted="stop"))
    counts = Counter(first // APART for first in taken)
    assert counts[1] == 6 and taken[-1] >= APART and counts[0] < 30


def test_repeat_in_a_sequence_is_repeat(tmp_path: Path) -> None:
    folders = sources(tmp_path, [3, 6])
    one, other = (firsts(run(folders, [1, 1], 20, when_exhausted=how)) for how in ("repeat", ["repeat", "repeat"]))
    assert one == other


def test_a_cap_is_met_to_the_sample_and_the_others_fill_the_place(tmp_path: Path) -> None:
    """Source 0: 7 windows twice, which last into the third block of 10; before, nothing tells of the cap."""
    folders = sources(tmp_path, [7, 50])
    taken = firsts(run(folders, [1, 1], 60, G=4, when_exhausted=[2, "repeat"]))
    assert Counter(first for first in taken if first < APART) == dict.fromkeys(range(7), 2)
    assert_in_epochs(taken, [7, 50])
    assert 20 <= max(place for place, first in enumerate(taken) if first < APART) < 30
    assert taken[:20] == firsts(run(folders, [1, 1], 5, G=4))


def test_the_place_of_a_capped_source_goes_to_all_others(tmp_path: Path) -> None:
    folders = sources(tmp_path, [5, 40, 40])
    taken = sources_of(run(folders, [2, 1, 1], 100, G=4, when_exhausted=[1, "repeat", "repeat"]))
    assert taken.count(0) == 5
    rest = Counter(taken[40:])
    assert rest[1] + rest[2] == 360 and min(rest[1], rest[2]) > 120


@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_mixture_of_caps_ends_when_all_are_met(tmp_path: Path, world: int) -> None:
    folders = sources(tmp_path, [3, 11, 4])
    batches = run(folders, [1, 1, 2], G=8, world=world, when_exhausted=[2, 1, 3])
    counts = Counter(firsts(batches))
    assert counts == {
        **dict.fromkeys(range(3), 2),
        **dict.fromkeys(range(APART, APART + 11), 1),
        **dict.fromkeys(range(2 * APART, 2 * APART + 4), 3),
    }
    assert [len(batch.rows) for batch in batches] == [8, 8, 8, 5]  # 29 samples
    alone = run(folders, [1, 1, 2], G=8, when_exhausted=[2, 1, 3])
    assert [batch.rows for batch in batches] == [batch.rows for batch in alone]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    windows=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    caps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    weights=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    world=st.sampled_from([1, 2, 3, 8]),
    step=st.integers(1, 8),
    block_size=st.integers(12, 30),
)
def test_caps_are_met_to_the_sample_whatever_the_stop(
    windows: list[int], caps: list[int], weights: list[int], world: int, step: int, block_size: int
) -> None:
    count = len(windows)
    changed: dict[str, Any] = {"when_exhausted": caps[:count], "block_size": block_size}
    with tempfile.TemporaryDirectory() as name:
        folders = sources(Path(name), windows)
        whole = run(folders, weights[:count], G=24, **changed)
        begun = run(folders, weights[:count], step, G=6, world=3, **changed)
        gone_on = run(folders, weights[:count], G=24, world=world, state=begun[-1].state, **changed)
    assert firsts(begun + gone_on) == firsts(whole)
    assert Counter(firsts(whole)) == {
        source * APART + window: caps[source] for source in range(count) for window in range(windows[source])
    }
    assert_in_epochs(firsts(whole), windows)


def test_one_source_may_stop_a_mixture_in_which_another_is_capped(tmp_path: Path) -> None:
    taken = firsts(run(sources(tmp_path, [4, 30]), [1, 1], G=4, when_exhausted=[1, "stop"]))
    assert Counter(first // APART for first in taken) == {0: 4, 1: 30} and taken[-1] >= APART
    assert len(set(taken)) == 34


def test_a_mixture_that_has_ended_says_so_and_a_state_of_its_end_gives_no_more(tmp_path: Path) -> None:
    folders = sources(tmp_path, [4, 30])
    one = mixture(folders, [1, 1], when_exhausted="stop")
    state = list(one)[-1].state
    with pytest.raises(RuntimeError, match="has ended"):
        next(iter(one))
    assert one.state_dict() == state
    assert run(folders, [1, 1], when_exhausted="stop", state=state) == []


# What is refused.


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ([1, -1], "-1"),
        ([1, float("nan")], "nan"),
        ([1, float("inf")], "inf"),
        ([0, 0], "0"),
        ([1, 0], "0"),
        ([1], "2"),
        ([1, 1, 1], "3"),
        ([1, 1e-10], r"weights\[1\]=1e-10"),
    ],
)
def test_weights_that_cannot_be_are_refused(tmp_path: Path, weights: list[float], named: str) -> None:
    """The last has less than one sample in four billion: it would hardly be seen."""
    with pytest.raises(ValueError, match=named):
        mixture(sources(tmp_path, [5, 5]), weights)


@pytest.mark.parametrize("block_size", [0, -1, 2**31])
def test_a_block_without_a_place_or_with_too_many_is_refused(tmp_path: Path, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"{block_size}"):
        mixture(sources(tmp_path, [5, 5]), [1, 1], block_size=block_size)


@pytest.mark.parametrize("when", ["halt", 0, -1, 1.5, True, None, ["stop"], ["stop", "stop", "stop"], ["stop", "no"]])
def test_what_cannot_happen_to_an_exhausted_source_is_refused(tmp_path: Path, when: Any) -> None:
    with pytest.raises(ValueError, match="when_exhausted"):
        mixture(sources(tmp_path, [5, 5]), [1, 1], when_exhausted=when)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"T": 2}, "T"),
        ({"global_batch_size": 8}, "global_batch_size"),
        ({"rank": 1}, "rank"),
        ({"world_size": 4}, "world_size"),
    ],
)
def test_streams_that_differ_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    first, second = sources(tmp_path, [5, 5])
    common: dict[str, Any] = {"T": 1, "global_batch_size": 4, "seed": 0, "rank": 0, "world_size": 2}
    streams = [EpochStream(str(first), **common), EpochStream(str(second), **{**common, **changed})]
    with pytest.raises(ValueError, match=named):
        MixtureStream(streams, [1, 1], seed=0)


def test_no_stream_is_no_mixture() -> None:
    with pytest.raises(ValueError):
        MixtureStream([], [], seed=0)


def test_caches_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    folders = [number_cache(tmp_path / "p" / name, tokenizer=name * 32) for name in ("ab", "cd")]
    with pytest.raises(CacheError, match=r"abab.*cdcd"):
        mixture(folders, [1, 1])
    again = number_cache(tmp_path / "p" / "again", start=200)
    one = mixture([folders[0], again], [1, 1])
    assert {int(index) for batch in islice(one, 5) for index in batch.source} == {0, 1}


def test_whoever_changes_a_state_changes_no_mixture(tmp_path: Path) -> None:
    one = mixture(sources(tmp_path, [6, 9]), [1, 2])
    batches = iter(one)
    state = next(batches).state
    before = json.dumps(one.state_dict())
    for value in (state, one.state_dict()):
        value["weights"].append(9)
        value["sources"][0]["seed"] = 7
    assert json.dumps(one.state_dict()) == before and one.weights == [1.0, 2.0]


def test_a_stream_in_place_of_a_list_of_them_is_refused(tmp_path: Path) -> None:
    (folder,) = sources(tmp_path, [6])
    with pytest.raises(ValueError, match="streams is one stream, expected a sequence of them"):
        MixtureStream(EpochStream(folder, T=4, global_batch_size=2, seed=0), [1.0], seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [[1e306, 1], [1, 5e-324]])
def test_weights_at_the_ends_of_floats_are_weights_or_refused(tmp_path: Path, weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        mixture(sources(tmp_path, [6, 9]), weights)


@pytest.mark.parametrize("when_exhausted", [2**61, [1, 2**61]])
def test_more_epochs_than_can_be_counted_are_refused(tmp_path: Path, when_exhausted: Any) -> None:
    with pytest.raises(ValueError, match=r"when_exhausted=\d+: expected at most \d+ epochs"):
        mixture(sources(tmp_path, [6, 9]), [1, 1], when_exhausted=when_exhausted)


def test_a_cache_with_a_known_vocabulary_mixes_with_one_of_another_tool(tmp_path: Path) -> None:
    folders = sources(tmp_path, [6, 9])
    write_meta(str(folders[0].parent / "meta.json"), {"vocab_size": 60_000})
    assert len(run(folders, [1, 1], 3)) == 3


def test_at_a_large_world_a_rank_computes_its_own_samples_and_no_more(tmp_path: Path) -> None:
    """One rank in 1,024 has 1 sample in 1,024, which it finds without the composition of a whole block."""
    for world in (1, 1024):
        one = mixture(sources(tmp_path / str(world), [6, 9]), [1, 1], G=world, world=world, block_size=2048)
        asked: list[NDArray[np.int64]] = []
        locate = one.locate
        one.locate = lambda samples, found=asked, ask=locate: (found.append(samples), ask(samples))[1]  # type: ignore
        for _ in zip(range(5000), one, strict=False):
            pass
        assert [len(samples) for samples in asked] == [4096, 4096]
        assert (np.diff(np.concatenate(asked)) == world).all()


def test_a_mixture_that_ends_has_a_length_and_may_leave_out_its_short_batch(tmp_path: Path) -> None:
    folders = sources(tmp_path, [3, 11, 4])
    for drop_last, sizes in ((False, [8, 8, 8, 5]), (True, [8, 8, 8])):
        changed: dict[str, Any] = {"G": 8, "when_exhausted": [2, 1, 3], "drop_last": drop_last}
        assert [len(batch.rows) for batch in run(folders, [1, 1, 2], **changed)] == sizes
        assert len(mixture(folders, [1, 1, 2], **changed)) == len(sizes)
    with pytest.raises(TypeError, match="no end"):
        len(mixture(folders, [1, 1, 2]))
