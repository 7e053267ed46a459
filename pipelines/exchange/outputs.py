"""The assets export/NAME, a cache as files of another tool, and published/NAME, a cache in a bucket, with their checks.

There is one for each line of sources.toml.

Their data version is the cache's content_sha256, so they are stale when the cache is another one.
"""

from dataclasses import asdict
from hashlib import sha256
from typing import Any

import dagster as dg

from niels_gpt.buckets.bucket import scheme_of
from niels_gpt.cache.meta import find_meta
from niels_gpt.exchange.output import MANIFEST_NAME
from niels_gpt.recipes.exchange.outputs import (
    PUBLISHED,
    Delivered,
    Line,
    deliver,
    lines_of,
    manifest_of,
    missing_at,
    missing_of,
)
from niels_gpt.recipes.plan import every_key
from niels_gpt.recipes.records import cache_root
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, canonical_json
from pipelines.deployment import Deployment, HomeAssets
from pipelines.resources import WaitConfig
from pipelines.steps import progress_log, step
from pipelines.versions import INPUT_VERSION

CHECK = "is_there"
_DIGITS = 12


def assets_of(deployment: Deployment) -> HomeAssets:
    """Return an asset and a check for each line of sources.toml. Raises: as `lines_of`."""
    lines = lines_of(deployment.settings).values()
    outputs, checks = [_asset(deployment, line) for line in lines], [_check(deployment, line) for line in lines]
    return HomeAssets(outputs=outputs, checks=checks)


def _asset(deployment: Deployment, line: Line) -> dg.AssetsDefinition:
    is_ours = line.cache in every_key(deployment.settings)  # an imported cache is no asset
    cache = deployment.key(line.cache)
    facts = {name: str(value) for name, value in asdict(line).items() if value is not None}

    @dg.asset(
        key=deployment.key(line.path),
        deps=[cache] if is_ours else [],
        description=f"The cache {line.cache}{f' as files of {line.to}' if line.to else ''}, in {line.place}.",
        group_name=deployment.group(line.kind),
        owners=list(deployment.owners),
        tags={"family": line.kind, **deployment.tags},
        kinds={scheme_of(line.place)},
        required_resource_keys={deployment.resource},
        op_tags=deployment.op_tags,
        code_version=sha256(canonical_json(facts)).hexdigest()[:_DIGITS],
        metadata={"dagster/uri": line.place},
    )
    def output(context: dg.AssetExecutionContext, config: WaitConfig) -> dg.MaterializeResult[None]:
        run = deployment.run(context, config)
        with step(run):
            progress = progress_log(run, "files", "bytes")
            done = deliver(run.settings, line, wait=run.wait, progress=progress)
        version = done.content_sha256
        tags = {f"{INPUT_VERSION}/{cache.to_user_string()}": version} if is_ours else None
        return dg.MaterializeResult(metadata=_metadata(done), data_version=dg.DataVersion(version), tags=tags)

    made: dg.AssetsDefinition = output
    return made


def _metadata(done: Delivered) -> dict[str, dg.MetadataValue[Any]]:
    """Return what the manifest says: numbers as such, which Dagster plots, and the rest as text."""
    value, facts = dg.MetadataValue, done.facts
    found: dict[str, dg.MetadataValue[Any]] = {
        "run/state": value.text("reused: what is there is of this cache" if done.reused else "built"),
        "cache": value.text(done.line.cache),
        "content_sha256": value.text(done.content_sha256),
        "place": value.path(done.line.place) if scheme_of(done.line.place) == "file" else value.text(done.line.place),
    }
    for name, fact in facts.items():
        found[name] = value.int(fact) if isinstance(fact, int) else value.text(str(fact) if fact else "nothing")
    if "bytes" in facts:
        found["dagster/size_bytes"] = value.int(facts["bytes"])
    return found


def _check(deployment: Deployment, line: Line) -> dg.AssetChecksDefinition:
    """Return the check of a line: all files that its manifest or meta.json names are there, and current."""
    key, manifest = deployment.key(line.path), META_NAME if line.kind == PUBLISHED else MANIFEST_NAME

    @dg.asset_check(
        name=CHECK,
        asset=key,
        description=f"Every file of its {manifest} is there with its size, and the cache is still this version.",
        required_resource_keys={deployment.resource},
    )
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        problems = _problems(deployment.settings_of(context), line)
        return dg.AssetCheckResult(
            passed=not problems,
            severity=dg.AssetCheckSeverity.WARN,
            description="; ".join(problems[:3]) or "Every file is there.",
            metadata={"problems": len(problems)},
        )

    made: dg.AssetChecksDefinition = check
    return made


def _problems(settings: Settings, line: Line) -> list[str]:
    cache = cache_root(settings) / line.cache
    try:
        if line.folder is None:
            return missing_at(cache, line)
        manifest, meta = manifest_of(line.folder), find_meta(cache)
        if manifest is None:
            return [f"{line.folder}: no export there"]
        is_same = meta is not None and meta["content_sha256"] == manifest["cache"]["content_sha256"]
        stale = [] if is_same else [f"{line.folder}: was made from another version than {line.cache} is now"]
        return [*missing_of(line.folder, manifest), *stale]
    except (CacheError, OSError, LookupError, TypeError) as error:
        return [str(error)]
