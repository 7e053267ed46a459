"""Builds a pretrain cache in one pass: documents -> train/ and val/ shards, document index, source ids, meta.json.

Memory is bounded by the shuffle buffer and the batches encoded ahead, never by the corpus. `_settings` and `described`
of shards.py give the keys of meta.json that only this kind has.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, cast

from niels_gpt.builders.build import CHECKPOINT_SECONDS
from niels_gpt.builders.meta_keys import Source, build_identity, describe_and_commit, vocabulary_of, write_description
from niels_gpt.builders.resume import NoTextError, open_build
from niels_gpt.builders.shards import FILES, Shards, with_ids
from niels_gpt.builders.source import SHUFFLE_ALGORITHM, Shuffled
from niels_gpt.builders.split import SPLITS, TextSplit, TokenBudget, asked_share
from niels_gpt.documents import DocumentBatch
from niels_gpt.encoding import TextEncoder
from niels_gpt.progress import Progress
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.storage import fileio, versions
from niels_gpt.tokenizers.document_end import DocumentEnd
from niels_gpt.tokenizers.document_end import document_end as document_end_of
from niels_gpt.tokenizers.engine import open_engine
from niels_gpt.tokenizers.protocol import FullTokenizer, Tokenizer, token_dtype

logger = logging.getLogger(__name__)

_BY_TEXT = (
    "by text: to val where the first 8 bytes of sha256(seed, newline, text), big-endian, are below {} * 2**64; where "
    "that would leave a split without a document, the nearest one goes there, to train first"
)
BUDGET_RULE = (
    _BY_TEXT.format("max_val_tokens / (max_train_tokens + max_val_tokens)")
    + "; the document that meets a full budget is cut and its rest dropped, and so are later ones of that split"
)
FRACTION_RULE = _BY_TEXT.format("val_frac")


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
    document_end: str = "none",
    on_special: str = "drop",
    num_threads: int = 1,
    executor: Executor | None = None,
    source: Source | None = None,
    engine: str = "auto",
    split_rule: str = BUDGET_RULE,
    partial: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    committed: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build the cache and commit it at `out_dir`; returns its meta. A killed build resumes.

    documents: batches, (split, text), or (split, text, id); split None: text and seed decide (D5); no id: its number.
    max_train_tokens, max_val_tokens: tokens, document ends included; None: no limit.
    val_frac: the share of val, 0 <= val_frac < 1, among documents that name no split; None: max_val_tokens / both. If
        documents name their split, the share to expect: a warning is logged if the tokens are far from it.
    shuffle_buffer: documents held by the torch shuffle buffer; None or 0: the order of the stream.
    document_end: the token that ends each document, as the setting names it. on_special: see TextEncoder.
    num_threads: threads that encode, 0: the caller's own; executor: encodes instead. engine: what computes the ids
        (open_engine). None of them changes the output.
    partial: upstream lacks a split; train may then be empty, and `built` in the meta is "partial". checkpoint_seconds:
        between two checkpoints; 0: one after each batch.
    committed: called with the meta after the commit; if it fails, the next run finishes this build. progress: called
        with documents read, tokens written, and tokens of both budgets.
    Raises: ValueError for bad arguments, for an empty train split, and for text with a sentinel if on_special="raise";
        CacheError if another process builds here, if what is no cache is in the way, or if documents changed since a
        killed run; RuntimeError if a worker of the executor dies twice on a batch.
    """
    budget = TokenBudget({"train": max_train_tokens, "val": max_val_tokens})
    source, vocabulary, end = source or Source(), vocabulary_of(tokenizer), _document_end(tokenizer, document_end)
    settings = _settings(split_rule, shard_bytes, end, on_special, partial, budget, shuffle_buffer or 0, val_frac)
    rule = TextSplit(asked_share(settings), seed)
    encoder = _encoder(tokenizer, settings, rule, engine)
    identity = build_identity(source, tokenizer, seed=seed, **settings)
    shuffled = Shuffled(shuffle_buffer, seed)
    with open_build(out_dir, identity, FILES, checkpoint_seconds, source) as build:
        shards = Shards(build, budget, rule, encoder, shard_bytes, progress)
        exhausted = shards.fill(with_ids(documents, source.position), shuffled, source, num_threads, executor)
        if not shards.tokens["train"] and not partial:
            raise NoTextError(f"{os.fspath(out_dir)}: no token for the train split: {_shortage(shards, source)}")
        build.checkpoint(shards.state(), ended=True)
        counters = source.counters if exhausted else build.state.counters
        known = {"vocabulary": vocabulary, "source": source, "counters": counters, "seed": seed, **settings}
        meta = describe_and_commit(build, out_dir, shards.described, committed, **known)
    shards.losses.warn(out_dir, meta)
    _warn_of_unmet_budgets(out_dir, budget, source)
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
    token_bytes, end = token_dtype(tokenizer.vocab_size).itemsize, settings["document_end"]
    if settings["shard_bytes"] < token_bytes:
        raise ValueError(
            f"shard_bytes={settings['shard_bytes']}: expected at least {token_bytes}, the bytes of one token"
        )
    return TextEncoder(
        tokenizer,
        on_special=settings["on_special"],
        append=None if end is None else end["id"],
        split_seed=None if rule.share is None else rule.seed,
        engine=open_engine(tokenizer, engine, seed=rule.seed),
    )


def _document_end(tokenizer: Tokenizer, choice: str) -> DocumentEnd | None:
    """Return the token that ends a document. A caller's own tokenizer may have eot alone."""
    if all(hasattr(tokenizer, name) for name in ("token", "token_id", "eos_id", "model_path")):
        return document_end_of(cast(FullTokenizer, tokenizer), choice)
    eot = tokenizer.special_token_ids().get("eot")
    if choice not in ("auto", "eot", "none") or (choice != "none" and eot is None):
        raise ValueError(f"document_end={choice!r}: the tokenizer has no such token")
    return None if choice == "none" or eot is None else DocumentEnd(SPECIAL_TOKENS[3], eot)


def _settings(
    split_rule: str,
    shard_bytes: int,
    end: DocumentEnd | None,
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
        "document_end": None if end is None else {"id": end.id, "token": end.token},
        "on_special": on_special,
        "max_train_tokens": budget.limits["train"],
        "max_val_tokens": budget.limits["val"],
        "val_frac": val_frac,
        "shuffle": {"algorithm": SHUFFLE_ALGORITHM if shuffle_buffer else None, "buffer": shuffle_buffer},
    }


def _shortage(shards: Shards, source: Source) -> str:
    loader = ", ".join(f"{name} {count}" for name, count in sorted(source.counters.items())) or "none"
    counts = sorted(shards.counts.items())
    drops = ", ".join(f"{name} {count}" for name, count in counts if name != "documents_read") or "none"
    return (
        f"{shards.counts['documents_read']} documents read, {shards.docs['val']} to val, dropped: {drops}, left out by "
        f"the loader: {loader}. Give it more text"
    )


def _warn_of_unmet_budgets(out_dir: str | os.PathLike[str], budget: TokenBudget, source: Source) -> None:
    is_small_on_purpose = source.provenance.get("kind") == "sample"
    for split, limit in budget.limits.items():
        if limit is not None and not budget.full(split) and not is_small_on_purpose:
            logger.warning(
                "%s: %s has %s of %s tokens: the source ended first",
                out_dir,
                split,
                f"{budget.used[split]:,}",
                f"{limit:,}",
                extra={"code": "W306"},
            )
