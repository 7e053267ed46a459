"""Which versions Dagster compares: of an asset's code, and of what it was made from.

An asset's code version is a hash of what decides whether a run builds it, as far as that is known without reading a
source. It is for Dagster alone: the recipe's fingerprint decides what is built. A materialization has the version of
its run's settings, so that a cache built with others than the deployment's is shown as stale.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg

from niels_gpt.cache.meta import find_meta
from niels_gpt.data.exclude import Exclusion, read_exclusion
from niels_gpt.data.sources import SOURCES
from niels_gpt.hub.models import is_local
from niels_gpt.kinds.kind import has_partitions
from niels_gpt.paths import DEFAULT_TOKENIZER_PATH
from niels_gpt.recipes.eagle3.of_settings import KEY as TARGETS_KEY
from niels_gpt.recipes.eagle3.of_settings import VOCAB_KEY, has_small_target, raw_source
from niels_gpt.recipes.partitions.documents import is_partitioned
from niels_gpt.recipes.plan import built_at, every_key, needs_no_tokenizer, observe, settings_fingerprint
from niels_gpt.recipes.resolve import asked_revisions, listing_of, resolve_source
from niels_gpt.recipes.run_recipe import TOKENIZER_KEY, Outcome, cache_root, recorded_recipe
from niels_gpt.recipes.sources import named
from niels_gpt.recipes.tokenizer import is_id, named_tokenizer, stage_tokenizer, tokenizer_state
from niels_gpt.recipes.tokenizers.texts import training_settings
from niels_gpt.recipes.user_sources import user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage.fileio import canonical_json
from niels_gpt.tokenizers.files import tokenizer_files
from niels_gpt.tokenizers.protocol import FullTokenizer
from pipelines.deployment import Deployment
from pipelines.metadata import data_version, materialize_result, observation_metadata

DATA_VERSION, CODE_VERSION = "dagster/data_version", "dagster/code_version"
INPUT_VERSION, INPUT_POINTER = "dagster/input_data_version", "dagster/input_event_pointer"
HUB_ASKED = "niels_gpt/hub_asked"
"""The tag of an observation of a hub's dataset that was logged without asking the hub: it moves no other cache."""
_MOST_FILES = 1000  # of a target
_MOST_BYTES = 1 << 24  # of a source's files that are read for what --exclude takes from them
_LOOKED_AT = 50  # of the observations of a source
SFT_ROOT, ROOT_VERSION = "sft/", "root"
_DIGITS = 12
_WHAT_IS_READ = (
    *("source_root", "revision", "roam_dir", "follow_links", "sources_file", "pretrain", "sft", "rollouts"),
    *("as_text", "licence", "attribution"),
    *(each.name for each in fields(Settings) if each.name.endswith(("_dataset", "_config", "_from_hub"))),
)
"""The settings that decide which text raw/NAME is."""


# --- code versions ----------------------------------------------------------------------------------------------------


def code_versions(settings: Settings) -> dict[str, str]:
    """Return the code version of every asset that is built, by its path."""
    asked = _asked_tokenizer(settings)
    return {path: _code_version(settings, path, *asked) for path in every_key(settings)}


def code_version(settings: Settings, path: str) -> str:
    """Return the code version of one asset with these settings: twelve hex digits."""
    return _code_version(settings, path, *_asked_tokenizer(settings))


def _code_version(settings: Settings, path: str, asked: Any, tokenizer: FullTokenizer | None) -> str:
    """asked, tokenizer: of `_asked_tokenizer`."""
    parts: dict[str, Any] = {"cache_root": os.path.abspath(cache_root(settings))}
    if path == TOKENIZER_KEY:
        return _digits({**parts, "tokenizer": asked})
    if settings.source_root != "hub":  # elsewhere no revision is chosen
        settings = replace(settings, revision=None)
    if TOKENIZER_KEY in upstream_of(settings, path):
        parts["tokenizer"] = asked if tokenizer is None else tokenizer.sha256
    else:
        tokenizer = None
    if path in (VOCAB_KEY, TARGETS_KEY):
        parts |= {"settings": settings_fingerprint(settings, path), **_of_chats(settings)}
        parts["target"] = _files_of_target(settings, weights=path == TARGETS_KEY)
    else:
        if not is_graph(settings, path):
            settings = replace(settings, partitions=1)
        name = path.rpartition("/")[2]
        parts |= {"settings": settings_fingerprint(settings, path, tokenizer), **_where(settings, name)}
    return _digits({**parts, **_excluded(settings, path)})


def _digits(parts: Any) -> str:
    return sha256(canonical_json(parts)).hexdigest()[:_DIGITS]


def _where(settings: Settings, name: str) -> dict[str, Any]:
    """Return what decides which files of a source are read."""
    return {"place": _place(settings, name), **({"follow_links": True} if settings.follow_links else {})}


def _place(settings: Settings, name: str) -> str:
    """Return where the text of a source lies; of one of your own, what its files are relative to."""
    if user := user_sources(settings).get(name):
        return "" if Path(user.files).expanduser().is_absolute() else str(user.base)
    if name not in SOURCES:  # a pattern of files of chats
        return str(Path(name).expanduser().absolute())
    if SOURCES[name].dataset is None and settings.source_root == "hub":
        return str(Path(settings.roam_dir).expanduser().absolute())
    named = settings.source_root
    return named if named in ("hub", "sample") else str(Path(named).expanduser().absolute())


def _of_chats(settings: Settings) -> dict[str, Any]:
    """Return what else decides which chats the target is run over."""
    name = settings.eagle3_source
    user = user_sources(settings).get(name)
    return {
        **_where(settings, name),
        "source": [user.files, user.licence, user.attribution] if user else asked_revisions(settings).get(name),
        "exclude": None,  # unless `_excluded` finds something
        "max_document_bytes": settings.max_document_bytes,
    }


def _files_of_target(settings: Settings, *, weights: bool) -> list[Any] | None:
    """Return names, sizes and times of the files in the target's folder; None of an id of the hub."""
    name = settings.eagle3_target
    if name is None or not is_local(name):
        return None
    try:
        files = sorted(file for file in Path(name).expanduser().iterdir() if file.is_file())[:_MOST_FILES]
        chosen = [file for file in files if weights or file.suffix not in (".safetensors", ".bin")]
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in chosen]
    except OSError:  # the build reports it
        return None


def _excluded(settings: Settings, path: str) -> dict[str, Any]:
    """Return what the list of --exclude takes from the text of a cache; {} for nothing, and where the build reports it.

    It is the whole list where the build compares that, and where a code location that loads cannot read the text.
    """
    try:
        listed = None if settings.exclude is None else read_exclusion(settings.exclude)
    except (OSError, ValueError):
        listed = None
    if listed is None:
        return {}
    taken: Any = listed.facts["sha256"]
    name = raw_source(settings) if path in (VOCAB_KEY, TARGETS_KEY) else path
    is_whole = settings.partitions > 1 and has_partitions(path)
    with suppress(OSError, ValueError):  # such as no files
        source = None if name is None or is_whole else resolve_source(settings, name)
        listing = source and listing_of(source)
        if source and listing and sum(file.stat().st_size for file in source.files) <= _MOST_BYTES:
            taken = _taken(settings, path, source.spec.key, listed, listing)
    return {"exclude": taken} if taken else {}


@lru_cache(maxsize=64)
def _taken(settings: Settings, path: str, key: str, listed: Exclusion, _listing: str) -> list[str]:
    """Read a source for the entries that name something in it. path: of the cache; key: of the one of the source."""
    raw = path in (VOCAB_KEY, TARGETS_KEY) and not has_small_target(settings)
    return sorted({*named(settings, resolve_source(settings, key), None, listed, raw=raw)})


def _asked_tokenizer(settings: Settings) -> tuple[Any, FullTokenizer | None]:
    """Return what decides which tokenizer a run installs, the content of a named one or how one is trained; and a named
    one itself, if it has files beside the one of its ids: of these recipes compare some facts, and not the bytes."""
    name = settings.tokenizer
    if name is None:
        if settings.source_root != "sample" and DEFAULT_TOKENIZER_PATH.is_file():
            return str(DEFAULT_TOKENIZER_PATH), None  # copied where there is none, and kept
        return {"kind": settings.tokenizer_kind, **training_settings(settings)}, None
    if is_id(name):
        return [name, asked_revisions(settings).get(TOKENIZER_KEY)], None
    path = Path(name).expanduser().absolute()
    try:
        found = tokenizer_files(path, follow_links=settings.follow_links or not path.is_dir())
    except (OSError, ValueError):  # the build reports it
        return str(path), None
    asked = {file: sha256(content).hexdigest() for file, content in found.items()}
    return asked, _opened(settings, _digits(asked)) if len(found) > 1 else None


@lru_cache(maxsize=2)
def _opened(settings: Settings, _content: str) -> FullTokenizer | None:
    """Open the tokenizer that settings name, once for a deployment and its runs; None if it is damaged."""
    try:
        return named_tokenizer(settings)
    except (OSError, ValueError):  # the build reports it
        return None


def is_graph(settings: Settings, path: str) -> bool:
    """Whether the asset of a cache is a graph of partitions with these settings. path: FAMILY/NAME, or tokenizer.

    No file of a source is looked for, so that definitions load at once.
    """
    if settings.partitions == 1 or not has_partitions(path):
        return False
    name = path.rpartition("/")[2]
    if name not in SOURCES or SOURCES[name].from_hub is None:
        return True
    try:
        return is_partitioned(settings, resolve_source(settings, name))
    except (OSError, ValueError):  # the step says what is wrong
        return True


# --- what an asset is made from ---------------------------------------------------------------------------------------


def upstream_of(settings: Settings, path: str) -> list[str]:
    """Return the paths of the assets that an asset is made from, in the order of its dependencies."""
    if path == TOKENIZER_KEY:
        return []
    if path in (VOCAB_KEY, TARGETS_KEY):
        source = raw_source(settings)  # files of chats or rows are not observed
        found = [f"raw/{source}"] if source else []
        found += [TOKENIZER_KEY] if settings.eagle3_target is None else []
        return [*found, *([VOCAB_KEY] if path == TARGETS_KEY else [])]
    tokenizer = [] if needs_no_tokenizer(path) else [TOKENIZER_KEY]
    root = [SFT_ROOT] if path.startswith(SFT_ROOT) else []
    return [*tokenizer, f"raw/{path.rpartition('/')[2]}", *root]


class _Event(NamedTuple):
    """An event that gives an asset a data version."""

    version: str | None
    storage_id: int
    run_id: str
    timestamp: float
    is_of_hub: bool
    """Not logged without asking the hub."""
    facts: dict[str, Any]
    """What its metadata says of the source beside its version."""


def version_tags(
    context: dg.AssetExecutionContext, deployment: Deployment, settings: Settings, outcome: Outcome
) -> dict[str, str]:
    """Return the tags of a materialization that say what it was really made from, and by which settings.

    Before, log what the step has learnt of its inputs: the fingerprint of its source, and another tokenizer. Dagster's
    own tags are of the inputs as they were recorded when the step started; they stay where nothing better is known.
    settings: of the run.
    """
    path = outcome.key
    tags = {CODE_VERSION: code_version(settings, path)}
    read = set(upstream_of(settings, path))
    for upstream in upstream_of(deployment.settings, path):
        if upstream not in read:  # a run may name other chats than the deployment's
            continue
        key = deployment.key(upstream)
        if upstream in (TOKENIZER_KEY, VOCAB_KEY):
            if upstream == TOKENIZER_KEY:
                report_tokenizer(context, deployment, settings)
            version = _content(cache_root(settings) / upstream)
            event = _newest(context, key, is_observed=False)
        else:
            source = recorded_recipe(outcome.path).get("source") or {}
            version = _observed(context, deployment, settings, path, upstream, source, outcome.reused)
            event = _newest(context, key, is_observed=True)
        if version is None:
            continue
        tags[f"{INPUT_VERSION}/{key.to_user_string()}"] = version
        if event is not None and event.version == version:
            tags[f"{INPUT_POINTER}/{key.to_user_string()}"] = str(event.storage_id)
    return tags


def _content(path: Path) -> str | None:
    meta = find_meta(path)
    return None if meta is None else data_version(path, meta)


def _observed(
    context: dg.AssetExecutionContext,
    deployment: Deployment,
    settings: Settings,
    path: str,
    upstream: str,
    source: Mapping[str, Any],
    reused: bool,
) -> str | None:
    """Return the version of an observed asset that the step has read; log it as an observation where it is news.

    Of files every step reads the fingerprint, so each run observes them once; but where somebody has observed other
    files since the step started, the step may have read the older ones, and says nothing. The hub is asked for a
    revision only where none is recorded, so its revision is logged where nobody has observed the dataset, or where the
    cache is ahead of what is observed. A run with other settings of the source says nothing of the deployment's.
    None: as Dagster has it.
    """
    key = deployment.key(upstream)
    newest = _newest(context, key, is_observed=True)
    if upstream == SFT_ROOT:
        if newest is None:
            context.log_event(dg.AssetObservation(key, tags={DATA_VERSION: ROOT_VERSION}))
        return ROOT_VERSION
    version = str(source.get("fingerprint"))
    is_ours = all(getattr(settings, name) == getattr(deployment.settings, name) for name in _WHAT_IS_READ)
    same = newest is not None and newest.version == version
    warning, tags = None, {DATA_VERSION: version}
    if source.get("kind") == "hub":
        built = built_at(settings, path)
        is_news = not same and (newest is None or _is_ahead(context, key, settings, newest, source, built))
        tags[HUB_ASKED] = "no"
        warning = (
            "the revision that the cache was built from: the hub was not asked for a newer one" if reused else None
        )
    else:
        is_repeated = same and newest is not None and newest.run_id == context.op_execution_context.run_id
        is_older = not same and newest is not None and newest.timestamp > _started(context)
        is_news = not is_repeated and not is_older
    if is_ours and is_news:
        metadata = observation_metadata(settings, upstream, source, warning)
        context.log_event(dg.AssetObservation(key, metadata=metadata, tags=tags))
    return version


def _is_ahead(
    context: dg.AssetExecutionContext,
    key: dg.AssetKey,
    settings: Settings,
    newest: _Event,
    source: Mapping[str, Any],
    built: float,
) -> bool:
    """Whether a cache of the hub is of other text than the newest observation, and of newer.

    So it is where another dataset was observed, and where the command line has asked the hub since (--refresh). A cache
    of a revision that a run has named, and one of a revision that was observed before, is not ahead.
    """
    version = str(source.get("fingerprint"))
    if str(newest.version).rpartition("@")[0] != version.rpartition("@")[0]:
        return True
    if source.get("asked_revision") != asked_revisions(settings).get(key.path[-1]) or built <= newest.timestamp:
        return False
    return all(event.version != version for event in _observations(context, key))


def look_at(
    context: dg.AssetExecutionContext, deployment: Deployment, settings: Settings, key: str
) -> tuple[dict[str, Any], str | None]:
    """Return the provenance of the source of the cache `key` as it is now, and a warning or None.

    Where the hub does not answer, the last observation of the dataset stands for it; the recorded revision, as
    `observe` has it, only where there is none. Raises: as `observe`.
    """
    source = resolve_source(settings, key)
    for event in _observations(context, deployment.key(f"raw/{source.source}")):
        dataset, _, revision = str(event.version).rpartition("@")
        is_same = source.kind == "hub" and dataset == source.dataset and revision != "None"
        if is_same and event.facts.get("asked_revision") == source.asked_revision:
            try:
                return source.provenance(None), None
            except ConnectionError as error:
                known = {**event.facts, "fingerprint": event.version, "revision": revision}
                warning = f"{key}: the revision that was observed last stands for the newest one: {error}"
                return source.provenance(known, ask_hub=False), warning
    return observe(settings, key)


def newer_observation(
    context: dg.AssetExecutionContext, deployment: Deployment, settings: Settings, path: str
) -> str | None:
    """Return the fingerprint of the source that the cache `path` is built of; None: of the recorded one, or of files
    of chats, which are not observed.

    That is the newest observation for which the hub was asked, if it is newer than the cache. A cache of a revision
    that these settings do not ask for was built by a run with others: the newest observation counts, whatever its age.
    """
    raw = next((upstream for upstream in upstream_of(settings, path) if upstream.startswith("raw/")), None)
    if raw is None:
        return None
    key, name = deployment.key(raw), raw.rpartition("/")[2]
    asked = asked_revisions(settings).get(name)
    recorded = recorded_recipe(cache_root(settings) / path).get("source") or {}
    observations = _observations(context, key)
    if asked != asked_revisions(deployment.settings).get(name):
        return None  # what was observed is what the deployment asks for
    if recorded.get("kind") == "hub" and recorded.get("asked_revision") != asked:
        return next((event.version for event in observations), None)
    newest = next((event for event in observations if event.is_of_hub), None)
    return newest.version if newest is not None and newest.timestamp > built_at(settings, path) else None


def _started(context: dg.AssetExecutionContext) -> float:
    """Return when the first step of this asset started in this run, in seconds since the epoch: before it read text."""
    operation = context.op_execution_context
    name = operation.op_handle.path[0]
    stats = context.instance.get_run_step_stats(operation.run_id)
    of_asset = [each for each in stats if each.step_key.partition(".")[0] == name]
    return min((each.start_time for each in of_asset if each.start_time is not None), default=0.0)


def _newest(context: dg.AssetExecutionContext, key: dg.AssetKey, *, is_observed: bool) -> _Event | None:
    return next(iter(_events(context, key, is_observed=is_observed, limit=1)), None)


def _observations(context: dg.AssetExecutionContext, key: dg.AssetKey) -> list[_Event]:
    """Return the last observations of a source, the newest first."""
    return _events(context, key, is_observed=True, limit=_LOOKED_AT)


def _events(context: dg.AssetExecutionContext, key: dg.AssetKey, *, is_observed: bool, limit: int) -> list[_Event]:
    fetch = context.instance.fetch_observations if is_observed else context.instance.fetch_materializations
    found = []
    for record in fetch(key, limit=limit).records:
        event = record.asset_observation if is_observed else record.asset_materialization
        tags = (event.tags if event is not None else None) or {}
        shown = event.metadata if event is not None else {}
        facts = {name: shown[name].value for name in ("licence", "attribution", "asked_revision") if name in shown}
        is_of_hub = HUB_ASKED not in tags
        event_of = (tags.get(DATA_VERSION), record.storage_id, record.run_id, record.timestamp)
        found.append(_Event(*event_of, is_of_hub, facts))
    return found


def is_recorded(
    context: dg.AssetExecutionContext, deployment: Deployment, settings: Settings, outcome: Outcome
) -> bool:
    """Whether Dagster's last materialization of an asset is of this content and of these settings."""
    event = context.instance.get_latest_materialization_event(deployment.key(outcome.key))
    tags = (event.asset_materialization.tags if event is not None and event.asset_materialization else None) or {}
    now = {DATA_VERSION: data_version(outcome.path, outcome.meta), CODE_VERSION: code_version(settings, outcome.key)}
    return now.items() <= tags.items()


def report_tokenizer(context: dg.AssetExecutionContext, deployment: Deployment, settings: Settings) -> None:
    """Log a materialization of the tokenizer if a cache's step has made another one than Dagster knows, or found it.

    One that is not what the settings ask for is not logged: the asset is out of date until it is materialized itself.
    """
    if tokenizer_state(settings) != "up to date":
        return
    outcome = stage_tokenizer(settings)
    if not is_recorded(context, deployment, settings, outcome):
        content, code = data_version(outcome.path, outcome.meta), code_version(settings, TOKENIZER_KEY)
        tags = {DATA_VERSION: content, CODE_VERSION: code}
        metadata = materialize_result(outcome).metadata
        context.log_event(dg.AssetMaterialization(deployment.key(TOKENIZER_KEY), metadata=metadata, tags=tags))
