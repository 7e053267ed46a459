"""FineWeb-Edu: web pages. A row is a document."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import cast

from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES
from niels_gpt.data.local import LocalFiles
from niels_gpt.data.spec import HUB, Credit, LoadRequest, Part, SourceSpec, mirror_files
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.upstream_rows import UpstreamRows, check_take
from niels_gpt.documents import Partition
from niels_gpt.settings import Settings

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
    """Yield FineWeb-Edu documents (PR-02), empty ones included.

    name: the dataset's config. In a mirror its folder, `<name>/` or `data/<name>/`, is the only one read, if it exists.
    shuffle: use the hub library's own seeded shuffle (D8). Rows of a mirror or the sample come in file order; the cache
        builder shuffles these in a buffer of its own.
    counters: receives dropped and repaired rows, by reason. Rows larger than `max_document_bytes` count as "too_large",
        rows that cannot be read as "unreadable_row", rows without a text as "missing_field".
    follow_links: follow links below the mirror's folder; otherwise they count as "links_not_followed".
    partition: read only its rows: see data.files.part. The hub is then streamed, with the seed Partition.seed.
    Raises: SourceNotFound E301 if a mirror has no such files; SourceError E302 for a damaged file; SourceError E303 at
        the end if rows were dropped and none is left.
    """
    check_take(take)
    rows = UpstreamRows(SOURCE, counters, max_document_bytes, partition)
    pieces = rows.read(
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
    return islice(cast(Iterator[PretrainSample], rows.documents(pieces)), take)


def _files(settings: Settings, root: Path | None) -> LocalFiles:
    folders = (settings.fineweb_edu_config, f"data/{settings.fineweb_edu_config}")
    return mirror_files(settings, root, settings.fineweb_edu_dataset, split="train", folders=folders)


def _load(request: LoadRequest) -> list[Part]:
    """Load pages: a mirror's in file order, the hub's as `datasets` shuffles its stream (D8)."""
    if request.found is not None:
        return [(None, request.documents(SOURCE, request.settings.fineweb_edu_dataset))]
    settings = request.settings
    samples = iter_fineweb_edu(
        name=settings.fineweb_edu_config,
        shuffle=settings.shuffle_buffer > 0,
        shuffle_buffer_size=settings.shuffle_buffer,
        seed=settings.seed,
        dataset_id=settings.fineweb_edu_dataset,
        partition=request.partition,
        **request.reading,
    )
    return [(None, samples)]


SPEC = SourceSpec(
    name="fineweb_edu",
    family="pretrain",
    description="Token cache of FineWeb-Edu: shuffled web pages with end-of-texts, up to a token budget for train "
    "and for val.",
    credit=Credit("ODC-BY 1.0", f"FineWeb-Edu by Hugging Face, {HUB}HuggingFaceFW/fineweb-edu"),
    load=_load,
    files=_files,
    dataset="fineweb_edu_dataset",
    config="fineweb_edu_config",
    hub_splits=("train",),
    streaming=True,
    shuffle_buffer="shuffle_buffer",
    budgets=True,
    training_rank=6,
    snapshot_margin_bytes=1 << 24,  # pages of 4,000 tokens
)
