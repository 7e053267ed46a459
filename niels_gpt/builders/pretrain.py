"""Builds a pretrain cache in one pass: documents -> train/ and val/ shards, document index, source ids, meta.json.

Memory is bounded by the shuffle buffer and the batches encoded ahead, never by the corpus. `_settings` and `described`
of shards.py give the keys of meta.json that only this kind has.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from typing import Any, cast

from niels_gpt.builders.build import CHECKPOINT_SECONDS, Build
from niels_gpt.builders.meta_keys import (
    Source,
    build_identity,
    describe_and_commit,
    vocabulary_of,
    why_unmet,
    write_description,
)
from niels_gpt.builders.resume import NoTextError, open_build
from niels_gpt.builders.shards import Shards, files_of, with_ids
from niels_gpt.builders.source import SHUFFLE_ALGORITHM, Shuffled
from niels_gpt.builders.split import TextSplit, TokenBudget, asked_share
from niels_gpt.cache.formats import SPLITS
from niels_gpt.documents import DocumentBatch, Partition
from niels_gpt.encoding import TextEncoder
from niels_gpt.progress import Progress
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.meta_json import checked_sha256
from niels_gpt.tokenizers.document_tokens import DocumentToken
from niels_gpt.tokenizers.document_tokens import document_end as document_end_of
from niels_gpt.tokenizers.document_tokens import document_start as document_start_of
from niels_gpt.tokenizers.engine import open_engine
from niels_gpt.tokenizers.protocol import FullTokenizer, Tokenizer, token_dtype

logger = logging.getLogger(__name__)

_BY_TEXT = "by text: to val where the first 8 bytes of sha256(seed, newline, text), big-endian, are below {} * 2**64; "
_MOVED = "where that would leave a split without a document, the nearest one goes there, to train first"
_NOT_MOVED = "none is moved where that leaves a split without a document"
_OF_BUDGETS = "max_val_tokens / (max_train_tokens + max_val_tokens)"
_CUT = "; the document that meets a full budget is cut and its rest dropped, and so are later ones of that split"
_EACH = "; each partition has its part of the budgets"
BUDGET_RULE = _BY_TEXT.format(_OF_BUDGETS) + _MOVED + _CUT
FRACTION_RULE = _BY_TEXT.format("val_frac") + _MOVED
IN_PARTITIONS = {
    BUDGET_RULE: _BY_TEXT.format(f"the whole cache's {_OF_BUDGETS}") + _NOT_MOVED + _CUT + _EACH,
    FRACTION_RULE: _BY_TEXT.format("val_frac") + _NOT_MOVED,
}
"""What a partition does instead: it does not know the documents of the others."""


def build_pretrain(
    documents: Iterable[DocumentBatch | tuple[str | None, str] | tuple[str | None, str, str | None]],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    max_train_tokens: int | None,
    max_val_tokens: int | None,
    shard_bytes: int,
    seed: int,
    shuffle_buffer: int | None,
    val_frac: float | None = None,
    document_start: str | None = None,
    document_end: str = "none",
    on_special: str = "drop",
    num_threads: int = 1,
    executor: Executor | None = None,
    source: Source | None = None,
    engine: str = "auto",
    split_rule: str = BUDGET_RULE,
    partial: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    partition: Partition | None = None,
    plan: str | None = None,
    committed: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build the cache and commit it at `out_dir`; returns its meta. A killed build resumes.

    documents: batches, (split, text), or (split, text, id); split None: text and seed decide (D5); no id: its number.
    max_train_tokens, max_val_tokens: tokens, document starts and ends included; None: no limit.
    val_frac: the share of val, 0 <= val_frac < 1, among documents that name no split; None: max_val_tokens / both. If
        documents name their split, the share to expect: a warning is logged if the tokens are far from it.
    shuffle_buffer: documents that torch's shuffle buffer holds; None or 0: the order of the stream.
    document_start, document_end: tokens of each document, as the settings name them. on_special: see TextEncoder.
    num_threads: threads that encode, 0: the caller's own; executor: encodes instead; engine: see open_engine. None of
        them changes the output. partial: upstream lacks a split; train may then be empty, and `built` in the meta is
        "partial". checkpoint_seconds: between two checkpoints; 0: one after each batch.
    partition: `documents` are its own, budgets and seed those of all; its splits may be empty, and it warns of nothing
        that is a matter of all. plan: the sha256 of plan.json. `seal` makes one cache of all partitions.
    committed: called with the meta after the commit; if it fails, the next run finishes this build. progress: called
        with documents read, tokens written, and tokens of both budgets.
    Raises: ValueError for bad arguments, for an empty train split, and for text with a sentinel if on_special="raise";
        CacheError if another process builds here, if what is no cache is in the way, or if documents changed since a
        killed run; RuntimeError if a worker of the executor dies twice on a batch.
    """
    budget, source = TokenBudget({"train": max_train_tokens, "val": max_val_tokens}), source or Source()
    vocabulary, settings = vocabulary_of(tokenizer), _document_tokens(tokenizer, document_start, document_end)
    settings |= _settings(split_rule, shard_bytes, on_special, partial, budget, shuffle_buffer or 0, val_frac)
    rule = TextSplit(asked_share(settings), seed, moves=partition is None)
    encoder = _encoder(tokenizer, settings, rule, engine)
    settings |= _of_partition(partition, plan, budget, split_rule)
    shuffled = Shuffled(shuffle_buffer, seed if partition is None else partition.seed(seed))
    identity = build_identity(source, tokenizer, seed=seed, **settings)
    with open_build(out_dir, identity, files_of(partition), checkpoint_seconds, source) as build:
        shards = Shards(build, budget, rule, encoder, shard_bytes, progress)
        exhausted = shards.fill(with_ids(documents, source.position), shuffled, source, num_threads, executor)
        known = {"vocabulary": vocabulary, "source": source, "seed": seed, **settings}
        meta = _finished(build, shards, out_dir, committed, exhausted, known)
    _warn(shards, out_dir, meta)
    return meta


def build_stub(
    out_dir: str | os.PathLike[str], *, tokenizer: Tokenizer, source: Source, seed: int, shard_bytes: int
) -> dict[str, Any]:
    """Commit a cache without data: empty train/ and val/, and a meta.json with `built: false` (PR-03)."""
    with versions.building(out_dir) as work:
        for split in SPLITS:
            fileio.make_dir(work / split)
        meta = write_description(
            work,
            vocabulary=vocabulary_of(tokenizer),
            source=source,
            counters=source.counters,
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


def _encoder(tokenizer: Tokenizer, settings: dict[str, Any], rule: TextSplit, engine: str) -> TextEncoder:
    """Return the encoder of a build. Raises: ValueError for a shard too small for one of its tokens, and as it does."""
    token_bytes = token_dtype(tokenizer.vocab_size).itemsize
    start, end = settings.get("document_start"), settings["document_end"]
    if settings["shard_bytes"] < token_bytes:
        raise ValueError(
            f"shard_bytes={settings['shard_bytes']}: expected at least {token_bytes}, the bytes of one token"
        )
    return TextEncoder(
        tokenizer,
        on_special=settings["on_special"],
        append=None if end is None else end["id"],
        prepend=None if start is None else start["id"],
        split_seed=None if rule.share is None else rule.seed,
        engine=open_engine(tokenizer, engine, seed=rule.seed),
    )


def _document_tokens(tokenizer: Tokenizer, start_choice: str | None, end_choice: str) -> dict[str, Any]:
    """Return the keys of meta.json of what begins and ends a document: document_start only where there is such a token,
    as before there was one. A caller's own tokenizer may have eot alone, for the end."""
    start, end = None, None
    if all(hasattr(tokenizer, name) for name in ("token", "token_id", "eos_id", "model_path")):
        start = document_start_of(cast(FullTokenizer, tokenizer), start_choice)
        end = document_end_of(cast(FullTokenizer, tokenizer), end_choice)
    else:
        eot = tokenizer.special_token_ids().get("eot")
        if start_choice not in (None, "auto", "none"):
            raise ValueError(f"document_start={start_choice!r}: the tokenizer has no such token")
        if end_choice not in ("auto", "eot", "none") or (end_choice != "none" and eot is None):
            raise ValueError(f"document_end={end_choice!r}: the tokenizer has no such token")
        end = None if end_choice == "none" or eot is None else DocumentToken(SPECIAL_TOKENS[3], eot)
    keys: dict[str, Any] = {"document_end": None if end is None else end.record}
    return keys if start is None else {**keys, "document_start": start.record}


def _settings(
    split_rule: str,
    shard_bytes: int,
    on_special: str,
    partial: bool,
    budget: TokenBudget,
    shuffle_buffer: int,
    val_frac: float | None,
) -> dict[str, Any]:
    """Return the keys of meta.json for a build's arguments, which decide its bytes. Raises: ValueError for bad ones."""
    if val_frac is not None and not 0 <= val_frac < 1:
        raise ValueError(f"val_frac={val_frac}: expected 0 <= val_frac < 1")
    return {
        "kind": "pretrain",
        "built": "partial" if partial else True,
        "split_rule": split_rule,
        "shard_bytes": shard_bytes,
        "on_special": on_special,
        "max_train_tokens": budget.limits["train"],
        "max_val_tokens": budget.limits["val"],
        "val_frac": val_frac,
        "shuffle": {"algorithm": SHUFFLE_ALGORITHM if shuffle_buffer else None, "buffer": shuffle_buffer},
    }


def _of_partition(
    partition: Partition | None, plan: str | None, budget: TokenBudget, split_rule: str
) -> dict[str, Any]:
    """Give a partition its part of the budgets; returns its keys of meta.json. Raises: ValueError for bad arguments."""
    if partition is None and plan is None:
        return {}
    if partition is None or plan is None:
        raise ValueError("expected both a partition and the sha256 of its plan, or neither")
    Partition.checked(*partition)
    budget.limits = {split: partition.budget(limit) for split, limit in budget.limits.items()}
    return {
        "partition": {**partition._asdict(), "plan": checked_sha256(plan, "plan", "build_pretrain")},
        "split_rule": IN_PARTITIONS.get(split_rule, split_rule),
        **{f"max_{split}_tokens": limit for split, limit in budget.limits.items()},
    }


def _finished(
    build: Build,
    shards: Shards,
    out_dir: str | os.PathLike[str],
    committed: Callable[[dict[str, Any]], None] | None,
    exhausted: bool,
    known: dict[str, Any],
) -> dict[str, Any]:
    """Commit a build whose documents are all in the shards; returns its meta. Raises: NoTextError without train."""
    source: Source = known["source"]
    if not shards.tokens["train"] and known["built"] is True and "partition" not in known:
        raise NoTextError(f"{os.fspath(out_dir)}: no token for the train split: {_shortage(shards, source)}")
    build.checkpoint(shards.state(), ended=True)
    counters = source.counters if exhausted else build.state.counters
    return describe_and_commit(build, out_dir, shards.described, committed, counters=counters, **known)


def _shortage(shards: Shards, source: Source) -> str:
    loader = ", ".join(f"{name} {count}" for name, count in sorted(source.counters.items())) or "none"
    counts = sorted(shards.counts.items())
    drops = ", ".join(f"{name} {count}" for name, count in counts if name != "documents_read") or "none"
    return (
        f"{shards.counts['documents_read']} documents read, {shards.docs['val']} to val, dropped: {drops}, left out by "
        f"the loader: {loader}. Give it more text"
    )


def _warn(shards: Shards, out_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
    if "partition" not in meta:
        shards.losses.warn(out_dir, meta)
        warn_of_unmet_budgets(out_dir, meta)


def warn_of_unmet_budgets(out_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
    """Log a warning for each split with fewer tokens than its budget, but for the bundled sample, small on purpose."""
    for split in SPLITS:
        if meta["budget_reached"][split] is False and meta["source"].get("kind") != "sample":
            logger.warning(
                "%s: %s has %s of %s tokens: %s",
                out_dir,
                split,
                f"{meta['totals'][f'{split}_tokens']:,}",
                f"{meta[f'max_{split}_tokens']:,}",
                why_unmet(meta),
                extra={"code": "W306"},
            )
