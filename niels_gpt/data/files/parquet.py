"""Rows of a parquet file, batch by batch, in bounded memory; nested lists and structs as Python lists and dicts.

A row has at most `max_row_bytes`. pyarrow allocates whole uncompressed pages and cannot skip one: so a row group with a
page of more than twice that and a usual page, or of more values than bytes, is left out, and all its rows count as too
large. A few bytes can stand for any number of equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from niels_gpt.data.files.part import WHOLE_FILE, Share
from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES, NOT_FETCHED, Problem, is_pointer, open_source
from niels_gpt.data.files.text import decode as decode_text
from niels_gpt.storage.errors import SourceError
from niels_gpt.storage.parquet_pages import CODES, Page, pages_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BATCH_BYTES = 1 << 20  # target of a batch; a row group of fineweb-edu or of books has several hundred megabytes
BATCH_ROWS = 1_000  # at most. Rows of 2 kB are equally fast within 10 % with 125 to 1,000; 32 take 1.3 times as long
PROBE_ROWS = 16
USUAL_PAGE_BYTES = 1 << 20  # pyarrow's; a page ends with the row that reaches it
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY", "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED"}
_USUAL_PAGE_VALUES = 1 << 20
_LIST_BYTES = 64  # of a list or struct in a list: Python needs more, and arrow as few as none
_READ_BYTES = 1 << 18  # of a column chunk at once; without it pyarrow reads the whole of it
_CONVERSION_ERRORS = (ArithmeticError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


def iter_parquet(
    path: Path,
    *,
    decode: Callable[[bytes], str],
    columns: Collection[str] | None = None,
    max_row_bytes: int = MAX_DOCUMENT_BYTES,
    skip_to: int = 0,
    share: Share = WHOLE_FILE,
) -> Iterator[tuple[int, dict[str, Any] | Problem]]:
    """Yield the rows in order, each with its number from 1; a `Problem` instead of rows that are too large.

    decode: makes a text of invalid UTF-8 in a column of texts.
    skip_to: number of a row that was yielded before; the rows up to it are skipped. Rows are decoded in batches, so
        `decode` was already called for the rest of its batch, and is not called for these again.
    The rest: as `iter_batches`.
    Raises: ValueError naming the file if it is not a whole parquet file, and with column and rows for a value that
        Python cannot represent, such as a date after the year 9999.
    """
    batches = iter_batches(path, columns=columns, max_row_bytes=max_row_bytes, skip_to=skip_to, share=share)
    for numbers, batch in batches:
        if isinstance(batch, Problem):
            yield numbers[0], batch
        else:
            yield from rows_of_batch(batch, decode, path, numbers, skip_to)


def iter_batches(
    path: Path,
    *,
    columns: Collection[str] | None = None,
    max_row_bytes: int = MAX_DOCUMENT_BYTES,
    skip_to: int = 0,
    share: Share = WHOLE_FILE,
) -> Iterator[tuple[range, Any]]:
    """Yield arrow record batches in order, each with the numbers of its rows; a `Problem` as in `iter_parquet`.

    Memory: about BATCH_BYTES of rows, or one row, and one page of each column read, compressed and uncompressed.
    columns: the only ones to read, as far as the file has them; odd values in other columns then do no harm.
    max_row_bytes: of a row's values in the columns read, as arrow holds them.
    skip_to: batches without a row behind this one are left out. Where batches end depends on the file and `share`.
    share: which row groups, where there are at least `share.step` of them, as the others are not read; else which rows.
    Raises: ValueError naming the file if it is not a whole parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with (
            open(open_source(path), "rb") as file,
            pq.ParquetFile(file, buffer_size=_READ_BYTES, page_checksum_verification=True) as table,
        ):
            names = [name for name in dict.fromkeys(table.schema_arrow.names) if columns is None or name in columns]
            read = _Groups(table, names, file, max_row_bytes)
            by_group = table.num_row_groups >= share.step
            first = 1
            for group in range(table.num_row_groups):
                if (rows := table.metadata.row_group(group).num_rows) < 0:
                    raise OSError(f"row group {group} has {rows} rows")
                stop = first + rows
                numbers = range(first, stop) if by_group else share.numbers(first, stop)
                if numbers and numbers[-1] > skip_to and (share.has(group) or not by_group):
                    chunks = _chunks(table, group, names, file.fileno())
                    yield from read.batches(path, group, chunks, first, numbers, skip_to)
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


class _Groups:
    """The row groups of a file, read in batches of bounded size."""

    def __init__(self, table: Any, names: list[str], file: Any, max_row_bytes: int) -> None:
        self._table, self._names, self._file, self._limit = table, names, file, max_row_bytes
        self._lists = _coded_lists(table, names)
        self._readers: dict[tuple[str, ...], Any] = {(): table}

    def batches(
        self, path: Path, group: int, chunks: list[_Chunk], first: int, numbers: range, skip_to: int
    ) -> Iterator[tuple[range, Any]]:
        """Yield the batches or the problems of a row group, as `iter_batches`.

        first: number of the group's first row. numbers: of those of its rows that are wanted.
        """
        pages = [page for chunk in chunks for page in chunk.pages]
        largest = max((page.num_bytes for page in pages), default=0)
        longest = max((page.num_values for page in pages), default=0)
        if largest > 2 * self._limit + USUAL_PAGE_BYTES or longest > max(self._limit, _USUAL_PAGE_VALUES):
            where = f"{path}, rows {numbers[0]} to {numbers[-1]}"
            found = f"a page of {largest:,} bytes, or one of {longest:,} values, among these rows"
            found += ", which can only be read together"
            yield numbers, Problem.too_large(where, self._limit, rows=len(numbers), found=found)
            return
        start, every = first, Share((numbers[0] - 1) % numbers.step, numbers.step)
        for part in self.parts(group, chunks):
            wanted = every.numbers(first, first + part.num_rows)
            if wanted and wanted[-1] > skip_to:
                if part.num_rows == 1 and _size_of(part) > self._limit:
                    yield wanted, Problem.too_large(f"{path}, row {first}", self._limit)
                else:
                    yield wanted, _rows_at(part, [number - first for number in wanted])
            first += part.num_rows
        if (missing := start + self._table.metadata.row_group(group).num_rows - first) > 0:
            raise OSError(f"row group {group} lacks {missing} of its rows")

    def parts(self, group: int, chunks: list[_Chunk]) -> Iterator[Any]:
        """Yield the batches of a row group whole, or row by row if a row of the batch may be too large."""
        kinds = self._table.schema_arrow
        at = {chunk.path: kinds.get_field_index(chunk.path) for chunk in chunks}  # -1 for lists, and for equal names
        texts = [path for path, index in at.items() if index >= 0 and _is_text(kinds.field(index).type)]
        in_codes = [chunk.path for chunk in chunks if chunk.path in texts and _is_better_in_codes(chunk, self._limit)]
        if in_codes and not self._lists:
            batches = self._in_codes(group, in_codes, [chunk for chunk in chunks if chunk.path not in in_codes])
        else:
            batches = self._dense(group, chunks)
        for batch in batches:
            if batch.num_rows == 1 or _size_of(batch) <= self._limit:
                yield batch
            else:
                yield from (batch.slice(row, 1) for row in range(batch.num_rows))

    def _dense(self, group: int, chunks: list[_Chunk]) -> Iterator[Any]:
        rows = _batch_rows(self._table, group, self._names, chunks, self._limit)
        about: dict[str, Any] = {"batch_size": rows, "row_groups": [group], "columns": self._names}
        reader, coded = self._table, self._reader(self._lists)
        if self._lists and any(_size_of(batch) > self._limit for batch in coded.iter_batches(**about)):
            reader = coded  # slower, but a text that a row repeats is expanded only if the row is small
        yield from reader.iter_batches(**about)

    def _in_codes(self, group: int, coded: list[str], others: list[_Chunk]) -> Iterator[Any]:
        """Yield batches of which some columns are read in codes: their texts are held once, and tell each row's size.

        others: the chunks of the other columns.
        """
        import numpy as np

        dense = [name for name in self._names if name not in coded]
        rows = _batch_rows(self._table, group, dense, others, self._limit)
        reader = self._reader(coded)
        for batch in reader.iter_batches(batch_size=rows, row_groups=[group], columns=self._names):
            usual = sum(_bytes_of(batch.column(name)) for name in dense) // max(batch.num_rows, 1)
            sizes = np.full(batch.num_rows, usual)
            for name in coded:
                sizes += _lengths(batch.column(name)).fill_null(0).to_numpy(zero_copy_only=False)
            for start, stop in _runs(sizes, min(BATCH_BYTES, self._limit)):
                yield _expanded(batch.slice(start, stop - start), coded)

    def _reader(self, in_codes: list[str]) -> Any:
        import pyarrow.parquet as pq

        key = tuple(in_codes)
        if key not in self._readers:
            how = {"buffer_size": _READ_BYTES, "page_checksum_verification": True}
            self._readers[key] = pq.ParquetFile(self._file, read_dictionary=in_codes, **how)
        return self._readers[key]


def _rows_at(batch: Any, places: list[int]) -> Any:
    """Return some rows of a batch, in order."""
    import pyarrow as pa

    if len(places) == batch.num_rows:
        return batch
    # Not take(), which some types do not have, such as string_view.
    return pa.concat_batches([batch.slice(place, 1) for place in places])


def _is_better_in_codes(chunk: _Chunk, max_row_bytes: int) -> bool:
    """Whether a column's texts are all dictionary-coded, and may be so large that only a few rows can be expanded.

    A row group of 1,000 web pages, as `datasets` writes it, is such a column.
    """
    return chunk.is_coded and chunk.is_flat and _most_rows(chunk, max_row_bytes) < BATCH_ROWS


def _runs(sizes: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Cut rows of these sizes into runs of at most `most` bytes, or of one row; yield each run's first row and end."""
    import numpy as np

    ends, start = np.cumsum(sizes), 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, "right")))
        yield start, stop
        start = stop


def _expanded(batch: Any, coded: list[str]) -> Any:
    import pyarrow as pa

    names = batch.schema.names
    columns = zip(names, batch.columns, strict=True)
    values = [column.dictionary_decode() if name in coded else column for name, column in columns]
    return pa.RecordBatch.from_arrays(values, names=names)


def _lengths(column: Any) -> Any:
    """Return the bytes of each text of a dictionary-coded column, as an arrow array."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.binary_length(column.dictionary).cast(pa.int64()).take(column.indices)


def _size_of(batch: Any) -> int:
    return sum(map(_bytes_of, batch.columns))


def _bytes_of(array: Any, of_list: int = 0) -> int:
    """Return the bytes of an arrow array, counting each value of a dictionary as often as it is used.

    of_list: bytes that a list or struct counts as, beside its values. A value counts as one byte at least.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type) and _is_text(array.type.value_type):
        return int(pc.sum(_lengths(array)).as_py() or 0)
    if pa.types.is_struct(array.type):
        return of_list * len(array) + sum(_bytes_of(field, of_list) for field in array.flatten())
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        return of_list * len(array) + _bytes_of(array.flatten(), _LIST_BYTES)
    if pa.types.is_map(array.type):
        return _bytes_of(array.cast(pa.list_(pa.struct([array.type.key_field, array.type.item_field]))), of_list)
    return max(int(array.nbytes), len(array))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    known = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_kind(kind) for is_kind in known)


def _coded_lists(table: Any, names: list[str]) -> list[str]:
    """Return the columns of texts in lists that are dictionary-coded in some row group.

    A row can repeat a large text there any number of times, so its size is known only from the codes.
    """
    coded: dict[str, None] = {}
    for number in range(len(table.schema)):
        column = table.schema.column(number)
        if column.max_repetition_level == 0 or column.physical_type != "BYTE_ARRAY" or not _is_in(column.path, names):
            continue
        groups = (table.metadata.row_group(group).column(number) for group in range(table.num_row_groups))
        if not all(_is_plain(chunk) for chunk in groups):
            coded[column.path] = None
    return list(coded)


def _is_in(path: str, names: list[str]) -> bool:
    return any(f"{path}.".startswith(f"{name}.") for name in names)


def _is_plain(chunk: Any) -> bool:
    return not chunk.has_dictionary_page and set(chunk.encodings) <= _PLAIN


def rows_of_batch(
    batch: Any, decode: Callable[[bytes], str], path: Path, numbers: range, skip_to: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a batch, which have these numbers; those up to `skip_to` are left out."""
    if numbers[0] > skip_to:
        yield from _rows_of(batch, decode, path, numbers)
    else:  # repairs in this batch were counted when its first row was read
        again = _rows_of(batch, decode_text, path, numbers)
        yield from (row for row in again if row[0] > skip_to)


def _rows_of(
    batch: Any, decode: Callable[[bytes], str], path: Path, numbers: range
) -> Iterator[tuple[int, dict[str, Any]]]:
    where = f"{path}, rows {numbers[0]} to {numbers[-1]}"
    fields = batch.schema.names
    values = [
        _values_of(column, decode, f"{where}, column {name!r}")
        for name, column in zip(fields, batch.columns, strict=True)
    ]
    rows = zip(*values, strict=True) if values else [()] * batch.num_rows
    yield from ((number, dict(zip(fields, row, strict=True))) for number, row in zip(numbers, rows, strict=True))


def field_names(path: Path) -> list[str]:
    """Return the names of a file's columns, in its order."""
    import pyarrow.parquet as pq

    return list(pq.read_schema(path).names)


@dataclass(frozen=True)
class _Chunk:
    """A column of a row group."""

    path: str
    """Its name; in a list or struct, with the names below it."""
    num_bytes: int
    """Uncompressed."""
    pages: list[Page]
    is_plain: bool
    """Whether no value is dictionary-coded, so that the values of a page are no larger than the page."""
    is_coded: bool
    """Whether every value is dictionary-coded."""
    is_flat: bool
    """Whether each row has one value, so that a page's values are rows."""


def _chunks(table: Any, group: int, names: list[str], handle: int) -> list[_Chunk]:
    about, chunks = table.metadata.row_group(group), []
    for number in range(about.num_columns):
        chunk = about.column(number)
        if not _is_in(chunk.path_in_schema, names):
            continue
        size = int(chunk.total_uncompressed_size)
        start = min((place for place in (chunk.dictionary_page_offset, chunk.data_page_offset) if place), default=0)
        try:
            pages = list(pages_of(handle, start, start + chunk.total_compressed_size))
        except ValueError:  # damaged, which pyarrow reports better, or unusual: use the footer
            pages = [Page(int(chunk.num_values), size, False, -1)]
        is_flat = table.schema.column(number).max_repetition_level == 0
        values = sum(page.num_values for page in pages if not page.is_dictionary)
        if values != chunk.num_values or (is_flat and values != about.num_rows):
            counts = f"{about.num_rows} rows, and {values} of {chunk.num_values} values"
            raise OSError(f"row group {group} has {counts} in a column")
        is_coded = all(page.is_dictionary or page.encoding in CODES for page in pages)
        chunks.append(_Chunk(chunk.path_in_schema, size, pages, _is_plain(chunk), is_coded, is_flat))
    return chunks


def _batch_rows(table: Any, group: int, names: list[str], chunks: list[_Chunk], max_row_bytes: int) -> int:
    """Return how many rows of a row group make about BATCH_BYTES, and nowhere much more than max_row_bytes."""
    num_rows = max(table.metadata.row_group(group).num_rows, 1)
    bytes_per_row = sum(chunk.num_bytes for chunk in chunks) / num_rows
    most = min([_most_rows(chunk, max_row_bytes) for chunk in chunks], default=BATCH_ROWS)
    if not all(chunk.is_plain for chunk in chunks) and num_rows > PROBE_ROWS * 2:
        # A dictionary-coded text that 1,000 rows repeat is stored, and counted, once.
        rows = max(1, min(most, PROBE_ROWS, int(BATCH_BYTES / max(bytes_per_row, 1))))
        probe = next(table.iter_batches(batch_size=rows, row_groups=[group], columns=names))
        bytes_per_row = max(bytes_per_row, probe.nbytes / probe.num_rows)
    return max(1, min(most, int(BATCH_BYTES / max(bytes_per_row, 1))))


def _most_rows(chunk: _Chunk, max_row_bytes: int) -> int:
    """Return how many consecutive rows of a column have at most about max_row_bytes, anywhere in the chunk."""
    largest = max((page.num_bytes for page in chunk.pages), default=0)
    if not (chunk.is_plain and chunk.is_flat):  # any value may be as large as a page, and any row have all its values
        largest = max([largest, *(8 * page.num_values for page in chunk.pages if not chunk.is_flat)])
        return max(1, min(BATCH_ROWS, max_row_bytes // max(largest, 1)))
    rows = BATCH_ROWS
    while rows > 1 and _largest_run(chunk.pages, rows) > max(max_row_bytes, largest):
        rows //= 2
    return rows


def _largest_run(pages: list[Page], rows: int) -> int:
    """Return the most bytes that the pages of `rows` consecutive rows can have."""
    largest = held = values = first = 0
    for last, page in enumerate(pages):
        held, values = held + page.num_bytes, values + page.num_values
        # A run may begin with the last row of its first page, and end with the first row of its last page.
        while first < last and values - pages[first].num_values - page.num_values + 2 > rows:
            held, values, first = held - pages[first].num_bytes, values - pages[first].num_values, first + 1
        largest = max(largest, held)
    return largest


def _values_of(column: Any, decode: Callable[[bytes], str], where: str) -> list[Any]:
    try:
        try:
            return cast(list[Any], column.to_pylist())
        except UnicodeDecodeError:
            return [_with_texts(value, decode) for value in column.cast(_with_bytes(column.type)).to_pylist()]
    except _CONVERSION_ERRORS as error:
        problem = str(error) or type(error).__name__
        raise SourceError(
            f"{where}: found values of type {column.type} that cannot be read ({problem}). Write the file without them"
        ) from error


def _with_bytes(kind: Any) -> Any:
    """Return an arrow type with bytes in place of texts, also inside lists, maps and structs."""
    import pyarrow as pa

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


def _with_texts(value: Any, decode: Callable[[bytes], str]) -> Any:
    if isinstance(value, bytes):
        return decode(value)
    if isinstance(value, list | tuple):  # a map is a list of pairs
        return type(value)(_with_texts(item, decode) for item in value)
    return {key: _with_texts(item, decode) for key, item in value.items()} if isinstance(value, dict) else value
