"""WikiText: encyclopedia articles, one line a row."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from niels_gpt.data import hub, places
from niels_gpt.data.fineweb_edu import texts_of_rows
from niels_gpt.data.text_files import MAX_DOCUMENT_BYTES
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.upstream_rows import NumberedRows, UpstreamRows

SOURCE = "wikitext"
DATASET_ID = "Salesforce/wikitext"
SUFFIXES = (*places.TABLE_SUFFIXES, ".txt")


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
    position: dict[str, int] | None = None,
) -> Iterator[PretrainSample]:
    """Stream the lines of one split in order, each with its newline; "val" means validation (PR-02).

    Blank lines are skipped and counted as "blank". meta["index"] is the row's number in the split, blank ones included.
    In a mirror, a folder named like `config` is read alone if there is one. What else is counted, and links: as
    FineWeb-Edu. position: of a mirror's files without `take`: see position.Position.
    """
    places.check_take(take)
    split = "validation" if split == "val" else split
    places.check_split(split)
    root = places.mirror_root(source_root)
    rows = UpstreamRows(SOURCE, counters, max_document_bytes)
    if root is None:
        found = hub.rows(dataset_id, config=config, split=split, streaming=False, revision=revision)
        numbered = rows.of_hub(found, dataset_id)
    else:
        paths = places.split_files(
            root,
            dataset_id,
            split=split,
            suffixes=SUFFIXES,
            folders=(config,),
            follow_links=follow_links,
            counters=rows.counters,
        )
        numbered = rows.of_files(paths, None if take is not None else position)
    return islice(_lines(numbered, rows), take)


def _lines(numbered: NumberedRows, rows: UpstreamRows) -> Iterator[PretrainSample]:
    for index, _, text in texts_of_rows(numbered, rows):
        if text.strip():
            yield PretrainSample(text=text, source=SOURCE, meta={"index": index})
        else:
            places.count(rows.counters, "blank")


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
    return {
        split: list(
            iter_wikitext(
                config=config,
                split=split,
                take=take,
                source_root=source_root,
                dataset_id=dataset_id,
                revision=revision,
                counters=counters,
            )
        )
        for split in ("train", "val", "test")
    }
