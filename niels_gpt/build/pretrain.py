"""Documents -> train/ and val/ token shards, a document index, source ids and meta.json, in one pass.

Memory is bounded by the shuffle buffer and by what is encoded ahead, never by the corpus.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any

from niels_gpt import fileio, versions
from niels_gpt.build import shuffle
from niels_gpt.build.describe import Source, build_identity, described_commit, vocabulary_of, write_description
from niels_gpt.build.encode import TextEncoder, Tokenizer
from niels_gpt.build.pipeline import Progress
from niels_gpt.build.resume import CHECKPOINT_SECONDS
from niels_gpt.build.shards import FILES, Shards, with_ids
from niels_gpt.build.split import SPLITS, TextSplit, TokenBudget, asked_share
from niels_gpt.build.start import NoTextError, opened
from niels_gpt.build.writer import TOKEN_BYTES

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
    documents: Iterable[tuple[str | None, str] | tuple[str | None, str, str | None]],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    max_train_tokens: int | None,
    max_val_tokens: int | None,
    shard_bytes: int,
    seed: int,
    shuffle_buffer: int | None,
    val_frac: float | None = None,
    append_eot: bool = False,
    on_special: str = "drop",
    num_threads: int = 1,
    executor: Executor | None = None,
    source: Source | None = None,
    split_rule: str = BUDGET_RULE,
    partial: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    committed: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build the cache and commit it at `out_dir`; returns its meta. A build that was killed goes on.

    documents: (split, text) or (split, text, id); split None leaves the choice to the text and the seed (D5). A
        document without an id has its number in the stream.
    max_train_tokens, max_val_tokens: tokens, end-of-texts included; None: no bound.
    val_frac: the share of val, 0 <= val_frac < 1, of documents that name no split; None: max_val_tokens / both. Of
        documents that name theirs it is the share that was asked for: a warning says where the tokens are far from it.
    shuffle_buffer: documents held by the torch shuffle buffer; None or 0: the order of the stream.
    num_threads: threads that encode, 0: the caller's own; executor: encodes in their place. Neither changes the output.
    partial: upstream lacks a split; train may then be empty, and meta says `built: "partial"`.
    checkpoint_seconds: between two checkpoints; 0: one after each batch.
    committed: called with the meta while a kill would still be followed by going on with this build.
    Raises: ValueError for bad arguments, for an empty train split, and for text with a sentinel if on_special="raise";
        CacheError if somebody else builds here, if something that is no cache is in the way, and if the documents are
        not those that a killed run had read; RuntimeError if a worker of the executor dies twice on a batch.
    """
    budget = TokenBudget({"train": max_train_tokens, "val": max_val_tokens})
    source, vocabulary = source or Source(), vocabulary_of(tokenizer)
    settings = _settings(
        split_rule, shard_bytes, append_eot, on_special, partial, budget, shuffle_buffer or 0, val_frac
    )
    rule = TextSplit(asked_share(settings), seed)
    encoder = _encoder(tokenizer, on_special, append_eot, rule)
    identity = build_identity(source, tokenizer, seed=seed, **settings)
    mixed = shuffle.Shuffled(with_ids(documents, source.position), size=shuffle_buffer, seed=seed)
    fingerprint = source.facts.get("fingerprint")
    with opened(out_dir, identity, FILES, checkpoint_seconds, fingerprint, source.from_scratch) as build:
        shards = Shards(build, budget, rule, encoder, shard_bytes, progress)
        exhausted = shards.fill(mixed, source, num_threads, executor)
        if not shards.tokens["train"] and not partial:
            raise NoTextError(f"{os.fspath(out_dir)}: no token for the train split: {_shortage(shards, source)}")
        build.checkpoint(shards.state(), ended=True)
        known = {"vocabulary": vocabulary, "source": source, "seed": seed, **settings}
        counters = source.counters if exhausted else build.mark.counters
        meta = described_commit(build, out_dir, shards.described, committed, counters=counters, **known)
    shards.losses.warn(out_dir, meta)
    _warn_of_unmet_budgets(out_dir, budget)
    return meta


def build_stub(
    out_dir: str | os.PathLike[str], *, tokenizer: Tokenizer, source: Source, seed: int, shard_bytes: int
) -> dict[str, Any]:
    """Commit a cache that is not built: empty train/ and val/, and a meta.json that says `built: false` (PR-03)."""
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


def _encoder(tokenizer: Tokenizer, on_special: str, append_eot: bool, rule: TextSplit) -> TextEncoder:
    append = int(tokenizer.special_token_ids()["eot"]) if append_eot else None
    split_seed = None if rule.share is None else rule.seed
    return TextEncoder(tokenizer, on_special=on_special, append=append, split_seed=split_seed)


def _settings(
    split_rule: str,
    shard_bytes: int,
    append_eot: bool,
    on_special: str,
    partial: bool,
    budget: TokenBudget,
    shuffle_buffer: int,
    val_frac: float | None,
) -> dict[str, Any]:
    """Return what meta.json says of a build's arguments: they decide its bytes. Raises: ValueError for bad ones."""
    if val_frac is not None and not 0 <= val_frac < 1:
        raise ValueError(f"val_frac={val_frac}: expected 0 <= val_frac < 1")
    if shard_bytes < TOKEN_BYTES:
        raise ValueError(f"shard_bytes={shard_bytes}: expected at least {TOKEN_BYTES}, the bytes of one token")
    return {
        "kind": "pretrain",
        "built": "partial" if partial else True,
        "split_rule": split_rule,
        "shard_bytes": shard_bytes,
        "append_eot": append_eot,
        "on_special": on_special,
        "max_train_tokens": budget.limits["train"],
        "max_val_tokens": budget.limits["val"],
        "val_frac": val_frac,
        "shuffle": {"algorithm": shuffle.ALGORITHM if shuffle_buffer else None, "buffer": shuffle_buffer},
    }


def _shortage(shards: Shards, source: Source) -> str:
    loader = ", ".join(f"{name} {count}" for name, count in sorted(source.counters.items())) or "none"
    counts = sorted(shards.counts.items())
    drops = ", ".join(f"{name} {count}" for name, count in counts if name != "documents_read") or "none"
    return (
        f"{shards.counts['documents_read']} documents read, {shards.docs['val']} to val, dropped: {drops}, left out by "
        f"the loader: {loader}. Give it more text"
    )


def _warn_of_unmet_budgets(out_dir: str | os.PathLike[str], budget: TokenBudget) -> None:
    for split, limit in budget.limits.items():
        if limit is not None and not budget.full(split):
            logger.warning("%s: %s ended at %d of %d tokens: no more text", out_dir, split, budget.used[split], limit)
