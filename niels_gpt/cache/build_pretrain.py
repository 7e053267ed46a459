"""Build a pretrain cache in one pass: documents to train/ and val/ shards, document index, source ids, meta.json.

The shuffle buffer and the batches encoded ahead bound the memory, never the corpus. The keys of meta.json that only
this kind has come from `_settings`, and from `described` in shards.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, cast

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.shards import Shards, files_of, with_ids
from niels_gpt.documents import DocumentBatch, Partition
from niels_gpt.encoding import TextEncoder
from niels_gpt.engine.build import How, claim_of, run_build
from niels_gpt.engine.checkpoints import CHECKPOINT_SECONDS
from niels_gpt.engine.meta import Source, vocabulary_of, write_description
from niels_gpt.engine.split import TextSplit, TokenBudget, asked_share
from niels_gpt.engine.stream import SHUFFLE_ALGORITHM, Shuffled
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.storage import fileio, versions
from niels_gpt.tokenizers.document_tokens import DocumentToken
from niels_gpt.tokenizers.document_tokens import document_end as document_end_of
from niels_gpt.tokenizers.document_tokens import document_start as document_start_of
from niels_gpt.tokenizers.engine import open_engine
from niels_gpt.tokenizers.protocol import FullTokenizer, Tokenizer, token_dtype
from niels_gpt.work import Progress

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
"""The rule in a partition, which does not know the documents of the others."""


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
    """Build a pretrain cache and commit it at `out_dir`. Returns its meta. A killed build resumes.

    documents: batches, (split, text), or (split, text, id). split None: text and seed decide (D5). No id: its number.
    max_train_tokens, max_val_tokens: budgets in tokens, document starts and ends included; None: no limit.
    val_frac: share of val, below 1, or the expected one if documents name their split; None: by the budgets.
    shuffle_buffer: documents in torch's shuffle buffer; None or 0: the order of the stream. on_special: as TextEncoder.
    document_start, document_end: tokens around each document, as in the settings. plan: sha256 of plan.json.
    num_threads: threads that encode; 0: the caller's own. executor: encodes instead. engine: see open_engine. None of
        these changes the output. checkpoint_seconds: between two checkpoints; 0: one after each batch.
    partial: upstream lacks a split; train may be empty. partition: owns `documents`; budgets and seed are of all.
    committed: called with the meta after the commit; if it fails, the next run finishes this build.
    progress: called with documents read, tokens written, and tokens of both budgets.
    Raises: ValueError for bad arguments, or a sentinel with on_special="raise"; NoTextError E303 if train is empty;
        CacheError E503 while another process builds here, E504 if `out_dir` is no cache, E505 for a damaged unfinished
        build, E306 if documents changed since; WorkerDied E506, ForkedBuild E508.
    """
    budget, source = TokenBudget({"train": max_train_tokens, "val": max_val_tokens}), source or Source()
    settings = _settings(split_rule, shard_bytes, on_special, partial, budget, shuffle_buffer or 0, val_frac)
    settings |= _document_tokens(tokenizer, document_start, document_end)
    rule = TextSplit(asked_share(settings), seed, moves=partition is None)
    encoder = _encoder(tokenizer, settings, rule, engine)
    settings |= claim_of(partition, plan, split_rule, IN_PARTITIONS) | _part_of_budgets(partition, budget)
    return run_build(
        out_dir,
        lambda number: with_ids(documents, number),
        lambda build: Shards(build, source, budget, rule, encoder, settings, os.fspath(out_dir)),
        How(num_threads, executor, checkpoint_seconds, committed, progress),
        tokenizer=tokenizer,
        files=files_of(partition),
        source=source,
        rule=rule,
        shuffled=Shuffled(shuffle_buffer, seed if partition is None else partition.seed(seed)),
        settings=settings,
    )


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
    """Return the encoder of a build. Raises: ValueError for bad arguments, or a shard too small for one token."""
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
        engine=open_engine(tokenizer, engine),
    )


def _document_tokens(tokenizer: Tokenizer, start_choice: str | None, end_choice: str) -> dict[str, Any]:
    """Return the keys of meta.json for the tokens around documents. Without a start token there is no key
    document_start, as in older caches. A caller's own tokenizer may have only eot, for the end."""
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
    """Return the keys of meta.json for the arguments that decide a build's bytes. Raises: ValueError for bad ones."""
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


def _part_of_budgets(partition: Partition | None, budget: TokenBudget) -> dict[str, Any]:
    """Give a partition its part of the budgets. Returns its keys of meta.json."""
    if partition is None:
        return {}
    budget.limits = {split: partition.budget(limit) for split, limit in budget.limits.items()}
    return {f"max_{split}_tokens": limit for split, limit in budget.limits.items()}
