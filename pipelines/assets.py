"""The assets: one factory for the observables of the sources, one for their caches, and the tokenizer.

The built-in caches come from the table of sources (niels_gpt/data/sources.py), so a new row is a new asset.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import dagster as dg

from niels_gpt.data.sources import SOURCES, SourceSpec
from niels_gpt.recipes.eagle3.asset import build_targets
from niels_gpt.recipes.eagle3.draft_vocab import build_draft_vocab, committed_content
from niels_gpt.recipes.eagle3.draft_vocab import settings_fingerprint as vocab_fingerprint
from niels_gpt.recipes.eagle3.of_settings import KEY as EAGLE3_KEY
from niels_gpt.recipes.eagle3.of_settings import SMALL_TARGET, VOCAB_KEY, raw_source
from niels_gpt.recipes.plan import built_at, needs_no_tokenizer, observe
from niels_gpt.recipes.rollouts.caches import build_rollout_cache
from niels_gpt.recipes.rollouts.trees import TREES
from niels_gpt.recipes.run_recipe import TOKENIZER_KEY
from niels_gpt.recipes.token_caches import build_token_cache
from niels_gpt.recipes.tokenizer import NoSentinels, ensure_tokenizer
from niels_gpt.settings import Settings
from pipelines.metadata import draft_vocab_result, targets_result
from pipelines.resources import SettingsResource
from pipelines.steps import (
    BUILD_POOL,
    BUILD_TAG,
    CODE_VERSION,
    DATA_VERSION,
    NETWORK_RETRIES,
    clear_errors,
    leave_out,
    newer_observation,
    observed_of_cache,
    progress_log,
    raw_key,
    recorded_tags,
    report,
    report_tokenizer,
    target_log,
    turn,
)

SFT_ROOT = dg.AssetKey(["sft", ""])
_BY_FAMILY: dict[str, dict[str, Any]] = {
    "pretrain": {"pool": BUILD_POOL, "op_tags": {BUILD_TAG: "true"}},
    "sft": {},
    "trees": {},
    "rollouts": {},
}
_READERS = {
    "pretrain": "niels_gpt.cache.PretrainTokenStreamDataset",
    "sft": "niels_gpt.cache.SFTExampleDataset",
    "trees": "niels_gpt.prefix_tree.rollouts.reader.RolloutDataset",
    "rollouts": "niels_gpt.prefix_tree.rollouts.reader.RolloutDataset",
}


def _observable(spec: SourceSpec, prefix: Sequence[str] = ()) -> dg.AssetsDefinition:
    """Return raw/NAME of a source."""
    asset = dg.AssetSpec(
        raw_key(spec.name, prefix),
        group_name="raw",
        description=f"The text that {spec.key} is made of. Observing it takes the fingerprint of its files or, of a "
        "source of the project with source_root=hub, asks the hub for the newest revision; where the hub cannot be "
        "reached, the revision that the cache was built from counts, with a warning. A new fingerprint makes the cache "
        "stale.",
    )

    @dg.multi_observable_source_asset(specs=[asset], name="__".join([*prefix, "raw", spec.name]))
    def raw(context: dg.AssetExecutionContext, settings: SettingsResource) -> Iterator[dg.ObserveResult]:
        core = settings.of_run(context)
        with clear_errors():
            provenance, warning = observe(core, spec.key)
        if warning:
            context.log.warning(warning)
        metadata = {name: value for name, value in provenance.items() if value is not None}
        yield dg.ObserveResult(
            asset_key=context.asset_key,
            data_version=dg.DataVersion(provenance["fingerprint"]),
            metadata={**metadata, "warning": warning or "none"},
        )

    observable: dg.AssetsDefinition = raw
    return observable


def _cache(spec: SourceSpec, prefix: Sequence[str] = ()) -> dg.AssetsDefinition:
    """Return FAMILY/NAME, the token or rollout cache of a source."""
    root = [dg.AssetKey([*prefix, *SFT_ROOT.path])] if spec.family == "sft" else []
    tokenizer = [] if needs_no_tokenizer(spec.key) else [dg.AssetKey([*prefix, TOKENIZER_KEY])]

    @dg.asset(
        key=[*prefix, spec.family, spec.name],
        deps=[*tokenizer, raw_key(spec.name, prefix), *root],
        description=f"{spec.description}\n\nRead it with {_READERS[spec.family]}.",
        group_name=spec.family,
        kinds={"numpy"},
        retry_policy=NETWORK_RETRIES,
        output_required=False,  # a tokenizer without sentinels builds no chats: leave_out
        **_BY_FAMILY[spec.family],
    )
    def cache(context: dg.AssetExecutionContext, settings: SettingsResource) -> Iterator[dg.MaterializeResult[None]]:
        # Dagster's staleness is advisory: the recipe decides whether there is anything to do.
        core, (*before, family, name) = settings.of_run(context), context.asset_key.path
        with clear_errors(), turn(core) if family == "pretrain" else nullcontext():
            try:
                how: dict[str, Any] = {"observed": observed_of_cache(context, core), "progress": progress_log(context)}
                if family in ("trees", "rollouts"):
                    outcome = build_rollout_cache(core, f"{family}/{name}", **how)
                else:
                    outcome = build_token_cache(core, name, **how)
            except NoSentinels as error:
                leave_out(context, error)
                return
            result = report(context, outcome)
            if tokenizer:
                report_tokenizer(context, dg.AssetKey([*before, TOKENIZER_KEY]), core)
        yield result

    asset: dg.AssetsDefinition = cache
    return asset


with warnings.catch_warnings():  # Dagster calls observables beta; docs/decisions/0003 says why they are used
    warnings.simplefilter("ignore", dg.BetaWarning)

    raw_sources = [_observable(spec) for spec in SOURCES.values()]

    @dg.multi_observable_source_asset(
        specs=[
            dg.AssetSpec(
                SFT_ROOT,
                group_name="sft",
                kinds={"root"},  # its only label in the graph: the last part of its key is empty
                description="The place above the sft caches. It holds nothing and never changes; it is there so that "
                "`dagster asset materialize --select sft/*` selects them.",
            )
        ],
        name="sft__",
    )
    def sft_root(context: dg.AssetExecutionContext, settings: SettingsResource) -> Iterator[dg.ObserveResult]:
        """Observe the root of the sft caches, whose data version is a constant."""
        settings.of_run(context)
        yield dg.ObserveResult(asset_key=context.asset_key, data_version=dg.DataVersion("root"))


@dg.asset(group_name="tokenizer", kinds={"tokenizer"}, retry_policy=NETWORK_RETRIES)
def tokenizer(context: dg.AssetExecutionContext, settings: SettingsResource) -> dg.MaterializeResult[None]:
    """Tokenizer of all caches: the one that the settings name, else what is there, else one trained on the sources."""
    core = settings.of_run(context)
    with clear_errors():
        return report(context, ensure_tokenizer(core))


CACHES = [_cache(spec) for spec in (*SOURCES.values(), *TREES.values())]


def user_assets(specs: Iterable[SourceSpec], prefix: Sequence[str]) -> list[dg.AssetsDefinition]:
    """Return raw/NAME and the cache of each user-defined source."""
    specs = list(specs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        observed = [_observable(spec, prefix) for spec in specs]
    return [*observed, *(_cache(spec, prefix) for spec in specs)]


def eagle3_draft_vocab(chosen: Settings, prefix: Sequence[str]) -> dg.AssetsDefinition:
    """Return eagle3/draft_vocab. A factory for the same reason as `eagle3_targets`."""

    @dg.asset(
        key=[*prefix, *VOCAB_KEY.split("/")],
        deps=_of_chats(chosen, prefix),
        group_name="eagle3",
        retry_policy=NETWORK_RETRIES,
        output_required=False,  # as of chats
        description=f"The tokens that an EAGLE-3 draft knows: the target's ids that {chosen.eagle3_source} supervises "
        "most often, counted without the target's weights. eagle3/targets takes them from here; another size builds "
        "this again, and of a native eagle3/targets the manifest alone.\n\n"
        "Read it with niels_gpt.eagle3.vocab.load_token_mapping.",
    )
    def draft_vocab(
        context: dg.AssetExecutionContext, settings: SettingsResource
    ) -> Iterator[dg.MaterializeResult[None]]:
        core = settings.of_run(context)
        with clear_errors():
            try:
                outcome = build_draft_vocab(core, observed=_newer_chats(context, core, prefix, VOCAB_KEY))
            except NoSentinels as error:
                leave_out(context, error)
                return
            if core.eagle3_target is None:
                report_tokenizer(context, dg.AssetKey([*prefix, TOKENIZER_KEY]), core)
            result = report(context, outcome, draft_vocab_result)
        yield result

    made: dg.AssetsDefinition = draft_vocab
    return made


def eagle3_targets(chosen: Settings, prefix: Sequence[str]) -> dg.AssetsDefinition:
    """Return eagle3/targets. A factory, because the settings decide its chats and its target, and so its upstream."""

    @dg.asset(
        key=[*prefix, *EAGLE3_KEY.split("/")],
        deps=[*_of_chats(chosen, prefix), dg.AssetKey([*prefix, *VOCAB_KEY.split("/")])],
        group_name="eagle3",
        kinds={"torch", "safetensors"},
        retry_policy=NETWORK_RETRIES,
        output_required=False,  # as of chats
        description=f"EAGLE-3 cache of {chosen.eagle3_source} by the target {chosen.eagle3_target or SMALL_TARGET}: "
        "for each token hidden states of some layers, and the distribution of what comes next (in the native form, the "
        "hidden state that it follows from), for a draft to be trained without the target. Made from the chats "
        "themselves by the target's own tokenizer and template; needs the extra eagle3."
        "\n\nRead it with niels_gpt.eagle3.cache.CachedEagle3Dataset.",
    )
    def targets(context: dg.AssetExecutionContext, settings: SettingsResource) -> Iterator[dg.MaterializeResult[None]]:
        core = settings.of_run(context)
        with clear_errors():
            try:
                observed = _newer_chats(context, core, prefix, EAGLE3_KEY)
                outcome = build_targets(core, observed=observed, progress=target_log(context))
            except NoSentinels as error:
                leave_out(context, error)
                return
            if core.eagle3_target is None:
                report_tokenizer(context, dg.AssetKey([*prefix, TOKENIZER_KEY]), core)
            _report_draft_vocab(context, dg.AssetKey([*prefix, *VOCAB_KEY.split("/")]), core)
            result = report(context, outcome, targets_result)
        yield result

    made: dg.AssetsDefinition = targets
    return made


def _of_chats(chosen: Settings, prefix: Sequence[str]) -> list[dg.AssetKey]:
    """Return what the chats of eagle3 and their ids depend on; files of chats or rows are not observed."""
    source = raw_source(chosen)
    tokenizer = [dg.AssetKey([*prefix, TOKENIZER_KEY])] if chosen.eagle3_target is None else []
    return [*([raw_key(source, prefix)] if source else []), *tokenizer]


def _newer_chats(context: dg.AssetExecutionContext, settings: Settings, prefix: Sequence[str], key: str) -> str | None:
    """Return the newest observed fingerprint of the chats if the observation is newer than the cache, else None."""
    source = raw_source(settings)
    return None if source is None else newer_observation(context, raw_key(source, prefix), built_at(settings, key))


def _report_draft_vocab(context: dg.AssetExecutionContext, key: dg.AssetKey, settings: Settings) -> None:
    """Record it in Dagster if the step of eagle3/targets has replaced the draft's vocabulary."""
    tags = recorded_tags(context, key)
    if not tags or tags.get(DATA_VERSION) == committed_content(settings):
        return
    outcome = build_draft_vocab(settings)
    now = {DATA_VERSION: str(outcome.meta["content_sha256"]), CODE_VERSION: vocab_fingerprint(settings)}
    kept = {name: value for name, value in tags.items() if name.startswith("dagster/input_")}  # as it read them
    metadata = draft_vocab_result(outcome).metadata
    context.log_event(dg.AssetMaterialization(key, metadata=metadata, tags={**kept, **now}))
