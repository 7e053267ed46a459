"""The assets: one factory for the observables of the sources, one for their caches, and the tokenizer.

The built-in caches come from the table of sources (niels_gpt/data/sources.py), so a new row is a new asset.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import dagster as dg

from niels_gpt.data.sources import SOURCES, SourceSpec
from niels_gpt.progress import Progress
from niels_gpt.recipes.eagle3.asset import build_targets
from niels_gpt.recipes.eagle3.draft_vocab import build_draft_vocab, committed_content
from niels_gpt.recipes.eagle3.draft_vocab import settings_fingerprint as vocab_fingerprint
from niels_gpt.recipes.eagle3.of_settings import KEY as EAGLE3_KEY
from niels_gpt.recipes.eagle3.of_settings import SMALL_TARGET, VOCAB_KEY, raw_source
from niels_gpt.recipes.plan import built_at, needs_no_tokenizer, observe, settings_fingerprint
from niels_gpt.recipes.rollouts.caches import build_rollout_cache
from niels_gpt.recipes.rollouts.trees import TREES
from niels_gpt.recipes.run_recipe import RUNS_DIR, TOKENIZER_KEY, Outcome, cache_root
from niels_gpt.recipes.token_caches import build_token_cache
from niels_gpt.recipes.tokenizer import NoSentinels, ensure_tokenizer
from niels_gpt.settings import Settings
from niels_gpt.storage.locks import file_lock
from pipelines.metadata import draft_vocab_result, materialize_result, targets_result
from pipelines.resources import SettingsResource

SFT_ROOT = dg.AssetKey(["sft", ""])
DATA_VERSION, CODE_VERSION = "dagster/data_version", "dagster/code_version"
BUILD_POOL = BUILD_TAG = "niels_gpt/pretrain_build"
"""Pretrain builds run one at a time, because each encodes on all cores. Within a run the tag enforces it, on one cache
folder `_turn`, and where a deployment of several machines gives the pool a limit, the pool."""
NETWORK_RETRIES = dg.RetryPolicy(max_retries=3, delay=15, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.PLUS_MINUS)
"""After about 15, 30 and 60 seconds; only errors that may pass by themselves are retried (`_clear_errors`)."""
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
_LOG_SECONDS = 10.0


def raw_key(source: str, prefix: Sequence[str] = ()) -> dg.AssetKey:
    """Return the key of the observable that stands for a source's text."""
    return dg.AssetKey([*prefix, "raw", source])


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
        with _clear_errors():
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
        output_required=False,  # a tokenizer without sentinels builds no chats: _leave_out
        **_BY_FAMILY[spec.family],
    )
    def cache(context: dg.AssetExecutionContext, settings: SettingsResource) -> Iterator[dg.MaterializeResult[None]]:
        # Dagster's staleness is advisory: the recipe decides whether there is anything to do.
        core, (*before, family, name) = settings.of_run(context), context.asset_key.path
        observed = _newer_observation(context, raw_key(name, before), built_at(core, f"{family}/{name}"))
        with _clear_errors(), _turn(core) if family == "pretrain" else nullcontext():
            try:
                how: dict[str, Any] = {"observed": observed, "progress": _progress_log(context)}
                if family in ("trees", "rollouts"):
                    outcome = build_rollout_cache(core, f"{family}/{name}", **how)
                else:
                    outcome = build_token_cache(core, name, **how)
            except NoSentinels as error:
                _leave_out(context, error)
                return
            result = _result(context, outcome)
            if tokenizer:
                _report_tokenizer(context, dg.AssetKey([*before, TOKENIZER_KEY]), core)
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
    with _clear_errors():
        return _result(context, ensure_tokenizer(core))


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
        with _clear_errors():
            try:
                outcome = build_draft_vocab(core, observed=_newer_chats(context, core, prefix, VOCAB_KEY))
            except NoSentinels as error:
                _leave_out(context, error)
                return
            if core.eagle3_target is None:
                _report_tokenizer(context, dg.AssetKey([*prefix, TOKENIZER_KEY]), core)
            result = _result(context, outcome, draft_vocab_result)
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
        with _clear_errors():
            try:
                observed = _newer_chats(context, core, prefix, EAGLE3_KEY)
                outcome = build_targets(core, observed=observed, progress=_target_log(context))
            except NoSentinels as error:
                _leave_out(context, error)
                return
            if core.eagle3_target is None:
                _report_tokenizer(context, dg.AssetKey([*prefix, TOKENIZER_KEY]), core)
            _report_draft_vocab(context, dg.AssetKey([*prefix, *VOCAB_KEY.split("/")]), core)
            result = _result(context, outcome, targets_result)
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
    return None if source is None else _newer_observation(context, raw_key(source, prefix), built_at(settings, key))


def _result(
    context: dg.AssetExecutionContext,
    outcome: Outcome,
    described: Callable[[Outcome], dg.MaterializeResult[None]] = materialize_result,
) -> dg.MaterializeResult[None]:
    context.log.info(f"{outcome.key}: {'reused' if outcome.reused else 'built'} in {outcome.seconds:.1f} s")
    return described(outcome)


def _leave_out(context: dg.AssetExecutionContext, error: NoSentinels) -> None:
    """Log why an asset is not materialized, so that its step is skipped; raise `error` in a run of such assets alone.

    A run of all assets with a tokenizer without sentinels materializes those that it can.
    """
    selected = {key.path[-2] for key in context.job_def.asset_layer.selected_asset_keys if len(key.path) > 1}
    if not selected - {"sft", "trees", "eagle3", "raw"}:
        raise error
    context.log.warning(f"left out [W411]: {error}")


def _turn(settings: Settings) -> AbstractContextManager[None]:
    """Wait until no other run builds a pretrain cache in this folder."""
    lock = cache_root(settings) / RUNS_DIR / "pretrain.turn"
    return file_lock(lock, lock.parent.parent, "a pretrain cache is being built", wait=True)


def _report_tokenizer(context: dg.AssetExecutionContext, key: dg.AssetKey, settings: Settings) -> None:
    """Record it in Dagster if a cache's step has replaced the tokenizer, so that other caches become stale."""
    tags = _recorded_tags(context, key)
    if not tags:  # a fresh clone: no other cache depends on an older one
        return
    outcome = ensure_tokenizer(settings)
    content = str(outcome.meta["content_sha256"])
    if tags.get(DATA_VERSION) != content:
        tags = {DATA_VERSION: content, CODE_VERSION: settings_fingerprint(settings, TOKENIZER_KEY)}
        context.log_event(dg.AssetMaterialization(key, metadata=materialize_result(outcome).metadata, tags=tags))


def _report_draft_vocab(context: dg.AssetExecutionContext, key: dg.AssetKey, settings: Settings) -> None:
    """Record it in Dagster if the step of eagle3/targets has replaced the draft's vocabulary."""
    tags = _recorded_tags(context, key)
    if not tags or tags.get(DATA_VERSION) == committed_content(settings):
        return
    outcome = build_draft_vocab(settings)
    now = {DATA_VERSION: str(outcome.meta["content_sha256"]), CODE_VERSION: vocab_fingerprint(settings)}
    kept = {name: value for name, value in tags.items() if name.startswith("dagster/input_")}  # as it read them
    metadata = draft_vocab_result(outcome).metadata
    context.log_event(dg.AssetMaterialization(key, metadata=metadata, tags={**kept, **now}))


def _recorded_tags(context: dg.AssetExecutionContext, key: dg.AssetKey) -> Mapping[str, str]:
    """Return the tags of an asset's last materialization; {} without one."""
    event = context.instance.get_latest_materialization_event(key)
    return (event.asset_materialization.tags if event is not None and event.asset_materialization else None) or {}


def _newer_observation(context: dg.AssetExecutionContext, raw: dg.AssetKey, built: float) -> str | None:
    """Return the newest observed fingerprint if the observation is newer than the cache, else None."""
    for record in context.instance.fetch_observations(raw, limit=1).records:
        if record.timestamp > built and record.asset_observation is not None:
            return (record.asset_observation.tags or {}).get(DATA_VERSION)
    return None


def _progress_log(context: dg.AssetExecutionContext) -> Progress:
    """Return a builder's progress callback that writes a line to the run's log every ten seconds."""
    begin = last = time.monotonic()

    def log(documents: int, tokens: int, expected: int | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _LOG_SECONDS:
            return
        last, speed = now, tokens / (now - begin)
        left = f" of {expected:,}, about {(expected - tokens) / speed:,.0f} s left" if expected and tokens else ""
        context.log.info(f"{documents:,} documents, {tokens:,} tokens{left}, {speed:,.0f} tokens/s")

    return log


def _target_log(context: dg.AssetExecutionContext) -> Progress:
    """Return a progress callback of bytes, tokens and all tokens that writes a line to the run's log now and then."""
    begin = last = time.monotonic()

    def log(num_bytes: int, tokens: int, expected: int | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LOG_SECONDS:
            last = now
            context.log.info(f"{tokens:,} of {expected or 0:,} tokens, {num_bytes / (now - begin) / 1e6:,.1f} MB/s")

    return log


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Turn the core's errors into a dg.Failure with their message. Only network errors are left to the retries."""
    try:
        yield
    except (ConnectionError, TimeoutError):  # every error of the hub's client is one of these
        raise
    except Exception as error:
        hint = " (here a flag is a field of the resource settings, as source_root)" if " --" in str(error) else ""
        raise dg.Failure(f"{type(error).__name__}: {error}{hint}", allow_retries=False) from error
