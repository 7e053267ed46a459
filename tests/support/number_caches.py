"""Splits whose ids count through all shards, so that a row shows where it was taken; and runs of streams over them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from niels_gpt.cache import mmap, pretrain_dataset
from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.cache.meta import read_meta, write_meta
from niels_gpt.sampling import EpochStream, MixtureStream
from niels_gpt.storage import filemaps, meta_json
from niels_gpt.storage.filemaps import FileMaps
from support.byte_tokenizer import ByteTokenizer

APART = 10_000
"""Source s of a mixture has the ids from APART * s."""
BEYOND = 1_000_000
"""Added to the ids of shards of 32 bits; not by a number that is lost in 16 bits."""
DTYPES = ("uint16", "uint32")


def write_shards(folder, shards, dtype="uint16"):
    """Write shards as another tool would: token files and no meta.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, ids in enumerate(shards):
        tokens = np.asarray(ids, dtype=np.int64) + BEYOND * (dtype == "uint32")
        (folder / f"shard_{number:05d}.bin").write_bytes(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    return folder


def allow_holes(monkeypatch):
    """Let files be mostly holes, which are refused as a stranger's bomb."""
    monkeypatch.setattr(meta_json, "_MIN_SPARSE_BYTES", 2**62)


def numbered_shards(lengths):
    """Return shards of these lengths whose ids count through the whole stream."""
    starts = np.cumsum([0, *lengths])
    return [list(range(start, start + length)) for start, length in zip(starts.tolist(), lengths, strict=False)]


def numbered(folder, lengths, dtype="uint16"):
    """Write a train split of numbered shards; of 32 bits they count from BEYOND."""
    return write_shards(folder / "train", numbered_shards(lengths), dtype)


def first_ids(lengths, T):
    """Return the first ids of all windows of numbered shards, by a slow and plain rule."""
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        start + window * T
        for start, length in zip(starts[:-1], lengths, strict=True)
        for window in range((length - 1) // T)
    ]


def recycle_all_memory(patch):
    """Let batches take used memory again, small ones too, which are quicker to look at."""
    patch.setattr(pretrain_dataset, "_FRESH_TOKENS", 0)


def say_memory(patch, num_bytes):
    """Let readers find so much memory in the machine."""
    patch.setattr(mmap, "memory_bytes", lambda: num_bytes)


def before_mapping(patch, meanwhile):
    """Let something happen whenever a reader is about to map a file."""
    patch.setattr(mmap, "FileMaps", lambda sizes: (meanwhile(), FileMaps(sizes))[1])


def maps_in_process():
    """How many files this process has mapped for its readers."""
    return FileMaps.num_in_process


def allow_maps(patch, most):
    """Let a process map so many files."""
    patch.setattr(filemaps, "_most_files", most)


class NumberTokenizer(ByteTokenizer):
    """ "10-15" is [10, 11, 12, 13, 14]."""

    vocab_size = 1 << 16

    def __init__(self, sha256="ab" * 32):
        self.sha256 = sha256

    def encode(self, text):
        start, end = map(int, text.split("-"))
        return list(range(start, end))


def number_cache(path, count=100, *, tokenizer="ab" * 32, start=10, val=0):
    """Build a real cache of ids that count from `start` in shards of 40 tokens; returns its train folder."""
    documents = [("train", f"{number}-{number + 10}") for number in range(start, start + count, 10)]
    documents += [("val", f"{number}-{number + 10}") for number in range(start, start + val, 10)]
    whole = {"max_train_tokens": None, "max_val_tokens": None, "shuffle_buffer": None, "partial": True}
    build_pretrain(
        documents, path, tokenizer=NumberTokenizer(tokenizer), shard_bytes=80, seed=0, num_threads=0, **whole
    )
    return path / "train"


def with_vocabulary(folder, vocab_size):
    """Change the vocab_size in the meta.json of a cache."""
    meta = read_meta(str(folder.parent / "meta.json"))
    write_meta(str(folder.parent / "meta.json"), {**meta, "vocab_size": vocab_size})
    return folder


@dataclass
class GlobalBatch:
    """The rows of all ranks in order, T + 1 ids each, without BEYOND, and the state that every rank has after them."""

    rows: list[list[int]]
    state: dict[str, Any]
    source: list[int] | None = None

    @property
    def firsts(self):
        """The first id of each row: the place of its window."""
        return [row[0] for row in self.rows]


def joined(ranks):
    """Check the batches of each rank, and put those of all ranks together."""
    assert len({len(batches) for batches in ranks}) == 1, "ranks yield unequally many batches"
    found = []
    for batches in zip(*ranks, strict=True):
        for x, y in batches:
            assert x.shape == y.shape and x.dtype == y.dtype == torch.int64
            assert x.is_contiguous() and y.is_contiguous()
            assert torch.equal(x[:, 1:], y[:, :-1]), "y is not x one token later"
        assert all(batch.state == batches[0].state for batch in batches), "ranks differ in their state"
        rows = [
            row for batch in batches for row in torch.cat([batch.x, batch.y[:, -1:]], dim=1).remainder(BEYOND).tolist()
        ]
        sources = None if batches[0].source is None else [int(index) for batch in batches for index in batch.source]
        found.append(GlobalBatch(rows, batches[0].state, sources))
    return found


def firsts(batches):
    """Return the first id of each row of all batches."""
    return [first for batch in batches for first in batch.firsts]


def run_epochs(folder, steps=None, *, G=4, world=1, state=None, change=False, **changed):
    """Take some steps of an EpochStream with all its ranks; None: to the end. change: the state has others."""
    ranks = []
    for rank in range(world):
        arguments = {"T": 4, "seed": 0, "global_batch_size": G, "rank": rank, "world_size": world, **changed}
        stream = EpochStream(str(folder), **arguments)
        if state is not None:
            stream.load_state_dict(state, changed=change)
        ranks.append(list(islice(stream, steps)))
    return joined(ranks)


def sources(folder, windows, dtypes=()):
    """Write a split for each source, of so many windows of T = 1."""
    return [
        write_shards(
            folder / f"source_{source}" / "train",
            [range(source * APART, source * APART + count + 1)],
            dtypes[source] if dtypes else "uint16",
        )
        for source, count in enumerate(windows)
    ]


def mixture(
    folders,
    weights,
    *,
    G=4,
    rank=0,
    world=1,
    seed=0,
    streams=None,
    dtypes=(),
    **changed,
):
    """Open a mixture in blocks of 10 samples."""
    common = {"T": 1, "global_batch_size": G, "rank": rank, "world_size": world, "seed": 0, **(streams or {})}
    opened = [
        EpochStream(str(folder), dtype=dtypes[number] if dtypes else None, **common)
        for number, folder in enumerate(folders)
    ]
    return MixtureStream(opened, weights, seed=seed, **{"block_size": 10, **changed})


def run_mixture(
    folders,
    weights,
    steps=None,
    *,
    world=1,
    state=None,
    **changed,
):
    """Take some steps of a mixture with all its ranks; None: to the end."""
    ranks = []
    for rank in range(world):
        one = mixture(folders, weights, rank=rank, world=world, **changed)
        if state is not None:
            one.load_state_dict(state)
        ranks.append(list(islice(one, steps)))
    batches = joined(ranks)
    for batch in batches:
        assert batch.source == [first // APART for first in batch.firsts], "source does not say where a row is from"
    return batches


def sources_of(batches):
    """Return the source of each row."""
    return [first // APART for first in firsts(batches)]


def assert_in_epochs(taken, windows):
    """Every source is seen whole before any window of it comes again."""
    for source, count in enumerate(windows):
        own = [first for first in taken if first // APART == source]
        for epoch in range(-(-len(own) // count)):
            part = own[epoch * count : (epoch + 1) * count]
            assert len(set(part)) == len(part)
        assert set(own) <= set(range(source * APART, source * APART + count))


WRAP = 2**64


def plain_mix(z):
    """Compute SplitMix64's finalizer in plain integers."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WRAP
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WRAP
    return z ^ z >> 31
