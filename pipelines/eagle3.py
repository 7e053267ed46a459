"""The assets eagle3/draft_vocab and eagle3/targets, whose settings decide what lies upstream of them."""

from collections.abc import Iterator

import dagster as dg

from niels_gpt.recipes.eagle3.asset import build_targets
from niels_gpt.recipes.eagle3.draft_vocab import build_draft_vocab
from niels_gpt.recipes.eagle3.of_settings import KEY as EAGLE3_KEY
from niels_gpt.recipes.eagle3.of_settings import SMALL_TARGET, VOCAB_KEY, raw_source
from niels_gpt.recipes.run_recipe import Outcome
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import LeftOut
from pipelines.deployment import Deployment
from pipelines.metadata import draft_vocab_result, targets_result
from pipelines.steps import NETWORK_RETRIES, carried_out, leave_out, report, step, target_log
from pipelines.versions import DATA_VERSION, is_recorded, newer_observation, upstream_of, version_tags


def draft_vocab_of(deployment: Deployment) -> dg.AssetsDefinition:
    """Return eagle3/draft_vocab."""
    chosen = deployment.settings

    @dg.asset(
        key=deployment.key(VOCAB_KEY),
        deps=[deployment.key(path) for path in upstream_of(chosen, VOCAB_KEY)],
        group_name=deployment.group("eagle3"),
        required_resource_keys={deployment.resource},
        retry_policy=NETWORK_RETRIES,
        op_tags=deployment.op_tags,
        output_required=False,  # as of chats
        description=f"The tokens that an EAGLE-3 draft knows: the target's ids that {chosen.eagle3_source} supervises "
        "most often, counted without the target's weights. eagle3/targets takes them from here; another size builds "
        "this again, and of a native eagle3/targets the manifest alone.",
    )
    def draft_vocab(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        run = deployment.run(context)
        core = run.settings

        def build() -> Outcome:
            return build_draft_vocab(core, observed=_newer_chats(context, deployment, core, VOCAB_KEY))

        with step(context, deployment):
            try:
                outcome = carried_out(context, deployment, run, VOCAB_KEY, build)
            except LeftOut as error:
                leave_out(context, deployment, error)
                return
            result = report(context, deployment, core, outcome, draft_vocab_result)
        yield result

    made: dg.AssetsDefinition = draft_vocab
    return made


def targets_of(deployment: Deployment) -> dg.AssetsDefinition:
    """Return eagle3/targets."""
    chosen = deployment.settings

    @dg.asset(
        key=deployment.key(EAGLE3_KEY),
        deps=[deployment.key(path) for path in upstream_of(chosen, EAGLE3_KEY)],
        group_name=deployment.group("eagle3"),
        required_resource_keys={deployment.resource},
        retry_policy=NETWORK_RETRIES,
        op_tags=deployment.op_tags,
        output_required=False,  # as of chats
        description=f"EAGLE-3 cache of {chosen.eagle3_source} by the target {chosen.eagle3_target or SMALL_TARGET}: "
        "for each token hidden states of some layers, and the distribution of what comes next (in the native form, the "
        "hidden state that it follows from), for a draft to be trained without the target. Made from the chats "
        "themselves by the target's own tokenizer and template; needs the extra eagle3.",
    )
    def targets(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        run = deployment.run(context)
        core = run.settings

        def build() -> Outcome:
            observed = _newer_chats(context, deployment, core, EAGLE3_KEY)
            return build_targets(core, observed=observed, progress=target_log(context))

        with step(context, deployment):
            try:
                outcome = carried_out(context, deployment, run, EAGLE3_KEY, build)
            except LeftOut as error:
                leave_out(context, deployment, error)
                return
            _report_draft_vocab(context, deployment, core)
            result = report(context, deployment, core, outcome, targets_result)
        yield result

    made: dg.AssetsDefinition = targets
    return made


def _newer_chats(
    context: dg.AssetExecutionContext, deployment: Deployment, settings: Settings, path: str
) -> str | None:
    """Return the observed fingerprint of the chats that an asset is built of, as `newer_observation`."""
    source = raw_source(settings)
    if source is None:
        return None
    return newer_observation(context, deployment, settings, path, f"raw/{source}")


def _report_draft_vocab(context: dg.AssetExecutionContext, deployment: Deployment, settings: Settings) -> None:
    """Log a materialization of the draft's vocabulary if the step of eagle3/targets has made another one than Dagster
    knows, or found it."""
    outcome = build_draft_vocab(settings)
    if not is_recorded(context, deployment, settings, outcome):
        tags = version_tags(context, deployment, settings, outcome)
        tags[DATA_VERSION] = str(outcome.meta["content_sha256"])
        metadata = draft_vocab_result(outcome).metadata
        context.log_event(dg.AssetMaterialization(deployment.key(VOCAB_KEY), metadata=metadata, tags=tags))
