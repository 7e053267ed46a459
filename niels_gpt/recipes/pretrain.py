"""Source + tokenizer -> pretrain/NAME, one function each. The tokenizer comes from `built_with` (D19)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from niels_gpt.build.pipeline import Progress
from niels_gpt.build.pretrain import BUDGET_RULE, FRACTION_RULE, build_pretrain, build_stub
from niels_gpt.recipes import sources
from niels_gpt.recipes.origins import Origin, origin_of
from niels_gpt.recipes.produce import Ingredients, Outcome, num_threads
from niels_gpt.recipes.tokenizer import built_with
from niels_gpt.settings import Settings

logger = logging.getLogger(__name__)

_COMMON = ("seed", "shard_bytes", "on_special", "max_document_bytes")
OWN = "own"
READS = {
    "fineweb_edu": (
        *_COMMON,
        "append_eot",
        "shuffle_buffer",
        "fineweb_edu_dataset",
        "fineweb_edu_config",
        "fineweb_edu_train_tokens",
        "fineweb_edu_val_tokens",
    ),
    "wikitext": (*_COMMON, "wikitext_dataset", "wikitext_config"),
    OWN: (*_COMMON, "append_eot", "own_val_frac", "as_text"),
    "roam": (*_COMMON, "append_eot", "roam_val_frac"),
    "gutenberg": (
        *_COMMON,
        "append_eot",
        "gutenberg_shuffle_buffer",
        "gutenberg_dataset",
        "gutenberg_from_hub",
        "gutenberg_train_tokens",
        "gutenberg_val_tokens",
    ),
}
"""The settings that decide each cache's bytes; a change of one of them builds that cache anew. OWN: of one's own."""


def build_fineweb_edu(
    settings: Settings, *, refresh: bool = False, observed: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Build pretrain/fineweb_edu: shuffled web pages with end-of-texts, up to the token budgets."""
    origin = origin_of(settings, "fineweb_edu")

    def build(have: Ingredients, path: Path) -> dict[str, Any]:
        return build_pretrain(
            sources.fineweb_edu_texts(settings, origin, have.revision, have.counters),
            path,
            max_train_tokens=settings.fineweb_edu_train_tokens,
            max_val_tokens=settings.fineweb_edu_val_tokens,
            # The hub's stream is shuffled by `datasets` already; a second buffer would hold 10,000 documents more (D8).
            shuffle_buffer=None if origin.ordered else settings.shuffle_buffer,
            split_rule=BUDGET_RULE,
            append_eot=settings.append_eot,
            **_arguments(settings, have, progress),
        )

    return _cache(settings, origin, build, refresh, observed)


def build_wikitext(
    settings: Settings, *, refresh: bool = False, observed: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Build pretrain/wikitext: all lines of train and val in upstream's order, without end-of-texts."""
    origin = origin_of(settings, "wikitext")
    splits = sources.wikitext_splits(settings, origin)
    partial = len(splits) < 2
    if partial:
        logger.warning(
            "wikitext: upstream here has only %s: the cache is marked partial", " and ".join(splits) or "test"
        )

    def build(have: Ingredients, path: Path) -> dict[str, Any]:
        return build_pretrain(
            sources.wikitext_texts(settings, have.revision, have.counters, splits, have.source.position),
            path,
            split_rule="upstream's own splits; val is upstream's validation",
            partial=partial,
            **_unbounded(),
            **_arguments(settings, have, progress),
        )

    return _cache(settings, origin, build, refresh, observed)


def build_roam(
    settings: Settings, *, refresh: bool = False, observed: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Build pretrain/roam: all notes, split by file, with end-of-texts."""
    origin = origin_of(settings, "roam")

    def build(have: Ingredients, path: Path) -> dict[str, Any]:
        return build_pretrain(
            sources.roam_texts(settings, origin, have.counters),
            path,
            split_rule=(
                "by file: of n distinct texts in order of path, the first max(1, int(n * val_frac)) of "
                "torch.randperm(n) seeded with seed go to val (none where n = 1 or val_frac = 0); equal ones follow"
            ),
            val_frac=settings.roam_val_frac,
            append_eot=settings.append_eot,
            **_unbounded(),
            **_arguments(settings, have, progress),
        )

    return _cache(settings, origin, build, refresh, observed)


def build_gutenberg(
    settings: Settings, *, refresh: bool = False, observed: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Build pretrain/gutenberg from a mirror's books; on the hub it is a stub unless gutenberg_from_hub is set."""
    origin = origin_of(settings, "gutenberg")

    def build(have: Ingredients, path: Path) -> dict[str, Any]:
        common = _arguments(settings, have, progress)
        if origin.stub:
            meta = build_stub(path, **{key: common[key] for key in ("tokenizer", "source", "seed", "shard_bytes")})
            have.committed(meta)
            return meta
        return build_pretrain(
            sources.gutenberg_texts(settings, origin, have.revision, have.counters),
            path,
            max_train_tokens=settings.gutenberg_train_tokens,
            max_val_tokens=settings.gutenberg_val_tokens,
            shuffle_buffer=None if origin.ordered else settings.gutenberg_shuffle_buffer,
            split_rule=BUDGET_RULE,
            append_eot=settings.append_eot,
            **common,
        )

    return _cache(settings, origin, build, refresh, observed)


def build_own(
    settings: Settings,
    name: str,
    *,
    refresh: bool = False,
    observed: str | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Build pretrain/NAME from text of one's own: all of it, in order of path and row."""
    origin = origin_of(settings, name)
    if not 0 <= settings.own_val_frac < 1:
        raise ValueError(f"own_val_frac is {settings.own_val_frac}; expected at least 0 and less than 1")

    def build(have: Ingredients, path: Path) -> dict[str, Any]:
        meta = build_pretrain(
            sources.own_texts(settings, origin, have.counters, have.source.position),
            path,
            split_rule=FRACTION_RULE,
            val_frac=settings.own_val_frac,
            append_eot=settings.append_eot,
            **_unbounded(),
            **_arguments(settings, have, progress),
        )
        if not meta["val_tokens"] and settings.own_val_frac:
            distinct = meta["docs"]["train"] - meta["duplicates"]["train"]
            logger.warning("%s: val is empty: the documents have %d distinct texts", path, distinct)
        return meta

    return _cache(settings, origin, build, refresh, observed)


def _unbounded() -> dict[str, Any]:
    return {"max_train_tokens": None, "max_val_tokens": None, "shuffle_buffer": None}


def _arguments(settings: Settings, have: Ingredients, progress: Progress | None) -> dict[str, Any]:
    return {
        "tokenizer": have.tokenizer,
        "source": have.source,
        "seed": settings.seed,
        "shard_bytes": settings.shard_bytes,
        "on_special": settings.on_special,
        "num_threads": num_threads(settings),
        "committed": have.committed,
        "progress": progress,
    }


def _cache(
    settings: Settings,
    origin: Origin,
    build: Callable[[Ingredients, Path], dict[str, Any]],
    refresh: bool,
    observed: str | None,
) -> Outcome:
    reads = READS[OWN if origin.own else origin.source]
    return built_with(
        settings, origin, f"pretrain/{origin.source}", reads=reads, build=build, refresh=refresh, observed=observed
    )
