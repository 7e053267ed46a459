"""Builds a cache folder from a plan, its samples and the target: decides the order of all writes.

Each file is complete and durable before the next is written: sidecar/plan.json, batches and samples, manifest.json, the
target's weights, their receipt, then each shard followed by its receipt, and at the end meta.json. So a shard with a
receipt is finished, a folder with a meta.json is a finished cache, and resuming a killed run means building the shards
without a receipt.

Several runs may each build a partition (`part`) in one folder. The first writes everything before the weights, holding
the folder's lock; one writes the weights; each builds its shards; `seal` writes meta.json. Partitions built in folders
of their own are linked into one folder and sealed: `join`.
"""

from __future__ import annotations

import filecmp
import hashlib
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from niels_gpt.eagle3.disk import estimate, refuse_without_room
from niels_gpt.eagle3.format.layout import (
    EMBEDDINGS_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    SIDECAR,
    WEIGHTS_NAME,
    PathLike,
    refuse_links,
    shard_path,
)
from niels_gpt.eagle3.format.manifest import manifest_bytes, read_manifest
from niels_gpt.eagle3.format.meta import file_sha256
from niels_gpt.eagle3.format.plan import (
    PLAN_NAME,
    Run,
    TargetPlan,
    differing_fields,
    make_plan,
    open_plan,
    shards_of_part,
)
from niels_gpt.eagle3.format.samples import IDS_NAME, SAMPLES_NAME, RowLike, Samples
from niels_gpt.eagle3.format.shard_writer import receipt_path
from niels_gpt.eagle3.format.weights import EMBEDDINGS_RECEIPT, WEIGHTS_RECEIPT
from niels_gpt.eagle3.partitions import (
    Part,
    fix_settings,
    known_parts,
    part_command,
    part_lock,
    part_of,
    refuse_other_code,
    refuse_running,
    remove_parts,
    weights_claim,
)
from niels_gpt.eagle3.resume import (
    differing_manifest,
    finished_meta,
    finished_shards,
    is_finished,
    leftovers,
    refuse_other_manifest,
)
from niels_gpt.eagle3.shard_units import SHARDS, PlannedFolder
from niels_gpt.eagle3.totals import Counts, complete_meta, finish, has_target_weights
from niels_gpt.eagle3.workers import Found, Job, Load, Workers
from niels_gpt.engine.units import Commands, not_finished, states_of
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, write_bytes
from niels_gpt.storage.fresh_folder import fresh_folder
from niels_gpt.storage.locks import check_lease, file_lock, is_lost
from niels_gpt.work import Progress

logger = logging.getLogger(__name__)


_MAKE_PARTS = (
    "Build them: precompute --partitions N --partition I builds the shards I, I + N, and so on. The same command "
    "resumes a partition that was stopped"
)


class Produced(NamedTuple):
    """The result of a run."""

    meta: dict[str, Any]
    """The cache's meta.json; empty after a partition, in a folder that is not sealed."""
    shards: int
    """Shards that this run built; 0 if none was missing."""
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
    """Build a cache from the caller's tokenized samples and target, or the shards that are still missing.

    `niels-gpt eagle3 precompute` does the same with chats and a target by name. docs/formats.md describes the files.

    rows: each with `id`, and `input_ids` and `loss_mask` of equal length, raw and unpadded.
    load: returns the target, a causal language model of transformers, on a device; pickled for workers.
    manifest: the keys of manifest.json without num_samples; a native one also without num_shards, head and conventions,
        and with `targets` where last hidden states of other tokens than those with loss are stored.
        format_version and target_probs_topk decide the form.
    tokenizer, target, source, dropped: recorded in the plan; another value makes another plan. tokenizer needs `pad_id`
        and `sha256`, target needs `vocab_size` and `hidden_size`.
    run: how the target is run, also recorded: device, threads, attention, compute_dtype, and tensor_parallel where
        `load` loads a rank's part (`Placement`); None: this machine's device and torch's number of threads.
    batch_size, max_batch_tokens: most rows, and most rows times width, of a forward pass.
    workers: number of processes; never changes the bytes. resume: continue what the folder holds.
    part: (i, N), i from 1: build only the shards whose index modulo N is i - 1; other partitions may run in the same
        folder, and `niels-gpt seal` finishes it. code: identity of this machine's code, which must be equal for all
        partitions.
    progress: called with the bytes this run wrote, the finished tokens, and all tokens.
    start: how processes are started: spawn or fork.
    Raises: ValueError for a sample without a token or longer than seq_length, and (E705) for a target that does not run
        or has other sizes; CacheError for a folder that holds another cache (E703, E704) or that another process writes
        (E503), a disk without room (E501), and a cache from which a draft could learn nothing (E709); NonFiniteError
        (E708) naming sample and layer; OSError; RuntimeError (E506) if a worker died. Finished shards stay.
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
    how: dict[str, Any] = {"workers": workers, "resume": resume, "part": part, "code": code or {}, "start": start}
    return TargetRun(Path(cache_dir), plan, samples, load, progress=progress, **how).make()


@dataclass
class TargetRun:
    """One run that builds a cache in a folder: plan, samples, target, and how to work."""

    folder: Path
    plan: TargetPlan
    samples: Samples
    load: Load
    """Returns the target on a device. Called once in each process that has work, and once for a native cache that lacks
    nothing but meta.json, as its manifest is not trusted about the target's head."""
    named: Path | None = None
    """Name of the folder in errors and warnings, if it gets another name later."""
    workers: int = 1
    """Number of processes; 1: this one. Never changes the bytes."""
    resume: bool = False
    """Continue what the folder holds; a partition always does."""
    part: Part | None = None
    """(i, N), i from 1, for --partition i - 1 --partitions N: build only the shards whose index modulo N is i - 1, and
    no meta.json. Other partitions may run in the same folder; `seal` finishes it."""
    code: Mapping[str, Any] = field(default_factory=dict)
    """Identity of this machine's code, which must be equal for all partitions."""
    command: Sequence[str] = ()
    """See `partitions.fix_settings`."""
    claimed: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context that is held until the partition is locked. Its error ends the run before anything is written."""
    progress: Progress | None = None
    """Called with the bytes this run wrote, finished tokens and all tokens; first with the tokens already finished."""
    start: str = "spawn"
    """How processes are started: spawn, or fork if nothing has used torch's threads yet."""

    def make(self) -> Produced:
        """Build the cache, or its missing files. The target runs over a few tokens before anything is written.

        Raises: CacheError for a folder that must not be continued (E703, E704, E712; see `finished_shards`), a disk
            without room (E501), another process that writes the cache or a shard of this partition (E503), or a cache
            from which a draft could learn nothing (E709); ValueError (E705) for a target that does not run or has other
            sizes than planned; NonFiniteError naming sample and layer; OSError on a full disk; RuntimeError if a worker
            died; the errors of `load`. Finished shards stay; a run with `resume` builds the others.
        """
        done = finished_shards(self.folder, self.plan, resume=self.resume, part=self.part)
        sizes = estimate(self.folder, self.plan, self.samples, done=done, part=self.part)
        refuse_without_room(self.folder, sizes, self.plan.manifest)
        left = [shard for shard in self._wanted if shard not in done]
        if self.part is not None and not left and self._has_all_but_shards():
            return Produced(finished_meta(self.folder, self.plan) or {}, 0)
        found, number = self._recorded_head(), max(1, min(self.workers, len(left)))
        with Workers(self.plan, self.samples, self.load, number, start=self.start) as workers:
            # Before the first write, so that a target that cannot run leaves no folder behind.
            if left or (self.plan.is_native and found is None):
                found = workers.tried()
            if found is not None:
                self.plan = self.plan.with_head(*found)
            made = self._whole(workers) if self.part is None else self._part(self.part, workers)
        _warn_of_few_positions(self.named or self.folder, made.meta)
        return made

    @property
    def _wanted(self) -> list[int]:
        """The shards of the partition, or all of them."""
        return shards_of_part(self.plan.num_shards, self.part)

    def _left(self) -> list[int]:
        """Return the shards to build, now that the lock is held: another run may have built some meanwhile."""
        done = finished_shards(self.folder, self.plan, resume=self.resume, part=self.part)
        return [shard for shard in self._wanted if shard not in done]

    def _whole(self, workers: Workers) -> Produced:
        """Build everything that is missing."""
        with _alone_in(self.folder) as lock:
            left = self._left()
            # Asked again under the lock: another run may have sealed the folder since `make` looked.
            meta = None if left else complete_meta(self.folder, self.plan)
            made = Produced(meta or {}, len(left), meta is None)
            if meta is None:
                before = finished_meta(self.folder)
                with self._cleaned_up(lock):
                    self._write_plan()
                    self._make(workers, left, [lock])
                    check = partial(check_lease, lock)
                    made = made._replace(meta=finish(self.folder, self.plan, self.named, before=before, check=check))
            remove_parts(self.folder)
        return made

    def _part(self, part: Part, workers: Workers) -> Produced:
        """Build what a partition lacks. Other partitions may run at the same time."""
        folder, lock = self.folder, self.folder / SIDECAR / LOCK_NAME
        with ExitStack() as held:
            with self.claimed(), file_lock(lock, folder, "is being written", wait=True):
                refuse_running(folder, part)
                left = self._left()
                if not left and self._has_all_but_shards():  # another machine has built them meanwhile
                    return Produced(finished_meta(folder, self.plan) or {}, 0)
                refuse_other_manifest(folder, self.plan, part)
                refuse_other_code(folder, self.code)
                check_lease(lock)
                with self._cleaned_up(lock):
                    self._write_plan()
                    fix_settings(folder, self.code, self.command)
                # Taken under the folder's lock: a process that holds that and finds no partition locked is alone.
                lock_of_part = held.enter_context(part_lock(folder, part))
            with self._cleaned_up(lock_of_part), weights_claim(folder) as (lock_of_weights, is_ours):
                self._make(workers, left, [lock_of_part, lock_of_weights], may_write_weights=is_ours)
        return Produced(finished_meta(folder, self.plan) or {}, len(left))

    def _make(
        self, workers: Workers, left: list[int], locks: Sequence[Path], *, may_write_weights: bool = True
    ) -> None:
        """Build the shards `left`, and the target's weights if they are missing.

        locks: held by this run. A lost lease ends it before the next shard is created or renamed.
        """

        def check() -> None:
            for lock in locks:
                check_lease(lock)

        written = self._reporting(left)
        weights = may_write_weights and not has_target_weights(self.folder, self.plan)
        if left or weights:
            workers.make(Job(os.fspath(self.folder), self.plan, weights), left, written, check)

    def _reporting(self, left: list[int]) -> Callable[[int, int], None]:
        """Return a function that adds up the workers' tokens and bytes for `progress`."""
        starts, firsts, total = self.samples.starts, self.plan.firsts, len(self.samples.ids)
        done = total - sum(int(starts[firsts[shard + 1]] - starts[firsts[shard]]) for shard in left)
        num_bytes = 0

        def add(tokens: int, size: int) -> None:
            nonlocal done, num_bytes
            done, num_bytes = done + tokens, num_bytes + size
            if self.progress is not None:
                self.progress(num_bytes, done, total)

        add(0, 0)
        return add

    def _recorded_head(self) -> Found:
        """Return the target's head as a finished native cache's manifest states it; None for any other folder.

        meta.json repeats these keys and has its own checksum: a manifest that differs from it is not trusted.
        """
        with suppress(FileNotFoundError, CacheError):
            if self.plan.is_native and (meta := finished_meta(self.folder)) is not None:
                manifest, checked = read_manifest(self.folder), meta["manifest"]
                if all(manifest[name] == checked.get(name) for name in ("head", "conventions")):
                    return manifest["head"], manifest["conventions"]["last_hidden"]
        return None

    def _has_all_but_shards(self) -> bool:
        """Return whether every file of the plan but shards is there: a partition with all its shards is then done."""
        files = {name: hashlib.sha256(content).hexdigest() for name, content in self.plan.sidecar_files().items()}
        with suppress(FileNotFoundError, CacheError):
            return (
                not differing_manifest(read_manifest(self.folder), self.plan)
                and all(_has_sha256(self.folder / SIDECAR / name, sha256) for name, sha256 in files.items())
                and all(_shared_files(self.folder, self.plan).values())
            )
        return False

    def _write_plan(self) -> None:
        """Write what comes before the weights, unless it is there. `finished_shards` has refused other caches."""
        folder, plan = self.folder, self.plan
        self._remove_leftovers()
        # First of all writes: with meta.json gone, no reader takes the folder for finished while files change.
        if (folder / META_NAME).is_file():
            fileio.remove(folder / META_NAME)
            fileio.fsync_dir(folder)
        write_sidecar(folder, plan, self.samples)
        with suppress(FileNotFoundError, CacheError):
            before, now = (each["selected_token_ids"] for each in (read_manifest(folder), plan.manifest))
            if before != now:
                what = f"the draft vocabulary has {len(now):,} tokens now, {len(before):,} before"
                logger.info("%s: %s; writing manifest.json and meta.json again", folder, what)
        _write_if_other(folder / MANIFEST_NAME, manifest_bytes(plan.manifest))

    @contextmanager
    def _cleaned_up(self, lock: Path) -> Iterator[None]:
        """Add the number of kept shards to an OSError of the block; remove the block's temporary files.

        lock: if its lease was lost, the files may be another run's and stay.
        """
        try:
            yield
        except OSError as error:
            if error.errno is None or error.strerror is None:  # a library's, which has a text of its own
                raise
            total = self.plan.num_shards
            kept = sum(is_finished(self.folder, self.plan, shard) for shard in range(total))
            advice = (
                f"{kept} of {total} shards are finished and stay. Solve this, then run the same command with --resume"
            )
            raise OSError(error.errno, f"{error.strerror}. {advice}", error.filename) from error
        finally:
            with suppress(OSError):  # a better error is on its way, and the next run removes them
                if not is_lost(lock):
                    self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove temporary files; a partition removes only its shards' files, as other partitions may be running."""
        for path in leftovers(self.folder, None if self.part is None else self._wanted):
            fileio.remove(path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[Path]:
    """Hold a folder's lock, and make sure that no partition is running; yield the lock."""
    lock = folder / SIDECAR / LOCK_NAME
    with file_lock(lock, folder, "is being written", wait=False):
        refuse_running(folder)
        yield lock


def _warn_of_few_positions(cache: Path, meta: dict[str, Any]) -> None:
    if meta and (warning := Counts.of_meta(meta).warning):
        logger.warning("%s: %s", cache, warning, extra={"code": "W703"})


def write_sidecar(folder: Path, plan: TargetPlan, samples: Samples) -> None:
    """Write the plan's files and the samples, unless they are there."""
    # plan.json first: a folder with any other file but no plan is refused as another tool's.
    for name, content in plan.sidecar_files().items():
        _write_if_other(folder / SIDECAR / name, content)
    paths = {folder / SIDECAR / name: sha256 for name, sha256 in samples.checksums.items()}
    missing = {path.name for path, sha256 in paths.items() if not _has_sha256(path, sha256)}
    for name, content in samples.files().items() if missing else ():  # their bytes are made only where needed
        if name in missing:
            write_bytes(folder / SIDECAR / name, content)


def _has_sha256(path: Path, sha256: str) -> bool:
    """Return whether a file has this sha256. A file that is almost all holes is not read."""
    with suppress(CacheError):
        return file_sha256(path) == sha256
    return False


def _write_if_other(path: Path, content: bytes) -> None:
    if not path.is_file() or path.stat().st_size != len(content) or path.read_bytes() != content:
        write_bytes(path, content)


# --- the seal ---------------------------------------------------------------------------------------------------------


class Sealed(NamedTuple):
    """A finished cache."""

    meta: dict[str, Any]
    """Its meta.json."""
    is_new: bool
    """Whether meta.json was written now; False if the cache was already sealed."""


def seal(
    cache_dir: PathLike,
    *,
    named: Path | None = None,
    deep: bool = True,
    commands: Commands | None = None,
    progress: Progress | None = None,
) -> Sealed:
    """Check everything that the partitions built, and write meta.json. A sealed cache is left unchanged.

    named: what errors call the folder, if it gets another name later.
    commands: named by errors; None: the ones of `niels-gpt eagle3 precompute`.
    deep: read all shards; False: compare receipts and sizes only.
    progress: called with shards, bytes read, and all bytes to read.
    Raises: CacheError E712 for unfinished shards, with the commands that build them, and for a missing or damaged plan,
        samples or weights; CacheError E503 while a partition is being built; CacheError E709 if a draft could learn
        nothing; OSError.
    """
    folder = Path(cache_dir)
    refuse_links(folder)
    commands = commands or _commands(folder)
    if not os.path.lexists(folder / SIDECAR / PLAN_NAME):
        found = "no plan of partitions is there"
        remedy = f"Build a partition: {part_command(folder, (1, 2))}"
        raise CacheError(named or folder, found, remedy=remedy, code="E712")
    with _alone_in(folder) as lock:
        sealed = _sealed(folder, named or folder, commands, deep, progress, partial(check_lease, lock))
        remove_parts(folder)
    if sealed.is_new:
        _warn_of_few_positions(named or folder, sealed.meta)
    return sealed


def _sealed(
    folder: Path,
    named: Path,
    commands: Commands,
    deep: bool,
    progress: Progress | None = None,
    check: Callable[[], object] = lambda: None,
) -> Sealed:
    """Seal a folder that nobody else writes. check: raises CacheError if the lease was lost."""
    plan = _plan_of(folder, named, commands)
    if (meta := complete_meta(folder, plan)) is not None:
        return Sealed(meta, False)
    _refuse_unfinished(PlannedFolder(named, folder, plan), commands, deep, progress)
    for path in leftovers(folder):
        fileio.remove(path)
    check()
    return Sealed(finish(folder, plan, named, check=check), True)


def _shared_files(folder: Path, plan: TargetPlan) -> dict[str, bool]:
    """Return the files of samples and weights by name, and whether each is there undamaged."""
    samples = {SAMPLES_NAME: plan.samples["sha256"], IDS_NAME: plan.samples["ids_sha256"]}
    found = {f"{SIDECAR}/{name}": _has_sha256(folder / SIDECAR / name, sha256) for name, sha256 in samples.items()}
    weights, receipt = (WEIGHTS_NAME, WEIGHTS_RECEIPT) if plan.is_native else (EMBEDDINGS_NAME, EMBEDDINGS_RECEIPT)
    return found | dict.fromkeys((weights, f"{SIDECAR}/{receipt}"), has_target_weights(folder, plan))


def _refuse_unfinished(plan: PlannedFolder, commands: Commands, deep: bool, progress: Progress | None) -> None:
    """Raise CacheError for unfinished shards. Reads shards (`deep`) only if none is missing."""
    for is_deep in (False, True) if deep else (False,):
        units = states_of(plan, SHARDS, deep=is_deep, progress=progress if is_deep else None)
        if any(unit.state != "finished" for unit in units):
            raise not_finished(plan, SHARDS, units, commands)


def _commands(folder: Path) -> Commands:
    """Return the commands for a folder that `niels-gpt eagle3 precompute` builds."""
    parts = known_parts(folder)
    return Commands(
        lambda shard: part_command(folder, part_of(shard, parts)),
        part_command(folder, None),
        shlex.join(["niels-gpt", "seal", str(folder)]),
    )


def _plan_of(folder: Path, named: Path, commands: Commands) -> TargetPlan:
    """Return the plan after checking its files, the samples and the target's weights. Raises: CacheError."""
    again = f"Build a partition again: {commands.unit(0)}"
    try:
        plan = open_plan(folder)
    except (FileNotFoundError, CacheError) as error:
        problem = error.problem if isinstance(error, CacheError) else str(error)
        raise CacheError(named, f"its plan cannot be read: {problem}", remedy=again, code="E712") from error
    wrong = [name for name, is_whole in _shared_files(folder, plan).items() if not is_whole]
    if wrong:
        raise CacheError(named, f"{' and '.join(wrong)}: missing or damaged", remedy=again, code="E712")
    return plan


# --- parts in folders of their own ------------------------------------------------------------------------------------


class Joined(NamedTuple):
    """A cache joined from partitions."""

    meta: dict[str, Any]
    """Its meta.json."""
    linked_bytes: int
    """Bytes of files shared with the partitions by hard links."""
    copied_bytes: int
    """Bytes of files that could not be linked."""


def join(out: PathLike, parts: Sequence[PathLike]) -> Joined:
    """Join the partitions of one plan in `out`, which appears complete or not at all. The partitions are not changed.

    Raises: FileNotFoundError for a folder without a plan; CacheError if plans or draft vocabularies differ (E703), a
        shard is missing (E702) or differs between two folders (E701), samples or weights are damaged in every folder, a
        partition is being written (E503), or `out` holds anything or lies in a partition.
    """
    folders = list({os.path.realpath(part): Path(part) for part in parts}.values())
    with fresh_folder(Path(out), sources=folders) as work, ExitStack() as locks:
        for folder in folders:
            refuse_links(folder)
            if (folder / SIDECAR).is_dir():
                locks.enter_context(file_lock(folder / SIDECAR / LOCK_NAME, folder, "is being written", wait=False))
                refuse_running(folder)
        plan = _common_plan(folders)
        fileio.make_dir(work / SIDECAR)
        for name, content in plan.sidecar_files().items():
            write_bytes(work / SIDECAR / name, content)
        write_bytes(work / MANIFEST_NAME, manifest_bytes(plan.manifest))
        linked = copied = 0
        for name, folder in _sources(folders, plan).items():
            size = (folder / name).stat().st_size
            is_linked = fileio.link_or_copy(folder / name, work / name)
            linked, copied = linked + size * is_linked, copied + size * (not is_linked)
        try:
            meta = _sealed(work, Path(out), Commands(lambda _: "", "", ""), deep=True).meta
        except CacheError as error:
            if error.code != "E712":
                raise
            found = f"{error.found.replace(str(work), str(out))}, counted over all the folders"
            raise CacheError(folders[0], found, remedy=_MAKE_PARTS, code="E702") from error
        return Joined(meta, linked, copied)


def _common_plan(folders: Sequence[Path]) -> TargetPlan:
    """Return the plan that all partitions have. Raises: FileNotFoundError, CacheError."""
    try:
        first, *others = (open_plan(folder) for folder in folders)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. Expected a folder that precompute --partition wrote") from error
    for folder, plan in zip(folders[1:], others, strict=True):
        names = differing_fields(first.record, plan.record)
        names += differing_fields(first.manifest, plan.manifest, "manifest.")
        if names:
            raise CacheError(
                folder,
                f"another plan than {folders[0]} has (different fields: {sorted({*names})})",
                "partitions built with equal options, except --partition",
                f"Build it again, in a fresh folder, with the options of {folders[0]}",
                code="E703",
            )
    return first


def _sources(folders: Sequence[Path], plan: TargetPlan) -> dict[str, Path]:
    """Return a folder that has each shared file and shard, by the file's name in a cache.

    Sizes are compared here, bytes by the seal. Raises: CacheError for a shard that is there twice with different bytes.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        for name, is_whole in _shared_files(folder, plan).items():
            if is_whole:
                found.setdefault(name, folder)
        for shard in range(plan.num_shards):
            if not is_finished(folder, plan, shard):
                continue
            for name in (shard_path("", shard), str(receipt_path("", shard))):
                other = found.setdefault(name, folder)
                if other != folder and not filecmp.cmp(other / name, folder / name, shallow=False):
                    raise CacheError(
                        folder / name,
                        f"its bytes differ from {other / name}",
                        "equal bytes, because both folders have the same plan",
                        "One of the two is damaged: build that partition again in a fresh folder",
                        code="E701",
                    )
    return found
