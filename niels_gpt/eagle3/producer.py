"""A plan, its samples and the target -> a cache folder, by any number of processes, and however often it is killed.

What is in the folder is written in this order, each file complete before the next and durable: sidecar/plan.json, the
rest of the plan, manifest.json, the embeddings and then their receipt, each shard and then its receipt, and at the end
meta.json. So a folder with a meta.json is a finished cache, a shard with a receipt is a finished shard, and a run that
goes on makes the rest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.eagle3.cache_folder import CacheFolder, counts_of
from niels_gpt.eagle3.estimate import estimate, refuse_without_room
from niels_gpt.eagle3.folder import finished_shards, is_finished
from niels_gpt.eagle3.layout import LOCK_NAME, SIDECAR, PathLike
from niels_gpt.eagle3.plan import Plan
from niels_gpt.eagle3.samples import Samples
from niels_gpt.eagle3.workers import Job, Load, run_here, run_workers, tried, try_elsewhere
from niels_gpt.locks import file_lock

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, int], None]
"""Is told the tokens that are done, all tokens, and the bytes written by this run; the first call: what was there."""


class Produced(NamedTuple):
    """What a run did."""

    meta: dict[str, Any]
    """The cache's meta.json."""
    shards: int
    """Shards that this run made; 0 where nothing was left to do."""


def produce(
    cache_dir: PathLike,
    plan: Plan,
    samples: Samples,
    load: Load,
    *,
    workers: int = 1,
    resume: bool = False,
    progress: Progress | None = None,
    start: str = "spawn",
) -> Produced:
    """Make the cache of a plan in a folder, or what is missing of it.

    load: gives the target on a device. It is called only where something is left to do, once in each process.
    workers: processes; 1 does the work in this one. The bytes do not depend on it.
    start: how processes are started: spawn, or fork where nothing has used torch's threads yet.
    The target is tried over a few tokens before anything is written.
    Raises: as `finished_shards` and `tried`; CacheError where there is no room, before anything is written, where
        somebody else is at work, and where a draft could learn nothing (positions.py); NonFiniteError naming sample and
        layer; OSError on a full disk; RuntimeError where a worker died. What is finished then stays, for a run with
        `resume`.
    """
    done = finished_shards(cache_dir, plan, resume=resume)
    refuse_without_room(cache_dir, estimate(cache_dir, plan, samples, done=done))
    if len(done) < plan.num_shards:  # a target that does not run leaves the folder as it was
        if min(workers, plan.num_shards - len(done)) == 1:
            load = tried(plan, samples, load)
        elif not done:  # else it has run there
            try_elsewhere(plan, samples, load, start=start)
    folder = Path(cache_dir)
    with file_lock(folder / SIDECAR / LOCK_NAME, f"{folder}: is being written", wait=False):
        done = finished_shards(cache_dir, plan, resume=resume)  # somebody may have been faster
        left = [shard for shard in range(plan.num_shards) if shard not in done]
        found = CacheFolder(folder, plan)
        meta = None if left else found.meta()
        if meta is None:
            meta = _make(found, samples, load, left, workers, progress, start)
        if warning := counts_of(meta).warning:
            logger.warning("%s: %s", folder, warning)
        return Produced(meta, len(left))


def _make(
    found: CacheFolder,
    samples: Samples,
    load: Load,
    left: list[int],
    workers: int,
    progress: Progress | None,
    start: str,
) -> dict[str, Any]:
    """Make what is left, and return the meta.json."""
    told = _Told(progress, found.plan, samples, left)
    workers = min(workers, len(left))
    try:
        found.prepare(samples)
        job = Job(os.fspath(found.folder), found.plan, load, found.lacks_embeddings())
        if workers > 1:
            run_workers(job, left, workers, told, start=start)
        elif left or job.embeddings:
            run_here(job, samples, left, told)
        return found.finish()
    except OSError as error:
        if error.errno is None or error.strerror is None:  # of a library: it has a text of its own
            raise
        kept = sum(is_finished(found.folder, found.plan, shard) for shard in range(found.plan.num_shards))
        why = f"{error.strerror}. {kept} of {found.plan.num_shards} shards are done and kept: once that is mended, "
        raise OSError(error.errno, f"{why}run the same again with --resume", error.filename) from error
    finally:
        with suppress(OSError):  # there is a better error then; the next run removes them
            found.remove_leftovers()


class _Told:
    """Adds up what is reported."""

    def __init__(self, progress: Progress | None, plan: Plan, samples: Samples, left: list[int]) -> None:
        size, self._total = plan.manifest["shard_size"], len(samples.ids)
        lengths = samples.lengths
        to_do = sum(int(lengths[shard * size : (shard + 1) * size].sum()) for shard in left)
        self._progress, self._done, self._bytes = progress, self._total - to_do, 0
        self(0, 0)

    def __call__(self, tokens: int, size: int) -> None:
        self._done, self._bytes = self._done + tokens, self._bytes + size
        if self._progress is not None:
            self._progress(self._done, self._total, self._bytes)
