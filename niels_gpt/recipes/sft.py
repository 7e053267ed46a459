"""Source + tokenizer -> sft/NAME, one function each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from niels_gpt.build.pipeline import Progress
from niels_gpt.build.sft import build_sft
from niels_gpt.recipes import sources
from niels_gpt.recipes.origins import origin_of
from niels_gpt.recipes.pretrain import OWN
from niels_gpt.recipes.produce import Ingredients, Outcome, num_threads
from niels_gpt.recipes.tokenizer import built_with
from niels_gpt.settings import Settings

_COMMON = ("seed", "on_special", "sft_val_frac", "max_document_bytes")
READS = {
    "dolly15k": (*_COMMON, "dolly_dataset", "dolly_include_system"),
    OWN: _COMMON,
    "oasst1": (*_COMMON, "oasst1_dataset", "oasst1_english_only", "oasst1_max_messages"),
}
"""The settings that decide each cache's bytes; a change of one of them builds that cache anew. OWN: of one's own."""


def build_dolly15k(
    settings: Settings, *, refresh: bool = False, observed: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Build sft/dolly15k: one instruction and one response each."""
    return build_chats(settings, "dolly15k", refresh=refresh, observed=observed, progress=progress)


def build_oasst1(
    settings: Settings, *, refresh: bool = False, observed: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Build sft/oasst1: every path from a root to a leaf of the message trees."""
    return build_chats(settings, "oasst1", refresh=refresh, observed=observed, progress=progress)


def build_chats(
    settings: Settings,
    name: str,
    *,
    refresh: bool = False,
    observed: str | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Build sft/NAME from the chats of any source, one's own included."""
    origin = origin_of(settings, name)

    def build(have: Ingredients, path: Path) -> dict[str, Any]:
        return build_sft(
            sources.chats(settings, origin, have.revision, have.counters, have.source.position),
            path,
            tokenizer=have.tokenizer,
            val_frac=settings.sft_val_frac,
            seed=settings.seed,
            on_special=settings.on_special,
            num_threads=num_threads(settings),
            source=have.source,
            committed=have.committed,
            progress=progress,
        )

    reads = READS[OWN if origin.own else name]
    return built_with(settings, origin, f"sft/{name}", reads=reads, build=build, refresh=refresh, observed=observed)
