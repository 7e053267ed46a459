"""Project Gutenberg: English books."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from niels_gpt.data import hub, places
from niels_gpt.data.fineweb_edu import samples_of_rows
from niels_gpt.data.types import PretrainSample

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
) -> Iterator[PretrainSample]:
    """Stream books, with the same shuffle rule as FineWeb-Edu (PR-02).

    A mirror and the sample keep them in `gutenberg/`, whatever the `dataset_id`: a .txt or .md file is one book, whole,
    with meta["path"]; a .jsonl or .parquet file has a book a row.
    """
    places.check_take(take)
    root = places.mirror_root(source_root)
    if root is None:
        rows = hub.rows(
            dataset_id,
            split=split,
            streaming=streaming,
            revision=revision,
            shuffle_seed=seed if shuffle else None,
            shuffle_buffer=shuffle_buffer_size,
        )
    else:
        paths = places.split_files(root, FOLDER, split=split, suffixes=places.KNOWN_SUFFIXES)
        rows = _book_rows(root / FOLDER, paths, counters)
    return islice(samples_of_rows(rows, source=SOURCE), take)


def _book_rows(folder: Path, paths: Sequence[Path], counters: Counter[str] | None) -> Iterator[dict[str, Any]]:
    for path in paths:
        if path.name.endswith(BOOK_SUFFIXES):
            yield {
                "text": places.read_text(path, counters=counters),
                "path": path.relative_to(folder).as_posix(),
            }
        else:
            yield from places.iter_rows([path], counters=counters)
