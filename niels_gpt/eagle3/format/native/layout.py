"""The layout of a native shard: its tensors by the counts of its samples, its size, and where samples are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.eagle3.format.layout import (
    AUX_DTYPES,
    DTYPES,
    MAX_ROWS,
    PathLike,
    Tensors,
    in_file_order,
    row_bytes_of,
    tensors_header,
)
from niels_gpt.eagle3.format.manifest import check_native

Counts = NDArray[np.int64]
"""Tokens, auxiliary rows and target rows of each sample: int64 [n, 3], as of `rows.row_counts`."""
STARTS = ("token_starts", "aux_starts", "row_starts")
DEFAULT_SHARD_BYTES = 1 << 30
_HEADER_ROOM = 2048  # a header of at most 10 tensors takes less


def room_bits(limit: int) -> int:
    """Return how many bits of samples a file of `limit` bytes has room for; the rest is kept for its header."""
    return 8 * (limit - _HEADER_ROOM)


@dataclass(frozen=True)
class NativeLayout:
    """What a native manifest states of a shard's tensors."""

    hidden_size: int
    """H."""
    layers: int
    """Auxiliary layers, K."""
    dtype: str
    """Of the last hidden states: a key of DTYPES."""
    aux_dtype: str
    """Of the auxiliary states: a key of AUX_DTYPES."""

    def tensors(self, samples: int, tokens: int, aux_rows: int, target_rows: int) -> Tensors:
        """Return the tensors of a shard, with whole shapes, in the order of the file."""
        tensors: Tensors = {name: (torch.int64, (samples + 1,)) for name in STARTS}
        tensors["input_ids"] = (torch.uint32, (tokens,))
        tensors["loss_bits"] = (torch.uint8, (-(-tokens // 8),))
        tensors["aux_hidden_states"] = (AUX_DTYPES[self.aux_dtype], (aux_rows, self.layers, self.hidden_size))
        if self.aux_dtype == "fp8":
            tensors["aux_scales"] = (torch.float32, (aux_rows, self.layers))
        tensors["last_hidden_states"] = (DTYPES[self.dtype], (target_rows, self.hidden_size))
        tensors["log_normalizers"] = (torch.float32, (target_rows,))
        tensors["argmax_ids"] = (torch.uint32, (target_rows,))
        return in_file_order(tensors)

    def fields(self, counts: Counts) -> Tensors:
        """Return the tensors of a shard of these samples, with whole shapes, in the order of the file."""
        return self.tensors(len(counts), *map(int, counts.sum(0)))

    def shard_bytes(self, counts: Counts) -> int:
        """Return the size of the file of a shard of these samples."""
        tensors = self.fields(counts)
        return len(tensors_header(tensors)) + sum(map(row_bytes_of, tensors.values()))

    def sample_bytes(self, counts: Counts) -> NDArray[np.int64]:
        """Return the bytes that each sample adds to its shard, loss bits rounded up: int64 [n]."""
        return -(-self.sample_bits(counts) // 8)

    def cut(self, counts: Counts, limit: int = DEFAULT_SHARD_BYTES) -> list[int]:
        """Return the first sample of each shard, and n at the end.

        A shard ends before the sample that would take its file over `limit` bytes, of which 2,048 are kept for the
        header, and after MAX_ROWS samples; it has one sample at least.
        """
        ends = np.cumsum(self.sample_bits(counts))
        room, first, cuts = room_bits(limit), 0, [0]
        while first < len(counts):
            before = int(ends[first - 1]) if first else 0
            behind = int(np.searchsorted(ends, before + room, side="right"))
            first = min(max(behind, first + 1), first + MAX_ROWS, len(counts))
            cuts.append(first)
        return cuts

    def token_bytes(self, counts: Counts) -> dict[str, float]:
        """Return the bytes that each tensor takes by token, over all these samples; headers left out."""
        tokens = int(counts[:, 0].sum()) or 1
        return {name: row_bytes_of(tensor) / tokens for name, tensor in self.fields(counts).items()}

    def sample_bits(self, counts: Counts) -> NDArray[np.int64]:
        """Return the bits of each sample: int64 [n]."""
        token, aux, row = 32 + 1, *(8 * size for size in self._row_sizes())
        return counts @ np.array([token, aux, row], np.int64) + 8 * 8 * len(STARTS)

    def _row_sizes(self) -> tuple[int, int]:
        """Return the bytes of an auxiliary row and of a target row."""
        one = self.tensors(0, 0, 1, 1)
        aux = sum(row_bytes_of(tensor) for name, tensor in one.items() if name in ("aux_hidden_states", "aux_scales"))
        return aux, sum(row_bytes_of(one[name]) for name in ("last_hidden_states", "log_normalizers", "argmax_ids"))


def native_layout_of(manifest: Mapping[str, Any], where: PathLike) -> NativeLayout:
    """Return the layout of a native manifest. Raises: CacheError naming the key that no native cache has like that."""
    check_native(manifest, where)
    layers = len(manifest["aux_layer_ids"])
    return NativeLayout(manifest["hidden_size"], layers, manifest["dtype"], manifest["aux_dtype"])
