"""A plan, its samples and the target -> a cache folder: the order of all writes, by any number of processes.

The files are written in this order, each one complete and durable before the next: sidecar/plan.json, the rest of the
plan, the samples, manifest.json, the target's weights and then their receipt, each shard and then its receipt, and at
the end meta.json. So a shard with a receipt is finished, a folder with a meta.json is a finished cache, and a run that
was killed is resumed by making the shards without a receipt.

Of several runs with `part` in one folder, the first writes all that comes before the weights, while it holds the
folder's lock; one writes the weights; each makes its shards, and `eagle3.parts.seal` writes meta.json.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from niels_gpt.eagle3.format.layout import LOCK_NAME, MANIFEST_NAME, SIDECAR, PathLike
from niels_gpt.eagle3.format.manifest import manifest_bytes, read_manifest
from niels_gpt.eagle3.format.meta import file_sha256
from niels_gpt.eagle3.format.plan import Plan, Run, make_plan, shards_of_part
from niels_gpt.eagle3.format.samples import RowLike, Samples
from niels_gpt.eagle3.parts.folder import (
    Part,
    fix_settings,
    part_lock,
    refuse_other_code,
    refuse_running,
    remove_parts,
    weights_claim,
)
from niels_gpt.eagle3.produce.estimate import estimate, refuse_without_room
from niels_gpt.eagle3.produce.finalize import complete_meta, finish, has_target_weights
from niels_gpt.eagle3.produce.positions import Counts
from niels_gpt.eagle3.produce.resume_checks import (
    differing_manifest,
    finished_meta,
    finished_shards,
    is_finished,
    leftovers,
    refuse_other_manifest,
)
from niels_gpt.eagle3.produce.trial import Found
from niels_gpt.eagle3.produce.workers import Job, Load, load_and_try, run_here, run_workers, try_in_subprocess
from niels_gpt.progress import Progress
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, write_bytes
from niels_gpt.storage.locks import check_lease, file_lock, is_lost

logger = logging.getLogger(__name__)


class Produced(NamedTuple):
    """The result of a run."""

    meta: dict[str, Any]
    """The cache's meta.json; empty after a run with `part` in a folder that is not sealed."""
    shards: int
    """Shards that this run made; 0 where none was missing."""
    is_described: bool = False
    """Whether the run wrote meta.json."""


def make_target_cache(
    cache_dir: PathLike,
    rows: Iterable[RowLike],
    load: Load,
    manifest: Mapping[str, Any],
    *,
    tokenizer: Mapping[str, Any],
    target: Mapping[str, Any],
    source: Mapping[str, Any] | None = None,
    dropped: Mapping[str, int] | None = None,
    run: Mapping[str, Any] | None = None,
    batch_size: int = 8,
    max_batch_tokens: int = 16_384,
    workers: int = 1,
    resume: bool = False,
    part: Part | None = None,
    code: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    start: str = "spawn",
) -> Produced:
    """Make a cache of the caller's tokenized samples and target, or the shards that are still missing.

    What `niels-gpt eagle3 precompute` does with chats and a target by name; docs/formats.md describes the files.

    rows: each with `id`, and `input_ids` and `loss_mask` of equal length, raw and unpadded.
    load: returns the target on a device, a causal language model as transformers has them; pickled for workers.
    manifest: the keys of manifest.json without num_samples, and without num_shards, head and conventions in a native
        one. Its form is format_version and target_probs_topk.
    tokenizer, target, source, dropped: recorded in the plan; tokenizer needs `pad_id` and `sha256`, target `vocab_size`
        and `hidden_size`. A run with others is another plan.
    run: how the target is run, recorded too: device, threads, attention, compute_dtype; None: as it is here, with
        the threads that torch has.
    batch_size, max_batch_tokens: rows of a forward pass, and rows times width, at most.
    workers, resume, part, code, progress, start, Raises: as `produce`; ValueError for a sample that has no token or is
        longer than seq_length.
    """
    samples = Samples.of_rows(rows)
    plan = make_plan(
        manifest,
        samples,
        target=target,
        tokenizer=tokenizer,
        source=source or {},
        dropped=dropped or {},
        run=run or asdict(Run.here(None, attention="sdpa", threads=torch.get_num_threads())),
        batch_size=batch_size,
        max_batch_tokens=max_batch_tokens,
    )
    how: dict[str, Any] = {"workers": workers, "resume": resume, "part": part, "code": code, "start": start}
    return produce(cache_dir, plan, samples, load, progress=progress, **how)


def produce(
    cache_dir: PathLike,
    plan: Plan,
    samples: Samples,
    load: Load,
    *,
    named: Path | None = None,
    workers: int = 1,
    resume: bool = False,
    part: Part | None = None,
    code: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    claimed: Callable[[], AbstractContextManager[object]] = nullcontext,
    progress: Progress | None = None,
    start: str = "spawn",
) -> Produced:
    """Make the cache of a plan in a folder, or what is missing of it.

    load: returns the target on a device. Called once in each process where work is left, and once for a native cache
        that is not finished, whose manifest is not believed about the target's head.
    named: what errors and warnings about the finished cache call the folder, where it gets another name later.
    workers: processes; 1 does the work in this one. The bytes do not depend on it.
    part: (i, N), i from 1, the command's --partition i - 1 --partitions N: make only the shards whose index divided by
        N leaves i - 1, and no meta.json, also beside other parts that are being made in the same folder; it continues
        without `resume`. eagle3.parts.seal finishes the folder.
    code: of this machine, which all parts must have in common. command: as eagle3.parts.folder.fix_settings.
    claimed: a context that is held until the part is locked. An error of it ends the run before anything is written.
    progress: items are the bytes that this run wrote, units are tokens; first called with the tokens already done.
    start: how processes are started: spawn, or fork where nothing has used torch's threads yet.
    Before anything is written, the target is run over a few tokens.
    Raises: as `finished_shards` and `load_and_try`; CacheError where the disk has no room, before anything is written,
        while another process writes the cache or a shard of this part, and where a draft could learn nothing
        (positions.py); NonFiniteError naming sample and layer; OSError on a full disk; RuntimeError where a worker
        died. Finished shards then stay, and a run with `resume` makes the others.
    """
    folder, wanted = Path(cache_dir), shards_of_part(plan.num_shards, part)
    done = finished_shards(cache_dir, plan, resume=resume, part=part)
    refuse_without_room(cache_dir, estimate(cache_dir, plan, samples, done=done, part=part))
    left = [shard for shard in wanted if shard not in done]
    if part is not None and not left and _has_all_but_shards(folder, plan, samples):
        return Produced(finished_meta(folder, plan) or {}, 0)
    plan, load = _tried(folder, plan, samples, load, workers=min(workers, len(left)), is_fresh=not done, start=start)
    make = partial(_make, folder, plan, samples, load, workers=workers, progress=progress, start=start)
    if part is None:
        meta, made, is_described = _whole(folder, plan, samples, make, resume=resume, named=named)
    else:
        made = _part(folder, plan, samples, make, part, code or {}, command, claimed)
        meta, is_described = finished_meta(folder, plan) or {}, False
    if meta and (warning := Counts.of_meta(meta).warning):
        logger.warning("%s: %s", named or folder, warning, extra={"code": "W703"})
    return Produced(meta, made, is_described)


def _whole(
    folder: Path, plan: Plan, samples: Samples, make: Callable[..., None], *, resume: bool, named: Path | None
) -> tuple[dict[str, Any], int, bool]:
    """Make all that is missing; return meta.json, the number of shards made, and whether meta.json was written."""
    lock = folder / SIDECAR / LOCK_NAME
    with file_lock(lock, folder, "is being written", wait=False):
        refuse_running(folder)
        done = finished_shards(folder, plan, resume=resume)  # another run may have ended meanwhile
        left = [shard for shard in range(plan.num_shards) if shard not in done]
        meta = None if left else complete_meta(folder, plan)
        is_described = meta is None
        if meta is None:
            before = finished_meta(folder)
            with _cleaned_up(folder, plan, lock):
                write_plan(folder, plan, samples)
                make(left, locks=[lock])
                meta = finish(folder, plan, named, before=before, check=partial(check_lease, lock))
        remove_parts(folder)
        return meta, len(left), is_described


def _part(
    folder: Path,
    plan: Plan,
    samples: Samples,
    make: Callable[..., None],
    part: Part,
    code: Mapping[str, Any],
    command: Sequence[str],
    claimed: Callable[[], AbstractContextManager[object]],
) -> int:
    """Make what is missing of a part; return the number of shards made. Other parts may be made at the same time."""
    wanted, lock = shards_of_part(plan.num_shards, part), folder / SIDECAR / LOCK_NAME
    with ExitStack() as held:
        with claimed(), file_lock(lock, folder, "is being written", wait=True):
            refuse_running(folder, part)
            done = finished_shards(folder, plan, resume=True, part=part)
            left = [shard for shard in wanted if shard not in done]
            if not left and _has_all_but_shards(folder, plan, samples):
                return 0  # another machine has made them meanwhile
            refuse_other_manifest(folder, plan, part)
            refuse_other_code(folder, code)
            check_lease(lock)
            with _cleaned_up(folder, plan, lock, wanted):
                write_plan(folder, plan, samples, wanted)
                fix_settings(folder, code, command)
            lock_of_part = held.enter_context(part_lock(folder, part))
        with _cleaned_up(folder, plan, lock_of_part, wanted), weights_claim(folder) as (lock_of_weights, is_ours):
            make(left, locks=[lock_of_part, lock_of_weights], may_write_weights=is_ours)
    return len(left)


def _has_all_but_shards(folder: Path, plan: Plan, samples: Samples) -> bool:
    """Return whether a folder has all files of a plan but shards, so that a part with all its shards has no work."""
    files = {name: hashlib.sha256(content).hexdigest() for name, content in plan.sidecar_files().items()}
    files |= samples.checksums
    with suppress(FileNotFoundError, CacheError):
        return (
            not differing_manifest(read_manifest(folder), plan)
            and all(file_sha256(folder / SIDECAR / name) == sha256 for name, sha256 in files.items())
            and has_target_weights(folder, plan)
        )
    return False


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
    locks: Sequence[Path],
    workers: int,
    progress: Progress | None,
    start: str,
    may_write_weights: bool = True,
) -> None:
    """Make those shards that are left, and the target's weights if they are missing.

    locks: that are held. A lost lease ends it before the next shard is created or gets its name.
    """

    def check() -> None:
        for lock in locks:
            check_lease(lock)

    totals = _Totals(progress, plan, samples, left)
    workers = min(workers, len(left))
    has = not may_write_weights or has_target_weights(folder, plan)
    job = Job(os.fspath(folder), plan, load, weights=not has)
    if workers > 1:
        run_workers(job, left, workers, totals.add, check, start=start)
    elif left or job.weights:
        run_here(job, samples, left, totals.add, check)


@contextmanager
def _cleaned_up(folder: Path, plan: Plan, lock: Path, shards: Collection[int] | None = None) -> Iterator[None]:
    """Say on a full disk, or another error of it, what is kept, and remove the temporary files of the block.

    lock: where its lease was lost, the files may be another run's. shards: as `leftovers`.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.strerror is None:  # a library's, which has a text of its own
            raise
        kept = sum(is_finished(folder, plan, shard) for shard in range(plan.num_shards))
        advice = f"{kept} of {plan.num_shards} shards are done and kept. Solve this, then run again with --resume"
        raise OSError(error.errno, f"{error.strerror}. {advice}", error.filename) from error
    finally:
        with suppress(OSError):  # a better error is on its way, and the next run removes them
            if not is_lost(lock):
                _remove_leftovers(folder, shards)


def write_plan(folder: Path, plan: Plan, samples: Samples, shards: Collection[int] | None = None) -> None:
    """Write what comes before the weights, if it is not there yet. `finished_shards` has refused other caches.

    shards: of the part that is made, if not the whole cache.
    """
    _remove_leftovers(folder, shards)
    if (folder / META_NAME).is_file():  # the cache is not complete any more
        fileio.remove(folder / META_NAME)
        fileio.fsync_dir(folder)
    write_sidecar(folder, plan, samples)
    _note_other_draft(folder, plan)
    _write_if_other(folder / MANIFEST_NAME, manifest_bytes(plan.manifest))


def write_sidecar(folder: Path, plan: Plan, samples: Samples) -> None:
    """Write the plan's own files and the samples, if they are not there yet."""
    for name, content in plan.sidecar_files().items():  # plan.json comes first
        _write_if_other(folder / SIDECAR / name, content)
    paths = {folder / SIDECAR / name: sha256 for name, sha256 in samples.checksums.items()}
    missing = {path.name for path, sha256 in paths.items() if not _has_sha256(path, sha256)}
    for name, content in samples.files().items() if missing else ():  # their bytes are made only where needed
        if name in missing:
            write_bytes(folder / SIDECAR / name, content)


def _note_other_draft(folder: Path, plan: Plan) -> None:
    """Log that a native cache gets another draft vocabulary than its manifest has."""
    with suppress(FileNotFoundError, CacheError):
        before, now = (each["selected_token_ids"] for each in (read_manifest(folder), plan.manifest))
        if before != now:
            what = f"another draft vocabulary, of {len(now):,} tokens in place of {len(before):,}"
            logger.info("%s: %s; manifest.json and meta.json are written again", folder, what)


def _has_sha256(path: Path, sha256: str) -> bool:
    """Return whether a file is there with these bytes. One that is almost all holes is not read."""
    with suppress(CacheError):
        return file_sha256(path) == sha256
    return False


def _write_if_other(path: Path, content: bytes) -> None:
    if not path.is_file() or path.stat().st_size != len(content) or path.read_bytes() != content:
        write_bytes(path, content)


def _remove_leftovers(folder: Path, shards: Collection[int] | None = None) -> None:
    for path in leftovers(folder, shards):
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
