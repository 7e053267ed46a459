"""The assets eagle3/draft_vocab and eagle3/targets, whose settings decide what lies upstream of them."""

from collections.abc import Callable, Iterator

import dagster as dg

from niels_gpt.recipes.eagle3.assets import build_draft_vocab, build_targets
from niels_gpt.recipes.eagle3.request import KEY as TARGETS_KEY
from niels_gpt.recipes.eagle3.request import SMALL_TARGET, VOCAB_KEY
from niels_gpt.recipes.records import Outcome
from niels_gpt.settings import Settings
from pipelines.deployment import Deployment, HomeAssets
from pipelines.steps import NETWORK_RETRIES, materialized, progress_log
from pipelines.versions import newer_observation, report_found, upstream_of


def assets_of(deployment: Deployment) -> HomeAssets:
    """Return both assets."""
    return HomeAssets([draft_vocab_of(deployment), targets_of(deployment)])


def draft_vocab_of(deployment: Deployment) -> dg.AssetsDefinition:
    """Return eagle3/draft_vocab."""

    def build(context: dg.AssetExecutionContext, settings: Settings) -> Outcome:
        return build_draft_vocab(settings, observed=newer_observation(context, deployment, settings, VOCAB_KEY))

    text = (
        f"The tokens that an EAGLE-3 draft knows: the target's ids that {deployment.settings.eagle3_source} supervises "
        "most often, counted without the target's weights. eagle3/targets takes them from here; another size builds "
        "this again, and of a native eagle3/targets the manifest alone."
    )
    return _asset(deployment, VOCAB_KEY, text, build)


def targets_of(deployment: Deployment) -> dg.AssetsDefinition:
    """Return eagle3/targets."""
    chosen = deployment.settings

    def build(context: dg.AssetExecutionContext, settings: Settings) -> Outcome:
        observed = newer_observation(context, deployment, settings, TARGETS_KEY)
        outcome = build_targets(settings, observed=observed, progress=progress_log(context, "bytes"))
        report_found(context, deployment, settings, build_draft_vocab(settings))
        return outcome

    text = (
        f"EAGLE-3 cache of {chosen.eagle3_source} by the target {chosen.eagle3_target or SMALL_TARGET}: for each token "
        "hidden states of some layers, and the distribution of what comes next (in the native form, the hidden state "
        "that it follows from), for a draft to be trained without the target. Made from the chats themselves by the "
        "target's own tokenizer and template; needs the extra eagle3."
    )
    return _asset(deployment, TARGETS_KEY, text, build)


def _asset(
    deployment: Deployment,
    path: str,
    description: str,
    build: Callable[[dg.AssetExecutionContext, Settings], Outcome],
) -> dg.AssetsDefinition:
    @dg.asset(
        key=deployment.key(path),
        deps=[deployment.key(upstream) for upstream in upstream_of(deployment.settings, path)],
        group_name=deployment.group("eagle3"),
        required_resource_keys={deployment.resource},
        retry_policy=NETWORK_RETRIES,
        op_tags=deployment.op_tags,
        output_required=False,  # as of chats
        description=description,
    )
    def asset(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        yield from materialized(context, deployment, path, lambda settings: build(context, settings))

    made: dg.AssetsDefinition = asset
    return made
