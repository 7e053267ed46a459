"""Instructions: how a row of Dolly 15k, an instruction with a response and perhaps a context, becomes a chat."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from niels_gpt.data.chat_shapes import with_context
from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES
from niels_gpt.data.types import ChatMessage, ChatSample
from niels_gpt.data.upstream_rows import NumberedRows, UpstreamRows, check_take, shuffled
from niels_gpt.documents import Partition

SOURCE = "dolly15k"
DATASET_ID = "databricks/databricks-dolly-15k"
UPSTREAM_SPLITS = ("train",)
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
    """Stream Dolly as two-turn chats, with a system turn first on request (PR-02).

    A non-blank context follows the instruction after "\\n\\ncontext:\\n"; texts stay as they are. Rows with a blank
    instruction or response count as "blank_field"; rows where one is absent, or a field is not a string, count as
    "missing_field"; both are dropped. Other counters and links: as iter_fineweb_edu.
    split: "all" reads every upstream split. shuffle: holds all rows in memory; otherwise they stream in upstream order.
    position: of a mirror's files, without `shuffle` and `take`: see reader.Position. partition: whose rows
        alone are read.
    meta is the row and its "index".
    """
    check_take(take)
    rows = UpstreamRows(SOURCE, counters, max_document_bytes, partition)
    numbered = rows.read(
        source_root,
        dataset_id,
        split=split,
        revision=revision,
        follow_links=follow_links,
        all_splits=UPSTREAM_SPLITS,
        position=None if shuffle or take is not None else position,
    )
    samples = _chats(numbered, include_system, rows)
    return islice(shuffled(samples, seed) if shuffle else samples, take)


def _chats(numbered: NumberedRows, include_system: bool, rows: UpstreamRows) -> Iterator[ChatSample]:
    kept = 0
    for index, where, row in numbered:
        problem = _problem_of(row)
        if problem is not None:
            expected = "texts in the fields instruction and response, and none or a text in context"
            rows.drop(problem, f"{where}: expected {expected}; its fields are {', '.join(row) or 'none'}")
            continue
        kept += 1
        question = with_context(row["instruction"], row.get("context") or "")
        messages = [ChatMessage("system", SYSTEM_PROMPT)] if include_system else []
        messages += [ChatMessage("user", question), ChatMessage("assistant", row["response"])]
        yield ChatSample(messages=messages, source=SOURCE, meta={**row, "index": index})
    rows.check_any(kept)


def _problem_of(row: Mapping[str, Any]) -> str | None:
    fields = (row.get("instruction"), row.get("response"))
    context = row.get("context")
    if not (all(isinstance(field, str) for field in fields) and isinstance(context, str | None)):
        return "missing_field"
    return None if all(str(field).strip() for field in fields) else "blank_field"
