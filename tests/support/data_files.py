"""Files of texts and rows, for tests of what reads them."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def write(path: Path, content: bytes | str = b"") -> Path:
    """Write a file and the folders above it; compressed if its name ends in .gz or .zst."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    pack = {".gz": gzip.compress, ".zst": zstd.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(data))
    return path


def lines(*rows: Any) -> bytes:
    """Return rows as JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_parquet(path: Path, columns: Mapping[str, Any] | Any, **options: Any) -> Path:
    """Write columns, or a table, as a parquet file; options: of pyarrow.parquet.write_table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns) if isinstance(columns, Mapping) else columns, path, **options)
    return path


def invalid_utf8(*texts: bytes | None) -> Any:
    """Return an arrow array of strings with these bytes."""
    import pyarrow as pa

    raw = pa.array(texts, pa.binary())
    missing = sum(text is None for text in texts)
    return pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2], raw.buffers()[0], missing, 0)
