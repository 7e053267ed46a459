"""RolloutStream: each sample once an epoch, the same bins for any ranks and workers, exact resumption."""

from collections import Counter

import numpy as np
import pytest
import torch
from support.bits_caches import sealed
from support.disk import read_meta
from support.small_builds import rollouts

from niels_gpt.prefix_tree.edges import LossEdges, folded_cross_entropy
from niels_gpt.prefix_tree.rollouts.build import build_rollouts
from niels_gpt.prefix_tree.rollouts.records import Rollout, RolloutGroup
from niels_gpt.prefix_tree.rollouts.stream import RolloutStream
from niels_gpt.storage.errors import CacheError

BUDGET = 40


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    path = tmp_path_factory.mktemp("rollouts") / "c"
    rollouts(path, val_frac=0)
    return path


def opened(cache, **changed):
    return RolloutStream(cache, **{"max_tokens": BUDGET, "seed": 1, "epochs": 2, **changed})


def samples_of(bins):
    return [each.samples.tolist() for each in bins]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_have_as_many_bins_and_filler_fills_the_last_step(cache, ranks):
    alone = samples_of(opened(cache))
    streams = [opened(cache, rank=rank, world_size=ranks) for rank in range(ranks)]
    served = [list(stream) for stream in streams]
    assert {len(bins) for bins in served} == {len(streams[0])} == {-(-len(alone) // ranks)}
    steps = [each for step in zip(*served, strict=True) for each in step]
    assert samples_of(each for each in steps if not each.is_filler) == alone
    assert sum(each.is_filler for each in steps) == -len(alone) % ranks
    for step in zip(*served, strict=True):
        assert {each.step_loss_tokens for each in step} == {sum(each.loss_tokens for each in step)}
        assert {each.step_samples for each in step} == {sum(len(each.samples) for each in step)}
        assert len({str(each.state) for each in step}) == 1


def test_epochs_differ_and_groups_stay_together_under_the_budget(cache):
    bins = list(opened(cache))
    half = len(bins) // 2
    assert samples_of(bins[:half]) != samples_of(bins[half:])
    seen = []
    for each in bins:
        assert each.forest.num_tokens <= BUDGET
        groups = each.groups.tolist()
        assert groups == sorted(groups, key=groups.index)  # side by side
        seen += set(groups)
    assert set(Counter(seen).values()) == {2}  # one bin an epoch


def test_fields_are_in_the_order_of_the_edges(cache):
    stream = opened(cache)
    data = stream.dataset
    for each in stream:
        edges = LossEdges.from_forest(each.forest)
        assert edges.num_loss_tokens == each.loss_tokens == len(each.advantages)
        places = [data.locate(sample) for sample in each.samples.tolist()]
        for name, per in data.fields.items():
            values = np.concatenate([data.field(name, group, [number]) for group, number in places])
            assert torch.equal(each.fields[name], edges.field(values, per=per))
        assert torch.equal(each.sample_fields["advantage"][edges.sample], each.advantages)
        ids = [data.read(group, [number])[0].ids.tolist() for group, number in places]
        assert each.forest.samples() == ids


def test_filler_gives_zero_gradients(cache):
    ranks = 100
    (filler,) = opened(cache, rank=ranks - 1, world_size=ranks, epochs=1)
    assert filler.is_filler and not filler.loss_tokens and not len(filler.advantages)
    logits = torch.zeros(filler.forest.num_tokens, 30, requires_grad=True)
    edges = LossEdges.from_forest(filler.forest)
    loss = folded_cross_entropy(logits, edges, normalizer=filler.step_loss_tokens)
    loss.backward()
    assert loss == 0 and logits.grad is not None and not logits.grad.any()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_resumes_its_workers(cache):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        return torchdata.StatefulDataLoader(opened(cache), batch_size=None, num_workers=2)

    first, alone = loader(), samples_of(opened(cache))
    for number, each in enumerate(first):
        assert each.samples.tolist() == alone[number]
        if number == 4:
            break
    again = loader()
    again.load_state_dict(first.state_dict())
    assert samples_of(again) == alone[5:]


def test_the_next_base_is_the_end_of_a_turn_of_all_workers(cache):
    """What StatefulDataLoader saves of a worker: from there on each worker takes its next step."""
    stream = opened(cache)
    ends = [consumed for _, consumed, _ in stream._work(0, 0, 1)]
    for worker in range(3):
        for number, (_, consumed, base) in enumerate(stream._work(0, worker, 3)):
            assert consumed == ends[3 * number + worker]
            assert base == ends[min(3 * number + 2, len(ends) - 1)]


def big_group(samples):
    yield RolloutGroup("big", [Rollout([1, 2, 3, 4 + number, 5]) for number in range(samples)])
    yield RolloutGroup("small", [Rollout([9, 8])])


def test_a_group_above_the_budget_is_cut_and_a_sample_above_it_refused(tmp_path):
    build_rollouts(big_group(20), tmp_path / "c", vocab_size=30)
    bins = list(opened(tmp_path / "c", max_tokens=13, epochs=1))
    assert sorted([sample for each in samples_of(bins) for sample in each]) == list(range(21))
    assert all(each.forest.num_tokens <= 13 for each in bins) and len(bins) == 5
    with pytest.raises(ValueError, match=r"sample 0 of group 0 has 5 tokens, and 20 samples are above max_tokens=4"):
        opened(tmp_path / "c", max_tokens=4)
    own = list(opened(tmp_path / "c", max_tokens=4, epochs=1, oversize="own_bin"))
    assert sorted([sample for each in samples_of(own) for sample in each]) == list(range(21)) and len(own) == 21


def test_a_row_above_the_budget_because_of_an_lcp_that_is_wrong_is_refused(tmp_path):
    """All numbers of the index fit each other: a cut group is not compared as a whole, so its rows are."""
    group = RolloutGroup("g", [Rollout([1, *[2 + number] * 10]) for number in range(12)])
    build_rollouts([group], tmp_path / "c", vocab_size=30)
    folder = (tmp_path / "c").resolve()
    samples, groups = (np.load(folder / f"index/train_{table}.npy") for table in ("samples", "groups"))
    rows = samples.reshape(-1, 5)
    rows[2:, 4] = 11
    lengths = rows[rows[:, 3], 0]
    groups[7:] = [(lengths - rows[:, 4]).sum(), (lengths * (lengths + 1) - rows[:, 4] * (rows[:, 4] + 1)).sum() // 2]
    for table, values in (("samples", samples), ("groups", groups)):
        (folder / f"index/train_{table}.npy").chmod(0o644)
        np.save(folder / f"index/train_{table}.npy", values)
    sealed(folder, read_meta(folder))  # as a builder with a fault would write it
    with pytest.raises(
        CacheError, match=r"lcp: samples of groups \[0\] fold into 11 tokens, expected 1\d\d by their ids"
    ):
        list(opened(tmp_path / "c", max_tokens=20))


def test_the_order_of_a_seed_is_pinned(tmp_path):
    """Where this fails, STREAM_VERSION has to be raised: states of before would mean other samples."""
    groups = [RolloutGroup(str(n), [Rollout([n, n, k]) for k in range(n % 3 + 1)]) for n in range(9)]
    build_rollouts(groups, tmp_path / "c", vocab_size=30)
    assert samples_of(opened(tmp_path / "c", max_tokens=9, epochs=1)) == PINNED


PINNED = [[3, 4, 5, 13, 14], [7, 8, 9, 10, 11], [1, 2, 15, 16, 17], [6, 12, 0]]


def test_a_state_inside_a_bin_or_of_other_groups_is_refused(cache, tmp_path):
    stream = opened(cache)
    state = next(iter(stream)).state
    inside = {**state, "consumed_samples": state["consumed_samples"] - 1}
    with pytest.raises(ValueError, match="checksum"):
        opened(cache).load_state_dict(inside)
    del inside["checksum"]
    with pytest.raises(ValueError, match="inside a bin that begins at 0"):
        stream.load_state_dict(inside)
    assert stream.state_dict() == state
    rollouts(tmp_path / "other", seed=5, val_frac=0)
    other = opened(tmp_path / "other")
    with pytest.raises(CacheError, match=r"is .*, expected .* as in this stream"):
        other.load_state_dict(state)
    other.load_state_dict(state, allow_other_content=True)
    assert 0 <= other.state_dict()["consumed_samples"] <= state["consumed_samples"]
