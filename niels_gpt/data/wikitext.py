"""WikiText: encyclopedia articles. Each line that is not blank is a document."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from niels_gpt.data.files.mirrors import check_split
from niels_gpt.data.files.rows import TABLE_SUFFIXES
from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES, count
from niels_gpt.data.local import LocalFiles
from niels_gpt.data.reader import Piece, from_position
from niels_gpt.data.spec import HUB, Credit, LoadRequest, Part, SourceSpec, mirror_files
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.upstream_rows import UpstreamRows, check_take
from niels_gpt.documents import Partition
from niels_gpt.settings import Settings

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
    """Yield the lines of one split in order, each with its newline; "val" means validation (PR-02).

    Blank lines are skipped and count as "blank". meta["index"] is the row's number in the split, blank rows included.
    config: in a mirror only the folder of this name is read, if it exists.
    position: where to resume in a mirror's files, without `take`: see reader.Position.
    Takes the other arguments of `iter_fineweb_edu`, and raises its errors.
    """
    check_take(take)
    split = "validation" if split == "val" else split
    check_split(split)
    rows = UpstreamRows(SOURCE, counters, max_document_bytes, partition, position if take is None else None)
    pieces = rows.read(
        source_root,
        dataset_id,
        split=split,
        revision=revision,
        follow_links=follow_links,
        config=config,
        inner_folders=(config,),
        suffixes=SUFFIXES,
    )
    return islice(_lines(pieces, rows), take)


def _lines(pieces: Iterable[Piece], rows: UpstreamRows) -> Iterator[PretrainSample]:
    for piece in pieces:
        text = rows.text_of(piece)
        if text is not None and text.strip():
            yield PretrainSample(text, SOURCE, {"index": rows.index_of(piece)})
        elif text is not None:
            count(rows.counters, "blank")
    rows.check_any()


def load_wikitext(
    *,
    config: str = "wikitext-103-raw-v1",
    take: int | None = None,
    source_root: str | os.PathLike[str] = "hub",
    dataset_id: str = DATASET_ID,
    revision: str | None = None,
    counters: Counter[str] | None = None,
) -> dict[str, list[PretrainSample]]:
    """Load all three splits into lists under "train", "val" and "test". `take` limits each list."""
    shared: dict[str, Any] = {"config": config, "take": take, "source_root": source_root, "dataset_id": dataset_id}
    shared |= {"revision": revision, "counters": counters}
    return {split: list(iter_wikitext(split=split, **shared)) for split in ("train", "val", "test")}


def _files(settings: Settings, root: Path | None) -> LocalFiles:
    how: dict[str, Any] = {"suffixes": SUFFIXES, "folders": (settings.wikitext_config,)}
    return mirror_files(settings, root, settings.wikitext_dataset, **how)


def _load(request: LoadRequest) -> Iterator[Part]:
    """Load the lines of train, then of val, in upstream's order."""
    position: dict[str, int] = {} if request.position is None else request.position
    settings = request.settings
    read = partial(
        iter_wikitext,
        config=settings.wikitext_config,
        dataset_id=settings.wikitext_dataset,
        position=position,
        partition=request.partition,
        **request.reading,
    )
    return from_position([(split, read(split=upstream)) for split, upstream in request.splits.items()], position)


SPEC = SourceSpec(
    name="wikitext",
    family="pretrain",
    description="Token cache of WikiText: all lines of train and val in upstream's order, without end-of-texts.",
    credit=Credit(
        "CC BY-SA 3.0 and GFDL", f"WikiText by Salesforce, from Wikipedia's authors, {HUB}Salesforce/wikitext"
    ),
    load=_load,
    files=_files,
    dataset="wikitext_dataset",
    config="wikitext_config",
    hub_splits=("train", "validation", "test"),
    splits={"train": "train", "val": "validation"},
    split_rule="upstream's own splits; val is upstream's validation",
    has_documents=False,
    training_rank=2,
    hub_text_bytes=550_000_000,
)
