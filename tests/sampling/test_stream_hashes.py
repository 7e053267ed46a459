"""What every stream has served and what its states were, as hashes that are kept: a change of one bit is seen.

Eight runs of each stream of support/streams.py: one or three ranks, two seeds (with the second the short last batch is
left out), in one part or stopped after three steps and gone on with two ranks and another batch size. Where a change
is meant, and STREAM_VERSION raised if a number means another sample, the hashes are made anew:

    UPDATE_STREAMS=1 .venv/bin/python -m pytest -n 0 tests/sampling/test_stream_hashes.py
"""

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from support.streams import KINDS, build_caches, hashed, joined, opened, ranks_of, spelled

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:.*random_offset moves none"),
    pytest.mark.filterwarnings("ignore:.*supervised tokens"),
    pytest.mark.filterwarnings("ignore:the mixture changes"),
]
KEPT = Path(__file__).with_name("stream_hashes.json")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return build_caches(tmp_path_factory.mktemp("streams"))


def hashed_states(states):
    return hashlib.sha256(json.dumps(states, sort_keys=True).encode()).hexdigest()[:16]


def stopped(kind, root, world, arguments):
    """Take three steps; go on, from a pickle and a state, with two ranks and another batch size, to the end."""
    ranks = ranks_of(kind, root, 3, world=world, **arguments)
    again = {**arguments, "global_batch_size": 4}
    more = []
    for rank in range(2):
        stream = pickle.loads(pickle.dumps(opened(kind, root, rank=rank, world_size=2, **again)))
        stream.load_state_dict(ranks[0][-1].state)
        more.append(list(stream))
    joined(more)
    return [*ranks, *more]


def runs_of(kind, root):
    """Return the hash of the batches, and of the states after them, of eight runs."""
    found = {}
    for world in (1, 3):
        for seed in (0, 7):
            arguments = {"seed": seed, "drop_last": bool(seed)}
            whole, parts = ranks_of(kind, root, world=world, **arguments), stopped(kind, root, world, arguments)
            for name, ranks in (("whole", whole), ("stopped", parts)):
                batches = [batch for rank in ranks for batch in rank]
                states = [batch.state for batch in batches]
                found[f"{world} of seed {seed}, {name}"] = f"{hashed(batches)} {hashed_states(states)}"
    return found


def compared(name, found):
    kept = json.loads(KEPT.read_text())
    if os.environ.get("UPDATE_STREAMS"):
        kept[name] = found
        KEPT.write_text(json.dumps({key: kept[key] for key in [*KINDS, "random"] if key in kept}, indent=1) + "\n")
    changed = [f"{run}: {one}, kept {kept[name][run]}" for run, one in found.items() if one != kept[name][run]]
    assert not changed, f"{name} serves other batches or has other states: {changed}"
    assert found.keys() == kept[name].keys()


@pytest.mark.parametrize("kind", KINDS)
def test_the_batches_and_states_of_a_stream_are_the_kept_ones(root, kind):
    compared(kind, runs_of(kind, root))


def test_random_batches_are_the_kept_ones(root):
    chats = root / "chats/train_tokens.bin", root / "chats/train_idx.npy"
    found = {}
    for name, data in (
        ("windows", PretrainTokenStreamDataset(root / "plain/train", T=4, device="cpu")),
        ("chats", SFTExampleDataset(*chats, T=6, eot_id=4, device="cpu")),
    ):
        generator = torch.Generator().manual_seed(5)
        drawn = [one for _ in range(5) for one in data.get_batch(B=6, generator=generator)]
        found[name] = hashlib.sha256(b"".join(some for one in drawn for some in spelled(one))).hexdigest()[:16]
    compared("random", found)


def test_there_are_hashes_of_each_stream_and_of_nothing_else():
    assert json.loads(KEPT.read_text()).keys() == {*KINDS, "random"}
