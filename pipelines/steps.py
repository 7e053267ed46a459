"""Run the steps of all assets: revision to build, builds from scratch, turns, logs, errors, materializations."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import dagster as dg

from niels_gpt.display.bar import progress_lines
from niels_gpt.kinds.kind import Kind, builds_alone, kind_of_key, kinds
from niels_gpt.recipes.eagle3.request import NoExtra, NoTarget
from niels_gpt.recipes.plan import every_key, every_recipe
from niels_gpt.recipes.records import RUNS_DIR, TOKENIZER_KEY, Outcome, cache_root, recorded_recipe
from niels_gpt.recipes.request import restart
from niels_gpt.recipes.tokenizer import with_installed
from niels_gpt.recipes.unit_plans import damaged_units
from niels_gpt.storage.codes import code_of
from niels_gpt.storage.errors import CacheError, LeftOut
from niels_gpt.storage.locks import file_lock
from niels_gpt.storage.versions import (
    VERSIONS_DIR,
    build_lock,
    failed_checks,
    is_plan,
    refuse_if_building,
    versions_dir,
)
from niels_gpt.storage.waits import Waits
from niels_gpt.work import Progress
from pipelines.checks import rules_of
from pipelines.deployment import Deployment, Run
from pipelines.metadata import held_in_words, materialize_result
from pipelines.resources import BuildConfig
from pipelines.versions import forced, inputs_of, newer_observation, report_found, upstream_of, version_tags

BUILD_POOL = BUILD_TAG = "niels_gpt/pretrain_build"
"""Pretrain builds run one at a time, because each encodes on all cores. Within a run the tag enforces it, on one cache
folder `turn`, and where a deployment of several machines gives the pool a limit, the pool."""
NETWORK_WAITS, _NETWORK_ATTEMPTS = Waits(first_s=15.0, longest_s=105.0, jitter=1.0), 4
NETWORK_RETRIES = dg.RetryPolicy(
    max_retries=_NETWORK_ATTEMPTS - 1,
    delay=NETWORK_WAITS.first_s,
    backoff=dg.Backoff.EXPONENTIAL,  # 2 ** n - 1 times the first
    jitter=dg.Jitter.PLUS_MINUS,  # as long as the first
)
"""After about 15, 45 and 105 seconds; only errors that may pass by themselves are retried (`clear_errors`)."""
_CORE = "niels_gpt"
_Result = TypeVar("_Result")
_PAUSE_SECONDS = 0.2
"""Between two attempts at a lock: who held it may hold it again."""


# --- whether, and from what, a step builds ----------------------------------------------------------------------------


def cache_asset(deployment: Deployment, path: str, group: str, description: str) -> dg.AssetsDefinition:
    """Return the asset of a cache, which its recipe builds in one step."""
    is_alone = builds_alone(path)

    @dg.asset(
        key=deployment.key(path),
        deps=[deployment.key(upstream) for upstream in inputs_of(deployment, path)],
        description=description,
        group_name=deployment.group(group),
        retry_policy=NETWORK_RETRIES,
        required_resource_keys={deployment.resource},
        output_required=False,  # a tokenizer without sentinels builds no chats: left_out
        pool=BUILD_POOL if is_alone else None,
        op_tags={**deployment.op_tags, **({BUILD_TAG: "true"} if is_alone else {})},
    )
    def cache(context: dg.AssetExecutionContext, config: BuildConfig) -> Iterator[dg.MaterializeResult[None]]:
        run = deployment.run(context, config)

        def build() -> Outcome:
            # Dagster's staleness is advisory: the recipe decides whether there is anything to do.
            core = with_installed(run.settings)  # the asset `tokenizer` alone replaces the one that is there
            progress = progress_log(run.context, (kind_of_key(path) or Kind).counted)
            outcome = every_recipe(core)[path](core, observed=newer_observation(run, path), progress=progress)
            report_made_too(run, path)
            return outcome

        made: list[dg.MaterializeResult[None]] = []
        with step(run), turn(run, path), left_out(run):
            start_over(run, path)
            made.append(report(run, waited_for(run, path, build)))
        yield from made

    asset: dg.AssetsDefinition = cache
    return asset


def report_made_too(run: Run, path: str) -> None:
    """Log materializations of missing upstream caches that the build of a cache has made."""
    core = with_installed(run.settings)
    recipes = every_recipe(core)
    for made_too in filter(recipes.__contains__, upstream_of(core, path)):  # a draft vocabulary
        report_found(run, recipes[made_too](core))


def start_over(run: Run, path: str) -> list[int]:
    """Make the build of a cache start from scratch if the run or a failed check asks for it.

    Returns the partitions that repair a damaged cache; for these it does not.
    """
    why = why_from_scratch(run, path)
    damaged = damaged_units(cache_root(run.settings) / path) if why and not run.force else []
    if why and not damaged:
        waited_for(run, path, lambda: restart(run.settings, path))
    if why:
        what = f"built again, partition {', '.join(map(str, damaged))} alone" if damaged else "built from scratch"
        run.context.log.info(f"{path}: {what}: {why}")
    return damaged


def waited_for(run: Run, path: str, act: Callable[[], _Result]) -> _Result:
    """Return what `act` returns; while another process builds the cache, wait, and call it again.

    Raises: CacheError E503 where the run does not wait; as `act`.
    """
    if not run.wait:
        refuse_if_building(cache_root(run.settings) / path)
    while True:
        try:
            return act()
        except CacheError as error:
            if error.code != "E503" or not run.wait or not _wait(Path(error.path)):
                raise
        time.sleep(_PAUSE_SECONDS)


def _wait(path: Path) -> bool:
    """Wait until nobody builds at the path of an error E503; False where there is no lock that can be waited for."""
    locks = [lock for kind in kinds() if (lock := kind.lock_of(path)) is not None and lock.is_file()]
    for lock in locks[:1]:  # of a folder that is written in place
        with file_lock(lock, path, "is being written", wait=True):
            return True
    if is_plan(path):
        for partition in (path / VERSIONS_DIR).glob("*"):
            _wait(path / partition.name)
        return True
    if not versions_dir(path).is_dir():
        return False
    with build_lock(path, wait=True):
        return True


def why_from_scratch(run: Run, path: str) -> str | None:
    """Return why a cache is built from scratch, whatever there is; None: it is not.

    That is so where the run's config says `force`, and where a blocking check has failed since the cache was built,
    once for the same content. A retry, and the re-execution of a failed run, go on with what the first attempt has
    built.
    """
    operation, cache = run.context.op_execution_context, cache_root(run.settings) / path
    # Without a recipe there is nothing, or a run that starts from scratch has not finished.
    is_unfinished = "fingerprint" not in recorded_recipe(cache) and path != TOKENIZER_KEY
    if run.force:
        is_retry = bool(getattr(operation, "retry_number", 0))  # an asset called as a function has none
        is_again = is_retry or (is_unfinished and operation.run.parent_run_id is not None)
        return None if is_again else "force is set in its config"
    failed = failed_checks(cache)
    for name in (name for name in rules_of(path) if name in failed.in_vain):
        run.context.log.warning(
            f"{path}: its check {name} has failed for the same content before and after a build from scratch, so "
            f"another one does not help; the run config `{forced(run.deployment, path)}` repeats it"
        )
    found = [] if is_unfinished else [name for name in rules_of(path) if name in failed.repairable]
    return f"its check {found[0]} has failed since it was built" if found else None


def turn(run: Run, path: str) -> AbstractContextManager[None]:
    """Hold the turn of pretrain builds in this folder of caches: each encodes on all cores. Other caches need none.

    It waits while another run has it, also where `wait` is off: that is about other builds of the cache at `path`.
    Raises: CacheError E503 where another process builds that cache and the run does not wait.
    """
    if not builds_alone(path):
        return nullcontext()
    if not run.wait:
        refuse_if_building(cache_root(run.settings) / path)
    lock = cache_root(run.settings) / RUNS_DIR / "pretrain.turn"
    return file_lock(lock, lock.parent.parent, "a pretrain cache is being built", wait=True)


@contextmanager
def left_out(run: Run) -> Iterator[None]:
    """Log why an asset cannot be materialized, so that its step is skipped; raise LeftOut if a run has only such ones.

    A run of all assets materializes those that it can: with a tokenizer without sentinels no chats, and without a
    target, or the extra eagle3, nothing of eagle3.
    """
    try:
        yield
    except LeftOut as error:
        selected = run.context.job_def.asset_layer.selected_asset_keys  # may be another deployment's too
        ours = [path for path in every_key(run.deployment.settings) if run.deployment.key(path) in selected]
        families = {path.split("/")[0] for path in ours} - {TOKENIZER_KEY}
        unbuildable = {"eagle3"} if isinstance(error, NoTarget | NoExtra) else {"sft", "trees", "eagle3"}
        if not families - unbuildable:
            raise
        run.context.log.warning(f"left out [{error.warning}]: {error}")


# --- what a step logs and reports -------------------------------------------------------------------------------------


def report(run: Run, outcome: Outcome) -> dg.MaterializeResult[None]:
    """Log what a run of a recipe has done and observed, and return what Dagster records of it."""
    result = materialize_result(outcome)
    state = "reused" if outcome.reused else "built"
    run.context.log.info(f"{outcome.key}: {state} in {outcome.seconds:.1f} s: {held_in_words(outcome.meta)}")
    source = recorded_recipe(outcome.path).get("source") or {}
    return result._replace(tags=version_tags(run, outcome.key, source, asked_hub=not outcome.reused))


@contextmanager
def step(run: Run) -> Iterator[None]:
    """Run the body of a step: what the core logs goes to the run's log, and its errors become a dg.Failure."""
    logger = logging.getLogger(_CORE)
    handler, level = _ToRun(run.context), logger.level
    with clear_errors(run.deployment):
        logger.addHandler(handler)
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)


class _ToRun(logging.Handler):
    """Passes what the core logs to a run's log, except loggers that the instance passes on (python_logs)."""

    def __init__(self, context: dg.AssetExecutionContext) -> None:
        super().__init__(logging.INFO)
        self._log, self._managed = context.log, tuple(context.instance.managed_python_loggers)

    def emit(self, record: logging.LogRecord) -> None:
        if any(name in ("root", record.name) or record.name.startswith(f"{name}.") for name in self._managed):
            return
        code = getattr(record, "code", None)
        self._log.log(record.levelno, f"{record.getMessage()} [{code}]" if code else record.getMessage())


def progress_log(context: dg.AssetExecutionContext, counted: str = "documents", measured: str = "tokens") -> Progress:
    """Return a builder's progress callback that writes a line to the run's log every ten seconds."""
    return progress_lines(context.log.info, measured, counted)


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
        raise dg.Failure(f"{type(error).__name__}: {error} [{code_of(error)}]{hint}", allow_retries=False) from error
