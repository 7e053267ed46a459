"""Checks of one native sample (`finite`, `ids_match`, `distribution`), and of some target rows by the target's head.

The tensors of a sample are views of the mapped shard. No check holds more than a few megabytes of it in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niels_gpt.eagle3.format.weights import read_weights
from niels_gpt.eagle3.inspect.native.opened import NativeCache, NativeRow
from niels_gpt.eagle3.inspect.open_cache import OpenCache
from niels_gpt.storage.errors import CacheError

_CHUNK = 1 << 21  # values looked at a time
_ROWS = 16  # target rows of a shard that are compared with the head
LOGIT_SHARE = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 1.6e-2}
"""How far a log-normalizer may be from that of the stored state, as a share of the row's largest logit: by the less
exact of the dtype that is stored and the one that the head computes in."""


def weights_not_finite(cache: OpenCache) -> Iterator[CacheError]:
    """Yield the first number of each of the target's weights that is not finite."""
    if missing := cache.weights_missing():
        yield missing
        return
    for name, weight in read_weights(cache.folder, follow_links=cache.follow_links).items():
        for start, part in _parts(weight):
            wrong = (~torch.isfinite(part)).any(dim=-1).nonzero()
            if len(wrong):
                row = start + int(wrong[0])
                of = f" of token {row}" if len(weight) == cache.manifest.get("target_vocab_size") else f", value {row},"
                yield CacheError(cache.folder / cache.WEIGHTS, f"{name}{of} is not finite", "numbers", code="E701")
                break


def not_finite(row: NativeRow) -> Iterator[CacheError]:
    """Yield the first NaN or infinity of each float tensor, with the number of tokens that hold one."""
    for name, (tensor, positions) in row.tensors().items():
        wrong_rows, first = 0, ""
        for start, part in _parts(tensor):
            wrong = _not_finite(part)
            if wrong is None:
                continue
            at, column = wrong.nonzero()[0].tolist()
            value = float(part[at, column])
            first = first or f"{part_name(row, name, column)} is {value} at token {positions[start + at]}"
            wrong_rows += int(wrong.any(dim=-1).sum())
        if wrong_rows:
            yield row.problem(f"{first} (so at {tokens(wrong_rows)})", "finite numbers")


def _not_finite(part: Tensor) -> Tensor | None:
    """Return where a part [rows, width] is not finite; None where all of it is."""
    if part.dtype == torch.float8_e4m3fn:  # has NaN, and no infinity
        wrong = (part.view(torch.uint8) & 0x7F) == 0x7F
        return wrong if bool(wrong.any()) else None
    low, high = torch.aminmax(part)  # both are NaN where one is there; no copy is made
    return None if torch.isfinite(low) and torch.isfinite(high) else ~torch.isfinite(part)


def other_ids(row: NativeRow) -> Iterator[CacheError]:
    """Yield where the stored ids and loss bits are not those of the source's row."""
    ids, mask = row.cache.samples.row(row.number)
    where = "by sidecar/samples.safetensors"
    if len(ids) != row.length:
        yield row.problem(f"{row.length:,} tokens", f"{len(ids):,} {where}")
        return
    for name, stored, wanted in (
        ("input_ids", row.sample.input_ids.astype(np.int64), ids.astype(np.int64)),
        ("loss_bits", row.sample.loss_mask.astype(np.int64), mask.astype(np.int64)),
    ):
        for at, so in _first(stored != wanted):
            yield row.problem(f"{name} is {stored[at]} at token {at}", f"{wanted[at]} {where}{so}")


def not_target_rows(row: NativeRow) -> Iterator[CacheError]:
    """Yield what no target can have said, and a scale that no fp8 writer writes."""
    sample, positions, size = row.sample, row.sample.positions, row.cache.vocab_size
    for at, so in _first(sample.argmax_ids.numpy() >= size):
        yield row.problem(
            f"argmax_ids is {int(sample.argmax_ids[at])} at token {positions[at]}", f"an id below {size}{so}"
        )
    if sample.aux_scales is not None:
        for at, so in _first((sample.aux_scales < 0).any(dim=-1).numpy()):
            yield row.problem(f"aux_scales is {sample.aux_scales[at].tolist()} at token {at}", f"none below 0{so}")


def not_by_the_head(cache: OpenCache, shard: int) -> Iterator[CacheError]:
    """Yield where log-normalizer or argmax of some target rows, spread over a shard, are not those of their states."""
    assert isinstance(cache, NativeCache)
    mapped, first = cache.mapped(shard), cache.first_of(shard)
    cache.tick(sum(tensor.nbytes for tensor in mapped.tensors.values()))  # the rest is not read
    starts = mapped.starts[:, 2]
    if not starts[-1]:
        return
    chosen = np.unique(np.linspace(0, starts[-1] - 1, _ROWS).astype(np.int64))
    share = max(LOGIT_SHARE[cache.manifest["dtype"]], LOGIT_SHARE[cache.manifest["head"]["compute_dtype"]])
    with torch.no_grad():
        logits = cache.head.logits(mapped.tensors["last_hidden_states"][torch.from_numpy(chosen)]).float()
    for target_row, row_logits in zip(chosen, logits, strict=True):
        row = int(np.searchsorted(starts, target_row, side="right")) - 1
        sample = NativeRow(cache, shard, first + row, mapped.sample(row))
        yield from _compared(sample, int(target_row - starts[row]), row_logits, share)


def _compared(row: NativeRow, at: int, logits: Tensor, share: float) -> Iterator[CacheError]:
    allowed = share * max(1.0, float(logits.abs().max()))
    stored, computed = float(row.sample.log_normalizers[at]), float(logits.logsumexp(-1))
    token, position = int(row.sample.argmax_ids[at]), row.sample.positions[at]
    by = f"by {row.cache.WEIGHTS} and the stored state"
    if not abs(stored - computed) <= allowed:
        yield row.problem(
            f"log_normalizers is {stored:.6g} at token {position}", f"{computed:.6g} within {allowed:.2g} {by}"
        )
    if token < len(logits) and not float(logits[token]) >= float(logits.max()) - 2 * allowed:
        apart = float(logits.max() - logits[token])
        expected = f"{int(logits.argmax())}, whose logit is {apart:.3g} higher {by}"
        yield row.problem(f"argmax_ids is {token} at token {position}", expected)


def tokens(count: int) -> str:
    """Return "1 token", "2 tokens"."""
    return f"{count:,} token{'' if count == 1 else 's'}"


def part_name(row: NativeRow, name: str, column: int) -> str:
    """Return what a column of a tensor is called in messages."""
    if not name.startswith("aux_"):
        return name
    layer, column = divmod(column, row.cache.layout.hidden_size) if name == "aux_hidden_states" else (column, 0)
    return f"{name} of block {row.cache.aux_layer_ids[layer]}"


def _first(wrong: NDArray[np.bool_]) -> Iterator[tuple[int, str]]:
    """Yield the first row where `wrong` is true, and a note on how many there are; nothing without one."""
    found = np.flatnonzero(wrong)
    if len(found):
        yield int(found[0]), f"; wrong at {tokens(len(found))}"


def _parts(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield a tensor in pieces [rows, width] of at most _CHUNK values: the number of the first row, and the piece."""
    tensor = tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]
    step = max(1, _CHUNK // max(1, tensor.shape[-1]))
    for start in range(0, len(tensor) if tensor.numel() else 0, step):
        yield start, tensor[start : start + step]
