"""Web pages: how FineWeb-Edu's rows become documents."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.upstream_rows import UpstreamRows, check_take, samples_of_rows
from niels_gpt.documents import Partition

SOURCE = "fineweb_edu"
DATASET_ID = "HuggingFaceFW/fineweb-edu"


def iter_fineweb_edu(
    *,
    name: str = "CC-MAIN-2024-10",
    split: str = "train",
    streaming: bool = True,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10_000,
    seed: int = 42,
    take: int | None = None,
    source_root: str | os.PathLike[str] = "hub",
    dataset_id: str = DATASET_ID,
    revision: str | None = None,
    counters: Counter[str] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    follow_links: bool = False,
    partition: Partition | None = None,
) -> Iterator[PretrainSample]:
    """Stream FineWeb-Edu documents (PR-02), empty ones included.

    shuffle: by the hub library's own seeded shuffle (D8). Rows of a mirror or the sample come in file order: there the
        cache builder's torch buffer shuffles. A mirror's folder `<name>/` or `data/<name>/` is read alone.
    max_document_bytes: of a row. Larger rows count as "too_large", rows that cannot be read as "unreadable_row", rows
        without a text as "missing_field".
    follow_links: below the mirror's folder; otherwise links count as "links_not_followed".
    partition: whose rows alone are read: see data.files.part. The hub is then streamed, and its shuffle is seeded by
        Partition.seed.
    Raises: ValueError at the end if rows were dropped and none is left.
    """
    check_take(take)
    rows = UpstreamRows(SOURCE, counters, max_document_bytes, partition)
    numbered = rows.read(
        source_root,
        dataset_id,
        split=split,
        revision=revision,
        follow_links=follow_links,
        config=name,
        streaming=streaming,
        shuffle_seed=seed if shuffle else None,
        shuffle_buffer=shuffle_buffer_size,
        inner_folders=(name, f"data/{name}"),
    )
    return islice(samples_of_rows(numbered, rows), take)
