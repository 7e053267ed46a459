"""Streams in torch's DataLoader and in torchdata's StatefulDataLoader: the order and the state of one process."""

import copy
import pickle
import time
from collections.abc import Callable
from itertools import islice

import pytest
import torch
from support.number_caches import DTYPES, number_cache, numbered, with_vocabulary
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_convert
from torch.utils.data._utils.pin_memory import pin_memory

from niels_gpt.cache import CacheError
from niels_gpt.sampling import Batch, EpochStream, MixtureStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:.*random_offset moves none"),
]
Stream = EpochStream | MixtureStream
Make = Callable[..., Stream]


def loader(stream, workers=0, **changed):
    return DataLoader(stream, batch_size=None, num_workers=workers, **changed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two splits of 10 and 23 windows of T = 4; the second of 32 bits."""
    folder = tmp_path_factory.mktemp("streams")
    return [numbered(folder / "ten", [26, 17]), numbered(folder / "more", [93], "uint32")]


def epochs(folders, **changed):
    return EpochStream(str(folders[0]), **{"T": 4, "global_batch_size": 4, "seed": 0, **changed})


def mixture(folders, *, epochs=None, **changed):
    common = {"T": 4, "global_batch_size": 4, "seed": 0, **changed}
    streams = [EpochStream(str(folder), dtype=dtype, **common) for folder, dtype in zip(folders, DTYPES, strict=True)]
    return MixtureStream(streams, [1, 2], seed=3, block_size=9, when_exhausted=epochs or "repeat")


@pytest.fixture(params=[epochs, mixture], ids=["epochs", "mixture"])
def make(request, folders):
    def made(**changed):
        stream = request.param(folders, **changed)
        return stream

    return made


def told(batches):
    """Spell batches out: ids, state, sources."""
    return [
        (batch.x.tolist(), batch.y.tolist(), batch.state, None if batch.source is None else batch.source.tolist())
        for batch in batches
    ]


def taken(loaded, steps=None):
    iterator = iter(loaded)
    found = told(islice(iterator, steps))
    del iterator  # so that its workers end here
    return found


def error_of(loaded):
    """Return what a loader raises at its first batch, without its traceback.

    A loader that lies in one is left to the garbage collector, which waits five seconds for each of its workers.
    """
    try:
        next(iter(loaded))
    except Exception as error:
        error.__traceback__ = None
        return type(error), str(error)
    pytest.fail("a batch and no error")


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_order_does_not_depend_on_the_number_of_workers(make, workers):
    assert taken(loader(make(), workers), 11) == told(islice(make(), 11))


@pytest.mark.parametrize("workers", [0, 2, 6])  # six are more than the batches of `epochs`
def test_a_run_of_epochs_ends_exactly_under_workers(make, workers):
    found = taken(loader(make(epochs=2), workers))
    assert found == told(make(epochs=2))
    assert len(found[-1][0]) == {20: 4, 66: 2}[sum(len(batch[0]) for batch in found)]


@pytest.mark.slow
def test_workers_that_are_spawned_give_the_same_order(folders):
    stream = mixture(folders)
    stream.load_state_dict(next(iter(mixture(folders))).state)
    assert taken(loader(stream, 1, multiprocessing_context="spawn"), 5) == told(islice(mixture(folders), 6))[1:]


@pytest.mark.parametrize(("workers", "step"), [(1, 4), (3, 1), (2, 4)])
def test_the_state_of_a_batch_is_right_though_workers_are_far_ahead(make, workers, step):
    state = taken(loader(make(), workers, prefetch_factor=8), step)[-1][2]
    assert state["consumed_samples"] == 4 * step
    one = make()
    one.load_state_dict(state)
    assert told(islice(one, 4)) == told(islice(make(), step + 4))[step:]


def test_the_parent_of_workers_has_no_state_and_says_where_one_is(make):
    stream = make()
    iterator = iter(loader(stream, 2))
    batch = next(iterator)
    with pytest.raises(RuntimeError, match=r"batch\.state"):
        stream.state_dict()
    del iterator
    with pytest.raises(RuntimeError, match="would give the same batches again"):
        next(iter(stream))
    stream.load_state_dict(batch.state)
    assert stream.state_dict() == batch.state
    assert next(iter(stream)).state["consumed_samples"] == 2 * batch.state["consumed_samples"]


def test_without_workers_the_stream_has_the_state_of_the_last_batch_and_the_next_loader_goes_on(make):
    stream = make()
    iterator, found = iter(loader(stream)), []
    for _ in range(5):
        found.append(next(iterator))
        assert found[-1].state == stream.state_dict()
    assert told(found) + taken(loader(stream), 3) == told(islice(make(), 8))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_pass_over_a_run_that_has_ended_is_an_error(make, workers):
    """A stream of two epochs is one run, of which the loader has reached the end: nothing would be left to train on."""
    loaded = loader(make(epochs=2), workers)
    assert len(loaded) == len(list(loaded)) > 1
    assert issubclass(error_of(loaded)[0], RuntimeError)


class HeldBack:
    """Lets worker 1 of a loader begin when a file is there."""

    def __init__(self, path):
        self.path = path

    def __call__(self, worker):
        while worker == 1 and not self.path.exists():
            time.sleep(0.01)


def test_a_worker_of_the_loader_before_that_starts_late_disturbs_no_new_one(make, tmp_path):
    """It sets its mark after the state was loaded: for the loader that it belongs to, and for no other."""
    stream, go = make(), tmp_path / "go"
    before = iter(loader(stream, 2, worker_init_fn=HeldBack(go)))
    batch = next(before)
    stream.load_state_dict(batch.state)
    go.touch()
    next(before)  # worker 1 has started by now
    assert stream.state_dict() == batch.state
    assert taken(loader(stream, 2), 3) == told(islice(make(), 4))[1:]
    with pytest.raises(RuntimeError, match=r"batch\.state"):  # its own workers are heard of
        stream.state_dict()


def test_a_state_that_was_loaded_serves_one_loader_with_workers(make):
    state = told(islice(make(), 2))[-1][2]
    stream = make()
    stream.load_state_dict(state)
    assert taken(loader(stream, 2), 3) == told(islice(make(), 5))[2:]
    assert issubclass(error_of(loader(stream, 2))[0], RuntimeError)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_second_pass_over_workers_does_not_silently_repeat_the_first(make, persistent):
    """Without workers it goes on; workers start from where the stream was, unless a batch's state is loaded."""
    loaded = loader(make(), 2, persistent_workers=persistent)
    first = taken(loaded, 3)
    try:
        again = taken(loaded, 3)
    except RuntimeError as error:
        error.__traceback__ = None
        assert "batch.state" in str(error)
    else:
        assert again == told(islice(make(), 6))[3:] != first


def test_cuda_in_a_worker_is_refused_with_a_reason_and_so_are_batches_of_batches(folders):
    error, message = error_of(loader(epochs(folders, device="cuda"), 1))
    assert issubclass(error, (RuntimeError, ValueError))
    assert "device='cuda'" in message and "DataLoader worker" in message and "pin_memory" in message
    assert error_of(DataLoader(epochs(folders), batch_size=2))[0] is TypeError


def test_an_error_in_a_worker_reaches_the_training_loop(tmp_path):
    folder = with_vocabulary(number_cache(tmp_path / "pretrain" / "numbers"), 100)
    stream = EpochStream(str(folder), T=4, global_batch_size=24, seed=0)
    error, message = error_of(loader(stream, 1))
    assert error is CacheError and "shard_00002.bin" in message


@pytest.fixture
def batch(folders):
    return next(iter(mixture(folders)))


def test_a_batch_unpacks_as_two_and_one_of_a_mixture_says_its_sources(folders, batch):
    x, y = batch
    assert x is batch.x is batch[0] and y is batch.y is batch[1] and len(batch) == 2
    assert not isinstance(batch, tuple)
    with pytest.raises(IndexError):
        batch[2]
    assert next(iter(epochs(folders))).source is None
    assert batch.source.shape == (4,) and batch.source.dtype == torch.int64


def test_a_batch_keeps_its_state_when_converted_or_pinned(batch, monkeypatch):
    """Without an accelerator torch cannot pin, so that here a copy stands for the pinned tensor."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    pinned = pin_memory(batch)
    assert pinned.x.data_ptr() != batch.x.data_ptr() and pinned.y.data_ptr() != batch.y.data_ptr()
    for converted in (pinned, default_convert(batch)):
        assert isinstance(converted, Batch) and told([converted]) == told([batch])


def test_a_batch_moves_with_its_state(batch):
    moved = batch.to("cpu", non_blocking=True)
    assert isinstance(moved, Batch) and told([moved]) == told([batch])
    meta = batch.to("meta")
    assert (meta.x.device.type, meta.y.device.type, meta.state) == ("meta", "meta", batch.state)
    assert batch.x.device.type == "cpu"


def stateful(stream, workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(stream, batch_size=None, num_workers=workers)


def started(make, workers, steps):
    """Take some steps of three epochs; returns them and the loader's state."""
    loaded = stateful(make(epochs=3), workers)
    iterator = iter(loaded)
    found = told(islice(iterator, steps))
    state = copy.deepcopy(loaded.state_dict())
    del iterator
    return found, state


@pytest.mark.parametrize(("workers", "steps"), [(0, 1), (2, 0), (2, 4)])
def test_a_stateful_loader_stopped_twice_goes_on_with_exactly_the_rest(make, workers, steps):
    found, state = started(make, workers, steps)
    second = stateful(make(epochs=3), workers)
    second.load_state_dict(state)
    iterator = iter(second)
    found += told(islice(iterator, 2))
    state = copy.deepcopy(second.state_dict())
    del iterator
    third = stateful(make(epochs=3), workers)
    third.load_state_dict(state)
    assert found + taken(third) == told(make(epochs=3))


@pytest.mark.parametrize("left", [1, 0])
def test_a_stateful_loader_stopped_near_the_end_goes_on(make, left):
    """The next turn of its three workers would begin after the end."""
    whole = told(make(epochs=3))
    found, state = started(make, 3, len(whole) - left)
    again = stateful(make(epochs=3), 3)
    again.load_state_dict(state)
    assert found + taken(again) == whole


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (2, 0), (0, 2)])
def test_a_stateful_loader_with_another_number_of_workers_is_an_error(make, before, after):
    """torchdata notices that there were none before, or are none now; the stream notices all else."""
    _, state = started(make, before, 3)
    again = stateful(make(epochs=3), after)
    again.load_state_dict(state)
    error, message = error_of(again)
    assert issubclass(error, ValueError if before and after else AssertionError)  # torchdata's own has no message
    if issubclass(error, ValueError):
        assert "worker" in message and "batch.state" in message


def states_in(value):
    """Find the streams' own states in that of a loader."""
    if isinstance(value, dict):
        inner = [state for child in value.values() for state in states_in(child)]
        return [value] if "consumed_samples" in value else inner
    return []


def test_the_state_of_one_worker_is_refused_where_there_are_no_workers(make):
    """It tells where that worker is, and not where the run is; a batch's state does."""
    _, state = started(make, 2, 3)
    found = states_in(state)
    assert len(found) == 2
    for one in found:
        with pytest.raises(ValueError, match="worker"):
            make(epochs=3).load_state_dict(one)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_a_copy_of_a_stream_hears_of_its_own_workers_alone(make, copied):
    stream = copied(make())
    other = copied(stream)
    taken(loader(stream, 2), 3)
    with pytest.raises(RuntimeError, match=r"batch\.state"):
        stream.state_dict()
    assert other.state_dict()["consumed_samples"] == 0 and len(taken(loader(other, 0), 3)) == 3
