"""`stats`: a cache in numbers: tokens, loss, padding, lengths, probability mass, entropy, norms."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.display.numbers import count_text, number_of, size_text
from niels_gpt.eagle3.format.layout import shard_path
from niels_gpt.eagle3.inspect.open_cache import refuse_malformed
from niels_gpt.eagle3.inspect.opening import open_cache
from niels_gpt.eagle3.inspect.published.opened import AUX, PROBS, VALUES, PublishedCache
from niels_gpt.progress import Progress

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
MAX_SLOTS = 2000
"""Slots, at most, whose distribution and hidden states are read; no other floats of a cache are."""


class Mass(NamedTuple):
    """A share of the probability mass."""

    by_shard: list[float]
    """The mean over the slots of each shard; nan for a shard without such slots."""
    mean: float
    """The mean over the slots of the cache."""


@dataclass(frozen=True)
class Stats:
    """Numbers of one cache."""

    num_shards: int
    seq_length: int
    is_dense: bool
    """Whether all probabilities are stored."""
    lengths: NDArray[np.int64]
    """Tokens of each sample, without padding [n]."""
    supervised: NDArray[np.int64]
    """Slots of each sample whose loss mask is 1 [n]."""
    positions: NDArray[np.int64]
    """Slots of each sample whose position mask is true [n]: what a draft is trained on."""
    token_bytes: int
    """Bytes of one slot of a shard."""
    shard_bytes: int
    """Sizes of all shards, padding and holes included."""
    disk_bytes: int
    """Disk space of all shards, without holes."""
    kept_mass: Mass | None
    """Over the positions: the share of the draft distribution that the top k keep. None in a dense cache, and where a
    receipt does not have it."""
    draft_mass: Mass | None
    """Over the slots with loss: the share of the target's distribution that falls into the draft's vocabulary. None
    where a receipt does not have it."""
    entropy: NDArray[np.float64]
    """Of the stored distribution, in nats, at no more than MAX_SLOTS positions."""
    norms: dict[int, float]
    """Block -> mean length of its hidden states at these positions."""

    @property
    def tokens(self) -> int:
        """Tokens of all samples, without padding."""
        return int(self.lengths.sum())

    def share(self, count: int) -> float:
        """Return a number of slots as a share of the tokens."""
        return count / max(1, self.tokens)

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
            "padding_share": 1 - self.tokens / max(1, len(self.lengths) * self.seq_length),
            "shard_bytes": self.shard_bytes,
            "disk_bytes": self.disk_bytes,
            "token_bytes": self.token_bytes,
            "bytes_per_token": self.shard_bytes / max(1, self.tokens),
            "lengths": percentiles(self.lengths),
            "kept_mass": self.kept_mass and self.kept_mass.mean,
            "draft_mass": self.draft_mass and self.draft_mass.mean,
            "entropy_nats": {"slots": len(self.entropy), **percentiles(self.entropy)},
            "aux_norms": {str(layer): norm for layer, norm in self.norms.items()},
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return everything as pairs of a name and a text."""
        values = self.as_json()
        draft, kept = (f"{mass.mean:.4f}" if mass else "not known" for mass in (self.draft_mass, self.kept_mass))
        norms = ", ".join(f"block {layer} {norm:.3g}" for layer, norm in self.norms.items()) or "none"
        return [
            ("samples", f"{count_text(values['samples'])} in {number_of(self.num_shards, 'shard')}"),
            ("tokens", f"{count_text(self.tokens)} ({values['padding_share']:.1%} of the slots are padding)"),
            ("supervised", f"{count_text(self.supervised.sum())} ({values['supervised_share']:.1%} of the tokens)"),
            ("positions", f"{count_text(values['positions'])} ({values['positions_of_supervised']:.1%} of those)"),
            ("size of a token", f"{size_text(self.token_bytes)}, without padding and embeddings"),
            ("size of the shards", f"{size_text(self.shard_bytes)}, padding included"),
            ("on disk", f"{size_text(self.disk_bytes)}: holes take no room"),
            ("tokens of a sample", _spread(values["lengths"], ",.0f")),
            ("mass in the draft vocabulary", draft),
            ("mass kept by top k", "all of it" if self.is_dense else kept),
            (
                "entropy, nats",
                f"{_spread(percentiles(self.entropy), '.3f')}; of {number_of(len(self.entropy), 'position')}",
            ),
            ("mean norm of the hidden states", norms),
        ]


def percentiles(values: NDArray[Any]) -> dict[str, float]:
    """Return mean and percentiles by name, such as p50; {} without values."""
    if not len(values):
        return {}
    points = zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True)
    return {"mean": float(values.mean()), **{f"p{at}": float(value) for at, value in points}}


def _spread(numbers: dict[str, float], form: str) -> str:
    return ", ".join(f"{name} {format(value, form)}" for name, value in numbers.items()) or "none"


@refuse_malformed
def stats(path: Path, *, seed: int = 0, progress: Progress | None = None, follow_links: bool = False) -> Stats:
    """Return the numbers of a cache. All ids and masks are read; of the floats at most MAX_SLOTS slots.

    seed: of the choice of the slots. progress: its items and units are shards.
    follow_links: read files that are links, as in a snapshot of the Hugging Face hub.
    Raises: FileNotFoundError, CacheError where the cache is not whole.
    """
    cache = open_cache(path, follow_links=follow_links)
    counts = [np.zeros((3, 0), np.int64)]
    for shard in range(cache.num_shards):
        counts.append(_counts(cache.tables(shard)))
        if progress is not None:
            progress(shard + 1, shard + 1, cache.num_shards)
    lengths, supervised, positions = np.concatenate(counts, axis=1)
    sizes = [os.stat(shard_path(cache.folder, shard)) for shard in range(cache.num_shards)]
    entropy, norms = _entropy_and_norms(cache, positions, seed)
    return Stats(
        num_shards=cache.num_shards,
        seq_length=cache.layout.seq_length,
        is_dense=not cache.layout.topk,
        lengths=lengths,
        supervised=supervised,
        positions=positions,
        token_bytes=cache.layout.token_bytes,
        shard_bytes=sum(size.st_size for size in sizes),
        disk_bytes=sum(size.st_blocks * 512 for size in sizes),
        kept_mass=_mass(cache, "kept_mass", "positions"),
        draft_mass=_mass(cache, "draft_mass", "supervised"),
        entropy=entropy,
        norms=norms,
    )


def _counts(tables: dict[str, torch.Tensor]) -> NDArray[np.int64]:
    """Return the tokens, slots with loss and positions of each sample of a shard: [3, n]."""
    attended, supervised = tables["attention_mask"].sum(1), (tables["loss_mask"] == 1).sum(1)
    return torch.stack([attended, supervised, tables["position_mask"].sum((1, 2))]).numpy()


def _mass(cache: PublishedCache, name: str, by: str) -> Mass | None:
    """Return a probability mass of each shard and of all, from the receipts; None unless all of them have it."""
    masses: list[tuple[float, int]] = []
    for shard in range(cache.num_shards):
        sums = (cache.receipt(shard) or {"facts": {}})["facts"]
        if sums.get(name) is None or not isinstance(sums.get(by), int):
            return None
        masses.append((float(sums[name]), int(sums[by])))
    slots = sum(count for _, count in masses)
    if not slots:
        return None
    by_shard = [mass / count if count else math.nan for mass, count in masses]
    return Mass(by_shard, sum(mass for mass, _ in masses) / slots)


def _entropy_and_norms(
    cache: PublishedCache, positions: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.float64], dict[int, float]]:
    """Return the entropy at some positions, and the mean norm of each block's hidden states there."""
    entropies: list[float] = []
    layers = cache.manifest["aux_layer_ids"]
    sums = np.zeros(len(layers))
    for tables, row, slots in _drawn(cache, positions, seed):
        probs = tables[VALUES if VALUES in tables else PROBS][row, slots].double()
        entropies += torch.special.entr(probs).sum(-1).tolist()
        states = tables[AUX][row, slots].double().view(len(slots), len(layers), -1)
        sums += states.norm(dim=-1).sum(0).numpy()
    mean = (sums / max(1, len(entropies))).tolist()
    return np.array(entropies), dict(zip(layers, mean, strict=True)) if entropies else {}


def _drawn(
    cache: PublishedCache, positions: NDArray[np.int64], seed: int
) -> Iterator[tuple[dict[str, torch.Tensor], int, torch.Tensor]]:
    """Yield the tables, the row and the drawn slots of each sample that has any, in the order of the cache."""
    ends = np.cumsum(positions)
    total = int(ends[-1]) if len(ends) else 0
    if total <= MAX_SLOTS:
        drawn = np.arange(total)
    else:
        drawn = np.unique(torch.randint(total, (MAX_SLOTS,), generator=torch.Generator().manual_seed(seed)).numpy())
    samples = np.searchsorted(ends, drawn, side="right")
    mapped, tables = -1, {}
    for number in np.unique(samples).tolist():
        shard, row = divmod(number, cache.shard_size)
        if shard != mapped:
            mapped, tables = shard, cache.tables(shard)
        within = torch.from_numpy(drawn[samples == number] - (ends[number] - positions[number]))
        yield tables, row, tables["position_mask"][row, :, 0].nonzero()[:, 0][within]
