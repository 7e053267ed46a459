"""The asset eagle3/targets: chats + target -> a versioned EAGLE-3 cache; and the target again, to check a cache.

Decides when the cache is reused (its recipe's fingerprint), when an unfinished version is resumed, and when states of
the committed one are. A version's folder is what python -m niels_gpt.eagle3.precompute writes. An unfinished one lies
beside a plan.json, as the partitions of a cache of text do:

    <cache>/eagle3/.versions/targets/partitions-KEY/plan.json   the plan of units: fingerprints
                                                    cache/      the unfinished version: its receipts say what is done
                                                    sealed      content of the finished one, while it is committed
                                                    .versions/  locks of partitions
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.cache.meta import read_meta
from niels_gpt.documents import Partition
from niels_gpt.eagle3.units import SHARDS, FolderPlan
from niels_gpt.engine.units import (
    SHARDS_RULE,
    Commands,
    Plan,
    Unit,
    discard_plan,
    fix_plan,
    plans_of,
    states_of,
)
from niels_gpt.recipes.eagle3.draft_vocab import commit_draft_vocab, current_draft_vocab
from niels_gpt.recipes.eagle3.of_settings import (
    KEY,
    WORK_NAME,
    check_configured,
    fingerprint_of,
    resolved,
    sha256,
    target_name,
)
from niels_gpt.recipes.eagle3.options import Options
from niels_gpt.recipes.eagle3.prepare import (
    Prepared,
    Resolved,
    carry_out,
    is_current_of,
    open_target,
    prepare,
    prepared_before,
    run_facts,
)
from niels_gpt.recipes.records import Measurement, Outcome, cache_root, finish, record_recipe, recorded_recipe
from niels_gpt.recipes.shared import check_shared_folder
from niels_gpt.recipes.units import MadeUnit, NoPlan
from niels_gpt.settings import Settings
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.checks import Verdict
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.locks import apply_lock_setting, check_lease
from niels_gpt.storage.meta_json import meta_bytes, read_regular
from niels_gpt.storage.remedies import build_command
from niels_gpt.storage.versions import PLAN_NAME

if TYPE_CHECKING:
    from niels_gpt.eagle3.format.plan import Plan as TargetPlan
    from niels_gpt.eagle3.inspect.recompute import Target
    from niels_gpt.progress import Progress

_NOT_IN_FINGERPRINT = ("eagle3_device", "eagle3_check_samples")  # they never decide a byte
_IN_RECIPE = (
    *("target_name", "input_data", "chat_template", "limit", "seq_length", "draft_vocab_size", "target_probs_topk"),
    *("shard_size", "dtype", "batch_size", "max_batch_tokens", "attention"),
)
"""Options that decide the cache's bytes, and that `_fingerprint` has in no other form."""
_SEALED = "sealed"
_MOST_BYTES = 1 << 10
_PAUSE_SECONDS = 0.5  # between two looks at a partition that another builder has
_OF_NATIVE = ("format", "shard_bytes", "aux_dtype")


def settings_fingerprint(settings: Settings) -> str:
    """Return twelve hex digits of the settings that decide the cache's bytes; no file is looked at."""
    names = [name for name in vars(settings) if name.startswith("eagle3_") and name not in _NOT_IN_FINGERPRINT]
    return fingerprint_of(settings, names)


def build_targets(
    settings: Settings, *, refresh: bool = False, observed: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Build eagle3/targets, or reuse it.

    refresh: ask the hub for the newest revisions of chats and target. observed: fingerprint of the source from an
    observation newer than the cache. progress: as `produce`.
    Raises: as `TargetUnits` and `TargetUnits.build_all`.
    """
    return TargetUnits(settings, refresh=refresh, observed=observed).build_all(progress)


def are_current_targets(found: Resolved, *, reads_hub: bool = True) -> bool:
    """Whether the committed eagle3/targets is what was asked for, and has its shards. reads_hub: of `is_current_of`."""
    path = cache_root(found.settings) / KEY
    return is_current_of(found, path, _fingerprint, reads_hub) and _has_its_shards(path)


def target_of(
    cache: Path, name: str, *, revision: str | None = None, device: str | None = None, follow_links: bool = False
) -> Target:
    """Return a target to compare a cache with (recompute.recomputed); no weights are loaded yet.

    revision, device: None: those of the cache's plan, except for a GPU that this machine lacks.
    Raises: as `target_facts`; CacheError for a damaged plan.
    """
    import torch

    from niels_gpt.eagle3.format.plan import read_record
    from niels_gpt.eagle3.inspect.recompute import Target
    from niels_gpt.eagle3.models import target_facts

    record = read_record(cache, follow_links=follow_links)
    planned, made_from = ({}, {}) if record is None else (record["run"], record["target"])
    if device is None:
        on_gpu = record is None or planned.get("device") == "cuda"
        device = "cuda" if on_gpu and torch.cuda.is_available() else "cpu"
    facts = target_facts(name, revision=revision or made_from.get("revision"))
    attention = planned.get("attention", "sdpa")
    asked = Options(target_model=name, revision=revision, input_data="", device=device, attention=attention)
    run = run_facts(asked, planned)
    run["compute_dtype"] = planned.get("compute_dtype", run["compute_dtype"])
    load = partial(
        open_target,
        name=name,
        revision=facts.revision,
        compute_dtype=run["compute_dtype"],
        attention=attention,
    )
    return Target(asdict(facts), load, run)


def check_recomputed(settings: Settings) -> Verdict:
    """Run samples of eagle3/targets through the target again.

    Raises: FileNotFoundError and CacheError where there is no such cache; as `target_of`.
    """
    from niels_gpt.eagle3.inspect.recompute import recomputed

    number = settings.eagle3_check_samples
    if not number:
        return Verdict([], "not made: eagle3_check_samples is 0")
    path = cache_root(settings) / KEY
    target = target_of(path, target_name(settings), device=settings.eagle3_device)
    return recomputed(path, target, k=number, seed=settings.seed)


def _fingerprint(resolved: Resolved) -> str:
    """Return the sha256 of what decides the cache's bytes, except for the versions and the machine that make it.

    The draft's vocabulary follows from its size and the other parts. The names are
    those of earlier versions, whose caches stay current.
    """
    from niels_gpt.eagle3.format.plan import BUILDER_VERSION, SIDECAR_VERSION

    options = resolved.options
    if options.form == "native":
        form = {name: getattr(options, name) for name in _OF_NATIVE}
    else:
        form = {"format_version": None if options.format is None else int(options.format), "aux_layer_ids": None}
    about = ("fingerprint", "form", "settings", "limit", "exclude")
    parts = {
        "recipe": KEY,
        "options": {name: getattr(options, name) for name in _IN_RECIPE} | form,
        "target": resolved.target_record,
        "tokenizer": resolved.tokenizer_record,
        "source": {name: resolved.source[name] for name in about if name in resolved.source},
        "aux_layer_ids": resolved.aux_layer_ids,
        "draft_vocab": None,
        "versions": [SIDECAR_VERSION, BUILDER_VERSION],
    }
    return sha256(parts)


def _has_its_shards(path: Path) -> bool:
    """Whether every shard has the size that its receipt states; meta.json of an earlier build lists no shards."""
    from niels_gpt.eagle3.format.layout import shard_path
    from niels_gpt.eagle3.format.shard_writer import read_receipt

    try:
        for shard in range(read_meta(str(path / META_NAME))["totals"]["shards"]):
            receipt = read_receipt(path, shard)
            if receipt is None or os.stat(shard_path(path, shard)).st_size != receipt["bytes"]:
                return False
    except (OSError, ValueError):
        return False
    return True


def _with_all_files(found: Resolved, path: Path, fingerprint: str) -> dict[str, Any]:
    """Return meta.json of the committed cache; one of an earlier build, which names no shard, gets their records."""
    from niels_gpt.eagle3.format.meta import lists_shards, meta_of

    if lists_shards(meta := read_meta(str(path / META_NAME))):
        return meta
    with versions.build_lock(path) as folder:
        file = path.resolve() / META_NAME
        meta = read_meta(str(file))
        listed = meta_of(file.parent, meta, known=meta["files"])
        check_lease(folder / versions.LOCK_NAME)
        # A run that is killed between these writes leaves a cache that is current.
        upcoming = hashlib.sha256(meta_bytes(listed)).hexdigest()
        record_recipe(found.settings, path, fingerprint, found.source, meta, next_meta_sha256=upcoming)
        fileio.write_bytes(file, meta_bytes(listed))
        record_recipe(found.settings, path, fingerprint, found.source, listed)
    return listed


def _build_key(plan: TargetPlan) -> str:
    """Return what identifies a build: the plan, and the draft's vocabulary, which a native one leaves out."""
    return sha256([plan.sha256, plan.manifest["selected_token_ids"]]) if plan.is_native else plan.sha256


def _link_states(path: Path, work: Path, plan: TargetPlan) -> None:
    """Link the files of a committed native cache of the same plan into a folder; copy what cannot be linked.

    Another draft vocabulary then writes manifest.json and meta.json alone. The target is not loaded, for its head is
    known from a finished cache: hence meta.json too. Producers replace files, they change none, so the committed
    version stays as it is.
    """
    if not plan.is_native or not recorded_recipe(path).get("fingerprint"):  # without one it is to be built from scratch
        return
    version, linked = path.resolve(), work.with_name(f"{work.name}.linked")
    if read_meta(str(version / META_NAME)).get("plan_sha256") != plan.sha256 or not _has_its_shards(version):
        return
    fileio.remove(linked)  # of a run that was killed meanwhile
    is_linked = True
    for file in sorted(version.rglob("*")):
        copy = linked / file.relative_to(version)
        if file.is_file() and not file.is_symlink():
            fileio.make_dir(copy.parent)
            is_linked = fileio.link_or_copy(file, copy) and is_linked
    if not is_linked:  # a shard of the right size counts as finished, so copies are durable before they have its name
        fileio.sync_tree(linked)
    fileio.rename(linked, work)


class _Gone(Exception):
    """The plan of a build was removed, or the cache sealed, while it was prepared."""


class TargetUnits:
    """eagle3/targets in partitions, as `recipes.units.Units` has a cache of text: making the object fixes their plan.

    The units that it is made of are shards, in one folder beside plan.json; partition I of N has those whose number
    divided by N leaves I. So N only chooses: it is in no plan, and a build uses the shards that another N has made.
    A builder locks its partition, the seal the cache.
    """

    key = KEY
    counted = "bytes"
    """What progress counts first; then come tokens."""
    budget = None
    plan: Plan | None = None
    """None: the committed cache is current, and no unit is needed."""
    _has_committed = False

    def __init__(
        self, settings: Settings, *, refresh: bool = False, observed: str | None = None, fixes: bool = True
    ) -> None:
        """refresh, observed: as of `build_targets`. fixes: fix a plan where there is none; else that is an error.

        Raises: LeftOut where no target is named, except for the sample, and without the extra eagle3; NoPlan E510 where
            none may be fixed; CacheError E512 for a file system that lacks what partitions need; E503 without
            partitions where another process builds the cache; as `resolved` and `prepare`.
        """
        self._measurement = Measurement()
        check_configured(settings)
        self.settings, self.path = settings, cache_root(settings) / KEY
        apply_lock_setting(cache_root(settings), settings.lock)
        if settings.partitions > 1:
            check_shared_folder(cache_root(settings).absolute())
        self._find(refresh, observed)
        if not are_current_targets(self.found):
            with versions.build_lock(self.path, wait=settings.partitions > 1):
                there = self._plan_there()
                if not (are_current_targets(self.found) or self._is_committed(there)):
                    self.plan, self._prepared = self._fixed(there, fixes)

    # --- which plan ---

    def _find(self, refresh: bool, observed: str | None) -> None:
        """Set `found` and `fingerprint`: what the settings stand for.

        In partitions the plan that is there counts. Its revisions may differ from the committed cache.
        """
        how: dict[str, Any] = {"observed": observed, "refresh": refresh}
        self.found = resolved(self.settings, **how)
        self.fingerprint = _fingerprint(self.found)
        if self.settings.partitions == 1 or refresh or observed is not None or are_current_targets(self.found):
            return
        for plan in plans_of(self.path) if self._plan_there() is None else ():
            found = resolved(self.settings, **how, plan_from=plan.folder / WORK_NAME)
            if _fingerprint(found) == plan.content["recipe"].get("fingerprint"):
                self.found, self.fingerprint = found, _fingerprint(found)
                return

    def _plan_there(self) -> Plan | None:
        plans = plans_of(self.path)
        return next((plan for plan in plans if plan.content["recipe"].get("fingerprint") == self.fingerprint), None)

    def _fixed(self, there: Plan | None, fixes: bool) -> tuple[Plan, Prepared]:
        """Return the plan, which is fixed if none is `there`, and what it was made of. `build_lock` is held."""
        from niels_gpt.eagle3.build import write_sidecar

        in_partitions = self.settings.partitions > 1
        if there is None and not fixes:
            build = build_command(self.settings, KEY)
            raise NoPlan(self.path, "none of its partitions is there", remedy=f"Build them: {build}", code="E510")
        known = current_draft_vocab(self.found)
        found = self.found if known is None else replace(self.found, draft_vocab=known)
        prepared = (there and prepared_before(found, there.folder / WORK_NAME)) or prepare(found)
        if known is None:  # from the same samples, so they are not tokenized twice
            commit_draft_vocab(prepared)
        # One process alone keeps a plan for each machine that began a build; partitions have one, or are refused.
        plan = there if there is not None and in_partitions else self._fixed_plan(prepared)
        work = plan.folder / WORK_NAME
        if not work.is_dir():
            _take_earlier(self.path, work, plan.fingerprint)
            _link_states(self.path, work, prepared.plan)
        if in_partitions and not os.path.lexists(work / "sidecar" / PLAN_NAME):
            fileio.make_dir(work / "sidecar")
            write_sidecar(work, prepared.plan, prepared.samples)
        return plan, prepared

    def _fixed_plan(self, prepared: Prepared) -> Plan:
        made, tokenizer = prepared.plan, prepared.resolved.tokenizer.sha256
        key = _build_key(made)
        if (there := next((plan for plan in plans_of(self.path) if plan.fingerprint == key), None)) is not None:
            return there
        versions.refuse_foreign(self.path)
        content = {
            "plan_version": 1,
            "kind": versions.PLAN_KIND,
            "cache": KEY,
            "partitions": made.num_shards,
            "rule": SHARDS_RULE,
            "fingerprint": key,
            "recipe": {"fingerprint": self.fingerprint},
            "source": made.source,
            "listing": None,
            "tokenizer_sha256": tokenizer,
            "tokenizer_content_sha256": tokenizer,
            "exclude_sha256": None,
            "code": {},  # parts/folder.py compares the code
        }
        return fix_plan(self.path, content)

    def _wanted(self) -> Plan | None:
        """Return the plan; None where the cache is sealed. What a late builder made of a removed plan is removed.

        Raises: NoPlan E511 where the plan was removed, and there is no cache of it.
        """
        plan = self.plan
        if plan is None:
            return None
        has_plan = plan.is_there  # asked first: a seal commits, then removes the plan
        is_sealed = are_current_targets(self.found)
        if has_plan and not is_sealed:
            return plan
        with versions.build_lock(self.path, wait=True):
            if not plan.is_there:
                discard_plan(plan)
        if is_sealed:
            return None
        again = f"Build its partitions again: {build_command(self.settings, KEY)}"
        raise NoPlan(plan.folder, f"another command has removed {PLAN_NAME}", "the plan", again, code="E511")

    # --- building and sealing ---

    def states(self) -> list[Unit]:
        """Return each partition by number, as its shards are; [] where the cache is current."""
        if self.plan is None:
            return []
        work, total = self.plan.folder / WORK_NAME, self.settings.partitions
        shards = states_of(FolderPlan(self.path, work, self._prepared.plan), SHARDS)
        shards = [shard for shard in shards if shard.number >= 0]
        return [_together(number, shards[number::total]) for number in range(total)]

    def unfinished(self) -> list[int]:
        """Return the numbers of the partitions that are not finished."""
        return [unit.number for unit in self.states() if unit.state != "finished"]

    def build(self, number: int, *, wait: bool = False, progress: Progress | None = None) -> MadeUnit:
        """Make the shards of partition `number`, from 0, that are not finished, unless the cache is current.

        wait: wait for another builder of it, instead of E503. progress: as `produce`.
        Raises: ValueError for a number that there is not; CacheError E503; E712 where this machine has another plan or
            other code than the first one; NoPlan; as `produce`.
        """
        partition = Partition.checked(number, self.settings.partitions)
        while (plan := self._wanted()) is not None:
            try:
                with versions.build_lock(plan.folder / f"{number}-of-{partition.total}", wait=wait):
                    claimed = partial(self._claimed, plan)
                    made = carry_out(
                        self._part(partition),
                        plan.folder / WORK_NAME,
                        named=self.path,
                        claimed=claimed,
                        progress=progress,
                    )
                    receipt = _receipt(self._prepared, partition, plan)
                    return MadeUnit(KEY, partition, receipt, not made.shards, self._measurement.end().seconds)
            except _Gone:
                continue
            except CacheError as error:
                if error.code != "E503" or not wait:
                    raise
                time.sleep(_PAUSE_SECONDS)  # one of another number has some of its shards
        return MadeUnit(KEY, partition, self._current_meta(), True, self._measurement.end().seconds)

    def _part(self, partition: Partition) -> Prepared:
        found = self._prepared.resolved
        options = replace(found.options, partition=partition.number, partitions=partition.total)
        return replace(self._prepared, resolved=replace(found, options=options))

    @contextmanager
    def _claimed(self, plan: Plan) -> Iterator[None]:
        """Hold the cache's lock, so that neither a seal nor a new start comes between. Raises: _Gone after one."""
        with versions.build_lock(self.path, wait=True):
            if not plan.is_there or are_current_targets(self.found) or self._is_committed(plan):
                raise _Gone
            yield

    def build_all(self, progress: Progress | None = None) -> Outcome:
        """Build all that is missing here, and seal it; a current cache is reused.

        Without partitions one run makes all shards, while it holds the cache's lock.
        Raises: as `build` and `seal`.
        """
        if self.plan is None:
            return self._finished(self._current_meta())
        if self.settings.partitions > 1:
            made = [self.build(number, wait=True, progress=progress) for number in range(self.settings.partitions)]
            return self.seal(deep=any(each.reused for each in made), wait=True)
        with versions.build_lock(self.path):
            plan = fix_plan(self.path, self.plan.content)
            work = plan.folder / WORK_NAME
            meta = carry_out(self._prepared, work, named=self.path, resume=True, progress=progress).meta
            return self._finished(self._commit(plan, str(meta["content_sha256"])))

    def seal(self, *, deep: bool = True, wait: bool = False, progress: Progress | None = None) -> Outcome:
        """Check all shards, and commit the cache that they make; a current cache is reused.

        deep: read all shards; else receipts and sizes alone. wait: for builders of the cache and its partitions,
        instead of E503. progress: receives shards, bytes read, and bytes to read in all.
        Raises: CacheError E712 naming the unfinished shards, with the commands that make them; E503; NoPlan.
        """
        from niels_gpt.eagle3.build import seal

        while (plan := self._wanted()) is not None:
            try:
                with versions.build_lock(self.path, wait=wait):
                    if are_current_targets(self.found) or not plan.is_there or self._is_committed(plan):
                        continue
                    versions.refuse_if_partition_is_built(plan.folder)
                    how: dict[str, Any] = {"named": self.path, "commands": self._commands, "progress": progress}
                    meta = seal(plan.folder / WORK_NAME, deep=deep, **how).meta
                    return self._finished(self._commit(plan, str(meta["content_sha256"])))
            except CacheError as error:
                if error.code != "E503" or not wait:
                    raise
                time.sleep(_PAUSE_SECONDS)
        return self._finished(self._current_meta())

    @property
    def _commands(self) -> Commands:
        """The commands that build the partition of a shard, build all, and seal."""
        command, total = partial(build_command, self.settings, KEY), self.settings.partitions
        return Commands(lambda shard: command("--partition", str(shard % total)), command(), command(verb="seal"))

    def restart(self, number: int) -> bool:
        """Make the next build of a partition start from scratch; False, and nothing is done, for a current cache.

        Raises: CacheError E503 while it is built, or the cache sealed.
        """
        from niels_gpt.eagle3.format.layout import shard_path
        from niels_gpt.eagle3.format.plan import shards_of_part
        from niels_gpt.eagle3.format.shard_writer import receipt_path
        from niels_gpt.eagle3.parts import refuse_running

        if self.plan is None:
            return False
        part, work = (number + 1, self.settings.partitions), self.plan.folder / WORK_NAME
        with versions.build_lock(self.plan.folder / f"{number}-of-{part[1]}"), versions.build_lock(self.path):
            refuse_running(work, part)
            for shard in shards_of_part(self._prepared.plan.num_shards, part):
                for path in (receipt_path(work, shard), Path(shard_path(work, shard))):
                    fileio.remove(path)
        return True

    def mend(self, number: int, progress: Progress | None = None) -> None:
        """Return None, and do nothing: a sealed cache that is damaged is built again as a whole."""

    def _commit(self, plan: Plan, sealed: str) -> dict[str, Any]:
        """Commit the finished version, and remove its plan. `build_lock` is held."""
        from niels_gpt.eagle3.format.layout import LOCK_NAME, SIDECAR

        work = plan.folder / WORK_NAME
        fileio.remove(work / SIDECAR / LOCK_NAME)
        fileio.write_bytes(plan.folder / _SEALED, sealed.encode())  # for a run after one that is killed from here on
        version = versions.commit(work, self.path, sealed)
        meta = read_meta(str(version / META_NAME))
        record_recipe(self.settings, self.path, self.fingerprint, self.found.source, meta)
        discard_plan(plan)
        self._has_committed = True
        return meta

    def _is_committed(self, plan: Plan | None) -> bool:
        """Whether a plan's version had left its folder when its commit was killed: it is committed now."""
        with suppress(FileNotFoundError):
            if plan is not None and not (plan.folder / WORK_NAME).is_dir():
                self._commit(plan, read_regular(plan.folder / _SEALED, _MOST_BYTES).decode("ascii", "replace"))
                return True
        return False

    def _current_meta(self) -> dict[str, Any]:
        """Return the meta of the committed cache, which is current; a plan that a killed seal has left is removed."""
        if current_draft_vocab(self.found) is None:  # removed, or of an earlier version
            commit_draft_vocab(prepare(self.found))
        if (plan := self._plan_there()) is not None:
            with suppress(CacheError, OSError), versions.build_lock(self.path):
                discard_plan(plan)
        return _with_all_files(self.found, self.path, self.fingerprint)

    def _finished(self, meta: dict[str, Any]) -> Outcome:
        reused = not self._has_committed
        return finish(self.settings, KEY, self.path, meta, reused, self._measurement.end(), self.fingerprint)


def _take_earlier(path: Path, work: Path, key: str) -> None:
    """Take over an unfinished version where earlier releases had it, beside its journal."""
    earlier = versions.versions_dir(path) / f"{versions.BUILDING}-{key[: versions.VERSION_DIGITS]}"
    journal = earlier.with_name(f"{earlier.name}{versions.JOURNAL_SUFFIX}")
    if earlier.is_dir() and not earlier.is_symlink() and (journal / versions.JOURNAL_NAME).is_file():
        fileio.rename(earlier, work)
        versions.discard(journal)


def _together(number: int, shards: list[Unit]) -> Unit:
    """Return the state of a partition, by the states of its shards."""
    bad = [shard for shard in shards if shard.state != "finished"]
    items, tokens = (sum(getattr(shard, name) for shard in shards) for name in ("items", "tokens"))
    if not bad:
        return Unit(number, "finished", items=items, tokens=tokens)
    return Unit(number, bad[0].state, f"shard {bad[0].number}: {bad[0].found}", items=items, tokens=tokens)


def _receipt(prepared: Prepared, partition: Partition, plan: Plan) -> dict[str, Any]:
    """Return what a partition holds, with keys of meta.json."""
    from niels_gpt.eagle3.format.plan import shards_of_part

    shards, firsts = prepared.plan.num_shards, prepared.plan.firsts
    starts, mine = prepared.samples.starts, shards_of_part(shards, (partition.number + 1, partition.total))
    tokens = sum(int(starts[firsts[shard + 1]] - starts[firsts[shard]]) for shard in mine)
    return {
        "kind": "eagle3",
        "partition": {"number": partition.number, "total": partition.total, "plan": plan.sha256},
        "totals": {"samples": sum(prepared.plan.rows_of(shard) for shard in mine), "tokens": tokens},
    }
