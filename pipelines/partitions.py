"""A cache that is built in partitions, in one of two forms. The steps of both have the same bodies.

A graph of steps, which the deployment's executor distributes and retries:

    plan_partitions -> build_partition[p00000], [p00001], ... -> seal_cache

With `niels_definitions(static_partitions=True)` two assets. The first has Dagster's own partitions, so there are
backfills, a status for each partition, and a run of one alone. The second seals:

    partitions/FAMILY/NAME [00000], [00001], ... -> FAMILY/NAME

The steps share the cache folder and pass no values to each other. So no I/O manager is used.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import dagster as dg

from niels_gpt.recipes.asked import code_versions, is_in_partitions
from niels_gpt.recipes.home_recipes import units_of
from niels_gpt.recipes.plan import every_recipe
from niels_gpt.recipes.records import TOKENIZER_KEY, Outcome, recorded_recipe
from niels_gpt.recipes.request import restart
from niels_gpt.recipes.tokenizer import with_installed
from niels_gpt.recipes.units import CacheUnits, MadeUnit, NoPlan
from niels_gpt.storage.errors import CacheError, LeftOut
from pipelines.automation import condition_of
from pipelines.deployment import Deployment, Run
from pipelines.resources import BuildConfig, WaitConfig
from pipelines.steps import (
    BUILD_POOL,
    BUILD_TAG,
    NETWORK_RETRIES,
    left_out,
    progress_log,
    report,
    report_made_too,
    start_over,
    step,
    turn,
    waited_for,
)
from pipelines.versions import (
    PARTITIONS,
    has_static_partitions,
    inputs_of,
    newer_observation,
    static_partitions_of,
    upstream_of,
    version_tags,
)

PARTITION_POOL = "niels_gpt/partition"
"""Pool of the steps that build partitions. Without a limit in the deployment, all partitions run at once."""
_OF_ALL = frozenset({"dagster/backfill", "dagster/from_automation_condition"})
"""Tags of the runs that Dagster starts for many partitions alike."""
_MOST_NUMBERS = 5  # of partitions in a message
_DIGITS = 16  # of a fingerprint


def in_partitions(deployment: Deployment, made: Iterable[dg.AssetsDefinition]) -> list[dg.AssetsDefinition]:
    """Return the assets; those that are built in partitions become graphs, or seals, with the same specs."""
    plans: dict[frozenset[str], dg.OpDefinition] = {}
    steps = [make(deployment) for make in (_build_partition, _seal_cache)]

    def cache(plain: dg.AssetsDefinition) -> dg.AssetsDefinition:
        path = deployment.path_of(plain.key)
        if has_static_partitions(deployment, path):
            return _as_seal(deployment, plain)
        return _as_graph(deployment, plain, plans, *steps) if is_in_partitions(deployment.settings, path) else plain

    return [cache(plain) for plain in made]


# --- the steps of both forms ------------------------------------------------------------------------------------------


@contextmanager
def _instead(remedy: str) -> Iterator[None]:
    """Give a step's error another remedy if there is no plan of its text and its settings, and it may make none."""
    try:
        yield
    except NoPlan as error:
        raise NoPlan(error.path, error.found, error.expected, remedy, code=error.code) from error


def _built(run: Run, units: CacheUnits, number: int, mended: MadeUnit | None = None) -> tuple[MadeUnit, dict[str, Any]]:
    """Build a partition unless it is finished, and log it. Returns it with its figures."""
    made = mended or units.build(number, wait=run.wait, progress=progress_log(run.context, units.counted))
    done = "was finished already" if made.reused else f"built in {made.seconds:.1f} s"
    run.context.log.info(f"{units.key}: partition {number} of {made.partition.total} {done}")
    counts = made.meta["totals"] if "partition" in made.meta else {}
    counts = {key: int(counts[key]) for key in ("train_tokens", "val_tokens") if key in counts}
    return made, {"partition": number, **counts, "seconds": round(made.seconds, 3)}


def _sealed(run: Run, path: str, remedy: str) -> Iterator[dg.MaterializeResult[None]]:
    """Join all partitions into one cache; without partitions, build the whole cache. One that is left out yields none.

    remedy: where there is no plan of the text and the settings.
    """
    core = with_installed(run.settings)

    def build() -> Outcome:
        if is_in_partitions(core, path):
            # Of the newest plan, as its partitions: an observation may have been made since the plan was fixed.
            units = units_of(core, path, fixes=False)
            if has_static_partitions(run.deployment, path):
                _refuse_unfinished(units, remedy)
            return units.seal(progress=progress_log(run.context, "files", "bytes"))
        return every_recipe(core)[path](core, observed=newer_observation(run, path), progress=progress_log(run.context))

    # The turn inside of `step`: its error E503 is no reason to try again.
    made: list[dg.MaterializeResult[None]] = []
    with step(run), turn(run, path), left_out(run), _instead(remedy):
        made.append(report(run, waited_for(run, path, build)))
        report_made_too(run, path)
    yield from made


def _refuse_unfinished(units: CacheUnits, remedy: str) -> None:
    """Raise CacheError E510 if a partition is not finished."""
    if unfinished := units.unfinished():
        few = ", ".join(f"{number:05d}" for number in unfinished[:_MOST_NUMBERS])
        more = ", ..." if len(unfinished) > _MOST_NUMBERS else ""
        found = f"{len(unfinished)} of {units.settings.partitions} partitions are not finished ({few}{more})"
        raise CacheError(units.path, found, "all of them", remedy, code="E510")


# --- a graph ----------------------------------------------------------------------------------------------------------


def _as_graph(
    deployment: Deployment,
    plain: dg.AssetsDefinition,
    plans: dict[frozenset[str], dg.OpDefinition],
    build: dg.OpDefinition,
    seal: dg.OpDefinition,
) -> dg.AssetsDefinition:
    """Return an asset of a cache as a graph of steps. plans: the steps that plan, by the names of their inputs."""
    spec = plain.get_asset_spec()
    paths = upstream_of(deployment.settings, deployment.path_of(spec.key))
    names = {deployment.key(path): path.partition("/")[0] for path in paths}  # tokenizer, raw, eagle3
    keys = [dep.asset_key for dep in spec.deps]  # a translator's too
    upstream = {names.get(key) or f"also_{key.to_python_identifier()}": key for key in keys}
    plan = plans.setdefault(frozenset(upstream), _plan_partitions(deployment, sorted(upstream)))

    @dg.graph_asset(
        key=spec.key,
        ins={each: dg.AssetIn(key, dagster_type=dg.Nothing) for each, key in upstream.items()},
        config=dg.ConfigMapping(_of_steps, BuildConfig.to_fields_dict()),
    )
    def cache(**inputs: Any) -> Any:
        planned = plan.alias("plan_partitions")(**inputs)
        built = planned.map(build.alias("build_partition"))
        return seal.alias("seal_cache")(built=built.collect())

    (asset,) = dg.map_asset_specs(lambda _: spec, [cache])
    return asset


def _of_steps(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of each step of a graph: what `ops.OP.config` says of the asset."""
    wait = {"config": {"wait": config["wait"]}}
    return {"plan_partitions": {"config": config}, "build_partition": wait, "seal_cache": wait}


def _plan_partitions(deployment: Deployment, upstream: Sequence[str]) -> dg.OpDefinition:
    """Return the step that fixes the plan of a cache, and starts a step for each partition that is not finished.

    upstream: names of its inputs.
    """
    is_text = {*upstream} == {"raw", TOKENIZER_KEY}

    @dg.op(
        name=deployment.name("plan_partitions" if is_text else f"plan_partitions_{'_'.join(upstream)}"),
        # An input each: with its blocking checks an upstream asset is several steps already, and Dagster nests no
        # lists.
        ins={name: dg.In(dg.Nothing) for name in upstream},
        out=dg.DynamicOut(dg.Nothing),
        retry_policy=NETWORK_RETRIES,
        tags=deployment.op_tags,
        required_resource_keys={deployment.resource},
    )
    def plan_partitions(context: dg.AssetExecutionContext, config: BuildConfig) -> Iterator[dg.DynamicOutput[None]]:
        run, path = deployment.run(context, config), deployment.path_of(context.asset_key)
        core = with_installed(run.settings)
        unfinished: list[int] = []
        with step(run), suppress(LeftOut):  # the last step says so
            damaged = start_over(run, path)
            if is_in_partitions(core, path):
                units = units_of(core, path, observed=newer_observation(run, path))
                unfinished = (units.plan and damaged) or units.unfinished()
                done = f"{core.partitions - len(unfinished)} finished, {len(unfinished)} to build"
                found = done if units.plan else "up to date"
                context.log.info(f"{path}: {core.partitions} partitions: {found}")
        for number in unfinished:
            yield dg.DynamicOutput(None, mapping_key=f"p{number:05d}")

    made: dg.OpDefinition = plan_partitions
    return made


def _build_partition(deployment: Deployment) -> dg.OpDefinition:
    """Return the step that builds one partition.

    It waits where another run builds the same one, and does nothing where it is finished.
    """

    @dg.op(
        name=deployment.name("build_partition"),
        ins={"planned": dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing),
        retry_policy=NETWORK_RETRIES,
        pool=PARTITION_POOL,
        tags=deployment.op_tags,
        required_resource_keys={deployment.resource},
    )
    def build_partition(context: dg.AssetExecutionContext, config: WaitConfig) -> Iterator[dg.Output[None]]:
        run, path = deployment.run(context, config), deployment.path_of(context.asset_key)
        number = int(str(context.op_execution_context.get_mapping_key()).removeprefix("p"))
        with step(run), _instead(_in_a_new_run(deployment, path)):
            _, figures = _built(run, units_of(with_installed(run.settings), path, fixes=False), number)
        yield dg.Output(None, metadata=figures)

    made: dg.OpDefinition = build_partition
    return made


def _seal_cache(deployment: Deployment) -> dg.OpDefinition:
    """Return the step that joins all partitions into one cache; without partitions, it builds the whole cache."""

    @dg.op(
        name=deployment.name("seal_cache"),
        ins={"built": dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing, is_required=False),  # a cache may be left out
        retry_policy=NETWORK_RETRIES,
        pool=BUILD_POOL,
        tags={**deployment.op_tags, BUILD_TAG: "true"},
        required_resource_keys={deployment.resource},
    )
    def seal_cache(context: dg.AssetExecutionContext, config: WaitConfig) -> Iterator[dg.Output[None]]:
        run, path = deployment.run(context, config), deployment.path_of(context.asset_key)
        yield from map(_as_output, _sealed(run, path, _in_a_new_run(deployment, path)))

    made: dg.OpDefinition = seal_cache
    return made


def _in_a_new_run(deployment: Deployment, path: str) -> str:
    """Return the remedy for a re-execution: it repeats no successful step, so it cannot make a new plan."""
    key = deployment.key(path).to_user_string()
    return f"Materialize {key} in a new run, which plans its partitions again; a re-execution of this run does not"


def _as_output(result: dg.MaterializeResult[None]) -> dg.Output[None]:
    """Return a materialization as the output of a step in a graph."""
    with warnings.catch_warnings():  # Dagster calls the data version of an output beta, and of an asset not
        warnings.simplefilter("ignore", dg.BetaWarning)
        return dg.Output(None, metadata=result.metadata, data_version=result.data_version, tags=result.tags)


# --- Dagster's own partitions -----------------------------------------------------------------------------------------


def assets_of(deployment: Deployment) -> list[dg.AssetsDefinition]:
    """Return partitions/FAMILY/NAME of each cache with static partitions."""
    paths = static_partitions_of(deployment)
    versions = code_versions(deployment.settings) if paths else {}
    return [_partition_asset(deployment, path, versions[path]) for path in paths]


def jobs_of(deployment: Deployment) -> list[Any]:
    """Return the job of all these assets; none where there are none."""
    keys = [deployment.key(PARTITIONS + path) for path in static_partitions_of(deployment)]
    text = "A partition of every cache; a backfill builds all of them. It seals none."
    job = dg.define_asset_job(deployment.name("partitions"), dg.AssetSelection.assets(*keys), description=text)
    return [job] if keys else []


def _partition_asset(deployment: Deployment, path: str, version: str) -> dg.AssetsDefinition:
    """Return the asset partitions/FAMILY/NAME of a cache. version: the cache's code version."""
    family = PARTITIONS.rstrip("/")

    @dg.asset(
        key=deployment.key(PARTITIONS + path),
        deps=[deployment.key(upstream) for upstream in inputs_of(deployment, PARTITIONS + path)],
        partitions_def=dg.StaticPartitionsDefinition([f"{n:05d}" for n in range(deployment.settings.partitions)]),
        description=f"The partitions of {path}, which seals them once all are finished.",
        group_name=deployment.group(family),
        owners=list(deployment.owners),
        tags={"family": family, **deployment.tags},
        code_version=version,
        automation_condition=condition_of(deployment, PARTITIONS + path),
        retry_policy=NETWORK_RETRIES,
        pool=PARTITION_POOL,
        op_tags=deployment.op_tags,
        required_resource_keys={deployment.resource},
        output_required=False,  # of a cache that is left out
    )
    def partition(context: dg.AssetExecutionContext, config: BuildConfig) -> Iterator[dg.MaterializeResult[None]]:
        run = _asked(context, deployment, config)
        again = f"Materialize {_all_of(deployment, path)}, which makes a new plan"
        made: list[dg.MaterializeResult[None]] = []
        with step(run), left_out(run), _instead(again):
            made.append(_partition(run, path))
        yield from made

    asset: dg.AssetsDefinition = partition
    return asset


def _all_of(deployment: Deployment, path: str) -> str:
    """Return what a remedy says to materialize for a new plan of a cache."""
    return f"all partitions of {deployment.key(PARTITIONS + path).to_user_string()} in one backfill"


def _asked(context: dg.AssetExecutionContext, deployment: Deployment, config: WaitConfig) -> Run:
    """Return what a run of static partitions asks for. Raises: dg.Failure for another number of partitions."""
    run, ours = deployment.run(context, config), deployment.settings.partitions
    if run.settings.partitions != ours:
        raise dg.Failure(
            f"resources.{deployment.resource}.config.partitions: found {run.settings.partitions}, expected {ours}, "
            "as the assets have. Set another number for the deployment (NIELS_GPT_PARTITIONS)",
            allow_retries=False,
        )
    return run


def _partition(run: Run, path: str) -> dg.MaterializeResult[None]:
    """Build the partition of a run, and return its materialization. Its data version stands for recipe and number.

    force: one of a sealed cache is built again and mends the cache.
    """
    core, number = with_installed(run.settings), int(run.context.partition_key)
    units, mended = _units(run, path), None
    if run.force and _is_first_attempt(run):
        if units.plan is None:  # a sealed cache: its plan may be made again
            units = units_of(core, path)
        mended = units.mend(number)
        if mended is None and not units.restart(number):  # of a kind that cannot be mended
            if not _is_of_many(run):
                text = f"{path} is sealed and up to date. Materialize {_all_of(run.deployment, path)}, with force"
                raise dg.Failure(text, allow_retries=False)
            restart(core, path)
            units = _units(run, path)
    made, figures = _built(run, units, number, mended and mended[0])
    known = recorded_recipe(units.path) if units.plan is None else units.plan.content
    source, tokenizer = known.get("source") or {}, units.made_tokenizer
    tags = version_tags(run, PARTITIONS + path, source, tokenizer=tokenizer, asked_hub=not made.reused)
    return dg.MaterializeResult(
        metadata={"run/state": "reused" if made.reused else "built", **figures},
        data_version=dg.DataVersion(f"{units.recipe_fingerprint[:_DIGITS]}/{number}"),
        tags=tags,
    )


def _units(run: Run, path: str) -> CacheUnits:
    """Return the units of a cache, whose plan is made by the partition that comes first.

    Where there is a plan of another text or other settings, only a backfill or an automation makes a new one: after a
    single partition the others would still be of the plan before.
    """
    settings, observed = with_installed(run.settings), newer_observation(run, path)
    if not (_is_first_attempt(run) and _is_of_many(run)):
        try:
            return units_of(settings, path, observed=observed, fixes=False)
        except NoPlan as error:
            if error.code != "E510":  # none at all
                raise
    return units_of(settings, path, observed=observed)


def _is_of_many(run: Run) -> bool:
    """Whether Dagster has started a run for many partitions alike."""
    return not _OF_ALL.isdisjoint(run.context.run.tags)


def _is_first_attempt(run: Run) -> bool:
    """Whether a step is neither a retry nor a re-execution: these go on with what the first attempt has built."""
    return not run.context.op_execution_context.retry_number and run.context.run.parent_run_id is None


def _as_seal(deployment: Deployment, plain: dg.AssetsDefinition) -> dg.AssetsDefinition:
    """Return an asset of a cache as the step that seals its partitions. It builds none: that may need other machines.

    But it mends a damaged cache by the partitions whose files have failed a check.
    """
    spec = plain.get_asset_spec()
    path = deployment.path_of(spec.key)

    @dg.asset(
        key=spec.key,
        deps=[dep.asset_key for dep in spec.deps],
        retry_policy=NETWORK_RETRIES,
        pool=BUILD_POOL,
        op_tags={**deployment.op_tags, BUILD_TAG: "true"},
        required_resource_keys={deployment.resource},
        output_required=False,  # of a cache that is left out
    )
    def cache(context: dg.AssetExecutionContext, config: WaitConfig) -> Iterator[dg.MaterializeResult[None]]:
        run = _asked(context, deployment, config)
        with step(run):
            for number in start_over(run, path):
                _built(run, units_of(with_installed(run.settings), path), number)
        # A partition of this plan that is finished stays as it is.
        again = f"Materialize {_all_of(deployment, path)}, then {spec.key.to_user_string()}"
        yield from _sealed(run, path, again)

    (made,) = dg.map_asset_specs(lambda _: spec, [cache])
    return made
