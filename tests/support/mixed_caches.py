"""Mixtures of plain windows, chats and packed documents over three small caches, and what each of their rows is.

Started by torchrun, it takes the first part of a run with gloo ranks: see tests/sampling/test_mixture_of_all.py.
"""

import json
import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from niels_gpt.cache.build_sft import build_sft
from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.cache.sft_split import SFTSplit
from niels_gpt.sampling import EpochStream, MixtureStream, PackedStream, SFTStream, iter_eval, prefetch
from support.byte_tokenizer import ByteTokenizer, build

T = 12
KINDS = ("plain", "chats", "packed")
Row = tuple[str, list[Any]]
"""The kind of its source, and its pieces: of a plain row its ids, as one piece."""


def build_three(folder):
    """Build the three caches; some documents and chats are longer than T."""
    counted = "".join(f"{number:02}" for number in range(100))  # no twelve characters come twice
    ends = np.cumsum([2 * (number % 9 + 1) for number in range(19)]).tolist()
    texts = [counted[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    build(folder / "pretrain" / "plain", texts, 190, shard_bytes=160)
    build(folder / "pretrain" / "packed", texts, 190, shard_bytes=160)
    chats = [
        [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": "ab" * (number % 8 + 1)}]
        for number in range(9)
    ]
    build_sft(chats, folder / "sft" / "chats", tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    return folder


def open_mixture(folder, kinds, weights, *, G, **others):
    """Open a mixture of some of the three."""
    common = {"T": T, "seed": 0, "global_batch_size": G}
    common |= {key: others.pop(key) for key in ("rank", "world_size") if key in others}
    opened = {
        "plain": lambda: EpochStream(folder / "pretrain" / "plain" / "train", **common),
        "chats": lambda: SFTStream(folder / "sft" / "chats", over_length="split", **common),
        "packed": lambda: PackedStream(folder / "pretrain" / "packed", **common),
    }
    return MixtureStream([opened[kind]() for kind in kinds], weights, **{"seed": 1, "block_size": 9, **others})


def rows_of(batch, kinds):
    """Return what each row of a batch is."""
    assert batch.source is not None
    found = []
    segments = [[] for _ in batch.source]
    if batch.cu_seqlens is not None and batch.piece_ids is not None:
        for start, piece in zip(batch.cu_seqlens.tolist(), batch.piece_ids.tolist(), strict=False):
            segments[start // T] += [piece] * (piece >= 0)
    for number, source in enumerate(batch.source.tolist()):
        is_plain = kinds[source] == "plain"
        found.append((kinds[source], ["".join(map(chr, batch.x[number].tolist()))] if is_plain else segments[number]))
    return found


def global_rows(ranks):
    """Return the rows of all ranks in their order. ranks: the rows of each batch of each rank."""
    return [row for batches in zip(*ranks, strict=True) for rows in batches for row in rows]


def every_piece(folder):
    """Return all pieces of each source, from the files."""
    windows = set()
    for shard in sorted((folder / "pretrain" / "plain" / "train").glob("*.bin")):
        ids = np.fromfile(shard, "<u2").tolist()
        windows |= {"".join(map(chr, ids[at : at + T])) for at in range(0, len(ids) - T, T)}
    chats = np.diff(SFTSplit(folder / "sft" / "chats", "train").starts).tolist()
    documents = np.diff(PretrainSplit(folder / "pretrain" / "packed" / "train").documents).tolist()
    pieces = sum(-(-(length - 1) // T) for length in chats), sum(-(-length // T) for length in documents)
    return {"plain": windows, "chats": set(range(pieces[0])), "packed": set(range(pieces[1]))}


def check_epochs(rows, every, per_epoch):
    """Check that each piece comes exactly once in each epoch of its source. per_epoch: rows of each source."""
    for kind, pieces in every.items():
        own = [row for of, row in rows if of == kind]
        for first in range(0, len(own), per_epoch[kind]):
            epoch = own[first : first + per_epoch[kind]]
            served = [piece for row in epoch for piece in row]
            assert len(served) == len(set(served)), f"{kind}: a piece twice in an epoch"
            assert set(served) <= pieces
            assert len(epoch) < per_epoch[kind] or set(served) == pieces, f"{kind}: a piece is missing"


def losses(folder, rank=0, world_size=1):
    """Return a sum over all targets of an evaluation that tells them apart, their number, and that of the batches."""
    sums = [0, 0, 0]
    for x, y in iter_eval(folder / "pretrain" / "plain" / "train", B=2, T=5, rank=rank, world_size=world_size):
        targets = y != -100
        sums = [sums[0] + int(((x + 1) * y**2)[targets].sum()), sums[1] + int(targets.sum()), sums[2] + 1]
    return sums


def run_first_part(folder):
    """Take 7 batches of chats and plain windows, then 6 of all three, and evaluate; write what all ranks served."""
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    ranks = {"rank": rank, "world_size": world}
    one = open_mixture(folder, KINDS[:2], [2, 1], G=6, **ranks)
    before = list(islice(one, 7))
    three = open_mixture(folder, KINDS, [(0, [1, 1, 1]), (60, [1, 2, 3])], G=4, **ranks)
    three.load_state_dict(before[-1].state, changed=True)
    after = list(islice(prefetch(three, 2), 6))
    mine = [rows_of(batch, KINDS) for batch in [*before, *after]], after[-1].state, losses(folder, **ranks)
    found = [None] * world
    distributed.all_gather_object(found, mine)
    sums = torch.tensor(mine[2])
    distributed.all_reduce(sums)
    if rank == 0:
        rows, states, counts = zip(*found, strict=True)
        result = {"ranks": rows, "states": states, "batches": [each[2] for each in counts], "losses": sums.tolist()}
        (folder / "first_part.json").write_text(json.dumps(result))
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run_first_part(Path(sys.argv[1]))
