"""Every window exactly once, in an order that any change of ranks, workers or batch size continues exactly.

    permutation.py   the pseudo-random order of an epoch, of O(1) memory
    stream.py        Batch, and what all streams share: ranks, workers, state
    state.py         what may be a state: checks of what anybody may have written
    epochs.py        EpochStream: the windows of one split, epoch after epoch
    mixture.py       MixtureStream: several streams by weights
    shares.py        how many samples of each source, and which places are whose
    evaluation.py    iter_eval: every token of a split once, in order; bits_per_byte

docs/reading.md shows them in use. The names below are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niels_gpt.sampling.epochs import EpochStream
    from niels_gpt.sampling.evaluation import bits_per_byte, iter_eval
    from niels_gpt.sampling.mixture import MixtureStream
    from niels_gpt.sampling.stream import Batch

_HOMES = {
    "Batch": "niels_gpt.sampling.stream",
    "EpochStream": "niels_gpt.sampling.epochs",
    "MixtureStream": "niels_gpt.sampling.mixture",
    "bits_per_byte": "niels_gpt.sampling.evaluation",
    "iter_eval": "niels_gpt.sampling.evaluation",
}

__all__ = ["Batch", "EpochStream", "MixtureStream", "bits_per_byte", "iter_eval"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
