"""What the steps of the assets share: which revision they build, whose turn it is, what they log and report, errors."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import dagster as dg

from niels_gpt.progress import Progress
from niels_gpt.recipes.plan import built_at
from niels_gpt.recipes.run_recipe import RUNS_DIR, Outcome, cache_root
from niels_gpt.recipes.tokenizer import NoSentinels
from niels_gpt.settings import Settings
from niels_gpt.storage.locks import file_lock
from pipelines.deployment import Deployment
from pipelines.metadata import materialize_result
from pipelines.versions import DATA_VERSION, version_tags

BUILD_POOL = BUILD_TAG = "niels_gpt/pretrain_build"
"""Pretrain builds run one at a time, because each encodes on all cores. Within a run the tag enforces it, on one cache
folder `turn`, and where a deployment of several machines gives the pool a limit, the pool."""
NETWORK_RETRIES = dg.RetryPolicy(max_retries=3, delay=15, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.PLUS_MINUS)
"""After about 15, 30 and 60 seconds; only errors that may pass by themselves are retried (`clear_errors`)."""
_LOG_SECONDS = 10.0


def observed_of_cache(
    context: dg.AssetExecutionContext, deployment: Deployment, settings: Settings, path: str
) -> str | None:
    """Return the newest observed fingerprint of the source of a cache, FAMILY/NAME, or None."""
    raw = deployment.key(f"raw/{path.rpartition('/')[2]}")
    return newer_observation(context, raw, built_at(settings, path))


def newer_observation(context: dg.AssetExecutionContext, raw: dg.AssetKey, built: float) -> str | None:
    """Return the newest observed fingerprint if the observation is newer than the cache, else None."""
    for record in context.instance.fetch_observations(raw, limit=1).records:
        if record.timestamp > built and record.asset_observation is not None:
            return (record.asset_observation.tags or {}).get(DATA_VERSION)
    return None


def report(
    context: dg.AssetExecutionContext,
    deployment: Deployment,
    settings: Settings,
    outcome: Outcome,
    described: Callable[[Outcome], dg.MaterializeResult[None]] = materialize_result,
) -> dg.MaterializeResult[None]:
    """Log what a run of a recipe has done and observed, and return what Dagster records of it. settings: of the run."""
    context.log.info(f"{outcome.key}: {'reused' if outcome.reused else 'built'} in {outcome.seconds:.1f} s")
    return described(outcome)._replace(tags=version_tags(context, deployment, settings, outcome))


def leave_out(context: dg.AssetExecutionContext, deployment: Deployment, error: NoSentinels) -> None:
    """Log why an asset is not materialized, so that its step is skipped; raise `error` in a run of such assets alone.

    A run of all assets with a tokenizer without sentinels materializes those that it can.
    """
    selected = {deployment.path_of(key) for key in context.job_def.asset_layer.selected_asset_keys}
    families = {path.split("/")[0] for path in selected if "/" in path}
    if not families - {"sft", "trees", "eagle3", "raw"}:
        raise error
    context.log.warning(f"left out [W411]: {error}")


def turn(settings: Settings) -> AbstractContextManager[None]:
    """Wait until no other run builds a pretrain cache in this folder."""
    lock = cache_root(settings) / RUNS_DIR / "pretrain.turn"
    return file_lock(lock, lock.parent.parent, "a pretrain cache is being built", wait=True)


def progress_log(context: dg.AssetExecutionContext, counted: str = "documents", measured: str = "tokens") -> Progress:
    """Return a builder's progress callback that writes a line to the run's log every ten seconds."""
    begin = last = time.monotonic()

    def log(count: int, done: int, expected: int | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _LOG_SECONDS:
            return
        last, speed = now, done / (now - begin)
        left = f" of {expected:,}, about {(expected - done) / speed:,.0f} s left" if expected and done else ""
        context.log.info(f"{count:,} {counted}, {done:,} {measured}{left}, {speed:,.0f} {measured}/s")

    return log


def target_log(context: dg.AssetExecutionContext) -> Progress:
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
def clear_errors(deployment: Deployment) -> Iterator[None]:
    """Turn the core's errors into a dg.Failure with their message. Only network errors are left to the retries."""
    try:
        yield
    except (ConnectionError, TimeoutError):  # every error of the hub's client is one of these
        raise
    except dg.Failure:
        raise
    except Exception as error:
        form = f"resources.{deployment.resource}.config"
        hint = f" (here a flag is a field of {form}, as source_root)" if " --" in str(error) else ""
        raise dg.Failure(f"{type(error).__name__}: {error}{hint}", allow_retries=False) from error
