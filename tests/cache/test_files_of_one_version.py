"""Files that do not belong together: each reader compares them with the checksums of their cache."""

import json
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from support import small_builds
from support.byte_tokenizer import ByteTokenizer
from support.disk import META_NAME
from support.errors import refused

from niels_gpt.cache import CacheError, PretrainTokenStreamDataset, SFTExampleDataset
from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.cache.sft_split import SFTSplit
from niels_gpt.prefix_tree.rollouts.build import build_rollouts
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.prefix_tree.rollouts.records import Rollout, RolloutGroup
from niels_gpt.sampling import EpochStream, MixtureStream, PackedStream, iter_eval

BLOCK = 65_536
SHARD = 4 * BLOCK  # bytes: 131,072 tokens of 16 bits


def pretrain(path, letter):
    """A cache of two shards of four blocks; of equal sizes whatever the letter."""
    texts = [("train", letter * (SHARD // 2))] * 2 + [("val", letter * 999)]
    how = {"tokenizer": ByteTokenizer(), "shard_bytes": SHARD, "seed": 0, "shuffle_buffer": None}
    build_pretrain(texts, path, max_train_tokens=SHARD, max_val_tokens=999, **how)
    return path.resolve()


def sft(path, letter):
    chats = [[{"role": "user", "content": letter * 70_000}, {"role": "assistant", "content": letter * 70_000}]] * 2
    build_sft(chats, path, tokenizer=ByteTokenizer(), val_frac=0.5, seed=0)
    return path.resolve()


def rollouts(path, number):
    groups = [RolloutGroup(str(each), [Rollout([1, *[number] * 60_000], reward=float(number))]) for each in range(3)]
    build_rollouts(groups, path, vocab_size=300, val_frac=0)
    return path.resolve()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two builds of each kind, of equal sizes and different content."""
    with small_builds.quick_folder() as folder:
        yield {
            make.__name__: tuple(
                make(folder / f"{make.__name__}{name}", value) for name, value in zip("ab", values, strict=True)
            )
            for make, values in ((pretrain, "xy"), (sft, "xy"), (rollouts, (7, 8)))
        }


@pytest.fixture
def mixed(pair, tmp_path):
    """Return a function that copies a cache and takes one of its files, or some bytes of it, from the other one."""

    def made(kind, name, begin=0, end=None):
        one, other = pair[kind]
        folder = tmp_path / "copy"
        shutil.copytree(one, folder)
        content, theirs = bytearray((folder / name).read_bytes()), (other / name).read_bytes()
        assert len(content) == len(theirs) and content[begin:end] != theirs[begin:end]
        content[begin:end] = theirs[begin:end]
        (folder / name).chmod(0o644)
        (folder / name).write_bytes(content)
        return folder

    return made


def windows(folder, **how):
    dataset = PretrainTokenStreamDataset(folder / "train", T=BLOCK, device="cpu", **how)
    for _ in range(20):
        dataset.get_batch(B=4, generator=torch.Generator().manual_seed(1))


def epoch(folder, **how):
    list(EpochStream(folder, split="train", T=512, global_batch_size=16, seed=0, epochs=1, **how))


def mixture(folder, **how):
    streams = [
        EpochStream(folder, split=split, T=512, global_batch_size=16, seed=0, **how) for split in ("train", "val")
    ]
    list(MixtureStream(streams, [4, 1], seed=0, when_exhausted="stop"))


def packed(folder, **how):
    list(PackedStream(folder, split="train", T=512, global_batch_size=16, seed=0, epochs=1, **how))


def evaluated(folder, **how):
    list(iter_eval(folder, split="train", B=4, T=512, **how))


def chats(folder, **how):
    dataset = SFTExampleDataset.open(folder, T=200_000, **how)
    dataset.get_batch(B=1, generator=torch.Generator())


def groups(folder, **how):
    dataset = RolloutDataset(folder, **how)
    assert len([dataset.group(number) for number in range(len(dataset))]) == 3


READ = {
    "windows": (windows, "pretrain", "train/shard_00001.bin"),
    "epoch": (epoch, "pretrain", "train/shard_00001.bin"),
    "mixture": (mixture, "pretrain", "train/shard_00001.bin"),
    "packed": (packed, "pretrain", "train/shard_00001.bin"),
    "evaluation": (evaluated, "pretrain", "train/shard_00001.bin"),
    "chats": (chats, "sft", "train_tokens.bin"),
    "rollouts": (groups, "rollouts", "train_tokens.bin"),
}
TWO_WAYS = [(name, io) for name in READ for io in (("mmap",) if name == "rollouts" else ("mmap", "pread"))]


def how_of(name, io):
    return {} if name == "rollouts" else {"io": io}


@pytest.mark.parametrize(("name", "io"), TWO_WAYS)
def test_a_file_of_another_build_of_equal_size_is_refused_when_it_is_opened(mixed, name, io):
    read, kind, file = READ[name]
    folder = mixed(kind, file)
    with refused("E201", folder / file, "bytes 0 to 65536", "crc32.bin", kind=CacheError):
        read(folder, **how_of(name, io))


@pytest.mark.parametrize(("name", "io"), TWO_WAYS)
def test_a_block_in_the_middle_is_refused_when_it_is_read_if_each_block_is_checked(mixed, name, io):
    read, kind, file = READ[name]
    folder = mixed(kind, file, BLOCK + 4, BLOCK + 40)
    read(folder, **how_of(name, io))  # the ends are good
    with refused("E201", folder / file, "bytes 65536 to 131072", kind=CacheError):
        read(folder, **how_of(name, io), check="blocks")


@pytest.mark.parametrize(("name", "io"), TWO_WAYS)
def test_a_good_cache_is_read_with_every_check(pair, name, io):
    read, kind, _ = READ[name]
    for check in ("ends", "blocks"):
        read(pair[kind][0], **how_of(name, io), check=check)
    with refused("E102", "check='all'", "ends, blocks", kind=ValueError):
        read(pair[kind][0], **how_of(name, io), check="all")


def test_the_last_block_is_compared_too(mixed):
    folder = mixed("pretrain", "train/shard_00000.bin", SHARD - 2)
    with refused("E201", "shard_00000.bin", f"bytes {SHARD - BLOCK} to {SHARD}"):
        epoch(folder)


def test_blocks_that_nobody_reads_are_not_compared(mixed):
    folder = mixed("pretrain", "train/shard_00001.bin", 2 * BLOCK + 4, 2 * BLOCK + 9)
    split = PretrainSplit(folder, split="train", check="blocks")
    first = SHARD // 2  # the first token of the second shard
    good = PretrainSplit(folder, split="train")
    for begin, end in ((first, first + BLOCK), (first + 3 * BLOCK // 2, first + 2 * BLOCK), (5, first + 7)):
        assert np.array_equal(split.stream(begin, end), good.stream(begin, end))
    with refused("E201", "shard_00001.bin", "bytes 131072 to 196608"):
        split.stream(first + BLOCK - 1, first + BLOCK + 1)


@pytest.mark.parametrize("name", ["train_idx.npy", "val_idx.npy"])
def test_offsets_of_another_version_are_refused_when_a_split_is_opened(tmp_path, name):
    small_builds.sft(tmp_path / "c")
    folder, split = (tmp_path / "c").resolve(), name.partition("_")[0]
    raw = bytearray((folder / name).read_bytes())
    raw[-8] ^= 1
    (folder / name).chmod(0o644)
    (folder / name).write_bytes(raw)
    with refused("E201", name, "bytes 0 to"):
        SFTSplit(folder, split)


def test_an_index_of_documents_of_another_size_or_version_is_refused(tmp_path):
    small_builds.pretrain(tmp_path / "c")
    path = (tmp_path / "c").resolve() / "index/train_docs.npy"
    raw = path.read_bytes()
    path.chmod(0o644)
    np.save(path, np.load(path)[:-1])
    with refused("E203", "train_docs.npy", f"{len(raw)} by its meta.json"):
        _ = PretrainSplit(tmp_path / "c/train").documents
    path.write_bytes(raw[:-16] + bytes([raw[-16] ^ 1]) + raw[-15:])
    with refused("E201", "train_docs.npy", "bytes 0 to"):
        _ = PretrainSplit(tmp_path / "c/train").documents


def test_damaged_checksums_blame_no_other_file(tmp_path):
    small_builds.pretrain(tmp_path / "c")
    path = (tmp_path / "c").resolve() / "index/crc32.bin"
    path.chmod(0o644)
    path.write_bytes(bytes(len(path.read_bytes())))
    with refused("E201", "crc32.bin: its bytes do not match its sha256"):
        PretrainSplit(tmp_path / "c/train").stream(0, 9)
    path.write_bytes(b"1234")
    with refused("E203", "crc32.bin", "4 bytes"):
        PretrainSplit(tmp_path / "c/train").stream(0, 9)
    opened = PretrainSplit(tmp_path / "c/train")
    path.unlink()
    with refused("E204", "crc32.bin", "no such file"):
        opened.stream(0, 9)
    split = PretrainSplit(tmp_path / "c/train")  # training needs no file of index/
    assert repr(split).endswith("checksums: none)") and len(split.stream(0, 9)) == 9


@pytest.mark.parametrize("kind", ["pretrain", "sft", "rollouts"])
def test_without_checksums_sizes_alone_are_compared_and_the_reader_says_so(tmp_path, kind):
    small_builds.BUILDERS[kind](tmp_path / "c")
    opened = {"pretrain": PretrainSplit, "sft": SFTSplit, "rollouts": RolloutDataset}[kind]
    assert "checksums: none" not in repr(opened(tmp_path / "c", split="train"))
    folder = (tmp_path / "c").resolve()
    meta = json.loads((folder / META_NAME).read_bytes())
    del meta["checksums"], meta["meta_crc32"]  # as builder 1 wrote it
    (folder / META_NAME).write_text(json.dumps(meta))
    reader = opened(tmp_path / "c", split="train", check="blocks")
    assert repr(reader).endswith(", checksums: none)")
    assert reader.fingerprint() == opened(tmp_path / "c", split="train").fingerprint()


@pytest.mark.parametrize(("name", "io"), TWO_WAYS)
def test_a_pickled_reader_checks_as_the_first_one(mixed, name, io):
    _, kind, file = READ[name]
    folder = mixed(kind, file, BLOCK + 4, BLOCK + 40)
    opened = {"pretrain": PretrainSplit, "sft": SFTSplit, "rollouts": RolloutDataset}[kind]
    reader = pickle.loads(pickle.dumps(opened(folder, split="train", check="blocks", **how_of(name, io))))
    with refused("E201", file, "bytes 65536 to 131072"):
        if kind == "pretrain":
            reader.stream(0, reader.num_tokens)
        else:
            reader.read(0) if kind == "rollouts" else reader.read(np.array([0]), np.array([reader.num_tokens]))


def test_a_file_that_was_compared_is_not_compared_again_until_it_changes(pair, tmp_path):
    folder = shutil.copytree(pair["pretrain"][0], tmp_path / "c")
    path = folder / "train/shard_00000.bin"
    PretrainSplit(folder, split="train").stream(0, 9)
    about = path.stat()
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.write(b"\0\0")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert PretrainSplit(folder, split="train").stream(0, 9)[0] == 0
    os.utime(path, ns=(1, 1))
    with refused("E201", "shard_00000.bin"):
        PretrainSplit(folder, split="train").stream(0, 9)
