"""The assets of a deployment: the tokenizer, and for each source an observed asset and its cache.

The built-in caches come from the table of sources (niels_gpt/data/sources.py): a new row is a new asset. describe.py
writes the rest of their pages.
"""

import warnings
from collections.abc import Iterator
from functools import partial

import dagster as dg

from niels_gpt.data.sources import SOURCES, TREES
from niels_gpt.data.spec import SourceSpec
from niels_gpt.recipes.plan import every_recipe
from niels_gpt.recipes.records import TOKENIZER_KEY
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.recipes.user_sources import user_sources
from pipelines.deployment import Deployment
from pipelines.metadata import LISTING, listing_digest, observation_metadata
from pipelines.resources import BuildConfig
from pipelines.steps import (
    NETWORK_RETRIES,
    cache_asset,
    clear_errors,
    report,
    step,
    waited_for,
    why_from_scratch,
)
from pipelines.versions import HUB_ASKED, ROOT_VERSION, SFT_ROOT, look_at


def assets_of(deployment: Deployment) -> list[dg.AssetsDefinition]:
    """Return the tokenizer, the root of the sft caches, and raw/NAME and the cache of each source."""
    sources = [*SOURCES.values(), *(user.spec for user in user_sources(deployment.settings).values())]
    with warnings.catch_warnings():  # Dagster calls observables beta; docs/decisions/0003 says why they are used
        warnings.simplefilter("ignore", dg.BetaWarning)
        observed = [_sft_root(deployment), *(_observable(deployment, spec) for spec in sources)]
    known = every_recipe(deployment.settings)  # a package that is not installed has none
    caches = [
        cache_asset(deployment, spec.key, spec.family, spec.description)
        for spec in (*sources, *TREES.values())
        if spec.key in known
    ]
    return [*observed, _tokenizer(deployment), *caches]


def _observable(deployment: Deployment, spec: SourceSpec) -> dg.AssetsDefinition:
    """Return raw/NAME of a source."""
    asset = dg.AssetSpec(deployment.key(f"raw/{spec.name}"), group_name=deployment.group("raw"))

    @dg.multi_observable_source_asset(
        specs=[asset], name=deployment.name(f"raw/{spec.name}"), required_resource_keys={deployment.resource}
    )
    def raw(context: dg.AssetExecutionContext) -> Iterator[dg.ObserveResult]:
        run = deployment.run(context)
        with clear_errors(deployment):
            listing = listing_digest(run.settings, spec.key)  # before the files are read: they may change meanwhile
            provenance, warning = look_at(run, spec.key)
        if warning:
            context.log.warning(warning)
        yield dg.ObserveResult(
            asset_key=context.asset_key,
            data_version=dg.DataVersion(provenance["fingerprint"]),
            metadata={
                **observation_metadata(run.settings, spec.key, provenance, warning),
                **({LISTING: listing} if listing else {}),
            },
            tags={HUB_ASKED: "no"} if warning else None,
        )

    observable: dg.AssetsDefinition = raw
    return observable


def _sft_root(deployment: Deployment) -> dg.AssetsDefinition:
    """Return sft/, whose data version is a constant."""
    asset = dg.AssetSpec(
        deployment.key(SFT_ROOT),
        group_name=deployment.group("selection"),  # in the graph of sft it would be a box without a name
        kinds={"root"},  # its only label: the last part of its key is empty
    )

    @dg.multi_observable_source_asset(
        specs=[asset], name=deployment.name(SFT_ROOT), required_resource_keys={deployment.resource}
    )
    def sft_root(context: dg.AssetExecutionContext) -> Iterator[dg.ObserveResult]:
        deployment.run(context)
        yield dg.ObserveResult(asset_key=context.asset_key, data_version=dg.DataVersion(ROOT_VERSION))

    observable: dg.AssetsDefinition = sft_root
    return observable


def _tokenizer(deployment: Deployment) -> dg.AssetsDefinition:
    @dg.asset(
        key=deployment.key(TOKENIZER_KEY),
        group_name=deployment.group("tokenizer"),
        retry_policy=NETWORK_RETRIES,
        op_tags=deployment.op_tags,
        required_resource_keys={deployment.resource},
        description="Tokenizer of all caches: the one in the settings, or else the existing one, or else a new one "
        "trained on the sources.",
    )
    def tokenizer(context: dg.AssetExecutionContext, config: BuildConfig) -> dg.MaterializeResult[None]:
        run = deployment.run(context, config)
        with step(run):
            why = why_from_scratch(run, TOKENIZER_KEY)
            if why:
                context.log.info(f"tokenizer: made again: {why}")
            make = partial(ensure_tokenizer, run.settings, from_scratch=why is not None)
            return report(run, waited_for(run, TOKENIZER_KEY, make))

    made: dg.AssetsDefinition = tokenizer
    return made
