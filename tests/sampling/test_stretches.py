"""The order "shards", by the prose of docs/reading.md in plain integers, and what must hold of it."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import ByteTokenizer
from support.errors import refused
from support.number_caches import WRAP, allow_holes, firsts, numbered, plain_mix, run_epochs

from niels_gpt.cache.build_sft import build_sft
from niels_gpt.sampling import EpochStream, MixtureStream, PackedStream, SFTStream
from niels_gpt.storage.errors import StateError

STRETCH = 8_388_608
"""Tokens of a stretch, by docs/reading.md."""


def plain_keys(seed, count, added=0):
    """The first eight of `count` numbers of torch's generator, with mix(added) added in place of mix(0)."""
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [(number + plain_mix(seed % WRAP >> 32) + plain_mix(added)) % WRAP for number in drawn[:8]]


def plain_p(k, n, keys, e):
    """p(k) of epoch e over n, by "The order, exactly"."""
    h = 1
    while 4**h < n:
        h += 1
    while True:
        left, right = k >> h, k % 2**h
        for key in keys:
            left, right = right, left ^ plain_mix((right + plain_mix((key + e) % WRAP)) % WRAP) % 2**h
        k = left * 2**h + right
        if k < n:
            return k


def plain_stretches(shards, T):
    """Windows of each stretch, in the order of the split. shards: tokens of each."""
    found, number = [], 0
    for tokens in shards:
        spans = {}
        for window in range((tokens - 1) // T):
            spans.setdefault(window * T // STRETCH, []).append(number)
            number += 1
        found += spans.values()
    return found


def plain_order(stretches, open_shards, seed, epoch, purpose=0):
    """The units of an epoch in the order in which they are served."""
    P = len(stretches)
    G = -(-P // open_shards)
    of_stretches, of_units = plain_keys(seed, 8, 65_536 + purpose), plain_keys(seed, 9, purpose)
    drawn, served = [plain_p(i, P, of_stretches, epoch) for i in range(P)], []
    for g in range(G):
        units = [unit for i in drawn[g * P // G : (g + 1) * P // G] for unit in stretches[i]]
        served += [units[plain_p(j, len(units), of_units, epoch * G + g)] for j in range(len(units))]
    return served


def served(stream, count):
    """The first token of each of the first samples, in the numbering of the shards' files."""
    return stream.samples.locate(np.arange(count)).places.tolist()


@settings(derandomize=True, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    T=st.integers(1, 9),
    open_shards=st.integers(1, 14),
    seed=st.integers(-(2**63), 2**63),
)
def test_windows_are_served_in_the_order_of_the_prose(tmp_path_factory, lengths, T, open_shards, seed):
    lengths.append(T + 1)  # at least one window
    folder = numbered(tmp_path_factory.mktemp("split"), lengths)
    how = {"T": T, "seed": seed, "order": "shards", "open_shards": open_shards}
    begins = np.cumsum([0, *lengths]).tolist()
    windows = [begins[s] + w * T for s, tokens in enumerate(lengths) for w in range((tokens - 1) // T)]
    expected = [
        windows[unit] for e in range(3) for unit in plain_order(plain_stretches(lengths, T), open_shards, seed, e)
    ]
    stream = EpochStream(folder, global_batch_size=1, epochs=3, **how)
    assert [int(batch.x[0, 0]) for batch in stream] == expected


@pytest.mark.parametrize("open_shards", [1, 2, 16])
def test_a_long_shard_is_several_stretches(tmp_path, monkeypatch, open_shards):
    allow_holes(monkeypatch)
    lengths, T = [3 * STRETCH + 2, 5, STRETCH + 1, 2 * STRETCH], 1_000_003
    (tmp_path / "train").mkdir()
    for number, tokens in enumerate(lengths):
        with open(tmp_path / f"train/shard_{number:05d}.bin", "wb") as file:
            file.truncate(2 * tokens)
    stream = EpochStream(tmp_path / "train", T=T, global_batch_size=1, seed=5, order="shards", open_shards=open_shards)
    stretches = plain_stretches(lengths, T)
    assert [len(stretch) for stretch in stretches] == [9, 8, 8, 8, 9, 7]  # on paper: 25 of shard 0, 8 of 2, 16 of 3
    begins = stream.files.first_tokens.tolist()
    places = [begins[s] + w * T for s, tokens in enumerate(lengths) for w in range((tokens - 1) // T)]
    expected = [places[unit] for e in range(2) for unit in plain_order(stretches, open_shards, 5, e)]
    assert served(stream, 2 * len(places)) == expected


def test_a_window_longer_than_a_stretch_is_a_stretch(tmp_path, monkeypatch):
    allow_holes(monkeypatch)
    (tmp_path / "train").mkdir()
    T = 2 * STRETCH + 1
    with open(tmp_path / "train/shard_00000.bin", "wb") as file:
        file.truncate(2 * (3 * T + 1))
    stream = EpochStream(tmp_path / "train", T=T, global_batch_size=1, seed=1, order="shards", open_shards=2)
    stretches = plain_stretches([3 * T + 1], T)
    assert stretches == [[0], [1], [2]]
    assert served(stream, 3) == [T * unit for unit in plain_order(stretches, 2, 1, 0)]


def test_groups_of_five_stretches_by_four_are_two_and_three(tmp_path):
    """On paper: P = 5 and open_shards = 4 give G = 2 groups, of the stretches 0 and 1, and 2 to 4, of the epoch."""
    folder = numbered(tmp_path, [13, 13, 13, 13, 13])  # three windows of four tokens each
    batches = run_epochs(folder, G=1, epochs=4, order="shards", open_shards=4)
    shards = [first // 13 for first in firsts(batches)]
    for epoch in range(4):
        of_epoch = shards[15 * epoch : 15 * epoch + 15]
        first, second = set(of_epoch[:6]), set(of_epoch[6:])
        assert (len(first), len(second)) == (2, 3) and not first & second
    assert len({tuple(shards[15 * epoch : 15 * epoch + 15]) for epoch in range(4)}) == 4


def test_one_open_shard_is_served_shard_by_shard(tmp_path):
    folder = numbered(tmp_path, [9, 2, 17, 5])  # with T = 4 shard 1 has no window
    shards = [
        [0, 9, 11, 28].index(max(b for b in (0, 9, 11, 28) if b <= first))
        for first in firsts(run_epochs(folder, G=1, epochs=1, order="shards", open_shards=1))
    ]
    changes = sum(one != other for one, other in pairwise(shards))
    assert Counter(shards) == {0: 2, 2: 4, 3: 1} and changes == 2


def test_a_single_shard_and_more_open_shards_than_stretches_are_one_group(tmp_path):
    one = numbered(tmp_path / "one", [41])
    keys = plain_keys(0, 9)
    for open_shards in (1, 100):
        assert firsts(run_epochs(one, G=1, epochs=2, order="shards", open_shards=open_shards)) == [
            4 * plain_p(j, 10, keys, e) for e in range(2) for j in range(10)
        ]


@pytest.mark.slow
def test_chats_are_served_by_the_stretch_of_their_first_token(tmp_path):
    letters = 3_000_000
    chats = [
        [{"role": "user", "content": chr(97 + number)}, {"role": "assistant", "content": "z" * letters}]
        for number in range(7)
    ]
    build_sft(chats, tmp_path / "chats", tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    tokens = letters + 5
    stretches = [list(group) for group in ([0, 1, 2], [3, 4, 5], [6])]
    assert [number * tokens // STRETCH for number in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    with pytest.warns(UserWarning, match="supervised tokens"):
        stream = SFTStream(
            tmp_path / "chats", T=4, global_batch_size=1, seed=3, epochs=2, order="shards", open_shards=2
        )
    found = [int(batch.documents[0]) for batch in stream]
    assert found == [unit for e in range(2) for unit in plain_order(stretches, 2, 3, e, purpose=2)]


# --- what is refused --------------------------------------------------------------------------------------------------


def open_one(folder, **changed):
    return EpochStream(folder, **{"T": 4, "global_batch_size": 2, "seed": 0, **changed})


@pytest.mark.parametrize("changed", [{"order": "shard"}, {"order": None}, {"open_shards": 4}])
def test_another_order_and_open_shards_without_it_are_refused(tmp_path, changed):
    folder = numbered(tmp_path, [20, 30])
    with refused("E101", *map(str, changed)):
        open_one(folder, **changed)
    for wrong in (0, -1, 1.5, True):
        with refused("E102", "open_shards"):
            open_one(folder, order="shards", open_shards=wrong)


def test_packed_rows_say_why_they_have_no_such_order(tmp_path):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    build_sft([chat], tmp_path / "chats", tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    with refused("E101", "order='shards'", "chats", "order='all'"):
        PackedStream(tmp_path / "chats", T=16, global_batch_size=1, seed=0, order="shards")


SHARDS = {"order": "shards", "open_shards": 2}


@pytest.mark.parametrize(("one", "other"), [({}, SHARDS), (SHARDS, {}), (SHARDS, {"order": "shards"})])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_state_of_another_order_is_refused(tmp_path, one, other, sealed):
    folder = numbered(tmp_path, [20, 30, 40])
    state = next(iter(open_one(folder, **one))).state
    if not sealed:
        del state["checksum"]
    with refused("E108", "order" if {} in (one, other) else "open_shards", kind=StateError):
        open_one(folder, **other).load_state_dict(state)


@pytest.mark.parametrize(("one", "other"), [({}, SHARDS), (SHARDS, {}), (SHARDS, {"order": "shards"})])
def test_a_run_that_changes_its_order_begins_a_new_epoch(tmp_path, one, other):
    folder = numbered(tmp_path, [20, 30, 40])
    state = next(iter(open_one(folder, **one))).state
    stream = open_one(folder, epochs=1, **other)
    with pytest.warns(UserWarning, match="a new epoch"):
        stream.load_state_dict(state, changed=True)
    rest = [first for batch in stream for first in batch.x[:, 0].tolist()]
    assert rest == [first for batch in open_one(folder, epochs=1, **other) for first in batch.x[:, 0].tolist()]
    assert stream.consumed_samples == 2 + len(rest)


def test_a_source_of_a_mixture_keeps_its_place_in_its_own_order(tmp_path):
    folders = [numbered(tmp_path / "a", [20, 30, 40]), numbered(tmp_path / "b", [50])]

    def mixed(weights, **how):
        return MixtureStream([open_one(folders[0], **how), open_one(folders[1])], weights, seed=0, block_size=8)

    first = next(iter(mixed([1, 1], **SHARDS)))
    changed = mixed([3, 1], **SHARDS)
    with pytest.warns(UserWarning, match="weights"):
        changed.load_state_dict(first.state, changed=True)
    assert changed.state_dict()["positions"] == first.state["positions"]
    with pytest.warns(UserWarning, match="a new epoch"):
        (other := mixed([1, 1])).load_state_dict(first.state, changed=True)
    assert other.state_dict()["positions"][0] == 0
