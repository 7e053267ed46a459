"""Dolly 15k: instructions with a written response, some about a given context."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

from niels_gpt.data import hub, places
from niels_gpt.data.chat_rows import with_context
from niels_gpt.data.text_files import MAX_DOCUMENT_BYTES
from niels_gpt.data.types import ChatMessage, ChatSample
from niels_gpt.data.upstream_rows import NumberedRows, UpstreamRows

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
) -> Iterator[ChatSample]:
    """Stream Dolly as two-turn chats, with a system turn first on request (PR-02).

    A non-blank context follows the instruction after "\\n\\ncontext:\\n"; texts are kept as given. Rows with a blank
    instruction or response count as "blank_field", rows where one is absent or anything is not a string as
    "missing_field"; both are dropped. `shuffle` holds all rows in memory; without it they stream in upstream order.
    `split` "all" reads every upstream split. meta is the row and its "index". What else is counted, and links: as
    FineWeb-Edu. position: of a mirror's files in upstream's order without `take`: see position.Position.
    """
    places.check_take(take)
    root = places.mirror_root(source_root)
    rows = UpstreamRows(SOURCE, counters, max_document_bytes)
    if root is None:
        splits = UPSTREAM_SPLITS if split == "all" else (split,)
        found: Iterator[dict[str, Any]] = chain.from_iterable(
            hub.rows(dataset_id, split=name, streaming=False, revision=revision) for name in splits
        )
        numbered = rows.of_hub(found, dataset_id)
    else:
        paths = places.split_files(root, dataset_id, split=split, follow_links=follow_links, counters=rows.counters)
        numbered = rows.of_files(paths, None if shuffle or take is not None else position)
    samples = _chats(numbered, include_system, rows)
    return islice(places.shuffled(samples, seed) if shuffle else samples, take)


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
