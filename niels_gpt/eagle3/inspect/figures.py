"""What `stats` reports of every form: counts, lengths, mass, entropy and norms, as JSON and as a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.display.numbers import count_text, number_of, size_text

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
MAX_SLOTS = 2000
"""Slots, at most, whose distribution and hidden states are read; no other floats of a cache are."""


class Mass(NamedTuple):
    """A share of the probability mass."""

    by_shard: list[float]
    """The mean over the slots of each shard; nan for a shard without such slots."""
    mean: float
    """The mean over the slots of the cache."""


@dataclass(frozen=True, kw_only=True)
class Stats(ABC):
    """Numbers of one cache."""

    num_shards: int
    lengths: NDArray[np.int64]
    """Tokens of each sample, without padding [n]."""
    supervised: NDArray[np.int64]
    """Slots of each sample whose shifted loss mask is 1 [n]."""
    positions: NDArray[np.int64]
    """Slots of each sample whose position mask is true [n]: what a draft is trained on."""
    shard_bytes: int
    """Sizes of all shards, padding and holes included."""
    disk_bytes: int
    """Disk space of all shards, without holes."""
    kept_mass: Mass | None = None
    """Over the positions: the share of the draft distribution that the top k keep. None where all of it is stored, and
    where a receipt does not have it."""
    draft_mass: Mass | None
    """Over slots with loss: the share of the target's distribution that falls into the draft's vocabulary. None where
    it is not known."""
    entropy: NDArray[np.float64]
    """Of the distribution over the draft's vocabulary, in nats, at no more than MAX_SLOTS positions."""
    norms: dict[int, float]
    """Block -> mean length of its hidden states at these positions."""

    @property
    def tokens(self) -> int:
        """Tokens of all samples, without padding."""
        return int(self.lengths.sum())

    def share(self, count: int) -> float:
        """Return a number of slots as a share of the tokens."""
        return count / max(1, self.tokens)

    @abstractmethod
    def sizes(self) -> dict[str, Any]:
        """Return what the form says of its sizes, ready for JSON."""

    @abstractmethod
    def size_rows(self) -> list[tuple[str, str]]:
        """Return the same as pairs of a name and a text."""

    def as_json(self) -> dict[str, Any]:
        """Return everything ready for JSON, with percentiles in place of the lists of numbers."""
        return {
            "samples": len(self.lengths),
            "shards": self.num_shards,
            "tokens": self.tokens,
            "supervised_tokens": int(self.supervised.sum()),
            "supervised_share": self.share(int(self.supervised.sum())),
            "positions": int(self.positions.sum()),
            "position_share": self.share(int(self.positions.sum())),
            "positions_of_supervised": int(self.positions.sum()) / max(1, int(self.supervised.sum())),
            **self.sizes(),
            "lengths": percentiles(self.lengths),
            "kept_mass": self.kept_mass and self.kept_mass.mean,
            "draft_mass": self.draft_mass and self.draft_mass.mean,
            "entropy_nats": {"slots": len(self.entropy), **percentiles(self.entropy)},
            "aux_norms": {str(layer): norm for layer, norm in self.norms.items()},
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return everything as pairs of a name and a text."""
        values = self.as_json()
        norms = ", ".join(f"block {layer} {norm:.3g}" for layer, norm in self.norms.items()) or "none"
        return [
            ("samples", f"{count_text(values['samples'])} in {number_of(self.num_shards, 'shard')}"),
            ("tokens", f"{count_text(self.tokens)}{self.tokens_note()}"),
            ("supervised", f"{count_text(self.supervised.sum())} ({values['supervised_share']:.1%} of the tokens)"),
            ("positions", f"{count_text(values['positions'])} ({values['positions_of_supervised']:.1%} of those)"),
            *self.size_rows(),
            ("tokens of a sample", spread(values["lengths"], ",.0f")),
            *self.mass_rows(),
            (
                "entropy, nats",
                f"{spread(percentiles(self.entropy), '.3f')}; of {number_of(len(self.entropy), 'position')}",
            ),
            ("mean norm of the hidden states", norms),
        ]

    def tokens_note(self) -> str:
        """Return what is said behind the number of tokens."""
        return ""

    def mass_rows(self) -> list[tuple[str, str]]:
        """Return what is said of the probability mass, as pairs of a name and a text."""
        return [("mass in the draft vocabulary", mass_text(self.draft_mass))]


def mass_text(mass: Mass | None) -> str:
    """Return the mean of a mass as text."""
    return f"{mass.mean:.4f}" if mass else "not known"


def disk_rows(numbers: Stats, note: str) -> list[tuple[str, str]]:
    """Return the size of the shards and their disk space as pairs of a name and a text."""
    return [
        ("size of the shards", f"{size_text(numbers.shard_bytes)}{note}"),
        ("on disk", f"{size_text(numbers.disk_bytes)}: holes take no room"),
    ]


def percentiles(values: NDArray[Any]) -> dict[str, float]:
    """Return mean and percentiles by name, such as p50; {} without values."""
    if not len(values):
        return {}
    points = zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True)
    return {"mean": float(values.mean()), **{f"p{at}": float(value) for at, value in points}}


def spread(numbers: dict[str, float], form: str) -> str:
    """Return what `percentiles` returns as text. form: of a number, as in a format string."""
    return ", ".join(f"{name} {format(value, form)}" for name, value in numbers.items()) or "none"


def drawn(total: int, seed: int) -> NDArray[np.int64]:
    """Return at most MAX_SLOTS different numbers below `total`, rising; all where there are no more."""
    if total <= MAX_SLOTS:
        return np.arange(total)
    return np.unique(torch.randint(total, (MAX_SLOTS,), generator=torch.Generator().manual_seed(seed)).numpy())
