"""Source + tokenizer -> pretrain/NAME or sft/NAME: how a row of the table of sources becomes a builder's arguments."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from niels_gpt.builders.pretrain import BUDGET_RULE, FRACTION_RULE, build_pretrain, build_stub
from niels_gpt.builders.sft import build_sft, build_templated_sft
from niels_gpt.progress import Progress
from niels_gpt.recipes import sources
from niels_gpt.recipes.resolve import ResolvedSource, resolve_source
from niels_gpt.recipes.run_recipe import BuildInputs, Outcome, num_threads
from niels_gpt.recipes.tokenizer import build_with_tokenizer
from niels_gpt.recipes.tokenizers.templates import opened_template, warn_of_marks
from niels_gpt.settings import Settings

logger = logging.getLogger(__name__)


def build_token_cache(
    settings: Settings,
    name: str,
    *,
    refresh: bool = False,
    observed: str | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Build the cache of a source, or reuse it if it is current.

    name: of a built-in or user-defined source.
    refresh, observed: see `run_recipe`.
    progress: receives documents, tokens, and the tokens of both budgets (None without budgets).
    Raises: as `resolve_source`, `stage_tokenizer`, `run_recipe` and the builders.
    """
    source = resolve_source(settings, name)
    spec = source.spec
    if spec.family == "pretrain":
        _check_val_frac(settings, source)
        _warn_if_partial(source)

    def build(inputs: BuildInputs, path: Path) -> dict[str, Any]:
        if spec.family == "sft":
            return _build_chats(settings, source, inputs, path, progress)
        return _build_documents(settings, source, inputs, path, progress)

    return build_with_tokenizer(
        settings, source, spec.key, reads=spec.settings, build=build, refresh=refresh, observed=observed
    )


def _build_documents(
    settings: Settings, source: ResolvedSource, inputs: BuildInputs, path: Path, progress: Progress | None
) -> dict[str, Any]:
    spec = source.spec
    assert inputs.tokenizer is not None
    common: dict[str, Any] = {
        "tokenizer": inputs.tokenizer,
        "source": inputs.source,
        "seed": settings.seed,
        "shard_bytes": settings.shard_bytes,
    }
    if source.stub:
        meta = build_stub(path, **common)
        inputs.committed(meta)
        return meta
    budgets = [getattr(settings, each) for each in spec.budget_settings] or [None, None]
    # The hub's stream is shuffled by `datasets` already; a second buffer would hold 10,000 documents more (D8).
    buffer = None if source.ordered or spec.shuffle_buffer is None else getattr(settings, spec.shuffle_buffer)
    meta = build_pretrain(
        sources.document_batches(settings, source, inputs.revision, inputs.counters, inputs.source.position),
        path,
        max_train_tokens=budgets[0],
        max_val_tokens=budgets[1],
        shuffle_buffer=buffer,
        split_rule=spec.split_rule or (FRACTION_RULE if spec.val_frac else BUDGET_RULE),
        val_frac=getattr(settings, spec.val_frac) if spec.val_frac else None,
        document_end=settings.document_end if spec.has_document_end else "none",
        partial=_is_partial(source),
        on_special=settings.on_special,
        num_threads=num_threads(settings),
        engine=settings.engine,
        committed=inputs.committed,
        progress=progress,
        **common,
    )
    if spec.split_rule is None and meta["val_frac"] and not meta["val_tokens"]:
        distinct = meta["docs"]["train"] - meta["duplicates"]["train"]
        logger.warning("%s: val is empty: too few distinct texts (%d)", path, distinct, extra={"code": "W308"})
    return meta


def _build_chats(
    settings: Settings, source: ResolvedSource, inputs: BuildInputs, path: Path, progress: Progress | None
) -> dict[str, Any]:
    assert inputs.tokenizer is not None
    read = sources.chats if settings.chat_template is None else sources.template_chats
    chats: Any = read(settings, source, inputs.revision, inputs.counters, inputs.source.position)
    common: dict[str, Any] = {
        "tokenizer": inputs.tokenizer,
        "val_frac": settings.sft_val_frac,
        "seed": settings.seed,
        "num_threads": num_threads(settings),
        "source": inputs.source,
        "committed": inputs.committed,
        "progress": progress,
    }
    if settings.chat_template is None:
        return build_sft(chats, path, on_special=settings.on_special, engine=settings.engine, **common)
    if settings.on_special == "text":
        logger.info("%s: chats that hold a special token are dropped: a template has no plain form of its tokens", path)
    warn_of_marks(settings, inputs.tokenizer, path)
    return build_templated_sft(
        chats,
        path,
        chat_tokenizer=opened_template(settings, inputs.tokenizer, path),
        on_special="raise" if settings.on_special == "raise" else "drop",
        **common,
    )


def _check_val_frac(settings: Settings, source: ResolvedSource) -> None:
    name = source.spec.val_frac
    if name and not 0 <= getattr(settings, name) < 1:
        raise ValueError(f"{name} is {getattr(settings, name)}; expected at least 0 and less than 1")


def _is_partial(source: ResolvedSource) -> bool:
    return len(source.splits) < len(source.spec.splits or {})


def _warn_if_partial(source: ResolvedSource) -> None:
    if _is_partial(source):
        there = " and ".join(source.splits) or "test"
        logger.warning(
            "%s: the source has only %s here: the cache is partial",
            source.source,
            there,
            extra={"code": "W301"},
        )
