"""A plan, its samples and the target -> a cache folder: the order of all writes, by any number of processes.

The files are written in this order, each one complete and durable before the next: sidecar/plan.json, the rest of the
plan, the samples, manifest.json, the target's weights and then their receipt, each shard and then its receipt, and at
the end meta.json. So a shard with a receipt is finished, a folder with a meta.json is a finished cache, and a run that
was killed is resumed by making the shards without a receipt.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.eagle3.format.embeddings import has_embeddings
from niels_gpt.eagle3.format.layout import LOCK_NAME, MANIFEST_NAME, SIDECAR, PathLike
from niels_gpt.eagle3.format.manifest import manifest_bytes, read_manifest
from niels_gpt.eagle3.format.native.weights import has_weights
from niels_gpt.eagle3.format.plan import Plan, shards_of_part
from niels_gpt.eagle3.format.samples import Samples
from niels_gpt.eagle3.produce.estimate import estimate, refuse_without_room
from niels_gpt.eagle3.produce.finalize import complete_meta, finish
from niels_gpt.eagle3.produce.positions import Counts
from niels_gpt.eagle3.produce.resume_checks import finished_meta, finished_shards, is_finished, leftovers
from niels_gpt.eagle3.produce.trial import Found
from niels_gpt.eagle3.produce.workers import Job, Load, load_and_try, run_here, run_workers, try_in_subprocess
from niels_gpt.progress import Progress
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, sha256_file, write_bytes
from niels_gpt.storage.locks import file_lock

logger = logging.getLogger(__name__)


class Produced(NamedTuple):
    """The result of a run."""

    meta: dict[str, Any]
    """The cache's meta.json; empty after a run with `part`, which leaves the cache unfinished."""
    shards: int
    """Shards that this run made; 0 where none was missing."""
    is_described: bool = False
    """Whether the run wrote meta.json."""


def produce(
    cache_dir: PathLike,
    plan: Plan,
    samples: Samples,
    load: Load,
    *,
    named: Path | None = None,
    workers: int = 1,
    resume: bool = False,
    part: tuple[int, int] | None = None,
    progress: Progress | None = None,
    start: str = "spawn",
) -> Produced:
    """Make the cache of a plan in a folder, or what is missing of it.

    load: returns the target on a device. Called once in each process where work is left, and once for a native cache
        that is not finished, whose manifest is not believed about the target's head.
    named: what errors and warnings about the finished cache call the folder, where it gets another name later.
    workers: processes; 1 does the work in this one. The bytes do not depend on it.
    part: (i, N): make only the shards whose index divided by N leaves i - 1, and no meta.json; join.py finishes it.
    progress: items are the bytes that this run wrote, units are tokens; first called with the tokens already done.
    start: how processes are started: spawn, or fork where nothing has used torch's threads yet.
    Before anything is written, the target is run over a few tokens.
    Raises: as `finished_shards` and `load_and_try`; CacheError where the disk has no room, before anything is written,
        while another process writes the cache, and where a draft could learn nothing (positions.py); NonFiniteError
        naming sample and layer; OSError on a full disk; RuntimeError where a worker died. Finished shards then stay,
        and a run with `resume` makes the others.
    """
    done = finished_shards(cache_dir, plan, resume=resume)
    refuse_without_room(cache_dir, estimate(cache_dir, plan, samples, done=done, part=part))
    wanted, folder = shards_of_part(plan.num_shards, part), Path(cache_dir)
    left = [shard for shard in wanted if shard not in done]
    plan, load = _tried(folder, plan, samples, load, workers=min(workers, len(left)), is_fresh=not done, start=start)
    with file_lock(folder / SIDECAR / LOCK_NAME, folder, "is being written", wait=False):
        done = finished_shards(cache_dir, plan, resume=resume)  # another run may have ended meanwhile
        left = [shard for shard in wanted if shard not in done]
        meta = None if left else complete_meta(folder, plan)
        is_described = meta is None and part is None
        if meta is None:
            how: Any = {"named": named, "workers": workers, "progress": progress, "start": start}
            meta = _make(folder, plan, samples, load, left, is_described=is_described, **how)
        if meta and (warning := Counts.of_meta(meta).warning):
            logger.warning("%s: %s", named or folder, warning, extra={"code": "W703"})
        return Produced(meta, len(left), is_described)


def _tried(
    folder: Path, plan: Plan, samples: Samples, load: Load, *, workers: int, is_fresh: bool, start: str
) -> tuple[Plan, Load]:
    """Try the target where work is left, so that one that does not run leaves the folder unchanged.

    workers: processes with work. is_fresh: whether no shard is finished; else the target has run there.
    Returns the plan, with the target's head in a native one, and what loads the target.
    """
    found = _recorded_head(folder, plan)
    is_unknown = plan.is_native and found is None
    if workers == 1 or (is_unknown and not workers):
        load, found = load_and_try(plan, samples, load)
    elif workers and (is_fresh or is_unknown):
        found = try_in_subprocess(plan, samples, load, start=start)
    return (plan if found is None else plan.with_head(*found)), load


def _recorded_head(folder: Path, plan: Plan) -> Found:
    """Return what the manifest of a finished native cache states of the target's head; None for any other folder.

    meta.json has the same, and its own checksum: a manifest that differs from it is not believed.
    """
    with suppress(FileNotFoundError, CacheError):
        if plan.is_native and (meta := finished_meta(folder)) is not None:
            manifest, checked = read_manifest(folder), meta["manifest"]
            if all(manifest[name] == checked.get(name) for name in ("head", "conventions")):
                return manifest["head"], manifest["conventions"]["last_hidden"]
    return None


def _make(
    folder: Path,
    plan: Plan,
    samples: Samples,
    load: Load,
    left: list[int],
    *,
    is_described: bool,
    named: Path | None,
    workers: int,
    progress: Progress | None,
    start: str,
) -> dict[str, Any]:
    """Make what is missing, of the shards those that are left, and return meta.json. The folder's lock is held.

    is_described: whether to write meta.json; else {} is returned.
    """
    totals = _Totals(progress, plan, samples, left)
    workers = min(workers, len(left))
    try:
        write_plan(folder, plan, samples)
        has = has_weights(folder) if plan.is_native else has_embeddings(folder)
        job = Job(os.fspath(folder), plan, load, weights=not has)
        if workers > 1:
            run_workers(job, left, workers, totals.add, start=start)
        elif left or job.weights:
            run_here(job, samples, left, totals.add)
        return finish(folder, plan, named) if is_described else {}
    except OSError as error:
        if error.errno is None or error.strerror is None:  # a library's, which has a text of its own
            raise
        kept = sum(is_finished(folder, plan, shard) for shard in range(plan.num_shards))
        advice = f"{kept} of {plan.num_shards} shards are done and kept. Solve this, then run again with --resume"
        raise OSError(error.errno, f"{error.strerror}. {advice}", error.filename) from error
    finally:
        with suppress(OSError):  # a better error is on its way, and the next run removes them
            _remove_leftovers(folder)


def write_plan(folder: Path, plan: Plan, samples: Samples) -> None:
    """Write what comes before the weights, if it is not there yet. `finished_shards` has refused other caches."""
    _remove_leftovers(folder)
    if (folder / META_NAME).is_file():  # the cache is not complete any more
        fileio.remove(folder / META_NAME)
        fileio.fsync_dir(folder)
    for name, content in plan.sidecar_files().items():  # plan.json comes first
        _write_if_other(folder / SIDECAR / name, content)
    paths = {folder / SIDECAR / name: sha256 for name, sha256 in samples.checksums.items()}
    missing = {path.name for path, sha256 in paths.items() if not path.is_file() or sha256_file(path) != sha256}
    for name, content in samples.files().items() if missing else ():  # their bytes are made only where needed
        if name in missing:
            write_bytes(folder / SIDECAR / name, content)
    _note_other_draft(folder, plan)
    _write_if_other(folder / MANIFEST_NAME, manifest_bytes(plan.manifest))


def _note_other_draft(folder: Path, plan: Plan) -> None:
    """Log that a native cache gets another draft vocabulary than its manifest has."""
    with suppress(FileNotFoundError, CacheError):
        before, now = (each["selected_token_ids"] for each in (read_manifest(folder), plan.manifest))
        if before != now:
            what = f"another draft vocabulary, of {len(now):,} tokens in place of {len(before):,}"
            logger.info("%s: %s; manifest.json and meta.json are written again", folder, what)


def _write_if_other(path: Path, content: bytes) -> None:
    if not path.is_file() or path.stat().st_size != len(content) or path.read_bytes() != content:
        write_bytes(path, content)


def _remove_leftovers(folder: Path) -> None:
    for path in leftovers(folder):
        fileio.remove(path)


class _Totals:
    """Adds up what the workers report, for the progress callback."""

    def __init__(self, progress: Progress | None, plan: Plan, samples: Samples, left: list[int]) -> None:
        starts, firsts, self._total = samples.starts, plan.firsts, len(samples.ids)
        to_do = sum(int(starts[firsts[shard + 1]] - starts[firsts[shard]]) for shard in left)
        self._progress, self._done, self._bytes = progress, self._total - to_do, 0
        self.add(0, 0)

    def add(self, tokens: int, size: int) -> None:
        """Add tokens and bytes that were written."""
        self._done, self._bytes = self._done + tokens, self._bytes + size
        if self._progress is not None:
            self._progress(self._bytes, self._done, self._total)
