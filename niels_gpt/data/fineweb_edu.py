"""FineWeb-Edu: educational web pages, streamed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from niels_gpt.data import hub, places
from niels_gpt.data.text_files import MAX_DOCUMENT_BYTES, MISSING_FIELD
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.upstream_rows import NumberedRows, UpstreamRows

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
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    follow_links: bool = False,
) -> Iterator[PretrainSample]:
    """Stream FineWeb-Edu documents (PR-02), empty ones included.

    `shuffle` is the hub library's own, seeded (D8). From a mirror or the sample rows come in file order, not shuffled:
    the cache builder's torch buffer shuffles there. A mirror's folder `<name>/` or `data/<name>/` is read alone.
    A row that cannot be read counts as "unreadable_row", one without a text as "missing_field", and one of more than
    `max_document_bytes` as "too_large"; a source of which none is left is a ValueError.
    follow_links: below the mirror's folder; else they count as "links_not_followed".
    """
    places.check_take(take)
    root = places.mirror_root(source_root)
    rows = UpstreamRows(SOURCE, counters, max_document_bytes)
    if root is None:
        found = hub.rows(
            dataset_id,
            config=name,
            split=split,
            streaming=streaming,
            revision=revision,
            shuffle_seed=seed if shuffle else None,
            shuffle_buffer=shuffle_buffer_size,
        )
        numbered = rows.of_hub(found, dataset_id)
    else:
        folders = (name, f"data/{name}")
        files = places.split_files(
            root, dataset_id, split=split, folders=folders, follow_links=follow_links, counters=rows.counters
        )
        numbered = rows.of_files(files)
    return islice(samples_of_rows(numbered, rows, source=SOURCE), take)


def samples_of_rows(numbered: NumberedRows, rows: UpstreamRows, *, source: str) -> Iterator[PretrainSample]:
    """Turn rows into samples, each with its small scalar fields and its "index" as meta. Else: `texts_of_rows`."""
    for index, row, text in texts_of_rows(numbered, rows):
        yield PretrainSample(text=text, source=source, meta={**_small_fields(row), "index": index})


def texts_of_rows(numbered: NumberedRows, rows: UpstreamRows) -> Iterator[tuple[int, Mapping[str, Any], str]]:
    """Yield the number of each row, the row, and its text, blank ones included.

    A row without a text counts as "missing_field". Raises: ValueError at the end where no row has one.
    """
    kept = 0
    for index, where, row in numbered:
        try:
            text = _select_text_field(row)
        except ValueError as error:
            rows.drop(MISSING_FIELD, f"{where}: {error}")
            continue
        kept += 1
        yield index, row, text
    rows.check_any(kept)


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
