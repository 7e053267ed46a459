"""Runs that change: other weights, sources, blocks or ends; what stayed continues, each sample once an epoch."""

import json
import tempfile
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import refused
from support.number_caches import APART, firsts, joined, mixture, run_epochs, run_mixture, sources

from niels_gpt.cache import CacheError
from niels_gpt.sampling import EpochStream, MixtureStream
from niels_gpt.storage.codes import CodedWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:the mixture changes"),
]


def changed_run(
    folders,
    weights,
    steps,
    state,
    *,
    world=1,
    changed=True,
    **others,
):
    """Take some steps, with all ranks, of a mixture that continues the run of a state, if there is one."""
    ranks = []
    for rank in range(world):
        one = mixture(folders, weights, rank=rank, world=world, **others)
        if state is not None:
            one.load_state_dict(json.loads(json.dumps(state)), changed=changed)
        ranks.append(list(islice(one, steps)))
    return joined(ranks)


def own(taken, source):
    return [first for first in taken if first // APART == source]


@pytest.mark.slow
@settings(derandomize=True, max_examples=4)
@given(data=st.data())
def test_sources_that_stay_continue_in_their_own_order_whatever_changes(data):
    """The oracle: the order of each source alone. What it has served in all parts of the run is its beginning."""
    windows = [7, 50, 23, 4]
    served = []
    positions = {}
    with tempfile.TemporaryDirectory() as name:
        folders = sources(Path(name), windows)
        alone = [firsts(run_epochs(folder, 60, T=1)) for folder in folders]
        state, sample = None, 0
        for _ in range(3):  # two changes
            chosen = data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, 4))]
            positions = {source: positions.get(source, 0) for source in chosen}
            numbers = st.lists(st.integers(1, 9), min_size=len(chosen), max_size=len(chosen))
            stages = [(0, data.draw(numbers)), (sample + data.draw(st.integers(1, 30)), data.draw(numbers))]
            others = {"seed": data.draw(st.integers(0, 9)), "block_size": data.draw(st.integers(5, 20))}
            weights = data.draw(st.sampled_from([stages, data.draw(numbers)]))
            own_folders = [folders[source] for source in chosen]
            parts, before = [], dict(positions)
            for again in range(2):  # the second part resumes the changed mixture plainly, with other ranks
                world, steps = data.draw(st.sampled_from([1, 2, 3, 8])), data.draw(st.integers(1, 4))
                G = world * data.draw(st.integers(1, 3))
                load = {"world": world, "G": G, "changed": not again, **others}
                parts += changed_run(own_folders, weights, steps, state, **load)
                state = parts[-1].state
            taken = firsts(parts)
            for number, source in enumerate(chosen):
                part = own(taken, source)
                assert part == alone[source][before[source] : before[source] + len(part)]
                positions[source] += len(part)
                assert state["positions"][number] == positions[source]
            served += taken
            sample = len(served)
            assert state["consumed_samples"] == sample


def test_a_source_whose_T_changes_begins_a_new_epoch_and_all_changes_are_named(tmp_path):
    """On paper: A and B stay, C goes, D comes; the source with another T (here: seed) is not the one of before."""
    folders = sources(tmp_path, [7, 50, 23, 4])
    state = run_mixture(folders[:3], [1, 1, 1], 6)[-1].state
    assert sum(state["positions"]) == 24
    one = mixture([folders[3], folders[1], folders[0]], [1, 2, 1])
    with pytest.warns(CodedWarning) as caught:
        one.load_state_dict(state, changed=True)
    (message,) = [str(each.message) for each in caught]
    assert "resumed: " in message and "new: " in message and "removed, after 8 samples: 'train', 24 tokens" in message
    assert "source_3" in message.split("new: ")[1] and message.endswith("[W103]")
    assert one.state_dict()["positions"] == [0, state["positions"][1], state["positions"][0]]
    assert one.state_dict()["origin"] == {"sample": 24, "positions": one.state_dict()["positions"]}
    other = mixture(folders[:3], [1, 1, 1], streams={"seed": 5})
    with pytest.warns(CodedWarning, match=r"resumed: none; a new epoch of .*source_0, train, which had 8.*seed 0 -> 5"):
        other.load_state_dict(state, changed=True)
    assert other.state_dict()["positions"] == [0, 0, 0] and other.state_dict()["consumed_samples"] == 24


@pytest.mark.filterwarnings("error")
def test_other_weights_are_said_and_an_unchanged_mixture_resumes_plainly(tmp_path):
    folders = sources(tmp_path, [7, 50])
    whole = run_mixture(folders, [1, 1], 9)
    same = changed_run(folders, [1, 1], 6, whole[2].state)
    assert (firsts(same), same[-1].state) == (firsts(whole[3:]), whole[-1].state)
    with pytest.warns(CodedWarning, match=r"at sample 12: weights \[1.0, 1.0\] -> \[1.0, 3.0\], seed 0 -> 1 \[W103\]$"):
        other = changed_run(folders, [1, 3], 5, whole[2].state, seed=1)
    assert firsts(other) != firsts(whole[3:8])
    for chosen, seed in ((folders, 1), (folders[:1], 1), (folders, 0)):
        with refused("E108", "changed=True"):
            changed_run(chosen, [1] * len(chosen), 1, other[0].state, changed=False, seed=seed)
    again = changed_run(folders, [1, 3], 4, other[0].state, changed=False, seed=1)
    assert firsts(again) == firsts(other[1:])


def test_of_equal_sources_the_first_continues_the_first(tmp_path):
    (folder,) = sources(tmp_path, [50])
    *_, last = islice(mixture([folder, folder], [3, 1]), 10)
    state = last.state
    one = mixture([folder], [1])
    one.load_state_dict(state, changed=True)
    assert one.state_dict()["positions"] == state["positions"][:1]


def test_a_run_that_began_with_one_stream_continues_as_a_mixture(tmp_path):
    folders = sources(tmp_path, [7, 50])
    alone = EpochStream(str(folders[1]), T=1, global_batch_size=4, seed=0)
    state = list(islice(alone, 3))[-1].state
    expected = firsts(run_epochs(folders[1], 10, T=1))
    taken = firsts(changed_run(folders, [1, 1], 5, state))
    assert own(taken, 1) == expected[12 : 12 + len(own(taken, 1))] and len(own(taken, 0)) == 10
    with pytest.raises(ValueError, match="checksum"):
        changed_run(folders, [1, 1], 1, {**state, "consumed_samples": 11, "epoch": 0})


def test_numbers_of_epochs_count_from_the_beginning_of_the_source(tmp_path):
    folders = sources(tmp_path, [7, 50])
    state = run_mixture(folders, [1, 1], 5, G=2)[-1].state  # 5 of 7 windows
    taken = firsts(changed_run(folders, [1, 1], 20, state, when_exhausted=[2, "repeat"]))
    assert len(own(taken, 0)) == 2 * 7 - 5 and len(taken) == 80
    stopped = firsts(changed_run(folders, [1, 1], 20, state, when_exhausted=["stop", "repeat"]))
    assert len(own(stopped, 0)) == 2 and stopped[-1] < APART
    late = run_mixture(folders, [1, 1], 8, G=2)[-1].state  # 9 of 7 windows
    one = mixture(folders, [1, 1], when_exhausted=["stop", "repeat"])
    before = one.state_dict()
    with pytest.raises(ValueError, match=r"streams\[0\] has had its epoch"):
        one.load_state_dict(late, changed=True)
    assert one.state_dict() == before
    with pytest.warns(CodedWarning, match=r"ended: .*source_0, train, which has had 9 of 7"):
        other = changed_run(folders, [1, 1], 5, late, when_exhausted=[1, "repeat"])
    assert own(firsts(other), 0) == []
    with pytest.raises(ValueError, match="no source has samples left"):
        changed_run(folders[:1], [1], 5, late, when_exhausted=1)


def test_the_last_batch_is_counted_from_the_position_of_the_state(tmp_path):
    folders = sources(tmp_path, [7, 5])  # 12 samples
    state = run_mixture(folders, [1, 1], 1, G=3, when_exhausted=1)[-1].state
    for weights, changed in (([1, 1], False), ([1, 2], True)):  # 9 are left, in batches of 4: 1 in the last
        one = mixture(folders, weights, G=4, world=2, when_exhausted=1)
        with pytest.warns(CodedWarning, match="the last batch has 1 of 4 rows"):
            one.load_state_dict(state, changed=changed)
    one = mixture(folders, [1, 2], G=10, when_exhausted=1, drop_last=True)
    with pytest.raises(ValueError, match="no batch is left of 9 samples"):
        one.load_state_dict(state, changed=True)
    assert one.state_dict()["consumed_samples"] == 0 and "EpochStream of " in repr(one)


def test_what_cannot_be_continued_is_refused_with_the_way_that_works(tmp_path):
    folders = sources(tmp_path, [7, 50])
    one = mixture(folders, [1, 2])
    state = run_mixture(folders, [1, 1], 3)[-1].state
    bare = {key: value for key, value in state.items() if key != "checksum"}
    old = {key: value for key, value in bare.items() if key != "positions"}
    refused = [
        (old, "of an earlier release, .* change from batch.state of the next batch"),
        ({**state, "positions": [5, 7]}, "checksum"),
        ({**bare, "positions": [6, 7]}, "positions sum to 13, expected at most 12"),
        ({**bare, "positions": [12]}, "expected a list of 2 counts"),
        ({**bare, "positions": [13, -1]}, "positions is -1"),
        ({**bare, "worker": [0, 1, 4]}, "Only batch.state"),
        ({**bare, "sources": [None, 3]}, "sources is"),
        ({**bare, "sources": [{"seed": {1: 2}}, {}]}, "expected what state_dict"),
        ({**bare, "consumed_samples": "12"}, "consumed_samples"),
        *((each, "expected") for each in (None, [], "state", 3, {}, {"consumed_samples": 3})),
    ]
    before = one.state_dict()
    for each, named in refused:
        with pytest.raises(ValueError, match=named):
            one.load_state_dict(each, changed=True)
        assert one.state_dict() == before, "a refused state moved the mixture"
    with pytest.raises(ValueError, match="allow_other_content"):
        one.load_state_dict(state, changed=True, allow_other_content=True)
    other = {**bare, "sources": [{**each, "tokenizer_sha256": "ab" * 32} for each in bare["sources"]]}
    one.streams[0].split.tokenizer_sha256 = "cd" * 32
    if one.streams[0].identity()["tokenizer_sha256"] == "cd" * 32:
        with pytest.raises(CacheError, match="Its ids mean other text"):
            one.load_state_dict(other, changed=True)


@pytest.mark.parametrize(
    "origin",
    [3, [], {}, {"sample": 4}, {"sample": 4, "positions": [1]}, {"sample": 4, "positions": [3, 2]},
     {"sample": 24, "positions": [3, 2]}, {"sample": -1, "positions": [0, 0]}, {"sample": 4, "positions": [1.0, 2]},
     {"sample": 4, "positions": [1, 3], "more": 1}],
)  # fmt: skip
def test_an_origin_that_cannot_be_is_refused(tmp_path, origin):
    folders = sources(tmp_path, [7, 50])
    one = mixture(folders, [1, 1])
    state = {key: value for key, value in run_mixture(folders, [1, 1], 3)[-1].state.items() if key != "checksum"}
    before = one.state_dict()
    for flags in ({}, {"allow_other_content": True}):
        with pytest.raises(ValueError, match=r"origin|sample is -1|positions is"):
            one.load_state_dict({**state, "origin": origin}, **flags)
        assert one.state_dict() == before


@pytest.mark.filterwarnings("ignore:the stream changes")
def test_a_stream_of_one_cache_changes_T_and_begins_a_new_epoch(tmp_path):
    """On paper: 12 windows of 2 tokens, then all 25 windows of 3 in that stream's own order; the count continues."""
    (folder,) = sources(tmp_path, [50])
    state = run_epochs(folder, 3, T=1)[-1].state
    with refused("E108", "changed=True"):
        run_epochs(folder, 1, state=state, T=2)
    with pytest.warns(CodedWarning, match=r"^the stream changes at sample 12: a new epoch of .* had 12.*: T 1 -> 2"):
        longer = run_epochs(folder, 20, state=state, T=2, change=True, epochs=1)
    assert firsts(longer) == firsts(run_epochs(folder, 20, T=2, epochs=1)) and len(firsts(longer)) == 25
    assert longer[-1].state["consumed_samples"] == 12 + 25 and longer[-1].state["epoch"] == 1
    assert longer[-1].state["origin"] == {"sample": 12, "positions": [0]}
    rest = run_epochs(folder, 20, state=longer[0].state, T=2, world=2, G=2, epochs=1)  # later states load plainly
    assert firsts(rest) == firsts(longer[1:])
    assert firsts(run_epochs(folder, 2, state=longer[0].state, T=2, change=True)) == firsts(longer[1:3])
    again = run_epochs(folder, 2, state=longer[0].state, T=1, change=True)
    assert firsts(again) == firsts(run_epochs(folder, 2, T=1)) and again[0].state["consumed_samples"] == 20


@pytest.mark.filterwarnings("ignore:the stream changes")
def test_a_source_of_a_mixture_and_a_stream_alone_are_one_run_both_ways(tmp_path):
    folders = sources(tmp_path, [7, 50])
    alone = firsts(run_epochs(folders[1], 12, T=1))
    state = run_mixture(folders, [1, 1], 3)[-1].state
    assert state["positions"] == [6, 6]
    single = run_epochs(folders[1], 3, state=state, T=1, change=True)
    assert firsts(single) == alone[6:18] and single[-1].state["consumed_samples"] == 24
    assert single[-1].state["origin"] == {"sample": 12, "positions": [6]}
    mixed = firsts(changed_run(folders, [1, 1], 2, single[-1].state))
    assert own(mixed, 1) == alone[18 : 18 + len(own(mixed, 1))] and own(mixed, 1)
    with pytest.raises(ValueError, match="all 7 samples had been served"):
        run_epochs(folders[0], 1, state=run_mixture(folders, [1, 1], 4)[-1].state, T=1, change=True, epochs=1)


@pytest.mark.filterwarnings("ignore:the stream changes")
def test_a_changed_stream_is_no_source_of_a_mixture_and_its_origin_is_checked(tmp_path):
    (folder,) = sources(tmp_path, [50])
    one = EpochStream(str(folder), T=2, global_batch_size=4, seed=0)
    one.load_state_dict(run_epochs(folder, 3, T=1)[-1].state, changed=True)
    with pytest.raises(ValueError, match=r"streams\[0\] continues a changed run"):
        MixtureStream([one], [1], seed=0)
    state = next(iter(one)).state
    for origin in ({"sample": 17, "positions": [0]}, {"sample": 12, "positions": [13]}, {"sample": 12}, [12], "x"):
        with pytest.raises(ValueError):
            run_epochs(folder, 1, state={**state, "origin": origin}, T=2)
    with pytest.raises(ValueError, match="checksum"):
        run_epochs(folder, 1, state={**state, "origin": {"sample": 11, "positions": [0]}}, T=2)
