"""A plan, its samples and the target -> a cache folder: the order of all writes, by any number of processes.

The files are written in this order, each one complete and durable before the next: sidecar/plan.json, the rest of the
plan, the samples, manifest.json, the target's weights and then their receipt, each shard and then its receipt, and at
the end meta.json. So a shard with a receipt is finished, a folder with a meta.json is a finished cache, and a run that
was killed is resumed by making the shards without a receipt.

Of several runs with `part` in one folder, the first writes all that comes before the weights, while it holds the
folder's lock; one writes the weights; each makes its shards, and `seal` writes meta.json. Parts that were made in
folders of their own are linked into one folder, which is sealed: `join`.
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
from niels_gpt.progress import Progress
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, write_bytes
from niels_gpt.storage.fresh_folder import fresh_folder
from niels_gpt.storage.locks import check_lease, file_lock, is_lost

logger = logging.getLogger(__name__)


_MAKE_PARTS = (
    "Make them: precompute --partitions N --partition I makes the shards I, I + N, and so on, and what they share; the "
    "same command resumes one that was stopped"
)


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
    workers: processes; the bytes do not depend on it. resume: continue what the folder holds.
    part: (i, N), i from 1: make only the shards whose index divided by N leaves i - 1, also beside other parts in the
        same folder, which `niels-gpt seal` finishes; code: of this machine, which all parts must have in common.
    progress: called with the bytes that this run wrote, the tokens that are done, and all tokens.
    start: how processes are started, spawn or fork.
    Raises: ValueError for a sample that has no token or is longer than seq_length, and (E705) for a target that does
        not run or has other sizes; CacheError where the folder holds another cache (E703, E704), another process writes
        it (E503), the disk has no room (E501), or a draft could learn nothing (E709); NonFiniteError (E708) naming
        sample and layer; OSError; RuntimeError (E506) where a worker died. Finished shards stay.
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
    """A cache that is made in a folder: its plan, its samples, its target, and how the work is done."""

    folder: Path
    plan: TargetPlan
    samples: Samples
    load: Load
    """Returns the target on a device. Called once in each process where work is left, and once for a native cache that
    is not finished, whose manifest is not believed about the target's head."""
    named: Path | None = None
    """What errors and warnings about the finished cache call the folder, where it gets another name later."""
    workers: int = 1
    """Processes; 1 does the work in this one. The bytes do not depend on it."""
    resume: bool = False
    """Whether what is there is continued; a part always is."""
    part: Part | None = None
    """(i, N), i from 1, the command's --partition i - 1 --partitions N: make only the shards whose index divided by N
    leaves i - 1, and no meta.json, also beside other parts that are being made in the same folder; `seal` ends it."""
    code: Mapping[str, Any] = field(default_factory=dict)
    """Of this machine, which all parts must have in common."""
    command: Sequence[str] = ()
    """See `partitions.fix_settings`."""
    claimed: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context that is held until the part is locked. An error of it ends the run before anything is written."""
    progress: Progress | None = None
    """Items are the bytes that this run wrote, units are tokens; first called with the tokens already done."""
    start: str = "spawn"
    """How processes are started: spawn, or fork where nothing has used torch's threads yet."""

    def make(self) -> Produced:
        """Make the cache, or what is missing of it. Before anything is written, the target is run over a few tokens.

        Raises: CacheError where the folder may not be continued (E703, E704, E712, see `finished_shards`), where the
            disk has no room (E501), before anything is written, while another process writes the cache or a shard of
            this part (E503), and where a draft could learn nothing (E709); ValueError (E705) where the target does not
            run or has other sizes than planned; NonFiniteError naming sample and layer; OSError on a full disk;
            RuntimeError where a worker died; what `load` raises. Finished shards then stay, and a run with `resume`
            makes the others.
        """
        done = finished_shards(self.folder, self.plan, resume=self.resume, part=self.part)
        refuse_without_room(self.folder, estimate(self.folder, self.plan, self.samples, done=done, part=self.part))
        left = [shard for shard in self._wanted if shard not in done]
        if self.part is not None and not left and self._has_all_but_shards():
            return Produced(finished_meta(self.folder, self.plan) or {}, 0)
        found, number = self._recorded_head(), max(1, min(self.workers, len(left)))
        with Workers(self.plan, self.samples, self.load, number, start=self.start) as workers:
            if left or (self.plan.is_native and found is None):
                found = workers.tried()
            if found is not None:
                self.plan = self.plan.with_head(*found)
            made = self._whole(workers) if self.part is None else self._part(self.part, workers)
        _warn_of_few_positions(self.named or self.folder, made.meta)
        return made

    @property
    def _wanted(self) -> list[int]:
        """The shards of the part, or all of them."""
        return shards_of_part(self.plan.num_shards, self.part)

    def _left(self) -> list[int]:
        """Return the shards to make, now that the lock is held: another run may have made some meanwhile."""
        done = finished_shards(self.folder, self.plan, resume=self.resume, part=self.part)
        return [shard for shard in self._wanted if shard not in done]

    def _whole(self, workers: Workers) -> Produced:
        """Make all that is missing."""
        with _alone_in(self.folder) as lock:
            left = self._left()
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
        """Make what is missing of a part. Other parts may be made at the same time."""
        folder, lock = self.folder, self.folder / SIDECAR / LOCK_NAME
        with ExitStack() as held:
            with self.claimed(), file_lock(lock, folder, "is being written", wait=True):
                refuse_running(folder, part)
                left = self._left()
                if not left and self._has_all_but_shards():  # another machine has made them meanwhile
                    return Produced(finished_meta(folder, self.plan) or {}, 0)
                refuse_other_manifest(folder, self.plan, part)
                refuse_other_code(folder, self.code)
                check_lease(lock)
                with self._cleaned_up(lock):
                    self._write_plan()
                    fix_settings(folder, self.code, self.command)
                lock_of_part = held.enter_context(part_lock(folder, part))
            with self._cleaned_up(lock_of_part), weights_claim(folder) as (lock_of_weights, is_ours):
                self._make(workers, left, [lock_of_part, lock_of_weights], may_write_weights=is_ours)
        return Produced(finished_meta(folder, self.plan) or {}, len(left))

    def _make(
        self, workers: Workers, left: list[int], locks: Sequence[Path], *, may_write_weights: bool = True
    ) -> None:
        """Make those shards that are left, and the target's weights if they are missing.

        locks: that are held. A lost lease ends it before the next shard is created or gets its name.
        """

        def check() -> None:
            for lock in locks:
                check_lease(lock)

        written = self._reporting(left)
        weights = may_write_weights and not has_target_weights(self.folder, self.plan)
        if left or weights:
            workers.make(Job(os.fspath(self.folder), self.plan, weights), left, written, check)

    def _reporting(self, left: list[int]) -> Callable[[int, int], None]:
        """Return what adds up the tokens and bytes that the workers report, for `progress`."""
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
        """Return what the manifest of a finished native cache states of the target's head; None for any other folder.

        meta.json has the same, and its own checksum: a manifest that differs from it is not believed.
        """
        with suppress(FileNotFoundError, CacheError):
            if self.plan.is_native and (meta := finished_meta(self.folder)) is not None:
                manifest, checked = read_manifest(self.folder), meta["manifest"]
                if all(manifest[name] == checked.get(name) for name in ("head", "conventions")):
                    return manifest["head"], manifest["conventions"]["last_hidden"]
        return None

    def _has_all_but_shards(self) -> bool:
        """Return whether the folder has all files of the plan but shards: a part with all its shards has no work."""
        files = {name: hashlib.sha256(content).hexdigest() for name, content in self.plan.sidecar_files().items()}
        with suppress(FileNotFoundError, CacheError):
            return (
                not differing_manifest(read_manifest(self.folder), self.plan)
                and all(_has_sha256(self.folder / SIDECAR / name, sha256) for name, sha256 in files.items())
                and all(_shared_files(self.folder, self.plan).values())
            )
        return False

    def _write_plan(self) -> None:
        """Write what comes before the weights, if it is not there yet. `finished_shards` has refused other caches."""
        folder, plan = self.folder, self.plan
        self._remove_leftovers()
        if (folder / META_NAME).is_file():  # the cache is not complete any more
            fileio.remove(folder / META_NAME)
            fileio.fsync_dir(folder)
        write_sidecar(folder, plan, self.samples)
        with suppress(FileNotFoundError, CacheError):
            before, now = (each["selected_token_ids"] for each in (read_manifest(folder), plan.manifest))
            if before != now:
                what = f"another draft vocabulary, of {len(now):,} tokens in place of {len(before):,}"
                logger.info("%s: %s; manifest.json and meta.json are written again", folder, what)
        _write_if_other(folder / MANIFEST_NAME, manifest_bytes(plan.manifest))

    @contextmanager
    def _cleaned_up(self, lock: Path) -> Iterator[None]:
        """Say on a full disk, or another error of it, what is kept, and remove the temporary files of the block.

        lock: where its lease was lost, the files may be another run's.
        """
        try:
            yield
        except OSError as error:
            if error.errno is None or error.strerror is None:  # a library's, which has a text of its own
                raise
            total = self.plan.num_shards
            kept = sum(is_finished(self.folder, self.plan, shard) for shard in range(total))
            advice = f"{kept} of {total} shards are done and kept. Solve this, then run again with --resume"
            raise OSError(error.errno, f"{error.strerror}. {advice}", error.filename) from error
        finally:
            with suppress(OSError):  # a better error is on its way, and the next run removes them
                if not is_lost(lock):
                    self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove temporary files; a part removes those of its shards alone, as other parts may be running."""
        for path in leftovers(self.folder, None if self.part is None else self._wanted):
            fileio.remove(path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[Path]:
    """Hold a folder's lock while no part of it is running; yield the lock."""
    lock = folder / SIDECAR / LOCK_NAME
    with file_lock(lock, folder, "is being written", wait=False):
        refuse_running(folder)
        yield lock


def _warn_of_few_positions(cache: Path, meta: dict[str, Any]) -> None:
    if meta and (warning := Counts.of_meta(meta).warning):
        logger.warning("%s: %s", cache, warning, extra={"code": "W703"})


def write_sidecar(folder: Path, plan: TargetPlan, samples: Samples) -> None:
    """Write the plan's own files and the samples, if they are not there yet."""
    for name, content in plan.sidecar_files().items():  # plan.json comes first
        _write_if_other(folder / SIDECAR / name, content)
    paths = {folder / SIDECAR / name: sha256 for name, sha256 in samples.checksums.items()}
    missing = {path.name for path, sha256 in paths.items() if not _has_sha256(path, sha256)}
    for name, content in samples.files().items() if missing else ():  # their bytes are made only where needed
        if name in missing:
            write_bytes(folder / SIDECAR / name, content)


def _has_sha256(path: Path, sha256: str) -> bool:
    """Return whether a file is there with these bytes. One that is almost all holes is not read."""
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
    """Whether meta.json was written; else the cache was sealed before."""


def seal(
    cache_dir: PathLike,
    *,
    named: Path | None = None,
    deep: bool = True,
    commands: Commands | None = None,
    progress: Progress | None = None,
) -> Sealed:
    """Check all that the parts have made, and write meta.json. A sealed cache is left as it is.

    named: what errors call the folder, where it gets another name later. commands: that errors name; None: the ones of
    `niels-gpt eagle3 precompute`. deep: read all shards; else receipts and sizes alone.
    progress: receives shards, bytes read, and bytes to read in all.
    Raises: CacheError (E712) naming each shard that is not finished, with the commands that make it again, and where
        the plan, the samples or the target's weights are missing or damaged; CacheError while a part is being made, and
        where a draft could learn nothing; OSError.
    """
    folder = Path(cache_dir)
    refuse_links(folder)
    commands = commands or _commands(folder)
    if not os.path.lexists(folder / SIDECAR / PLAN_NAME):
        found = "holds no plan that partitions were made by"
        remedy = f"Make a partition: {part_command(folder, (1, 2))}"
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
    """Seal a folder that nobody else writes. check: raises CacheError where its lease was lost."""
    plan = _plan_of(folder, named, commands)
    if (meta := complete_meta(folder, plan)) is not None:
        return Sealed(meta, False)
    _refuse_unfinished(PlannedFolder(named, folder, plan), commands, deep, progress)
    for path in leftovers(folder):
        fileio.remove(path)
    check()
    return Sealed(finish(folder, plan, named, check=check), True)


def _shared_files(folder: Path, plan: TargetPlan) -> dict[str, bool]:
    """Return the files of samples and of the target's weights, by name, and whether each is there undamaged."""
    samples = {SAMPLES_NAME: plan.samples["sha256"], IDS_NAME: plan.samples["ids_sha256"]}
    found = {f"{SIDECAR}/{name}": _has_sha256(folder / SIDECAR / name, sha256) for name, sha256 in samples.items()}
    weights, receipt = (WEIGHTS_NAME, WEIGHTS_RECEIPT) if plan.is_native else (EMBEDDINGS_NAME, EMBEDDINGS_RECEIPT)
    return found | dict.fromkeys((weights, f"{SIDECAR}/{receipt}"), has_target_weights(folder, plan))


def _refuse_unfinished(plan: PlannedFolder, commands: Commands, deep: bool, progress: Progress | None) -> None:
    """Raise CacheError where a shard is not finished. All of it is read, if `deep`, only where nothing is missing."""
    for is_deep in (False, True) if deep else (False,):
        units = states_of(plan, SHARDS, deep=is_deep, progress=progress if is_deep else None)
        if any(unit.state != "finished" for unit in units):
            raise not_finished(plan, SHARDS, units, commands)


def _commands(folder: Path) -> Commands:
    """Return the commands of a folder that `niels-gpt eagle3 precompute` makes."""
    parts = known_parts(folder)
    return Commands(
        lambda shard: part_command(folder, part_of(shard, parts)),
        part_command(folder, None),
        shlex.join(["niels-gpt", "seal", str(folder)]),
    )


def _plan_of(folder: Path, named: Path, commands: Commands) -> TargetPlan:
    """Return the plan, once its files, the samples and the target's weights are whole. Raises: CacheError."""
    again = f"Make a partition again: {commands.unit(0)}"
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
    """A cache made of parts."""

    meta: dict[str, Any]
    """Its meta.json."""
    linked_bytes: int
    """Of files that it shares with the parts."""
    copied_bytes: int
    """Of files that could not be linked."""


def join(out: PathLike, parts: Sequence[PathLike]) -> Joined:
    """Put the parts of one plan together in `out`, which is there whole or not at all. The parts are not changed.

    Raises: FileNotFoundError for a part without a plan; CacheError where parts have different plans or draft
        vocabularies, where a shard is missing, or is there twice with different bytes, where no part has the samples or
        the target's weights undamaged, while a part is being written, and where `out` holds anything or lies in a part.
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
            found = f"{error.found.replace(str(work), str(out))}, in all the folders together"
            raise CacheError(folders[0], found, remedy=_MAKE_PARTS, code="E702") from error
        return Joined(meta, linked, copied)


def _common_plan(folders: Sequence[Path]) -> TargetPlan:
    """Return the plan of all parts. Raises: FileNotFoundError, CacheError."""
    try:
        first, *others = (open_plan(folder) for folder in folders)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. Expected a folder that precompute --partition made") from error
    for folder, plan in zip(folders[1:], others, strict=True):
        names = differing_fields(first.record, plan.record)
        names += differing_fields(first.manifest, plan.manifest, "manifest.")
        if names:
            raise CacheError(
                folder,
                f"a partition of another plan than {folders[0]} (different fields: {sorted({*names})})",
                "partitions that were made with the same options but --partition",
                "Make it again with those of the others",
                code="E703",
            )
    return first


def _sources(folders: Sequence[Path], plan: TargetPlan) -> dict[str, Path]:
    """Return the part that has each file, by the file's name in a cache: of all but manifest and plan.

    Shards have their sizes; the seal compares their bytes.

    Raises: CacheError for a shard that is there twice with different bytes.
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
                        f"other bytes than those of {other / name}",
                        "the same ones, for the plan is the same",
                        "Check both folders: niels-gpt eagle3 verify, and leave the damaged one out",
                        code="E701",
                    )
    return found
