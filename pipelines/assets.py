"""The assets: what is observed, the tokenizer, and one function for each cache. `grep "def oasst1"` finds oasst1."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import dagster as dg

from niels_gpt.build.pipeline import Progress
from niels_gpt.locks import file_lock
from niels_gpt.recipes import pretrain, sft
from niels_gpt.recipes.eagle3_asset import KEY as EAGLE3_KEY
from niels_gpt.recipes.eagle3_asset import SMALL_TARGET, build_targets, raw_source
from niels_gpt.recipes.own import OwnSource
from niels_gpt.recipes.plan import RECIPES, TOKENIZER_KEY, Recipe, built_at, observe, own_recipe, settings_fingerprint
from niels_gpt.recipes.produce import RUNS_DIR, Outcome, cache_root
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.settings import Settings
from pipelines.metadata import materialize_result, targets_result
from pipelines.resources import SettingsResource

SFT_ROOT = dg.AssetKey(["sft", ""])
DATA_VERSION = "dagster/data_version"
BUILD_POOL = BUILD_TAG = "niels_gpt/pretrain_build"
"""The pretrain builds take turns, for each encodes on all cores: within a run by the tag, on one cache folder by
`_turn`, and where a deployment of several machines gives the pool a limit, by that."""
NETWORK_RETRIES = dg.RetryPolicy(max_retries=3, delay=15, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.PLUS_MINUS)
"""After about 15, 30 and 60 seconds; only what a later attempt may mend is tried again (`_clear_errors`)."""
_PRETRAIN: Any = {
    "group_name": "pretrain",
    "kinds": {"numpy"},
    "pool": BUILD_POOL,
    "op_tags": {BUILD_TAG: "true"},
    "retry_policy": NETWORK_RETRIES,
}
_SFT: Any = {"group_name": "sft", "kinds": {"numpy"}, "retry_policy": NETWORK_RETRIES}
_LOG_SECONDS = 10.0


def raw_key(source: str, prefix: Sequence[str] = ()) -> dg.AssetKey:
    """Return the key of the observable that stands for a source's text."""
    return dg.AssetKey([*prefix, "raw", source])


def _observable(key: str, prefix: Sequence[str] = ()) -> dg.AssetsDefinition:
    """Return raw/NAME for the cache `key`. A factory, for there is one rule for all of them."""
    source = key.split("/")[1]
    spec = dg.AssetSpec(
        raw_key(source, prefix),
        group_name="raw",
        description=f"The text that {key} is made of. Observing it takes the fingerprint of its files or, of a source "
        "of the project with source_root=hub, asks the hub for the newest revision; where the hub cannot be reached, "
        "the revision that the cache was built from counts, with a warning. A new fingerprint makes the cache stale.",
    )

    @dg.multi_observable_source_asset(specs=[spec], name="__".join([*prefix, "raw", source]))
    def raw(context: dg.AssetExecutionContext, settings: SettingsResource) -> Iterator[dg.ObserveResult]:
        core = settings.of_run(context)
        with _clear_errors():
            facts, warning = observe(core, key)
        if warning:
            context.log.warning(warning)
        metadata = {**{name: fact for name, fact in facts.items() if fact is not None}, "warning": warning or "none"}
        yield dg.ObserveResult(
            asset_key=context.asset_key, data_version=dg.DataVersion(facts["fingerprint"]), metadata=metadata
        )

    observable: dg.AssetsDefinition = raw
    return observable


with warnings.catch_warnings():  # Dagster calls observables beta; docs/decisions/0003 says why they are used
    warnings.simplefilter("ignore", dg.BetaWarning)

    raw_sources = [_observable(key) for key in RECIPES]

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


@dg.asset(group_name="tokenizer", kinds={"sentencepiece"}, retry_policy=NETWORK_RETRIES)
def tokenizer(context: dg.AssetExecutionContext, settings: SettingsResource) -> dg.MaterializeResult[None]:
    """SentencePiece model of all caches: `tokenizer_model`, else what is there, else one trained on the sources."""
    core = settings.of_run(context)
    with _clear_errors():
        return _result(context, ensure_tokenizer(core))


@dg.asset(key=["pretrain", "fineweb_edu"], deps=[tokenizer, raw_key("fineweb_edu")], **_PRETRAIN)
def fineweb_edu(context: dg.AssetExecutionContext, settings: SettingsResource) -> dg.MaterializeResult[None]:
    """Token cache of FineWeb-Edu: shuffled web pages with end-of-texts, up to a token budget for train and for val.

    Read it with niels_gpt.cache.PretrainTokenStreamDataset.
    """
    return _materialized(context, settings, pretrain.build_fineweb_edu)


@dg.asset(key=["pretrain", "wikitext"], deps=[tokenizer, raw_key("wikitext")], **_PRETRAIN)
def wikitext(context: dg.AssetExecutionContext, settings: SettingsResource) -> dg.MaterializeResult[None]:
    """Token cache of WikiText: all lines of train and val in upstream's order, without end-of-texts.

    Read it with niels_gpt.cache.PretrainTokenStreamDataset.
    """
    return _materialized(context, settings, pretrain.build_wikitext)


@dg.asset(key=["pretrain", "roam"], deps=[tokenizer, raw_key("roam")], **_PRETRAIN)
def roam(context: dg.AssetExecutionContext, settings: SettingsResource) -> dg.MaterializeResult[None]:
    """Token cache of a folder of markdown notes, split by file, with end-of-texts.

    Read it with niels_gpt.cache.PretrainTokenStreamDataset.
    """
    return _materialized(context, settings, pretrain.build_roam)


@dg.asset(key=["pretrain", "gutenberg"], deps=[tokenizer, raw_key("gutenberg")], **_PRETRAIN)
def gutenberg(context: dg.AssetExecutionContext, settings: SettingsResource) -> dg.MaterializeResult[None]:
    """Token cache of Project Gutenberg's books; with source_root=hub a stub, unless gutenberg_from_hub is set.

    Read it with niels_gpt.cache.PretrainTokenStreamDataset.
    """
    return _materialized(context, settings, pretrain.build_gutenberg)


@dg.asset(key=["sft", "dolly15k"], deps=[tokenizer, raw_key("dolly15k"), SFT_ROOT], **_SFT)
def dolly15k(context: dg.AssetExecutionContext, settings: SettingsResource) -> dg.MaterializeResult[None]:
    """Token cache of dolly-15k chats: one instruction and one response each; the response carries the loss.

    Read it with niels_gpt.cache.SFTExampleDataset.
    """
    return _materialized(context, settings, sft.build_dolly15k)


@dg.asset(key=["sft", "oasst1"], deps=[tokenizer, raw_key("oasst1"), SFT_ROOT], **_SFT)
def oasst1(context: dg.AssetExecutionContext, settings: SettingsResource) -> dg.MaterializeResult[None]:
    """Token cache of OpenAssistant chats: every path from a root to a leaf of the message trees.

    Read it with niels_gpt.cache.SFTExampleDataset.
    """
    return _materialized(context, settings, sft.build_oasst1)


def own_assets(sources: Iterable[OwnSource], prefix: Sequence[str]) -> list[dg.AssetsDefinition]:
    """Return raw/NAME and the cache of each source of the user's own. A factory, for their number is the user's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        observed = [_observable(f"{own.family}/{own.name}", prefix) for own in sources]
    return [*observed, *(_own_cache(own, prefix) for own in sources)]


def _own_cache(own: OwnSource, prefix: Sequence[str]) -> dg.AssetsDefinition:
    is_chat = own.family == "sft"
    root = [dg.AssetKey([*prefix, *SFT_ROOT.path])] if is_chat else []
    reader = "SFTExampleDataset" if is_chat else "PretrainTokenStreamDataset"

    @dg.asset(
        key=[*prefix, own.family, own.name],
        deps=[dg.AssetKey([*prefix, TOKENIZER_KEY]), raw_key(own.name, prefix), *root],
        description=f"Token cache of your own {'chats' if is_chat else 'text'}: {own.files}, by {own.said_in}. "
        f"Licence: {own.licence}. Attribution: {own.attribution}.\n\nRead it with niels_gpt.cache.{reader}.",
        **(_SFT if is_chat else _PRETRAIN),
    )
    def cache(context: dg.AssetExecutionContext, settings: SettingsResource) -> dg.MaterializeResult[None]:
        return _materialized(context, settings, own_recipe(own))

    made: dg.AssetsDefinition = cache
    return made


def eagle3_targets(chosen: Settings, prefix: Sequence[str]) -> dg.AssetsDefinition:
    """Return eagle3/targets. A factory, for what lies before it is the user's choice: which chats, which target."""
    source, of_sample = raw_source(chosen), chosen.eagle3_target is None
    deps = [raw_key(source, prefix)] if source else []  # files of chats or rows are not observed
    deps += [dg.AssetKey([*prefix, TOKENIZER_KEY])] if of_sample else []

    @dg.asset(
        key=[*prefix, *EAGLE3_KEY.split("/")],
        deps=deps,
        group_name="eagle3",
        kinds={"torch", "safetensors"},
        retry_policy=NETWORK_RETRIES,
        description=f"EAGLE-3 cache of {chosen.eagle3_source} by the target {chosen.eagle3_target or SMALL_TARGET}: "
        "for each token three hidden states and the distribution of what comes next, for a draft to be trained without "
        "the target. Made from the chats themselves by the target's own tokenizer and template; needs the extra eagle3."
        "\n\nRead it with niels_gpt.eagle3.cache.CachedEagle3Dataset.",
    )
    def targets(context: dg.AssetExecutionContext, settings: SettingsResource) -> dg.MaterializeResult[None]:
        core = settings.of_run(context)
        observed, source = None, raw_source(core)
        if source is not None:
            observed = _newer_observation(context, raw_key(source, prefix), built_at(core, EAGLE3_KEY))
        with _clear_errors():
            outcome = build_targets(core, observed=observed, progress=_target_log(context))
            if core.eagle3_target is None:
                _tell_of_tokenizer(context, dg.AssetKey([*prefix, TOKENIZER_KEY]), core)
            return _result(context, outcome, targets_result)

    made: dg.AssetsDefinition = targets
    return made


CACHES = [fineweb_edu, wikitext, roam, gutenberg, dolly15k, oasst1]


def _materialized(
    context: dg.AssetExecutionContext, settings: SettingsResource, recipe: Recipe
) -> dg.MaterializeResult[None]:
    """Run a cache's recipe. Dagster's staleness is advisory: the recipe looks for itself whether there is work."""
    core, (*prefix, family, name) = settings.of_run(context), context.asset_key.path
    observed = _newer_observation(context, dg.AssetKey([*prefix, "raw", name]), built_at(core, f"{family}/{name}"))
    with _clear_errors(), _turn(core) if family == "pretrain" else nullcontext():
        result = _result(context, recipe(core, observed=observed, progress=_progress_log(context)))
        _tell_of_tokenizer(context, dg.AssetKey([*prefix, TOKENIZER_KEY]), core)
    return result


def _result(
    context: dg.AssetExecutionContext,
    outcome: Outcome,
    described: Callable[[Outcome], dg.MaterializeResult[None]] = materialize_result,
) -> dg.MaterializeResult[None]:
    context.log.info(f"{outcome.key}: {'reused' if outcome.reused else 'built'} in {outcome.seconds:.1f} s")
    return described(outcome)


def _turn(settings: Settings) -> AbstractContextManager[None]:
    """Wait for this run's turn at the pretrain builds of one cache folder; the kernel ends the turn of a dead one."""
    lock = cache_root(settings) / RUNS_DIR / "pretrain.turn"
    return file_lock(lock, f"{lock.parent.parent}: a pretrain cache is being built", wait=True)


def _tell_of_tokenizer(context: dg.AssetExecutionContext, key: dg.AssetKey, settings: Settings) -> None:
    """Where a cache's step has replaced the tokenizer that Dagster knows, tell it: the other caches are stale."""
    event = context.instance.get_latest_materialization_event(key)
    known = event.asset_materialization.tags if event is not None and event.asset_materialization else None
    if not known:  # as in a fresh clone: there is nothing to correct
        return
    outcome = ensure_tokenizer(settings)
    content = str(outcome.meta["content_sha256"])
    if known.get(DATA_VERSION) != content:
        tags = {DATA_VERSION: content, "dagster/code_version": settings_fingerprint(settings, TOKENIZER_KEY)}
        context.log_event(dg.AssetMaterialization(key, metadata=materialize_result(outcome).metadata, tags=tags))


def _newer_observation(context: dg.AssetExecutionContext, raw: dg.AssetKey, built: float) -> str | None:
    """Return the fingerprint that was observed last, unless the cache was built later."""
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


def _target_log(context: dg.AssetExecutionContext) -> Callable[[int, int, int], None]:
    """Return a progress callback of tokens, all tokens and bytes that writes a line to the run's log now and then."""
    begin = last = time.monotonic()

    def log(tokens: int, expected: int, num_bytes: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LOG_SECONDS:
            last = now
            context.log.info(f"{tokens:,} of {expected:,} tokens, {num_bytes / (now - begin) / 1e6:,.1f} MB/s")

    return log


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Make what the core says of bad input the failure's own text; only the network is left to the retries."""
    try:
        yield
    except (ConnectionError, TimeoutError):  # the core turns every error of the hub's client into one of these
        raise
    except Exception as error:
        hint = " (here a flag is a field of the resource settings, as source_root)" if " --" in str(error) else ""
        raise dg.Failure(f"{type(error).__name__}: {error}{hint}", allow_retries=False) from error
