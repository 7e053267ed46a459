"""Project Gutenberg: English books. A file of a mirror is one book, or has one in each row."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import cast

from niels_gpt.data.files.mirrors import KNOWN_SUFFIXES
from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES
from niels_gpt.data.local import LocalFiles
from niels_gpt.data.spec import Credit, LoadRequest, Part, SourceSpec, mirror_files
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.upstream_rows import UpstreamRows, check_take
from niels_gpt.documents import Partition
from niels_gpt.settings import Settings

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
    """Yield books (PR-02). Takes the other arguments of `iter_fineweb_edu`, and raises its errors.

    A mirror and the sample keep them in `gutenberg/`, for any `dataset_id`: a .txt or .md file is one whole book, with
    meta["path"]; a .jsonl or .parquet file has one book per row.
    """
    check_take(take)
    rows = UpstreamRows(SOURCE, counters, max_document_bytes, partition)
    pieces = rows.read(
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
    return islice(cast(Iterator[PretrainSample], rows.documents(pieces)), take)


def _files(settings: Settings, root: Path | None) -> LocalFiles:
    # All splits: in a folder of books a name that begins with "test", such as testament.txt, is no split.
    return mirror_files(settings, root, FOLDER, suffixes=KNOWN_SUFFIXES)


def _load(request: LoadRequest) -> list[Part]:
    """Load books: a mirror's in file order, the hub's as `datasets` shuffles its stream (D8)."""
    if request.found is not None:
        books = request.documents(SOURCE, FOLDER, book_suffixes=BOOK_SUFFIXES)
        return [(None, books)]
    settings = request.settings
    samples = iter_gutenberg(
        dataset_id=settings.gutenberg_dataset,
        shuffle=settings.gutenberg_shuffle_buffer > 0,
        shuffle_buffer_size=settings.gutenberg_shuffle_buffer,
        seed=settings.seed,
        partition=request.partition,
        **request.reading,
    )
    return [(None, samples)]


SPEC = SourceSpec(
    name="gutenberg",
    family="pretrain",
    description="Token cache of Project Gutenberg's books; with source_root=hub a stub, unless gutenberg_from_hub "
    "is set.",
    credit=Credit("public domain in the United States", "Project Gutenberg, https://www.gutenberg.org"),
    load=_load,
    files=_files,
    dataset="gutenberg_dataset",
    folder=FOLDER,
    from_hub="gutenberg_from_hub",
    hub_splits=("train",),
    streaming=True,
    shuffle_buffer="gutenberg_shuffle_buffer",
    budgets=True,
    training_rank=5,
    snapshot_margin_bytes=1 << 29,  # books of 150,000 tokens
)
