"""`stats` of versions 1 and 2."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.display.numbers import size_text
from niels_gpt.eagle3.format.layout import shard_path
from niels_gpt.eagle3.inspect.figures import Mass, Stats, disk_rows, drawn, mass_text
from niels_gpt.eagle3.inspect.published.opened import AUX, PROBS, VALUES, PublishedCache
from niels_gpt.progress import Progress


@dataclass(frozen=True, kw_only=True)
class PublishedStats(Stats):
    """Numbers of a cache of version 1 or 2."""

    seq_length: int
    is_dense: bool
    """Whether all probabilities are stored."""
    token_bytes: int
    """Bytes of one slot of a shard."""

    @property
    def padding_share(self) -> float:
        """Slots behind the tokens, as a share of all."""
        return 1 - self.tokens / max(1, len(self.lengths) * self.seq_length)

    def sizes(self) -> dict[str, Any]:
        """Return the sizes, ready for JSON."""
        return {
            "padding_share": self.padding_share,
            "shard_bytes": self.shard_bytes,
            "disk_bytes": self.disk_bytes,
            "token_bytes": self.token_bytes,
            "bytes_per_token": self.shard_bytes / max(1, self.tokens),
        }

    def size_rows(self) -> list[tuple[str, str]]:
        """Return the sizes as pairs of a name and a text."""
        token = ("size of a token", f"{size_text(self.token_bytes)}, without padding and embeddings")
        return [token, *disk_rows(self, ", padding included")]

    def tokens_note(self) -> str:
        """Return the share of padding."""
        return f" ({self.padding_share:.1%} of the slots are padding)"

    def mass_rows(self) -> list[tuple[str, str]]:
        """Return the mass in the draft's vocabulary, and what the top k keep of it."""
        return [
            *super().mass_rows(),
            ("mass kept by top k", "all of it" if self.is_dense else mass_text(self.kept_mass)),
        ]


def published_stats(cache: PublishedCache, seed: int, progress: Progress | None) -> PublishedStats:
    """Return the numbers of a cache, as `stats.stats`."""
    counts = [np.zeros((3, 0), np.int64)]
    for shard in range(cache.num_shards):
        counts.append(_counts(cache.tables(shard)))
        if progress is not None:
            progress(shard + 1, shard + 1, cache.num_shards)
    lengths, supervised, positions = np.concatenate(counts, axis=1)
    sizes = [os.stat(shard_path(cache.folder, shard)) for shard in range(cache.num_shards)]
    entropy, norms = _entropy_and_norms(cache, positions, seed)
    return PublishedStats(
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
    chosen = drawn(int(ends[-1]) if len(ends) else 0, seed)
    samples = np.searchsorted(ends, chosen, side="right")
    mapped, tables = -1, {}
    for number in np.unique(samples).tolist():
        shard, row = divmod(number, cache.shard_size)
        if shard != mapped:
            mapped, tables = shard, cache.tables(shard)
        within = torch.from_numpy(chosen[samples == number] - (ends[number] - positions[number]))
        yield tables, row, tables["position_mask"][row, :, 0].nonzero()[:, 0][within]
