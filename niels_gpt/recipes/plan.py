"""Every recipe by its key, what a run would do, and the fingerprint of a source as it is now."""

from __future__ import annotations

import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.data.sources import SOURCES
from niels_gpt.data.trees import TREES
from niels_gpt.display.numbers import number_of
from niels_gpt.engine.journal import identity_of
from niels_gpt.engine.meta import OF_ANOTHER_VERSION, is_of_this_version
from niels_gpt.engine.units import states_of
from niels_gpt.kinds.homes import home_recipes
from niels_gpt.kinds.kind import units_of_key
from niels_gpt.recipes.disk import needed_bytes
from niels_gpt.recipes.documents import budget_of, is_partitioned
from niels_gpt.recipes.eagle3.of_settings import has_small_target
from niels_gpt.recipes.home_recipes import HomeRecipes, LatePlan, Recipe
from niels_gpt.recipes.resolve import ResolvedSource, asked_revisions, listing_of, resolve_source
from niels_gpt.recipes.run_recipe import (
    TOKENIZER_KEY,
    cache_root,
    fingerprint_by_list,
    is_current,
    recipe_fingerprint,
    recorded_recipe,
)
from niels_gpt.recipes.sources import named
from niels_gpt.recipes.templates import asked_template, check_early
from niels_gpt.recipes.token_caches import build_token_cache
from niels_gpt.recipes.tokenizer import (
    NoSentinels,
    check_tokenizer,
    copied_bytes,
    expected_vocab_size,
    tokenizer_state,
    usable_tokenizer,
)
from niels_gpt.recipes.training import TRAINING_SETTINGS
from niels_gpt.recipes.unit_plans import recorded_units
from niels_gpt.recipes.user_sources import user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import parse_object, read_regular
from niels_gpt.storage.versions import BUILDING, JOURNAL_NAME, JOURNAL_SUFFIX, RECIPE_NAME, versions_dir
from niels_gpt.tokenizers.protocol import FullTokenizer

_OF_HOMES: list[HomeRecipes] = home_recipes()
RECIPES: dict[str, Recipe] = {
    **{spec.key: partial(build_token_cache, name=spec.name) for spec in SOURCES.values()},
    **{key: recipe for home in _OF_HOMES if home.late is None for key, recipe in home.recipes.items()},
}
"""The built-in caches by key, in the order in which build-all builds them, after the tokenizer: `ensure_tokenizer`."""
_LATE: dict[str, LatePlan] = {key: home.late for home in _OF_HOMES if home.late for key in home.recipes}
OF_EAGLE3: dict[str, Recipe] = {key: home.recipes[key] for home in _OF_HOMES if home.late for key in home.recipes}
"""What is built last, where `recipes.eagle3.of_settings.check_configured` lets it."""
_MAX_JOURNAL_BYTES = 1 << 28


@dataclass(frozen=True)
class Plan:
    """What a run would do for one cache."""

    key: str
    """tokenizer, pretrain/NAME, sft/NAME, trees/NAME, rollouts/NAME, eagle3/draft_vocab or eagle3/targets."""
    action: str
    """up to date, build (and how far an unfinished one is), stub, copy, download, train, or why it is left out by a
    build of all, or cannot be built."""
    source: str
    """Where the text comes from."""
    disk_bytes: int
    """Disk that the new version needs while it is built, at least: a build that has less room is refused. 0 where
    nothing is built, for a tokenizer that is not there yet, and for eagle3, whose need is checked once its chats are
    tokenized."""
    note: str = ""
    """What to know of it before it is built; "" for nothing."""


def recipes(settings: Settings) -> dict[str, Recipe]:
    """Return RECIPES and, after them, those of the user-defined sources. Raises: as `user_sources`."""
    of_families = {family: recipe for home in _OF_HOMES for family, recipe in home.of_families.items()}
    found = dict(RECIPES)
    for user in user_sources(settings).values():
        key = f"{user.family}/{user.name}"
        if user.family in of_families:
            found[key] = partial(of_families[user.family], key=key)
        elif not needs_no_tokenizer(key):  # else the package of rollouts is not installed
            found[key] = partial(build_token_cache, name=user.name)
    return found


def every_recipe(settings: Settings) -> dict[str, Recipe]:
    """Return the recipe of every cache but the tokenizer, in build order, also of one that a build of all leaves out.

    Each is called with settings, refresh, observed and progress. Raises: as `user_sources`.
    """
    return recipes(settings) | OF_EAGLE3


def every_key(settings: Settings) -> list[str]:
    """Return the keys of all caches of the settings, in build order: what a build of all, and Dagster, materialize."""
    return [TOKENIZER_KEY, *every_recipe(settings)]


def needs_tokenizer(settings: Settings, key: str) -> bool:
    """Whether a cache of these settings is built with the tokenizer: of eagle3 those of the small target."""
    return has_small_target(settings) if key in OF_EAGLE3 else not needs_no_tokenizer(key)


def needs_no_tokenizer(key: str) -> bool:
    """Whether a cache has no tokenizer: ids of recorded rollouts are stored as they are."""
    return key.startswith("rollouts/")


def plan(settings: Settings, keys: list[str]) -> list[Plan]:
    """Return what a run over `keys` would do. Reads files to fingerprint them; never asks the hub; writes nothing."""
    if keys and not any(needs_tokenizer(settings, key) for key in keys):
        return [_plan_of(settings, key, "up to date", None) for key in keys]
    state = tokenizer_state(settings)
    opened = None if state.startswith("cannot") else usable_tokenizer(settings)
    model = settings.tokenizer or ("sources" if state == "train" else "")
    tokenizer = Plan(TOKENIZER_KEY, state, model, copied_bytes(settings) if state == "copy" else 0)
    return [tokenizer, *(_plan_of(settings, key, state, opened) for key in keys)]


def settings_fingerprint(settings: Settings, key: str, tokenizer: FullTokenizer | None = None) -> str:
    """Return twelve hex digits of the settings that decide the bytes of `key`, and of the builder's version.

    The parts of `recipe_fingerprint` that are known without reading a source, --exclude left out; tokenizer: None: not
    known either. A chat template that cannot be read counts as none: the build reports it.
    """
    if key in _LATE:
        return _LATE[key].settings_fingerprint(settings, key)
    name = key.rpartition("/")[2]
    user = user_sources(settings).get(name)
    if user:
        source = repr((user.files, user.field, user.licence, user.attribution))
    else:
        source = asked_revisions(settings).get(name, "")
    try:
        return recipe_fingerprint(settings, key, _reads(settings, key), tokenizer, source)[:12]
    except (OSError, ValueError):
        unread = replace(settings, chat_template=None, loss_on=Settings.loss_on)
        return recipe_fingerprint(unread, key, _reads(settings, key), None, source)[:12]


def _reads(settings: Settings, key: str) -> tuple[str, ...]:
    """Return the settings that decide the bytes of `key`."""
    if key == TOKENIZER_KEY:
        return ("tokenizer", "tokenizer_kind", *TRAINING_SETTINGS)
    if key in TREES:
        return TREES[key].settings
    name = key.rpartition("/")[2]
    return SOURCES[name].settings if name in SOURCES else user_sources(settings)[name].spec.settings


def built_at(settings: Settings, key: str) -> float:
    """Return when the committed cache `key` was built from its source, in seconds since the epoch; 0.0 without one."""
    record = versions_dir(cache_root(settings) / key) / RECIPE_NAME
    return record.stat().st_mtime if record.is_file() else 0.0


def observe(settings: Settings, key: str) -> tuple[dict[str, Any], str | None]:
    """Return the provenance of the source of the cache `key` as it is now, and a warning or None.

    Reads every file of the source, or asks the hub for its newest revision. Where the hub cannot be reached, the
    provenance is that of the committed cache, and the warning says so.
    Raises: FileNotFoundError; ConnectionError without a hub and without a committed cache.
    """
    source = resolve_source(settings, key)
    try:
        return source.provenance(None), None
    except ConnectionError as error:
        recorded = recorded_recipe(cache_root(settings) / key).get("source") or {}
        provenance = source.provenance(recorded, ask_hub=False)
        if provenance["revision"] is None:
            raise
        return provenance, f"{key}: the revision that the cache was built from stands for the newest one: {error}"


def _plan_of(settings: Settings, key: str, state: str, tokenizer: FullTokenizer | None) -> Plan:
    """state, tokenizer: of the tokenizer; None for one that is not there yet."""
    if key in _LATE:
        return Plan(key, *_LATE[key].action(settings, key, tokenizer), 0)
    name = key.split("/")[1]
    try:
        source = resolve_source(settings, key)
        if source.spec.family == "sft":
            check_early(settings, trains=tokenizer is None and state == "train")
        if needs_no_tokenizer(key):
            tokenizer = None
        elif tokenizer is not None:
            check_tokenizer(settings, key, source, tokenizer, Path(tokenizer.model_path))
        is_known = tokenizer is not None or needs_no_tokenizer(key)
        current = is_known and _is_current(settings, key, source, tokenizer)
    except NoSentinels as error:
        return Plan(key, f"left out: {error.found}", source.dataset, 0)
    except (FileNotFoundError, CacheError) as error:
        user = user_sources(settings).get(name)
        return Plan(key, f"cannot be built: {error}", user.files if user else settings.source_root, 0)
    where = f"{source.kind}: {source.dataset}" + (f", {number_of(len(source.files), 'file')}" if source.files else "")
    where = ", ".join(filter(None, (where, asked_template(settings, source.spec.family))))
    if current:
        return Plan(key, "up to date", where, 0)
    if source.stub:
        return Plan(key, "stub", where, 0)
    note = ""
    if is_partitioned(settings, source):
        if budget_of(settings, source) is not None:
            note = f"each of {settings.partitions:,} partitions may cut a document a split, at its part of the budgets"
        action = f"build in {number_of(settings.partitions, 'partition')}{_partitions(settings, source, tokenizer)}"
    else:
        action = f"build{_unfinished(cache_root(settings) / key)}"
    need = needed_bytes(settings, source, expected_vocab_size(settings, tokenizer))
    return Plan(key, action, where, need, note)


def _partitions(settings: Settings, source: ResolvedSource, tokenizer: FullTokenizer | None) -> str:
    """Return how many partitions of the plan of these settings are in which state; "" without a plan."""
    is_known = tokenizer is not None or needs_no_tokenizer(source.spec.key)
    found = recorded_units(settings, source, tokenizer, listing_of(source)) if is_known else None
    kind = units_of_key(source.spec.key)
    if not found or found[1] is None or kind is None:
        return ""
    states = Counter(unit.state for unit in states_of(found[1], kind) if unit.number >= 0)
    order = ("finished", "started", "missing", *sorted(states))
    return f": {', '.join(f'{states[name]:,} {name}' for name in dict.fromkeys(order) if states[name])}"


def _unfinished(path: Path) -> str:
    """Return what there is of unfinished builds of a cache, and how many documents the most advanced one has read.

    Whether a run resumes it is known only when its source is read.
    """
    most, others = 0, 0
    for journal in versions_dir(path).glob(f"{BUILDING}-*{JOURNAL_SUFFIX}/{JOURNAL_NAME}"):
        if not is_of_this_version(identity_of(journal.parent)):
            others += 1
            continue
        with suppress(CacheError, OSError):
            lines = read_regular(journal, _MAX_JOURNAL_BYTES).split(b"\n")
            most = max(most, next((done for line in reversed(lines) if (done := _documents(line)) is not None), 0))
    if most:
        return f" (an unfinished one is there: {most:,} documents done)"
    return f" (an unfinished one is there {OF_ANOTHER_VERSION})" if others else ""


def _documents(line: bytes) -> int | None:
    """Return the number of documents in a line of a journal; None in a damaged line, and in the first."""
    if line[:9] != f"{zlib.crc32(line[9:]):08x} ".encode():
        return None
    try:
        documents = parse_object(line[9:]).get("documents")
    except ValueError:
        return None
    return documents if isinstance(documents, int) else None


def _is_current(settings: Settings, key: str, source: ResolvedSource, tokenizer: FullTokenizer | None) -> bool:
    if is_partitioned(settings, source):
        found = recorded_units(settings, source, tokenizer, listing_of(source))
        if found is not None:  # the text need not be read
            return found[1] is None
    path = cache_root(settings) / key
    recorded: dict[str, Any] | None = recorded_recipe(path).get("source")
    if recorded is None:
        return False
    known = str(source.provenance(recorded, ask_hub=False)["fingerprint"])
    fingerprint_of = partial(recipe_fingerprint, settings, key, source.spec.settings, tokenizer, known)
    is_read = source.kind != "hub" and not is_partitioned(settings, source)
    read = partial(named, settings, source, None) if is_read else None
    return is_current(path, fingerprint_by_list(settings, path, fingerprint_of, read))
