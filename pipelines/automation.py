"""Jobs and sensors of a deployment. The sensors are off until somebody switches them on.

    observe  observes every source at the times of observe_cron
    files    observes sources whose files have changed
    rebuild  materializes the caches of a changed source or tokenizer

The switches are on the page Automation of the UI, and in `niels_definitions(automation=...)`.
"""

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import dagster as dg
from pydantic import TypeAdapter, ValidationError

from niels_gpt.data.sources import SOURCES
from niels_gpt.recipes.plan import every_key
from niels_gpt.recipes.records import TOKENIZER_KEY
from niels_gpt.recipes.user_sources import user_sources
from niels_gpt.storage.remedies import did_you_mean
from pipelines.deployment import Deployment
from pipelines.metadata import LISTING, listing_digest
from pipelines.versions import PARTITIONS, SFT_ROOT, static_partitions_of

SWITCHES = ("observe", "files", "rebuild")
"""The sensors, which `niels_definitions(automation=...)` may name."""
FILES_SECONDS = 30.0
"""Seconds after which a tick of the sensor files leaves the other sources to the next one: Dagster ends it after 60."""
RETRIED = {"dagster/max_retries": "2"}
"""Of a run that the sensor files asks for: Dagster repeats it where the instance's run_retries are enabled."""
LOST = {**RETRIED, "dagster/retry_on_asset_or_op_failure": "false"}
"""Of a run of the other sensors: repeated if its process has died, and not if one of its steps has failed."""
_LOOKED_AT = 10  # of the observations of a source


def switched_on(automation: bool | Collection[str]) -> frozenset[str]:
    """Return the names in SWITCHES that `automation` stands for. Raises: ValueError for any other name."""
    if isinstance(automation, bool):
        return frozenset(SWITCHES if automation else ())
    names = {automation} if isinstance(automation, str) else set(automation)
    for name in sorted(names - set(SWITCHES)):
        near = did_you_mean(name, SWITCHES)
        raise ValueError(
            f"automation: there is no {name!r}.{near} There are {', '.join(SWITCHES)}; True is all of them"
        )
    return frozenset(names)


def automation_of(deployment: Deployment) -> dg.Definitions:
    """Return the jobs and the sensors of a deployment."""
    made, names = every_key(deployment.settings), [*SOURCES, *user_sources(deployment.settings)]

    def job(name: str, paths: Iterable[str], description: str) -> Any:
        return dg.define_asset_job(deployment.name(name), _select(deployment, paths), description=description)

    jobs = [
        job("everything", made, "The tokenizer and every cache."),
        *(
            job(family, (path for path in made if path.startswith(f"{family}/")), f"All {family} caches.")
            for family in ("sft", "pretrain")
        ),
        job("observe", [SFT_ROOT, *(f"raw/{name}" for name in names)], "Observe every source: has its text changed?"),
    ]
    in_partitions = (PARTITIONS + path for path in static_partitions_of(deployment))
    sensors = [
        _files_sensor(deployment, names),
        _evaluating(deployment, "rebuild", [*made, *in_partitions], "Materializes a cache once for each change."),
        _evaluating(
            deployment,
            "observe",
            (f"raw/{name}" for name in names),
            f"Observes every source at {deployment.observe_cron} (UTC): the fingerprint of its files, or the newest "
            "revision on the hub.",
        ),
    ]
    return dg.Definitions(jobs=jobs, sensors=sensors)


def condition_of(deployment: Deployment, path: str) -> dg.AutomationCondition[Any] | None:
    """Return when a sensor runs an asset; None for the tokenizer and the root of the sft caches.

    `observe` observes a source at each tick of observe_cron. `rebuild` materializes a cache once for each new data
    version that it depends on: only one that was materialized before, and not while it or an upstream asset is in
    progress.
    """
    if path.startswith("raw/"):
        return dg.AutomationCondition.on_cron(deployment.observe_cron)
    if path in (TOKENIZER_KEY, SFT_ROOT):
        return None
    changed = dg.AutomationCondition.any_deps_match(dg.AutomationCondition.data_version_changed())
    root = dg.AssetSelection.assets(deployment.key(SFT_ROOT))  # a constant: its first observation is no change
    return (
        changed.ignore(root).since_last_handled()
        & ~dg.AutomationCondition.missing()
        & ~dg.AutomationCondition.in_progress()
        & ~dg.AutomationCondition.any_deps_in_progress()
    ).with_label("a source or the tokenizer has changed")


def _select(deployment: Deployment, paths: Iterable[str]) -> dg.AssetSelection:
    return dg.AssetSelection.assets(*(deployment.key(path) for path in paths))


def _status(deployment: Deployment, name: str) -> dg.DefaultSensorStatus:
    return dg.DefaultSensorStatus.RUNNING if name in deployment.automation else dg.DefaultSensorStatus.STOPPED


def _evaluating(
    deployment: Deployment, name: str, paths: Iterable[str], description: str
) -> dg.AutomationConditionSensorDefinition:
    """Return a sensor that evaluates `condition_of` for our assets; otherwise Dagster would add one of its own."""
    return dg.AutomationConditionSensorDefinition(
        deployment.name(name),
        target=_select(deployment, paths),
        default_status=_status(deployment, name),
        description=description,
        run_tags=LOST,
    )


def _files_sensor(deployment: Deployment, names: list[str]) -> dg.SensorDefinition:
    """Return the sensor that looks at the files of the sources. names: those that this code location knows.

    Its cursor has what was found of each source, the latest at the end: a digest of its files or, once a run was asked
    for, what `_missing` returns.
    """

    @dg.sensor(
        name=deployment.name("files"),
        job_name=deployment.name("observe"),
        default_status=_status(deployment, "files"),
        description="Compares names, sizes and times of the sources' files, without reading them, with the last "
        "observation. A changed source is observed as soon as two ticks in a row find the same files.",
    )
    def files(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        try:
            seen = TypeAdapter(dict[str, str]).validate_json(context.cursor or "{}")
        except ValidationError:  # of another form
            seen = {}
        due, notes = _look(deployment, context.instance, names, seen)
        for note in notes:
            context.log.info(note)
        if not due:
            text = "; ".join(notes) or f"nothing has changed in {sum(map(bool, seen.values()))} sources"
            return dg.SensorResult(skip_reason=text, cursor=json.dumps(seen))
        key = hashlib.sha256(json.dumps(due, sort_keys=True).encode()).hexdigest()  # Dagster starts one run a key
        request = dg.RunRequest(key, asset_selection=[deployment.key(f"raw/{name}") for name in due], tags=RETRIED)
        return dg.SensorResult(run_requests=[request], cursor=json.dumps(seen))

    made: dg.SensorDefinition = files
    return made


def _look(
    deployment: Deployment, instance: dg.DagsterInstance, names: list[str], seen: dict[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return what to observe, by source, and what a tick has to say. Changes `seen`."""
    due, notes = dict[str, str](), [*_not_loaded(deployment, names)]
    order = [*(name for name in names if name not in seen), *(name for name in seen if name in names)]
    for gone in seen.keys() - {*names}:
        del seen[gone]
    end = time.monotonic() + FILES_SECONDS
    for name in order:
        if name != order[0] and time.monotonic() > end:
            notes.append(f"no time is left for raw/{name}: the next tick begins with it")
            break
        last, seen[name] = seen.pop(name, ""), ""
        try:
            digest = seen[name] = listing_digest(deployment.settings, name) or ""
        except (OSError, ValueError) as error:  # looked at again at the next tick
            notes.append(f"raw/{name}: {error}")
            continue
        missing = _missing(instance, deployment.key(f"raw/{name}"), digest) if digest else None
        if missing is None:
            continue
        if last == digest:
            due[name] = missing
        if last in (digest, missing):
            seen[name] = missing
        text = {digest: "is observed", missing: "asked for, and not observed yet: see its run"}
        notes.append(f"raw/{name}: {text.get(last, 'new or changed files, observed once two ticks find the same')}")
    return due, notes


def _not_loaded(deployment: Deployment, names: Collection[str]) -> Iterator[str]:
    """Yield a line if sources were added since the definitions were loaded, or cannot be listed."""
    try:
        new = [f"{user.family}/{name}" for name, user in user_sources(deployment.settings).items() if name not in names]
    except (OSError, ValueError) as error:
        yield str(error)
    else:
        if new:
            yield f"{', '.join(new)} of {deployment.settings.sources_file}: reload the definitions to see it"


def _missing(instance: dg.DagsterInstance, key: dg.AssetKey, digest: str) -> str | None:
    """Return a name for the observation that a source with these files lacks; None if its last one has found them.

    A build observes the text that it has read, without a digest of the files: then an observation of the same text
    counts that has one.
    """
    records = instance.fetch_observations(key, limit=_LOOKED_AT).records
    found = [each.asset_observation for each in records if each.asset_observation is not None]
    same = [each.metadata for each in found if each.data_version == found[0].data_version]
    is_found = any(LISTING in metadata and metadata[LISTING].value == digest for metadata in same)
    return None if is_found else f"{digest} after {records[0].storage_id if records else 0}"
