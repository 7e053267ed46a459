"""Which plan of partitions is that of the settings, without reading the text again; and how another plan differs.

A source of files has the fingerprint of all of their bytes. The machine that fixes the plan reads them once; the others
compare names, sizes and times of modification, and read the bytes again only where these differ.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.builders.partitions.plan import LISTINGS_NAME, Plan, plans_of
from niels_gpt.data.exclude import read_exclusion
from niels_gpt.recipes.resolve import ResolvedSource
from niels_gpt.recipes.run_recipe import TOKENIZER_KEY, AskedCache, Outcome, cache_root, is_current, recorded_recipe
from niels_gpt.recipes.tokenizer import is_id, is_of_hub
from niels_gpt.recipes.training import undamaged, was_trained_by
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import canonical_json, write_bytes
from niels_gpt.storage.meta_json import read_regular, resolved
from niels_gpt.storage.versions import PLAN_NAME, RECIPE_NAME, VERSION_DIGITS, versions_dir
from niels_gpt.tokenizers.protocol import FullTokenizer

_MAX_LISTINGS_BYTES = 1 << 20


class Planned(NamedTuple):
    """A partitioned cache as the settings ask for it."""

    asked: AskedCache
    plan: Plan | None
    """None: the committed cache is current."""


def planned(
    settings: Settings, source: ResolvedSource, tokenizer: FullTokenizer, listing: str | None, observed: str | None
) -> Planned | None:
    """Return the cache by its newest plan of these settings, or by the committed version, if that is newer and current.

    listing: of `listing_of`. observed: a fingerprint of the text that alone counts; None: any.
    None: there is neither, or files differ in name, size or time from those that were recorded.
    """
    key = source.spec.key
    path = cache_root(settings) / key
    dataset, _, revision = (observed or "").rpartition("@")
    is_of_source = not dataset if listing else dataset == source.dataset and revision != "None"
    wanted = observed if is_of_source else None
    for record in _records(settings, key):
        if listing is not None and listing not in record.listings:
            continue
        provenance = source.provenance(record.source, ask_hub=False) if listing is None else record.source
        if wanted not in (None, provenance.get("fingerprint")):
            continue
        asked = AskedCache.of(settings, key, source.spec.settings, source, tokenizer, provenance)
        if asked.fingerprint != record.fingerprint:
            continue
        if (current := is_current(path, asked.fingerprint)) or record.plan is not None:
            return Planned(asked, None if current else record.plan)
    return None


class _Record(NamedTuple):
    """What was written of a cache of as many partitions: its plan, or the recipe of the committed version."""

    written: int
    """When, in nanoseconds."""
    plan: Plan | None
    source: dict[str, Any]
    """Its provenance."""
    listings: set[Any]
    fingerprint: Any


def _records(settings: Settings, key: str) -> list[_Record]:
    """Return what was written of a cache, newest first."""
    path = cache_root(settings) / key
    found = []
    for plan in plans_of(path):
        if plan.total == settings.partitions:
            content, written = plan.content, _written(plan.folder / PLAN_NAME)
            found.append(_Record(written, plan, content["source"], _listings(plan), plan.fingerprint))
    recipe = recorded_recipe(path)
    if isinstance(source := recipe.get("source"), dict):
        written = _written(versions_dir(path) / RECIPE_NAME)
        found.append(_Record(written, None, source, {recipe.get("listing")}, recipe.get("fingerprint")))
    return sorted(found, key=lambda record: -record.written)


def _listings(plan: Plan) -> set[str | None]:
    """Return the listings under which the text of a plan was seen."""
    more = b""
    with suppress(OSError, CacheError):
        more = read_regular(plan.folder / LISTINGS_NAME, _MAX_LISTINGS_BYTES)
    return {plan.content.get("listing"), *more.decode("ascii", "replace").split("\n")}


def add_listing(found: Planned, listing: str) -> None:
    """Record another listing of the same text, so that later commands need not read it; the cache's lock is held."""
    path = found.asked.path
    if found.plan is None:
        recipe = {**recorded_recipe(path), "listing": listing}
        write_bytes(versions_dir(path) / RECIPE_NAME, canonical_json(recipe))
    elif listing not in _listings(found.plan):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError), open(os.open(found.plan.folder / LISTINGS_NAME, flags, 0o666), "a") as file:
            file.write(f"{listing}\n")


def make_newest(found: Planned) -> None:
    """Make what was chosen by a revision or an observation that of the next commands, which have neither."""
    plan = found.plan
    with suppress(OSError):
        os.utime(plan.folder / PLAN_NAME if plan else versions_dir(found.asked.path) / RECIPE_NAME)


def _written(path: os.PathLike[str]) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0


def differences(plan: Plan, asked: AskedCache, tokenizer_content: str) -> list[str]:
    """Return in what a plan differs from the cache that is asked for, in words.

    tokenizer_content: content_sha256 of the tokenizer that is asked for.
    """
    found = []
    if plan.total != asked.settings.partitions:
        found.append(f"partitions: {plan.total} there, {asked.settings.partitions} here")
    recipe = plan.content["recipe"]
    for name in sorted({*recipe, *asked.recipe}):
        if recipe.get(name) != asked.recipe.get(name):
            found.append(f"{name}: {recipe.get(name)!r} there, {asked.recipe.get(name)!r} here")
    if asked.tokenizer is not None and plan.content["tokenizer_sha256"] != asked.tokenizer.sha256:
        found.append("the tokenizer")
    elif plan.content["tokenizer_content_sha256"] != tokenizer_content:
        found.append("the tokenizer's files")
    if plan.content["source"].get("fingerprint") != asked.provenance.get("fingerprint"):
        found.append("the text" if asked.source.found else "the hub's revision")
    return found or ["the licence, the attribution or what --exclude leaves out"]


def settings_of(plan: Plan, settings: Settings, tokenizer_content: str | None) -> Settings | None:
    """Return settings with those of a plan, as far as it has them; None where a file that it needs is not known here.

    tokenizer_content: content_sha256 of the tokenizer of `settings`; None: unknown.
    """
    known = {field.name: type(getattr(settings, field.name)) for field in fields(Settings)}
    recipe = {name: value for name, value in plan.content["recipe"].items() if known.get(name) is type(value)}
    start = plan.content["recipe"].get("document_start")
    recipe["document_start"] = start if isinstance(start, str) else None
    there = replace(settings, **recipe, partitions=plan.total)
    if plan.content["tokenizer_content_sha256"] != tokenizer_content:
        if undamaged(folder := _staged(plan, settings)) is None:
            return None
        there = replace(there, tokenizer=str(folder))
    excluded = plan.content.get("exclude_sha256")
    if excluded is None:
        return replace(there, exclude=None)
    return there if excluded == excluded_sha256(settings) else None


def excluded_sha256(settings: Settings) -> str | None:
    """Return the sha256 of what --exclude leaves out; None without it."""
    return None if settings.exclude is None else str(read_exclusion(settings.exclude).facts["sha256"])


def _staged(plan: Plan, settings: Settings) -> Path:
    """Return the folder of the version that a plan's tokenizer is; it may be gone."""
    versions = versions_dir(cache_root(settings) / TOKENIZER_KEY)
    return versions / str(plan.content["tokenizer_content_sha256"])[:VERSION_DIGITS]


def tokenizer_of_plan(settings: Settings, key: str) -> Outcome | None:
    """Return the tokenizer of the newest plan of as many partitions, if it was downloaded or trained as the settings
    say and is still there.

    So a plan keeps its tokenizer, as it keeps the revision of its text: the hub is not asked for a newer one.
    """
    for plan in plans_of(cache_root(settings) / key):
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
