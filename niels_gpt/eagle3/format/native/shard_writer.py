"""One native shard: a sample at its own place in a file of its final size, in any order; then the receipt.

Memory does not grow with the shard, but for the starts and a bit a token. The bytes equal those of safetensors'
save_file for the same tensors. The XXH3-128 of a sample in the receipt is over its three counts as int64, its ids, its
loss mask as one byte a token, its auxiliary states, scales, last hidden states, log-normalizers and argmax, as stored.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.eagle3.format.layout import MAX_ROWS, PathLike, refuse_links, row_bytes_of, shard_path, tensors_header
from niels_gpt.eagle3.format.native.layout import STARTS, Counts, NativeLayout
from niels_gpt.eagle3.format.native.rows import row_counts
from niels_gpt.eagle3.format.native.sample import NativeSample
from niels_gpt.eagle3.format.shard_writer import commit_shard, digest_of, receipt_path
from niels_gpt.storage import fileio
from niels_gpt.storage.fileio import SizedFile

ROW_TENSORS = {
    "input_ids": 0,
    "aux_hidden_states": 1,
    "aux_scales": 1,
    "last_hidden_states": 2,
    "log_normalizers": 2,
    "argmax_ids": 2,
}
"""Tensor -> which of a sample's counts is its number of rows."""


class NativeShardWriter:
    """Writes one shard: `write` each sample once, in any order, then `commit`. On failure `discard`.

    A producer holds the lock of its folder, as with `ShardWriter`.
    """

    def __init__(self, cache_dir: PathLike, shard_index: int, layout: NativeLayout, counts: Counts) -> None:
        """counts: int64 [n, 3] of the shard's samples, as of `row_counts`. The folder is created if needed.

        Raises: ValueError for no sample or more than `MAX_ROWS`; CacheError where a file of the cache is a link.
        """
        if not 0 < len(counts) <= MAX_ROWS or counts.shape[1:] != (3,) or int(counts.min()) < 0:
            raise ValueError(
                f"counts of shape {list(counts.shape)}, expected [n, 3] from 0, and n from 1 to {MAX_ROWS:,}"
            )
        refuse_links(cache_dir)
        self._cache_dir, self._index, self._layout = cache_dir, shard_index, layout
        self._path = Path(shard_path(cache_dir, shard_index))
        self._starts = np.zeros((len(counts) + 1, 3), np.int64)
        np.cumsum(counts, axis=0, out=self._starts[1:])
        self._tensors = layout.fields(counts)
        self._header = tensors_header(self._tensors)
        self._begins: dict[str, int] = {}
        self._size = len(self._header)
        for name, tensor in self._tensors.items():
            self._begins[name] = self._size
            self._size += row_bytes_of(tensor)
        self._bits = np.zeros(self._tensors["loss_bits"][1], np.uint8)
        self._slots, self._digests = counts[:, 0].tolist(), [""] * len(counts)
        fileio.make_dir(receipt_path(cache_dir, shard_index).parent)
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.tmp")
        self._file = SizedFile(temporary, self._size)

    def write(self, row: int, sample: NativeSample) -> None:
        """Write the sample `row` of the shard; its tensors are on the CPU.

        Raises: ValueError for other dtypes, shapes or counts, and for a row written twice; OSError on a full disk.
        """
        if not 0 <= row < len(self._digests):
            raise ValueError(f"{self._path}: row {row}, expected 0 <= row < {len(self._digests)}")
        if self._digests[row]:
            raise ValueError(f"{self._path}: row {row} was written already")
        begins, ends = self._starts[row], self._starts[row + 1]
        pieces = self._pieces(row, sample)
        for name, piece in pieces.items():
            dtype, (_, *shape) = self._tensors[name]
            offset = int(begins[ROW_TENSORS[name]]) * row_bytes_of((dtype, tuple(shape)))
            self._file.write(self._begins[name] + offset, piece)
        loss = np.ascontiguousarray(sample.loss_mask, np.uint8)
        self._put_bits(int(begins[0]), int(ends[0]), loss)
        self._digests[row] = sample_digest(ends - begins, loss, pieces)

    def commit(
        self, facts: Mapping[str, Any] | None = None, check: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        """Rename the shard to its final name, durably, write its receipt, and return the receipt.

        facts: stored in the receipt. check: called before the shard is renamed; what it raises prevents that.
        Raises: ValueError if a sample was not written.
        """
        if "" in self._digests:
            raise ValueError(f"{self._path}: row {self._digests.index('')} was not written")
        for name, starts in zip(STARTS, self._starts.T, strict=True):
            self._file.write(self._begins[name], np.ascontiguousarray(starts))
        self._file.write(self._begins["loss_bits"], self._bits)
        self._file.write(0, self._header)
        return commit_shard(
            self._file, self._cache_dir, self._index, self._size, self._header, self._slots, self._digests, facts, check
        )

    def discard(self) -> None:
        """Remove the temporary file. After `commit` this does nothing."""
        self._file.close()
        fileio.remove(self._file.path)

    def _pieces(self, row: int, sample: NativeSample) -> dict[str, NDArray[np.uint8]]:
        """Return the bytes of a sample's tensors, in the order of ROW_TENSORS. Raises: ValueError."""
        counts = self._starts[row + 1] - self._starts[row]
        length = len(sample.loss_mask)
        stated = row_counts(np.array([0, length]), sample.loss_mask)[0] if length else counts * 0
        if stated.tolist() != counts.tolist():
            raise ValueError(
                f"{self._path}: row {row} has (tokens, auxiliary rows, target rows) {stated.tolist()} by its loss "
                f"mask, expected {counts.tolist()}"
            )
        argmax = sample.argmax_ids
        if len(argmax) and not 0 <= int(argmax.min()) <= int(argmax.max()) < 1 << 32:
            raise ValueError(f"{self._path}: row {row}: argmax_ids from {int(argmax.min())} to {int(argmax.max())}")
        given = {
            "input_ids": torch.from_numpy(np.asarray(sample.input_ids)),
            "aux_hidden_states": sample.aux_hidden_states,
            "aux_scales": sample.aux_scales,
            "last_hidden_states": sample.last_hidden_states,
            "log_normalizers": sample.log_normalizers,
            "argmax_ids": argmax.to(torch.uint32),
        }
        return {
            name: self._bytes_of(row, name, tensor, int(counts[ROW_TENSORS[name]]))
            for name, tensor in given.items()
            if name in self._tensors or tensor is not None
        }

    def _bytes_of(self, row: int, name: str, tensor: torch.Tensor | None, rows: int) -> NDArray[np.uint8]:
        dtype, shape = self._tensors.get(name, (None, (0,)))
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != (rows, *shape[1:]):
            found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{self._path}: row {row}: {name} is {found}, expected {dtype} {[rows, *shape[1:]]}")
        if not tensor.numel():  # a view of no bytes
            return np.empty(0, np.uint8)
        return tensor.detach().contiguous().view(torch.uint8).numpy().reshape(-1)

    def _put_bits(self, begin: int, end: int, loss: NDArray[np.uint8]) -> None:
        first, behind = begin // 8, -(-end // 8)
        bits = np.unpackbits(self._bits[first:behind], bitorder="little")
        bits[begin - 8 * first : end - 8 * first] = loss
        self._bits[first:behind] = np.packbits(bits, bitorder="little")


def sample_digest(counts: NDArray[np.int64], loss: NDArray[np.uint8], pieces: Mapping[str, NDArray[np.uint8]]) -> str:
    """Return a sample's XXH3-128, as it is in the receipt.

    counts: int64 [3]. loss: [L], 0 or 1. pieces: the bytes of its tensors by name.
    """
    ids, *others = (pieces[name] for name in ROW_TENSORS if name in pieces)
    return digest_of([np.ascontiguousarray(counts, "<i8").view(np.uint8), ids, loss, *others])
