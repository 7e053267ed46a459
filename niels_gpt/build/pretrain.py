"""Documents -> train/ and val/ token shards, a document index and meta.json, in one pass and bounded memory."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt import versions
from niels_gpt.build import shuffle
from niels_gpt.build.describe import Source, vocabulary_of, write_description
from niels_gpt.build.encode import EncodedText, TextEncoder, Tokenizer, batches
from niels_gpt.build.split import SPLITS, TokenBudget
from niels_gpt.build.writer import TOKEN_DTYPE, OffsetsWriter, ShardWriter

logger = logging.getLogger(__name__)

_PROGRESS_TOKENS = 1 << 16

Progress = Callable[[int, int, int | None], None]
"""Called now and then with the documents read, the tokens written and the tokens expected (None: not known)."""

BUDGET_RULE = (
    "by token budget: the next document goes to the split that is furthest below its share of its budget, a tie "
    "to val; the document that meets a full budget is cut and its rest dropped; no document is in both splits"
)


class _SplitWriter:
    """One split on disk: shards, and the start of each document in the split's token stream."""

    def __init__(self, work: Path, split: str, files: ExitStack, *, shard_bytes: int) -> None:
        self._shards = ShardWriter(work, split, files, shard_bytes=shard_bytes)
        self._starts = OffsetsWriter(work, f"index/{split}_docs.npy", files)
        self.docs = self.tokens = self.utf8_bytes = 0

    def add(self, ids: Any, utf8_bytes: int) -> None:
        """Append one document: uint16 ids [n]."""
        self._starts.append(self.tokens)
        self._shards.write(ids)
        self.docs += 1
        self.tokens += len(ids)
        self.utf8_bytes += utf8_bytes

    def close(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the records of the shards and of the index."""
        self._starts.append(self.tokens)
        return self._shards.close(), self._starts.close()


def build_pretrain(
    documents: Iterable[tuple[str | None, str]],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    max_train_tokens: int | None,
    max_val_tokens: int | None,
    shard_bytes: int,
    seed: int,
    shuffle_buffer: int | None,
    append_eot: bool = False,
    on_special: str = "drop",
    num_threads: int = 1,
    source: Source | None = None,
    split_rule: str = BUDGET_RULE,
    partial: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build the cache and commit it at `out_dir`; returns its meta.

    documents: pairs (split, text); split None leaves the choice to the budgets (D5).
    max_train_tokens, max_val_tokens: tokens, end-of-texts included; None: no bound (documents then name their split).
    shuffle_buffer: documents held by the torch shuffle buffer; None or 0: the order of the stream.
    partial: upstream lacks a split; train may then be empty, and meta says `built: "partial"`.
    Raises: ValueError for bad arguments, for an empty train split, and for text with a sentinel if on_special="raise";
        CacheError if somebody else builds here, or something that is no cache is in the way.
    """
    import torch

    encoder = TextEncoder(tokenizer, on_special=on_special, num_threads=num_threads)
    budget = TokenBudget({"train": max_train_tokens, "val": max_val_tokens})
    mixed = shuffle.shuffled(documents, size=shuffle_buffer, generator=torch.Generator().manual_seed(seed))
    with versions.building(out_dir) as work, ExitStack() as files:
        writers = {split: _SplitWriter(work, split, files, shard_bytes=shard_bytes) for split in SPLITS}
        counts = _write_documents(_encoded(mixed, encoder), writers, budget, encoder, append_eot, progress)
        closed = {split: writer.close() for split, writer in writers.items()}
        if not writers["train"].tokens and not partial:
            raise ValueError(
                f"{os.fspath(out_dir)}: no token for the train split: {_shortage(writers, counts, source)}"
            )
        meta = write_description(
            work,
            vocabulary=vocabulary_of(encoder),
            source=source or Source(),
            seed=seed,
            shards={split: records for split, (records, _) in closed.items()},
            index={split: record for split, (_, record) in closed.items()},
            totals={f"{split}_tokens": writers[split].tokens for split in SPLITS},
            kind="pretrain",
            built="partial" if partial else True,
            split_rule=split_rule,
            shard_bytes=shard_bytes,
            append_eot=append_eot,
            on_special=on_special,
            shuffle={"algorithm": shuffle.ALGORITHM if shuffle_buffer else None, "buffer": shuffle_buffer or 0},
            **_account_of(writers, counts, budget, encoder),
        )
        versions.commit(work, out_dir, str(meta["content_sha256"]))
    _warn_of_unmet_budgets(out_dir, budget)
    return meta


def build_stub(
    out_dir: str | os.PathLike[str], *, tokenizer: Tokenizer, source: Source, seed: int, shard_bytes: int
) -> dict[str, Any]:
    """Commit a cache that is not built: empty train/ and val/, and a meta.json that says `built: false` (PR-03)."""
    with versions.building(out_dir) as work:
        for split in SPLITS:
            (work / split).mkdir()
        meta = write_description(
            work,
            vocabulary=vocabulary_of(TextEncoder(tokenizer)),
            source=source,
            seed=seed,
            shards={split: [] for split in SPLITS},
            index={},
            totals={f"{split}_tokens": 0 for split in SPLITS},
            kind="pretrain",
            built=False,
            stub=True,
            split_rule="not built",
            shard_bytes=shard_bytes,
        )
        versions.commit(work, out_dir, str(meta["content_sha256"]))
    return meta


_NOT_DROPS = {"documents_read", "cut_documents", "cut_tokens"}


def _encoded(
    documents: Iterable[tuple[str | None, str]], encoder: TextEncoder
) -> Iterator[tuple[str | None, EncodedText]]:
    for batch in batches(documents, num_chars=lambda document: len(document[1])):
        for (split, _), encoded in zip(batch, encoder.encode([text for _, text in batch]), strict=True):
            yield split, encoded


def _write_documents(
    documents: Iterator[tuple[str | None, EncodedText]],
    writers: dict[str, _SplitWriter],
    budget: TokenBudget,
    encoder: TextEncoder,
    append_eot: bool,
    progress: Progress | None,
) -> Counter[str]:
    counts: Counter[str] = Counter()
    reported = 0
    eot = np.array([encoder.special_token_ids["eot"]] if append_eot else [], dtype=TOKEN_DTYPE)
    expected = None if None in budget.limits.values() else sum(limit or 0 for limit in budget.limits.values())
    while not (budget.full("train") and budget.full("val")):  # asked before the next document leaves the stream
        split, encoded = next(documents, (None, None))
        if encoded is None:
            break
        counts["documents_read"] += 1
        problem = encoder.accept(encoded) or (None if len(encoded.ids) else "empty")
        if problem is not None:
            counts[problem] += 1
            continue
        split = split or budget.next_split()
        ids, utf8_bytes, room = np.concatenate([encoded.ids, eot]), encoded.utf8_bytes, budget.room(split)
        if room == 0:  # a document that names a split which is full; the budgets themselves choose none
            counts["split_full"] += 1
            continue
        if room is not None and len(ids) > room:
            counts["cut_documents"] += 1
            counts["cut_tokens"] += len(ids) - room
            ids = ids[:room]
            utf8_bytes = _decoded_bytes(encoder.tokenizer, ids, encoded)
        writers[split].add(ids, utf8_bytes)
        encoder.note(encoded)
        budget.used[split] += len(ids)
        if progress is not None and sum(budget.used.values()) - reported >= _PROGRESS_TOKENS:
            reported = sum(budget.used.values())
            progress(counts["documents_read"], reported, expected)
    return counts


def _decoded_bytes(tokenizer: Tokenizer, kept: Any, whole: EncodedText) -> int:
    """Return the utf-8 bytes that the kept ids of a cut document stand for."""
    decode = getattr(tokenizer, "decode", None)
    text_ids = kept[: len(whole.ids)].tolist()  # without an end-of-text
    if decode is None:
        return whole.utf8_bytes * len(text_ids) // len(whole.ids)
    return min(len(decode(text_ids).encode(errors="replace")), whole.utf8_bytes)


def _account_of(
    writers: dict[str, _SplitWriter], counts: Counter[str], budget: TokenBudget, encoder: TextEncoder
) -> dict[str, Any]:
    """Return the part of meta.json that accounts for every document read."""
    return {
        "max_train_tokens": budget.limits["train"],
        "max_val_tokens": budget.limits["val"],
        "budget_reached": {split: None if budget.room(split) is None else budget.full(split) for split in SPLITS},
        "docs": {split: writers[split].docs for split in SPLITS},
        "utf8_bytes": {split: writers[split].utf8_bytes for split in SPLITS},
        "documents_read": counts["documents_read"],
        "dropped": {key: counts[key] for key in sorted(counts) if key not in _NOT_DROPS},
        "cut": {"documents": counts["cut_documents"], "tokens": counts["cut_tokens"]},
        "noticed": dict(sorted(encoder.noticed.items())),
    }


def _shortage(writers: dict[str, _SplitWriter], counts: Counter[str], source: Source | None) -> str:
    loader = ", ".join(f"{name} {count}" for name, count in sorted((source or Source()).counters.items())) or "none"
    drops = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if name != "documents_read") or "none"
    return (
        f"{counts['documents_read']} documents read, {writers['val'].docs} to val, dropped: {drops}, left out by the "
        f"loader: {loader}. Give it more text"
    )


def _warn_of_unmet_budgets(out_dir: str | os.PathLike[str], budget: TokenBudget) -> None:
    for split, limit in budget.limits.items():
        if limit is not None and not budget.full(split):
            logger.warning("%s: %s ended at %d of %d tokens: no more text", out_dir, split, budget.used[split], limit)
