"""List every recipe by its key, say what a run would do, and find the current fingerprint of a source."""

from __future__ import annotations

import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.data.sources import SOURCES, TREES
from niels_gpt.display.numbers import number_of
from niels_gpt.engine.journal import identity_of
from niels_gpt.engine.meta import OF_ANOTHER_VERSION, is_of_this_version
from niels_gpt.engine.units import PartitionPlan, states_of
from niels_gpt.kinds.homes import home_recipes
from niels_gpt.kinds.kind import units_of_key
from niels_gpt.recipes.disk import needed_bytes
from niels_gpt.recipes.family import family_named
from niels_gpt.recipes.home_recipes import HomeRecipes, Recipe
from niels_gpt.recipes.records import TOKENIZER_KEY, cache_root, is_current, recorded_recipe
from niels_gpt.recipes.request import Inputs
from niels_gpt.recipes.resolve import listing_of, resolve_source
from niels_gpt.recipes.tokenizer import (
    NoSentinels,
    check_tokenizer,
    copied_bytes,
    expected_vocab_size,
    tokenizer_state,
    usable_tokenizer,
)
from niels_gpt.recipes.unit_plans import recorded_units
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.recipes.user_sources import user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import parse_object, read_regular
from niels_gpt.storage.versions import BUILDING, JOURNAL_NAME, JOURNAL_SUFFIX, RECIPE_NAME, versions_dir
from niels_gpt.tokenizers.protocol import FullTokenizer

RECIPES: dict[str, Recipe] = {
    spec.key: partial(build_token_cache, name=spec.key)
    for spec in (*SOURCES.values(), *TREES.values())
    if family_named(spec.family) is not None
}
"""Built-in caches by key, in the order in which build-all builds them, after the tokenizer: `ensure_tokenizer`."""
HOME_OF: dict[str, HomeRecipes] = {key: home for home in home_recipes() for key in home.recipes}
"""Key -> home that adds its recipe. These are built last, unless the home says why they are left out."""
_MAX_JOURNAL_BYTES = 1 << 28


@dataclass(frozen=True)
class Plan:
    """What a run would do for one cache."""

    key: str
    """tokenizer, pretrain/NAME, sft/NAME, trees/NAME, rollouts/NAME, eagle3/draft_vocab or eagle3/targets."""
    action: str
    """up to date, build (and how far an unfinished one is), stub, copy, download, train, or why a build of all leaves
    it out, or why it cannot be built."""
    source: str
    """Origin of the text."""
    disk_bytes: int
    """Disk that the new version needs at least while it is built: a build with less room is refused. 0 if nothing is
    built, for a tokenizer that is not there yet, and for eagle3, whose need is checked once its chats are tokenized."""
    note: str = ""
    """Warning before the build; "" for none."""


def recipes(settings: Settings) -> dict[str, Recipe]:
    """Return RECIPES, then the recipes of the user-defined sources.

    Raises: ValueError or UsageError for a malformed source; FileNotFoundError for a missing `sources_file`.
    """
    found = dict(RECIPES)
    for user in user_sources(settings).values():
        if family_named(user.family) is not None:  # else the package of its caches is not installed
            found[user.spec.key] = partial(build_token_cache, name=user.spec.key)
    return found


def every_recipe(settings: Settings) -> dict[str, Recipe]:
    """Return the recipe of every cache but the tokenizer, in build order, even if a build of all leaves it out.

    Each takes settings, refresh, observed and progress.
    Raises: ValueError or UsageError for a malformed source; FileNotFoundError for a missing `sources_file`.
    """
    return recipes(settings) | {key: home.recipes[key] for key, home in HOME_OF.items()}


def every_key(settings: Settings) -> list[str]:
    """Return the keys of all caches of the settings, in the order of a build of all caches and of Dagster."""
    return [TOKENIZER_KEY, *every_recipe(settings)]


def needs_tokenizer(settings: Settings, key: str) -> bool:
    """Return whether a cache of these settings is built with the tokenizer."""
    return HOME_OF[key].takes_tokenizer(settings) if key in HOME_OF else not needs_no_tokenizer(key)


def needs_no_tokenizer(key: str) -> bool:
    """Return whether a cache is built without a tokenizer: ids of recorded rollouts are stored as they are."""
    family = family_named(key)
    return family is not None and not family.takes_tokenizer


def plan(settings: Settings, keys: list[str]) -> list[Plan]:
    """Return what a run over `keys` would do. Reads files to fingerprint them; never asks the hub; writes nothing."""
    if keys and not any(needs_tokenizer(settings, key) for key in keys):
        return [_plan_of(settings, key, None) for key in keys]
    state = tokenizer_state(settings)
    opened = None if state.startswith("cannot") else usable_tokenizer(settings)
    model = settings.tokenizer or ("sources" if state == "train" else "")
    tokenizer = Plan(TOKENIZER_KEY, state, model, copied_bytes(settings) if state == "copy" else 0)
    return [tokenizer, *(_plan_of(settings, key, opened) for key in keys)]


def built_at(settings: Settings, key: str) -> float:
    """Return when the committed cache `key` was built from its source, in seconds since the epoch; 0.0 without one."""
    record = versions_dir(cache_root(settings) / key) / RECIPE_NAME
    return record.stat().st_mtime if record.is_file() else 0.0


def observe(settings: Settings, key: str) -> tuple[dict[str, Any], str | None]:
    """Return the current provenance of the source of the cache `key`, and a warning or None.

    Reads every file of the source, or asks the hub for its newest revision. If the hub cannot be reached, returns the
    provenance of the committed cache, with a warning.
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


def _plan_of(settings: Settings, key: str, tokenizer: FullTokenizer | None) -> Plan:
    """tokenizer: None if there is none yet."""
    if key in HOME_OF:
        return Plan(key, *HOME_OF[key].action(settings, key, tokenizer), 0)
    try:
        source = resolve_source(settings, key)
        source.family.check_early(settings)
        takes_tokenizer = source.family.takes_tokenizer
        if takes_tokenizer and tokenizer is not None:
            check_tokenizer(settings, source, tokenizer, Path(tokenizer.model_path))
        if not source.is_partitioned(settings):
            settings = replace(settings, partitions=1)
        inputs = Inputs(settings, source, tokenizer if takes_tokenizer else None)
        is_known = tokenizer is not None or not takes_tokenizer
        current, units = _found(inputs) if is_known else (False, None)
    except NoSentinels as error:
        return Plan(key, f"left out: {error.found}", source.dataset, 0)
    except (FileNotFoundError, CacheError) as error:
        user = user_sources(settings).get(key.split("/")[1])
        return Plan(key, f"cannot be built: {error}", user.files if user else settings.source_root, 0)
    where = f"{source.kind}: {source.dataset}" + (f", {number_of(len(source.files), 'file')}" if source.files else "")
    where = ", ".join(filter(None, (where, source.family.asks(settings))))
    if current:
        return Plan(key, "up to date", where, 0)
    if source.stub:
        return Plan(key, "stub", where, 0)
    note = ""
    if source.is_partitioned(settings):
        if source.budget(settings) is not None:
            note = f"each of {settings.partitions:,} partitions may cut a document a split, at its part of the budgets"
        action = f"build in {number_of(settings.partitions, 'partition')}{_states(key, units) if units else ''}"
    else:
        action = f"build{_unfinished(inputs.path)}"
    need = needed_bytes(settings, source, expected_vocab_size(settings, inputs.tokenizer))
    return Plan(key, action, where, need, note)


def _found(inputs: Inputs) -> tuple[bool, PartitionPlan | None]:
    """Return whether the committed cache is current, and the plan of units for a build; None without one."""
    source = inputs.source
    if source.is_partitioned(inputs.settings):
        found = recorded_units(inputs, listing_of(source))
        if found is not None:  # the text need not be read
            return found[1] is None, found[1]
    recorded: dict[str, Any] | None = recorded_recipe(inputs.path).get("source")
    if recorded is None:
        return False, None
    request = inputs.at(source.provenance(recorded, ask_hub=False), reads=source.kind != "hub")
    return is_current(request.path, request.fingerprint), None


def _states(key: str, plan: PartitionPlan) -> str:
    """Return how many units of a plan are in which state."""
    units = units_of_key(key)
    assert units is not None
    states = Counter(unit.state for unit in states_of(plan, units) if unit.number >= 0)
    order = ("finished", "started", "missing", *sorted(states))
    return f": {', '.join(f'{states[name]:,} {name}' for name in dict.fromkeys(order) if states[name])}"


def _unfinished(path: Path) -> str:
    """Return a text about unfinished builds of a cache, with the documents that the most advanced one has read.

    Only a read of the source tells whether a run resumes it.
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
    """Return the number of documents in a line of a journal; None for a damaged line, and for the first."""
    if line[:9] != f"{zlib.crc32(line[9:]):08x} ".encode():
        return None
    try:
        documents = parse_object(line[9:]).get("documents")
    except ValueError:
        return None
    return documents if isinstance(documents, int) else None
