"""Training and evaluation batches from finished caches: every window exactly once, resumable with other ranks.

A run resumes in exactly the same order, even with other ranks, DataLoader workers or batch sizes.

    stream.py        Stream: cuts numbered samples into batches, for any ranks and workers; its position and state
    epochs.py        Epochs: each unit of a split exactly once an epoch; EpochStream: windows of a pretrain split
    examples.py      SFTStream: examples of an sft split, or their windows
    mixture.py       MixtureStream: draws from several streams as shares.py says; what happens when one is exhausted
    shares.py        weights -> how many samples of a block each source gets; how remainders carry over; their order
    stretches.py     the order "shards": random stretches of shards, and random units of a few of them at a time
    permutation.py   the pseudo-random order of an epoch, in O(1) memory
    state.py         what a state holds, which states are refused, and what a changed mixture takes over from one
    rows.py          rows read for several batches at once, and cut into batches
    batch.py         what a stream yields: tokens, targets, and the segments that belong together
    packing/         rows without padding: which pieces share a row, and how attention keeps them apart
    prefetching.py   prefetch: batches made ahead in a thread, and copied to the GPU
    random_access.py RandomAccess: rows of a stream by number, for trainers that decide who reads which
    evaluation.py    iter_eval: every token of a split once, in order; bits_per_byte

docs/reading.md shows their use. The names below are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niels_gpt.sampling.batch import Batch
    from niels_gpt.sampling.epochs import EpochStream
    from niels_gpt.sampling.evaluation import bits_per_byte, iter_eval
    from niels_gpt.sampling.examples import SFTStream
    from niels_gpt.sampling.mixture import MixtureStream
    from niels_gpt.sampling.packing.masks import block_causal_mask
    from niels_gpt.sampling.packing.stream import PackedStream
    from niels_gpt.sampling.prefetching import prefetch
    from niels_gpt.sampling.random_access import RandomAccess

_HOMES = {
    "Batch": "niels_gpt.sampling.batch",
    "EpochStream": "niels_gpt.sampling.epochs",
    "MixtureStream": "niels_gpt.sampling.mixture",
    "PackedStream": "niels_gpt.sampling.packing.stream",
    "RandomAccess": "niels_gpt.sampling.random_access",
    "SFTStream": "niels_gpt.sampling.examples",
    "bits_per_byte": "niels_gpt.sampling.evaluation",
    "block_causal_mask": "niels_gpt.sampling.packing.masks",
    "iter_eval": "niels_gpt.sampling.evaluation",
    "prefetch": "niels_gpt.sampling.prefetching",
}

__all__ = [
    "Batch",
    "EpochStream",
    "MixtureStream",
    "PackedStream",
    "RandomAccess",
    "SFTStream",
    "bits_per_byte",
    "block_causal_mask",
    "iter_eval",
    "prefetch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
