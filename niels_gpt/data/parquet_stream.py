"""Rows out of a parquet file, batch by batch, nested lists and structs as Python lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

BATCH_ROWS = 1_000  # bounds memory; a fineweb-edu row group would be several hundred megabytes


def iter_parquet(path: Path, *, decode: Callable[[bytes], str]) -> Iterator[dict[str, Any]]:
    """Yield the rows in order.

    decode: makes a text of bytes that a column of texts holds although they are not utf-8.
    Raises: ValueError naming the file if it is not a whole parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=BATCH_ROWS):
                columns = [_values_of(column, decode) for column in batch.columns]
                yield from (dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True))
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's: no such file, no right to read it; a page that does not decompress has no number
        raise ValueError(f"{path}: not a whole parquet file ({error}); fetch it again") from error


def _values_of(column: Any, decode: Callable[[bytes], str]) -> list[Any]:
    try:
        return cast(list[Any], column.to_pylist())
    except UnicodeDecodeError:
        return [_with_texts(value, decode) for value in column.cast(_with_bytes(column.type)).to_pylist()]


def _with_bytes(kind: Any) -> Any:
    """Return an arrow type with bytes in place of texts, inside lists and structs too."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([field.with_type(_with_bytes(field.type)) for field in fields])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_with_bytes(kind.value_type))
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind)
    return pa.large_binary() if is_text else kind


def _with_texts(value: Any, decode: Callable[[bytes], str]) -> Any:
    if isinstance(value, bytes):
        return decode(value)
    if isinstance(value, list):
        return [_with_texts(item, decode) for item in value]
    return {key: _with_texts(item, decode) for key, item in value.items()} if isinstance(value, dict) else value
