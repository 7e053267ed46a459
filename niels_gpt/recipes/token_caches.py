"""Source + tokenizer -> pretrain/NAME or sft/NAME: how a row of the table of sources becomes a builder's arguments."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from niels_gpt.cache.build_sft import build_sft
from niels_gpt.cache.build_templated import build_templated_sft
from niels_gpt.progress import Progress
from niels_gpt.recipes import sources
from niels_gpt.recipes.documents import (
    build_documents,
    check_val_frac,
    is_partitioned,
    warn_if_partial,
    without_partitions,
)
from niels_gpt.recipes.resolve import ResolvedSource, resolve_source
from niels_gpt.recipes.run_recipe import BuildInputs, Outcome, num_threads
from niels_gpt.recipes.templates import opened_template, warn_of_marks
from niels_gpt.recipes.tokenizer import build_with_tokenizer
from niels_gpt.recipes.units import Units
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
    settings: with partitions, a pretrain cache's missing ones are built here, one after the other, and sealed.
    refresh, observed: see `run_recipe`.
    progress: receives documents, tokens, and the tokens of both budgets (None without budgets).
    Raises: as `resolve_source`, `stage_tokenizer`, `run_recipe` and the builders.
    """
    source = resolve_source(settings, name)
    spec = source.spec
    if settings.partitions > 1:
        if is_partitioned(settings, source):
            return Units(settings, name, refresh=refresh, observed=observed).build_all(progress)
        settings = without_partitions(settings, [spec.key])
    if spec.family == "pretrain":
        check_val_frac(settings, source)
        warn_if_partial(source)

    def build(inputs: BuildInputs, path: Path) -> dict[str, Any]:
        if spec.family == "sft":
            return _build_chats(settings, source, inputs, path, progress)
        return build_documents(settings, source, inputs, path, progress)

    return build_with_tokenizer(
        settings, source, spec.key, reads=spec.settings, build=build, refresh=refresh, observed=observed
    )


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
