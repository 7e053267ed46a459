"""Every stream over small caches whose ids count: how it is opened, what a run of it serves, and what belongs to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from niels_gpt.cache.build_sft import build_sft
from niels_gpt.prefix_tree.rollouts.stream import RolloutBin, RolloutStream
from niels_gpt.sampling import EpochStream, MixtureStream, PackedStream, SFTStream
from support.bits_caches import give_bits
from support.byte_tokenizer import ByteTokenizer
from support.number_caches import number_cache, numbered, with_vocabulary
from support.small_builds import rollout_groups, rollouts

Row = tuple[Any, ...]
"""A sample of a batch, spelled out: its source, x, y, and (piece, document, begin) of its segments. Of rollouts a bin:
0, the samples in it, its ids, and its advantages."""
Step = tuple[list[Row], dict[str, Any]]
"""The rows of all ranks, in order, and the state that every rank has after them."""
LENGTHS = [26, 70, 17, 9]
"""Of the shards of plain/ and indexed/."""
DOCUMENTS = [3, 1, 7, 11, 40, 2, *[8] * 5, 18]
"""Tokens of those of indexed/."""
CHATS = [(number % 4 + 1, number * 5 % 13 + 1) for number in range(17)]
"""Letters of the user and of the assistant."""
_TOKENS = [user + assistant + 4 for user, assistant in CHATS]


EXPECTED_WARNINGS = [
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:.*random_offset moves none"),
    pytest.mark.filterwarnings("ignore:.*supervised tokens"),
    pytest.mark.filterwarnings("ignore:.*are in no row"),
    pytest.mark.filterwarnings("ignore:the mixture changes"),
]
"""What the streams of KINDS say of these caches: marks of a test."""


def build_caches(root, shift=0):
    """Build the caches of all streams below a folder; with a shift their content is another."""
    numbered(root / "plain", [*LENGTHS[:3], LENGTHS[3] + shift])
    numbered(root / "wide", [50, 33 + shift], "uint32")
    numbered(root / "indexed", [*LENGTHS[:3], LENGTHS[3] + shift])
    (root / "indexed/index").mkdir()
    np.save(root / "indexed/index/train_docs.npy", np.cumsum([0, *DOCUMENTS[:-1], DOCUMENTS[-1] + shift]))
    with_vocabulary(number_cache(root / "pretrain", 120, start=10 + 10 * shift), 60_000)
    chats = [
        [
            {"role": "user", "content": chr(97 + number) * user},
            {"role": "assistant", "content": chr(97 + number) * (assistant + shift)},
        ]
        for number, (user, assistant) in enumerate(CHATS)
    ]
    for name in ("chats", "bits"):
        build_sft(chats, root / name, tokenizer=ByteTokenizer(), val_frac=0, seed=0)
    give_bits(root / "bits", pad_id=7)
    rollouts(root / "rollouts", items=rollout_groups(shift, 16), val_frac=0)
    return root


@dataclass(frozen=True)
class Kind:
    """A stream of the table."""

    open: Callable[..., Any]
    """Called with the folder of `build_caches` and arguments."""
    units: list[int]
    """How many windows, pieces or samples an epoch of each source has, by the rules of docs/reading.md."""
    others: dict[str, Any] = field(default_factory=dict)
    """Arguments of another stream, each of which its state is refused for."""
    wrong: dict[str, Any] = field(default_factory=dict)
    """Arguments of its own that cannot be."""
    by_window: bool = False
    """Its units are whole rows, though it knows segments."""
    moves: bool = False
    """Its windows are others in each epoch."""


def _over(stream, folder, root, /, **arguments):
    return stream(root / folder, **arguments)


def _rollouts(root, /, *, global_batch_size=1, drop_last=False, **arguments):
    """Open the one stream whose step is a bin for each rank."""
    return RolloutStream(root / "rollouts", **{"max_tokens": 40, **arguments})


def _mixture(sources, weights, root, /, **arguments):
    own = {key: arguments.pop(key) for key in ("seed", "drop_last", "block_size") if key in arguments}
    own = {"when_exhausted": arguments.pop("epochs") or "repeat", "block_size": 9, **own}
    weights = arguments.pop("weights", weights)
    return MixtureStream([open(root, seed=0, **arguments) for open in sources], weights, **own)


def _cut(lengths, T):
    """How many pieces of at most T tokens there are."""
    return sum(-(-length // T) for length in lengths)


_windows = partial(_over, EpochStream, "plain/train", T=4)
_cached = partial(_over, EpochStream, "pretrain/train", T=3, io="pread")
_wide = partial(_over, EpochStream, "wide/train", T=4, dtype="uint32")
_documents = partial(_over, EpochStream, "indexed/train", T=4, documents=True)
_chats = partial(_over, SFTStream, "chats", T=6, over_length="split")
_bits = partial(_over, SFTStream, "bits", T=6, over_length="split")
_packed = partial(_over, PackedStream, "indexed", T=12)
_shards = partial(_windows, order="shards", open_shards=3)
_OF_WINDOWS = {"others": {"seed": 1, "T": 5, "random_offset": True}, "wrong": {"random_offset": 1, "documents": 1}}
_OF_CHATS = {"others": {"seed": 1, "T": 7, "over_length": "drop", "require_targets": True}}
_OF_CHATS |= {"wrong": {"over_length": "cut", "require_targets": 1, "split": "test"}}
_OF_PACKED = {"others": {"seed": 1, "T": 11, "over_length": "drop"}}
_OF_PACKED |= {"wrong": {"over_length": "wrap", "split": "test"}}
_OF_MIXTURES = {
    "others": {"seed": 1, "T": 5, "block_size": 8, "weights": [2, 1], "random_offset": True},
    "wrong": {"block_size": 0},
}
_OF_ROLLOUTS = {"others": {"seed": 1, "max_tokens": 41, "oversize": "own_bin"}, "wrong": {"oversize": "cut"}}
KINDS = {
    "windows": Kind(_windows, [6 + 17 + 4 + 2], **_OF_WINDOWS),
    "windows of a cache": Kind(_cached, [13 * 3], **_OF_WINDOWS),
    "wide windows": Kind(_wide, [12 + 8], **_OF_WINDOWS),
    "offset windows": Kind(partial(_windows, T=5, random_offset=True), [5 + 13 + 3 + 1], moves=True),
    "documents": Kind(_documents, [29], by_window=True),
    "offset documents": Kind(
        partial(_documents, T=5, random_offset=True, io="pread"), [22], by_window=True, moves=True
    ),
    "windows of shards": Kind(_shards, [29], others={"seed": 1, "T": 5, "open_shards": 2}, wrong={"open_shards": 0}),
    "offset documents of shards": Kind(
        partial(_documents, T=5, random_offset=True, order="shards", open_shards=1), [22], by_window=True, moves=True
    ),
    "chats": Kind(partial(_chats, over_length="truncate"), [17], **_OF_CHATS),
    "chats in windows": Kind(_chats, [_cut([tokens - 1 for tokens in _TOKENS], 6)]),
    "short chats": Kind(
        partial(_chats, T=12, over_length="drop", require_targets=True, io="pread"),
        [sum(tokens <= 13 for tokens in _TOKENS)],
    ),
    "chats with bits": Kind(_bits, [_cut([tokens - 1 for tokens in _TOKENS], 6)], **_OF_CHATS),
    "packed": Kind(_packed, [_cut(DOCUMENTS, 12)], **_OF_PACKED),
    "packed chats": Kind(partial(_over, PackedStream, "chats", T=16, over_length="truncate"), [17], **_OF_PACKED),
    "packed chats with bits": Kind(partial(_over, PackedStream, "bits", T=9, io="pread"), [_cut(_TOKENS, 9)]),
    "mixture": Kind(partial(_mixture, (_windows, partial(_cached, T=4)), [1, 2]), [29, 27], **_OF_MIXTURES),
    "mixture of shards": Kind(
        partial(_mixture, (_shards, partial(_chats, T=4, order="shards"), _windows), [1, 1, 2]),
        [29, _cut([tokens - 1 for tokens in _TOKENS], 4), 29],
    ),
    "wide mixture": Kind(partial(_mixture, (_wide, _wide), [2, 1]), [20, 20]),
    "staged mixture": Kind(
        partial(_mixture, (_windows, partial(_wide, random_offset=True)), [(0, [3, 1]), (20, [1, 1])]),
        [29, 20],
        moves=True,
    ),
    "mixture of kinds": Kind(
        partial(_mixture, (partial(_windows, T=12), partial(_chats, T=12), _packed), [2, 1, 1]),
        [2 + 5 + 1, _cut([tokens - 1 for tokens in _TOKENS], 12), _cut(DOCUMENTS, 12)],
    ),
    "rollouts": Kind(_rollouts, [38], **_OF_ROLLOUTS),
    "rollouts in bins of their own": Kind(partial(_rollouts, max_tokens=6, oversize="own_bin"), [38]),
}


def opened(kind, root, **changed):
    """Open a stream of two epochs of seed 0, in batches of 6 where it has batches."""
    return KINDS[kind].open(root, **{"global_batch_size": 6, "seed": 0, "epochs": 2, **changed})


def ranks_of(kind, root, steps=None, *, world=1, state=None, **changed):
    """Take some steps with all ranks of a stream, each of its own; None: to the end. Returns the batches of each rank.

    state: continue there, in JSON as it is saved.
    """
    ranks = []
    for rank in range(world):
        stream = opened(kind, root, rank=rank, world_size=world, **changed)
        if state is not None:
            stream.load_state_dict(json.loads(json.dumps(state)))
        ranks.append(list(islice(stream, steps)))
    return ranks


def joined(ranks):
    """Check that all ranks have as many batches and the same states, and put them together."""
    assert len({len(batches) for batches in ranks}) == 1, "ranks yield unequally many batches"
    steps = []
    for batches in zip(*ranks, strict=True):
        assert all(batch.state == batches[0].state for batch in batches), "ranks differ in their state"
        steps.append(([row for batch in batches for row in rows_of(batch)], batches[0].state))
    return steps


def run(kind, root, steps=None, **changed):
    """Take some steps of a stream with all its ranks, as `ranks_of`."""
    return joined(ranks_of(kind, root, steps, **changed))


def told(batches):
    """Spell out the batches of one rank."""
    return [(rows_of(batch), batch.state) for batch in batches]


def rows_of(batch):
    """Spell out the rows of a batch."""
    if isinstance(batch, RolloutBin):
        ids, advantages = batch.forest.input_ids.tolist(), batch.advantages.tolist()
        return [] if batch.is_filler else [(0, batch.samples.tolist(), ids, advantages)]
    count, T = batch.x.shape
    segments = [[] for _ in range(count)]
    if batch.cu_seqlens is not None:
        begins = batch.cu_seqlens[:-1].tolist()
        for begin, piece, document in zip(begins, batch.piece_ids.tolist(), batch.documents.tolist(), strict=True):
            segments[begin // T].append((piece, document, begin % T))
    sources = [0] * count if batch.source is None else batch.source.tolist()
    return list(zip(sources, batch.x.tolist(), batch.y.tolist(), segments, strict=True))


def units_of(kind, rows):
    """Return the windows, pieces or samples of each source in some rows, in order."""
    units = [[] for _ in KINDS[kind].units]
    for source, x, _, segments in rows:
        if kind.startswith("rollouts"):
            units[source] += x
            continue
        pieces = [piece for piece, _, _ in segments if piece >= 0]
        units[source] += [tuple(x)] if KINDS[kind].by_window or not pieces else pieces
    return units


_BATCH = ["x", "y", "source", "cu_seqlens", "piece_ids", "documents", "position_ids", "max_seqlen"]
_BIN = ["groups", "samples", "fields", "sample_fields", "loss_tokens", "step_loss_tokens", "step_samples"]
_FOREST = ["input_ids", "position_ids", "subtree_end", "node_starts", "node_lengths", "node_parents", "sample_ends"]
_FOREST += ["sample_offsets", "loss_mask", "completion_starts"]


def spelled(value):
    """Yield bytes that are the same on every machine: integers of 64 bits, and floats exactly."""
    if isinstance(value, torch.Tensor):
        array = value.numpy()
        yield f"{list(array.shape)}".encode()
        yield array.astype("<f8" if array.dtype.kind == "f" else "<i8").tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield key.encode()
            yield from spelled(value[key])
    else:
        yield f"{value};".encode()


def hashed(batches):
    """Return 16 digits of the sha256 of all that batches hold, but their states."""
    digest = hashlib.sha256()
    for batch in batches:
        of_bin = hasattr(batch, "forest")
        parts = [(batch, _BIN), (batch.forest, _FOREST)] if of_bin else [(batch, _BATCH)]
        for part, names in parts:
            for name in names:
                for some in spelled(getattr(part, name)):
                    digest.update(some)
    return digest.hexdigest()[:16]
