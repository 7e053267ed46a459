"""The family pretrain: build documents to pretrain/NAME, or to one of its partitions."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from niels_gpt.cache.build_pretrain import BUDGET_RULE, FRACTION_RULE, build_pretrain, build_stub
from niels_gpt.cache.joining import warn_of_empty_val
from niels_gpt.data.local import LocalFiles, iter_documents, open_files
from niels_gpt.data.spec import LoadRequest, Part, SourceSpec
from niels_gpt.recipes import sources
from niels_gpt.recipes.family import Family, Job
from niels_gpt.recipes.records import TOKENIZER_KEY, cache_root
from niels_gpt.recipes.request import Request
from niels_gpt.recipes.user_sources import text_suffixes
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.tokenizers.document_tokens import document_end, document_start, missing_start_text, post_processor_starts
from niels_gpt.tokenizers.protocol import FullTokenizer

logger = logging.getLogger(__name__)


class Documents(Family):
    """Family of caches of documents."""

    name = kind = "pretrain"
    title, holds = "Token cache", "text"
    own_settings = ("as_text",)
    own_val_frac = "own_val_frac"
    own_field = takes_tokenizer = has_text = True
    id_copies = 1

    # --- reading ---

    def files(self, pattern: str, base: Path, settings: Settings) -> LocalFiles:
        """Return the files of text and of rows."""
        more = text_suffixes(settings)
        return open_files(pattern, base=base, follow_links=settings.follow_links, as_text=more)

    def load(self, found: LocalFiles, field: str | None, request: LoadRequest, how: dict[str, Any]) -> list[Part]:
        """Return the documents of all files, or of a partition."""
        how |= {"field": field, "blocks": request.blocks}
        return [(None, iter_documents(found, **how))]

    # --- settings that decide bytes ---

    def recipe(self, settings: Settings, reads: Sequence[str], tokenizer: FullTokenizer | None) -> dict[str, Any]:
        """Return the settings that decide bytes. Without a token before documents, leave its setting out, so that
        caches from before the setting stay current."""
        chosen = super().recipe(settings, reads, tokenizer)
        start = chosen.pop("document_start", None)
        if start not in (None, "none") and (tokenizer is None or document_start(tokenizer, start) is not None):
            chosen["document_start"] = start
        return chosen

    def compared(self, recipe: dict[str, Any], tokenizer: FullTokenizer | None) -> dict[str, Any]:
        """Replace the tokens around documents by their ids. For the sentinel or no token at the end, use the key
        `append_eot` from before there were other choices, so that older caches stay current."""
        recipe = dict(recipe)
        if (choice := recipe.pop("document_end", None)) is not None:
            recipe |= _known_end(tokenizer, choice)
        if tokenizer is not None and (start := document_start(tokenizer, recipe.get("document_start"))) is not None:
            recipe["document_start"] = [start.id, start.token]
        return recipe

    # --- checks before a build ---

    def check(self, settings: Settings, spec: SourceSpec) -> None:
        """Raise ValueError for a share of val below 0, or of 1 and more."""
        name = spec.val_frac
        if name and not 0 <= getattr(settings, name) < 1:
            raise ValueError(f"{name} is {getattr(settings, name)}; expected at least 0 and less than 1")

    def check_tokenizer(self, settings: Settings, spec: SourceSpec, tokenizer: FullTokenizer, where: Path) -> None:
        """Raise CacheError E102 for a token around documents that the tokenizer lacks."""
        if not spec.has_documents:
            return
        try:
            document_start(tokenizer, settings.document_start)
            document_end(tokenizer, settings.document_end)
        except ValueError as error:
            why = str(error).removeprefix(f"{tokenizer.model_path}: ")
            raise CacheError(settings.tokenizer or cache_root(settings) / TOKENIZER_KEY, why, code="E102") from error

    # --- building ---

    def build(self, request: Request, job: Job) -> dict[str, Any]:
        """Build the cache, or one partition; a stub if the source is not asked for."""
        settings, spec = request.settings, request.source.spec
        assert request.tokenizer is not None
        common: dict[str, Any] = {
            "tokenizer": request.tokenizer,
            "source": job.source,
            "seed": settings.seed,
            "shard_bytes": settings.shard_bytes,
        }
        if request.source.stub:
            meta = build_stub(job.path, **common)
            job.committed(meta)
            return meta
        budgets = [getattr(settings, each) for each in spec.budget_settings] or [None, None]
        # The hub's stream is shuffled by `datasets` already; a second buffer would hold 10,000 documents more (D8).
        is_shuffled = request.source.ordered or spec.shuffle_buffer is None
        return build_pretrain(
            sources.document_batches(*request.reading(job.source), job.partition),
            job.path,
            max_train_tokens=budgets[0],
            max_val_tokens=budgets[1],
            shuffle_buffer=None if is_shuffled else getattr(settings, str(spec.shuffle_buffer)),
            split_rule=spec.split_rule or (FRACTION_RULE if spec.val_frac else BUDGET_RULE),
            val_frac=getattr(settings, spec.val_frac) if spec.val_frac else None,
            document_start=settings.document_start if spec.has_documents else "none",
            document_end=settings.document_end if spec.has_documents else "none",
            partial=request.source.is_partial,
            on_special=settings.on_special,
            num_threads=request.num_threads,
            engine=settings.engine,
            partition=job.partition,
            plan=job.plan,
            committed=job.committed,
            progress=job.progress,
            **common,
        )

    def warn(self, request: Request, meta: Mapping[str, Any]) -> None:
        """Log an empty val (W308), and documents that begin without the token that the tokenizer's post-processor
        writes, unless the settings say how they begin (W414)."""
        if "partitions" not in meta and meta["built"] and meta["val_frac"] and request.source.spec.split_rule is None:
            warn_of_empty_val(request.path, meta, meta["docs"]["train"] - meta["duplicates"]["train"])
        if request.settings.document_start is not None or not request.source.spec.has_documents or request.source.stub:
            return
        assert request.tokenizer is not None
        with suppress(ValueError):  # the model cannot encode a text that would show it
            if starts := post_processor_starts(request.tokenizer):
                text = missing_start_text("documents", starts, "--document-start")
                logger.warning("%s: %s", request.path, text, extra={"code": "W414"})


def _known_end(tokenizer: FullTokenizer | None, choice: str) -> dict[str, Any]:
    if tokenizer is None:
        return {"auto": {"append_eot": True}, "eot": {"append_eot": True}, "none": {"append_eot": False}}.get(
            choice, {"document_end": choice}
        )
    end = document_end(tokenizer, choice)
    if end is None or end.id == tokenizer.special_token_ids().get("eot"):
        return {"append_eot": end is not None}
    return {"document_end": [end.id, end.token]}


PRETRAIN = Documents()
