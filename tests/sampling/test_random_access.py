"""Rows of a stream by number: the stream's rows, in whatever steps and order, by several threads, and in a copy."""

import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.errors import refused
from support.streams import EXPECTED_WARNINGS, KINDS, build_caches, opened, rows_of

from niels_gpt.cache import CacheError
from niels_gpt.sampling import RandomAccess, random_access

pytestmark = EXPECTED_WARNINGS
OF_ROWS = [kind for kind in KINDS if not kind.startswith("rollouts")]
DENSE = {"windows": {"epochs": 40}, "packed": {"epochs": 90}, "mixture of kinds": {"epochs": 30}}
"""Streams of many rows."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return build_caches(tmp_path_factory.mktemp("streams"))


@pytest.fixture
def small_blocks(monkeypatch):
    """Let many blocks be located, of 32 numbers each."""
    monkeypatch.setattr(random_access, "BLOCK", 32)


def served(stream):
    """Return all rows of a stream, by iterating it."""
    return [row for batch in stream for row in rows_of(batch)]


@pytest.mark.parametrize("kind", OF_ROWS)
def test_row_k_is_the_kth_that_the_stream_serves(root, kind):
    rows = served(opened(kind, root))
    access = RandomAccess(opened(kind, root))
    assert len(access) == len(rows)
    assert [row for batch in access for row in rows_of(batch)] == rows
    for number in random.Random(0).sample(range(len(rows)), 11):
        assert rows_of(access[number]) == [rows[number]]
    assert rows_of(access[-1]) == rows[-1:]


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("step", [1, 3, 7])
def test_rows_in_steps_are_the_same_across_blocks(root, small_blocks, kind, step):
    stream = opened(kind, root, global_batch_size=1000, **DENSE[kind])
    access, rows = RandomAccess(stream), served(stream)
    numbers = range(step - 1, len(rows), step)
    assert [row for number in numbers for row in rows_of(access[number])] == rows[step - 1 :: step]


@pytest.mark.parametrize("kind", DENSE)
def test_threads_read_the_same_rows(root, small_blocks, kind):
    stream = opened(kind, root, global_batch_size=1000, **DENSE[kind])
    access, rows = RandomAccess(stream), served(stream)
    with ThreadPoolExecutor(16) as threads:
        assert [row for batch in threads.map(access.__getitem__, range(len(rows))) for row in rows_of(batch)] == rows
        mixed = random.Random(0).sample(range(len(rows)), 300)
        assert [rows_of(batch) for batch in threads.map(access.__getitem__, mixed)] == [[rows[k]] for k in mixed]


@pytest.mark.parametrize(("kind", "code"), [("windows", "E203"), ("chats", "E213"), ("packed chats", "E213")])
def test_a_copy_reads_the_same_and_refuses_other_content(root, tmp_path, kind, code):
    access = RandomAccess(opened(kind, root))
    before = rows_of(access[5])
    pickled = pickle.dumps(access)
    assert rows_of(pickle.loads(pickled)[5]) == before
    built = build_caches(tmp_path / "caches")
    pickled = pickle.dumps(RandomAccess(opened(kind, built)))
    built.rename(tmp_path / "earlier")
    build_caches(built, shift=1)
    with refused(code, kind=CacheError):
        pickle.loads(pickled)[5]


def test_the_position_and_the_ranks_of_the_stream_do_not_count(root):
    whole, part = opened("windows", root), opened("windows", root, rank=1, world_size=3, global_batch_size=3)
    next(iter(part))
    assert torch.equal(RandomAccess(part)[0].x, RandomAccess(whole)[0].x)
    assert part.consumed_samples == 3


def test_a_stream_without_end_has_a_length_that_is_given(root):
    endless = opened("windows", root, epochs=None)
    with refused("E109", kind=TypeError):
        RandomAccess(endless)
    assert len(RandomAccess(endless, length=10**12)) == 10**12
    assert rows_of(RandomAccess(endless, length=100)[99]) == served(opened("windows", root, epochs=4))[99:100]


@pytest.mark.parametrize("step", [1, 5])
def test_a_mixture_that_continues_a_run_has_rows_from_the_change_on(root, step):
    state = opened("mixture", root).state_at(50)
    stream = opened("mixture", root, weights=[3, 1])
    before = RandomAccess(stream)
    stream.load_state_dict(state, changed=True)
    access, rows = RandomAccess(stream), served(stream)
    assert [row for number in range(50, len(access), step) for row in rows_of(access[number])] == rows[::step]
    assert rows_of(before[0]) == served(opened("mixture", root, weights=[3, 1]))[:1]
    for refuse in (lambda: access[49], lambda: list(access)):  # an IndexError would be taken for the end
        with refused("E106", kind=ValueError):
            refuse()
    with refused("E102", kind=ValueError):
        RandomAccess(stream, length=50)
    assert rows_of(RandomAccess(stream, length=51)[50]) == rows[:1]
    with refused("E108", kind=ValueError):
        stream.state_at(49)


def test_what_has_no_such_row_is_refused(root):
    access = RandomAccess(opened("windows", root))
    for number in (len(access), -len(access) - 1):
        with refused("E106", kind=IndexError):
            access[number]
    for length in (0, len(access) + 1, 1.5):
        with refused("E102", kind=ValueError):
            RandomAccess(opened("windows", root), length=length)
    with refused("E102", kind=ValueError):
        RandomAccess(opened("rollouts", root))


@pytest.mark.parametrize("kind", OF_ROWS)
def test_a_state_at_a_number_is_that_of_the_batch_that_ends_there(root, kind):
    stream = opened(kind, root)
    for batch in opened(kind, root):
        assert stream.state_at(batch.state["consumed_samples"]) == batch.state
    assert stream.consumed_samples == 0
    with refused("E108", kind=ValueError):
        stream.state_at(stream.num_samples + 1)
