"""Files of texts and rows, for tests of what reads them."""

import gzip
import io
import json
import sys
from collections.abc import Mapping
from contextlib import contextmanager

import pytest

from niels_gpt.data import chat_shapes, exclude, upstream_rows
from niels_gpt.data.files import json_stream, mirrors, rollouts, rows, walk

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def write(path, content=b""):
    """Write a file and the folders above it; compressed if its name ends in .gz or .zst."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    pack = {".gz": gzip.compress, ".zst": zstd.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(data))
    return path


def lines(*rows):
    """Return rows as JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_parquet(path, columns, **options):
    """Write columns, or a table, as a parquet file; options: of pyarrow.parquet.write_table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns) if isinstance(columns, Mapping) else columns, path, **options)
    return path


def invalid_utf8(*texts):
    """Return an arrow array of strings with these bytes."""
    import pyarrow as pa

    raw = pa.array(texts, pa.binary())
    missing = sum(text is None for text in texts)
    return pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2], raw.buffers()[0], missing, 0)


# --- what the product's readers make of them --------------------------------------------------------------------------


def numbered_rows(path, **how):
    """Yield the rows of a file with their numbers; how: unreadable, columns, max_document_bytes, counters."""
    yield from rows.numbered_rows(path, **how)


def rows_of(*paths, **how):
    """Return the rows of files."""
    return list(rows.iter_rows(paths, **how))


def raw_chat_of_row(row, *, sparse):
    """Return messages and tools of a row, None where it is no chat; sparse: a null is an absent field, at any depth."""
    try:
        return chat_shapes.raw_chat_of(row, sparse=sparse)
    except chat_shapes.NotAChatError:
        return None


def json_values(content):
    """Return the values of a JSON array, or of objects one after the other."""
    return [value for _, value, _ in json_stream.iter_values(io.BytesIO(content), "x")]


def kept_of_the_hub(given, counters, limit):
    """Return the rows of the hub that are no longer than `limit` bytes; the others are counted."""
    of_hub = upstream_rows.UpstreamRows("x", counters, limit).of_hub(enumerate(given), "hub/x")
    return [piece.item for piece in of_hub]


def mirror_files(root, dataset, **how):
    """Return the files of a dataset in a mirror, or with `split` those of a split; how: folders, follow_links."""
    return (mirrors.split_files if "split" in how else mirrors.source_files)(root, dataset, **how)


def fingerprint_of(root, files):
    """Return the fingerprint of a source with these files."""
    return walk.files_fingerprint(root, files)


def exclusion_facts(path):
    """Return what meta.json says of a file of --exclude."""
    return exclude.read_exclusion(path).facts


@contextmanager
def json_blocks(size):
    """Let .json files be read in blocks of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "BLOCK_BYTES", size)
        yield


@contextmanager
def groups_of_at_most(tokens):
    """Let a group of rollouts have at most so many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "MAX_GROUP_TOKENS", tokens)
        yield
