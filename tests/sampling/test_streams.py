"""What holds for every stream, over the table of support/streams.py; what is one stream's own is in its own file."""

import copy
import json
import os
import pickle
from itertools import islice, zip_longest

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import ByteTokenizer
from support.errors import refused
from support.number_caches import numbered
from support.streams import EXPECTED_WARNINGS, KINDS, build_caches, joined, opened, ranks_of, run, told, units_of
from torch.utils.data import DataLoader

from niels_gpt.cache import CacheError
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.cache.checksums import BlockSums
from niels_gpt.sampling import EpochStream, PackedStream, SFTStream

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes"),
]
OF_BINS = [kind for kind in KINDS if kind.startswith("rollouts")]
OF_BATCHES = [kind for kind in KINDS if kind not in OF_BINS]
ONE_OF_EACH = ["windows", "chats", "packed", "mixture", "rollouts"]
SLOW_TO_OPEN = ["chats", "short chats"]
"""Tokens are lost, of which a warning tells how many other T would lose: a tenth of a second each."""
WORLDS = st.sampled_from([1, 2, 3, 8])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return build_caches(tmp_path_factory.mktemp("streams"))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """The same caches of other tokens."""
    return build_caches(tmp_path_factory.mktemp("others"), shift=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 3])
def test_parts_of_workers_in_turns_are_the_batches_from_the_position_on(root, kind, workers):
    stream = opened(kind, root, world_size=2, rank=1)
    expected = told(opened(kind, root, world_size=2, rank=1))
    next(iter(stream))
    parts = [list(stream.part(worker, workers)) for worker in range(workers)]
    turns = [batch for batches in zip_longest(*parts) for batch in batches if batch is not None]
    assert told(turns) == expected[1:]
    assert stream.state_dict() == expected[0][1]
    for worker in (workers, -1):
        with refused("E102", kind=ValueError):
            next(stream.part(worker, workers))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SLOW_TO_OPEN])
@settings(derandomize=True, max_examples=5)
@given(
    seed=st.integers(-(2**63), 2**63),
    parts=st.lists(st.tuples(WORLDS, st.integers(1, 3), st.integers(0, 4)), max_size=2),
    last=st.tuples(WORLDS, st.integers(1, 3)),
)
def test_each_unit_comes_exactly_once_an_epoch_whatever_the_split_of_the_work(root, kind, seed, parts, last):
    """Parts of a run of two epochs: world size, rows of a rank, steps until the next part begins."""
    steps = []
    for world, size, count in [*parts, (*last, None)]:
        state = steps[-1][1] if steps else None
        steps += run(kind, root, count, world=world, global_batch_size=world * size, seed=seed, state=state)
    other_io = {} if kind in OF_BINS else {"io": "pread"}
    undivided = run(kind, root, global_batch_size=1, seed=seed, **other_io)
    rows = [row for found, _ in steps for row in found]
    assert rows == [row for found, _ in undivided for row in found]
    states = {state["consumed_samples"]: state for _, state in undivided}
    assert all(state == states[state["consumed_samples"]] for _, state in steps)
    for units, count in zip(units_of(kind, rows), KINDS[kind].units, strict=True):
        epochs = [units[:count], units[count:]]
        assert [len(set(epoch)) for epoch in epochs] == [count, count] == [len(epoch) for epoch in epochs]
        assert KINDS[kind].moves or set(epochs[0]) == set(epochs[1])


@pytest.mark.parametrize(
    "kind", ["offset documents", "chats in windows", "packed chats", "mixture of kinds", "rollouts"]
)
def test_a_run_may_change_its_workers_its_world_and_its_batch(root, kind):
    """Parts of a run: workers, world size, rows of all ranks, steps."""
    steps = []
    for workers, world, size, count in [(2, 1, 4, 3), (0, 3, 6, 2), (1, 2, 4, None)]:
        ranks = []
        for rank in range(world):
            stream = opened(kind, root, rank=rank, world_size=world, global_batch_size=size)
            if steps:
                stream.load_state_dict(steps[-1][1])
            iterator = iter(DataLoader(stream, batch_size=None, num_workers=workers))
            ranks.append(list(islice(iterator, count)))
            del iterator
        steps += joined(ranks)
    whole = run(kind, root)
    assert [row for rows, _ in steps for row in rows] == [row for rows, _ in whole for row in rows]
    assert steps[-1][1] == whole[-1][1]


@pytest.mark.parametrize("kind", [kind for kind, row in KINDS.items() if len(row.units) == 1])
def test_two_epochs_and_two_seeds_have_different_orders(root, kind):
    orders, (count,) = [], KINDS[kind].units
    for seed in (0, 1):
        (units,) = units_of(kind, [row for found, _ in run(kind, root, seed=seed) for row in found])
        orders += [units[:count], units[count:]]
    assert all(one not in orders[:number] for number, one in enumerate(orders))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_stream_goes_on_with_the_same_batches(root, kind):
    stream = opened(kind, root)
    list(islice(stream, 2))
    pickled = pickle.dumps(stream)
    expected = run(kind, root)[2:]
    assert told(pickle.loads(pickled)) == expected == told(stream)


@pytest.mark.parametrize("lacking", ["epochs", "origin"])
def test_a_pickle_of_an_earlier_release_is_refused(root, lacking):
    stream = opened("windows", root)
    delattr(stream.samples if lacking == "origin" else stream, lacking)
    pickled = pickle.dumps(stream)
    with refused("E102", "earlier release", kind=ValueError):
        pickle.loads(pickled)


def test_a_pickle_carries_no_tokens(tmp_path):
    chats = [[{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d" * 90}]] * 200
    build_sft(chats, tmp_path / "chats", tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    assert len(pickle.dumps(EpochStream(numbered(tmp_path, [60_000]), T=4, global_batch_size=8, seed=1))) < 4_000
    assert len(pickle.dumps(SFTStream(tmp_path / "chats", T=40, global_batch_size=8, seed=1))) < 6_000


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_length_of_a_stream_is_the_number_of_its_batches(root, kind, drop_last):
    stream = opened(kind, root, drop_last=drop_last)
    sizes = [len(rows) for rows, _ in run(kind, root, drop_last=drop_last)]
    assert len(stream) == len(sizes)
    if kind in OF_BATCHES:
        whole, short = divmod(stream.num_samples, 6)
        assert sizes == [6] * whole + [short] * (short > 0 and not drop_last)
    endless = opened(kind, root, epochs=None)
    assert endless
    with refused("E109", kind=TypeError):
        len(endless)


@pytest.mark.parametrize("kind", OF_BATCHES)
def test_padding_is_the_rest_of_a_row_behind_a_piece_and_has_no_target(root, kind):
    """A window of a mixture, which is -1 as padding is, begins its row."""
    for batch in opened(kind, root):
        if batch.cu_seqlens is None:
            assert batch.is_padding is None
            continue
        T, starts = batch.x.shape[1], batch.cu_seqlens.tolist()
        for begin, end, piece, is_padding in zip(
            starts, starts[1:], batch.piece_ids.tolist(), batch.is_padding.tolist(), strict=False
        ):
            assert is_padding == (piece < 0 and begin % T > 0)
            if is_padding:
                assert end % T == 0 and (batch.y.flatten()[begin:end] == -100).all()


@pytest.mark.parametrize("kind", OF_BATCHES)
def test_a_rank_without_rows_has_an_empty_batch(root, kind):
    ranks = ranks_of(kind, root, world=8, global_batch_size=16)
    joined(ranks)
    left = opened(kind, root).num_samples % 16
    last = [batches[-1] for batches in ranks]
    sizes = [len(batch.x) for batch in last]
    assert sum(sizes) == (left or 16) and max(sizes) - min(sizes) <= 1
    for batch in last:
        assert batch.x.shape == batch.y.shape and batch.x.dtype == batch.y.dtype == torch.int64
        if not len(batch.x) and batch.cu_seqlens is not None:
            assert (
                batch.cu_seqlens.tolist() == [0] and batch.max_seqlen == 0 and batch.position_ids.shape == batch.x.shape
            )


def emptied(value):
    for inner in list(value.values()) if isinstance(value, dict) else list(value):
        if isinstance(inner, dict | list):
            emptied(inner)
    value.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_each_batch_carries_the_state_after_it_and_whoever_changes_a_state_changes_no_stream(root, kind):
    before, stream = torch.get_rng_state(), opened(kind, root)
    for batch in stream:
        kept = json.loads(json.dumps(batch.state))
        assert kept == batch.state == stream.state_dict()
        for taken in (batch.state, stream.state_dict()):
            emptied(taken)
        assert stream.state_dict() == kept
    given = copy.deepcopy(kept)
    stream.load_state_dict(given)
    assert given == kept, "load_state_dict changed its argument"
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_has_ended_says_so_and_goes_on_from_a_state(root, kind):
    """As in `for epoch in range(3): for batch in stream`: the second pass would silently be empty."""
    stream = opened(kind, root)
    start, whole = stream.state_dict(), told(stream)
    with refused("E109", f"{stream.num_samples} samples", kind=RuntimeError):
        next(iter(stream))
    assert stream.state_dict() == whole[-1][1]
    stream.load_state_dict(whole[-1][1])
    assert told(stream) == []
    stream.load_state_dict(start)
    assert told(stream) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_iterator_or_a_state_ends_the_first(root, kind):
    stream, expected = opened(kind, root), run(kind, root, 4)
    one = iter(stream)
    assert told([next(one), next(iter(stream))]) == expected[:2]
    with refused("E109", kind=RuntimeError):
        next(one)
    two = iter(stream)
    next(two)
    stream.load_state_dict(expected[0][1])
    with refused("E109", kind=RuntimeError):
        next(two)
    assert told(islice(stream, 3)) == expected[1:]


def not_taken(code, *words, stream, state, kind=ValueError, **flags):
    before = stream.state_dict()
    with refused(code, *words, kind=kind) as caught:
        stream.load_state_dict(state, **flags)
    assert isinstance(caught.error, ValueError)
    assert stream.state_dict() == before, "a refused state moved the stream"


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, row in KINDS.items() for name in row.others])
def test_the_state_of_a_stream_with_another_argument_is_refused_by_its_name(root, kind, name):
    state = next(iter(opened(kind, root))).state
    for allowed in (False, True):
        other = opened(kind, root, **{name: KINDS[kind].others[name]})
        not_taken("E108", name, stream=other, state=state, allow_other_content=allowed)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_the_state_of_another_kind_of_stream_and_what_is_none_is_refused(root, kind):
    stream = opened(kind, root)
    for other in ONE_OF_EACH:
        if other != kind:
            not_taken("E108", stream=stream, state=opened(other, root).state_dict())
    state = next(iter(opened(kind, root))).state
    not_taken("E108", "stream is 0", "Another release", stream=stream, state={**state, "stream": 0})
    not_taken("E108", "checksum", stream=stream, state={**state, "checksum": "0" * 8})
    for what in (None, [], "state", 3, b"", {}, {"_snapshot": {}}, [("stream", 1)]):
        not_taken("E108", stream=stream, state=what)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_other_content_is_refused_unless_that_is_allowed(root, others, kind):
    state = list(islice(opened(kind, root), 2))[-1].state
    stream = opened(kind, others)
    not_taken("E108", stream=stream, state=state, kind=CacheError)
    stream.load_state_dict(state, allow_other_content=True)
    consumed = stream.state_dict()["consumed_samples"]
    assert consumed == state["consumed_samples"] or (kind in OF_BINS and 0 < consumed < state["consumed_samples"])
    assert told(stream) == [step for step in run(kind, others) if step[1]["consumed_samples"] > consumed]


def counts_of(kind):
    of_bins = ["max_tokens"] if kind in OF_BINS else ["T", "global_batch_size"]
    return [*of_bins, "rank", "world_size", *([] if kind == "mixture" else ["epochs"])]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in ONE_OF_EACH for name in counts_of(kind)])
def test_what_is_no_count_is_refused_by_its_name(root, kind, name):
    for value in (2.0, True, "2", -1, *([0] if name != "rank" else [])):
        with refused("E102", f"{name}={value!r}", kind=ValueError):
            opened(kind, root, **{name: value})


@pytest.mark.parametrize("kind", [kind for kind, row in KINDS.items() if row.wrong])
def test_arguments_that_cannot_be_are_refused(root, kind):
    wrong = [{name: value} for name, value in KINDS[kind].wrong.items()]
    wrong += [{"rank": 1}]
    if kind in OF_BATCHES:
        wrong += [{"world_size": 5}, {"io": "mmapp"}, {"drop_last": 1}]
    for each in wrong:
        ((name, value),) = each.items()
        with refused("E102", f"{name}={value!r}", kind=ValueError):
            opened(kind, root, **each)


def test_numpy_integers_are_integers(root):
    numbers = {"global_batch_size": np.int64(6), "epochs": np.int64(2), "seed": np.int64(0)}
    for kind in ONE_OF_EACH[:3]:
        assert told(opened(kind, root, T=np.int64(12), **numbers)) == told(opened(kind, root, T=12))


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("windows of a cache", "pretrain"),
        ("mixture", "pretrain"),
        ("chats in windows", "chats"),
        ("packed chats", "chats"),
        ("chats with bits", "bits"),
        ("packed chats with bits", "bits"),
        ("mixture of kinds", "chats"),
    ],
)
def test_an_id_outside_the_vocabulary_is_an_error_and_no_batch(tmp_path, kind, cache, io, monkeypatch):
    """Written into the file that is open: another one would be refused."""
    stream = opened(kind, build_caches(tmp_path), global_batch_size=90, io=io)
    files = [path for path in sorted((tmp_path / cache).resolve().rglob("*.bin")) if path.stat().st_size > 6]
    for path in files:
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        with open(path, "r+b") as file:
            file.seek(6)
            file.write(np.array([65_535], "<u2").tobytes())
        os.utime(path, ns=times)
    monkeypatch.setattr(BlockSums, "check_opened", lambda *_, **__: None)  # its checksums would refuse it
    with refused("E409", "65535", kind=CacheError) as caught:
        next(iter(stream))
    assert any(path.name in str(caught) for path in files)


@pytest.mark.parametrize(
    ("stream", "cache", "arguments"),
    [
        (EpochStream, "pretrain/train", {"T": 4, "documents": True}),
        (PackedStream, "pretrain", {"T": 4}),
        (PackedStream, "bits", {"T": 6}),
        (SFTStream, "chats", {"T": 6, "over_length": "split"}),
    ],
)
def test_rows_before_a_damaged_one_are_served_though_all_are_read_at_once(
    tmp_path, stream, cache, arguments, monkeypatch
):
    arguments = {**arguments, "global_batch_size": 1, "seed": 0, "epochs": 1}
    folder = build_caches(tmp_path) / cache
    whole, damaged = list(stream(folder, **arguments)), stream(folder, **arguments)
    path = next(path for path in sorted(folder.resolve().rglob("*.bin")) if path.name.startswith(("shard", "train")))
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    with open(path, "r+b") as file:
        file.seek(6)
        file.write(np.array([65_535], "<u2").tobytes())
    os.utime(path, ns=times)
    monkeypatch.setattr(BlockSums, "check_opened", lambda *_, **__: None)  # its checksums would refuse it
    served = []
    with refused("E409", "65535", kind=CacheError):
        for batch in damaged:
            served.append(batch.x)
    assert 0 < len(served) < len(whole)
    assert all(torch.equal(x, batch.x) for x, batch in zip(served, whole, strict=False))
    assert damaged.consumed_samples == len(served)
