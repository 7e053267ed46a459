"""Shards are opened when they are first read, by a map or by positioned reads, and a checkpoint knows its data."""

import gc
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import build
from support.errors import refused
from support.number_caches import (
    BEYOND,
    DTYPES,
    allow_maps,
    before_mapping,
    maps_in_process,
    recycle_all_memory,
    say_memory,
)
from support.processes import open_in

from niels_gpt.cache import CacheError, PretrainTokenStreamDataset
from niels_gpt.cache.mmap import TokenFiles, mmap_tokens
from niels_gpt.cache.pretrain_dataset import PretrainSplit, split_rows
from niels_gpt.sampling import EpochStream, iter_eval
from niels_gpt.storage.filemaps import mapped_file


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def write_shards(folder, lengths, dtypes=None):
    """Write shards whose ids count through the whole stream; those of 32 bits from BEYOND."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (length, end) in enumerate(zip(lengths, np.cumsum(lengths).tolist(), strict=True)):
        is_wide = dtypes is not None and dtypes[number] == "uint32"
        ids = np.arange(end - length, end) + BEYOND * is_wide
        ids.astype("<u4" if is_wide else "<u2").tofile(folder / f"shard_{number:05d}.bin")
    return folder


def mapped(folder):
    """Return the files of a folder that this process has mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {os.path.basename(line.split()[-1]) for line in maps if str(folder) in line}


def gather(files, numbers, starts, width):
    chosen = np.array(numbers, dtype=np.int64)
    return files.gather(chosen, np.array(starts, dtype=np.int64) + files.first_tokens[chosen], width)


def test_a_thousand_shards_are_sized_and_one_is_opened_when_a_window_of_it_is_drawn(tmp_path):
    dataset = PretrainTokenStreamDataset(write_shards(tmp_path / "train", [9] * 1000), T=4, device="cpu")
    assert dataset.num_windows == 5000 and mapped(tmp_path) == set() and open_in(tmp_path / "train") == []
    dataset.get_batch(B=1, generator=seeded())
    assert len(mapped(tmp_path)) == 1


@settings(derandomize=True, max_examples=40)
@given(lengths=st.lists(st.integers(3, 30), min_size=1, max_size=5), data=st.data())
def test_both_ways_to_read_gather_what_slices_of_the_files_hold(tmp_path_factory, lengths, data):
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=len(lengths), max_size=len(lengths)))
    folder = write_shards(tmp_path_factory.mktemp("shards"), lengths, dtypes)
    width = data.draw(st.integers(1, min(lengths)))
    places = st.integers(0, len(lengths) - 1).flatmap(
        lambda shard: st.tuples(st.just(shard), st.integers(0, lengths[shard] - width))
    )
    drawn = data.draw(st.lists(places, max_size=6))
    shards, starts = ([place[i] for place in drawn] for i in (0, 1))
    begins = np.cumsum([0, *lengths])[:-1] + [BEYOND * (dtype == "uint32") for dtype in dtypes]
    expected = [list(range(begins[shard] + start, begins[shard] + start + width)) for shard, start in drawn]
    each = [np.dtype(dtype) for dtype in dtypes]
    for io in ("mmap", "pread"):
        files = TokenFiles([(path, None) for path in sorted(folder.iterdir())], io=io, dtype=each)
        for copy in (files, pickle.loads(pickle.dumps(files))):
            found = gather(copy, shards, starts, width)
            assert (found.shape, found.dtype, found.tolist()) == ((len(drawn), width), max(each), expected)


def test_a_thread_that_maps_while_another_does_loses_nothing(tmp_path, monkeypatch):
    files = TokenFiles([(path, None) for path in sorted(write_shards(tmp_path, [5, 6]).iterdir())])
    inner = []

    def between():
        if not inner:  # here, the other thread reads the other file
            inner.append(None)
            inner[0] = gather(files, [1], [0], 2).tolist()

    before_mapping(monkeypatch, between)
    assert gather(files, [0], [0], 2).tolist() == [[0, 1]] and inner == [[[5, 6]]]
    assert gather(files, [1, 0], [1, 3], 2).tolist() == [[6, 7], [3, 4]]


def test_joined_files_are_numbered_on_from_one_part_to_the_next(tmp_path):
    folders = [write_shards(tmp_path / name, lengths) for name, lengths in (("a", [5, 6]), ("b", [7]))]
    parts = [TokenFiles([(path, None) for path in sorted(folder.iterdir())]) for folder in folders]
    joined = TokenFiles.joined(parts)
    assert joined.lengths.tolist() == [5, 6, 7] and joined.paths == parts[0].paths + parts[1].paths
    assert gather(joined, [2, 1], [1, 0], 2).tolist() == [[1, 2], [5, 6]]
    with refused("E102", "['mmap', 'pread']"):
        TokenFiles.joined([parts[0], TokenFiles([], io="pread")])


def test_maps_keep_no_file_open_and_go_with_the_dataset(tmp_path):
    """A cache may have more shards than a process may have files: Python's mmap would keep one open for each."""
    folder = write_shards(tmp_path / "train", [5] * 40)
    dataset = PretrainTokenStreamDataset(folder, T=4, device="cpu")
    dataset.get_batch(B=1000, generator=seeded())
    assert len(mapped(tmp_path)) == 40 and open_in(tmp_path) == []
    tokens = mmap_tokens(folder / "shard_00003.bin")[2:4]
    del dataset
    gc.collect()
    assert mapped(tmp_path) == {"shard_00003.bin"} and tokens.tolist() == [17, 18]
    del tokens
    gc.collect()
    assert mapped(tmp_path) == set()


def test_a_file_that_cannot_be_mapped_and_another_way_to_read_are_refused(tmp_path):
    with refused("E507", "10 bytes", kind=OSError):
        mapped_file(-1, 10)
    with refused("E102", "io='direct'", "mmap", "pread"):
        PretrainTokenStreamDataset(write_shards(tmp_path, [9]), T=4, device="cpu", io="direct")


def test_where_memory_cannot_be_mapped_the_error_names_the_limits_and_another_way(tmp_path):
    folder = write_shards(tmp_path / "train", [50])
    (folder / "shard_00000.bin").write_bytes(bytes(2**25))  # as much as keeps it from being called a sparse file
    os.truncate(folder / "shard_00000.bin", 2**31)
    program = (
        "import resource, sys, numpy as np\n"
        "from niels_gpt.cache.pretrain_dataset import PretrainSplit\n"
        f"split, zero = PretrainSplit({str(folder)!r}), np.zeros(1, np.int64)\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, -1))\n"
        "try: split.rows(zero, zero, 5)\n"
        "except OSError as error: sys.stdout.write(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f"{folder}: 1 files of {2**31} bytes" in done.stdout and "io='pread'" in done.stdout
    assert "ulimit -v" in done.stdout and "vm.max_map_count" in done.stdout


def test_a_read_that_gives_less_than_was_asked_is_continued(tmp_path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, parts, place: preadv(handle, [parts[0][:3]], place))
    split = PretrainSplit(write_shards(tmp_path / "train", [50]), io="pread")
    assert split.rows(np.array([0]), np.array([7]), 5).tolist() == [[7, 8, 9, 10, 11]]


def test_a_file_that_got_the_inode_of_another_is_another(tmp_path):
    path = write_shards(tmp_path / "train", [50]) / "shard_00000.bin"
    split = PretrainSplit(tmp_path / "train")
    path.write_bytes(bytes(100))  # in place
    os.utime(path, ns=(1, 1))
    with refused("E210", "shard_00000.bin"):
        split.rows(np.array([0]), np.array([7]), 5)


def test_pread_gives_the_same_batches_and_maps_nothing(tmp_path):
    folder = write_shards(tmp_path / "train", [50, 60, 70])

    def batches(io):
        dataset = PretrainTokenStreamDataset(folder, T=4, device="cpu", io=io)
        stream = iter(EpochStream(folder, T=4, global_batch_size=8, seed=0, io=io))
        return [
            tensor.tolist() for batch in (dataset.get_batch(B=8, generator=seeded()), next(stream)) for tensor in batch
        ]

    by_reads = batches("pread")
    assert mapped(tmp_path) == set() and by_reads == batches("mmap")


def test_files_beyond_a_third_of_the_maps_that_a_process_may_have_are_read(tmp_path, monkeypatch):
    gc.collect()
    allow_maps(monkeypatch, lambda: maps_in_process() + 2)
    files = TokenFiles([(path, None) for path in sorted(write_shards(tmp_path, [5, 6, 7]).iterdir())])
    before = maps_in_process()
    assert gather(files, [0, 1], [1, 0], 2).tolist() == [[1, 2], [5, 6]] and len(mapped(tmp_path)) == 2
    allow_maps(monkeypatch, lambda: before + 2)
    assert gather(files, [2, 0], [5, 1], 2).tolist() == [[16, 17], [1, 2]] and len(mapped(tmp_path)) == 2
    assert gather(pickle.loads(pickle.dumps(files)), [2, 0], [5, 1], 2).tolist() == [[16, 17], [1, 2]]
    del files
    gc.collect()
    assert maps_in_process() == before


def test_pread_keeps_an_eighth_of_the_limit_open_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    folder = write_shards(tmp_path / "train", [5] * 200)
    dataset = PretrainTokenStreamDataset(folder, T=4, device="cpu", io="pread")
    x, _ = dataset.get_batch(B=2000, generator=seeded())
    assert len(x[:, 0].unique()) == 200 and len(open_in(folder)) == 128
    del dataset
    gc.collect()
    assert open_in(folder) == []


@pytest.mark.parametrize(("memory", "is_random"), [(399, True), (400, False)])
def test_no_more_than_a_window_is_read_of_files_of_more_than_half_the_memory(tmp_path, monkeypatch, memory, is_random):
    say_memory(monkeypatch, memory)
    folder = write_shards(tmp_path / "train", [50, 50])  # 200 bytes
    dataset = PretrainTokenStreamDataset(folder, T=4, device="cpu")
    dataset.get_batch(B=50, generator=seeded())
    maps = Path("/proc/self/smaps").read_text().split(str(folder))[1:]
    flags = [next(line for line in entry.splitlines() if line.startswith("VmFlags")) for entry in maps]
    assert [" rr" in line for line in flags] == [is_random] * 2  # random read advice


def test_reading_in_order_is_read_ahead_even_of_large_files(tmp_path, monkeypatch):
    say_memory(monkeypatch, 1)
    folder = write_shards(tmp_path / "val", [50])
    batches = iter_eval(folder, B=2, T=8)
    next(batches)
    (entry,) = Path("/proc/self/smaps").read_text().split(str(folder))[1:]
    assert " rr" not in next(line for line in entry.splitlines() if line.startswith("VmFlags"))


@pytest.mark.parametrize(("shard", "start"), [(0, -1), (0, 46), (1, 57), (1, 2**40)])
def test_a_window_that_is_not_inside_its_shard_is_an_index_error(tmp_path, shard, start):
    split = PretrainSplit(write_shards(tmp_path / "train", [50, 60]))
    assert split.rows(np.array([1]), np.array([55]), 5).tolist() == [[105, 106, 107, 108, 109]]
    with refused("E106", f"shard_0000{shard}.bin", f"5 tokens at token {start}", kind=IndexError):
        split.rows(np.array([0, shard]), np.array([0, start]), 5)


CUT = (CacheError, r"shard_00000.bin: 20 bytes, expected 200")
GONE = (FileNotFoundError, r"shard_00000\.bin: no such token file")
CUT_BETWEEN = (CacheError, r"shard_00000.bin: ends after .* expected 200: it was truncated")


@pytest.mark.parametrize(
    ("io", "reads", "size", "error"),
    [
        ("mmap", 0, 20, CUT),
        ("pread", 0, 20, CUT),
        ("pread", 1, 20, CUT_BETWEEN),
        ("mmap", 0, 0, GONE),
        ("pread", 0, 0, GONE),
    ],
)
def test_a_shard_that_was_cut_or_removed_after_opening_is_an_error_with_its_name(tmp_path, io, reads, size, error):
    dataset = PretrainTokenStreamDataset(write_shards(tmp_path, [100]), T=50, device="cpu", io=io)
    for _ in range(reads):
        dataset.get_batch(B=1, generator=seeded())
    path = tmp_path / "shard_00000.bin"
    os.truncate(path, size) if size else path.unlink()
    with pytest.raises(error[0], match=error[1]):
        dataset.get_batch(B=4, generator=seeded())


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_cache_that_took_the_place_of_an_open_one_is_not_read_under_its_name(tmp_path, io):
    build(tmp_path / "built", ["a" * 60], num_tokens=60)
    shutil.copytree((tmp_path / "built").resolve(), tmp_path / "c")  # a real folder, as cp -rL makes it
    dataset = PretrainTokenStreamDataset(tmp_path / "c" / "train", T=4, device="cpu", io=io)
    pickled = pickle.dumps(dataset)
    build(tmp_path / "c", ["b" * 60], num_tokens=60)
    with refused("E210", "shard_00001.bin"):
        dataset.get_batch(B=4, generator=seeded())
    with refused("E213", "content_sha256"):
        pickle.loads(pickled)


def anonymous_bytes():
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no line Anonymous")


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("in_epochs", [False, True])
def test_anonymous_memory_does_not_grow_with_the_batches_served(tmp_path, in_epochs, io):
    folder = write_shards(tmp_path / "train", [60_000] * 8)
    dataset, generator = PretrainTokenStreamDataset(folder, T=64, device="cpu", io=io), seeded()
    stream = iter(EpochStream(folder, T=64, global_batch_size=16, seed=0, io=io))
    before = 0
    for number in range(2300):  # 2,000 batches are 33 MB of int64
        before = anonymous_bytes() if number == 300 else before
        next(stream) if in_epochs else dataset.get_batch(B=16, generator=generator)
    assert anonymous_bytes() - before < 4 * 2**20


@pytest.mark.parametrize(("dtype", "largest"), [(np.uint16, 2**16 - 1), (np.uint32, 2**31 - 1)])
def test_split_rows_are_the_row_and_its_shift_on_any_device(dtype, largest):
    rows = np.array([[1, largest, 3]], dtype=dtype)
    # "cpu:0" takes the way of another device.
    for device in ("cpu", "cpu:0", *(["cuda"] if torch.cuda.is_available() else [])):
        x, y = split_rows(rows, device)
        assert (x.tolist(), y.tolist()) == ([[1, largest]], [[largest, 3]])
        for tensor in (x, y, *split_rows(rows, "meta")):
            assert tensor.shape == (1, 2) and tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_files_of_different_dtypes_are_joined_by_tokens_and_rows_are_of_the_wider_one(tmp_path):
    """The last file is an odd number of 16-bit ids: no whole number of 32-bit ones."""
    narrow = TokenFiles([(write_shards(tmp_path / "a", [7]) / "shard_00000.bin", None)])
    wide = TokenFiles(
        [(write_shards(tmp_path / "b", [5], ["uint32"]) / "shard_00000.bin", None)], dtype=np.dtype("<u4")
    )
    for parts in ([narrow, wide], [wide, narrow]):
        files, first = TokenFiles.joined(parts), parts.index(narrow)
        found = gather(files, [first, 1 - first, first], [5, 0, 0], 2)
        assert found.dtype == np.uint32 and found.tolist() == [[5, 6], [BEYOND, BEYOND + 1], [0, 1]]
        assert gather(files, [first], [0], 7).tolist() == [[0, 1, 2, 3, 4, 5, 6]]
        assert files.lengths.tolist() == [len_of[0] for len_of in (parts[0].lengths, parts[1].lengths)]


SEEN = [
    lambda x, y: x,
    lambda x, y: y,
    lambda x, y: x.view(-1)[5:],
    lambda x, y: y.detach().T,
    lambda x, y: y.numpy()[3:, ::2],
    lambda x, y: torch.from_dlpack(x),
    lambda x, y: memoryview(x.numpy()),
    lambda x, y: x.untyped_storage(),
    lambda x, y: torch.nn.Parameter(x, requires_grad=False),
]


def bytes_seen(kept):
    return bytes(kept) if isinstance(kept, torch.UntypedStorage) else np.asarray(kept).tobytes()


@pytest.fixture
def all_memory_is_recycled(monkeypatch):
    recycle_all_memory(monkeypatch)


@pytest.mark.usefixtures("all_memory_is_recycled")
@pytest.mark.parametrize("see", SEEN)
def test_what_can_still_be_seen_of_a_batch_is_never_overwritten(see):
    kept, copies = [], []
    for number in range(12):
        kept.append(see(*split_rows(np.full((8, 33), number, dtype=np.uint16), "cpu")))
        copies.append(bytes_seen(kept[-1]))
        assert set(np.frombuffer(copies[-1], dtype=np.int64).tolist()) == {number}
    assert [bytes_seen(one) for one in kept] == copies


@pytest.mark.usefixtures("all_memory_is_recycled")
def test_the_memory_of_a_batch_that_is_gone_is_used_again():
    rows = np.zeros((8, 33), dtype=np.uint16)
    places = set()
    for _ in range(20):
        x, y = split_rows(rows, "cpu")
        places |= {x.data_ptr(), y.data_ptr()}
    assert len(places) == 4  # two batches: the next is made while the last one is still there


@pytest.mark.usefixtures("all_memory_is_recycled")
def test_a_batch_made_while_another_is_made_has_memory_of_its_own():
    """As by a signal handler, or a finalizer, that runs between any two steps of Python."""
    wrong, batches = [], 0

    def between(frame, event, argument):
        if inside:
            return None
        inside.append(True)
        kept = [split_rows(np.full((8, 33), 7, dtype=np.uint16), "cpu") for _ in range(2)]
        others.append(kept[0])
        inside.clear()
        return between

    inside = []
    others = []
    for number in range(30):
        others.clear()
        sys.settrace(between)
        mine = split_rows(np.full((8, 33), 3, dtype=np.uint16), "cpu")
        sys.settrace(None)
        batches += len(others)
        wrong += [number] if int(mine[0].min()) != 3 or any(int(x.min()) != 7 for x, _ in others) else []
    assert wrong == [] and batches > 100


@pytest.mark.usefixtures("all_memory_is_recycled")
def test_threads_never_share_the_memory_of_a_batch():
    def fill(number):
        good = True
        for _ in range(200):
            x, y = split_rows(np.full((8, 33), number, dtype=np.uint16), "cpu")
            good &= bool((x == number).all() and (y == number).all())
        return good

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(fill, range(8)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_batch_on_cuda_is_the_batch_on_the_cpu(tmp_path):
    folder = write_shards(tmp_path, [60_000])
    one, other = (PretrainTokenStreamDataset(folder, T=64, device=device, io="mmap") for device in ("cpu", "cuda"))
    for mine, theirs in zip(
        one.get_batch(B=8, generator=seeded()), other.get_batch(B=8, generator=seeded()), strict=True
    ):
        assert theirs.is_cuda and theirs.is_contiguous() and torch.equal(mine, theirs.cpu())


def test_a_fingerprint_is_what_meta_json_says_of_the_content(tmp_path):
    build(tmp_path / "c", ["a" * 60], num_tokens=60)
    meta = json.loads((tmp_path / "c" / "meta.json").read_text())
    found = PretrainTokenStreamDataset(tmp_path / "c" / "train", T=4, device="cpu").fingerprint()
    assert found == {"split": "train", "tokens": 60, "content_sha256": meta["content_sha256"], "tokenizer_sha256": None}
    assert json.loads(json.dumps(found)) == found


def test_expect_opens_the_same_data_and_refuses_other_content(tmp_path):
    build(tmp_path / "c", ["a" * 60], num_tokens=60)
    train = tmp_path / "c" / "train"
    kept = PretrainTokenStreamDataset(train, T=4, device="cpu").fingerprint()
    state = EpochStream(train, T=4, global_batch_size=1, seed=0).state_dict()
    for same in (kept, state):
        PretrainTokenStreamDataset(train, T=4, device="cpu", expect=same)
    build(tmp_path / "c", ["b" * 60], num_tokens=60)
    with refused("E213", "content_sha256"):
        PretrainTokenStreamDataset(train, T=4, device="cpu", expect=kept)
    with refused("E213", "content_sha256"):
        EpochStream(train, T=4, global_batch_size=1, seed=0, expect=kept)


def test_a_folder_of_another_tool_is_known_by_its_number_of_tokens(tmp_path):
    kept = PretrainSplit(write_shards(tmp_path / "a", [9, 9])).fingerprint()
    assert kept == {"split": "a", "tokens": 18, "content_sha256": None, "tokenizer_sha256": None}
    with refused("E213", "tokens is 19, expected 18"):
        PretrainSplit(write_shards(tmp_path / "a", [9, 10]), expect=kept)
    for expect in ({}, {"split": "train"}, [], "abc", 3):
        with pytest.raises(ValueError, match=r"expected what fingerprint\(\) returned"):
            PretrainSplit(tmp_path / "a", expect=expect)
