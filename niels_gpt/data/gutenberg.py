"""Books: English texts of Project Gutenberg, a file of a mirror or a row of a table each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from niels_gpt.data.files.mirrors import KNOWN_SUFFIXES
from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.upstream_rows import UpstreamRows, check_take, samples_of_rows
from niels_gpt.documents import Partition

SOURCE = "gutenberg"
FOLDER = "gutenberg"
BOOK_SUFFIXES = (".txt", ".md")


def iter_gutenberg(
    *,
    dataset_id: str = "nikolina-p/gutenberg_clean_en_splits",
    split: str = "train",
    streaming: bool = True,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10_000,
    seed: int = 42,
    take: int | None = None,
    source_root: str | os.PathLike[str] = "hub",
    revision: str | None = None,
    counters: Counter[str] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    follow_links: bool = False,
    partition: Partition | None = None,
) -> Iterator[PretrainSample]:
    """Stream books; shuffling, counters, links and partitions as in iter_fineweb_edu (PR-02).

    A mirror and the sample keep them in `gutenberg/`, for any `dataset_id`: a .txt or .md file is one whole book, with
    meta["path"]; a .jsonl or .parquet file has one book per row.
    """
    check_take(take)
    rows = UpstreamRows(SOURCE, counters, max_document_bytes, partition)
    numbered = rows.read(
        source_root,
        dataset_id,
        split=split,
        revision=revision,
        follow_links=follow_links,
        streaming=streaming,
        shuffle_seed=seed if shuffle else None,
        shuffle_buffer=shuffle_buffer_size,
        folder=FOLDER,
        suffixes=KNOWN_SUFFIXES,
        book_suffixes=BOOK_SUFFIXES,
    )
    return islice(samples_of_rows(numbered, rows), take)
