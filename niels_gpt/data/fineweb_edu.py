"""FineWeb-Edu: educational web pages, streamed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from niels_gpt.data import hub, places
from niels_gpt.data.types import PretrainSample

SOURCE = "fineweb_edu"
DATASET_ID = "HuggingFaceFW/fineweb-edu"
TEXT_FIELDS = ("text", "content", "document")
LONGEST_META_FIELD = 1_000  # characters; a URL fits, a second copy of the text does not


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
) -> Iterator[PretrainSample]:
    """Stream FineWeb-Edu documents (PR-02), empty ones included.

    `shuffle` is the hub library's own, seeded (D8). From a mirror or the sample rows come in file order, not shuffled:
    the cache builder's torch buffer shuffles there. A mirror's folder `<name>/` or `data/<name>/` is read alone.
    """
    places.check_take(take)
    root = places.mirror_root(source_root)
    if root is None:
        rows = hub.rows(
            dataset_id,
            config=name,
            split=split,
            streaming=streaming,
            revision=revision,
            shuffle_seed=seed if shuffle else None,
            shuffle_buffer=shuffle_buffer_size,
        )
    else:
        files = places.split_files(root, dataset_id, split=split, folders=(name, f"data/{name}"))
        rows = places.iter_rows(files, counters=counters)
    return islice(samples_of_rows(rows, source=SOURCE), take)


def samples_of_rows(rows: Iterator[dict[str, Any]], *, source: str) -> Iterator[PretrainSample]:
    """Turn rows into samples, each with its small scalar fields and its "index" as meta."""
    for index, row in enumerate(rows):
        yield PretrainSample(text=_select_text_field(row), source=source, meta={**_small_fields(row), "index": index})


def _select_text_field(sample: Mapping[str, Any]) -> str:
    """Return the first of text, content, document that is a string; ValueError listing the keys if none is (PR-02)."""
    for key in TEXT_FIELDS:
        if isinstance(sample.get(key), str):
            return str(sample[key])
    found = ", ".join(f"{key} ({type(value).__name__})" for key, value in sample.items()) or "no keys"
    raise ValueError(f"row without a text; expected a string under one of {', '.join(TEXT_FIELDS)}, found {found}")


def _small_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in row.items()
        if key not in TEXT_FIELDS
        and isinstance(value, str | int | float | bool)
        and not (isinstance(value, str) and len(value) > LONGEST_META_FIELD)
    }
