"""Caches of several pieces of 1 MiB, the folders they are read through, and the results: shared by tests/buckets."""

import hashlib
import json
import os
import shutil
import warnings
from contextlib import contextmanager
from itertools import islice

import numpy as np
import pytest

from niels_gpt.buckets import folder as folders
from niels_gpt.cache import mounts
from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.sampling import EpochStream
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.meta_json import meta_bytes
from niels_gpt.storage.mounted import MOUNTED
from support import small_builds
from support.byte_tokenizer import WideByteTokenizer

T = 256
PIECE_BYTES = mounts.PIECE_BYTES
BLOCK_BYTES = 1 << 16
SHARD = "train/shard_00000.bin"


class QuickTokenizer(WideByteTokenizer):
    """The same ids in a hundredth of the time."""

    def encode(self, text):
        return (np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) + (self.more + 10)).tolist()


def build(path, shards, shard_bytes=2_500_000):
    """Build a cache whose train split has so many shards; its last one has less."""
    draw, tokens = np.random.default_rng(0), shards * shard_bytes // 4 - 10_000
    letters = draw.integers(97, 123, size=tokens, dtype=np.uint8).tobytes().decode()
    items = [("train", letters[at : at + 100_000], f"d{at}") for at in range(0, tokens, 100_000)]
    items.append(("val", "the end", "v"))
    how = {"shard_bytes": shard_bytes, "max_train_tokens": 10 * tokens, "max_val_tokens": 100, "shuffle_buffer": 0}
    small_builds.pretrain(path, items=items, tokenizer=QuickTokenizer(), **how)
    return path


def copied(cache, path):
    """Copy a version to a folder that stands for a bucket, where files may be damaged; returns its URL."""
    shutil.copytree(cache.resolve(), path)
    return f"file://{path}"


def changed_meta(path, change):
    """Change the meta.json in a folder, with a checksum that fits."""
    meta = json.loads((path / "meta.json").read_bytes())
    change(meta)
    (path / "meta.json").write_bytes(meta_bytes(meta))


def altered(path, at=0):
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def stream(cache, **how):
    """One epoch of windows, shuffled; also through a folder that is too small for that (W612)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CodedWarning)
        return EpochStream(cache, **{"split": "train", "T": T, "global_batch_size": 8, "seed": 1, "epochs": 1, **how})


def digest(batches, count=None):
    """The sha256 of the next batches; of all by default."""
    total = hashlib.sha256()
    for batch in islice(batches, count):
        total.update(batch.x.numpy().tobytes())
        total.update(batch.y.numpy().tobytes())
    return total.hexdigest()


def tokens(cache, **how):
    """All tokens of the train split, read from its beginning."""
    split = PretrainSplit(cache, split="train", **how)
    return np.concatenate(
        [split.stream(at, min(at + 4096, split.num_tokens)) for at in range(0, split.num_tokens, 4096)]
    )


def only_mount():
    """The mount of this test."""
    (mount,) = MOUNTED.values()
    return mount


def pieces(local):
    """The pieces in a folder, by name."""
    return {path.name: path for path in sorted(local.glob("*/.pieces/*"))}


def used_bytes(place):
    """The bytes in use on the file system of a folder, at one moment."""
    about = os.statvfs(place)
    return (about.f_blocks - about.f_bfree) * about.f_frsize


@contextmanager
def patience(seconds):
    """Let a process wait so long for another one that has a lock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "PATIENCE_S", seconds)
        yield


@contextmanager
def idle_after(seconds):
    """Let threads that fetch ahead end so soon when there is nothing to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mounts, "_IDLE_S", seconds)
        yield


@contextmanager
def forgotten():
    """Take the mounts of a test out of this process again; its threads end soon."""
    before = dict(MOUNTED)
    MOUNTED.clear()
    with idle_after(0.2):
        yield
    MOUNTED.clear()
    MOUNTED.update(before)
