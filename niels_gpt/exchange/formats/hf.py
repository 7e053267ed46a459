"""Parquet files for `datasets`, transformers and TRL: data/train-NNNNN-of-NNNNN.parquet, and validation-... for val.

A row is a whole document of a pretrain cache, or an example of an sft cache. Its columns:
    id            string, the source id; not there in a cache without ids
    input_ids     list of int32: what datasets and torch read without a cast, of both widths of ours
    labels        list of int32, only of an sft cache: the id where a token carries loss, else -100; trainers
                  shift them. A pretrain cache has none: trainers copy its input_ids
    position_ids  list of int32: 0, 1, ... in each row
With a mask an sft cache has neither of these two, but a column of its name: list of int8, 1 where a token carries loss.
It is 0 for the first token of each row, as in every sft cache: nothing predicts that token.
Of a rollout cache a row is a sample, with the columns that `build --rollouts` reads: group, ids, prompt_length, mask,
and the fields that the cache has: logprobs, advantages or advantage, reward.
A row group has about 2**20 tokens, and a file the documents that begin in one shard. zstd, as datasets writes.
`datasets.load_dataset(DEST)` finds both splits. The bytes depend on the release of pyarrow.

An import reads rows of parquet and arrow files with `input_ids`. A row is a document, or with labels or a mask an
example. Tokens whose attention_mask is 0 are padding and left out; rows without tokens too. Both are counted. Which
tokens carry loss is said by `labels` (-100: none; else the token's own id), or by the first of MASK_NAMES in a file.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.documents import id_lines
from niels_gpt.cache.formats import IGNORE_INDEX, SPLITS
from niels_gpt.exchange.foreign import ForeignFile, ForeignFolder, names_below, read_manifest, split_of
from niels_gpt.exchange.names import MASK_NAMES
from niels_gpt.exchange.output import Output, TokenCache, TokenFile
from niels_gpt.storage.arrow_messages import messages
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import id_of_line
from niels_gpt.storage.meta_json import open_regular, path_inside
from niels_gpt.storage.parquet_pages import pages_of
from niels_gpt.tokenizers.document_tokens import end_of_documents

if TYPE_CHECKING:
    import pyarrow as pa

SPLIT_NAMES = {"train": "train", "val": "validation"}
_GROUP_TOKENS = 1 << 20
_ROWS, _BATCH_VALUES, _READ_BYTES = 512, 1 << 20, 1 << 18
_BATCH_BYTES = 1 << 28
"""Most bytes of the names in a batch: a file may repeat one long name."""
_MAX_BATCH = 1 << 30
"""Most bytes of a batch of an arrow file after unpacking, all columns together."""
_MAX_FOOTER = 1 << 26
"""Most bytes of a text, or entries of a list, in the footer of a parquet file."""
MAX_ROW = 1 << 25
"""Most tokens of a row, and values in a page: a text of 64 MiB has about a quarter of them."""
_MAX_PAGE = 9 * MAX_ROW
"""Most bytes of a page after unpacking: ids of 64 bits, and levels that tell where rows end."""
_MAX_NAME = 1 << 16
"""Most bytes of a row's id."""


# --- writing ----------------------------------------------------------------------------------------------------------


def write(cache: TokenCache, output: Output) -> None:
    """Write a parquet file for each shard in which a document begins.

    Raises: CacheError E220 for a document of more than MAX_ROW tokens; ImportError without pyarrow.
    """
    if cache.kind.has("rows"):
        for split, name in SPLIT_NAMES.items():
            if cache.files(split):
                batches = _row_batches(cache.kind.rows(cache.opened, split))
                output.write(f"data/{name}-00000-of-00001.parquet", _parquet(batches))
        return
    for split, name in SPLIT_NAMES.items():
        rows = _Documents(cache, split, output.mask)
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


def _row_batches(rows: Iterator[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    """Yield rows in batches of about _GROUP_TOKENS values of their longest column."""
    import pyarrow as pa

    def column(values: list[Any], sample: Any) -> pa.Array:
        if isinstance(sample, np.ndarray):
            return pa.array(values, pa.list_(pa.from_numpy_dtype(sample.dtype)))
        return pa.array(values, pa.string() if isinstance(sample, str) else type_of.get(type(sample), pa.int32()))

    type_of = {float: pa.float32()}
    waiting: list[dict[str, Any]] = []
    size = 0
    for row in chain(rows, [None]):
        if waiting and (row is None or size >= _GROUP_TOKENS):
            yield pa.record_batch(
                {name: column([each[name] for each in waiting], waiting[0][name]) for name in waiting[0]}
            )
            waiting, size = [], 0
        if row is not None:
            waiting.append(row)
            size += max((len(value) for value in row.values() if isinstance(value, np.ndarray)), default=1)


class _Documents:
    """Documents of a split as rows, read once from first to last."""

    def __init__(self, cache: TokenCache, split: str, mask: str | None) -> None:
        self._mask = mask
        self._files, self._bounds = cache.files(split), cache.bounds(split)
        self._where = cache.path
        self._ids = id_lines(cache.folder, cache.meta, split) if split in cache.meta.get("ids", {}) else None
        has_loss = cache.kind.has_loss and bool(self._files)
        self._loss = (part for file in self._files for part in file.loss()) if has_loss else None
        self._left: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def beginning_in(self, file: TokenFile) -> tuple[int, int]:
        """Return the number of the first document that begins in a file, and the number after the last."""
        first, end = np.searchsorted(self._bounds[:-1], (file.first, file.first + file.tokens))
        return int(first), int(end)

    def batches(self, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield documents `first` to `end` - 1, about _GROUP_TOKENS tokens at a time."""
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
            loss = self._take(len(ids))
            if self._mask is None:
                columns["labels"] = _lists(offsets, np.where(loss, ids, IGNORE_INDEX))
            else:
                columns[self._mask] = _lists(offsets, loss, np.int8)
        if self._mask is None:
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
        """Return whether each of the next `count` tokens carries loss."""
        assert self._loss is not None
        parts = [self._left]
        while sum(map(len, parts)) < count:
            parts.append(next(self._loss))
        whole = np.concatenate(parts)
        self._left = whole[count:]
        return whole[:count]


def _lists(offsets: NDArray[np.int32], values: NDArray[Any], dtype: type[np.signedinteger[Any]] = np.int32) -> pa.Array:
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(dtype, copy=False)))


class _Sink(io.RawIOBase):
    """A file object that keeps its content until it is taken."""

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
    """Yield the bytes of a parquet file with a row group for each batch."""
    import pyarrow.parquet as pq

    sink, writer = _Sink(), None
    for batch in batches:
        if writer is None:
            coded = {
                f"{name}.list.element": "DELTA_BINARY_PACKED"  # 0.004 bytes a token; PLAIN takes 0.28
                for name in batch.schema.names
                if name == "position_ids"
            }
            writer = pq.ParquetWriter(
                sink, batch.schema, compression="zstd", use_dictionary=False, column_encoding=coded
            )
        writer.write_batch(batch, row_group_size=batch.num_rows)
        yield from sink.taken()
    if writer is not None:
        writer.close()
        yield from sink.taken()


# --- reading ----------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Some rows of a file."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    loss: NDArray[np.bool_] | None
    names: list[str] | None
    padding: int
    empty: int


class _FileFacts(NamedTuple):
    """Facts about a file that was read once."""

    tokens: int
    is_masked: bool
    """Whether some token is known to carry no loss."""
    has_loss: bool
    has_names: bool


def read(source: Path, *, val_glob: str | None = None, vocab_size: int | None = None) -> ForeignFolder:
    """Look into a folder of parquet files or of `save_to_disk`, or into one file. Reads every row once.

    Raises: FileNotFoundError; CacheError E221 for a file without lists of ids in `input_ids`, for labels that differ
        from the row's ids, and for masks in some files only; E205 for a link; ImportError without pyarrow.
    """
    manifest, noticed, found = read_manifest(source, "hf"), Counter[str](), list[tuple[str, str, Path, _FileFacts]]()
    names = names_below(source, ".parquet") or names_below(source, ".arrow")
    for name in names:
        path, split = path_inside(source if source.is_dir() else source.parent, name), split_of(name, val_glob)
        if split is None or path.name.startswith("cache-"):  # of datasets' own cache, beside what it saved
            noticed["files_of_a_test_split" if split is None else "cache_files"] += 1
            continue
        if (looked := _look(path, noticed)).tokens:
            found.append((split, name, path, looked))
    if not found:
        raise CacheError(source, "no rows with input_ids", "parquet or arrow files of datasets", code="E221")
    is_masked = any(looked.is_masked for *_, looked in found)
    files = [_file(split, name, path, looked, is_masked) for split, name, path, looked in found]
    cache = (manifest or {}).get("cache", {})
    end = end_of_documents(cache, "niels_gpt.json")
    known = {"vocab_size": cache.get("vocab_size"), "document_end": end[0] if end else None, "manifest": manifest}
    return ForeignFolder(sorted(files, key=lambda file: SPLITS.index(file.split)), noticed=+noticed, **known)


def _look(path: Path, noticed: Counter[str]) -> _FileFacts:
    tokens, is_masked, has_loss, has_names = 0, False, False, False
    for some in _rows(path):
        tokens += len(some.ids)
        noticed["padding_tokens"] += some.padding
        noticed["empty_rows"] += some.empty
        has_loss, has_names = some.loss is not None, some.names is not None
        is_masked = is_masked or (some.loss is not None and not bool(some.loss.all()))
    return _FileFacts(tokens, is_masked, has_loss, has_names)


def _file(split: str, name: str, path: Path, looked: _FileFacts, is_masked: bool) -> ForeignFile:
    if is_masked and not looked.has_loss:
        raise CacheError(path, "has no labels and no mask, and other files have", code="E221")
    more: dict[str, Any] = {"loss": partial(_loss, path)} if is_masked else {}
    if looked.has_names:
        more["ids"] = partial(_names, path)
    return ForeignFile(split, name, looked.tokens, partial(_ids, path), partial(_ends, path), **more)


def _ids(path: Path) -> Iterator[NDArray[Any]]:
    return (some.ids for some in _rows(path))


def _ends(path: Path) -> NDArray[np.int64]:
    return np.cumsum(np.concatenate([some.lengths for some in _rows(path)]))


def _loss(path: Path) -> Iterator[NDArray[np.bool_]]:
    return (some.loss for some in _rows(path) if some.loss is not None)


def _names(path: Path) -> Iterator[str]:
    return (name for some in _rows(path) for name in some.names or ())


def _rows(path: Path) -> Iterator[_Rows]:
    """Yield batches of rows in order, without padding and empty rows."""
    import pyarrow as pa

    first = 0
    try:
        for batch in _batches(path):
            yield _converted(path, batch, first)
            first += batch.num_rows
    except CacheError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CacheError(path, f"not a whole file of rows ({error})"[:300], code="E221") from error


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open(open_regular(path), "rb") as file:
        if path.suffix == ".arrow":
            largest = max((message.num_bytes for message in messages(file.fileno())), default=0)
            if largest > max(_MAX_BATCH, path.stat().st_size):
                found, remedy = f"a batch of {largest:,} bytes when unpacked", "Write it without compression"
                raise CacheError(path, found, f"at most {_MAX_BATCH:,}", remedy, code="E221")
            with pa.ipc.open_stream(file) as stream:
                for batch in stream:
                    batch.validate(full=True)
                    rows = _arrow_rows(batch)
                    yield from (batch.slice(first, rows) for first in range(0, batch.num_rows, rows))
            return
        limits: dict[str, Any] = {"page_checksum_verification": True}
        limits |= dict.fromkeys(("thrift_string_size_limit", "thrift_container_size_limit"), _MAX_FOOTER)
        with pq.ParquetFile(file, buffer_size=_READ_BYTES, pre_buffer=False, **limits) as table:
            names = _read_of(table.schema_arrow.names)
            rows = _parquet_rows(path, table.metadata, file.fileno(), names)
            yield from table.iter_batches(rows, columns=names, use_threads=False)


def _read_of(names: list[str]) -> list[str]:
    """Return the columns to read: of the columns that tell which tokens carry loss, only the first."""
    loss = [name for name in ("labels", *MASK_NAMES) if name in names]
    return [name for name in names if name in ("id", "input_ids", "attention_mask", *loss[:1])]


def _arrow_rows(batch: pa.RecordBatch) -> int:
    """Return how many rows of a batch have about _BATCH_VALUES values, wherever they stand."""
    import pyarrow.compute as pc

    lists = [column for column in batch.columns if _is_list(column.type)]
    longest = max((pc.max(pc.list_value_length(column)).as_py() or 1 for column in lists), default=1)
    return max(1, min(_ROWS, _BATCH_VALUES // max(longest, 1)))


def _parquet_rows(path: Path, about: Any, handle: int, names: list[str]) -> int:
    """Return how many rows have about _BATCH_VALUES values in a column: a book has 200,000 tokens, a chat 200.

    In a row group of more than MAX_ROW values, one row may have as many as the largest page.
    Raises: CacheError for a page of more than MAX_ROW ids: pyarrow decodes whole pages, and a row is in one.
    """
    rows = _ROWS
    for group in map(about.row_group, range(about.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if (name := column.path_in_schema.partition(".")[0]) not in names:
                continue
            places = (column.dictionary_page_offset, column.data_page_offset)
            start, longest, largest = min((place for place in places if place), default=0), 1, 1
            for page in pages_of(handle, start, start + column.total_compressed_size):
                longest, largest = max(longest, page.num_values), max(largest, page.num_bytes)
            if longest > MAX_ROW or largest > _MAX_PAGE:
                found = f"a page of {longest:,} values, or one of {largest:,} bytes"
                raise CacheError(path, found, f"at most {MAX_ROW:,}, and {_MAX_PAGE:,}", code="E221")
            usual = _BATCH_VALUES // max(column.num_values // max(group.num_rows, 1), 1)
            any_rows = _ROWS if column.num_values <= MAX_ROW else MAX_ROW // longest
            rows = min(rows, _BATCH_BYTES // largest if name == "id" else min(usual, any_rows))
    return max(1, rows)


def _converted(path: Path, batch: pa.RecordBatch, first: int) -> _Rows:
    """Return the rows of a batch. first: the number of its first row, for messages."""
    import pyarrow.compute as pc

    names = batch.schema.names
    if "input_ids" not in names:
        raise CacheError(path, f"columns {', '.join(map(str, names))}"[:200], "a column input_ids", code="E221")
    if twice := [name for name in _read_of(names) if names.count(name) > 1]:
        raise CacheError(path, f"{len(twice)} columns called {twice[0]}", "one", code="E221")
    ids, lengths = _flat(path, batch, "input_ids")
    loss = _supervised(path, batch, ids, lengths, first)
    padding = 0
    if "attention_mask" in names:
        attended = _of_equal_lengths(path, batch, "attention_mask", lengths, first) != 0
        padding = int(len(ids) - attended.sum())
        if padding:
            rows = np.repeat(np.arange(len(lengths)), lengths)[attended]
            ids, loss = ids[attended], None if loss is None else loss[attended]
            lengths = np.bincount(rows, minlength=len(lengths)).astype(np.int64)
    is_full = lengths > 0
    told = None
    if "id" in names and _is_text(batch.column("id").type):
        if (longest := pc.max(pc.binary_length(batch.column("id"))).as_py() or 0) > _MAX_NAME:
            raise CacheError(path, f"an id of {longest:,} bytes", f"at most {_MAX_NAME:,}", code="E221")
        told = [str(name) for name, full in zip(batch.column("id").to_pylist(), is_full, strict=True) if full]
    return _Rows(ids, lengths[is_full], loss, told, padding, int(len(lengths) - is_full.sum()))


def _supervised(
    path: Path, batch: pa.RecordBatch, ids: NDArray[Any], lengths: NDArray[np.int64], first: int
) -> NDArray[np.bool_] | None:
    name = next((name for name in ("labels", *MASK_NAMES) if name in batch.schema.names), None)
    if name is None:
        return None
    values = _of_equal_lengths(path, batch, name, lengths, first)
    if name == "labels":
        loss: NDArray[np.bool_] = values != IGNORE_INDEX
        wrong = np.flatnonzero(loss & (values != ids))
        expected = f"{IGNORE_INDEX}, or the id of the same token: labels are not shifted"
    else:
        loss = values != 0
        wrong = np.flatnonzero(loss & (values != 1))
        expected = "0 or 1"
    if len(wrong):
        row = first + int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
        raise CacheError(path, f"{name} of row {row} has {values[wrong[0]]}", expected, code="E221")
    return loss


def _of_equal_lengths(
    path: Path, batch: pa.RecordBatch, name: str, lengths: NDArray[np.int64], first: int
) -> NDArray[Any]:
    values, others = _flat(path, batch, name)
    wrong = np.flatnonzero(others != lengths)
    if len(wrong):
        found = f"{name} of row {first + wrong[0]} has {others[wrong[0]]} values"
        raise CacheError(path, found, f"{lengths[wrong[0]]}, as input_ids", code="E221")
    return values


def _flat(path: Path, batch: pa.RecordBatch, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the numbers in a column of lists end to end, and the length of each row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = batch.column(name)
    if not _is_list(column.type):
        raise CacheError(path, f"{name} is {column.type}"[:200], "lists of integers", code="E221")
    values = pc.list_flatten(column)
    if len(values) > max(MAX_ROW, _BATCH_VALUES):
        raise CacheError(path, f"{name} of a row has {len(values):,} values", f"at most {MAX_ROW:,}", code="E221")
    if not (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)) or values.null_count:
        raise CacheError(path, f"{name} is {column.type}, or has nulls"[:200], "lists of integers", code="E221")
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return values.to_numpy(zero_copy_only=False), lengths


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
