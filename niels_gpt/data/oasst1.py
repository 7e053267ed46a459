"""OpenAssistant 1: trees of messages. Decides which paths become chats, and which become threads of a tree."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, cast

from niels_gpt.data.files.part import TREES_RULE, is_first
from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES, MISSING_FIELD, count
from niels_gpt.data.local import LocalFiles
from niels_gpt.data.reader import Piece
from niels_gpt.data.spec import HUB, Credit, LoadRequest, Part, SourceSpec, mirror_files
from niels_gpt.data.types import ChatMessage, ChatSample, PretrainSample
from niels_gpt.data.upstream_rows import UpstreamRows, check_take, shuffled
from niels_gpt.documents import Partition
from niels_gpt.settings import Settings

SOURCE = "oasst1"
DATASET_ID = "OpenAssistant/oasst1"
UPSTREAM_SPLITS = ("train", "validation")
_EXPECTED = "texts in the fields message_tree_id, message_id, text and role, and none or one in parent_id"
ROLES = {"prompter": "user", "assistant": "assistant"}
# All 88,000 messages are held in memory, without the labels and scores, which are most of a row's size.
KEPT_FIELDS = ("message_id", "parent_id", "message_tree_id", "text", "role", "lang", "deleted")

Record = dict[str, Any]


def iter_oasst1_sft(
    *,
    split: str = "train",
    seed: int = 42,
    shuffle_trees: bool = True,
    take_trees: int | None = None,
    english_only: bool = True,
    max_messages: int = 32,
    source_root: str | os.PathLike[str] = "hub",
    dataset_id: str = DATASET_ID,
    revision: str | None = None,
    counters: Counter[str] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    follow_links: bool = False,
    partition: Partition | None = None,
) -> Iterator[ChatSample]:
    """Yield chats tree by tree, the threads of a tree one after another (PR-02).

    take_trees: limit of trees; a tree without a usable thread counts. shuffle_trees: permute trees, not threads, by
    torch. For dropped messages and threads see `_reconstruct_threads`.
    Takes the other arguments of `iter_oasst1_trees`, and raises its errors.
    """
    check_take(take_trees)
    _check_max_messages(max_messages)
    trees = iter_oasst1_trees(
        split=split,
        source_root=source_root,
        dataset_id=dataset_id,
        revision=revision,
        counters=counters,
        max_document_bytes=max_document_bytes,
        follow_links=follow_links,
        partition=partition,
    )
    chosen = islice(shuffled(trees, seed) if shuffle_trees else trees, take_trees)
    return chain.from_iterable(
        _reconstruct_threads(tree, english_only=english_only, max_messages=max_messages, counters=counters)
        for tree in chosen
    )


def iter_oasst1_trees(
    *,
    split: str = "train",
    source_root: str | os.PathLike[str] = "hub",
    dataset_id: str = DATASET_ID,
    revision: str | None = None,
    counters: Counter[str] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    follow_links: bool = False,
    partition: Partition | None = None,
) -> Iterator[list[Record]]:
    """Yield the messages of each tree, in file order; trees in the order of their first messages.

    Holds every message in memory. A message without a text, a role, an id or a tree is dropped and counts as
    "missing_field".
    split: "all" reads every upstream split.
    partition: hold and yield only its trees, by TREES_RULE of data.files.part. Each partition reads all messages; the
        first one counts dropped messages.
    Takes the other arguments of `iter_fineweb_edu`, and raises its errors.
    """
    rows = UpstreamRows(SOURCE, counters if is_first(partition) else None, max_document_bytes)
    pieces = rows.read(
        source_root,
        dataset_id,
        split=split,
        revision=revision,
        follow_links=follow_links,
        all_splits=UPSTREAM_SPLITS,
        # A copy of the hub's repository has the same messages twice: exports beside the parquet files in data/.
        inner_folders=("data",),
    )
    return _trees(pieces, rows, partition)


def _trees(pieces: Iterable[Piece], rows: UpstreamRows, partition: Partition | None) -> Iterator[list[Record]]:
    trees: dict[str, list[Record]] = {}
    numbers: dict[str, int] = {}
    own, total = (0, 1) if partition is None else partition
    for piece in pieces:
        row = cast(Record, piece.item)
        tree_id = row.get("message_tree_id")
        if isinstance(tree_id, str) and _is_whole(row):
            if numbers.setdefault(tree_id, len(numbers)) % total == own:
                trees.setdefault(tree_id, []).append({key: row.get(key) for key in KEPT_FIELDS})
        else:
            rows.drop(piece, MISSING_FIELD, expected=_EXPECTED)
    rows.check_any()
    yield from trees.values()


def _is_whole(row: Record) -> bool:
    texts = (row.get("message_id"), row.get("text"), row.get("role"))
    return all(isinstance(text, str) for text in texts) and isinstance(row.get("parent_id"), str | None)


def _check_max_messages(max_messages: int) -> None:
    if max_messages < 1:
        raise ValueError(f"max_messages is {max_messages}; expected at least 1")


def _reconstruct_threads(
    records: Sequence[Record],
    *,
    english_only: bool = True,
    max_messages: int = 32,
    counters: Counter[str] | None = None,
) -> Iterator[ChatSample]:
    """Yield one chat per path from a root to a leaf, siblings in file order (PR-02, D15).

    Dropped messages are counted by reason: "missing_field"; "duplicate_id" (the later one); "orphan" (the parent is not
    among the records), "deleted" and "not_english" with all below them; "cycle" (no root above); "blank" (skipped: its
    replies answer the message above it); "over_max_messages" (below the cut, where the path ends). Dropped threads:
    "unknown_role", "same_role_twice", "no_assistant_turn". Texts are stripped.
    """
    _check_max_messages(max_messages)
    by_id = _index(records, counters)
    children: dict[str | None, list[str]] = defaultdict(list)
    for message_id, record in by_id.items():
        children[record.get("parent_id")].append(message_id)
    kept = _prune(by_id, children, english_only, counters)
    replies = _without_blanks(by_id, children, kept, counters)
    for path, below in _paths(replies, max_messages):
        count(counters, "over_max_messages", below)
        sample = _thread([by_id[message_id] for message_id in path], counters)
        if sample is not None:
            yield sample


def tree_threads(
    tree: Sequence[Record], *, english_only: bool = True, max_messages: int = 32, counters: Counter[str] | None = None
) -> list[ChatSample]:
    """Return the threads of a tree, from its root to every last reply of the assistant, in the order of its chats.

    A thread is a chat of `iter_oasst1_sft` without the users' messages after the last reply. These have no loss, and
    count as "cut_messages". A thread that is the beginning of another one is not returned.
    """
    chats = _reconstruct_threads(tree, english_only=english_only, max_messages=max_messages, counters=counters)
    threads: dict[str, ChatSample] = {}
    seen: set[str] = set()
    for chat in chats:
        ids = chat.meta["message_ids"]
        seen.update(ids)
        end = max(at for at, message in enumerate(chat.messages, 1) if message.role == "assistant")
        meta = {**chat.meta, "leaf_message_id": ids[end - 1], "message_ids": ids[:end]}
        threads.setdefault(ids[end - 1], ChatSample(chat.messages[:end], chat.source, meta))
    inner = {message_id for thread in threads.values() for message_id in thread.meta["message_ids"][:-1]}
    count(counters, "cut_messages", len(seen - inner - threads.keys()))
    return [thread for leaf, thread in threads.items() if leaf not in inner]


def _index(records: Iterable[Record], counters: Counter[str] | None) -> dict[str, Record]:
    by_id: dict[str, Record] = {}
    for record in records:
        if not _is_whole(record):
            count(counters, "missing_field")
        elif record["message_id"] in by_id:
            count(counters, "duplicate_id")
        else:
            by_id[record["message_id"]] = record
    return by_id


def _below(start: Iterable[str], children: dict[str | None, list[str]]) -> list[str]:
    """List messages and all messages below them, parents first. start: outside any cycle."""
    below = list(start)
    for message_id in below:  # grows during the loop
        below += children.get(message_id, ())
    return below


def _prune(
    by_id: dict[str, Record],
    children: dict[str | None, list[str]],
    english_only: bool,
    counters: Counter[str] | None,
) -> set[str]:
    """Return the ids that are kept, and count the others."""
    reachable = _below(children.get(None, ()), children)
    orphans = [key for key, record in by_id.items() if record.get("parent_id") not in by_id and _has_parent(record)]
    lost = len(_below(orphans, children))
    count(counters, "orphan", lost)
    count(counters, "cycle", len(by_id) - len(reachable) - lost)
    reason_of: dict[str, str] = {}
    for message_id in reachable:  # parents first, so a parent's reason is known
        record = by_id[message_id]
        above = reason_of.get(record["parent_id"]) if _has_parent(record) else None
        if above is not None:
            reason_of[message_id] = above
        elif record.get("deleted"):
            reason_of[message_id] = "deleted"
        elif english_only and record.get("lang") != "en":
            reason_of[message_id] = "not_english"
    for reason, number in Counter(reason_of.values()).items():
        count(counters, reason, number)
    return set(reachable) - reason_of.keys()


def _has_parent(record: Record) -> bool:
    return record.get("parent_id") is not None


def _without_blanks(
    by_id: dict[str, Record],
    children: dict[str | None, list[str]],
    kept: set[str],
    counters: Counter[str] | None,
) -> dict[str | None, list[str]]:
    """Return the replies to each kept message; the replies to a blank message replace it."""
    blank = {key for key in kept if not by_id[key]["text"].strip()}
    count(counters, "blank", len(blank))
    replies: dict[str | None, list[str]] = {}
    for parent in (None, *(kept - blank)):
        stack, answers = [key for key in reversed(children.get(parent, ())) if key in kept], []
        while stack:
            key = stack.pop()
            if key in blank:
                stack += [below for below in reversed(children.get(key, ())) if below in kept]
            else:
                answers.append(key)
        replies[parent] = answers
    return replies


def _paths(replies: dict[str | None, list[str]], max_messages: int) -> Iterator[tuple[list[str], int]]:
    """Walk depth first; yield each path of at most `max_messages` ids and the number of messages below its end."""
    stack = [(key, 1) for key in reversed(replies[None])]
    path: list[str] = []
    while stack:
        key, length = stack.pop()
        path[length - 1 :] = [key]
        if replies[key] and length < max_messages:
            stack += [(reply, length + 1) for reply in reversed(replies[key])]
        else:
            yield list(path), len(_below(replies[key], replies))


def _thread(path: Sequence[Record], counters: Counter[str] | None) -> ChatSample | None:
    roles = [ROLES.get(record["role"]) for record in path]
    if None in roles:
        count(counters, "unknown_role")
    elif any(first == second for first, second in pairwise(roles)):
        count(counters, "same_role_twice")
    elif "assistant" not in roles:
        count(counters, "no_assistant_turn")
    else:
        meta = {
            "message_tree_id": path[0].get("message_tree_id"),
            "leaf_message_id": path[-1]["message_id"],
            "message_ids": [record["message_id"] for record in path],
        }
        messages = [ChatMessage(ROLES[record["role"]], record["text"].strip()) for record in path]
        return ChatSample(messages=messages, source=SOURCE, meta=meta)
    return None


def _files(settings: Settings, root: Path | None) -> LocalFiles:
    return mirror_files(settings, root, settings.oasst1_dataset, folders=("data",))


def _load(request: LoadRequest) -> list[Part]:
    samples = iter_oasst1_sft(
        split="all",
        seed=request.settings.seed,
        shuffle_trees=False,
        english_only=request.settings.oasst1_english_only,
        max_messages=request.settings.oasst1_max_messages,
        dataset_id=request.settings.oasst1_dataset,
        partition=request.partition,
        **request.reading,
    )
    return [(None, samples)]


def _messages(request: LoadRequest) -> list[Part]:
    """Load each message once, for the training of a tokenizer: threads of one tree share their first messages."""
    settings = request.settings
    trees = iter_oasst1_trees(
        split="all",
        source_root=settings.source_root,
        dataset_id=settings.oasst1_dataset,
        revision=request.revision,
        counters=request.counters,
    )
    messages = (
        PretrainSample(m["text"], SOURCE, {"id": m["message_id"], "message_tree_id": m["message_tree_id"]})
        for m in chain.from_iterable(trees)
        if m.get("lang") == "en" or not settings.oasst1_english_only
    )
    return [(None, messages)]


SPEC = SourceSpec(
    name="oasst1",
    family="sft",
    description="Token cache of OpenAssistant chats: every path from a root to a leaf of the message trees.",
    credit=Credit("Apache-2.0", f"OpenAssistant Conversations by OpenAssistant, {HUB}OpenAssistant/oasst1"),
    load=_load,
    files=_files,
    dataset="oasst1_dataset",
    hub_splits=("train", "validation"),
    reads=("oasst1_english_only", "oasst1_max_messages"),
    partition_rule=TREES_RULE,
    training_rank=4,
    training_texts=_messages,
    hub_text_bytes=120_000_000,
)


def _load_trees(request: LoadRequest) -> list[Part]:
    """Load the threads of each tree, one after another."""
    settings = request.settings
    trees = iter_oasst1_trees(split="all", dataset_id=settings.oasst1_dataset, **request.reading)
    threads = (
        thread
        for tree in trees
        for thread in tree_threads(
            tree,
            english_only=settings.oasst1_english_only,
            max_messages=settings.oasst1_max_messages,
            counters=request.counters,
        )
    )
    return [(None, threads)]


TREES_SPEC = replace(
    SPEC,
    family="trees",
    description="Message trees of OpenAssistant: each tree is one group, with a sequence for every thread that "
    "ends with a reply. Folded, every message is in a batch once.",
    load=_load_trees,
    training_texts=None,
)
