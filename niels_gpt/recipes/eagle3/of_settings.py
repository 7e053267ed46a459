"""Settings -> what the assets of EAGLE-3 are made of: target, options, the revision of the chats.

Decides the sample's target and sizes, and which revision of chats and target an asset keeps until a newer one is
observed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from niels_gpt.data.sources import SOURCES
from niels_gpt.engine.units import plans_of
from niels_gpt.hub.models import is_local
from niels_gpt.recipes.eagle3.options import KEYS, Options, flag_name
from niels_gpt.recipes.eagle3.prepare import Resolved, resolve
from niels_gpt.recipes.records import cache_root
from niels_gpt.recipes.resolve import resolve_whole
from niels_gpt.recipes.tokenizer import ensure_tokenizer, no_sentinels
from niels_gpt.recipes.user_sources import user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage import versions
from niels_gpt.storage.errors import CacheError, LeftOut
from niels_gpt.storage.fileio import canonical_json

VOCAB_KEY, KEY = KEYS
SMALL_TARGET = "small_target"
"""The manifest's name of the small random Llama that is the sample's target."""
_OF_DEFAULT = ("eagle3_document_start", "eagle3_format", "eagle3_aux_dtype", "eagle3_aux_layers")
"""Settings that fingerprints leave out while they have their defaults: older caches have been made without them."""
_SIZES = {"draft_vocab_size": 32_000}  # as the published drafts have
_SMALL_SIZES = {"seq_length": 256, "draft_vocab_size": 512, "threads": 1}
"""For the sample's target: its longest chat has 129 tokens, and one thread is fastest and independent of the cores."""
_TARGETS_DIR = ".small_target"
WORK_NAME = "cache"
"""The folder of an unfinished version of eagle3/targets, beside its plan.json of units."""
_DIGITS = 12


class NoTarget(LeftOut, ValueError):
    """No target is named, and the sample alone has one by default."""

    code, warning = "E705", "W513"
    found = "no target: name one with --eagle3-target"


class NoExtra(LeftOut, ImportError):
    """What runs a target is not installed: the extra eagle3."""

    code, warning = "E901", "W513"
    found = "pip install 'niels-gpt[eagle3]'"


def why_left_out(settings: Settings) -> NoTarget | NoExtra | None:
    """Return why nothing of eagle3 can be built, as `check_configured` raises it; None where it can."""
    try:
        check_configured(settings)
    except (NoTarget, NoExtra) as error:
        return error
    return None


def has_small_target(settings: Settings) -> bool:
    """Whether the small random Llama is the target, which has the tokenizer of the caches."""
    return settings.eagle3_target is None and settings.source_root == "sample"


def check_configured(settings: Settings) -> None:
    """Raise NoTarget or NoExtra where nothing of eagle3 can be built; nothing is imported or read."""
    if settings.eagle3_target is None and not has_small_target(settings):
        raise NoTarget(
            "no target is named: pass --eagle3-target FOLDER_OR_ID (the setting eagle3_target, NIELS_GPT_EAGLE3_TARGET)"
        )
    if importlib.util.find_spec("transformers") is None:
        raise NoExtra("running a target needs transformers. Install the extra: pip install 'niels-gpt[eagle3]'")


def fingerprint_of(settings: Settings, names: Iterable[str]) -> str:
    """Return twelve hex digits of settings, and of those that decide what is read of the chats' source."""
    spec = SOURCES.get(settings.eagle3_source)
    names = [*names, *(spec.own_settings if spec and spec.family == "sft" else ())]
    defaults = {name: getattr(Settings, name) for name in _OF_DEFAULT}
    chosen = {name: getattr(settings, name) for name in names}
    return sha256({name: value for name, value in chosen.items() if defaults.get(name, ...) != value})[:_DIGITS]


def sha256(value: Any) -> str:
    """Return the sha256 of a value as canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def raw_source(settings: Settings) -> str | None:
    """Return the name of the source that is observed as raw/NAME; None where the chats are files."""
    names = {*(spec.name for spec in SOURCES.values() if spec.family == "sft"), *user_sources(settings)}
    return settings.eagle3_source if settings.eagle3_source in names else None


def target_name(settings: Settings) -> str:
    """Return the folder or id of the target; for the sample, write a small Llama with the tokenizer's vocabulary.

    Raises: as `check_configured`; for the sample NoSentinels for a tokenizer without them.
    """
    check_configured(settings)
    if settings.eagle3_target is not None:
        return settings.eagle3_target
    from niels_gpt.eagle3.target import write_small_target
    from niels_gpt.tokenizer import load_tokenizer

    path = ensure_tokenizer(settings).path
    tokenizer = load_tokenizer(path, follow_links=False)
    if not tokenizer.special_token_ids():
        raise no_sentinels(settings, [KEY], path)
    return str(write_small_target(small_target_folder(settings, tokenizer.sha256), tokenizer))


def small_target_folder(settings: Settings, tokenizer_sha256: str) -> Path:
    """Return where the small Llama of a tokenizer is written."""
    return cache_root(settings) / "eagle3" / _TARGETS_DIR / tokenizer_sha256[:_DIGITS]


def resolved(
    settings: Settings,
    *,
    observed: str | None,
    refresh: bool = False,
    hash_weights: bool = True,
    target: Path | None = None,
    plan_from: Path | None = None,
) -> Resolved:
    """Return what the settings stand for; a hub source has the observed revision, or that of eagle3/targets (D12).

    observed: fingerprint of the source, newer than the asset. refresh: ask the hub for the newest revisions of chats
    and target. hash_weights: as of target_facts. target: the folder of the small one, if it is there already.
    plan_from: the folder whose plan has the revisions, device and threads; None: see `folder_with_plan`.
    Raises: as `target_name`; ValueError naming the settings that do not fit; as `prepare.resolve`.
    """
    from niels_gpt.recipes.eagle3.input import input_facts

    named = target_name(settings) if target is None else str(target)
    sizes: dict[str, Any] = _SMALL_SIZES if settings.eagle3_target is None else _SIZES
    with _named_by_settings():
        name = stable_name(settings, named)
        if refresh:
            observed = _newest_chats(settings) or observed
            sizes = sizes if is_local(named) else {**sizes, "revision": "main"}
        options = Options.from_settings(settings, target_model=named, target_name=name, **sizes)
        folder = plan_from or folder_with_plan(cache_root(settings) / KEY)
        found = resolve(options, settings, plan_from=folder, hash_weights=hash_weights)
    source = found.source
    dataset, _, revision = (observed or "").rpartition("@")
    if source["kind"] == "hub" and dataset == str(source["fingerprint"]).rpartition("@")[0] and revision != "None":
        newer = {**source, "fingerprint": observed, "revision": revision}
        source = {**source, **input_facts(settings, settings.eagle3_source, recorded=newer)}
    return replace(found, source=source)


def _newest_chats(settings: Settings) -> str | None:
    """Return the fingerprint of the newest revision of chats on the hub; None for chats of files."""
    name = raw_source(settings)
    source = None if name is None else resolve_whole(settings, name)
    return None if source is None or source.kind != "hub" else str(source.provenance(None)["fingerprint"])


@contextmanager
def _named_by_settings() -> Iterator[None]:
    """Let a ValueError that names flags of precompute name the settings in their place."""
    settings = {flag_name(each.name): each.metadata["setting"] for each in fields(Options) if each.metadata["setting"]}
    try:
        yield
    except CacheError:  # of a file
        raise
    except ValueError as error:
        if len(error.args) == 1:
            error.args = (re.sub("--[a-z][a-z-]*", lambda flag: settings.get(flag[0], flag[0]), str(error)),)
        raise


def folder_with_plan(path: Path) -> Path | None:
    """Return the committed cache, else the unfinished version that was written last, of those that have a plan."""
    from niels_gpt.eagle3.resume import recorded_plan

    return next((folder for folder in (path, *unfinished_versions(path)) if recorded_plan(folder)), None)


def unfinished_versions(path: Path) -> list[Path]:
    """Return the folders of unfinished versions, the newest first, then the ones of earlier releases."""
    earlier = [folder for folder in versions.versions_dir(path).glob(f"{versions.BUILDING}-*") if not folder.suffix]
    earlier.sort(key=lambda folder: folder.lstat().st_mtime_ns, reverse=True)
    return [*(plan.folder / WORK_NAME for plan in plans_of(path)), *earlier]


def stable_name(settings: Settings, target: str) -> str:
    """Return the target's name in the cache: a hub id, or a folder's name without its path."""
    if settings.eagle3_target is None:
        return SMALL_TARGET
    return Path(target).expanduser().resolve().name if os.path.isdir(os.path.expanduser(target)) else target
