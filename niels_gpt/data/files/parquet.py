"""Rows of a parquet file, batch by batch, in bounded memory; nested lists and structs as Python lists and dicts.

A row has at most `max_row_bytes`. pyarrow allocates whole uncompressed pages and cannot skip one: so a row group with a
page of more than twice that and a usual page, or of more values than bytes, is left out, and all its rows count as too
large. A few bytes can stand for any number of equal values.

Import this module late: it imports pyarrow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from niels_gpt.data.files.part import WHOLE_FILE, Share
from niels_gpt.data.files.text import (
    MAX_DOCUMENT_BYTES,
    NOT_FETCHED,
    TWO_WORDS,
    Problem,
    decode,
    is_pointer,
    open_source,
)
from niels_gpt.storage.errors import SourceError
from niels_gpt.storage.parquet_pages import CODES, Page, pages_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

BATCH_BYTES = 1 << 20  # target of a batch; a row group of fineweb-edu or of books has several hundred megabytes
BATCH_ROWS = 1_000  # at most: smaller batches call arrow more often
PROBE_ROWS = 16
USUAL_PAGE_BYTES = 1 << 20  # pyarrow's; a page ends with the row that reaches it
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY", "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED"}
_USUAL_PAGE_VALUES = 1 << 20
_LIST_BYTES = 64  # of a list or struct in a list: Python needs more, and arrow as few as none
_READ_BYTES = 1 << 18  # of a column chunk at once; without it pyarrow reads the whole of it
_CONVERSION_ERRORS = (ArithmeticError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


def field_names(path: Path) -> list[str]:
    """Return the names of a file's columns, in its order."""
    return list(pq.read_schema(path).names)


def iter_batches(
    path: Path,
    *,
    columns: Collection[str] | None = None,
    max_row_bytes: int = MAX_DOCUMENT_BYTES,
    skip_to: int = 0,
    share: Share = WHOLE_FILE,
) -> Iterator[tuple[range, Any]]:
    """Yield arrow record batches in order, each with its row numbers from 1; a `Problem` for rows that are too large.

    Memory: about BATCH_BYTES of rows, or one row, and one page of each column read, compressed and uncompressed.
    columns: read only these, if the file has them, so that odd values in other columns do no harm.
    max_row_bytes: limit of a row's values in the columns read, as arrow holds them.
    skip_to: leave out batches that end at or before this row. Batches end where the file and `share` decide.
    share: row groups to read if there are at least `share.step` of them, so that the others are not read; else rows.
    Raises: SourceError E302 if it is not a whole parquet file.
    """
    try:
        with (
            open(open_source(path), "rb") as file,
            pq.ParquetFile(file, buffer_size=_READ_BYTES, page_checksum_verification=True) as table,
        ):
            names = [name for name in dict.fromkeys(table.schema_arrow.names) if columns is None or name in columns]
            groups = _Groups(path, table, names, file, max_row_bytes)
            by_group = table.num_row_groups >= share.step
            first = 1
            for group in range(table.num_row_groups):
                if (rows := table.metadata.row_group(group).num_rows) < 0:
                    raise OSError(f"row group {group} has {rows} rows")
                stop = first + rows
                numbers = range(first, stop) if by_group else share.numbers(first, stop)
                if numbers and numbers[-1] > skip_to and (share.has(group) or not by_group):
                    yield from groups.batches(group, first, numbers, skip_to)
                first = stop
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the system: no such file, no permission; a damaged page and a wrong count have no errno
        if isinstance(error, pa.ArrowNotImplementedError):
            raise SourceError(f"{path}: holds what pyarrow cannot read ({error}); write it in another form") from error
        with open(path, "rb") as begin:
            problem = (
                NOT_FETCHED
                if is_pointer(begin.read(1 << 16))
                else f"not a whole parquet file ({error}); fetch it again, or write it in another form"
            )
        raise SourceError(f"{path}: {problem}") from error


# --- a batch as columns, and as rows ----------------------------------------------------------------------------------


def usual_columns(
    batch: Any, texts: Sequence[str], others: Sequence[str]
) -> tuple[list[bytes], dict[str, list[Any]]] | None:
    """Return the texts of a batch in UTF-8 and its other fields; None for a batch that is not usual.

    A batch is usual if its texts are all in one column of strings, or the same in others, its other columns hold
    numbers and strings, all strings are valid UTF-8, and no text is a pointer of git-lfs.
    texts: columns that may hold the text; (): no batch is usual. others: columns to return, where the batch has them.
    """
    names = batch.schema.names
    if len(set(names)) < len(names) or not all(map(_is_usual, batch.schema.types)):
        return None
    strings = [name for name in texts if name in names and _is_string(batch.schema.field(name).type)]  # by unique names
    if not strings:
        return None
    first, *more = (batch.column(name) for name in strings)
    if first.null_count:
        return None
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return None
    values = _bytes_in(first)
    if any(_differ(first, other) for other in more) or any(map(is_pointer, values)):
        return None
    return values, {name: _values_in(batch.column(name)) for name in others if name in names}


def _differ(texts: Any, others: Any) -> bool:
    """Return whether some value of a second array of strings is another text, as `has_other_text` says."""
    is_other = pc.not_equal(texts.cast(others.type), others)
    if not pc.any(is_other).as_py():
        return False
    return bool(pc.any(pc.match_substring_regex(others.filter(is_other), TWO_WORDS)).as_py())


def _is_usual(kind: Any) -> bool:
    types = pa.types
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return bool(is_number or types.is_null(kind) or _is_string(kind))


def _is_string(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _values_in(column: Any) -> list[Any]:
    if _is_string(column.type) and not column.null_count:
        return [value.decode() for value in _bytes_in(column)]  # faster than to_pylist
    return cast(list[Any], column.to_pylist())


def _bytes_in(column: Any) -> list[bytes]:
    """Return the values of an arrow array of strings without nulls."""
    kind = np.dtype(np.int64 if pa.types.is_large_string(column.type) else np.int32)
    _, offsets, values = column.buffers()
    ends = np.frombuffer(offsets, kind, len(column) + 1, column.offset * kind.itemsize)
    begin = int(ends[0])
    data = b"" if values is None else values.slice(begin, int(ends[-1]) - begin).to_pybytes()
    places = (ends - begin).tolist()
    return [data[start:end] for start, end in itertools.pairwise(places)]


def rows_of_batch(
    batch: Any, decode_text: Callable[[bytes], str], path: Path, numbers: range, skip_to: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a batch behind row `skip_to`, with their numbers.

    decode_text: makes a text of invalid UTF-8, and counts the repair.
    Raises: SourceError E302, with column and rows, for a value that Python cannot represent, such as a date after 9999.
    """
    if numbers[0] <= skip_to:  # a batch is decoded whole: its repairs were counted when its first row was yielded
        decode_text = decode
    where, names = f"{path}, rows {numbers[0]} to {numbers[-1]}", batch.schema.names
    columns = zip(names, batch.columns, strict=True)
    values = [_python_values(column, decode_text, f"{where}, column {name!r}") for name, column in columns]
    rows = zip(*values, strict=True) if values else [()] * batch.num_rows
    for number, row in zip(numbers, rows, strict=True):
        if number > skip_to:
            yield number, dict(zip(names, row, strict=True))


def _python_values(column: Any, decode_text: Callable[[bytes], str], where: str) -> list[Any]:
    try:
        try:
            return cast(list[Any], column.to_pylist())
        except UnicodeDecodeError:
            return [_with_texts(value, decode_text) for value in column.cast(_with_bytes(column.type)).to_pylist()]
    except _CONVERSION_ERRORS as error:
        problem = str(error) or type(error).__name__
        raise SourceError(
            f"{where}: found values of type {column.type} that cannot be read ({problem}). Write the file without them"
        ) from error


def _with_bytes(kind: Any) -> Any:
    """Return an arrow type with bytes in place of texts, also inside lists, maps and structs."""
    types = pa.types
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([field.with_type(_with_bytes(field.type)) for field in fields])
    if types.is_map(kind):
        return pa.map_(_with_bytes(kind.key_type), _with_bytes(kind.item_type))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.large_list(_with_bytes(kind.value_type))
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return pa.large_binary() if is_text or types.is_dictionary(kind) else kind


def _with_texts(value: Any, decode_text: Callable[[bytes], str]) -> Any:
    if isinstance(value, bytes):
        return decode_text(value)
    if isinstance(value, list | tuple):  # a map is a list of pairs
        return type(value)(_with_texts(item, decode_text) for item in value)
    return {key: _with_texts(item, decode_text) for key, item in value.items()} if isinstance(value, dict) else value


# --- row groups in batches of bounded size ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chunk:
    """A column of a row group."""

    path: str
    """Its name; in a list or struct, with the names below it."""
    num_bytes: int
    """Uncompressed size."""
    pages: list[Page]
    is_plain: bool
    """Whether no value is dictionary-coded, so that the values of a page are no larger than the page."""
    is_coded: bool
    """Whether every value is dictionary-coded."""
    is_flat: bool
    """Whether each row has one value, so that a page's values are rows."""

    @property
    def largest_page(self) -> int:
        """Bytes of the largest page, uncompressed."""
        return max((page.num_bytes for page in self.pages), default=0)

    def most_rows(self, max_row_bytes: int) -> int:
        """Return how many consecutive rows have at most about max_row_bytes, anywhere in the chunk."""
        largest = self.largest_page
        if not (self.is_plain and self.is_flat):  # any value may be as large as a page; any row may have all its values
            largest = max([largest, *(8 * page.num_values for page in self.pages if not self.is_flat)])
            return max(1, min(BATCH_ROWS, max_row_bytes // max(largest, 1)))
        rows = BATCH_ROWS
        while rows > 1 and self._largest_run(rows) > max(max_row_bytes, largest):
            rows //= 2
        return rows

    def _largest_run(self, rows: int) -> int:
        """Return the most bytes that the pages of `rows` consecutive rows can have."""
        largest = held = values = first = 0
        pages = self.pages
        for last, page in enumerate(pages):
            held, values = held + page.num_bytes, values + page.num_values
            # A run may begin with the last row of its first page, and end with the first row of its last page.
            while first < last and values - pages[first].num_values - page.num_values + 2 > rows:
                held, values, first = held - pages[first].num_bytes, values - pages[first].num_values, first + 1
            largest = max(largest, held)
        return largest


class _Groups:
    """The row groups of a file, read in batches of bounded size."""

    def __init__(self, path: Path, table: Any, names: list[str], file: Any, max_row_bytes: int) -> None:
        self._path, self._table, self._names, self._file, self._limit = path, table, names, file, max_row_bytes
        self._lists = self._coded_lists()
        self._readers: dict[tuple[str, ...], Any] = {(): table}

    def batches(self, group: int, first: int, numbers: range, skip_to: int) -> Iterator[tuple[range, Any]]:
        """Yield the batches or the problems of a row group, as `iter_batches`.

        first: number of the group's first row. numbers: rows to keep, ascending.
        """
        chunks = self._chunks(group)
        largest = max((chunk.largest_page for chunk in chunks), default=0)
        longest = max((page.num_values for chunk in chunks for page in chunk.pages), default=0)
        if largest > 2 * self._limit + USUAL_PAGE_BYTES or longest > max(self._limit, _USUAL_PAGE_VALUES):
            where = f"{self._path}, rows {numbers[0]} to {numbers[-1]}"
            found = f"a page of {largest:,} bytes, or one of {longest:,} values, among these rows"
            found += ", which can only be read together"
            yield numbers, Problem.too_large(where, self._limit, rows=len(numbers), found=found)
            return
        start, every = first, Share((numbers[0] - 1) % numbers.step, numbers.step)
        for part in self._parts(group, chunks):
            wanted = every.numbers(first, first + part.num_rows)
            if wanted and wanted[-1] > skip_to:
                if part.num_rows == 1 and _size_of(part) > self._limit:
                    yield wanted, Problem.too_large(f"{self._path}, row {first}", self._limit)
                elif len(wanted) == part.num_rows:
                    yield wanted, part
                else:  # not take(), which some types do not have, such as string_view
                    yield wanted, pa.concat_batches([part.slice(number - first, 1) for number in wanted])
            first += part.num_rows
        if (missing := start + self._table.metadata.row_group(group).num_rows - first) > 0:
            raise OSError(f"row group {group} lacks {missing} of its rows")

    def _parts(self, group: int, chunks: list[_Chunk]) -> Iterator[Any]:
        """Yield the batches of a row group whole, or row by row if a row of the batch may be too large."""
        coded = [] if self._lists else [chunk for chunk in chunks if self._is_better_in_codes(chunk)]
        for batch in self._in_codes(group, chunks, coded) if coded else self._dense(group, chunks):
            if batch.num_rows == 1 or _size_of(batch) <= self._limit:
                yield batch
            else:
                yield from (batch.slice(row, 1) for row in range(batch.num_rows))

    def _is_better_in_codes(self, chunk: _Chunk) -> bool:
        """Return whether a column's texts are all dictionary-coded, and so large that only a few rows can be expanded.

        A row group of 1,000 web pages, as `datasets` writes it, is such a column.
        """
        kinds = self._table.schema_arrow
        index = kinds.get_field_index(chunk.path)  # -1 for lists, and for equal names
        is_text = index >= 0 and _is_text(kinds.field(index).type)
        return is_text and chunk.is_coded and chunk.is_flat and chunk.most_rows(self._limit) < BATCH_ROWS

    def _dense(self, group: int, chunks: list[_Chunk]) -> Iterator[Any]:
        rows = self._batch_rows(group, self._names, chunks)
        about: dict[str, Any] = {"batch_size": rows, "row_groups": [group], "columns": self._names}
        reader, coded = self._table, self._reader(self._lists)
        if self._lists and any(_size_of(batch) > self._limit for batch in coded.iter_batches(**about)):
            reader = coded  # slower, but a text that a row repeats is expanded only if the row is small
        yield from reader.iter_batches(**about)

    def _in_codes(self, group: int, chunks: list[_Chunk], coded: list[_Chunk]) -> Iterator[Any]:
        """Yield batches for which the columns `coded` are read in codes: these hold each text once, and tell row sizes.

        A batch has at most about BATCH_BYTES, or one row.
        """
        in_codes = [chunk.path for chunk in coded]
        dense = [name for name in self._names if name not in in_codes]
        rows = self._batch_rows(group, dense, [chunk for chunk in chunks if chunk not in coded])
        most = min(BATCH_BYTES, self._limit)
        for batch in self._reader(in_codes).iter_batches(batch_size=rows, row_groups=[group], columns=self._names):
            usual = sum(_bytes_of(batch.column(name)) for name in dense) // max(batch.num_rows, 1)
            sizes: NDArray[np.int64] = np.full(batch.num_rows, usual)
            for name in in_codes:
                sizes += _lengths(batch.column(name))
            ends, start, before = np.cumsum(sizes), 0, 0
            while start < len(ends):
                stop = max(start + 1, int(np.searchsorted(ends, before + most, "right")))
                yield _expanded(batch.slice(start, stop - start), in_codes)
                start, before = stop, int(ends[stop - 1])

    def _reader(self, in_codes: list[str]) -> Any:
        key = tuple(in_codes)
        if key not in self._readers:
            how = {"buffer_size": _READ_BYTES, "page_checksum_verification": True}
            self._readers[key] = pq.ParquetFile(self._file, read_dictionary=in_codes, **how)
        return self._readers[key]

    def _batch_rows(self, group: int, names: list[str], chunks: list[_Chunk]) -> int:
        """Return how many rows of a row group make about BATCH_BYTES, and nowhere much more than the limit."""
        num_rows = max(self._table.metadata.row_group(group).num_rows, 1)
        bytes_per_row = sum(chunk.num_bytes for chunk in chunks) / num_rows
        most = min([chunk.most_rows(self._limit) for chunk in chunks], default=BATCH_ROWS)
        if not all(chunk.is_plain for chunk in chunks) and num_rows > PROBE_ROWS * 2:
            # A dictionary-coded text that 1,000 rows repeat is stored, and counted, once.
            rows = max(1, min(most, PROBE_ROWS, int(BATCH_BYTES / max(bytes_per_row, 1))))
            probe = next(self._table.iter_batches(batch_size=rows, row_groups=[group], columns=names))
            bytes_per_row = max(bytes_per_row, probe.nbytes / probe.num_rows)
        return max(1, min(most, int(BATCH_BYTES / max(bytes_per_row, 1))))

    def _chunks(self, group: int) -> list[_Chunk]:
        about, chunks = self._table.metadata.row_group(group), []
        for number in range(about.num_columns):
            chunk = about.column(number)
            if not self._reads(chunk.path_in_schema):
                continue
            size = int(chunk.total_uncompressed_size)
            start = min((place for place in (chunk.dictionary_page_offset, chunk.data_page_offset) if place), default=0)
            try:
                pages = list(pages_of(self._file.fileno(), start, start + chunk.total_compressed_size))
            except ValueError:  # damaged, which pyarrow reports better, or unusual: use the footer
                pages = [Page(int(chunk.num_values), size, False, -1)]
            is_flat = self._table.schema.column(number).max_repetition_level == 0
            values = sum(page.num_values for page in pages if not page.is_dictionary)
            if values != chunk.num_values or (is_flat and values != about.num_rows):
                counts = f"{about.num_rows} rows, and {values} of {chunk.num_values} values"
                raise OSError(f"row group {group} has {counts} in a column")
            is_coded = all(page.is_dictionary or page.encoding in CODES for page in pages)
            chunks.append(_Chunk(chunk.path_in_schema, size, pages, _is_plain(chunk), is_coded, is_flat))
        return chunks

    def _coded_lists(self) -> list[str]:
        """Return the columns of texts in lists that are dictionary-coded in some row group.

        A row can repeat a large text there any number of times, so its size is known only from the codes.
        """
        coded: dict[str, None] = {}
        table = self._table
        for number in range(len(table.schema)):
            column = table.schema.column(number)
            is_list = column.max_repetition_level > 0 and column.physical_type == "BYTE_ARRAY"
            if is_list and self._reads(column.path):
                groups = (table.metadata.row_group(group).column(number) for group in range(table.num_row_groups))
                if not all(map(_is_plain, groups)):
                    coded[column.path] = None
        return list(coded)

    def _reads(self, path: str) -> bool:
        """Return whether a column, which may be inside a list or struct, is among those that are read."""
        return any(f"{path}.".startswith(f"{name}.") for name in self._names)


def _is_plain(chunk: Any) -> bool:
    return not chunk.has_dictionary_page and set(chunk.encodings) <= _PLAIN


def _expanded(batch: Any, coded: list[str]) -> Any:
    """Return a batch with texts in place of codes in the columns `coded`."""
    names = batch.schema.names
    columns = zip(names, batch.columns, strict=True)
    values = [column.dictionary_decode() if name in coded else column for name, column in columns]
    return pa.RecordBatch.from_arrays(values, names=names)


def _lengths(column: Any) -> NDArray[np.int64]:
    """Return the bytes of each text of a dictionary-coded column, int64 [rows]; 0 for null."""
    lengths = pc.binary_length(column.dictionary).cast(pa.int64()).take(column.indices)
    if lengths.null_count:
        lengths = lengths.fill_null(0)
    # Not fill_null in any case, nor to_numpy: arrow imports pandas for them.
    return np.frombuffer(lengths.buffers()[1], np.int64, len(lengths), 8 * lengths.offset)


def _size_of(batch: Any) -> int:
    return sum(map(_bytes_of, batch.columns))


def _bytes_of(array: Any, of_list: int = 0) -> int:
    """Return the bytes of an arrow array, counting each value of a dictionary as often as it is used.

    of_list: bytes that a list or struct counts as, beside its values. A value counts as one byte at least.
    """
    if pa.types.is_dictionary(array.type) and _is_text(array.type.value_type):
        return int(_lengths(array).sum())
    if pa.types.is_struct(array.type):
        return of_list * len(array) + sum(_bytes_of(field, of_list) for field in array.flatten())
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        return of_list * len(array) + _bytes_of(array.flatten(), _LIST_BYTES)
    if pa.types.is_map(array.type):
        return _bytes_of(array.cast(pa.list_(pa.struct([array.type.key_field, array.type.item_field]))), of_list)
    return max(int(array.nbytes), len(array))


def _is_text(kind: Any) -> bool:
    known = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_kind(kind) for is_kind in known)
