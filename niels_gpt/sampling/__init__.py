"""Training and evaluation batches from finished caches: every window exactly once, resumable with other ranks.

A run resumes in exactly the same order, even with other ranks, DataLoader workers or batch sizes.

    batch.py         what a stream yields: tokens, targets, and the segments that belong together
    stream.py        where training samples are cut into batches; which rank and worker reads which
    position.py      the position of a stream, with any number of ranks and workers; state_dict
    state.py         what a state holds, its checksum, and which states are refused
    epochs.py        EpochStream: which window of a split a sample is, epoch after epoch
    examples.py      SFTStream: which example of an sft split a sample is, epoch after epoch
    permutation.py   the pseudo-random order of an epoch, in O(1) memory
    mixture.py       MixtureStream: draws from several streams as shares.py says; what happens when one is exhausted
    changes.py       what a mixture with other sources or weights takes over from the state of a run
    shares.py        weights -> how many samples of a block each source gets; how remainders carry over; their order
    packing/         rows without padding: which pieces share a row, and how attention keeps them apart
    prefetching.py   prefetch: batches made ahead in a thread, and copied to the GPU
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

_HOMES = {
    "Batch": "niels_gpt.sampling.batch",
    "EpochStream": "niels_gpt.sampling.epochs",
    "MixtureStream": "niels_gpt.sampling.mixture",
    "PackedStream": "niels_gpt.sampling.packing.stream",
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
