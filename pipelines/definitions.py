"""All definitions for Dagster. `dagster dev` and `dagster asset materialize` load `defs`.

tokenizer                                          one tokenizer for all caches
pretrain/{fineweb_edu,wikitext,roam,gutenberg}     token shards
sft/{dolly15k,oasst1}                              chats with their loss
trees/oasst1                                       message trees, whose threads fold into one row each
eagle3/draft_vocab                                 the vocabulary of a draft
eagle3/targets                                     a target model's outputs over chats, to train a draft
pretrain/NAME, sft/NAME                            your own text and chats: sources.toml
rollouts/NAME                                      your own recorded rollouts
export/NAME                                        a cache as files of another tool: sources.toml
published/NAME                                     a cache in a bucket: sources.toml
raw/NAME                                           observed: the source text of a cache
sft/                                               observed: the root for `--select sft/*`
"""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import dagster as dg

from niels_gpt.kinds.homes import home_assets
from niels_gpt.recipes.asked import code_versions
from niels_gpt.recipes.plan import every_key
from niels_gpt.recipes.records import cache_root
from niels_gpt.settings import Settings
from niels_gpt.storage.remedies import PROGRAM
from pipelines import assets, partitions
from pipelines.automation import automation_of, condition_of, switched_on
from pipelines.checks import checks_of
from pipelines.deployment import HOURLY, CacheTranslator, Deployment, HomeAssets
from pipelines.describe import code_link, described
from pipelines.resources import settings_from_environment, settings_resource
from pipelines.steps import BUILD_TAG
from pipelines.versions import PARTITIONS


def niels_definitions(
    key_prefix: str | Sequence[str] | None = None,
    settings: Settings | None = None,
    *,
    owners: Sequence[str] = (),
    tags: Mapping[str, str] | None = None,
    op_tags: Mapping[str, Any] | None = None,
    group_prefix: str = "",
    automation: bool | Collection[str] = False,
    observe_cron: str = HOURLY,
    freshness: dg.FreshnessPolicy | None = None,
    static_partitions: bool = False,
    repository: str | None = None,
    translator: CacheTranslator | None = None,
) -> dg.Definitions:
    """Return assets, checks, jobs and the resource `settings`, for `dg.Definitions.merge` in any deployment.

    Results with different prefixes may be merged into one code location.

    key_prefix: stands before every asset key: sft/oasst1 becomes PREFIX/sft/oasst1; "team/llm" has two parts. Ops, jobs
        and the resource carry it too, as team__llm__settings.
    settings: for all runs, unless a run's config overrides them; default: the variables NIELS_GPT_<FIELD>. New
        user-defined sources appear when the definitions are reloaded.
    owners, tags: of every asset, in Dagster's form. op_tags: of every step that builds.
    group_prefix: stands before the name of every group.
    automation: sensors that are on from the start; True: all. observe_cron: when `observe` does it, in UTC.
    freshness: of the tokenizer and the caches; None: Dagster evaluates none.
    static_partitions: with settings.partitions above 1, Dagster's own partitions in place of a step for each.
    repository: where the files of this version are, as https://HOST/ORG/REPOSITORY/blob/TAG, for links to the code.
    translator: changes keys, groups, owners, tags and dependencies of single assets.
    """
    deployment = Deployment(
        settings=settings_from_environment() if settings is None else settings,
        prefix=tuple(key_prefix.split("/") if isinstance(key_prefix, str) else key_prefix or ()),
        owners=tuple(owners),
        tags=dict(tags or {}),
        op_tags=dict(op_tags or {}),
        group_prefix=group_prefix,
        automation=switched_on(automation),
        observe_cron=observe_cron,
        freshness=freshness,
        static_partitions=static_partitions,
        repository=repository,
    )
    made, homes = _made(deployment)
    specs = _translated(deployment, made, translator or CacheTranslator())
    if changed := {path: spec.key for path, spec in specs.items() if spec.key != deployment.key(path)}:
        deployment = replace(deployment, keys=changed)
        made, homes = _made(deployment)  # again, for the keys in dependencies and checks
    mapped = dg.map_asset_specs(lambda spec: specs[deployment.path_of(spec.key)], made)
    ours = dg.Definitions(
        assets=partitions.in_partitions(deployment, mapped),
        asset_checks=[
            *(checks_of(deployment, path) for path in every_key(deployment.settings)),
            *(check for home in homes for check in home.checks),
        ],
        jobs=partitions.jobs_of(deployment),
        resources={deployment.resource: settings_resource(deployment.settings, deployment.resource)},
    )
    return dg.Definitions.merge(ours, automation_of(deployment))


def _made(deployment: Deployment) -> tuple[list[dg.AssetsDefinition], list[HomeAssets]]:
    """Return all assets with their own part of their specs, and the homes that some are of."""
    homes: list[HomeAssets] = [assets_of(deployment) for assets_of in home_assets()]
    of_homes = [asset for home in homes for asset in (*home.caches, *home.outputs)]
    return [*assets.assets_of(deployment), *of_homes, *partitions.assets_of(deployment)], homes


def _translated(
    deployment: Deployment, made: Iterable[dg.AssetsDefinition], translator: CacheTranslator
) -> dict[str, dg.AssetSpec]:
    """Return the complete spec of every asset by its path, as the translator has it.

    Raises: ValueError where it leaves out a dependency, or changes a code version: both decide what is stale; where it
        gives two assets one key.
    """
    versions, found, moved = code_versions(deployment.settings), dict[str, dg.AssetSpec](), dict[Any, dg.AssetKey]()
    for spec in (spec for asset in made for spec in asset.specs):
        path = deployment.path_of(spec.key)
        if spec.code_version is None:  # exports and partitions have theirs, and are complete
            spec = described(deployment, spec).replace_attributes(
                code_version=versions.get(path),
                automation_condition=condition_of(deployment, path),
                freshness_policy=deployment.freshness if path in versions else None,
            )
        spec = spec.merge_attributes(metadata=code_link(deployment, path.removeprefix(PARTITIONS)))
        found[path] = translator.get_asset_spec(path, spec)
        moved[spec.key] = found[path].key
        missing = {dep.asset_key for dep in spec.deps} - {dep.asset_key for dep in found[path].deps}
        if missing or found[path].code_version != spec.code_version:
            what = ", ".join(sorted(key.to_user_string() for key in missing)) or "its code version"
            raise ValueError(
                f"translator: {path} has lost {what}; expected every dependency, and the same code version"
            )
    paths = dict[dg.AssetKey, str]()
    for path, spec in found.items():
        if (other := paths.setdefault(spec.key, path)) != path:
            raise ValueError(f"translator: {other} and {path} have one key, {spec.key.to_user_string()}; expected two")
        deps = [
            dg.AssetDep(moved.get(dep.asset_key, dep.asset_key), partition_mapping=dep.partition_mapping)
            for dep in spec.deps
        ]
        found[path] = spec.replace_attributes(deps=deps)
    return found


PRELOADED = (
    "pipelines.definitions",
    "dagster._core.storage.sqlite_storage",  # SQLAlchemy and alembic, whatever the storage is
    "torch",
)
"""What a run imports once, in the server that its steps are forked from: docs/decisions/0028. None of them may start a
thread, as pyarrow does, or CUDA. One that is not installed is passed over."""


def _processes(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("in_process"):
        return {"in_process": {}}
    return {
        "multiprocess": {
            "max_concurrent": config.get("max_concurrent", 0),
            "start_method": {"forkserver": {"preload_modules": [*PRELOADED]}},
            "tag_concurrency_limits": [{"key": BUILD_TAG, "value": "true", "limit": 1}],
        }
    }


_STEPS: Any = dg.multi_or_in_process_executor


class _ThenSaysWhere(dg.Executor):
    """Runs the steps as another executor does, and logs at the end where the caches are."""

    def __init__(self, inner: dg.Executor) -> None:
        self._inner = inner

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[dg.DagsterEvent]:
        """Yield the events of the steps."""
        yield from self._inner.execute(plan_context, execution_plan)
        where = cache_root(settings_from_environment())
        plan_context.log.info(f"caches: {where}; {PROGRAM} list {shlex.quote(str(where))}")

    @property
    def retries(self) -> Any:
        """Whether a step may be retried."""
        return self._inner.retries


def _then_says_where(context: dg.InitExecutorContext) -> dg.Executor:
    return _ThenSaysWhere(_STEPS.executor_creation_fn(context))


EXECUTOR = dg.ExecutorDefinition(
    _STEPS.name, _STEPS.config_schema, _STEPS.get_requirements, _then_says_where
).configured(
    _processes,
    config_schema={
        "in_process": dg.Field(
            bool, is_required=False, description="all steps one after the other in the process of the run"
        ),
        "max_concurrent": dg.Field(
            int, is_required=False, description="steps at a time, one process each; 0: one a core"
        ),
    },  # without defaults, so the Launchpad opens without them
)
"""A step is a process. Those that would only wait for their turn at a pretrain build are not started yet."""

defs = dg.Definitions.merge(niels_definitions(), dg.Definitions(executor=EXECUTOR))
