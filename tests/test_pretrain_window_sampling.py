"""Random windows of a pretrain cache: x and y one token apart, all windows equally likely, none across two shards."""

import hashlib
import multiprocessing
import os
import pickle
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import ByteTokenizer
from support.errors import refused
from support.number_caches import numbered_shards, write_shards

from niels_gpt.cache import PretrainTokenStreamDataset, build_pretrain_cache
from niels_gpt.cache.mmap import mmap_tokens


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def all_windows(shards, T):
    """Spell every window of T + 1 tokens out: the slow oracle."""
    return [list(ids[start : start + T + 1]) for ids in shards for start in range(len(ids) - T)]


@pytest.fixture
def cache(tmp_path):
    """A real cache: 80 train tokens in 8 shards of 10, 10 val tokens."""
    texts = [chr(ord("a") + number % 26) * 5 for number in range(30)]
    folder = tmp_path / "pretrain" / "letters"
    sizes = {"max_train_tokens": 80, "max_val_tokens": 10, "shard_bytes": 20}
    build_pretrain_cache(texts, str(folder), tokenizer=ByteTokenizer(), seed=1, shuffle_buffer=None, **sizes)
    return folder


def opened(cache, T=4):
    return PretrainTokenStreamDataset(str(cache / "train"), T=T, device="cpu")


def test_batches_are_contiguous_int64_of_shape_b_t_and_leave_the_global_random_state_alone(cache):
    before = torch.get_rng_state()
    for tensor in opened(cache).get_batch(B=64, generator=seeded()):
        assert tensor.shape == (64, 4) and tensor.dtype == torch.int64
        assert tensor.is_contiguous() and tensor.device.type == "cpu"
        assert int(tensor.min()) >= 0 and int(tensor.max()) < ByteTokenizer.vocab_size
    assert torch.equal(torch.get_rng_state(), before)


def test_the_largest_uint16_id_stays_positive(tmp_path):
    dataset = PretrainTokenStreamDataset(str(write_shards(tmp_path, [[65535, 0, 32768]])), T=2, device="cpu")
    x, y = dataset.get_batch(B=1, generator=seeded())
    assert (x.tolist(), y.tolist()) == ([[65535, 0]], [[0, 32768]])


@settings(derandomize=True, max_examples=50)
@given(lengths=st.lists(st.integers(4, 12), min_size=1, max_size=5), T=st.integers(1, 3))
def test_every_window_is_reachable_and_none_crosses_a_shard(lengths, T):
    shards = numbered_shards(lengths)
    expected = all_windows(shards, T)
    with tempfile.TemporaryDirectory() as folder:
        dataset = PretrainTokenStreamDataset(str(write_shards(Path(folder), shards)), T=T, device="cpu")
        assert dataset.num_windows == len(expected)
        with mock.patch("torch.randint", lambda high, size, **_: torch.arange(high)):  # each window once
            x, y = dataset.get_batch(B=len(expected), generator=seeded())
    assert torch.cat([x, y[:, -1:]], dim=1).tolist() == expected


@settings(derandomize=True, max_examples=30)
@given(lengths=st.lists(st.integers(3, 9), min_size=1, max_size=4), seed=st.integers(0, 2**32), B=st.integers(1, 9))
def test_a_batch_is_one_draw_among_all_windows(lengths, seed, B):
    shards, generator, reference = numbered_shards(lengths), seeded(seed), seeded(seed)
    with tempfile.TemporaryDirectory() as folder:
        dataset = PretrainTokenStreamDataset(str(write_shards(Path(folder), shards)), T=2, device="cpu")
        windows = all_windows(shards, 2)
        for _ in range(2):  # the second from what is mapped by now
            x, y = dataset.get_batch(B=B, generator=generator)
            drawn = torch.randint(len(windows), (B,), generator=reference).tolist()
            assert x.tolist() == [windows[window][:2] for window in drawn]
            assert y.tolist() == [windows[window][1:] for window in drawn]
    assert torch.equal(generator.get_state(), reference.get_state())


def test_shards_shorter_than_t_plus_1_are_left_out_with_one_warning(tmp_path):
    folder = write_shards(tmp_path, [[1, 2], [10, 11, 12, 13], [3], [20, 21, 22]])
    with pytest.warns(UserWarning, match=r"2 shards \(3 tokens\) are shorter than T \+ 1 = 3") as caught:
        dataset = PretrainTokenStreamDataset(str(folder), T=2, device="cpu")
    assert len(caught) == 1 and caught[0].filename == __file__
    assert (dataset.skipped_shards, dataset.skipped_tokens, dataset.num_windows) == (2, 3, 3)
    x, _ = dataset.get_batch(B=100, generator=seeded())
    assert {tuple(row) for row in x.tolist()} == {(10, 11), (11, 12), (20, 21)}


def test_long_enough_shards_give_no_warning(cache):
    assert opened(cache, T=9).skipped_shards == 0  # a warning would be an error here


@pytest.mark.parametrize("T", [0, -1])
def test_t_below_1_is_refused(cache, T):
    with refused("E102", f"T={T}"):
        opened(cache, T)


def test_a_folder_without_meta_json_is_read_by_file_name_in_order(tmp_path):
    folder = write_shards(tmp_path, numbered_shards([3, 3]))
    (folder / "notes.txt").write_text("not a shard")
    assert PretrainTokenStreamDataset(str(folder), T=2, device="cpu").num_windows == 2


def test_with_meta_json_the_shards_that_it_names_are_read_and_no_others(cache):
    windows = opened(cache).num_windows
    write_shards(cache / "train" / ".." / "extra", [[1] * 50])
    (cache / "extra" / "shard_00000.bin").rename(cache / "train" / "shard_00099.bin")
    assert opened(cache).num_windows == windows == 8 * 6


def snapshot(folder):
    """Return mode, time of change, size and sha256 of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (stat.st_mode, stat.st_mtime_ns, stat.st_size, digest)
    return found


def test_a_read_only_cache_is_read_and_not_touched(cache):
    root = cache.parent.parent
    folders = [root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        before = snapshot(root)
        x, _ = opened(cache).get_batch(B=2, generator=seeded())
        assert x.shape == (2, 4) and snapshot(root) == before
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_tokens_are_mapped_and_not_loaded(tmp_path):
    path = write_shards(tmp_path, [range(1000)]) / "shard_00000.bin"
    tokens = mmap_tokens(path)
    assert tokens.tolist() == list(range(1000)) and not tokens.flags.writeable
    assert str(path) in Path("/proc/self/maps").read_text()


def test_a_pickled_copy_gives_the_same_batches_carries_no_tokens_and_does_not_warn_again(tmp_path):
    with pytest.warns(UserWarning, match="1 shards"):
        dataset = PretrainTokenStreamDataset(str(write_shards(tmp_path, [range(60_000), [1]])), T=4, device="cpu")
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2000
    copy = pickle.loads(pickled)  # a warning would be an error here
    assert torch.equal(copy.get_batch(B=8, generator=seeded())[0], dataset.get_batch(B=8, generator=seeded())[0])


def _send_batch(dataset, connection):
    connection.send([os.getpid(), dataset.get_batch(B=8, generator=seeded())[0].tolist()])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_copy_gives_the_same_batches(cache):
    dataset = opened(cache)
    expected = dataset.get_batch(B=8, generator=seeded())[0].tolist()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_batch, args=(dataset, sender), daemon=True)
    child.start()
    sender.close()  # so that recv() fails, not waits, where the child dies
    pid, batch = receiver.recv()
    child.join()
    assert pid != os.getpid() and batch == expected
