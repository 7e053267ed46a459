"""Source + tokenizer -> pretrain/NAME or sft/NAME: how a row of the table of sources becomes a builder's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from niels_gpt.progress import Progress
from niels_gpt.recipes.documents import (
    build_chats,
    build_documents,
    check_val_frac,
    is_partitioned,
    warn_if_partial,
    without_partitions,
)
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.recipes.run_recipe import BuildInputs, Outcome
from niels_gpt.recipes.tokenizer import build_with_tokenizer
from niels_gpt.recipes.units import Units
from niels_gpt.settings import Settings


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
    settings: with partitions, the missing ones are built here, one after the other, and sealed.
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
            return build_chats(settings, source, inputs, path, progress)
        return build_documents(settings, source, inputs, path, progress)

    return build_with_tokenizer(
        settings, source, spec.key, reads=spec.settings, build=build, refresh=refresh, observed=observed
    )
