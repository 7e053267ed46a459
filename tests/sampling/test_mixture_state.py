"""Mixtures: their state, the end of their sources, and what is refused."""

import json
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.number_caches import APART, assert_in_epochs, firsts, mixture, number_cache, run_mixture, sources

from niels_gpt.cache import CacheError
from niels_gpt.cache.meta import write_meta
from niels_gpt.sampling import EpochStream, MixtureStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:.*random_offset moves none"),
]


def test_a_state_has_the_weights_the_block_and_each_source(tmp_path):
    one = mixture(sources(tmp_path, [5, 13]), [1, 2], G=4)
    for step, batch in enumerate(islice(one, 6)):
        assert batch.state == one.state_dict() == json.loads(json.dumps(batch.state))
        assert (batch.state["stream"], batch.state["seed"], batch.state["block_size"]) == (2, 0, 10)
        assert batch.state["consumed_samples"] == 4 * (step + 1)
        assert len(batch.state["weights"]) == len(batch.state["sources"]) == 2
        assert {"content_sha256", "tokenizer_sha256"}.isdisjoint(batch.state)
        assert [source["tokens"] for source in batch.state["sources"]] == [6, 14]


def refused(one, state, **flags):
    before = one.state_dict()
    with pytest.raises(ValueError) as caught:
        one.load_state_dict(state, **flags)
    assert one.state_dict() == before, "a refused state moved the mixture"
    return str(caught.value)


@pytest.mark.parametrize("allow_other_content", [False, True])
def test_the_state_of_sources_of_another_seed_is_refused(tmp_path, allow_other_content):
    folders = sources(tmp_path, [5, 13])
    state, other = run_mixture(folders, [1, 2], 3)[-1].state, mixture(folders, [1, 2], streams={"seed": 1})
    assert "seed" in refused(other, state, allow_other_content=allow_other_content)


def test_the_state_of_other_or_more_or_swapped_sources_is_refused(tmp_path):
    folders = sources(tmp_path, [5, 13, 8])
    state = run_mixture(folders[:2], [1, 1], 3)[-1].state
    refused(mixture(folders, [1, 1, 1]), state)
    refused(mixture(folders[:1], [1]), state)
    refused(mixture([folders[1], folders[0]], [1, 1]), state)
    message = refused(mixture([folders[0], folders[2]], [1, 1]), state)
    assert "14" in message and "9" in message
    one = mixture([folders[0], folders[2]], [1, 1])
    one.load_state_dict(state, allow_other_content=True)
    assert next(iter(one)).state["consumed_samples"] == 16


def test_positions_that_are_not_those_of_the_sample_are_refused_unless_the_content_may_differ(tmp_path):
    folders = sources(tmp_path, [5, 13])
    state = run_mixture(folders, [1, 2], 3)[-1].state
    edited = {**state, "positions": [5, 7]}
    del edited["checksum"]
    one = mixture(folders, [1, 2])
    assert "positions is [5, 7], expected [4, 8] after 12 samples" in refused(one, edited)
    one.load_state_dict(edited, allow_other_content=True)
    assert one.state_dict() == state


def test_a_state_of_the_order_before_says_why_it_is_refused(tmp_path):
    one = mixture(sources(tmp_path, [5, 13]), [1, 2])
    old = {key: value for key, value in one.state_dict().items() if key != "checksum"} | {"stream": 1}
    assert "stream is 1" in (message := refused(one, old)) and "Another release" in message


WRONG = {
    "stream": [None, 0, 1, "2", 2.0, True],
    "seed": [None, "0", 0.0, False],
    "consumed_samples": [None, "12", 12.0, True, -1, float("nan"), 2**63, 2**64, 10**40],
    "block_size": [None, "10", 10.0, True, 0, -10],
    "weights": [None, 3, "12", [1], [1, 2, 3], [1, None], ["1", "2"], [1, float("nan")], {}],
    "sources": [None, 3, "ab", [], [{}], [{}, {}], [None, None], {}],
    "positions": [None, 3, "48", [], [4], [4, 8, 0], [4.0, 8], [True, 8], ["4", 8], [-4, 16], [4, 2**70], {}],
}


@pytest.mark.parametrize("key", WRONG)
def test_a_value_of_the_wrong_kind_or_a_missing_one_is_refused(tmp_path, key):
    one = mixture(sources(tmp_path, [5, 13]), [1, 2])
    state = {**one.state_dict(), "consumed_samples": 12, "positions": [4, 8]}
    without = {name: value for name, value in state.items() if name != key}
    assert ("checksum" if key == "positions" else key) in refused(one, without)
    for value in WRONG[key]:
        for allowed in (False, True):
            refused(one, {**state, key: value}, allow_other_content=allowed)


def test_stop_ends_the_mixture_with_the_last_window_of_that_source(tmp_path):
    """Source 0 has 7 windows, 5 a block: its last is somewhere in the second block, and no row follows it."""
    folders = sources(tmp_path, [7, 50])
    batches = run_mixture(folders, [1, 1], G=4, when_exhausted=["stop", "repeat"])
    taken = firsts(batches)
    assert sorted(first for first in taken if first < APART) == list(range(7)) and taken[-1] < APART
    assert 10 < len(taken) <= 20
    assert taken[:10] == firsts(run_mixture(folders, [1, 1], 5, G=4))[:10]
    assert batches[-1].state["consumed_samples"] == len(taken)


def test_the_first_source_that_is_through_stops_a_mixture(tmp_path):
    taken = firsts(run_mixture(sources(tmp_path / "all", [30, 6]), [1, 1], G=4, when_exhausted="stop"))
    counts = Counter(first // APART for first in taken)
    assert counts[1] == 6 and taken[-1] >= APART and counts[0] < 30
    taken = firsts(run_mixture(sources(tmp_path / "one", [4, 30]), [1, 1], G=4, when_exhausted=[1, "stop"]))
    assert Counter(first // APART for first in taken) == {0: 4, 1: 30} and taken[-1] >= APART
    assert len(set(taken)) == 34


def test_a_cap_is_met_to_the_sample_and_the_others_fill_the_place(tmp_path):
    """Source 0: 7 windows twice, which last into the third block of 10; before, nothing tells of the cap."""
    folders = sources(tmp_path, [7, 50])
    taken = firsts(run_mixture(folders, [1, 1], 60, G=4, when_exhausted=[2, "repeat"]))
    assert Counter(first for first in taken if first < APART) == dict.fromkeys(range(7), 2)
    assert_in_epochs(taken, [7, 50])
    assert 20 <= max(place for place, first in enumerate(taken) if first < APART) < 30
    assert taken[:20] == firsts(run_mixture(folders, [1, 1], 5, G=4))


def test_the_place_of_a_capped_source_goes_to_all_others(tmp_path):
    folders = sources(tmp_path, [5, 40, 40])
    taken = [
        first // APART
        for first in firsts(run_mixture(folders, [2, 1, 1], 100, G=4, when_exhausted=[1, "repeat", "repeat"]))
    ]
    assert taken.count(0) == 5
    rest = Counter(taken[40:])
    assert rest[1] + rest[2] == 360 and min(rest[1], rest[2]) > 120


@settings(derandomize=True, max_examples=12)
@given(
    windows=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    caps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    weights=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    world=st.sampled_from([1, 2, 3, 8]),
    step=st.integers(1, 8),
    block_size=st.integers(12, 30),
)
def test_caps_are_met_to_the_sample_whatever_the_stop(windows, caps, weights, world, step, block_size):
    count = len(windows)
    changed = {"when_exhausted": caps[:count], "block_size": block_size}
    with tempfile.TemporaryDirectory() as name:
        folders = sources(Path(name), windows)
        whole = run_mixture(folders, weights[:count], G=24, **changed)
        started = run_mixture(folders, weights[:count], step, G=6, world=3, **changed)
        resumed = run_mixture(folders, weights[:count], G=24, world=world, state=started[-1].state, **changed)
    assert firsts(started + resumed) == firsts(whole)
    assert Counter(firsts(whole)) == {
        source * APART + window: caps[source] for source in range(count) for window in range(windows[source])
    }
    assert_in_epochs(firsts(whole), windows)


def test_a_mixture_that_has_ended_says_so_and_a_state_of_its_end_gives_no_more(tmp_path):
    folders = sources(tmp_path, [4, 30])
    one = mixture(folders, [1, 1], when_exhausted="stop")
    state = list(one)[-1].state
    with pytest.raises(RuntimeError, match="has ended"):
        next(iter(one))
    assert one.state_dict() == state
    assert run_mixture(folders, [1, 1], when_exhausted="stop", state=state) == []


NEVER = ["halt", 0, -1, 1.5, True, None, ["stop"], ["stop", "stop", "stop"], ["stop", "no"]]
TOO_MANY_EPOCHS = r"when_exhausted=\d+: expected at most \d+ epochs"
NO_MIXTURES = [
    ([1, -1], {}, "-1"),
    ([1, float("nan")], {}, "nan"),
    ([1, float("inf")], {}, "inf"),
    ([0, 0], {}, "0"),
    ([1, 0], {}, "0"),
    ([1], {}, "2"),
    ([1, 1, 1], {}, "3"),
    ([1, 1e-10], {}, r"weights\[1\]=1e-10"),  # less than one sample in four billion: it would hardly be seen
    ([1e306, 1], {}, "weights"),
    ([1, 5e-324], {}, "weights"),
    *(([1, 1], {"block_size": size}, str(size)) for size in (0, -1, 2**31)),
    *(([1, 1], {"when_exhausted": when}, "when_exhausted") for when in NEVER),
    *(([1, 1], {"when_exhausted": when}, TOO_MANY_EPOCHS) for when in (2**61, [1, 2**61])),
]


@pytest.mark.parametrize(("weights", "changed", "named"), NO_MIXTURES)
def test_settings_that_cannot_be_are_refused(tmp_path, weights, changed, named):
    with pytest.raises(ValueError, match=named):
        mixture(sources(tmp_path, [5, 5]), weights, **changed)


def test_streams_must_be_a_sequence_of_streams(tmp_path):
    (folder,) = sources(tmp_path, [6])
    with pytest.raises(ValueError):
        MixtureStream([], [], seed=0)
    with pytest.raises(ValueError, match="streams is one stream"):
        MixtureStream(EpochStream(folder, T=4, global_batch_size=2, seed=0), [1.0], seed=0)


@pytest.mark.parametrize(("named", "value"), [("T", 2), ("global_batch_size", 8), ("rank", 1), ("world_size", 4)])
def test_streams_that_differ_are_refused_by_name(tmp_path, named, value):
    first, second = sources(tmp_path, [5, 5])
    common = {"T": 1, "global_batch_size": 4, "seed": 0, "rank": 0, "world_size": 2}
    streams = [EpochStream(str(first), **common), EpochStream(str(second), **{**common, named: value})]
    with pytest.raises(ValueError, match=named):
        MixtureStream(streams, [1, 1], seed=0)


def test_caches_of_different_tokenizers_are_refused(tmp_path):
    folders = [number_cache(tmp_path / "p" / name, tokenizer=name * 32) for name in ("ab", "cd")]
    with pytest.raises(CacheError, match=r"abab.*cdcd"):
        mixture(folders, [1, 1])
    again = number_cache(tmp_path / "p" / "again", start=200)
    one = mixture([folders[0], again], [1, 1])
    assert {int(index) for batch in islice(one, 5) for index in batch.source} == {0, 1}


def test_a_cache_with_a_known_vocabulary_mixes_with_one_of_another_tool(tmp_path):
    folders = sources(tmp_path, [6, 9])
    write_meta(str(folders[0].parent / "meta.json"), {"vocab_size": 60_000})
    assert len(run_mixture(folders, [1, 1], 3)) == 3


def test_at_a_large_world_a_rank_computes_its_own_samples_and_no_more(tmp_path):
    """One rank in 1,024 has 1 sample in 1,024, which it finds without the composition of a whole block."""
    for world in (1, 1024):
        one = mixture(sources(tmp_path / str(world), [6, 9]), [1, 1], G=world, world=world, block_size=2048)
        asked = []
        locate = one.samples.locate
        one.samples.locate = lambda samples, found=asked, ask=locate: (found.append(samples), ask(samples))[1]
        for _ in zip(range(17_000), one, strict=False):
            pass
        assert [len(samples) for samples in asked] == [16384, 16384]
        assert (np.diff(np.concatenate(asked)) == world).all()
