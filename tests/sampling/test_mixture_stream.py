"""Mixtures: exact shares, carried from block to block; each source in its own epochs; one order for all splits of work.

Source s holds the ids from 10,000 * s, so that a row tells both its source and its place.
"""

import tempfile
import zlib
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.number_caches import (
    APART,
    assert_in_epochs,
    firsts,
    mixture,
    run_mixture,
    sources,
    sources_of,
)

from niels_gpt.sampling import EpochStream, MixtureStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:.*random_offset moves none"),
]


def test_the_counts_of_a_block_are_the_weights_and_what_rounding_leaves_is_carried_over(tmp_path):
    """Weights 5, 3 and 1: of 9 blocks of 10 exactly 50, 30 and 10; of each block 5.6, 3.3 and 1.1, up or down."""
    one = mixture(sources(tmp_path, [7, 7, 7]), [5, 3, 1])
    assert one.counts.tolist() == [6, 3, 1] and one.counts.dtype == np.int64
    batches = run_mixture(sources(tmp_path, [7, 7, 7]), [5, 3, 1], 27, G=10)
    found = [[Counter(sources_of([batch]))[source] for source in range(3)] for batch in batches]
    assert found == [one.counts_of(block).tolist() for block in range(27)]
    assert all(np.sum(found[first : first + 9], axis=0).tolist() == [50, 30, 10] for first in (0, 9, 18))
    assert [set(column) for column in zip(*found, strict=True)] == [{5, 6}, {3, 4}, {1, 2}]


def test_a_source_of_little_weight_has_its_exact_share(tmp_path):
    """0.0007 of blocks of 2,048 is 1.4336 samples: 7 in 10,000, not 1 in 2,048, early and a million blocks later."""
    folders = sources(tmp_path, [50, 9])
    one = mixture(folders, [0.9993, 0.0007], block_size=2048)
    assert sum(int(one.counts_of(block)[1]) for block in range(625)) == 896  # of 1,280,000 samples
    for first in (0, 10**6):
        state = {**one.state_dict(), "consumed_samples": first * 2048}
        del state["checksum"], state["positions"]
        taken = sources_of(run_mixture(folders, [0.9993, 0.0007], 25, G=2048, state=state, block_size=2048))
        assert taken.count(1) in (35, 36) and len(taken) == 51_200  # 35.84
    rare = mixture(folders, [1, 0.001], block_size=10)
    assert sum(int(rare.counts_of(block)[1]) for block in range(1001)) == 10


@settings(derandomize=True, max_examples=12)
@given(
    weights=st.lists(st.floats(0.05, 20), min_size=1, max_size=5),
    block_size=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    world=st.sampled_from([1, 2, 3]),
)
def test_every_block_has_its_counts(weights, block_size, seed, world):
    windows = [3, 20, 1, 50, 9][: len(weights)]
    blocks = min(5, 1 + 600 // block_size)
    changed = {"seed": seed, "block_size": block_size, "G": 6}
    with tempfile.TemporaryDirectory() as name:
        folders = sources(Path(name), windows)
        one = mixture(folders, weights, **changed)
        taken = firsts(run_mixture(folders, weights, -(-blocks * block_size // 6), world=world, **changed))
    for block in range(blocks):
        found = Counter(first // APART for first in taken[block * block_size : (block + 1) * block_size])
        assert [found[source] for source in range(len(weights))] == one.counts_of(block).tolist()
    assert_in_epochs(taken, windows)


def test_weights_need_not_sum_to_one_and_a_block_has_2048_samples(tmp_path):
    folders = sources(tmp_path, [9, 9])
    one, other = (firsts(run_mixture(folders, weights, 20)) for weights in ([0.7, 0.3], [7000, 3000]))
    assert one == other
    streams = [EpochStream(str(folder), T=1, global_batch_size=4, seed=0) for folder in folders]
    assert MixtureStream(streams, [3, 1], seed=0).counts.tolist() == [1536, 512]


def test_each_source_comes_exactly_once_an_epoch_of_its_own(tmp_path):
    windows = [3, 11, 40]
    taken = firsts(run_mixture(sources(tmp_path, windows), [1, 1, 2], 100))
    assert_in_epochs(taken, windows)
    for source, count in enumerate(windows):
        own = [first for first in taken if first // APART == source]
        orders = {tuple(own[epoch * count : (epoch + 1) * count]) for epoch in range(len(own) // count)}
        assert len(orders) > 1, "all epochs have one order"


def test_the_order_of_a_block_is_another_in_the_next_and_with_another_seed(tmp_path):
    folders = sources(tmp_path, [50, 50])
    orders = []
    for seed in (0, 1):
        taken = sources_of(run_mixture(folders, [1, 1], 10, G=40, seed=seed, block_size=40))
        orders += [tuple(taken[block * 40 : (block + 1) * 40]) for block in range(10)]
    assert len(set(orders)) == 20


def places_of(one, numbers):
    """Return the source of each sample, and the shard and the place in it: int64 [3, n]."""
    sources, within = one.samples.drawn(numbers)
    places = np.stack((sources, sources, sources))
    for source, stream in enumerate(one.streams):
        located = stream.samples.locate(within[sources == source])
        places[1:, sources == source] = located.shards, located.places
    return places


def test_the_order_and_the_states_of_earlier_releases_never_change(tmp_path):
    """Recorded before states had positions."""
    folders = sources(tmp_path, [7, 50, 23])
    one = mixture(folders, [5, 3, 1.5], when_exhausted=[3, "repeat", 2], seed=4)
    places = places_of(one, np.arange(400))
    assert places[0, :20].tolist() == [2, 0, 1, 0, 0, 1, 0, 0, 2, 1, 0, 0, 1, 0, 1, 1, 0, 2, 0, 0]
    assert zlib.crc32(places.astype("<i8").tobytes()) == 2398847355
    of_run = places_of(mixture(folders, [0.7, 0.2, 0.1], block_size=2048), np.arange(10**6, 10**6 + 5000))
    assert zlib.crc32(of_run.astype("<i8").tobytes()) == 964401341
    counts = [list(islice(one, 25))[-1].state["positions"], np.bincount(places[0, :100]).tolist()]
    assert counts[0] == counts[1] == [21, 53, 26]
    old = {key: value for key, value in one.state_dict().items() if key != "positions"} | {"checksum": "16d0c107"}
    expected = [batch.x.tolist() for batch in islice(one, 3)]
    one.load_state_dict(old)
    assert [batch.x.tolist() for batch in islice(one, 3)] == expected
    with pytest.raises(ValueError, match="checksum"):
        one.load_state_dict({key: value for key, value in one.state_dict().items() if key != "positions"})


STAGED = [
    # 3 : 1 of 14 samples are 10.5, so 11 : 3; then 1 : 1 of 7 are 3.5, the first of equal ones has 4; then 0 : 1
    ([(0, [3, 1]), (14, [1, 1]), (21, [0, 1])], ["repeat", "repeat"], [[11, 3], [4, 3], [0, 19]]),
    # source 0 has 7 in all: after 14 samples of 1 : 1 none, so that the second stage is of source 1 alone
    ([(0, [1, 1]), (20, [9, 1]), (30, [1, 1])], [1, "repeat"], [[7, 13], [0, 10], [0, 10]]),
    ([(0, [0, 1]), (13, [1, 0])], ["repeat", "repeat"], [[0, 13], [27, 0]]),
]


@pytest.mark.parametrize(("stages", "when", "counts"), STAGED)
def test_each_stage_begins_at_its_sample_and_has_its_exact_shares(tmp_path, stages, when, counts):
    folders = sources(tmp_path, [7, 50])
    changed = {"when_exhausted": when}
    whole = run_mixture(folders, stages, 10, **changed)
    taken = sources_of(whole)
    edges = [*(first for first, _ in stages), 40]
    found = [[taken[begin:end].count(source) for source in range(2)] for begin, end in pairwise(edges)]
    assert found == counts
    assert_in_epochs(firsts(whole), [7, 50])
    one, begin = mixture(folders, stages, **changed), 0
    for block in range(4):  # a stage cuts its last block short
        own = one.counts_of(block).tolist()
        assert [taken[begin : begin + sum(own)].count(source) for source in range(2)] == own
        begin += sum(own)
    resumed = run_mixture(folders, stages, 9, G=3, world=3, state=whole[2].state, **changed)
    assert firsts(resumed) == firsts(whole)[12:39]
    assert resumed[-1].state["positions"] == np.bincount(taken[:39]).tolist()


def test_constant_weights_are_one_stage(tmp_path):
    folders = sources(tmp_path, [7, 50])
    state = run_mixture(folders, [(0, [3, 1])], 3)[-1].state
    assert state == run_mixture(folders, [3, 1], 3)[-1].state
    assert "3.0, from sample 14 on 1.0 " in repr(mixture(folders, [(0, [3, 1]), (14, [1, 1])]))


NO_STAGES = [
    ([(1, [1, 1])], {}, "sample is 1, expected 0"),
    ([(0, [1, 1]), (0, [2, 1])], {}, "expected an integer of 1 or more"),
    ([(0, [1, 1]), (9.5, [2, 1])], {}, r"weights\[1\]: sample=9.5"),
    ([(0, [1, 1]), (9, [2, 1, 1])], {}, r"weights\[1\]: 3 weights for 2 streams"),
    (["0.5", 1], {}, "weights: '0.5' is a text, expected numbers"),
    ([(0, [1, 1]), 9], {}, r"weights\[1\]=9: expected \(sample"),
    ([(0, [1, 1]), (9, [0, 0])], {}, "expected one above 0"),
    ([(0, [1, 1]), (9, [1, -1])], {}, r"weights\[1\]\[1\]\[1\]=-1.0: expected a number, 0 or more"),
    ([(0, [1, 0]), (9, [2, 0])], {}, r"streams\[1\] has weight 0 in every stage"),
    ([(0, [1, 0]), (9, [0, 1])], {"when_exhausted": 1}, "end at sample 7, before the next stage begins at 9"),
]


@pytest.mark.parametrize(("stages", "changed", "named"), NO_STAGES)
def test_stages_that_cannot_be_are_refused(tmp_path, stages, changed, named):
    with pytest.raises(ValueError, match=named):
        mixture(sources(tmp_path, [7, 50]), stages, **changed)
