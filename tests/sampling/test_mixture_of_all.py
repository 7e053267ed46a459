"""Mixtures of plain windows, chats and packed documents: each piece once an epoch of its source, whatever changes."""

import json
import subprocess
import sys
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SUPPORT, mixed_caches
from support.mixed_caches import KINDS, check_epochs, global_rows, losses, open_mixture, rows_of
from torch.utils.data import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:the mixture changes"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes"),
]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return mixed_caches.build_three(tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def every(three):
    """All pieces of each source, and its rows an epoch."""
    pieces = mixed_caches.every_piece(three)
    streams = open_mixture(three, KINDS, [1, 1, 1], G=1).streams
    per_epoch = {kind: stream.samples_per_epoch for kind, stream in zip(KINDS, streams, strict=True)}
    assert per_epoch["plain"] == len(pieces["plain"]) and per_epoch["chats"] == len(pieces["chats"])
    assert 5 < per_epoch["packed"] < len(pieces["packed"]), "rows have several pieces"
    return pieces, per_epoch


def taken(three, kinds, weights, steps, *, world, workers=0, **others):
    """Return the rows of some steps with all ranks, and the state after them."""
    state, changed = others.pop("state", None), others.pop("changed", False)
    ranks, states = [], []
    for rank in range(world):
        one = open_mixture(three, kinds, weights, rank=rank, world_size=world, **others)
        if state is not None:
            one.load_state_dict(json.loads(json.dumps(state)), changed=changed)
        loader = DataLoader(one, batch_size=None, num_workers=workers) if workers else one
        batches = list(islice(loader, steps))
        ranks.append([rows_of(batch, kinds) for batch in batches])
        states.append(batches[-1].state)
    assert all(each == states[0] for each in states)
    return global_rows(ranks), states[0]


@settings(derandomize=True, max_examples=3)
@given(data=st.data())
def test_each_piece_comes_once_an_epoch_whatever_changes_in_the_middle(three, every, data):
    """Worlds, workers, batches, weights and sources change; a source that was removed begins again when it is back."""
    rows = {}
    state, total = None, 0
    for _ in range(3):
        kinds = data.draw(st.permutations(KINDS))[: data.draw(st.integers(1, 3))]
        weights = data.draw(st.lists(st.integers(1, 5), min_size=len(kinds), max_size=len(kinds)))
        rows = {kind: rows.get(kind, []) for kind in kinds}
        for changed in (True, False):
            world, steps = data.draw(st.sampled_from([1, 2, 3, 8])), data.draw(st.integers(1, 6))
            workers = data.draw(st.sampled_from([0, 0, 2])) if world == 1 else 0
            others = {"G": world * data.draw(st.integers(1, 2)), "state": state, "changed": changed}
            found, state = taken(three, kinds, weights, steps, world=world, workers=workers, **others)
            for kind, row in found:
                rows[kind].append((kind, row))
            total += len(found)
            assert state["consumed_samples"] == total
            assert state["positions"] == [len(rows[kind]) for kind in kinds]
    check_epochs([row for own in rows.values() for row in own], *every)


def test_batches_of_one_mixture_have_one_form_whatever_rows_they_hold(three):
    mixture = open_mixture(three, KINDS, [30, 1, 1], G=1)
    batches = list(islice(mixture, 64))
    assert {int(batch.source[0]) for batch in batches if batch.source is not None} == {0, 1, 2}
    for batch in batches:
        assert batch.cu_seqlens is not None and batch.piece_ids is not None
        if batch.source is not None and batch.source[0] == 0:  # a plain row is one segment, of which no more is known
            assert (batch.cu_seqlens.tolist(), batch.piece_ids.tolist()) == ([0, 12], [-1])


@pytest.mark.slow
def test_two_gloo_ranks_change_their_weights_stop_and_resume_as_three(three, every):
    """The first part by torchrun, with another source in its middle; the second in this process, plainly and changed.

    An evaluation that two ranks share has the sums of one process.
    """
    script = [str(SUPPORT / "mixed_caches.py"), str(three)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    first = json.loads((three / "first_part.json").read_text())
    rows, state = [(kind, row) for kind, row in global_rows(first["ranks"])], first["states"][0]
    assert first["states"] == [state, state] and state["consumed_samples"] == 66 == len(rows)
    whole = losses(three)
    assert first["losses"][:2] == whole[:2] and first["batches"] == [-(-whole[2] // 2)] * 2
    stages = [(0, [1, 1, 1]), (60, [1, 2, 3])]
    more, state = taken(three, KINDS, stages, 5, world=3, G=6, state=state)
    last, state = taken(three, KINDS, [3, 2, 1], 9, world=2, G=6, state=state, changed=True)
    rows += [*more, *last]
    assert state["positions"] == [sum(kind == of for of, _ in rows) for kind in KINDS]
    check_epochs(rows, *every)
    assert all(count > every[1][kind] for kind, count in zip(KINDS, state["positions"], strict=True)), (
        "an epoch of each"
    )
