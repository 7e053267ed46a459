"""`stats`: a cache's figures as numbers and as a picture: tokens, loss, sizes, lengths, mass, entropy, norms."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niels_gpt.display.numbers import count_text, number_of, size_text
from niels_gpt.display.pictures import new_figure, plain_axes, png, set_title
from niels_gpt.eagle3.format.drafters import drafters_of, rows_text, targets_of
from niels_gpt.eagle3.format.layout import shard_path
from niels_gpt.eagle3.inspect.forms import DenseCache, NativeCache, open_cache
from niels_gpt.eagle3.inspect.opened import AUX, PROBS, VALUES, refuse_malformed
from niels_gpt.eagle3.target import CHUNK_VALUES
from niels_gpt.work import Progress

if TYPE_CHECKING:  # at run time inside the functions: loading matplotlib takes a second
    from matplotlib.axes import Axes

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
MAX_SLOTS = 2000
"""Most slots whose distributions and hidden states are read; no other floats of a cache are."""
_GROUPS = {
    "ids": ("input_ids", "loss_bits", "token_starts", "aux_starts", "row_starts"),
    "aux": (AUX,),
    "scales": ("aux_scales",),
    "last hidden": ("last_hidden_states",),
    "targets": ("log_normalizers", "argmax_ids"),
}
"""Name in the output -> tensors of a native shard."""
_WIDTH, _HEIGHT = 7.2, 2.8  # inches
_FILL, _LINE = "#9ec5e8", "#c2410c"  # one light and one dark, for readers who cannot tell blue from orange
_BINS = 24
_COLOURS_IN_FILE = 32
_FP8 = ", in fp8: off by 1/16 of a value, or by 2**-18 of its row's largest"


class Mass(NamedTuple):
    """A share of the probability mass."""

    by_shard: list[float]
    """The mean over the slots of each shard; nan for a shard without such slots."""
    mean: float
    """The mean over the slots of the cache."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Figures of one cache."""

    num_shards: int
    lengths: NDArray[np.int64]
    """Tokens of each sample, without padding [n]."""
    supervised: NDArray[np.int64]
    """Supervised slots of each sample [n]."""
    positions: NDArray[np.int64]
    """Positions of each sample [n]: slots that a draft is trained on."""
    draft_mass: Mass | None
    """Share of the target's distribution inside the draft's vocabulary, over slots with loss. None if unknown."""
    kept_mass: Mass | None = None
    """Share of the draft's distribution that the top k keep, over the positions. None if everything is stored, or a
    receipt lacks it."""
    entropy: NDArray[np.float64]
    """Entropy over the draft's vocabulary, in nats, at up to MAX_SLOTS positions."""
    norms: dict[int, float]
    """Block -> mean norm of its hidden states at these positions."""
    sizes: dict[str, Any]
    """Sizes, which depend on the form, ready for JSON."""
    size_rows: list[tuple[str, str]]
    """The same as pairs of a name and a text."""
    tokens_note: str = ""
    """Text after the number of tokens."""
    kept_row: Sequence[tuple[str, str]] = ()
    """(name, text) about `kept_mass`; empty if the form has no top k."""

    def as_json(self) -> dict[str, Any]:
        """Return everything ready for JSON, with percentiles instead of lists of numbers."""
        tokens, supervised, positions = (int(each.sum()) for each in (self.lengths, self.supervised, self.positions))
        return {
            "samples": len(self.lengths),
            "shards": self.num_shards,
            "tokens": tokens,
            "supervised_tokens": supervised,
            "supervised_share": supervised / max(1, tokens),
            "positions": positions,
            "position_share": positions / max(1, tokens),
            "positions_of_supervised": positions / max(1, supervised),
            **self.sizes,
            "lengths": _percentiles(self.lengths),
            "kept_mass": self.kept_mass and self.kept_mass.mean,
            "draft_mass": self.draft_mass and self.draft_mass.mean,
            "entropy_nats": {"slots": len(self.entropy), **_percentiles(self.entropy)},
            "aux_norms": {str(layer): norm for layer, norm in self.norms.items()},
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return everything as pairs of name and text."""
        values, entropies = self.as_json(), number_of(len(self.entropy), "position")
        norms = ", ".join(f"block {layer} {norm:.3g}" for layer, norm in self.norms.items()) or "none"
        return [
            ("samples", f"{count_text(values['samples'])} in {number_of(self.num_shards, 'shard')}"),
            ("tokens", f"{count_text(values['tokens'])}{self.tokens_note}"),
            (
                "supervised",
                f"{count_text(values['supervised_tokens'])} ({values['supervised_share']:.1%} of the tokens)",
            ),
            ("positions", f"{count_text(values['positions'])} ({values['positions_of_supervised']:.1%} of those)"),
            *self.size_rows,
            ("tokens of a sample", _spread(values["lengths"], ",.0f")),
            ("mass in the draft vocabulary", _mass_text(self.draft_mass)),
            *self.kept_row,
            ("entropy, nats", f"{_spread(_percentiles(self.entropy), '.3f')}; of {entropies}"),
            ("mean norm of the hidden states", norms),
        ]


def _mass_text(mass: Mass | None) -> str:
    return f"{mass.mean:.4f}" if mass else "not known"


def _percentiles(values: NDArray[Any]) -> dict[str, float]:
    """Return mean and percentiles by name, such as p50; {} without values."""
    if not len(values):
        return {}
    points = zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True)
    return {"mean": float(values.mean()), **{f"p{at}": float(value) for at, value in points}}


def _spread(numbers: dict[str, float], form: str) -> str:
    """Return the result of `_percentiles` as text. form: format of a number."""
    return ", ".join(f"{name} {format(value, form)}" for name, value in numbers.items()) or "none"


@refuse_malformed
def stats(path: Path, *, seed: int = 0, progress: Progress | None = None, follow_links: bool = False) -> Stats:
    """Return a cache's figures. Reads all ids and masks, and the floats of at most MAX_SLOTS slots.

    seed: draws the slots. progress: counts shards.
    follow_links: read files that are links, as in a snapshot of the Hugging Face hub.
    Raises: FileNotFoundError, CacheError if the cache is not whole.
    """
    cache = open_cache(path, follow_links=follow_links)
    counts = [np.zeros((0, 5 if isinstance(cache, NativeCache) else 3), np.int64)]
    for shard in range(cache.num_shards):
        opened: Any = cache.opened(shard)
        counts.append(cache.counted(opened))
        if progress is not None:
            progress(shard + 1, shard + 1, cache.num_shards)
    every = np.concatenate(counts)
    if isinstance(cache, NativeCache):
        more = _of_native(cache, every, [int(each[:, 1].sum()) for each in counts[1:]], seed)
    else:
        more = _of_dense(cache, every, seed)
    lengths, supervised, positions = every[:, :3].T
    return Stats(num_shards=cache.num_shards, lengths=lengths, supervised=supervised, positions=positions, **more)


def _on_disk(cache: DenseCache | NativeCache) -> dict[str, int]:
    """Return the bytes of all shards, with holes and without."""
    sizes = [os.stat(shard_path(cache.folder, shard)) for shard in range(cache.num_shards)]
    by_blocks = sum(size.st_blocks * 512 for size in sizes)
    return {"shard_bytes": sum(size.st_size for size in sizes), "disk_bytes": by_blocks}


def _disk_rows(sizes: dict[str, Any], note: str) -> list[tuple[str, str]]:
    return [
        ("size of the shards", f"{size_text(sizes['shard_bytes'])}{note}"),
        ("on disk", f"{size_text(sizes['disk_bytes'])}: holes take no room"),
    ]


def _drawn(total: int, seed: int) -> NDArray[np.int64]:
    """Return at most MAX_SLOTS different numbers below `total`, ascending; all if there are no more."""
    if total <= MAX_SLOTS:
        return np.arange(total)
    return np.unique(torch.randint(total, (MAX_SLOTS,), generator=torch.Generator().manual_seed(seed)).numpy())


def _mean_norms(cache: DenseCache | NativeCache, sums: NDArray[np.float64], count: int) -> dict[int, float]:
    """Return the mean of `count` norms for each block; {} for none."""
    return dict(zip(cache.aux_layer_ids, (sums / count).tolist(), strict=True)) if count else {}


# --- versions 1 and 2 -------------------------------------------------------------------------------------------------


def _of_dense(cache: DenseCache, counts: NDArray[np.int64], seed: int) -> dict[str, Any]:
    """Return the other fields of Stats. counts: from `DenseCache.counted`, of all samples."""
    entropy, norms = _entropy_and_norms(cache, counts[:, 2], seed)
    tokens, layout, kept_mass = int(counts[:, 0].sum()), cache.layout, _mass(cache, "kept_mass", "positions")
    padding, disk = 1 - tokens / max(1, len(counts) * layout.seq_length), _on_disk(cache)
    per_token = {"slot_bytes": layout.slot_bytes, "bytes_per_token": disk["shard_bytes"] / max(1, tokens)}
    size = f"{per_token['bytes_per_token']:,.1f}, padding included; a slot takes {layout.slot_bytes:,}"
    return {
        "draft_mass": _mass(cache, "draft_mass", "supervised"),
        "kept_mass": kept_mass,
        "entropy": entropy,
        "norms": norms,
        "sizes": {"padding_share": padding, **disk, **per_token},
        "size_rows": [("bytes a token", size), *_disk_rows(disk, ", padding included")],
        "tokens_note": f" ({padding:.1%} of the slots are padding)",
        "kept_row": [("mass kept by top k", _mass_text(kept_mass) if layout.topk else "all of it")],
    }


def _mass(cache: DenseCache, name: str, by: str) -> Mass | None:
    """Return a probability mass from the receipts, of each shard and in all; None unless all receipts have it."""
    masses: list[tuple[float, int]] = []
    for shard in range(cache.num_shards):
        sums = cache.facts(shard)
        if sums.get(name) is None or not isinstance(sums.get(by), int):
            return None
        masses.append((float(sums[name]), int(sums[by])))
    slots = sum(count for _, count in masses)
    if not slots:
        return None
    by_shard = [mass / count if count else math.nan for mass, count in masses]
    return Mass(by_shard, sum(mass for mass, _ in masses) / slots)


def _entropy_and_norms(
    cache: DenseCache, positions: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.float64], dict[int, float]]:
    """Return the entropy at drawn positions, and the mean norm of each block's hidden states there."""
    entropies: list[float] = []
    layers = len(cache.manifest["aux_layer_ids"])
    sums = np.zeros(layers)
    ends = np.cumsum(positions)
    chosen = _drawn(int(ends[-1]) if len(ends) else 0, seed)
    samples = np.searchsorted(ends, chosen, side="right")
    mapped, tables = -1, dict[str, Tensor]()
    for number in np.unique(samples).tolist():
        shard, row = cache.place(number)
        if shard != mapped:
            mapped, tables = shard, cache.opened(shard)
        within = torch.from_numpy(chosen[samples == number] - (ends[number] - positions[number]))
        slots = tables["position_mask"][row, :, 0].nonzero()[:, 0][within]
        probs = tables[VALUES if VALUES in tables else PROBS][row, slots].double()
        entropies += torch.special.entr(probs).sum(-1).tolist()
        states = tables[AUX][row, slots].view(len(slots), layers, -1)
        sums += states.norm(dim=-1, dtype=torch.float64).sum(0).numpy()
    return np.array(entropies), _mean_norms(cache, sums, len(entropies))


# --- the native form --------------------------------------------------------------------------------------------------


def _of_native(cache: NativeCache, counts: NDArray[np.int64], by_shard: Sequence[int], seed: int) -> dict[str, Any]:
    """Return the other fields of Stats. counts: of all samples, by `NativeCache.counted`. by_shard: rows with loss."""
    entropy, norms, mass = _by_the_head(cache, by_shard, seed)
    sizes, size_rows = _native_sizes(cache, counts[:, [0, 3, 4]])
    return {"draft_mass": mass, "entropy": entropy, "norms": norms, "sizes": sizes, "size_rows": size_rows}


def _native_sizes(cache: NativeCache, counts: NDArray[np.int64]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the sizes of shards, tensors and weights. counts: int64 [n, 3], see `NativeLayout.token_bytes`."""
    tokens, aux_rows, target_rows = counts.sum(0).tolist()
    aux_rows *= bool(cache.aux_layer_ids)
    disk, weights = _on_disk(cache), os.stat(cache.folder / cache.WEIGHTS).st_size
    dtype = str(cache.manifest["aux_dtype"])
    per_token = [each / max(1, tokens) for each in (aux_rows, target_rows, disk["shard_bytes"])]
    by_tensor = cache.layout.token_bytes(counts)
    by_group = {group: sum(by_tensor.get(name, 0.0) for name in names) for group, names in _GROUPS.items()}
    by_group["headers"] = per_token[2] - sum(by_tensor.values())
    sizes = {
        "aux_rows": aux_rows,
        "aux_share": per_token[0],
        "targets": targets_of(cache.manifest),
        "enough_for": drafters_of(cache.manifest),
        "target_rows": target_rows,
        "target_share": per_token[1],
        "aux_dtype": dtype,
        **disk,
        "weights_bytes": weights,
        "bytes_per_token": per_token[2],
        "bytes_per_token_by_part": by_group,
    }
    shown = ", ".join(f"{name} {size:,.1f}" for name, size in by_group.items() if size)
    aux = f"{count_text(aux_rows)} ({per_token[0]:.1%} of the tokens){_FP8 * (dtype == 'fp8')}"
    return sizes, [
        ("auxiliary rows", aux if cache.aux_layer_ids else "none: no block is stored"),
        ("target rows", f"{count_text(target_rows)} ({per_token[1]:.1%} of the tokens), {rows_text(cache.manifest)}"),
        ("bytes a token", f"{per_token[2]:,.1f}: {shown}"),
        *_disk_rows(disk, ""),
        ("size of the weights", f"{size_text(weights)}, once"),
    ]


def _by_the_head(
    cache: NativeCache, supervised: Sequence[int], seed: int
) -> tuple[NDArray[np.float64], dict[int, float], Mass | None]:
    """Return entropies, mean norms and draft vocabulary mass at drawn target rows.

    Entropies and norms are taken at the positions among these rows. supervised: target rows with loss of each shard.
    """
    entropies: list[float] = []
    sums, masses = np.zeros(len(cache.aux_layer_ids)), list[list[float]]()
    ends = np.cumsum([0, *supervised])
    chosen = _drawn(int(ends[-1]), seed)
    for shard in range(cache.num_shards):
        mapped = cache.opened(shard)
        within = chosen[(ends[shard] <= chosen) & (chosen < ends[shard + 1])] - ends[shard]
        rows = np.flatnonzero(mapped.with_loss)[within]
        is_known = cache.in_draft(mapped, rows)
        mass, entropy = _distributions(cache, mapped.tensors, torch.from_numpy(rows))
        masses.append(mass.tolist())
        entropies += entropy[torch.from_numpy(is_known)].tolist()
        samples = np.searchsorted(mapped.starts[:, 2], rows, side="right") - 1
        for number in np.unique(samples[is_known]).tolist():
            row = cache.row(shard, mapped, number)
            within = rows[is_known & (samples == number)] - mapped.starts[number, 2]
            states = row.states(row.positions[within] - 1)  # a slot has the states of the token before
            for norms in states.norm(dim=-1, dtype=torch.float64).numpy():
                sums += norms
    by_shard = [sum(each) / len(each) if each else math.nan for each in masses]
    total = sum(map(len, masses))
    mass_of_all = Mass(by_shard, sum(map(sum, masses)) / total) if total else None
    return np.array(entropies), _mean_norms(cache, sums, len(entropies)), mass_of_all


def _distributions(cache: NativeCache, tensors: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mass in the draft's vocabulary, and the entropy of the distribution over it, for target rows.

    The mass is exact: the draft's logits against the log-normalizer of all. Logits are computed for many rows at once.
    """
    ids = cache.manifest["selected_token_ids"]
    masses, entropies = [torch.zeros(0)], [torch.zeros(0, dtype=torch.float64)]
    for chunk in torch.split(rows, max(1, CHUNK_VALUES // len(ids))):
        with torch.no_grad():
            logits = cache.head.logits(tensors["last_hidden_states"][chunk], ids).float()
        masses.append((logits.logsumexp(-1) - tensors["log_normalizers"][chunk]).exp().clamp(max=1))
        entropies.append(torch.special.entr(logits.double().softmax(-1)).sum(-1))
    return torch.cat(masses), torch.cat(entropies)


# --- the picture ------------------------------------------------------------------------------------------------------


def plot(numbers: Stats, name: str) -> bytes:
    """Return a PNG of 720 x 280 pixels, about 10 kB. name: of the cache, for the title.

    Raises: ImportError without matplotlib (the extra `pipelines`).
    """
    figure = new_figure(_WIDTH, _HEIGHT, layout="constrained")
    supervised = 100 * numbers.as_json()["supervised_share"]
    title = (
        f"{name}: {len(numbers.lengths):,} samples, {int(numbers.lengths.sum()):,} tokens, {supervised:.0f} % with loss"
    )
    set_title(figure, title)
    draft, kept = numbers.draft_mass, numbers.kept_mass
    panels = figure.subplots(1, 3 if draft else 2)
    _histogram(panels[0], numbers.lengths, "tokens of a sample", "samples")
    _histogram(panels[1], numbers.entropy, "entropy of the target, nats", "positions")
    if draft:
        masses = {"in the draft vocabulary": draft.by_shard, "kept by top k": kept.by_shard if kept else []}
        _by_shard(panels[2], masses)
    return png(figure, _COLOURS_IN_FILE)


def _histogram(axes: Axes, values: NDArray[Any], label: str, what: str) -> None:
    axes.set_xlabel(f"{label}\n(dashed: the median)" if len(values) else f"{label}: none")
    axes.set_ylabel(f"share of {what}")
    if len(values):
        heights, edges = np.histogram(values, bins=_BINS, range=(0, float(values.max()) or 1))
        axes.stairs(100 * heights / len(values), edges, color=_FILL, fill=True)
        axes.axvline(float(np.median(values)), color=_LINE, linestyle="--", linewidth=1.2)
    axes.yaxis.set_major_formatter("{x:.0f} %")
    plain_axes(axes)


def _by_shard(axes: Axes, masses: dict[str, list[float]]) -> None:
    for (label, values), colour, marker in zip(masses.items(), (_LINE, "#1d5f9e"), "ox", strict=True):
        if values:
            axes.plot(range(len(values)), values, marker, color=colour, markersize=4, label=label)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("shard")
    axes.set_ylabel("mean share of mass")
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.legend(frameon=False, fontsize=7, loc="lower left")
    plain_axes(axes)
