"""All shards of a native cache: checked when the cache is opened, mapped when first read.

Opening reads of each shard the header, the starts and the loss bits, and compares them with each other and with the
manifest; so every count is true before a state is read, and no size of a file is believed.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.checksums import Check
from niels_gpt.eagle3.format.layout import (
    MAX_ROWS,
    WITHOUT_HOLES,
    PathLike,
    Tensors,
    read_tensors_header,
    row_bytes_of,
    shard_path,
    tensors_header,
)
from niels_gpt.eagle3.format.manifest import (
    PRODUCE_AGAIN,
    check_shard_indices,
    is_native,
    manifest_path,
    read_manifest,
)
from niels_gpt.eagle3.format.native.layout import STARTS, Counts, NativeLayout, native_layout_of
from niels_gpt.eagle3.format.native.rows import row_counts
from niels_gpt.eagle3.format.native.sample import NativeSample
from niels_gpt.eagle3.format.native.shard_writer import ROW_TENSORS, sample_digest
from niels_gpt.eagle3.format.receipts import Receipts, version_of
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import shortened

_AGAIN = "Remove the shard and produce it again: precompute --resume"


@dataclass(frozen=True, eq=False)
class MappedShard:
    """A mapped shard: its tensors as views of the map, by name, and its starts, int64 [n + 1, 3]."""

    tensors: dict[str, torch.Tensor]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def loss_mask(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Return the raw loss mask of some tokens of the shard: bool [end - begin]."""
        first = begin // 8
        raw = self.tensors["loss_bits"][first : -(-end // 8)].numpy()
        return np.unpackbits(raw, bitorder="little")[begin - 8 * first : end - 8 * first].view(np.bool_)

    def sample(self, row: int) -> NativeSample:
        """Return a sample, whose tensors are views of the map, but for loss_mask and argmax_ids."""
        (token, aux, target), (token_end, aux_end, target_end) = self.starts[row : row + 2].tolist()
        tensors, scales = self.tensors, self.tensors.get("aux_scales")
        return NativeSample(
            input_ids=tensors["input_ids"][token:token_end].numpy(),
            loss_mask=self.loss_mask(token, token_end),
            aux_hidden_states=tensors["aux_hidden_states"][aux:aux_end],
            aux_scales=None if scales is None else scales[aux:aux_end],
            last_hidden_states=tensors["last_hidden_states"][target:target_end],
            log_normalizers=tensors["log_normalizers"][target:target_end],
            argmax_ids=tensors["argmax_ids"][target:target_end].to(torch.int64),
        )


def map_shard(path: str, layout: NativeLayout, *, follow_links: bool = False) -> tuple[MappedShard, bytes]:
    """Map a shard and return it with the bytes of its header; the starts are not yet checked.

    Raises: FileNotFoundError; CacheError unless its header is exactly that of a shard of this layout.
    """
    tensors, header = read_tensors_header(path, sparse=WITHOUT_HOLES, follow_links=follow_links)
    sizes = _sizes_of(path, tensors)
    expected = layout.tensors(*sizes)
    if tensors != expected or header != tensors_header(expected):
        names = f"{_described(expected)}, in safetensors' order and without metadata"
        raise CacheError(path, f"its header has {_described(tensors)}", names, _AGAIN, code="E701")
    size = len(header) + sum(map(row_bytes_of, tensors.values()))
    whole = torch.from_file(path, False, size, dtype=torch.uint8)  # private: a change stays in this process
    views, begin = {}, len(header)
    for name, (dtype, shape) in tensors.items():
        end = begin + row_bytes_of((dtype, shape))
        views[name] = whole[begin:end].view(dtype).view(shape)
        begin = end
    starts = np.stack([views[name].numpy() for name in STARTS], axis=1)
    return MappedShard(views, starts), header


def _sizes_of(path: str, tensors: Tensors) -> tuple[int, int, int, int]:
    """Return the samples, tokens, auxiliary rows and target rows that a header states."""
    named = (STARTS[0], "input_ids", "aux_hidden_states", "argmax_ids")
    missing = [name for name in named if not tensors.get(name, (None, ()))[1]]
    if missing:
        raise CacheError(path, f"has no {missing[0]}, but {_described(tensors)}", "a native shard", _AGAIN, code="E701")
    starts, tokens, aux_rows, target_rows = (tensors[name][1][0] for name in named)
    if not 2 <= starts <= MAX_ROWS + 1:
        raise CacheError(path, f"{starts - 1:,} samples", f"1 to {MAX_ROWS:,}", _AGAIN, code="E701")
    return starts - 1, tokens, aux_rows, target_rows


def checked_counts(path: str, shard: MappedShard, seq_length: int) -> Counts:
    """Return the counts of a shard's samples, int64 [n, 3], compared with its starts, its tensors and its loss bits.

    Raises: CacheError naming the first sample of which they differ.
    """
    starts = shard.starts
    ends = [len(shard.tensors[name]) for name in ("input_ids", "aux_hidden_states", "argmax_ids")]
    if starts[0].any() or starts[-1].tolist() != ends or bool((starts[1:] < starts[:-1]).any()):
        found = f"starts that are from {starts[0].tolist()} to {starts[-1].tolist()}"
        expected = f"them to rise from 0 to {ends}, the rows of its tensors"
        raise CacheError(path, found, expected, _AGAIN, code="E701")
    counts = np.diff(starts, axis=0)
    wrong = np.flatnonzero((counts[:, 0] < 1) | (counts[:, 0] > seq_length))
    if len(wrong):
        found = f"sample {wrong[0]} of the shard has {counts[wrong[0], 0]:,} tokens"
        raise CacheError(path, found, f"1 to the manifest's seq_length, {seq_length:,}", _AGAIN, code="E701")
    if shard.loss_mask(ends[0], -(-ends[0] // 8) * 8).any():
        raise CacheError(path, "loss_bits has bits set behind the last token", "zeros", _AGAIN, code="E701")
    stated = row_counts(starts[:, 0], shard.loss_mask(0, ends[0]))
    wrong = np.flatnonzero((stated != counts).any(axis=1))
    if len(wrong):
        row = int(wrong[0])
        found = f"sample {row} of the shard has (tokens, auxiliary rows, target rows) {counts[row].tolist()}"
        raise CacheError(path, found, f"{stated[row].tolist()} by its loss bits", _AGAIN, code="E701")
    return counts


def _described(tensors: Tensors) -> str:
    return ", ".join(f"{shortened(name)} {str(dtype)[6:]} {list(shape)}" for name, (dtype, shape) in tensors.items())


def row_digest(shard: MappedShard, row: int) -> tuple[str, int]:
    """Return the XXH3-128 of a sample's bytes, empty where its starts name no rows, and how many they are."""
    begins, ends = shard.starts[row], shard.starts[row + 1]
    limits = [len(shard.tensors[name]) for name in ("input_ids", "aux_hidden_states", "argmax_ids")]
    if bool((begins < 0).any() or (ends < begins).any() or (ends > limits).any()):
        return "", 0
    pieces = {
        name: _bytes_of(shard.tensors[name][begins[which] : ends[which]])
        for name, which in ROW_TENSORS.items()
        if name in shard.tensors
    }
    loss = shard.loss_mask(int(begins[0]), int(ends[0])).view(np.uint8)
    return sample_digest(ends - begins, loss, pieces), sum(piece.size for piece in pieces.values())


def row_damage(digest: str, stored: str) -> str:
    """Return the damage of a sample: the `row_digest` of its bytes, compared with the receipt; "" if they agree."""
    if digest == stored:
        return ""
    return "its bytes do not give the checksum in its receipt" if digest else "its starts are damaged"


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy().reshape(-1) if tensor.numel() else np.empty(0, np.uint8)


class NativeShards:
    """The shards of one native cache. May be pickled; each process makes its own maps, and threads may share it."""

    def __init__(
        self, cache_dir: PathLike, max_open: int = 1024, *, follow_links: bool = False, check: Check = "ends"
    ) -> None:
        """max_open: limit of shards that are mapped at a time. follow_links: as `open_file`. check: as for `Receipts`.

        Raises: FileNotFoundError; CacheError (a ValueError) naming a file that does not fit the manifest; ValueError
            for max_open < 1.
        """
        if max_open < 1:
            raise ValueError(f"max_open_shards={max_open}: expected 1 or more")
        self.cache_dir = cache_dir = version_of(cache_dir)
        self._follow_links, self._max_open = follow_links, max_open
        self._receipts = Receipts(cache_dir, check, follow_links=follow_links)
        self.manifest = read_manifest(cache_dir, follow_links=follow_links)
        if not is_native(self.manifest):
            found = f"format_version={self.manifest['format_version']}"
            remedy = "Read it with CachedEagle3Dataset, or convert it: python -m niels_gpt.eagle3 convert"
            raise CacheError(manifest_path(cache_dir), found, "a cache in the native form", remedy, code="E208")
        self.layout = native_layout_of(self.manifest, cache_dir)
        self.num_samples, self.num_shards = self.manifest["num_samples"], self.manifest["num_shards"]
        self._open: dict[int, MappedShard] = {}
        self._pid = os.getpid()
        check_shard_indices(self.cache_dir, self.num_samples, self.num_shards)
        counts = [self._map(index)[1] for index in range(self.num_shards)]
        self._firsts = np.cumsum([0, *map(len, counts)]).tolist()
        if self._firsts[-1] != self.num_samples:
            found = f"{self._firsts[-1]:,} samples in {self.num_shards:,} shards"
            expected = f"the manifest's {self.num_samples:,}"
            raise CacheError(self.cache_dir, found, expected, PRODUCE_AGAIN, code="E701")
        self.counts: Counts = np.concatenate([np.zeros((0, 3), np.int64), *counts])
        """Tokens, auxiliary rows and target rows of each sample: int64 [n, 3]."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def place(self, index: int) -> tuple[int, int]:
        """Return the shard of a sample, and its row within it. Raises: IndexError; a negative index is none."""
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        shard = bisect_right(self._firsts, index) - 1
        return shard, index - self._firsts[shard]

    def sample(self, index: int) -> NativeSample:
        """Return a sample; its tensors are views of the map. Raises: IndexError; CacheError."""
        shard, row = self.place(index)
        mapped = self.opened(shard)
        if self._receipts.every_sample:
            self._receipts.check_sample(shard, row, lambda _, stored: row_damage(row_digest(mapped, row)[0], stored))
        return mapped.sample(row)

    def opened(self, shard_index: int) -> MappedShard:
        """Return a shard, mapped in this process. Raises: CacheError if it is not what it was when it was checked."""
        if self._pid != os.getpid():  # a forked worker
            self._open, self._pid = {}, os.getpid()
        mapped = self._open.get(shard_index)
        if mapped is None:
            mapped, counts, header = self._map(shard_index)  # checked again: it may have been replaced since
            self._receipts.check_header(shard_index, header)
            first, behind = self._firsts[shard_index : shard_index + 2]
            if not np.array_equal(counts, self.counts[first:behind]):
                path = shard_path(self.cache_dir, shard_index)
                raise CacheError(path, "other samples than when the cache was opened", "the same", code="E701")
            self._open[shard_index] = mapped
            while len(self._open) > self._max_open:
                with suppress(KeyError, RuntimeError, StopIteration):  # another thread was faster
                    del self._open[next(iter(self._open))]  # views in use keep their map
        return mapped

    def _map(self, shard_index: int) -> tuple[MappedShard, Counts, bytes]:
        path = shard_path(self.cache_dir, shard_index)
        mapped, header = map_shard(path, self.layout, follow_links=self._follow_links)
        return mapped, checked_counts(path, mapped, self.manifest["seq_length"]), header
