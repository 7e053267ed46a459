"""Project Gutenberg: English books."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from niels_gpt.data import hub, places
from niels_gpt.data.fineweb_edu import samples_of_rows
from niels_gpt.data.text_files import MAX_DOCUMENT_BYTES
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.upstream_rows import UpstreamRows

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
) -> Iterator[PretrainSample]:
    """Stream books, with the same rules of shuffling, counting and links as FineWeb-Edu (PR-02).

    A mirror and the sample keep them in `gutenberg/`, whatever the `dataset_id`: a .txt or .md file is one book, whole,
    with meta["path"]; a .jsonl or .parquet file has a book a row.
    """
    places.check_take(take)
    root = places.mirror_root(source_root)
    rows = UpstreamRows(SOURCE, counters, max_document_bytes)
    if root is None:
        found = hub.rows(
            dataset_id,
            split=split,
            streaming=streaming,
            revision=revision,
            shuffle_seed=seed if shuffle else None,
            shuffle_buffer=shuffle_buffer_size,
        )
        numbered = rows.of_hub(found, dataset_id)
    else:
        paths = places.split_files(
            root,
            FOLDER,
            split=split,
            suffixes=places.KNOWN_SUFFIXES,
            follow_links=follow_links,
            counters=rows.counters,
        )
        numbered = rows.of_books(root / FOLDER, paths, BOOK_SUFFIXES)
    return islice(samples_of_rows(numbered, rows, source=SOURCE), take)
