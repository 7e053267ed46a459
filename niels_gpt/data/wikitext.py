"""Encyclopedia articles: which lines of WikiText are documents."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from niels_gpt.data.files.mirrors import check_split
from niels_gpt.data.files.rows import TABLE_SUFFIXES
from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES, count
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.upstream_rows import NumberedRows, UpstreamRows, check_take, texts_of_rows
from niels_gpt.documents import Partition

SOURCE = "wikitext"
DATASET_ID = "Salesforce/wikitext"
SUFFIXES = (*TABLE_SUFFIXES, ".txt")


def iter_wikitext(
    *,
    config: str = "wikitext-103-raw-v1",
    split: str,
    take: int | None = None,
    source_root: str | os.PathLike[str] = "hub",
    dataset_id: str = DATASET_ID,
    revision: str | None = None,
    counters: Counter[str] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    follow_links: bool = False,
    partition: Partition | None = None,
    position: dict[str, int] | None = None,
) -> Iterator[PretrainSample]:
    """Stream the lines of one split in order, each with its newline; "val" means validation (PR-02).

    Blank lines are skipped and count as "blank". meta["index"] is the row's number in the split, blank rows included.
    In a mirror a folder named like `config` is read alone if it exists. Other counters, links and partitions: as
    iter_fineweb_edu.
    position: of a mirror's files, without `take`: see reader.Position.
    """
    check_take(take)
    split = "validation" if split == "val" else split
    check_split(split)
    rows = UpstreamRows(SOURCE, counters, max_document_bytes, partition)
    numbered = rows.read(
        source_root,
        dataset_id,
        split=split,
        revision=revision,
        follow_links=follow_links,
        config=config,
        inner_folders=(config,),
        suffixes=SUFFIXES,
        position=None if take is not None else position,
    )
    return islice(_lines(numbered, rows), take)


def _lines(numbered: NumberedRows, rows: UpstreamRows) -> Iterator[PretrainSample]:
    for index, _, text in texts_of_rows(numbered, rows):
        if text.strip():
            yield PretrainSample(text=text, source=SOURCE, meta={"index": index})
        else:
            count(rows.counters, "blank")


def load_wikitext(
    *,
    config: str = "wikitext-103-raw-v1",
    take: int | None = None,
    source_root: str | os.PathLike[str] = "hub",
    dataset_id: str = DATASET_ID,
    revision: str | None = None,
    counters: Counter[str] | None = None,
) -> dict[str, list[PretrainSample]]:
    """Load all three splits into lists under "train", "val" and "test"; `take` limits each of them."""
    shared: dict[str, Any] = {"config": config, "take": take, "source_root": source_root, "dataset_id": dataset_id}
    shared |= {"revision": revision, "counters": counters}
    return {split: list(iter_wikitext(split=split, **shared)) for split in ("train", "val", "test")}
