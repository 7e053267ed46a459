"""prefetch: the batches of the stream and their states, made ahead by a thread that ends with its iterator."""

import copy
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from itertools import islice

import pytest
import torch
from support.number_caches import mixture, numbered, sources
from torch.utils.data import DataLoader

from niels_gpt.sampling import EpochStream, prefetch


def open_stream(folder, **changed):
    return EpochStream(str(folder), **{"T": 4, "global_batch_size": 3, "seed": 0, "epochs": 2, **changed})


def seen(batches):
    return [(batch.x.tolist(), batch.state) for batch in batches]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "niels_gpt.prefetch"]


@pytest.mark.parametrize("n", [1, 3, 50])
def test_batches_and_states_are_those_of_the_stream(tmp_path, n):
    folder = numbered(tmp_path, [50, 20])
    expected = seen(open_stream(folder))
    stream = open_stream(folder)
    assert seen(prefetch(stream, n)) == expected and threads() == []
    assert stream.state_dict() == expected[-1][1]
    with pytest.raises(RuntimeError, match="has ended"):
        next(iter(stream))
    for workers in (0, 2)[: 1 + (n == 3)]:
        loader = DataLoader(open_stream(folder), batch_size=None, num_workers=workers)
        assert seen(prefetch(loader, n, "cpu")) == expected and threads() == []


def test_while_it_is_read_ahead_a_stream_refuses_and_then_continues_after_the_last_batch(tmp_path):
    folders = sources(tmp_path, [7, 50])
    expected = seen(islice(mixture(folders, [1, 1]), 9))
    one = mixture(folders, [1, 1])
    batches = prefetch(one, 3)
    taken = seen(islice(batches, 4))
    uses = [one.state_dict, lambda: next(iter(one)), lambda: prefetch(one), lambda: prefetch(loader)]
    uses += [lambda: one.load_state_dict(taken[0][1]), lambda: next(one.part())]
    loader = DataLoader(one, batch_size=None)
    for use in uses:
        with pytest.raises(RuntimeError, match="prefetch reads ahead"):
            use()
    assert len(threads()) == 1
    batches.close()
    assert threads() == [] and list(batches) == []
    assert one.state_dict() == taken[-1][1]
    with prefetch(loader) as again:
        taken += seen(islice(again, 2))
    with prefetch(one):
        pass  # none is taken
    assert taken + seen(islice(one, 3)) == expected
    one.load_state_dict(expected[2][1])
    assert seen(islice(prefetch(one), 2)) == expected[3:5]


def test_an_error_comes_in_place_of_its_batch_with_its_traceback(tmp_path):
    stream = open_stream(numbered(tmp_path, [50]))

    def breaks_at_the_third():
        yield from islice(stream, 2)
        raise OSError("the disk is gone")

    batches = prefetch(breaks_at_the_third(), 5)
    assert len(seen(islice(batches, 2))) == 2
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(batches)
    assert "breaks_at_the_third" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert list(batches) == [] and threads() == []


def test_at_most_n_batches_are_made_ahead(tmp_path):
    stream, made = open_stream(numbered(tmp_path, [400])), []

    def watched():
        iterator = iter(stream)
        while True:
            held = [next(iterator)]
            made.append(weakref.ref(held[0]))
            yield held.pop()  # no reference stays here

    with prefetch(watched(), 2) as batches:
        for used, batch in enumerate(islice(batches, 5), 1):
            until = time.monotonic() + 20
            while len(made) < used + 2 and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(0.005)
            assert len(made) == used + 2 and made[used - 1]() is batch
            assert sum(one() is not None for one in made) == 3


def interrupted(batches):
    for _ in batches:
        raise KeyboardInterrupt


def test_the_thread_ends_with_its_iterator_however_it_ends(tmp_path):
    stream = open_stream(numbered(tmp_path, [400]))
    for _ in prefetch(stream):
        break
    assert threads() == []
    batches = prefetch(stream)
    del batches
    assert threads() == []

    def through():
        yield from prefetch(stream)

    generator = through()
    next(generator)
    generator.close()
    assert threads() == []
    with pytest.raises(KeyboardInterrupt), prefetch(stream) as batches:
        interrupted(batches)
    assert threads() == []


INTERRUPTED = """
import signal, sys
from niels_gpt.sampling import EpochStream, prefetch

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
batches = prefetch(EpochStream(sys.argv[1], T=4, global_batch_size=3, seed=0), 2)
for batch in batches:
    print("ready", flush=True)
    signal.pause()
"""


def test_an_interrupted_process_ends_though_its_iterator_is_open(tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, str(numbered(tmp_path, [400]))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT and errors.strip().endswith("KeyboardInterrupt")


def test_what_does_not_fit_is_refused_at_the_call(tmp_path):
    stream = open_stream(numbered(tmp_path, [50]))
    with pytest.raises(ValueError, match="n=0"):
        prefetch(stream, 0)
    with pytest.raises(RuntimeError):
        prefetch(stream, 1, "nowhere")
    assert threads() == [] and len(seen(stream)) == 8


def test_batches_are_copied_to_the_device(tmp_path):
    folder = numbered(tmp_path, [50])
    devices = ["meta", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        for batch, plain in zip(prefetch(open_stream(folder), 2, device), open_stream(folder), strict=True):
            assert batch.x.device.type == batch.y.device.type == device and batch.state == plain.state
            assert device == "meta" or (torch.equal(batch.x.cpu(), plain.x) and torch.equal(batch.y.cpu(), plain.y))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("loaded", [False, True])
def test_a_batch_on_a_gpu_waits_for_its_copy_and_keeps_its_memory_until_the_step_is_done(tmp_path, loaded):
    folder = numbered(tmp_path, [4000])
    how = {"T": 64, "global_batch_size": 16, "epochs": 4}
    expected = [(batch.x, batch.y) for batch in open_stream(folder, **how)]
    batches = open_stream(folder, **how)
    found, side = [], torch.cuda.Stream()
    with (
        torch.cuda.stream(side),
        prefetch(DataLoader(batches, batch_size=None) if loaded else batches, 3, "cuda") as ahead,
    ):
        for batch in ahead:
            torch.cuda._sleep(10_000_000)  # some ms: the GPU is far behind the loop, which lets go of the batch
            found.append((batch.x.clone(), batch.y.clone()))
            del batch
    torch.cuda.synchronize()
    assert len(found) == len(expected) > 10 and threads() == []
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(one.cpu(), other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_that_put_batches_on_a_gpu_themselves_and_plain_tensors_are_made_ahead_too(tmp_path):
    folder = numbered(tmp_path, [50, 20])
    for ours, theirs in zip(prefetch(open_stream(folder, device="cuda"), 2), open_stream(folder), strict=True):
        assert ours.x.is_cuda and torch.equal(ours.x.cpu(), theirs.x) and ours.state == theirs.state
    for ours, theirs in zip(prefetch(open_stream(folder, device="cuda"), 2, "cuda"), open_stream(folder), strict=True):
        assert ours.x.is_cuda and torch.equal(ours.x.cpu(), theirs.x)
    pairs = [(torch.arange(5) + number, [torch.ones(3) * number]) for number in range(20)]
    for ours, theirs in zip(prefetch(pairs, 2, "cuda:0"), pairs, strict=True):
        assert (
            ours[1][0].is_cuda and torch.equal(ours[0].cpu(), theirs[0]) and torch.equal(ours[1][0].cpu(), theirs[1][0])
        )


def test_a_stream_behind_another_iterator_is_lent_and_not_copied(tmp_path):
    stream = open_stream(numbered(tmp_path, [400]))
    batches = prefetch(islice(stream, 20), 3)
    state = list(islice(batches, 4))[-1].state
    for use in (stream.state_dict, lambda: copy.deepcopy(stream), lambda: pickle.dumps(stream)):
        with pytest.raises(RuntimeError, match="prefetch reads ahead"):
            use()
    with pytest.raises(ValueError, match="prefetch already"):
        prefetch(batches)
    batches.close()
    assert stream.state_dict() == state == copy.deepcopy(stream).state_dict()


class Waits(EpochStream):
    """Interrupts the main thread while a batch is made."""

    made = 0

    def _batch(self, work, state):
        self.made += 1
        if self.made == 3:
            time.sleep(0.1)
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.1)
        return super()._batch(work, state)


@pytest.mark.parametrize("closes", [True, False])
def test_an_interrupt_while_closing_or_waiting_gives_the_stream_back(tmp_path, closes):
    stream = Waits(str(numbered(tmp_path, [400])), T=4, global_batch_size=3, seed=0)
    batches = prefetch(stream, 2)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
        while closes and stream.made < 3:
            time.sleep(0.001)
        if closes:
            batches.close()
        next(batches)
        next(batches)
    batches.close()
    assert threads() == [] and stream.state_dict()["consumed_samples"] == (3 if closes else 6)


def test_tuples_are_copied_and_what_is_not_known_is_refused():
    (x, y), *_ = prefetch([(torch.ones(2), torch.ones(3))], 1, "meta")
    assert x.device.type == y.device.type == "meta"
    with pytest.raises(ValueError, match="yields a int"):
        next(prefetch([1], 1, "meta"))
