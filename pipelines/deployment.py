"""One deployment: the settings of its caches, and the names of its assets, ops, jobs and resource in Dagster.

Several deployments fit into one code location, because all these names carry the deployment's prefix.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import dagster as dg

from niels_gpt.recipes.records import TOKENIZER_KEY, cache_root
from niels_gpt.settings import Settings
from niels_gpt.storage.remedies import build_command, did_you_mean
from pipelines.resources import RunSettings, WaitConfig

HOURLY = "0 * * * *"
_PREFIX_PART = re.compile(r"[A-Za-z0-9_.-]+")
Context = dg.AssetExecutionContext | dg.AssetCheckExecutionContext


class CacheTranslator:
    """Decides what an asset of the caches is to Dagster. Subclass it, and give it to `niels_definitions`."""

    def get_asset_spec(self, path: str, spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return the spec of an asset, changed as you like: here as it is.

        Key, group, owners, tags, kinds, metadata and description may be others. A dependency may be added, and none be
        removed. A changed key is followed wherever the asset is named: dependencies, checks, jobs, sensors, versions.
        So dependencies are named by the keys before any change.

        path: what the asset is, whatever its key: sft/oasst1, raw/oasst1, tokenizer, sft/, export/NAME.
        spec: as the deployment makes it, complete.
        """
        return spec


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The arguments of `niels_definitions`."""

    settings: Settings
    """The settings of runs, unless a run's config overrides them."""
    prefix: tuple[str, ...] = ()
    """Stands before the path of every asset key."""
    owners: tuple[str, ...] = ()
    """Owners of every asset: team:NAME, or an e-mail address."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """More tags of every asset, beside family and licence."""
    op_tags: Mapping[str, Any] = field(default_factory=dict)
    """Tags of every step that builds, such as dagster-k8s/config."""
    group_prefix: str = ""
    """Stands before the name of every group, such as llm/."""
    automation: frozenset[str] = frozenset()
    """Sensors that are on from the start: see pipelines/automation.py."""
    observe_cron: str = HOURLY
    """When the sensor `observe` observes the sources: a cron expression, in UTC."""
    freshness: dg.FreshnessPolicy | None = None
    """Of every asset that is built; None: Dagster evaluates none."""
    static_partitions: bool = False
    """Whether caches in partitions have Dagster's own partitions: see pipelines/partitions.py."""
    repository: str | None = None
    """Where the files of this version lie, such as https://HOST/ORG/REPOSITORY/blob/TAG, for links to the code."""
    keys: Mapping[str, dg.AssetKey] = field(default_factory=dict)
    """Keys that a translator has changed, by path."""

    def __post_init__(self) -> None:
        """Raise ValueError for a prefix that no asset key and no name in Dagster can have."""
        for part in self.prefix:
            if not _PREFIX_PART.fullmatch(part):
                raise ValueError(
                    f"key_prefix {'/'.join(self.prefix)!r}: found {part!r}, expected parts of letters, digits, _, - "
                    "and . with / between them"
                )

    def key(self, path: str) -> dg.AssetKey:
        """Return the asset key of a path such as sft/oasst1, raw/oasst1, or sft/, the root of the sft caches."""
        return self.keys.get(path) or dg.AssetKey([*self.prefix, *path.split("/")])

    def path_of(self, key: dg.AssetKey) -> str:
        """Return the path of one of our asset keys: the inverse of `key`."""
        changed = (path for path, ours in self.keys.items() if ours == key)
        return next(changed, "/".join(key.path[len(self.prefix) :]))

    def name(self, path: str) -> str:
        """Return the name of an op, a job, a sensor or a resource: - and . become _, as Dagster does it."""
        return "__".join([*self.prefix, *path.split("/")]).replace("-", "_").replace(".", "_")

    def group(self, family: str) -> str:
        """Return the name of the group of a family of assets."""
        return f"{self.group_prefix}{family}"

    @property
    def resource(self) -> str:
        """The name of the resource that holds the settings in a run's config."""
        return self.name("settings")

    def run(self, context: dg.AssetExecutionContext, config: WaitConfig | None = None) -> "Run":
        """Return what a run asks of one of its steps. config: of the step. Raises: as `settings_of`."""
        return Run(context, self, self.settings_of(context), **(config.model_dump() if config else {}))

    def settings_of(self, context: Context) -> Settings:
        """Return the settings of a run. Its config may hold no key that is ignored.

        Dagster refuses an unknown field, but silently ignores an unknown op or resource.
        Raises: dagster.Failure naming the nearest keys, or where the run's caches would lie in another folder than the
            deployment's; as `RunSettings.of_run`. It is not retried.
        """
        self._refuse_ignored_keys(context)
        given: RunSettings = getattr(context.resources, self.resource)
        settings = given.of_run
        asked, ours = cache_root(settings), cache_root(self.settings)
        if asked != ours:
            raise dg.Failure(
                f"{given.place}.source_root: with {settings.source_root} the caches lie in {asked}, and this "
                f"deployment's lie in {ours}: it has no assets of another folder. Set it for the deployment, "
                "in its settings or NIELS_GPT_SOURCE_ROOT, or build there: "
                f"{build_command(settings, TOKENIZER_KEY)}",
                allow_retries=False,
            )
        return settings

    def _refuse_ignored_keys(self, context: Context) -> None:
        try:
            config, job = dict[str, Any](context.run.run_config), context.job_def
        except dg.DagsterError:  # an asset called as a function has no run
            return
        resources, ops = {*job.resource_defs}, {node.name: node.definition.config_field for node in job.nodes}
        with_config = {name for name, field in ops.items() if field and getattr(field.config_type, "fields", True)}
        for part, known, likely in (("ops", {*ops}, with_config), ("resources", resources, resources)):
            for name in sorted(set(config.get(part) or ()) - known):
                near = did_you_mean(name, likely, f"{part}.{{}}".format)
                raise dg.Failure(
                    f"run config: {part}.{name} is read by nobody in this run.{near}\n`dg list defs` lists the assets; "
                    f"an op has __ for /. The settings are in resources.{self.resource}.config",
                    allow_retries=False,
                )


class Run(NamedTuple):
    """A step of a run of a deployment, and what the run asks of it."""

    context: dg.AssetExecutionContext
    deployment: Deployment
    settings: Settings
    force: bool = False
    wait: bool = True


class HomeAssets(NamedTuple):
    """What a package that may be deleted adds to a deployment: see niels_gpt/kinds/homes.py."""

    caches: Sequence[dg.AssetsDefinition] = ()
    """Assets of caches: all have the same page, versions and automation."""
    outputs: Sequence[dg.AssetsDefinition] = ()
    """Other assets, which are complete."""
    checks: Sequence[dg.AssetChecksDefinition] = ()
    """Of the outputs."""
