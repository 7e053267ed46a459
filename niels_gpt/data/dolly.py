"""Dolly 15k: instructions with a written response, some about a given context."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

from niels_gpt.data import hub, places
from niels_gpt.data.chat_rows import with_context
from niels_gpt.data.types import ChatMessage, ChatSample

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
) -> Iterator[ChatSample]:
    """Stream Dolly as two-turn chats, with a system turn first on request (PR-02).

    A non-blank context follows the instruction after "\\n\\ncontext:\\n"; texts are kept as given. Rows with a blank
    instruction or response count as "blank_field", rows where one is absent or anything is not a string as
    "missing_field"; both are dropped. `shuffle` holds all rows in memory; without it they stream in upstream order.
    `split` "all" reads every upstream split. meta is the row and its "index".
    """
    places.check_take(take)
    root = places.mirror_root(source_root)
    if root is None:
        splits = UPSTREAM_SPLITS if split == "all" else (split,)
        rows: Iterator[dict[str, Any]] = chain.from_iterable(
            hub.rows(dataset_id, split=name, streaming=False, revision=revision) for name in splits
        )
    else:
        rows = places.iter_rows(places.split_files(root, dataset_id, split=split), counters=counters)
    samples = _chats(rows, include_system, counters)
    return islice(places.shuffled(samples, seed) if shuffle else samples, take)


def _chats(rows: Iterator[dict[str, Any]], include_system: bool, counters: Counter[str] | None) -> Iterator[ChatSample]:
    for index, row in enumerate(rows):
        problem = _problem_of(row)
        if problem is not None:
            places.count(counters, problem)
            continue
        question = with_context(row["instruction"], row.get("context") or "")
        messages = [ChatMessage("system", SYSTEM_PROMPT)] if include_system else []
        messages += [ChatMessage("user", question), ChatMessage("assistant", row["response"])]
        yield ChatSample(messages=messages, source=SOURCE, meta={**row, "index": index})


def _problem_of(row: Mapping[str, Any]) -> str | None:
    fields = (row.get("instruction"), row.get("response"))
    context = row.get("context")
    if not (all(isinstance(field, str) for field in fields) and isinstance(context, str | None)):
        return "missing_field"
    return None if all(str(field).strip() for field in fields) else "blank_field"
