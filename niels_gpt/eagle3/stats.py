"""What is in an EAGLE-3 cache, in numbers: tokens, loss, padding, lengths, mass, entropy, norms."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.eagle3.layout import shard_path
from niels_gpt.eagle3.opened import Opened, described_by, open_cache, tables_of
from niels_gpt.eagle3.row_checks import AUX, PROBS, VALUES

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
MAX_SLOTS = 2000
"""Slots whose distribution and hidden states are looked at: the rest of a cache's floats is not read."""


@dataclass(frozen=True)
class Stats:
    """Numbers of one cache."""

    num_shards: int
    seq_length: int
    is_dense: bool
    """Whether all probabilities are stored."""
    lengths: NDArray[np.int64]
    """Tokens of each sample, padding left out [n]."""
    supervised: NDArray[np.int64]
    """Slots of each sample whose loss mask is 1 [n]."""
    positions: NDArray[np.int64]
    """Slots of each sample whose position mask is true [n]: what a draft is trained on."""
    token_bytes: int
    """Of one slot of a shard: without padding, and without the embeddings."""
    shard_bytes: int
    """Of all shards, holes counted as if they were full."""
    disk_bytes: int
    """What they take of the disk."""
    kept_mass: list[float] | None
    """Of each shard: the mean over its positions of the share of the draft distribution that the top k keep; nan where
    it has none. None in a dense cache, and where the receipts do not tell."""
    draft_mass: list[float] | None
    """Of each shard: the mean over the slots with loss of the share of the target's distribution that falls into the
    draft's vocabulary. None where the receipts do not tell."""
    mean_kept_mass: float | None
    mean_draft_mass: float | None
    entropy: NDArray[np.float64]
    """Of the stored distribution, in nats, at no more than MAX_SLOTS positions."""
    norms: dict[int, float]
    """Block -> mean length of its hidden states at these positions."""

    @property
    def tokens(self) -> int:
        """Of all samples, padding left out."""
        return int(self.lengths.sum())

    @property
    def bytes_per_token(self) -> float:
        """`shard_bytes`, padding included, by the tokens without it."""
        return self.shard_bytes / max(1, self.tokens)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON has it, with percentiles in place of the lists of numbers."""
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
            "bytes_per_token": self.bytes_per_token,
            "lengths": percentiles(self.lengths),
            "kept_mass": self.mean_kept_mass,
            "draft_mass": self.mean_draft_mass,
            "entropy_nats": {"slots": len(self.entropy), **percentiles(self.entropy)},
            "aux_norms": {str(layer): norm for layer, norm in self.norms.items()},
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return everything as pairs of a name and a value for people."""
        said = self.as_json()
        mass = {
            name: "not known" if said[name] is None else f"{said[name]:.4f}" for name in ("kept_mass", "draft_mass")
        }
        if self.is_dense:
            mass["kept_mass"] = "all of it"
        norms = ", ".join(f"block {layer} {norm:.3g}" for layer, norm in self.norms.items()) or "none"
        return [
            ("samples", f"{said['samples']:,} in {self.num_shards:,} shards"),
            ("tokens", f"{self.tokens:,} ({said['padding_share']:.1%} of the slots are padding)"),
            ("with loss", f"{said['supervised_tokens']:,} ({said['supervised_share']:.1%} of the tokens)"),
            ("positions", f"{said['positions']:,} ({said['positions_of_supervised']:.1%} of those with loss)"),
            ("bytes of a token", f"{self.token_bytes:,}, without padding and embeddings"),
            ("bytes of the files", f"{self.shard_bytes:,} (of the shards, padding included)"),
            ("on disk, without holes", f"{self.disk_bytes:,} (of the shards)"),
            ("tokens of a sample", _spread(said["lengths"], ",.0f")),
            ("mass in the draft vocabulary", mass["draft_mass"]),
            ("mass kept by top k", mass["kept_mass"]),
            (f"entropy at {len(self.entropy):,} positions, nats", _spread(percentiles(self.entropy), ".3f")),
            ("mean norm of the hidden states", norms),
        ]

    def share(self, count: int) -> float:
        """Return a number of slots as a share of the tokens."""
        return count / max(1, self.tokens)


def percentiles(values: NDArray[Any]) -> dict[str, float]:
    """Return mean and percentiles by name, such as p50; {} of nothing."""
    if not len(values):
        return {}
    found = np.percentile(values, PERCENTILES).tolist()
    return {"mean": float(values.mean()), **{f"p{at}": float(v) for at, v in zip(PERCENTILES, found, strict=True)}}


def _spread(found: dict[str, float], form: str) -> str:
    return ", ".join(f"{name} {format(value, form)}" for name, value in found.items()) or "none"


def stats(
    cache: Path, *, seed: int = 0, progress: Callable[[int, int], None] | None = None, follow_links: bool = False
) -> Stats:
    """Return the numbers of a cache. All ids and masks are read, of the floats no more than MAX_SLOTS slots.

    seed: of the choice of the slots. progress: is told the shards that were read, and all of them.
    follow_links: read files that are links, as in a snapshot of the Hugging Face hub.
    Raises: FileNotFoundError, CacheError where the cache is not whole.
    """
    with described_by(cache):
        return _stats(open_cache(cache, follow_links=follow_links), seed, progress)


def _stats(opened: Opened, seed: int, progress: Callable[[int, int], None] | None) -> Stats:
    counts: list[NDArray[np.int64]] = []
    for shard in range(opened.num_shards):
        counts.append(_counts(tables_of(opened, shard)))
        if progress is not None:
            progress(shard + 1, opened.num_shards)
    lengths, supervised, positions = np.concatenate([np.zeros((3, 0), np.int64), *counts], axis=1)
    sizes = [os.stat(shard_path(opened.folder, shard)) for shard in range(opened.num_shards)]
    kept, draft = _mass(opened, "kept_mass", "positions"), _mass(opened, "draft_mass", "supervised")
    entropy, norms = _of_some_slots(opened, positions, seed)
    return Stats(
        num_shards=opened.num_shards,
        seq_length=opened.layout.seq_length,
        is_dense=not opened.layout.topk,
        lengths=lengths,
        supervised=supervised,
        positions=positions,
        token_bytes=opened.layout.token_bytes,
        shard_bytes=sum(size.st_size for size in sizes),
        disk_bytes=sum(size.st_blocks * 512 for size in sizes),
        kept_mass=kept and kept[0],
        draft_mass=draft and draft[0],
        mean_kept_mass=kept and kept[1],
        mean_draft_mass=draft and draft[1],
        entropy=entropy,
        norms=norms,
    )


def _counts(tables: dict[str, torch.Tensor]) -> NDArray[np.int64]:
    """Return, for each sample of a shard, its tokens, its slots with loss and its positions: [3, n]."""
    attended, supervised = tables["attention_mask"].sum(1), (tables["loss_mask"] == 1).sum(1)
    return torch.stack([attended, supervised, tables["position_mask"].sum((1, 2))]).numpy()


def _mass(cache: Opened, name: str, by: str) -> tuple[list[float], float] | None:
    """Return a mass of each shard and of all, by the receipts; None unless all of them have it."""
    found = []
    for shard in range(cache.num_shards):
        facts = (cache.receipt(shard) or {"facts": {}})["facts"]
        if facts.get(name) is None or not isinstance(facts.get(by), int):
            return None
        found.append((float(facts[name]), int(facts[by])))
    slots = sum(count for _, count in found)
    if not slots:
        return None
    return [mass / count if count else math.nan for mass, count in found], sum(mass for mass, _ in found) / slots


def _of_some_slots(
    cache: Opened, positions: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.float64], dict[int, float]]:
    """Return the entropy at some positions, and the mean norm of each block's hidden states there."""
    entropies: list[float] = []
    sums = np.zeros(len(cache.manifest["aux_layer_ids"]))
    for tables, row, slots in _drawn(cache, positions, seed):
        name = VALUES if VALUES in tables else PROBS
        probs = tables[name][row, slots].double()
        entropies += torch.special.entr(probs).sum(-1).tolist()
        states = tables[AUX][row, slots].double().view(len(slots), len(sums), -1)
        sums += states.norm(dim=-1).sum(0).numpy()
    layers = cache.manifest["aux_layer_ids"]
    mean = (sums / max(1, len(entropies))).tolist()
    return np.array(entropies), dict(zip(layers, mean, strict=True)) if entropies else {}


def _drawn(
    cache: Opened, positions: NDArray[np.int64], seed: int
) -> Iterator[tuple[dict[str, torch.Tensor], int, torch.Tensor]]:
    """Yield the tables, the row and the drawn slots of each sample that has any, in the order of the cache."""
    ends = np.cumsum(positions)
    total = int(ends[-1]) if len(ends) else 0
    if total <= MAX_SLOTS:
        chosen = np.arange(total)
    else:
        chosen = np.unique(torch.randint(total, (MAX_SLOTS,), generator=torch.Generator().manual_seed(seed)).numpy())
    of = np.searchsorted(ends, chosen, side="right")
    opened, tables = -1, {}
    for number in np.unique(of).tolist():
        shard, row = divmod(number, cache.shard_size)
        if shard != opened:
            opened, tables = shard, tables_of(cache, shard)
        within = torch.from_numpy(chosen[of == number] - (ends[number] - positions[number]))
        yield tables, row, tables["position_mask"][row, :, 0].nonzero()[:, 0][within]
