"""`stats` of the native form: rows and bytes by part, and the target's distributions by its head."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niels_gpt.display.numbers import count_text, size_text
from niels_gpt.eagle3.format.layout import shard_path
from niels_gpt.eagle3.format.native.fp8 import dequantized
from niels_gpt.eagle3.format.shards import MappedShard
from niels_gpt.eagle3.inspect.figures import Mass, Stats, disk_rows, drawn
from niels_gpt.eagle3.inspect.native.opened import NativeCache
from niels_gpt.eagle3.target import PART_VALUES
from niels_gpt.progress import Progress

_PARTS = {
    "ids": ("input_ids", "loss_bits", "token_starts", "aux_starts", "row_starts"),
    "aux": ("aux_hidden_states",),
    "scales": ("aux_scales",),
    "last hidden": ("last_hidden_states",),
    "targets": ("log_normalizers", "argmax_ids"),
}
"""Part -> its tensors in a shard."""


@dataclass(frozen=True, kw_only=True)
class NativeStats(Stats):
    """Numbers of a native cache."""

    aux_rows: int
    """Tokens whose auxiliary states are stored."""
    target_rows: int
    """Tokens with a target row: last hidden state, log-normalizer, argmax."""
    part_bytes: dict[str, float]
    """Bytes a token of the parts of the shards, headers left out."""
    weights_bytes: int
    """Size of the file with the target's weights."""
    aux_dtype: str

    def sizes(self) -> dict[str, Any]:
        """Return the sizes, ready for JSON."""
        return {
            "aux_rows": self.aux_rows,
            "aux_share": self.share(self.aux_rows),
            "target_rows": self.target_rows,
            "target_share": self.share(self.target_rows),
            "aux_dtype": self.aux_dtype,
            "shard_bytes": self.shard_bytes,
            "disk_bytes": self.disk_bytes,
            "weights_bytes": self.weights_bytes,
            "bytes_per_token": self.shard_bytes / max(1, self.tokens),
            "bytes_per_token_by_part": {**self.part_bytes, "weights": self.weights_bytes / max(1, self.tokens)},
        }

    def size_rows(self) -> list[tuple[str, str]]:
        """Return the sizes as pairs of a name and a text."""
        parts = ", ".join(f"{name} {size:,.1f}" for name, size in self.part_bytes.items() if size)
        weights = f"{size_text(self.weights_bytes)}, once; {self.weights_bytes / max(1, self.tokens):,.1f} B a token"
        fp8 = ", in fp8: off by 1/16 of a value, or by 2**-18 of its row's largest" * (self.aux_dtype == "fp8")
        return [
            ("auxiliary rows", f"{count_text(self.aux_rows)} ({self.share(self.aux_rows):.1%} of the tokens){fp8}"),
            ("target rows", f"{count_text(self.target_rows)} ({self.share(self.target_rows):.1%} of the tokens)"),
            ("bytes a token", f"{self.shard_bytes / max(1, self.tokens):,.1f}: {parts}"),
            *disk_rows(self, ""),
            ("size of the weights", weights),
        ]


def native_stats(cache: NativeCache, seed: int, progress: Progress | None) -> NativeStats:
    """Return the numbers of a cache, as `stats.stats`. The slots are drawn from those with loss."""
    counts, supervised, positions = [np.zeros((0, 3), np.int64)], [_none()], [_none()]
    for shard in range(cache.num_shards):
        mapped = cache.mapped(shard)
        rows, learnt = mapped.starts[:, 2], cache.supervised_rows(mapped)
        known = learnt & cache.selected(mapped.tensors["argmax_ids"].to(torch.int64).numpy())
        counts.append(np.diff(mapped.starts, axis=0))
        supervised.append(_by_sample(learnt, rows))
        positions.append(_by_sample(known, rows))
        if progress is not None:
            progress(shard + 1, shard + 1, cache.num_shards)
    every = np.concatenate(counts)
    sizes = [os.stat(shard_path(cache.folder, shard)) for shard in range(cache.num_shards)]
    by_tensor = cache.layout.token_bytes(every)
    entropy, norms, mass = _by_the_head(cache, [int(part.sum()) for part in supervised[1:]], seed)
    return NativeStats(
        num_shards=cache.num_shards,
        lengths=every[:, 0],
        supervised=np.concatenate(supervised),
        positions=np.concatenate(positions),
        shard_bytes=sum(size.st_size for size in sizes),
        disk_bytes=sum(size.st_blocks * 512 for size in sizes),
        draft_mass=mass,
        entropy=entropy,
        norms=norms,
        aux_rows=int(every[:, 1].sum()),
        target_rows=int(every[:, 2].sum()),
        part_bytes={part: sum(by_tensor.get(name, 0.0) for name in names) for part, names in _PARTS.items()},
        weights_bytes=os.stat(cache.folder / cache.WEIGHTS).st_size,
        aux_dtype=str(cache.manifest["aux_dtype"]),
    )


def _none() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


def _by_sample(rows: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many of the target rows of each sample are true. starts: int64 [n + 1]."""
    sums = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
    return np.diff(sums[starts])


def _by_the_head(
    cache: NativeCache, supervised: list[int], seed: int
) -> tuple[NDArray[np.float64], dict[int, float], Mass | None]:
    """Return entropies, mean norms of the blocks' states, and the mass in the draft's vocabulary at drawn rows.

    supervised: the target rows with loss of each shard. Entropies and norms are those of the positions among the rows.
    """
    entropies: list[float] = []
    norms, layers = torch.zeros(len(cache.aux_layer_ids), dtype=torch.float64), cache.aux_layer_ids
    ends = np.cumsum([0, *supervised])
    chosen = drawn(int(ends[-1]), seed)
    masses: list[list[float]] = []
    for shard in range(cache.num_shards):
        mapped = cache.mapped(shard)
        within = chosen[(ends[shard] <= chosen) & (chosen < ends[shard + 1])] - ends[shard]
        rows = np.flatnonzero(cache.supervised_rows(mapped))[within]
        mass, entropy = _distributions(cache, mapped.tensors, torch.from_numpy(rows))
        masses.append(mass.tolist())
        known = cache.selected(mapped.tensors["argmax_ids"][rows].to(torch.int64).numpy())
        entropies += entropy[torch.from_numpy(known)].tolist()
        for row in rows[known]:
            norms += _states_before(mapped, int(row)).double().norm(dim=-1)
    mean = (norms / max(1, len(entropies))).tolist()
    by_shard = [sum(part) / len(part) if part else math.nan for part in masses]
    total = sum(map(len, masses))
    mass_of_all = Mass(by_shard, sum(map(sum, masses)) / total) if total else None
    return np.array(entropies), dict(zip(layers, mean, strict=True)) if entropies else {}, mass_of_all


def _distributions(cache: NativeCache, tensors: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mass in the draft's vocabulary and the entropy of the distribution over it, of some target rows.

    The mass is exact: the draft's logits against the log-normalizer of all.
    """
    ids = cache.manifest["selected_token_ids"]
    masses, entropies = [torch.zeros(0)], [torch.zeros(0, dtype=torch.float64)]
    for part in torch.split(rows, max(1, PART_VALUES // len(ids))):
        with torch.no_grad():
            logits = cache.head.logits(tensors["last_hidden_states"][part], ids).float()
        masses.append((logits.logsumexp(-1) - tensors["log_normalizers"][part]).exp().clamp(max=1))
        entropies.append(torch.special.entr(logits.double().softmax(-1)).sum(-1))
    return torch.cat(masses), torch.cat(entropies)


def _states_before(mapped: MappedShard, target_row: int) -> Tensor:
    """Return the auxiliary states [K, H] of the token before that of a target row: those of the row's slot."""
    sample = int(np.searchsorted(mapped.starts[:, 2], target_row, side="right")) - 1
    stored = mapped.sample(sample)
    before = int(stored.positions[target_row - mapped.starts[sample, 2]]) - 1
    states = stored.aux_hidden_states[before]
    return states if stored.aux_scales is None else dequantized(states, stored.aux_scales[before])
