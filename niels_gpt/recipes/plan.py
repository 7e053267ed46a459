"""Every recipe by its key, and what a run would do without doing it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.cache.meta import find_meta
from niels_gpt.fileio import CacheError
from niels_gpt.recipes import pretrain, sft
from niels_gpt.recipes.disk import need_of
from niels_gpt.recipes.origins import Origin, asked_revisions, origin_of
from niels_gpt.recipes.own import OwnSource, own_sources
from niels_gpt.recipes.produce import (
    TOKENIZER_KEY,
    Outcome,
    cache_root,
    is_current,
    recipe_fingerprint,
    recorded_recipe,
)
from niels_gpt.recipes.tokenizer import TRAINING_SETTINGS, ensure_tokenizer, tokenizer_state
from niels_gpt.records import parse_object, read_regular
from niels_gpt.settings import Settings
from niels_gpt.versions import BUILDING, JOURNAL_NAME, JOURNAL_SUFFIX, RECIPE_NAME, versions_dir

Recipe = Callable[..., Outcome]

RECIPES: dict[str, Recipe] = {
    "pretrain/fineweb_edu": pretrain.build_fineweb_edu,
    "pretrain/wikitext": pretrain.build_wikitext,
    "pretrain/roam": pretrain.build_roam,
    "pretrain/gutenberg": pretrain.build_gutenberg,
    "sft/dolly15k": sft.build_dolly15k,
    "sft/oasst1": sft.build_oasst1,
}
"""The project's caches, in the order in which build-all builds them, after the tokenizer: `ensure_tokenizer`."""

_READS = {f"pretrain/{name}": reads for name, reads in pretrain.READS.items()}
_READS |= {f"sft/{name}": reads for name, reads in sft.READS.items()}
_READS[TOKENIZER_KEY] = ("tokenizer_model", *TRAINING_SETTINGS)


def recipes(settings: Settings) -> dict[str, Recipe]:
    """Return RECIPES and, after them, those of the user's own sources. Raises as `own_sources`."""
    return RECIPES | {f"{own.family}/{own.name}": own_recipe(own) for own in own_sources(settings).values()}


def own_recipe(own: OwnSource) -> Recipe:
    """Return the recipe of one of the user's own sources."""
    return partial(sft.build_chats if own.family == "sft" else pretrain.build_own, name=own.name)


def _reads(key: str) -> tuple[str, ...]:
    return _READS.get(key) or _READS[f"{key.split('/')[0]}/{pretrain.OWN}"]


@dataclass(frozen=True)
class Plan:
    """What a run would do for one cache."""

    key: str
    """tokenizer, pretrain/NAME or sft/NAME."""
    action: str
    """up to date, build (and how far an unfinished build came), stub, copy, train, or why it cannot be built."""
    source: str
    """Where the text comes from."""
    disk_bytes: int
    """Disk that the new version needs while it is built, at most; 0 where nothing is built."""
    least_bytes: int = 0
    """And at least: a build that has less room is refused."""


def plan(settings: Settings, keys: list[str]) -> list[Plan]:
    """Return what a run over `keys` would do. Reads files to fingerprint them; asks the hub nothing; writes nothing."""
    state = tokenizer_state(settings)
    model = settings.tokenizer_model or ("sources" if state == "train" else "")
    return [Plan(TOKENIZER_KEY, state, model, 0 if state == "up to date" else 1_000_000)] + [
        _plan_of(settings, key, state) for key in keys
    ]


def settings_fingerprint(settings: Settings, key: str) -> str:
    """Return twelve hex digits of the settings that decide the bytes of `key`, and of the builder's version.

    What `recipe_fingerprint` is made of, as far as it is known without looking at a tokenizer or a source. A file of
    what is left out that cannot be read counts as none: whoever builds is told.
    """
    name = key.rpartition("/")[2]
    own = own_sources(settings).get(name)
    said = (
        repr((own.files, own.field, own.licence, own.attribution)) if own else asked_revisions(settings).get(name, "")
    )
    try:
        return recipe_fingerprint(settings, key, _reads(key), "", said)[:12]
    except (OSError, ValueError):
        return recipe_fingerprint(replace(settings, exclude=None), key, _reads(key), "", said)[:12]


def built_at(settings: Settings, key: str) -> float:
    """Return when the committed cache `key` was built from its source, in seconds since the epoch; 0.0 for none."""
    record = versions_dir(cache_root(settings) / key) / RECIPE_NAME
    return record.stat().st_mtime if record.is_file() else 0.0


def observe(settings: Settings, key: str) -> tuple[dict[str, Any], str | None]:
    """Look at the source of the cache `key` as it is now; returns its facts, and a warning or None.

    Reads every file of the source, or asks the hub for its newest revision. Where the hub cannot be reached, the facts
    are those of the committed cache, and the warning says so.
    Raises: FileNotFoundError; ConnectionError without a hub and without a committed cache.
    """
    origin = origin_of(settings, key.split("/")[1])
    try:
        return origin.facts(None), None
    except ConnectionError as error:
        recorded = recorded_recipe(cache_root(settings) / key).get("source") or {}
        facts = origin.facts(recorded, ask_hub=False)
        if facts["revision"] is None:
            raise
        return facts, f"{key}: the revision that the cache was built from stands for the newest one: {error}"


def _plan_of(settings: Settings, key: str, tokenizer: str) -> Plan:
    try:
        origin = origin_of(settings, key.split("/")[1])
        current = tokenizer == "up to date" and _current(settings, key, origin)
    except (FileNotFoundError, CacheError) as error:
        own = own_sources(settings).get(key.split("/")[1])
        return Plan(key, f"cannot be built: {error}", own.files if own else settings.source_root, 0)
    where = f"{origin.kind}: {origin.dataset}" + (f", {len(origin.files)} files" if origin.files else "")
    if current:
        return Plan(key, "up to date", where, 0)
    if origin.stub:
        return Plan(key, "stub", where, 0)
    documents = _unfinished(cache_root(settings) / key)
    said = f"build (an unfinished one is there: {documents:,} documents done)" if documents else "build"
    need = need_of(settings, key, origin)
    return Plan(key, said, where, need.most, need.least)


def _unfinished(path: Path) -> int:
    """Return how many documents the unfinished build of a cache that came furthest has taken from its source; 0: none.

    Whether a run goes on with it is known only when its source is read.
    """
    found = 0
    for journal in versions_dir(path).glob(f"{BUILDING}-*{JOURNAL_SUFFIX}/{JOURNAL_NAME}"):
        with suppress(CacheError, OSError):
            lines = read_regular(journal, 1 << 28).split(b"\n")
            found = max(found, next((done for line in reversed(lines) if (done := _documents(line)) is not None), 0))
    return found


def _documents(line: bytes) -> int | None:
    """Return the number in a line of a journal; None in one that is cut or damaged, and in the first."""
    if line[:9] != f"{zlib.crc32(line[9:]):08x} ".encode():
        return None
    try:
        documents = parse_object(line[9:]).get("documents")
    except ValueError:
        return None
    return documents if isinstance(documents, int) else None


def _current(settings: Settings, key: str, origin: Origin) -> bool:
    path = cache_root(settings) / key
    recorded: dict[str, Any] | None = recorded_recipe(path).get("source")
    if recorded is None:
        return False
    tokenizer = str((find_meta(cache_root(settings) / TOKENIZER_KEY) or {}).get("tokenizer_sha256"))
    facts = origin.facts(recorded, ask_hub=False)
    return is_current(path, recipe_fingerprint(settings, key, _reads(key), tokenizer, str(facts["fingerprint"])))


__all__ = [
    "RECIPES",
    "TOKENIZER_KEY",
    "Plan",
    "Recipe",
    "built_at",
    "ensure_tokenizer",
    "observe",
    "own_recipe",
    "plan",
    "recipes",
    "settings_fingerprint",
]
