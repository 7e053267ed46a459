"""Epochs of a pretrain split: every window exactly once, in an order that no split of the work changes.

The ids of the shards count through the whole stream, so that a row tells where it was taken.
"""

import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.number_caches import (
    DTYPES,
    allow_holes,
    first_ids,
    firsts,
    number_cache,
    numbered,
    run_epochs,
    write_shards,
)

import niels_gpt.cache
import niels_gpt.sampling
from niels_gpt.cache import CacheError, PretrainTokenStreamDataset
from niels_gpt.cache.meta import read_meta
from niels_gpt.sampling import EpochStream, MixtureStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*are shorter than T"),
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:.*random_offset moves none"),
]

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**63 - 1)


@pytest.fixture
def ten(tmp_path):
    """Ten windows of T = 4: six of a shard of 26 tokens (one is left over), four of a shard of 17 (none is)."""
    return numbered(tmp_path, [26, 17])


@settings(derandomize=True, max_examples=25)
@given(
    lengths=LENGTHS,
    T=st.integers(1, 6),
    G=st.integers(1, 9),
    seed=SEEDS,
    random_offset=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_every_window_comes_exactly_once_an_epoch(lengths, T, G, seed, random_offset, dtype):
    expected = first_ids(lengths, T)
    assume(expected)
    changed = {"T": T, "seed": seed, "epochs": 3, "random_offset": random_offset, "dtype": dtype}
    with tempfile.TemporaryDirectory() as name:
        folder = numbered(Path(name), lengths, dtype)
        batches = run_epochs(folder, G=G, **changed)
        undivided = run_epochs(folder, G=1, io="pread", **changed)
    rows = [row for batch in batches for row in batch.rows]
    assert rows == [row for batch in undivided for row in batch.rows]
    assert all(row == list(range(row[0], row[0] + T + 1)) for row in rows)
    assert len(rows) == 3 * len(expected)
    if not random_offset:
        for epoch in range(3):
            assert sorted(firsts(batches)[epoch * len(expected) : (epoch + 1) * len(expected)]) == expected


@settings(derandomize=True, max_examples=15)
@given(lengths=LENGTHS, T=st.integers(1, 5), seed=SEEDS)
def test_no_window_crosses_two_shards(lengths, T, seed):
    assume(first_ids(lengths, T))
    far_apart = [[shard * 1000 + token for token in range(length)] for shard, length in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as name:
        folder = write_shards(Path(name), far_apart)
        for batch in run_epochs(folder, G=7, T=T, seed=seed, epochs=2, random_offset=bool(seed % 2)):
            assert all(row == list(range(row[0], row[0] + T + 1)) for row in batch.rows)


def test_two_epochs_have_different_orders_and_two_seeds_too(tmp_path):
    folder = numbered(tmp_path, [401])
    orders = []
    for seed in (0, 1, 2):
        taken = firsts(run_epochs(folder, 30, G=10, seed=seed))
        orders += [tuple(taken[epoch * 100 : (epoch + 1) * 100]) for epoch in range(3)]
    assert len(set(orders)) == 9 and all(sorted(order) == first_ids([401], 4) for order in orders)
    # Nor is one order another one started elsewhere or read backwards: two share few pairs of neighbours.
    pairs = [{frozenset(pair) for pair in pairwise(order)} for order in orders]
    assert max(len(one & other) for number, one in enumerate(pairs) for other in pairs[:number]) < 20


def test_every_bit_of_a_seed_counts(ten):
    """A Mersenne Twister of torch reads the low 32 bits of its seed."""
    orders = {tuple(firsts(run_epochs(ten, 2, G=10, seed=seed))) for seed in [0, *(1 << bit for bit in range(63))]}
    assert len(orders) == 64


@pytest.mark.parametrize(("G", "drop_last", "sizes"), [(4, False, [4, 4, 2]), (4, True, [4, 4]), (5, True, [5, 5])])
def test_a_short_last_batch_may_be_left_out(ten, G, drop_last, sizes):
    batches = run_epochs(ten, G=G, epochs=1, drop_last=drop_last)
    assert [len(batch.rows) for batch in batches] == sizes
    assert firsts(batches) == firsts(run_epochs(ten, 3, G=G))[: sum(sizes)]
    # What was left out is not lost: a run that gets another epoch continues with it.
    more = run_epochs(ten, G=5, epochs=2, drop_last=drop_last, state=batches[-1].state)
    assert firsts(batches + more) == firsts(run_epochs(ten, 20, G=1))[: sum(sizes) + 5 * len(more)] and len(more) >= 2


@pytest.mark.filterwarnings("error")
def test_ranks_with_unequal_rows_of_the_last_batch_are_warned_of(ten):
    """10 samples in batches of 8 over 4 ranks: 2 rows are left, so that two ranks have none."""
    arguments = {"T": 4, "global_batch_size": 8, "seed": 0, "epochs": 1, "world_size": 4}
    with pytest.warns(UserWarning, match=r"2 of 8 rows.*4 ranks.*0 rows and others 1;.*drop_last=True"):
        EpochStream(str(ten), **arguments)
    for fair in ({"world_size": 2}, {"world_size": 1}, {"drop_last": True}, {"epochs": 4}, {"epochs": None}):
        EpochStream(str(ten), **{**arguments, **fair})


def test_a_run_without_a_full_batch_is_refused_where_short_ones_are_left_out(ten):
    for drop_last, said in ((True, "drop_last=True, global_batch_size=12: no batch is left of 10"), (1, "drop_last=1")):
        with pytest.raises(ValueError, match=said):
            EpochStream(str(ten), T=4, global_batch_size=12, seed=0, epochs=1, drop_last=drop_last)


@settings(derandomize=True, max_examples=25)
@given(lengths=LENGTHS, T=st.integers(1, 7), seed=SEEDS)
def test_offsets_move_all_windows_of_a_shard_within_its_remainder(lengths, T, seed):
    fixed = first_ids(lengths, T)
    assume(fixed)
    with tempfile.TemporaryDirectory() as name:
        folder = numbered(Path(name), lengths)
        stream = EpochStream(str(folder), T=T, global_batch_size=1, seed=seed, random_offset=True)
        assert stream.num_windows == len(fixed)
        assert stream.remainder_tokens == sum((length - 1) % T for length in lengths)
        taken = firsts(run_epochs(folder, T=T, seed=seed, G=5, epochs=3, random_offset=True))
    starts = np.cumsum([0, *lengths])
    shard_of = np.searchsorted(starts, fixed, side="right") - 1
    for epoch in range(3):
        moved = sorted(taken[epoch * len(fixed) : (epoch + 1) * len(fixed)])
        offsets = {}
        for shard, start, first in zip(shard_of.tolist(), fixed, moved, strict=True):
            offsets.setdefault(shard, set()).add(first - start)
        assert all(len(found) == 1 for found in offsets.values()), "windows of a shard overlap, or leave a gap"
        assert all(0 <= found <= (lengths[shard] - 1) % T for shard, (found,) in offsets.items())


def test_offsets_differ_between_epochs_shards_and_seeds_and_reach_both_ends(tmp_path):
    """Two shards of 1 + 2 * 10 + 9 tokens: of two windows each, at an offset from 0 to 9."""
    folder = numbered(tmp_path, [30, 30])
    seen = Counter()
    equal = 0
    for seed in (0, 1):
        taken = firsts(run_epochs(folder, 100, T=10, seed=seed, G=4, random_offset=True))
        for epoch in range(100):
            first, _, second, _ = sorted(taken[epoch * 4 : epoch * 4 + 4])
            seen[first] += 1
            equal += first == second - 30
    assert set(seen) == set(range(10)) and max(seen.values()) < 50
    assert equal < 50, "the shards of an epoch share one offset"


@pytest.mark.filterwarnings("error")
def test_windows_that_no_offset_can_move_are_warned_of(tmp_path):
    """A shard of 1 + 3 * 4 tokens has 3 windows and no token left over; at T = 3 it has none either, at T = 5 two."""
    folder = numbered(tmp_path, [13])
    with pytest.warns(UserWarning, match=r"moves none of 3 of 3 windows.*T, such as 3"):
        EpochStream(str(folder), T=4, global_batch_size=1, seed=0, random_offset=True)
    EpochStream(str(folder), T=5, global_batch_size=1, seed=0, random_offset=True)
    EpochStream(str(folder), T=4, global_batch_size=1, seed=0)


def test_the_first_window_of_an_epoch_is_any_one_equally_likely(tmp_path):
    """1,000 firsts of 50 windows, 20 each. Of 49 degrees of freedom chi-square is 49, and beyond 120 once in 10^7."""
    folder = numbered(tmp_path, [201])
    by_seed, by_epoch = Counter(), Counter()
    for seed in range(200):
        taken = firsts(run_epochs(folder, 5, G=50, seed=seed))
        by_seed.update({taken[0]: 1})
        by_epoch.update(taken[0::50])
    for counts, expected in ((by_seed, 4), (by_epoch, 20)):
        chi_square = sum((counts[first] - expected) ** 2 / expected for first in first_ids([201], 4))
        assert 12 < chi_square < 120, chi_square


@pytest.mark.parametrize("windows", [64, 4097])
def test_no_window_betrays_its_place_in_the_order(tmp_path, windows):
    """Pearson's r of place and window, and of neighbours, is 0 within five standard errors; so are three seeds."""
    folder = numbered(tmp_path, [1 + windows])
    for seed in (0, 1, 2):
        order = np.array(firsts(run_epochs(folder, 1, T=1, G=windows, seed=seed)), dtype=np.float64)
        limit = 5 / np.sqrt(windows)
        assert abs(np.corrcoef(order, np.arange(windows))[0, 1]) < limit
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < limit
        # The difference of neighbours is no constant, as a stride or a linear congruence would have it.
        assert Counter(((order[1:] - order[:-1]) % windows).tolist()).most_common(1)[0][1] < 12


def test_a_shard_of_a_terabyte_is_opened_and_read_at_once(tmp_path, monkeypatch):
    """2^40 tokens that take no disk: the file is one hole, which reads as zeros."""
    allow_holes(monkeypatch)
    (tmp_path / "shard_00000.bin").touch()
    try:
        with open(tmp_path / "shard_00000.bin", "r+b") as file:
            file.truncate(2**41)
    except OSError:
        pytest.skip("this file system has no files of 2 TiB")
    stream = EpochStream(str(tmp_path), T=1, global_batch_size=8, seed=0)
    assert stream.num_windows == 2**40 - 1
    batch = next(iter(stream))
    assert batch.x.shape == (8, 1) and int(batch.x.sum()) == 0
    del batch.state["checksum"]
    stream.load_state_dict({**batch.state, "epoch": 1, "consumed_samples": 2**40 + 5})
    assert next(iter(stream)).state["consumed_samples"] == 2**40 + 13


def test_a_split_without_a_window_or_without_a_folder_is_refused(ten):
    with pytest.raises(CacheError, match="26"):
        EpochStream(str(ten), T=26, global_batch_size=1, seed=0)
    with pytest.raises(FileNotFoundError, match="no_such"):
        EpochStream(str(ten / "no_such"), T=4, global_batch_size=1, seed=0)


def test_a_real_cache_is_read_and_checked_against_what_is_expected_of_it(tmp_path):
    folder = number_cache(tmp_path / "pretrain" / "numbers")
    stream = EpochStream(str(folder), T=3, global_batch_size=1, seed=0, tokenizer_sha256="ab" * 32)
    assert stream.num_windows == 13 + 13 + 6  # shards of 40, 40 and 20 tokens
    expect = {key: stream.state_dict()[key] for key in ("split", "tokens", "content_sha256", "tokenizer_sha256")}
    assert (expect["split"], expect["tokens"], expect["tokenizer_sha256"]) == ("train", 100, "ab" * 32)
    EpochStream(str(folder), T=3, global_batch_size=1, seed=0, expect=expect)
    for key, value in {"tokens": 99, "content_sha256": "0" * 64, "tokenizer_sha256": "cd" * 32, "split": "val"}.items():
        with pytest.raises(CacheError, match=key):
            EpochStream(str(folder), T=3, global_batch_size=1, seed=0, expect={**expect, key: value})
    with pytest.raises(CacheError, match="cdcd"):
        EpochStream(str(folder), T=3, global_batch_size=1, seed=0, tokenizer_sha256="cd" * 32)


def test_streams_readers_and_batches_say_in_a_line_what_they_are(tmp_path):
    folder = number_cache(tmp_path / "pretrain" / "numbers")
    version = folder.parent.resolve().name
    stream = EpochStream(str(folder), T=3, global_batch_size=8, seed=0, rank=1, world_size=2, epochs=2)
    batch = next(iter(stream))
    mixture = MixtureStream([EpochStream(str(folder), T=3, global_batch_size=8, seed=0)], [0.5], seed=0)
    data = PretrainTokenStreamDataset(str(folder), T=3, device="cpu")
    for one in (stream, mixture, data):
        said = repr(one)
        assert all(part in said for part in (str(folder.parent), version, "train", "int64 [", ", 3] on cpu")), said
        assert ".versions" not in said and len(said) < 400 and str(one) == said
    assert "rank 1 of 2" in repr(stream) and "consumed_samples=8" in repr(stream) and "32 windows" in repr(stream)
    assert repr(batch) == "Batch(x, y: int64 [4, 3] on cpu, consumed_samples=8)"
    assert "source: int64 [8]" in repr(next(iter(mixture)))


def test_the_home_folder_may_be_a_tilde(tmp_path, monkeypatch):
    folder = number_cache(tmp_path / "pretrain" / "numbers")
    monkeypatch.setenv("HOME", str(tmp_path))
    stream = EpochStream("~/pretrain/numbers/train", T=3, global_batch_size=1, seed=0)
    assert stream.split.folder == folder.resolve()
    assert read_meta("~/pretrain/numbers/meta.json") == read_meta(str(folder.parent / "meta.json"))
    for name in ("~/pretrain/numbers", str(folder.parent)):
        with pytest.raises(CacheError, match=r"a folder, expected.*read_meta\('.*numbers/meta\.json'\)"):
            read_meta(name)


@pytest.mark.parametrize("package", [niels_gpt.cache, niels_gpt.sampling])
def test_public_names_are_listed_before_they_are_used(package):
    assert set(package.__all__) <= set(dir(package)) and "__name__" in dir(package)
