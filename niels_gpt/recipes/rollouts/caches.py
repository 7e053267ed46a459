"""The recipes of rollouts/NAME, whose ids are stored as they are, and of trees/NAME, which are encoded here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.data.trees import TREES
from niels_gpt.documents import Partition
from niels_gpt.progress import Progress
from niels_gpt.recipes import sources
from niels_gpt.recipes.documents import is_partitioned, without_partitions
from niels_gpt.recipes.home_recipes import HomeRecipes, UnitRecipe
from niels_gpt.recipes.resolve import ResolvedSource, resolve_source
from niels_gpt.recipes.run_recipe import BuildInputs, Outcome, run_recipe
from niels_gpt.recipes.tokenizer import build_with_tokenizer, usable_tokenizer
from niels_gpt.recipes.units import Units
from niels_gpt.settings import Settings

logger = logging.getLogger(__name__)


def build_rollout_cache(
    settings: Settings,
    key: str,
    *,
    refresh: bool = False,
    observed: str | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Build a rollout cache, or reuse it if it is current.

    key: rollouts/NAME of a user-defined source, which needs no tokenizer, or trees/oasst1.
    refresh, observed: see `run_recipe`.
    progress: receives groups, tokens of their sequences, and None.
    Raises: as `resolve_source`, `run_recipe` and `build_rollouts`; for trees NoSentinels and as `stage_tokenizer`.
    """
    source = resolve_source(settings, key)
    if is_partitioned(settings, source):
        return Units(settings, source.source, refresh=refresh, observed=observed).build_all(progress)
    if settings.partitions > 1:
        settings = without_partitions(settings, [key])

    def build(inputs: BuildInputs, path: Path) -> dict[str, Any]:
        return _build(settings, source, inputs, path, progress)

    how: dict[str, Any] = {"reads": source.spec.settings, "build": build, "refresh": refresh, "observed": observed}
    if source.spec.family == "trees":
        return build_with_tokenizer(settings, source, key, **how)
    outcome = run_recipe(settings, key, source=source, tokenizer=None, tokenizer_folder=None, **how)
    _compare_ids(settings, outcome.path, outcome.meta)
    return outcome


def _compare_ids(settings: Settings, path: Path, meta: Mapping[str, Any]) -> None:
    """Log a warning where a cache of recorded ids has one that the tokenizer of the settings does not have."""
    largest, size = meta.get("largest_id"), None
    try:
        tokenizer = None if settings.tokenizer is None else usable_tokenizer(settings)
        size = None if tokenizer is None else tokenizer.vocab_size
    except (OSError, ValueError) as error:  # the cache needs none
        message = "%s: its ids are not compared with the tokenizer: %s"
        logger.warning(message, path, error, extra={"code": "W314"})
    if type(largest) is int and size is not None and largest >= size:
        logger.warning(
            "%s: the largest id is %s, and %s has %s ids (ids_beyond_tokenizer). Were they sampled with another one? "
            "--rollouts-vocab-size %d drops such samples",
            path,
            f"{largest:,}",
            settings.tokenizer,
            f"{size:,}",
            size,
            extra={"code": "W314"},
        )


def _build(
    settings: Settings,
    source: ResolvedSource,
    inputs: BuildInputs,
    path: Path,
    progress: Progress | None,
    partition: Partition | None = None,
    plan: str | None = None,
) -> dict[str, Any]:
    from niels_gpt.encoding import TextEncoder
    from niels_gpt.prefix_tree.rollouts.build import build_rollouts
    from niels_gpt.recipes.rollouts.groups import recorded_groups, tree_groups
    from niels_gpt.tokenizers.engine import open_engine

    samples = sources.sequences(settings, source, inputs.revision, inputs.counters, inputs.source.position, partition)
    how: dict[str, Any] = {
        "source": inputs.source,
        "seed": settings.seed,
        "committed": inputs.committed,
        "progress": progress,
    }
    if inputs.tokenizer is None:
        return build_rollouts(
            recorded_groups(samples),
            path,
            val_frac=settings.rollouts_val_frac,
            vocab_size=settings.rollouts_vocab_size or None,
            partition=partition,
            plan=plan,
            **how,
        )
    engine = open_engine(inputs.tokenizer, settings.engine, seed=settings.seed)
    encoder = TextEncoder(inputs.tokenizer, on_special=settings.on_special, engine=engine)
    return build_rollouts(
        tree_groups(samples, encoder, inputs.counters),
        path,
        val_frac=settings.sft_val_frac,
        tokenizer=inputs.tokenizer,
        **how,
    )


ROLLOUT_RECIPES = HomeRecipes(
    {key: partial(build_rollout_cache, key=key) for key in TREES},
    of_families={"rollouts": build_rollout_cache},
    units={"rollouts": UnitRecipe(_build, lambda asked, meta: _compare_ids(asked.settings, asked.path, meta))},
)
