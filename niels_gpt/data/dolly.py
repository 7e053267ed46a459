"""Dolly 15k: instructions. A row, with instruction, response and perhaps context, becomes a chat of two turns."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

from niels_gpt.data.chat_shapes import with_context
from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES
from niels_gpt.data.local import LocalFiles
from niels_gpt.data.reader import Piece
from niels_gpt.data.spec import HUB, Credit, LoadRequest, Part, SourceSpec, mirror_files
from niels_gpt.data.types import ChatMessage, ChatSample
from niels_gpt.data.upstream_rows import UpstreamRows, check_take, shuffled
from niels_gpt.documents import Partition
from niels_gpt.settings import Settings

SOURCE = "dolly15k"
DATASET_ID = "databricks/databricks-dolly-15k"
UPSTREAM_SPLITS = ("train",)
_EXPECTED = "texts in the fields instruction and response, and none or a text in context"
SYSTEM_PROMPT = "you are a helpful assistant."


def iter_dolly_sft(
    *,
    split: str = "train",
    seed: int = 42,
    shuffle: bool = True,
    take: int | None = None,
    include_system: bool = False,
    source_root: str | os.PathLike[str] = "hub",
    dataset_id: str = DATASET_ID,
    revision: str | None = None,
    counters: Counter[str] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    follow_links: bool = False,
    position: dict[str, int] | None = None,
    partition: Partition | None = None,
) -> Iterator[ChatSample]:
    """Yield Dolly as two-turn chats, with a system turn first on request (PR-02).

    A context that is not blank follows the instruction after "\\n\\ncontext:\\n"; texts stay as they are. Two kinds of
    rows are dropped: with a blank instruction or response, counted as "blank_field"; without one of them, or with a
    field that is not a string, counted as "missing_field". meta is the row and its "index".
    split: "all" reads every upstream split.
    shuffle: hold all rows in memory and permute them; otherwise they come in upstream's order.
    position: where to resume in a mirror's files, without `shuffle` and `take`: see reader.Position.
    Takes the other arguments of `iter_fineweb_edu`, and raises its errors.
    """
    check_take(take)
    is_whole = not shuffle and take is None
    rows = UpstreamRows(SOURCE, counters, max_document_bytes, partition, position if is_whole else None)
    pieces = rows.read(
        source_root,
        dataset_id,
        split=split,
        revision=revision,
        follow_links=follow_links,
        all_splits=UPSTREAM_SPLITS,
    )
    samples = _chats(pieces, include_system, rows)
    return islice(shuffled(samples, seed) if shuffle else samples, take)


def _chats(pieces: Iterable[Piece], include_system: bool, rows: UpstreamRows) -> Iterator[ChatSample]:
    for piece in pieces:
        row = cast(dict[str, Any], piece.item)
        if (problem := _problem_of(row)) is not None:
            rows.drop(piece, problem, expected=_EXPECTED)
            continue
        question = with_context(row["instruction"], row.get("context") or "")
        messages = [ChatMessage("system", SYSTEM_PROMPT)] if include_system else []
        messages += [ChatMessage("user", question), ChatMessage("assistant", row["response"])]
        yield ChatSample(messages=messages, source=SOURCE, meta={**row, "index": rows.index_of(piece)})
    rows.check_any()


def _problem_of(row: Mapping[str, Any]) -> str | None:
    fields = (row.get("instruction"), row.get("response"))
    context = row.get("context")
    if not (all(isinstance(field, str) for field in fields) and isinstance(context, str | None)):
        return "missing_field"
    return None if all(str(field).strip() for field in fields) else "blank_field"


def _files(settings: Settings, root: Path | None) -> LocalFiles:
    return mirror_files(settings, root, settings.dolly_dataset)


def _load(request: LoadRequest) -> list[Part]:
    samples = iter_dolly_sft(
        split="all",
        seed=request.settings.seed,
        shuffle=False,
        include_system=request.settings.dolly_include_system,
        dataset_id=request.settings.dolly_dataset,
        position=request.position,
        partition=request.partition,
        **request.reading,
    )
    return [(None, samples)]


SPEC = SourceSpec(
    name="dolly15k",
    family="sft",
    description="Token cache of dolly-15k chats: one instruction and one response each; the response carries the loss.",
    credit=Credit("CC BY-SA 3.0", f"databricks-dolly-15k by Databricks, {HUB}databricks/databricks-dolly-15k"),
    load=_load,
    files=_files,
    dataset="dolly_dataset",
    hub_splits=("train",),
    reads=("dolly_include_system",),
    training_rank=3,
    hub_text_bytes=13_000_000,
)
