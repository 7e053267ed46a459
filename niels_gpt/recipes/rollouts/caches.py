"""The families rollouts, whose ids are stored as they are, and trees, whose messages are encoded here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from niels_gpt.data.files.part import GROUPS_RULE
from niels_gpt.data.local import LocalFiles
from niels_gpt.data.spec import LoadRequest, Part
from niels_gpt.recipes import sources
from niels_gpt.recipes.family import Family, Job
from niels_gpt.recipes.records import Outcome
from niels_gpt.recipes.request import Request
from niels_gpt.recipes.tokenizer import usable_tokenizer
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import Settings
from niels_gpt.storage.codes import CodedWarning

logger = logging.getLogger(__name__)


class Rollouts(Family):
    """Recorded rollouts -> rollouts/NAME."""

    name = kind = "rollouts"
    title, holds = "Rollout cache", "rollouts"
    partition_rule = GROUPS_RULE
    # id_copies is 0: recorded ids are decimals of any length, so their file sets no bound.

    def load(self, found: LocalFiles, field: str | None, request: LoadRequest, how: dict[str, Any]) -> list[Part]:
        """Return the groups of all rows."""
        return [(None, found.rollouts(**how))]

    def build(self, request: Request, job: Job) -> dict[str, Any]:
        """As Family; progress receives groups, tokens of their sequences, and None. Raises: as `build_rollouts`."""
        from niels_gpt.prefix_tree.rollouts.build import build_rollouts
        from niels_gpt.recipes.rollouts.groups import recorded_groups

        return build_rollouts(
            recorded_groups(sources.sequences(*request.reading(job.source), job.partition)),
            job.path,
            val_frac=request.settings.rollouts_val_frac,
            vocab_size=request.settings.rollouts_vocab_size or None,
            source=job.source,
            seed=request.settings.seed,
            partition=job.partition,
            plan=job.plan,
            committed=job.committed,
            progress=job.progress,
        )

    def look_back(self, settings: Settings, path: Path, meta: Mapping[str, Any]) -> None:
        """Log a warning where the cache has an id that the tokenizer of the settings does not have."""
        largest, size = meta.get("largest_id"), None
        try:
            tokenizer = None if settings.tokenizer is None else usable_tokenizer(settings)
            size = None if tokenizer is None else tokenizer.vocab_size
        except (OSError, ValueError) as error:  # the cache needs none
            message = "%s: its ids are not compared with the tokenizer: %s"
            logger.warning(message, path, error, extra={"code": "W314"})
        if type(largest) is int and size is not None and largest >= size:
            logger.warning(
                "%s: the largest id is %s, and %s has %s ids (ids_beyond_tokenizer). Were they sampled with another "
                "one? --rollouts-vocab-size %d drops such samples",
                path,
                f"{largest:,}",
                settings.tokenizer,
                f"{size:,}",
                size,
                extra={"code": "W314"},
            )


class TreeCaches(Family):
    """Message trees -> trees/NAME. They are built whole: a thread needs the messages of its tree."""

    name, kind = "trees", "rollouts"
    of_users = False
    takes_tokenizer = has_text = True
    id_copies = 1

    def needs_sentinels(self, settings: Settings) -> bool:
        """Whether a message is marked by sentinels: always."""
        return True

    def build(self, request: Request, job: Job) -> dict[str, Any]:
        """As Family; progress receives groups, tokens of their sequences, and None. Raises: as `build_rollouts`."""
        from niels_gpt.encoding import TextEncoder
        from niels_gpt.prefix_tree.rollouts.build import build_rollouts
        from niels_gpt.recipes.rollouts.groups import tree_groups
        from niels_gpt.tokenizers.engine import open_engine

        settings, tokenizer, reading = request.settings, request.tokenizer, request.reading(job.source)
        assert tokenizer is not None
        engine = open_engine(tokenizer, settings.engine, seed=settings.seed)
        encoder = TextEncoder(tokenizer, on_special=settings.on_special, engine=engine)
        return build_rollouts(
            tree_groups(sources.sequences(*reading), encoder, reading[3]),
            job.path,
            val_frac=settings.sft_val_frac,
            tokenizer=tokenizer,
            source=job.source,
            seed=settings.seed,
            committed=job.committed,
            progress=job.progress,
        )


def build_rollout_cache(settings: Settings, key: str, **how: Any) -> Outcome:
    """The earlier name of `units.build_token_cache`, for one release: it warns."""
    said = "niels_gpt.recipes.rollouts.caches.build_rollout_cache is niels_gpt.recipes.units.build_token_cache now"
    warnings.warn(CodedWarning("W104", said), stacklevel=2)
    return build_token_cache(settings, key, **how)


ROLLOUTS, TREE_CACHES = Rollouts(), TreeCaches()
