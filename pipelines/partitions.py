"""A cache that is built in partitions: a graph of steps, which the deployment's executor distributes and retries.

    plan_partitions -> build_partition[p00000], [p00001], ... -> seal_cache

The steps share the cache folder and pass no values to each other. So no I/O manager is used.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import dagster as dg

from niels_gpt.kinds.kind import builds_alone
from niels_gpt.recipes.family import family_named
from niels_gpt.recipes.home_recipes import units_of
from niels_gpt.recipes.plan import every_recipe
from niels_gpt.recipes.records import TOKENIZER_KEY, Outcome
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.recipes.tokenizer import with_installed
from niels_gpt.recipes.units import NoPlan
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import LeftOut
from pipelines.deployment import Deployment
from pipelines.resources import BuildConfig, WaitConfig
from pipelines.steps import (
    BUILD_POOL,
    BUILD_TAG,
    NETWORK_RETRIES,
    leave_out,
    progress_log,
    report,
    report_made_too,
    start_over,
    step,
    turn,
    waited_for,
)
from pipelines.versions import is_graph, newer_observation, upstream_of

PARTITION_POOL = "niels_gpt/partition"
"""Pool of the steps that build partitions. Without a limit in the deployment, all partitions run at once."""


def in_partitions(deployment: Deployment, made: Iterable[dg.AssetsDefinition]) -> list[dg.AssetsDefinition]:
    """Return the assets; those that are built in partitions become graphs with the same specs."""
    plans: dict[frozenset[str], dg.OpDefinition] = {}
    steps = [make(deployment) for make in (_build_partition, _seal_cache)]
    return [
        _as_graph(deployment, asset, plans, *steps)
        if is_graph(deployment.settings, deployment.path_of(asset.key))
        else asset
        for asset in made
    ]


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
    upstream = {names.get(key) or key.to_python_identifier(): key for key in (dep.asset_key for dep in spec.deps)}
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


def is_in_partitions(settings: Settings, path: str) -> bool:
    """Whether a run with these settings builds a cache in partitions."""
    if settings.partitions == 1 or family_named(path) is None:  # only caches of a family are made of a source
        return settings.partitions > 1
    return resolve_source(settings, path).is_partitioned(settings)


@contextmanager
def _in_a_new_run(path: str) -> Iterator[None]:
    """Add the remedy to a step's error if the plan of its run no longer fits the text or the settings.

    A re-execution repeats no successful step, so it cannot make a new plan.
    """
    try:
        yield
    except NoPlan as error:
        remedy = (
            f"Materialize {path} in a new run, which plans its partitions again; a re-execution of this run does not"
        )
        raise NoPlan(error.path, error.found, error.expected, remedy, code=error.code) from error


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
        asked, path = deployment.run(context, config), deployment.path_of(context.asset_key)
        core = with_installed(asked.settings)
        unfinished: list[int] = []
        with step(context, deployment), suppress(LeftOut):  # the last step says so
            start_over(context, deployment, asked, path)
            if is_in_partitions(core, path):
                units = units_of(core, path, observed=newer_observation(context, deployment, core, path))
                unfinished = units.unfinished()
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
        asked, path = deployment.run(context, config), deployment.path_of(context.asset_key)
        number = int(str(context.op_execution_context.get_mapping_key()).removeprefix("p"))
        with step(context, deployment), _in_a_new_run(path):
            units = units_of(with_installed(asked.settings), path, fixes=False)
            made = units.build(number, wait=asked.wait, progress=progress_log(context, units.counted))
        done = "was finished already" if made.reused else f"built in {made.seconds:.1f} s"
        context.log.info(f"{path}: partition {number} of {made.partition.total} {done}")
        counts = made.meta["totals"] if "partition" in made.meta else {}
        counts = {key: int(counts[key]) for key in ("train_tokens", "val_tokens") if key in counts}
        yield dg.Output(None, metadata={"partition": number, **counts, "seconds": round(made.seconds, 3)})

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
        asked, path = deployment.run(context, config), deployment.path_of(context.asset_key)
        core = with_installed(asked.settings)

        def build() -> Outcome:
            if is_in_partitions(core, path):
                # Of the newest plan, as its partitions: an observation may have been made since the plan was fixed.
                return units_of(core, path, fixes=False).seal(progress=progress_log(context, "files", "bytes"))
            observed = newer_observation(context, deployment, core, path)
            return every_recipe(core)[path](core, observed=observed, progress=progress_log(context))

        # The turn inside of `step`: its error E503 is no reason to try again.
        with step(context, deployment), turn(asked, path) if builds_alone(path) else nullcontext(), _in_a_new_run(path):
            try:
                result = report(context, deployment, asked.settings, waited_for(asked, path, build))
            except LeftOut as error:
                leave_out(context, deployment, error)
                return
            report_made_too(context, deployment, core, path)
        yield _as_output(result)

    made: dg.OpDefinition = seal_cache
    return made


def _as_output(result: dg.MaterializeResult[None]) -> dg.Output[None]:
    """Return a materialization as the output of a step in a graph."""
    with warnings.catch_warnings():  # Dagster calls the data version of an output beta, and of an asset not
        warnings.simplefilter("ignore", dg.BetaWarning)
        return dg.Output(None, metadata=result.metadata, data_version=result.data_version, tags=result.tags)
