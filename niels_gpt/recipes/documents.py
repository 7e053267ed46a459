"""Source -> a token cache or one of its partitions: how a row of the table of sources becomes a builder's arguments."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from niels_gpt.cache.build_pretrain import BUDGET_RULE, FRACTION_RULE, build_pretrain, build_stub
from niels_gpt.cache.build_sft import build_sft
from niels_gpt.cache.build_templated import build_templated_sft
from niels_gpt.documents import Partition
from niels_gpt.kinds.homes import home_recipes
from niels_gpt.kinds.kind import has_partitions
from niels_gpt.progress import Progress
from niels_gpt.recipes import sources
from niels_gpt.recipes.home_recipes import HomeRecipes, UnitRecipe
from niels_gpt.recipes.resolve import ResolvedSource, resolve_source
from niels_gpt.recipes.run_recipe import AskedCache, BuildInputs, num_threads
from niels_gpt.recipes.templates import opened_template, warn_of_marks
from niels_gpt.settings import Settings
from niels_gpt.tokenizers.document_tokens import missing_start_text, post_processor_starts
from niels_gpt.tokenizers.protocol import FullTokenizer

logger = logging.getLogger(__name__)


def build_documents(
    settings: Settings,
    source: ResolvedSource,
    inputs: BuildInputs,
    path: Path,
    progress: Progress | None,
    partition: Partition | None = None,
    plan: str | None = None,
) -> dict[str, Any]:
    """Build a pretrain cache at `path`, or one of its partitions; returns its meta.

    plan: the sha256 of the plan of the partitions. progress: as for `build_token_cache`.
    """
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
        sources.document_batches(settings, source, inputs.revision, inputs.counters, inputs.source.position, partition),
        path,
        max_train_tokens=budgets[0],
        max_val_tokens=budgets[1],
        shuffle_buffer=buffer,
        split_rule=spec.split_rule or (FRACTION_RULE if spec.val_frac else BUDGET_RULE),
        val_frac=getattr(settings, spec.val_frac) if spec.val_frac else None,
        document_start=settings.document_start if spec.has_documents else "none",
        document_end=settings.document_end if spec.has_documents else "none",
        partial=_is_partial(source),
        on_special=settings.on_special,
        num_threads=num_threads(settings),
        engine=settings.engine,
        partition=partition,
        plan=plan,
        committed=inputs.committed,
        progress=progress,
        **common,
    )
    if partition is None and spec.split_rule is None and meta["val_frac"] and not meta["val_tokens"]:
        distinct = meta["docs"]["train"] - meta["duplicates"]["train"]
        logger.warning("%s: val is empty: too few distinct texts (%d)", path, distinct, extra={"code": "W308"})
    if partition is None:
        warn_of_missing_start(settings, source, inputs.tokenizer, path)
    return meta


def build_chats(
    settings: Settings,
    source: ResolvedSource,
    inputs: BuildInputs,
    path: Path,
    progress: Progress | None,
    partition: Partition | None = None,
    plan: str | None = None,
) -> dict[str, Any]:
    """Build an sft cache at `path`, or one of its partitions, by the template of the settings. As `build_documents`."""
    assert inputs.tokenizer is not None
    read = sources.chats if settings.chat_template is None else sources.template_chats
    chats: Any = read(settings, source, inputs.revision, inputs.counters, inputs.source.position, partition)
    common: dict[str, Any] = {
        "tokenizer": inputs.tokenizer,
        "val_frac": settings.sft_val_frac,
        "seed": settings.seed,
        "num_threads": num_threads(settings),
        "source": inputs.source,
        "partition": partition,
        "plan": plan,
        "committed": inputs.committed,
        "progress": progress,
    }
    if settings.chat_template is None:
        return build_sft(chats, path, on_special=settings.on_special, engine=settings.engine, **common)
    if settings.on_special == "text":
        logger.info("%s: chats that hold a special token are dropped: a template has no plain form of its tokens", path)
    if partition is None:
        warn_of_marks(settings, inputs.tokenizer, path)
    return build_templated_sft(
        chats,
        path,
        chat_tokenizer=opened_template(settings, inputs.tokenizer, path),
        on_special="raise" if settings.on_special == "raise" else "drop",
        **common,
    )


def warn_of_missing_start(settings: Settings, source: ResolvedSource, tokenizer: FullTokenizer, cache: Path) -> None:
    """Log a warning for a cache whose documents begin without what the tokenizer's post-processor writes before a text,
    where the settings do not say how they begin."""
    if settings.document_start is not None or not source.spec.has_documents:
        return
    with suppress(ValueError):  # the model cannot encode a text that would show it
        if starts := post_processor_starts(tokenizer):
            text = missing_start_text("documents", starts, "--document-start")
            logger.warning("%s: %s", cache, text, extra={"code": "W414"})


def _say_at_seal(asked: AskedCache, _: Mapping[str, Any]) -> None:
    """Log of all partitions of a token cache what `build_documents` or `build_chats` logs of a whole cache."""
    settings, tokenizer = asked.settings, asked.tokenizer
    assert tokenizer is not None
    if asked.source.spec.family == "pretrain":
        warn_of_missing_start(settings, asked.source, tokenizer, asked.path)
    elif settings.chat_template is not None:
        warn_of_marks(settings, tokenizer, asked.path)


def unit_recipe(family: str) -> UnitRecipe:
    """Return how partitions of a family's caches are built."""
    own = {"pretrain": UnitRecipe(build_documents, _say_at_seal), "sft": UnitRecipe(build_chats, _say_at_seal)}
    homes: list[HomeRecipes] = home_recipes()
    return {**own, **{name: recipe for home in homes for name, recipe in home.units.items()}}[family]


def is_partitioned(settings: Settings, source: ResolvedSource) -> bool:
    """Whether the settings build the source's cache in partitions: all but trees and stubs."""
    return settings.partitions > 1 and has_partitions(source.spec.key) and not source.stub


def budget_of(settings: Settings, source: ResolvedSource) -> int | None:
    """Return the tokens of both budgets of a pretrain cache; None without budgets."""
    return sum(getattr(settings, each) for each in source.spec.budget_settings) or None


def built_whole(settings: Settings, keys: Sequence[str]) -> list[str]:
    """Return the caches that are built whole, although the settings have partitions. [] for settings without."""
    whole = []
    for key in keys if settings.partitions > 1 else ():
        with suppress(OSError, ValueError):  # its build reports it
            if not is_partitioned(settings, resolve_source(settings, key)):
                whole.append(key)
    return whole


def without_partitions(settings: Settings, keys: Sequence[str]) -> Settings:
    """Return the settings of caches that are built whole, and log a warning that names them."""
    logger.warning(
        "%s: built whole, without partitions: trees of messages and stubs have none",
        ", ".join(keys),
        extra={"code": "W505"},
    )
    return replace(settings, partitions=1)


def check_val_frac(settings: Settings, source: ResolvedSource) -> None:
    """Raise ValueError for a share of val that no cache can have."""
    name = source.spec.val_frac
    if name and not 0 <= getattr(settings, name) < 1:
        raise ValueError(f"{name} is {getattr(settings, name)}; expected at least 0 and less than 1")


def _is_partial(source: ResolvedSource) -> bool:
    return len(source.splits) < len(source.spec.splits or {})


def warn_if_partial(source: ResolvedSource) -> None:
    """Log a warning where upstream's splits are not all there, or a snapshot that is read as files is cut short."""
    if source.manifest is not None and not source.streaming and not source.manifest["ended"]:
        logger.warning(
            "%s: the files are a snapshot that is cut short after %s bytes of text: the dataset has more. Make it "
            "longer: niels-gpt snapshot %s %s --tokens N",
            source.source,
            f"{source.manifest['text_bytes']:,}",
            source.source,
            source.root,
            extra={"code": "W301"},
        )
    if _is_partial(source):
        there = " and ".join(source.splits) or "test"
        logger.warning(
            "%s: the source has only %s here: the cache is partial",
            source.source,
            there,
            extra={"code": "W301"},
        )
