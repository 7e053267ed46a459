"""A pretrain cache that is built in partitions, as a graph of steps that the deployment's executor spreads and retries.

    plan_partitions -> build_partition[p00000], [p00001], ... -> seal_cache

The steps pass nothing to each other but their order: what they share is the cache folder. So no I/O manager is used.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import dagster as dg

from niels_gpt.builders.partitions.receipts import partition_states
from niels_gpt.data.sources import SOURCES
from niels_gpt.recipes.partitions import run
from niels_gpt.recipes.partitions.documents import is_partitioned
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.recipes.run_recipe import TOKENIZER_KEY
from niels_gpt.recipes.token_caches import build_token_cache
from niels_gpt.settings import Settings
from pipelines.resources import SettingsResource
from pipelines.steps import (
    BUILD_POOL,
    BUILD_TAG,
    NETWORK_RETRIES,
    clear_errors,
    observed_of_cache,
    progress_log,
    raw_key,
    report,
    report_tokenizer,
    turn,
)

PARTITION_POOL = "niels_gpt/partition"
"""Of the steps that build partitions. It has no limit where the deployment gives it none: partitions run at once."""


def is_graph(settings: Settings, path: str) -> bool:
    """Whether the asset of a cache is a graph in a deployment with these settings. path: FAMILY/NAME, or tokenizer.

    No file of a source is looked for, so that definitions load at once.
    """
    family, _, name = path.partition("/")
    if settings.partitions == 1 or family != "pretrain":
        return False
    if name not in SOURCES or SOURCES[name].from_hub is None:
        return True
    try:
        return is_partitioned(settings, resolve_source(settings, name))
    except (OSError, ValueError):  # the step says what is wrong
        return True


def as_graph(plain: dg.AssetsDefinition) -> dg.AssetsDefinition:
    """Return the asset pretrain/NAME with the spec of the plain one, as a graph of steps."""
    spec = plain.get_asset_spec()
    *prefix, _, name = spec.key.path
    upstream = {"tokenizer": dg.AssetKey([*prefix, TOKENIZER_KEY]), "raw": raw_key(name, prefix)}

    @dg.graph_asset(
        key=spec.key,
        ins={each: dg.AssetIn(key, dagster_type=dg.Nothing) for each, key in upstream.items()},
        description=spec.description,
        group_name=spec.group_name,
        kinds=spec.kinds,
    )
    def cache(tokenizer: Any, raw: Any) -> Any:
        planned = plan_partitions(tokenizer=tokenizer, raw=raw)
        return seal_cache(built=planned.map(build_partition).collect())

    asset: dg.AssetsDefinition = cache
    return asset


@dg.op(
    # An input each: with its blocking checks an upstream asset is several steps already, and Dagster nests no lists.
    ins={"tokenizer": dg.In(dg.Nothing), "raw": dg.In(dg.Nothing)},
    out=dg.DynamicOut(dg.Nothing),
    retry_policy=NETWORK_RETRIES,
)
def plan_partitions(context: dg.AssetExecutionContext, settings: SettingsResource) -> Iterator[dg.DynamicOutput[None]]:
    """Fix the plan of the cache, and start a step for each partition that is not finished."""
    core, name = settings.of_run(context), context.asset_key.path[-1]
    unfinished: list[int] = []
    with clear_errors():
        if is_partitioned(core, resolve_source(core, name)):
            plan = run.prepare(core, name, observed=observed_of_cache(context, core))
            states = [each for each in partition_states(plan) if each.number >= 0] if plan else []
            unfinished = [each.number for each in states if each.state != "finished"]
            found = f"{len(states) - len(unfinished)} finished, {len(unfinished)} to build" if plan else "up to date"
            context.log.info(f"pretrain/{name}: {core.partitions} partitions: {found}")
    for number in unfinished:
        yield dg.DynamicOutput(None, mapping_key=f"p{number:05d}")


@dg.op(
    ins={"planned": dg.In(dg.Nothing)},
    out=dg.Out(dg.Nothing),
    retry_policy=NETWORK_RETRIES,
    pool=PARTITION_POOL,
)
def build_partition(context: dg.AssetExecutionContext, settings: SettingsResource) -> Iterator[dg.Output[None]]:
    """Build one partition. It waits where another run builds the same one, and does nothing where it is finished."""
    core, name = settings.of_run(context), context.asset_key.path[-1]
    number = int(str(context.op_execution_context.get_mapping_key()).removeprefix("p"))
    with clear_errors():
        made = run.build_partition(core, name, number, wait=True, progress=progress_log(context))
    done = "was finished already" if made.reused else f"built in {made.seconds:.1f} s"
    context.log.info(f"pretrain/{name}: partition {number} of {made.partition.total} {done}")
    counts = {} if "partitions" in made.meta else {key: int(made.meta[key]) for key in ("train_tokens", "val_tokens")}
    yield dg.Output(None, metadata={"partition": number, **counts, "seconds": round(made.seconds, 3)})


@dg.op(
    ins={"built": dg.In(dg.Nothing)},
    out=dg.Out(dg.Nothing),
    retry_policy=NETWORK_RETRIES,
    pool=BUILD_POOL,
    tags={BUILD_TAG: "true"},
)
def seal_cache(context: dg.AssetExecutionContext, settings: SettingsResource) -> Iterator[dg.Output[None]]:
    """Make one cache of all partitions; what the run's settings do not partition is built here, whole."""
    core, (*prefix, _, name) = settings.of_run(context), context.asset_key.path
    with clear_errors(), turn(core):
        if is_partitioned(core, resolve_source(core, name)):
            # Of the newest plan, as its partitions: an observation may have been made since the plan was fixed.
            outcome = run.seal_cache(core, name, progress=progress_log(context, "files", "bytes"))
        else:
            observed = observed_of_cache(context, core)
            outcome = build_token_cache(core, name, observed=observed, progress=progress_log(context))
        result = report(context, outcome)
        report_tokenizer(context, dg.AssetKey([*prefix, TOKENIZER_KEY]), core)
    with warnings.catch_warnings():  # Dagster calls the data version of an output beta: that of an asset is the same
        warnings.simplefilter("ignore", dg.BetaWarning)
        sealed: dg.Output[None] = dg.Output(None, metadata=result.metadata, data_version=result.data_version)
    yield sealed
