"""Streams under Grain: the same rows by number and by iteration, in its pipelines, and a state that is the stream's."""

import json
import pickle
from itertools import islice

import numpy as np
import pytest

pytest.importorskip("grain")

import grain
from grain.experimental import ElasticIterator
from grain.multiprocessing import MultiprocessingOptions
from support import grain_run, trainer_runs
from support.errors import refused
from support.mixed_caches import KINDS as MIXED
from support.mixed_caches import build_three, open_mixture
from support.streams import KINDS, build_caches, opened

from niels_gpt.cache import CacheError
from niels_gpt.sampling import prefetch
from niels_gpt.trainers.grain import StreamDataset, StreamSource, arrays, maxtext

pytestmark = [
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:.*random_offset moves none"),
    pytest.mark.filterwarnings("ignore:.*supervised tokens"),
    pytest.mark.filterwarnings("ignore:.*are in no row"),
]
OF_ROWS = [kind for kind in KINDS if not kind.startswith("rollouts")]
ONE_OF_EACH = ["windows", "documents", "chats", "packed", "mixture of kinds"]
HERE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
"""Reads without threads."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return build_caches(tmp_path_factory.mktemp("streams"))


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    return build_three(tmp_path_factory.mktemp("caches"))


def told(batches):
    """Spell out batches, or rows."""
    return [{name: values.tolist() for name, values in batch.items()} for batch in batches]


def rows_of(batches):
    """Spell out the rows of batches."""
    return [dict(zip(batch, row, strict=True)) for batch in told(batches) for row in zip(*batch.values(), strict=True)]


def saved(state):
    """Return a state as Grain's checkpoint gives it back."""
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("kind", OF_ROWS)
def test_row_k_has_what_the_stream_says_of_it(root, kind):
    source, k = StreamSource(opened(kind, root)), 0
    for batch in opened(kind, root):
        positions, padding = batch.position_ids, np.zeros(batch.x.shape, dtype=bool)
        if positions is not None:
            starts = batch.cu_seqlens.tolist()
            for begin, end, piece in zip(starts, starts[1:], batch.piece_ids.tolist(), strict=False):
                padding.reshape(-1)[begin:end] = piece < 0 and begin % batch.x.shape[1] > 0
        for number in range(len(batch.x)):
            row, expected = source[k], {"input_ids": batch.x, "labels": batch.y, "positions": positions}
            expected["source"] = batch.source
            assert {name: row[name].tolist() for name in row if name != "segment_ids"} == {
                name: values[number].tolist() for name, values in expected.items() if values is not None
            }
            if positions is not None:
                ids = np.cumsum(positions[number].numpy() == 0)
                ids[padding[number]] = 0
                assert row["segment_ids"].tolist() == ids.tolist()
            k += 1
    assert k == len(source)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_grains_own_pipeline_gives_the_batches_of_the_stream(root, kind):
    source = StreamSource(opened(kind, root))
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    expected = told(arrays(batch) for batch in opened(kind, root))
    batches = grain.MapDataset.source(source).batch(6)
    assert told(batches.to_iter_dataset(grain.ReadOptions(num_threads=16))) == expected
    rows = grain.MapDataset.source(source).to_iter_dataset(grain.ReadOptions(num_threads=16))
    assert told(rows.batch(6)) == expected
    assert told(pickle.loads(pickle.dumps(source))[k] for k in range(3)) == told(source[k] for k in range(3))


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_batches_and_states_are_the_streams(root, kind):
    for rank in range(2):
        stream = opened(kind, root, rank=rank, world_size=2)
        batches = iter(StreamDataset(stream))
        assert batches.get_state() == stream.state_dict()
        for batch in opened(kind, root, rank=rank, world_size=2):
            assert told([next(batches)]) == told([arrays(batch)])
            assert batches.get_state() == batch.state
        assert list(batches) == [] and stream.consumed_samples == 0


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_a_state_is_resumed_by_other_ranks_and_batch_sizes(root, kind):
    whole, before, states = rows_of(map(arrays, opened(kind, root))), [], []
    for rank in range(3):
        batches = iter(StreamDataset(opened(kind, root, rank=rank, world_size=3)))
        before.append([rows_of([batch]) for batch in islice(batches, 2)])
        states.append(batches.get_state())
    assert states[0] == states[1] == states[2]
    rows = [row for batch in zip(*before, strict=True) for part in batch for row in part]
    rest = iter(StreamDataset(opened(kind, root, global_batch_size=5)))
    rest.set_state(saved(states[0]))
    assert rows + rows_of(rest) == whole
    rest.set_state(saved(states[1]))
    assert rows + rows_of(rest) == whole


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_slices_for_workers_take_turns_and_are_resumed_by_equally_many(root, kind):
    def workers(number, states=None):
        started = []
        for worker in range(number):
            dataset = StreamDataset(opened(kind, root))
            dataset.set_slice(slice(worker, None, number))
            started.append(iter(dataset))
            if states is not None:
                started[-1].set_state(saved(states[worker]))
        return started

    def in_turns(started, first=0):
        for turn in range(first, 10_000):
            try:
                yield next(started[turn % len(started)])
            except StopIteration:
                return

    expected = told(map(arrays, opened(kind, root)))
    assert told(in_turns(workers(3))) == expected
    started = workers(2)
    before, states = told(islice(in_turns(started), 1)), [each.get_state() for each in started]
    assert before + told(in_turns(workers(2, states), 1)) == expected
    for others in ({"number": 1, "states": states}, {"number": 2, "states": states[::-1]}):
        with refused("E108"):
            workers(**others)


def test_a_dataset_begins_where_its_stream_is(root):
    stream = opened("packed", root)
    rows = rows_of(map(arrays, opened("packed", root)))
    next(iter(stream))
    dataset = StreamDataset(stream)
    assert rows_of(dataset) == rows_of(dataset) == rows[6:]
    assert rows_of(dataset.batch(1).map(lambda batch: {name: values[0] for name, values in batch.items()})) == rows[6:]


@pytest.mark.filterwarnings("ignore:.*the stream changes at sample")
def test_a_dataset_goes_on_with_a_changed_stream(root):
    before = iter(StreamDataset(opened("packed", root)))
    next(before)
    changed, expected = opened("packed", root, T=8), opened("packed", root, T=8)
    for stream in (changed, expected):
        stream.load_state_dict(before.get_state(), changed=True)
    batches, states = iter(StreamDataset(changed)), []
    for batch in expected:
        assert told([next(batches)]) == told([arrays(batch)])
        assert batches.get_state() == batch.state
        states.append(batch.state)
    assert list(batches) == []
    again = iter(StreamDataset(opened("packed", root, T=8)))
    again.set_state(saved(states[0]))
    assert len(list(again)) == len(states) - 1 > 0


def test_a_closed_iterator_is_not_begun_again(root):
    batches = iter(StreamDataset(opened("packed", root)))
    next(batches)
    batches.close()
    with refused("E109", kind=RuntimeError):
        next(batches)


@pytest.mark.parametrize("kind", ["windows", "packed", "mixture of kinds"])
def test_a_state_of_other_data_is_refused(root, tmp_path, kind):
    state = saved(iter(StreamDataset(opened(kind, root))).get_state())
    for others in ({"seed": 1}, {"T": 5}):
        with refused("E108"):
            iter(StreamDataset(opened(kind, root, **others))).set_state(state)
    other = build_caches(tmp_path / "other", shift=1)
    with refused("E108", kind=CacheError):
        iter(StreamDataset(opened(kind, other))).set_state(state)
    assert repr(StreamSource(opened(kind, root))) != repr(StreamSource(opened(kind, other)))
    worker = {**state, "worker": [0, 2]}
    with refused("E108"):
        iter(StreamDataset(opened(kind, root))).set_state(worker)


def test_what_cannot_be_is_refused(root):
    for stream in (opened("rollouts", root), opened("windows", root, device="meta"), prefetch(opened("windows", root))):
        with refused("E109", kind=RuntimeError):
            StreamDataset(stream)
    with refused("E109", kind=TypeError):
        StreamSource(opened("windows", root, epochs=None))
    assert len(StreamSource(opened("windows", root, epochs=None), length=50)) == 50
    with refused("E106", kind=IndexError):
        StreamSource(opened("windows", root))[1000]
    both = StreamDataset(opened("windows", root), multiprocessing_options=MultiprocessingOptions(num_workers=2))
    with refused("E109", kind=RuntimeError):
        both.set_slice(slice(0, None, 2))
    with refused("E109", kind=RuntimeError):
        StreamDataset(opened("windows", root)).set_slice(slice(0, None, 2), sequential_slice=True)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_elastic_iterators_share_an_epoch_whatever_their_number(root, kind):
    """4 shards, then 2 in mid-epoch, then 1 with another batch size. Shard i of n has rows i, i + n, ... of a batch."""
    source = StreamSource(opened(kind, root, epochs=10))
    rows, state = [], None
    for shards, size, steps in ((4, 8, 3), (2, 8, 4), (1, 3, 2)):
        parts = []
        for shard in range(shards):
            of = grain.sharding.ShardOptions(shard_index=shard, shard_count=shards)
            batches = ElasticIterator(grain.MapDataset.source(source), size, of, read_options=HERE)
            if state is not None:
                batches.set_state(saved(state))
            parts.append([rows_of([next(batches)]) for _ in range(steps)])
        state = batches.get_state()
        rows += [row for batch in zip(*parts, strict=True) for tied in zip(*batch, strict=True) for row in tied]
    whole = rows_of(map(arrays, opened(kind, root, epochs=10)))
    assert len(rows) == 3 * 8 + 4 * 8 + 2 * 3 and rows == whole[: len(rows)]


def test_data_loader_compares_the_source(root, tmp_path):
    def loader(folder, **others):
        source = StreamSource(opened("packed", folder, **others))
        sampler = grain.samplers.IndexSampler(len(source), grain.sharding.NoSharding(), shuffle=False, num_epochs=1)
        batch = grain.transforms.Batch(6, drop_remainder=False)
        return grain.DataLoader(data_source=source, sampler=sampler, operations=[batch], read_options=HERE)

    batches = iter(loader(root))
    before, state = told(islice(batches, 2)), batches.get_state()
    resumed = iter(loader(root))
    resumed.set_state(state)
    assert before + told(resumed) == told(map(arrays, opened("packed", root)))
    for wrong in (loader(root, seed=1), loader(build_caches(tmp_path / "other", shift=1))):
        with pytest.raises(ValueError, match="source"):
            iter(wrong).set_state(state)


def test_maxtext_gets_segments_and_targets_with_loss(root):
    """A packed row of a chat of 6 tokens, loss on the last 2, and one of 3 without loss, then padding."""
    row = {
        "input_ids": np.array([1, 5, 2, 7, 8, 3, 1, 6, 2, 9]),
        "labels": np.array([-100, -100, -100, 8, 3, -100, -100, -100, -100, -100]),
        "positions": np.array([0, 1, 2, 3, 4, 5, 0, 1, 2, 0]),
        "segment_ids": np.array([1, 1, 1, 1, 1, 1, 2, 2, 2, 0], dtype=np.int32),
    }
    found = maxtext(row)
    assert all(values.dtype == np.int32 for values in found.values())
    assert told([found]) == [
        {
            "inputs": [1, 5, 2, 7, 8, 3, 1, 6, 2, 9],
            "targets": [0, 0, 0, 8, 3, 0, 0, 0, 0, 0],
            "inputs_position": [0, 1, 2, 3, 4, 5, 0, 1, 2, 0],
            "targets_position": [0, 1, 2, 3, 4, 5, 0, 1, 2, 0],
            "inputs_segmentation": [1, 1, 1, 1, 1, 1, 2, 2, 2, 0],
            "targets_segmentation": [0, 0, 0, 1, 1, 0, 0, 0, 0, 0],
        }
    ]
    batch = next(iter(StreamDataset(opened("windows", root)).map(maxtext)))
    assert batch["inputs_position"].tolist() == batch["targets_position"].tolist() == [[0, 1, 2, 3]] * 6
    assert batch["inputs_segmentation"].tolist() == batch["targets_segmentation"].tolist() == [[1] * 4] * 6


def test_maxtext_gets_packed_rows_as_grains_own_packing_makes_them(root):
    for row in map(maxtext, StreamSource(opened("packed", root))):
        ids, segments = row["inputs"], row["inputs_segmentation"]
        pieces = [{"inputs": ids[segments == number]} for number in range(1, segments.max() + 1)]
        parent = grain.MapDataset.source(pieces).to_iter_dataset(HERE)
        pack = grain.experimental.FirstFitPackIterDataset
        (packed,) = pack(parent, length_struct={"inputs": len(ids)}, num_packing_bins=1)
        assert packed["inputs"].tolist() == ids.tolist()
        assert packed["inputs_segment_ids"].tolist() == segments.tolist()
        assert packed["inputs_positions"].tolist() == row["inputs_position"].tolist()


@pytest.mark.slow
def test_worker_processes_make_the_same_batches(root):
    """By Grain's mp_prefetch of rows by number, and of a StreamDataset, which is resumed by equally many.

    Also where one worker has given no batch, or none has: their states are the dataset's.
    """
    two = MultiprocessingOptions(num_workers=2)
    expected = told(map(arrays, opened("packed", root)))
    rows = grain.MapDataset.source(StreamSource(opened("packed", root)))
    assert told(rows.batch(6).to_iter_dataset().mp_prefetch(two)) == expected
    outside = StreamDataset(opened("packed", root)).mp_prefetch(two)
    for count in (0, 1, 3):
        batches = iter(outside)
        before, state = told(islice(batches, count)), saved(batches.get_state())
        batches.close()
        again = iter(outside)
        again.set_state(state)
        assert before + told(again) == expected


@pytest.mark.slow
def test_a_worker_refuses_a_cache_that_was_replaced_since(tmp_path):
    stream = opened("chats", build_caches(tmp_path / "caches"))
    rows = grain.MapDataset.source(StreamSource(stream)).to_iter_dataset()
    batches = iter(rows.mp_prefetch(MultiprocessingOptions(num_workers=1)))
    (tmp_path / "caches").rename(tmp_path / "earlier")
    build_caches(tmp_path / "caches", shift=1)
    with refused("E213", kind=CacheError):
        next(batches)
    batches.close()


@pytest.mark.slow
def test_killed_run_goes_on_with_other_ranks_and_workers(caches, tmp_path):
    """2 ranks with 1 worker each, then 1 rank with 2."""

    def run(name, workers, **others):
        trainer_runs.run(grain_run.__file__, tmp_path / name, caches, workers, **others)

    run("whole", 0)
    run("killed", 1, ranks=2, kill_at=trainer_runs.KILLED_AT)
    run("killed", 2)
    whole, killed = (trainer_runs.steps(tmp_path / name) for name in ("whole", "killed"))
    assert list(killed) == list(whole) == list(range(1, trainer_runs.STEPS + 1))
    assert [rows for rows, _ in killed.values()] == [rows for rows, _ in whole.values()]
    assert [loss for _, loss in killed.values()] == pytest.approx([loss for _, loss in whole.values()], abs=1e-6)


def test_the_caches_of_the_killed_run_hold_every_kind(caches):
    batch = next(iter(StreamDataset(open_mixture(caches, MIXED, [2, 1, 1], G=40))))
    assert set(batch) == {"input_ids", "labels", "positions", "segment_ids", "source"}
    assert set(batch["source"].tolist()) == {0, 1, 2}
