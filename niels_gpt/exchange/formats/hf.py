"""Parquet files for `datasets`, transformers and TRL: data/train-NNNNN-of-NNNNN.parquet, and validation-... for val.

A row is a whole document of a pretrain cache, or an example of an sft cache. Its columns:
    id            string, the source id; not there in a cache without ids
    input_ids     list of int32: what datasets and torch read without a cast, of both widths of ours
    labels        list of int32, of an sft cache alone: the id where a token carries loss, else -100; trainers
                  shift them. A pretrain cache has none: trainers copy its input_ids
    position_ids  list of int32: 0, 1, ... in each row
A row group has about 2**20 tokens, and a file the documents that begin in one shard. zstd, as datasets writes.
`datasets.load_dataset(DEST)` finds both splits. The bytes depend on the release of pyarrow.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.documents import id_lines
from niels_gpt.cache.formats import IGNORE_INDEX
from niels_gpt.exchange.formats.hf_rows import MAX_ROW
from niels_gpt.exchange.output import Output
from niels_gpt.exchange.token_cache import TokenCache, TokenFile
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import id_of_line

if TYPE_CHECKING:
    import pyarrow as pa

SPLIT_NAMES = {"train": "train", "val": "validation"}
_GROUP_TOKENS = 1 << 20


def write(cache: TokenCache, output: Output) -> None:
    """Write a parquet file for each shard in which a document begins.

    Raises: CacheError E220 for a document of more than MAX_ROW tokens; ImportError.
    """
    for split, name in SPLIT_NAMES.items():
        rows = _Rows(cache, split)
        parts: list[tuple[list[TokenFile], int, int]] = []
        for file in cache.files(split):
            first, end = rows.beginning_in(file)
            if first < end:
                parts.append(([file], first, end))
            else:  # all of it is in a document that begins before
                parts[-1][0].append(file)
        for number, (files, first, end) in enumerate(parts):
            path = f"data/{name}-{number:05d}-of-{len(parts):05d}.parquet"
            output.write(path, _parquet(rows.batches(first, end)), files)


class _Rows:
    """The rows of a split, read once from the first to the last."""

    def __init__(self, cache: TokenCache, split: str) -> None:
        self._files, self._bounds = cache.files(split), cache.bounds(split)
        self._where = cache.path
        self._ids = id_lines(cache.folder, cache.meta, split) if split in cache.meta.get("ids", {}) else None
        has_loss = cache.kind.has_loss and bool(self._files)
        self._loss = (part for file in self._files for part in file.loss()) if has_loss else None
        self._left: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def beginning_in(self, file: TokenFile) -> tuple[int, int]:
        """Return the first document that begins in a file, and the one after the last."""
        first, end = np.searchsorted(self._bounds[:-1], (file.first, file.first + file.tokens))
        return int(first), int(end)

    def batches(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield documents first to end - 1, about _GROUP_TOKENS tokens at a time."""
        while first < end:
            most = int(np.searchsorted(self._bounds, self._bounds[first] + _GROUP_TOKENS, side="right")) - 1
            until = min(max(most, first + 1), end)
            yield self._batch(np.asarray(self._bounds[first : until + 1]))
            first = until

    def _batch(self, bounds: NDArray[np.int64]) -> pa.RecordBatch:
        import pyarrow as pa

        starts, ids = bounds - bounds[0], self._tokens(int(bounds[0]), int(bounds[-1]))
        if len(ids) > MAX_ROW:
            raise CacheError(self._where, f"a document of {len(ids):,} tokens", f"at most {MAX_ROW:,}", code="E220")
        positions = np.arange(len(ids), dtype=np.int64) - np.repeat(starts[:-1], np.diff(starts))
        offsets = starts.astype(np.int32)
        columns: dict[str, Any] = {}
        if self._ids is not None:
            columns["id"] = pa.array([id_of_line(next(self._ids)) for _ in starts[1:]], pa.string())
        columns["input_ids"] = _lists(offsets, ids)
        if self._loss is not None:
            columns["labels"] = _lists(offsets, np.where(self._take(len(ids)), ids, IGNORE_INDEX))
        columns["position_ids"] = _lists(offsets, positions)
        return pa.record_batch(columns)

    def _tokens(self, begin: int, end: int) -> NDArray[np.int32]:
        parts = [
            file.ids[max(begin - file.first, 0) : end - file.first]
            for file in self._files
            if file.first < end and begin < file.first + file.tokens
        ]
        return np.concatenate(parts).astype(np.int32)

    def _take(self, count: int) -> NDArray[np.bool_]:
        """Return which of the next `count` tokens carry loss."""
        assert self._loss is not None
        parts = [self._left]
        while sum(map(len, parts)) < count:
            parts.append(next(self._loss))
        whole = np.concatenate(parts)
        self._left = whole[count:]
        return whole[:count]


def _lists(offsets: NDArray[np.int32], values: NDArray[Any]) -> pa.Array:
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(np.int32, copy=False)))


class _Sink(io.RawIOBase):
    """A file that keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, content: Any, /) -> int:
        self._parts.append(bytes(content))
        self._at += len(self._parts[-1])
        return len(self._parts[-1])

    def taken(self) -> Iterator[bytes]:
        parts, self._parts = self._parts, []
        yield from parts


def _parquet(batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    """Yield the bytes of a parquet file, a row group for each batch."""
    import pyarrow.parquet as pq

    sink, writer = _Sink(), None
    for batch in batches:
        if writer is None:
            coded = {"position_ids.list.element": "DELTA_BINARY_PACKED"}  # 0.004 bytes a token; PLAIN takes 0.28
            writer = pq.ParquetWriter(
                sink, batch.schema, compression="zstd", use_dictionary=False, column_encoding=coded
            )
        writer.write_batch(batch, row_group_size=batch.num_rows)
        yield from sink.taken()
    if writer is not None:
        writer.close()
        yield from sink.taken()
