"""Find the plan of units for some settings without reading the text again; read a plan, and say how it differs.

The fingerprint of a source of files covers all bytes. The machine that fixes the plan reads them once. Other machines
compare names, sizes and modification times, and read the bytes again only if these differ.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from niels_gpt.data.exclude import read_exclusion
from niels_gpt.engine.units import LISTINGS_NAME, PartitionPlan, UnitKind, plans_of
from niels_gpt.kinds.kind import MALFORMED, Cache
from niels_gpt.kinds.verify import find_damage
from niels_gpt.recipes.records import TOKENIZER_KEY, Outcome, cache_root, is_committed, is_current, recorded_recipe
from niels_gpt.recipes.request import Inputs, Request
from niels_gpt.recipes.tokenizer import is_id, is_of_hub
from niels_gpt.recipes.training import undamaged, was_trained_by
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import read_regular, resolved
from niels_gpt.storage.versions import PLAN_NAME, RECIPE_NAME, VERSION_DIGITS, versions_dir

_MAX_LISTINGS_BYTES = 1 << 20


def recorded_units(
    inputs: Inputs, listing: str | None, observed: str | None = None
) -> tuple[Request, PartitionPlan | None] | None:
    """Return the request with the newest plan of these settings, or without a plan if the committed version is newer
    and current. Reads no text.

    listing: from `listing_of`. observed: a fingerprint of the text that must match; None: any.
    Returns None if there is neither, or a file differs in name, size or time from the record.
    """
    dataset, _, revision = (observed or "").rpartition("@")
    is_of_source = not dataset if listing else dataset == inputs.source.dataset and revision != "None"
    wanted = observed if is_of_source else None
    for plan, recorded, listings, fingerprint in _records(inputs):
        if listing is not None and listing not in listings:
            continue
        provenance = inputs.source.provenance(recorded, ask_hub=False) if listing is None else recorded
        if wanted not in (None, provenance.get("fingerprint")) or not {"fingerprint", "revision"} <= provenance.keys():
            continue
        request = inputs.at(provenance)
        if request.fingerprint == fingerprint:
            if is_current(request.path, fingerprint):
                return request, None
            if plan is not None:
                return request, plan
    return None


_Record = tuple[PartitionPlan | None, dict[str, Any], set[Any], Any]
"""Plan (None for the committed version), provenance, listings and fingerprint."""


def _records(inputs: Inputs) -> list[_Record]:
    """Return the plans with the same number of units, and the record of the committed version, newest first."""
    path = inputs.path
    found: list[tuple[int, _Record]] = []
    for plan in plans_of(path):
        if plan.total == inputs.settings.partitions:
            record = (plan, plan.content["source"], listings_of(plan), plan.fingerprint)
            found.append((_written(plan.folder / PLAN_NAME), record))
    recipe = recorded_recipe(path)
    if isinstance(source := recipe.get("source"), dict):
        written = _written(versions_dir(path) / RECIPE_NAME)
        found.append((written, (None, source, {recipe.get("listing")}, recipe.get("fingerprint"))))
    return [record for _, record in sorted(found, key=lambda entry: -entry[0])]


def settings_of(
    plan: PartitionPlan, settings: Settings, reads: Sequence[str], tokenizer_content: str | None
) -> Settings | None:
    """Return the settings with the plan's values for all settings that decide bytes. None if this machine lacks a file
    that the plan needs.

    reads: names of the settings that decide bytes; no other is taken from the plan.
    tokenizer_content: content_sha256 of the tokenizer of `settings`; None if unknown.
    """
    asked = plan.content["recipe"]
    recipe = {
        name: asked[name] for name in reads if type(getattr(settings, name)) is type(asked.get(name)) and name in asked
    }
    start = asked.get("document_start")
    recipe["document_start"] = start if isinstance(start, str) else None
    try:
        there = replace(settings, **{**recipe, "partitions": plan.total})
    except ValueError:  # no build has written this plan
        return None
    if plan.content["tokenizer_content_sha256"] != tokenizer_content:
        if undamaged(folder := _staged(plan, settings)) is None:
            return None
        there = replace(there, tokenizer=str(folder))
    excluded = plan.content.get("exclude_sha256")
    if excluded is None:
        return replace(there, exclude=None)
    return there if excluded == excluded_sha256(settings) else None


def differences(plan: PartitionPlan, asked: Request) -> list[str]:
    """Return, in words, how a plan differs from the request."""
    found = []
    if plan.total != asked.settings.partitions:
        found.append(f"partitions: {plan.total} there, {asked.settings.partitions} here")
    recipe = plan.content["recipe"]
    for name in sorted({*recipe, *asked.recipe}):
        if recipe.get(name) != asked.recipe.get(name):
            found.append(f"{name}: {recipe.get(name)!r} there, {asked.recipe.get(name)!r} here")
    if asked.tokenizer is not None and plan.content["tokenizer_sha256"] != asked.tokenizer.sha256:
        found.append("the tokenizer")
    elif plan.content["tokenizer_content_sha256"] != asked.tokenizer_content:
        found.append("the tokenizer's files")
    if plan.content["source"].get("fingerprint") != asked.provenance.get("fingerprint"):
        found.append("the text" if asked.source.found else "the hub's revision")
    return found or ["the licence, the attribution or what --exclude leaves out"]


def tokenizer_of(plans: list[PartitionPlan], settings: Settings) -> Outcome | None:
    """Return the tokenizer of the newest plan with the same number of units. None unless it was downloaded or trained
    by these settings, and is still there.

    A plan keeps its tokenizer like the revision of its text: the hub is not asked for a newer one.
    """
    for plan in plans:
        folder = _staged(plan, settings)
        if plan.total != settings.partitions or (meta := undamaged(folder)) is None:
            continue
        if settings.tokenizer is None:
            is_asked = was_trained_by(settings, meta)
        else:
            is_asked = is_id(settings.tokenizer) and is_of_hub(settings, meta)
        if is_asked and meta["content_sha256"] == plan.content["tokenizer_content_sha256"]:
            installed = cache_root(settings) / TOKENIZER_KEY
            path = installed if resolved(installed) == resolved(folder) else folder
            return Outcome(TOKENIZER_KEY, path, meta, True, 0.0, None, str(meta["tokenizer_sha256"]))
    return None


def _staged(plan: PartitionPlan, settings: Settings) -> Path:
    """Return the folder of the version that holds a plan's tokenizer; it may be gone."""
    versions = versions_dir(cache_root(settings) / TOKENIZER_KEY)
    return versions / str(plan.content["tokenizer_content_sha256"])[:VERSION_DIGITS]


def listings_of(plan: PartitionPlan) -> set[str | None]:
    """Return all recorded listings of the text of a plan."""
    more = b""
    with suppress(OSError, CacheError):
        more = read_regular(plan.folder / LISTINGS_NAME, _MAX_LISTINGS_BYTES)
    return {plan.content.get("listing"), *more.decode("ascii", "replace").split("\n")}


def excluded_sha256(settings: Settings) -> str | None:
    """Return the sha256 of the list of --exclude; None without one."""
    return None if settings.exclude is None else str(read_exclusion(settings.exclude).facts["sha256"])


def partition_at(path: Path, name: str, begin: int, end: int) -> tuple[int, int] | None:
    """Return number and total of the first partition with bytes in this part of a file. None if nothing tells, or no
    partition can mend the cache.

    path: the public folder. name: of the file in it. begin, end: first byte, and byte after the last one.
    """
    some, total = _units_at(path, name, begin, end)
    return (some[0], total) if some else None


def damaged_units(path: Path) -> list[int]:
    """Return the units to build again for the damaged files of a sealed cache. Reads every file.

    Returns [] if nothing is damaged, or no unit mends some of it: then the whole cache is built again.
    """
    found = set[int]()
    for damage in find_damage(path, deep=True):
        some, _ = _units_at(path, damage.file, damage.offset, damage.end)
        if not some:
            return []
        found |= {*some}
    return sorted(found)


def _units_at(path: Path, name: str, begin: int, end: int) -> tuple[list[int], int]:
    """Return the units with bytes in this part of a file of a sealed cache, and the total; [] as in `partition_at`."""
    try:
        cache = Cache.open(path)
        units_at = cache.kind.units.units_at if isinstance(cache.kind.units, UnitKind) else None
        is_sealed = "partitions" in cache.meta and is_committed(path, str(recorded_recipe(path).get("fingerprint")))
        if units_at is None or not is_sealed:
            return [], 0
        return units_at(cache.folder, cache.meta, name, begin, end), int(cache.meta["partitions"]["total"])
    except (OSError, CacheError, *MALFORMED):
        return [], 0


def is_of_seal(plan: PartitionPlan) -> bool:
    """Return whether a plan is older than the record of the committed cache, so that a killed seal has left it.

    A newer plan mends this cache.
    """
    return _written(plan.folder / PLAN_NAME) <= _written(versions_dir(plan.path) / RECIPE_NAME)


def _written(path: Path) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0
