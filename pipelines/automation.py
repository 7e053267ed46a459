"""Jobs, the schedule and the sensors of a deployment. Schedule and sensors are off until somebody switches them on.

    observe  schedule: runs the job observe every hour, over raw/* and sft/
    files    sensor: observes sources whose files have changed
    rebuild  sensor: materializes the caches of a changed source or tokenizer

The switches are on the page Automation of the UI, and in `niels_definitions(automation=...)`.
"""

import hashlib
import json
import math
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import dagster as dg
from dagster._core.storage.tags import RUN_KEY_TAG, SENSOR_NAME_TAG
from pydantic import TypeAdapter, ValidationError

from niels_gpt.data.sources import SOURCES
from niels_gpt.recipes.plan import every_key
from niels_gpt.recipes.records import TOKENIZER_KEY
from niels_gpt.recipes.resolve import listing_of, resolve_source
from niels_gpt.recipes.user_sources import user_sources
from niels_gpt.storage.remedies import did_you_mean
from pipelines.deployment import Deployment
from pipelines.versions import PARTITIONS, SFT_ROOT, static_partitions_of

SWITCHES = ("observe", "files", "rebuild")
"""What `niels_definitions(automation=...)` may name."""
HOURLY = "0 * * * *"
FILES_SECONDS = 30.0
"""Seconds after which a tick of the sensor files leaves the other sources to the next one: Dagster ends it after 60."""
AGAIN_SECONDS = 600.0
"""Seconds after which an observation that has not come is asked for again, unless its run has not finished."""
DIGITS = 16
"""Of a digest in the cursor."""


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
    """Return the jobs, the schedule and the sensors of a deployment."""
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
    every_hour = dg.ScheduleDefinition(
        name=deployment.name("observe"),
        job_name=deployment.name("observe"),
        cron_schedule=HOURLY,
        default_status=(
            dg.DefaultScheduleStatus.RUNNING if "observe" in deployment.automation else dg.DefaultScheduleStatus.STOPPED
        ),
        description="Observes every source once an hour: its files' fingerprint, or the hub's newest revision.",
    )
    return dg.Definitions(
        jobs=jobs, schedules=[every_hour], sensors=[_files_sensor(deployment, names), _rebuild_sensor(deployment)]
    )


def condition_of(deployment: Deployment, path: str) -> dg.AutomationCondition[Any] | None:
    """Return when the sensor `rebuild` materializes an asset: once for each new data version that it depends on.

    Only an asset that was materialized before, and not while it or an upstream asset is in progress. Returns None for
    an asset without upstream assets, and for an observed one.
    """
    if path in (TOKENIZER_KEY, SFT_ROOT) or path.startswith("raw/"):
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


def _rebuild_sensor(deployment: Deployment) -> dg.AutomationConditionSensorDefinition:
    """Return the sensor that evaluates `condition_of` for all our assets; otherwise Dagster would add its own."""
    return dg.AutomationConditionSensorDefinition(
        deployment.name("rebuild"),
        target=_select(
            deployment,
            [*every_key(deployment.settings), *(PARTITIONS + path for path in static_partitions_of(deployment))],
        ),
        default_status=_status(deployment, "rebuild"),
        description="Materializes the caches of a source or tokenizer once for each new data version.",
    )


class _Source(NamedTuple):
    """The knowledge of the sensor `files` about a source that has files."""

    digest: str
    """Of its files at the last look."""
    run_key: str = ""
    """Of the run that was asked to observe these files; empty before that."""
    asked: float = 0.0
    """When it was asked, in seconds since the epoch; 0.0 once the source was observed since."""


@dataclass
class _Cursor:
    """The state that the sensor `files` keeps from tick to tick."""

    requests: int = field(default_factory=lambda: int(time.time()))
    """Of runs; part of their keys. It starts at the time of the first tick, so that no cursor repeats another's."""
    next: str = ""
    """The source to look at first: the one that the last tick had no time for."""
    sources: dict[str, _Source] = field(default_factory=dict)


def _files_sensor(deployment: Deployment, names: list[str]) -> dg.SensorDefinition:
    """Return the sensor that looks at the files of the sources. names: those that this code location knows."""

    @dg.sensor(
        name=deployment.name("files"),
        job_name=deployment.name("observe"),
        default_status=_status(deployment, "files"),
        description="Compares names, sizes and times of the sources' files, without reading them. A changed source is "
        "observed as soon as two ticks in a row find the same files.",
    )
    def files(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        try:
            cursor = TypeAdapter(_Cursor).validate_json(context.cursor or "{}")
        except ValidationError:  # of another form
            cursor = _Cursor()
        due, notes = _look(deployment, context.instance, names, cursor)
        for note in notes:
            context.log.info(note)
        if not due:
            text = "; ".join(notes) or f"nothing has changed in {len(cursor.sources)} sources"
            return dg.SensorResult(skip_reason=text, cursor=json.dumps(asdict(cursor)))
        cursor.requests += 1
        digest = hashlib.sha256(json.dumps(due, sort_keys=True).encode()).hexdigest()
        key, now = f"{cursor.requests}-{digest[:DIGITS]}", math.floor(time.time() * 1000) / 1000  # SQLite has no more
        cursor.sources |= {name: _Source(found, key, now) for name, found in due.items()}
        request = dg.RunRequest(run_key=key, asset_selection=[deployment.key(f"raw/{name}") for name in due])
        return dg.SensorResult(run_requests=[request], cursor=json.dumps(asdict(cursor)))

    made: dg.SensorDefinition = files
    return made


def _look(
    deployment: Deployment, instance: dg.DagsterInstance, names: list[str], cursor: _Cursor
) -> tuple[dict[str, str], list[str]]:
    """Return the digests of the sources to observe, by name, and what a tick has to say. Changes `cursor`.

    What was observed before the first look counts for nothing: no time of a file tells when another one was removed.
    """
    due, notes = dict[str, str](), list[str]()
    try:
        new = [f"{user.family}/{name}" for name, user in user_sources(deployment.settings).items() if name not in names]
        if new:
            notes.append(f"{', '.join(new)} of {deployment.settings.sources_file}: reload the definitions to see it")
    except (OSError, ValueError) as error:
        notes.append(str(error))
    cursor.sources = {name: known for name, known in cursor.sources.items() if name in names}
    first = names.index(cursor.next) if cursor.next in names else 0
    end, cursor.next = time.monotonic() + FILES_SECONDS, ""
    for name in (*names[first:], *names[:first]):
        if name != names[first] and time.monotonic() > end:
            cursor.next = name
            notes.append(f"no time is left for raw/{name}: the next tick begins with it")
            break
        try:
            digest = (listing_of(resolve_source(deployment.settings, name)) or "")[:DIGITS]
        except (OSError, ValueError) as error:  # looked at again at the next tick
            notes.append(f"raw/{name}: {error}")
            continue
        if not digest:  # without files
            continue
        known = cursor.sources.get(name)
        if known is None or known.digest != digest:
            cursor.sources[name] = _Source(digest)
            notes.append(f"raw/{name}: new or changed files, observed once two ticks find the same")
        elif not known.run_key:
            due[name] = digest
        elif known.asked:
            if _is_observed(instance, deployment.key(f"raw/{name}"), known.asked):
                cursor.sources[name] = known._replace(asked=0.0)
                continue
            notes.append(f"raw/{name}: asked for, and not observed yet")
            ours = dg.RunsFilter(tags={RUN_KEY_TAG: known.run_key, SENSOR_NAME_TAG: deployment.name("files")})
            if time.time() >= known.asked + AGAIN_SECONDS and all(run.is_finished for run in instance.get_runs(ours)):
                due[name] = digest
    return due, notes


def _is_observed(instance: dg.DagsterInstance, key: dg.AssetKey, since: float) -> bool:
    """Whether a source was observed by a run that began after `since`: an earlier one may have read earlier files."""
    for record in instance.fetch_observations(key, limit=1).records:
        run = instance.get_run_record_by_id(record.run_id)
        return (run.create_timestamp.timestamp() if run else record.timestamp) >= since
    return False
