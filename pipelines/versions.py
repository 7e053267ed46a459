"""What an asset is made from, and the data versions of its inputs that Dagster compares.

A materialization has the code version of its run's settings (niels_gpt/recipes/asked.py), so that Dagster shows a cache
as stale that was built with other settings than the deployment's.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import dagster as dg

from niels_gpt.cache.meta import find_meta
from niels_gpt.recipes.asked import code_version, is_in_partitions, takes_tokenizer
from niels_gpt.recipes.eagle3.request import KEY as TARGETS_KEY
from niels_gpt.recipes.eagle3.request import VOCAB_KEY
from niels_gpt.recipes.plan import HOME_OF, built_at, every_key, observe
from niels_gpt.recipes.records import TOKENIZER_KEY, Outcome, cache_root, recorded_recipe
from niels_gpt.recipes.resolve import ResolvedSource, asked_revisions, resolve_source
from niels_gpt.recipes.tokenizer import stage_tokenizer, tokenizer_state
from niels_gpt.settings import Settings
from pipelines.deployment import Deployment, Run
from pipelines.metadata import data_version, materialize_result, observation_metadata

DATA_VERSION, CODE_VERSION = "dagster/data_version", "dagster/code_version"
INPUT_VERSION, INPUT_POINTER = "dagster/input_data_version", "dagster/input_event_pointer"
HUB_ASKED = "niels_gpt/hub_asked"
"""The tag of an observation of a hub's dataset that was logged without asking the hub: it moves no other cache."""
_LOOKED_AT = 50  # of the observations of a source
SFT_ROOT, ROOT_VERSION = "sft/", "root"
PARTITIONS = "partitions/"
"""Before the path of a cache: the asset of its static partitions."""
_WHAT_IS_READ = (
    *("source_root", "revision", "roam_dir", "follow_links", "sources_file", "pretrain", "sft", "rollouts"),
    *("as_text", "licence", "attribution"),
    *(each.name for each in fields(Settings) if each.name.endswith(("_dataset", "_config", "_from_hub"))),
)
"""The settings that decide which text raw/NAME is."""


# --- what an asset is made from ---------------------------------------------------------------------------------------


def upstream_of(settings: Settings, path: str) -> list[str]:
    """Return the paths of the assets that a cache is made from, in the order of its dependencies."""
    if path == TOKENIZER_KEY:
        return []
    tokenizer = [TOKENIZER_KEY] if takes_tokenizer(settings, path) else []
    if path in HOME_OF:
        source = HOME_OF[path].source(settings)  # files of chats or rows are not observed
        return [*([f"raw/{source}"] if source else []), *tokenizer, *([VOCAB_KEY] if path == TARGETS_KEY else [])]
    root = [SFT_ROOT] if path.startswith(SFT_ROOT) else []
    return [*tokenizer, f"raw/{path.rpartition('/')[2]}", *root]


def inputs_of(deployment: Deployment, path: str) -> list[str]:
    """Return the paths of the assets directly upstream of an asset: of static partitions or not.

    partitions/FAMILY/NAME stands between a cache and what the cache is made from. The root stays at the cache: what
    lies downstream of it may have no partitions, or `--select sft/*` would need --partition.
    """
    cache = path.removeprefix(PARTITIONS)
    made_from = upstream_of(deployment.settings, cache)
    if not has_static_partitions(deployment, cache):
        return made_from
    roots = [each for each in made_from if each == SFT_ROOT]
    return [PARTITIONS + cache, *roots] if cache == path else [each for each in made_from if each not in roots]


def static_partitions_of(deployment: Deployment) -> list[str]:
    """Return the paths of the caches that have Dagster's static partitions in a deployment."""
    return [path for path in every_key(deployment.settings) if has_static_partitions(deployment, path)]


def has_static_partitions(deployment: Deployment, path: str) -> bool:
    """Whether a cache has Dagster's static partitions in a deployment."""
    return deployment.static_partitions and is_in_partitions(deployment.settings, path)


def forced(deployment: Deployment, path: str) -> str:
    """Return the run config, in YAML, that builds a cache from scratch; with static partitions, of each of these."""
    asset = PARTITIONS + path if has_static_partitions(deployment, path) else path
    return f"ops: {{{deployment.key(asset).to_python_identifier()}: {{config: {{force: true}}}}}}"


def version_tags(
    run: Run, path: str, source: Mapping[str, Any], *, tokenizer: Outcome | None = None, asked_hub: bool = True
) -> dict[str, str]:
    """Return the tags of a materialization that say what it was really made from, and by which settings.

    Before, log what the step has learnt of its inputs: the fingerprint of its source, and another tokenizer. Dagster's
    own tags are of the inputs as they were recorded when the step started; they stay where nothing better is known.
    Why no public interface serves: docs/decisions/0031 and 0032. source: the record of the text that was read.
    tokenizer: the one that was used, where it is not installed yet.
    """
    deployment, settings, cache = run.deployment, run.settings, path.removeprefix(PARTITIONS)
    tags = {CODE_VERSION: code_version(settings, cache)}
    inputs, read = inputs_of(deployment, path), upstream_of(settings, cache)  # a run may name other chats
    for upstream in (each for each in upstream_of(deployment.settings, cache) if each in read):
        if upstream not in (TOKENIZER_KEY, VOCAB_KEY):
            version: str | None = Observations(run, upstream).add(cache, source, asked_hub=asked_hub)
        else:
            version = _made_version(run, upstream, tokenizer)
        if version is not None and upstream in inputs:
            tags[f"{INPUT_VERSION}/{deployment.key(upstream).to_user_string()}"] = version
    return tags


def _made_version(run: Run, upstream: str, tokenizer: Outcome | None) -> str | None:
    """Return the data version of the tokenizer, or the draft's vocabulary, that a step has used; None: of none."""
    if upstream == TOKENIZER_KEY:
        if tokenizer is not None:
            if run.context.instance.get_latest_materialization_event(run.deployment.key(upstream)) is None:
                report_found(run, tokenizer)
            return data_version(tokenizer.path, tokenizer.meta)
        # A tokenizer that is not what the settings ask for is out of date until it is materialized itself.
        if tokenizer_state(run.settings) == "up to date":
            report_found(run, stage_tokenizer(run.settings))
    path = cache_root(run.settings) / upstream
    meta = find_meta(path)
    return None if meta is None else data_version(path, meta)


def report_found(run: Run, outcome: Outcome) -> None:
    """Log a materialization of what another step has made or found, where Dagster knows another one or none."""
    key, content = run.deployment.key(outcome.key), data_version(outcome.path, outcome.meta)
    event = run.context.instance.get_latest_materialization_event(key)
    known = (event.asset_materialization.tags if event is not None and event.asset_materialization else None) or {}
    if (known.get(DATA_VERSION), known.get(CODE_VERSION)) != (content, code_version(run.settings, outcome.key)):
        source = recorded_recipe(outcome.path).get("source") or {}
        tags = version_tags(run, outcome.key, source) | {DATA_VERSION: content}
        pointers = {tag.replace(INPUT_VERSION, INPUT_POINTER): "NULL" for tag in tags if tag.startswith(INPUT_VERSION)}
        metadata = materialize_result(outcome).metadata
        run.context.log_event(dg.AssetMaterialization(key, metadata=metadata, tags={**tags, **pointers}))


class Observations:
    """The last observations of raw/NAME, or of the root, the newest first."""

    def __init__(self, run: Run, path: str) -> None:
        self._run, self._path, self._key = run, path, run.deployment.key(path)
        records = run.context.instance.fetch_observations(self._key, limit=_LOOKED_AT).records
        self.known = [(each.asset_observation, each) for each in records if each.asset_observation is not None]

    def add(self, cache: str, source: Mapping[str, Any], *, asked_hub: bool = True) -> str | None:
        """Return the version that a step of `cache` has read, None if it is unknown; log it where it is news."""
        is_root, of_hub = self._path == SFT_ROOT, source.get("kind") == "hub"
        version = ROOT_VERSION if is_root else source.get("fingerprint")
        if version is None or (self.known if is_root else not self._is_news(cache, source)):
            return version
        tags = {DATA_VERSION: str(version), **({HUB_ASKED: "no"} if of_hub and not is_root else {})}
        unasked = "the revision that the cache was built from: the hub was not asked for a newer one"
        warning = unasked if of_hub and not asked_hub else None
        metadata = {} if is_root else observation_metadata(self._run.settings, self._path, source, warning)
        self._run.context.log_event(dg.AssetObservation(self._key, metadata=metadata, tags=tags))
        return version

    def _is_news(self, cache: str, source: Mapping[str, Any]) -> bool:
        """Return whether Dagster has to know the text that a step has read.

        Every step reads the files; but where somebody has observed other files since the run started, the step may
        have read the older ones. The hub is asked for a revision only where none is recorded: its revision is news
        where nobody has observed the dataset, or where the cache is ahead of what is observed: of another dataset, or
        the command line has asked the hub since (--refresh). A cache of a revision that a run has named, and one of a
        revision that was observed before, is not ahead. A run with other settings of the source says nothing of the
        deployment's.
        """
        context, settings, ours = self._run.context, self._run.settings, self._run.deployment.settings
        if any(getattr(settings, name) != getattr(ours, name) for name in _WHAT_IS_READ):
            return False
        if not self.known:
            return True
        version, (newest, record) = source.get("fingerprint"), self.known[0]
        if source.get("kind") != "hub":
            record_of_run = context.instance.get_run_record_by_id(context.run.run_id)
            started = None if record_of_run is None else record_of_run.start_time
            return bool(newest.data_version != version and record.timestamp <= (started or math.inf))
        asked = asked_revisions(settings).get(self._path.rpartition("/")[2])
        is_refreshed = source.get("asked_revision") == asked and built_at(settings, cache) > record.timestamp
        is_seen = any(each.data_version == version for each, _ in self.known)
        is_other = str(newest.data_version).rpartition("@")[0] != str(version).rpartition("@")[0]
        return is_other or (is_refreshed and not is_seen)

    def provenance(self, source: ResolvedSource) -> tuple[dict[str, Any], str | None] | None:
        """Return the provenance of a hub's dataset as it is now; None if it was never observed.

        If the hub does not answer, that of the last observation with a warning.
        """
        for event, _ in self.known:
            dataset, _, revision = str(event.data_version).rpartition("@")
            stated = ("licence", "attribution", "asked_revision")
            facts = {name: event.metadata[name].value for name in stated if name in event.metadata}
            if (dataset, facts.get("asked_revision")) == (source.dataset, source.asked_revision) and revision != "None":
                try:
                    return source.provenance(None), None
                except ConnectionError as error:
                    known = {**facts, "fingerprint": event.data_version, "revision": revision}
                    why = f"{source.spec.key}: the revision that was observed last stands for the newest one: {error}"
                    return source.provenance(known, ask_hub=False), why
        return None

    def newer_than(self, cache: str) -> str | None:
        """Return the newest version for which the hub was asked, if it is newer than a cache; else None.

        A cache of a revision that these settings do not ask for was built by a run with others: the newest observation
        counts, whatever its age.
        """
        settings, name = self._run.settings, self._path.rpartition("/")[2]
        asked, ours = (asked_revisions(each).get(name) for each in (settings, self._run.deployment.settings))
        if asked != ours:
            return None  # what was observed is what the deployment asks for
        recorded = recorded_recipe(cache_root(settings) / cache).get("source") or {}
        is_of_others = recorded.get("kind") == "hub" and recorded.get("asked_revision") != asked
        for event, record in self.known:
            if is_of_others:
                return str(event.data_version)
            if HUB_ASKED not in (event.tags or {}):
                return str(event.data_version) if record.timestamp > built_at(settings, cache) else None
        return None


def look_at(run: Run, key: str) -> tuple[dict[str, Any], str | None]:
    """Return the provenance of the source of the cache `key` as it is now, and a warning or None.

    Where the hub does not answer, the last observation of the dataset stands for it; the recorded revision, as
    `observe` has it, only where there is none. Raises: as `observe`.
    """
    source = resolve_source(run.settings, key)
    known = Observations(run, f"raw/{source.source}").provenance(source) if source.kind == "hub" else None
    return known or observe(run.settings, key)


def newer_observation(run: Run, path: str) -> str | None:
    """Return the observed fingerprint that the cache `path` is to be built of; None: of the recorded one, or of files
    of chats, which are not observed."""
    raw = next((upstream for upstream in upstream_of(run.settings, path) if upstream.startswith("raw/")), None)
    return None if raw is None else Observations(run, raw).newer_than(path)
