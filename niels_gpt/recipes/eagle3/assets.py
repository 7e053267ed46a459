"""The assets eagle3/draft_vocab and eagle3/targets: decides whether to build, reuse or resume them.

eagle3/draft_vocab holds the tokens that the draft knows, counted without the target's weights: another size builds it
again without the target. eagle3/targets takes its tokens from it, and builds it if it is not current. A version's
folder equals the output of python -m niels_gpt.eagle3.precompute. An unfinished one lies beside a plan.json, as
partitions of a text cache do:

    <cache>/eagle3/.versions/targets/partitions-KEY/plan.json   the plan of units: fingerprints
                                                    cache/      the unfinished version, with receipts of finished shards
                                                    sealed      content of the finished version while it is committed
                                                    .versions/  locks of partitions
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.cache.meta import read_meta
from niels_gpt.display.numbers import many
from niels_gpt.documents import Partition
from niels_gpt.eagle3.draft_kind import DRAFT_VOCAB
from niels_gpt.eagle3.shard_units import SHARDS, PlannedFolder
from niels_gpt.engine.units import (
    SHARDS_RULE,
    PartitionPlan,
    Unit,
    discard_plan,
    fix_plan,
    plans_of,
    states_of,
)
from niels_gpt.recipes.eagle3.prepare import Prepared, carry_out, prepare, prepared_before
from niels_gpt.recipes.eagle3.request import (
    KEY,
    SMALL_TARGET,
    VOCAB_KEY,
    VOCAB_VERSION,
    WORK_NAME,
    Resolved,
    check_configured,
    folder_with_plan,
    has_small_target,
    raw_source,
    resolved,
    settings_fingerprint,
    sha256,
    small_target_folder,
    stable_name,
    unfinished_versions,
    why_left_out,
)
from niels_gpt.recipes.home_recipes import HomeRecipes
from niels_gpt.recipes.records import TOKENIZER_KEY, Measurement, Outcome, cache_root, finish, recorded_recipe
from niels_gpt.recipes.shared import check_shared_folder
from niels_gpt.recipes.tokenizer import no_sentinels
from niels_gpt.recipes.units import CacheUnits
from niels_gpt.settings import Settings
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.errors import CacheError, LeftOut
from niels_gpt.storage.fileio import META_NAME, canonical_json
from niels_gpt.storage.locks import apply_lock_setting, check_lease
from niels_gpt.storage.meta_json import meta_bytes, read_regular
from niels_gpt.storage.versions import PLAN_NAME
from niels_gpt.tokenizers.protocol import FullTokenizer

if TYPE_CHECKING:
    from niels_gpt.eagle3.format.plan import TargetPlan
    from niels_gpt.work import Progress

_SEALED = "sealed"
_MOST_BYTES = 1 << 10
_PAUSE_SECONDS = 0.5  # between two looks at a partition that another builder has


# --- eagle3/draft_vocab -----------------------------------------------------------------------------------------------


def build_draft_vocab(
    settings: Settings, *, refresh: bool = False, observed: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Build eagle3/draft_vocab, or reuse it. Reads no weights.

    refresh: ask the hub for the newest revisions of chats and target. observed: fingerprint of the source from an
        observation newer than the file. progress: called with samples, tokens and None.
    Raises: LeftOut if no target is named or the extra eagle3 is missing; ValueError, CacheError, FileNotFoundError or
        ConnectionError for settings, input or target that cannot be used.
    """
    apply_lock_setting(cache_root(settings), settings.lock)
    path = cache_root(settings) / VOCAB_KEY
    with Measurement() as measured:
        found = resolved_for_vocab(settings, observed=observed, refresh=refresh)
        reused = current_draft_vocab(found) is not None
        if reused:
            meta = read_meta(str(path / META_NAME))
        else:
            tokenized = None if progress is None else lambda samples, tokens: progress(samples, tokens, None)
            meta = commit_draft_vocab(prepare(found, tokenized=tokenized))
    return finish(settings, VOCAB_KEY, path, meta, reused, measured, found.fingerprint(VOCAB_KEY))


def resolved_for_vocab(
    settings: Settings, *, observed: str | None = None, refresh: bool = False, target: Path | None = None
) -> Resolved:
    """Resolve the settings; chats of the hub keep at least the revision of the committed file."""
    newest = observed or (recorded_recipe(cache_root(settings) / VOCAB_KEY).get("source") or {}).get("fingerprint")
    return resolved(settings, observed=newest, refresh=refresh, hash_weights=False, target=target)


def current_draft_vocab(found: Resolved, *, reads_hub: bool = True) -> list[int] | None:
    """Return the target's ids in the committed draft vocabulary; None if it is not current.

    reads_hub: see `Resolved.is_current`.
    """
    from niels_gpt.eagle3.vocab import load_token_mapping

    path = cache_root(found.settings) / VOCAB_KEY
    if not found.is_current(VOCAB_KEY, reads_hub=reads_hub):
        return None
    ids, _ = load_token_mapping(path, target_vocab_size=found.target.vocab_size, draft_vocab_size=None)
    return [int(number) for number in ids]


def commit_draft_vocab(prepared: Prepared) -> dict[str, Any]:
    """Commit the draft vocabulary of a plan, with counts from its samples; return meta.json."""
    import numpy as np

    from niels_gpt.eagle3.vocab import MAPPING_NAME

    found, samples, selected = prepared.resolved, prepared.samples, prepared.plan.manifest["selected_token_ids"]
    path, size = cache_root(found.settings) / VOCAB_KEY, found.target.vocab_size
    counts = np.bincount(samples.ids[samples.loss_mask == 1], minlength=size)
    with versions.building(path) as work:
        raw = canonical_json({"selected_token_ids": selected, "target_vocab_size": size})
        fileio.write_bytes(work / MAPPING_NAME, raw)
        record = {"name": MAPPING_NAME, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        supervised, content = int(counts.sum()), DRAFT_VOCAB.content_sha256([record])
        meta: dict[str, Any] = {
            "kind": DRAFT_VOCAB.name,
            "format_version": VOCAB_VERSION,
            "built": True,
            "content_sha256": content,
            "target_model": found.options.target_name or found.options.target_model,
            "target_vocab_size": size,
            "draft_vocab_size": len(selected),
            "totals": {"samples": len(samples), "tokens": len(samples.ids), "supervised_tokens": supervised},
            "coverage": int(counts[selected].sum()) / supervised,
            "dropped": prepared.plan.dropped,
            "source": prepared.plan.source,
            "tokenizer_sha256": found.tokenizer.sha256,
            "files": [record],
        }
        fileio.write_bytes(work / META_NAME, meta_bytes(meta))
        version = versions.commit(work, path, content)
        made = read_meta(str(version / META_NAME))
        found.record(VOCAB_KEY, made)
    return made


# --- eagle3/targets ---------------------------------------------------------------------------------------------------


def build_targets(
    settings: Settings, *, refresh: bool = False, observed: str | None = None, progress: Progress | None = None
) -> Outcome:
    """Build eagle3/targets, or reuse it.

    refresh: ask the hub for the newest revisions of chats and target. observed: fingerprint of the source from an
        observation newer than the cache. progress: called with the bytes written, the finished tokens and all tokens.
    Raises: the errors of `TargetUnits` and of `TargetUnits.build_all`.
    """
    return TargetUnits(settings, refresh=refresh, observed=observed).build_all(progress)


def are_current_targets(found: Resolved, *, reads_hub: bool = True) -> bool:
    """Return whether the committed eagle3/targets is the requested one, and has its shards.

    reads_hub: see `Resolved.is_current`.
    """
    from niels_gpt.eagle3.format.meta import lists_shards

    if not found.is_current(KEY, reads_hub=reads_hub):
        return False
    path = cache_root(found.settings) / KEY
    # `is_current` has compared the sizes of all listed files; only earlier builds do not list the shards.
    return lists_shards(read_meta(str(path / META_NAME))) or _has_its_shards(path)


def _has_its_shards(path: Path) -> bool:
    """Return whether every shard has the size in its receipt; meta.json of an earlier build lists no shards."""
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


def _with_all_files(found: Resolved, path: Path) -> dict[str, Any]:
    """Return meta.json of the committed cache, after adding the shards to one of an earlier build."""
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
        found.record(KEY, meta, next_meta_sha256=upcoming)
        fileio.write_bytes(file, meta_bytes(listed))
        found.record(KEY, listed)
    return listed


def _build_key(plan: TargetPlan) -> str:
    """Return the identity of a build: the plan, and for a native cache the draft vocabulary."""
    return sha256([plan.sha256, plan.manifest["selected_token_ids"]]) if plan.is_native else plan.sha256


def _link_states(path: Path, work: Path, plan: TargetPlan) -> None:
    """Link the files of a committed native cache of the same plan into a folder, or copy them if they cannot be linked.

    Then another draft vocabulary only writes manifest.json and meta.json. meta.json is linked too: the head of a
    finished cache is trusted, so the target is not loaded. Producers replace files and never change them, so the
    committed version is unchanged.
    """
    is_from_scratch = not recorded_recipe(path).get("fingerprint") or versions.failed_checks(path).repairable
    if not plan.is_native or is_from_scratch:
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
    """The plan of a build was removed, or the cache sealed, while the build was prepared."""


class TargetUnits(CacheUnits):
    """Builds eagle3/targets in partitions.

    Its units are shards in one folder beside plan.json; partition I of N has the shards whose number modulo N is I. N
    only selects: it is in no plan, and a build uses shards that another N built. A builder locks its partition, the
    seal locks the cache.
    """

    key = KEY
    _has_committed = False

    def __init__(
        self, settings: Settings, *, refresh: bool = False, observed: str | None = None, fixes: bool = True
    ) -> None:
        """refresh, observed: see `build_targets`. fixes: write a plan if there is none; False makes that an error.

        Raises: LeftOut if no target is named (except for the sample) or the extra eagle3 is missing; NoPlan E510 if
            none may be written; CacheError E512 for a file system that partitions cannot use; CacheError E503, without
            partitions, if another process builds the cache; ValueError, CacheError, FileNotFoundError or
            ConnectionError for settings, input or target that cannot be used.
        """
        self._measurement = Measurement()
        check_configured(settings)
        self.settings = settings
        apply_lock_setting(cache_root(settings), settings.lock)
        if settings.partitions > 1:
            check_shared_folder(cache_root(settings).absolute())
        self._find(refresh, observed)
        if not self.is_current():
            with versions.build_lock(self.path, wait=settings.partitions > 1):
                there = self._plan_there()
                if not (self.is_current() or self._is_committed(there)):
                    self.plan, self._prepared = self._fixed(there, fixes)

    @property
    def recipe_fingerprint(self) -> str:
        """Sha256 of the recipe: of the plan, or the current cache."""
        return self.fingerprint

    # --- which plan ---

    def _find(self, refresh: bool, observed: str | None) -> None:
        """Set `found` and `fingerprint`: what the settings stand for.

        In partitions the plan that is there counts. Its revisions may differ from the committed cache.
        """
        how: dict[str, Any] = {"observed": observed, "refresh": refresh}
        self.found = resolved(self.settings, **how)
        self.fingerprint = self.found.fingerprint(KEY)
        if self.settings.partitions == 1 or refresh or observed is not None or self.is_current():
            return
        for plan in plans_of(self.path) if self._plan_there() is None else ():
            found = resolved(self.settings, **how, plan_from=plan.folder / WORK_NAME)
            if found.fingerprint(KEY) == plan.content["recipe"].get("fingerprint"):
                self.found, self.fingerprint = found, found.fingerprint(KEY)
                return

    def _plan_there(self) -> PartitionPlan | None:
        plans = plans_of(self.path)
        return next((plan for plan in plans if plan.content["recipe"].get("fingerprint") == self.fingerprint), None)

    def _fixed(self, there: PartitionPlan | None, fixes: bool) -> tuple[PartitionPlan, Prepared]:
        """Return the plan, written if `there` is None, and its prepared samples. `build_lock` is held."""
        from niels_gpt.eagle3.build import write_sidecar

        in_partitions = self.settings.partitions > 1
        if there is None and not fixes:
            raise self._none_there()
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

    def _fixed_plan(self, prepared: Prepared) -> PartitionPlan:
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
            "code": {},  # niels_gpt/eagle3/partitions.py compares the code
        }
        return fix_plan(self.path, content)

    def is_current(self) -> bool:
        """Return whether the committed cache is the requested one, and has its shards."""
        return are_current_targets(self.found)

    # --- building and sealing ---

    def states(self) -> list[Unit]:
        """Return the state of each partition by its shards; [] if the cache is current."""
        if self.plan is None:
            return []
        work, total = self.plan.folder / WORK_NAME, self.settings.partitions
        shards = states_of(PlannedFolder(self.path, work, self._prepared.plan), SHARDS)
        shards = [shard for shard in shards if shard.number >= 0]
        return [_together(number, shards[number::total]) for number in range(total)]

    def _built(
        self, plan: PartitionPlan, partition: Partition, wait: bool, progress: Progress | None
    ) -> tuple[dict[str, Any], bool]:
        while (meta := self._sealed(plan)) is None:
            try:
                with versions.build_lock(plan.folder / f"{partition.number}-of-{partition.total}", wait=wait):
                    made = carry_out(
                        self._part(partition),
                        plan.folder / WORK_NAME,
                        named=self.path,
                        claimed=partial(self._claimed, plan),
                        progress=progress,
                    )
                    return _receipt(self._prepared, partition, plan), not made.shards
            except _Gone:
                continue
            except CacheError as error:
                if error.code != "E503" or not wait:
                    raise
                time.sleep(_PAUSE_SECONDS)  # one of another number has some of its shards
        return meta, True

    def _part(self, partition: Partition) -> Prepared:
        found = self._prepared.resolved
        options = replace(found.options, partition=partition.number, partitions=partition.total)
        return replace(self._prepared, resolved=replace(found, options=options))

    @contextmanager
    def _claimed(self, plan: PartitionPlan) -> Iterator[None]:
        """Hold the cache's lock, so that no seal or new start comes between. Raises: _Gone if one came before."""
        with versions.build_lock(self.path, wait=True):
            if not plan.is_there or self.is_current() or self._is_committed(plan):
                raise _Gone
            yield

    def build_all(self, progress: Progress | None = None) -> Outcome:
        """Build everything that is missing on this machine, and seal it; a current cache is reused.

        Without partitions one run builds all shards while it holds the cache's lock.

        Raises: CacheError, OSError, NonFiniteError: the errors of `build` and `seal`.
        """
        if self.plan is None:
            return self._finished(self.current_meta())
        if self.settings.partitions > 1:
            made = [self.build(number, wait=True, progress=progress) for number in range(self.settings.partitions)]
            return self.seal(deep=any(each.reused for each in made), wait=True)
        with versions.build_lock(self.path):
            plan = fix_plan(self.path, self.plan.content)
            work = plan.folder / WORK_NAME
            meta = carry_out(self._prepared, work, named=self.path, resume=True, progress=progress).meta
            return self._finished(self._commit(plan, str(meta["content_sha256"])))

    def seal(self, *, deep: bool = True, wait: bool = False, progress: Progress | None = None) -> Outcome:
        """Check all shards, and commit. Raises: CacheError E712 naming unfinished shards; CacheError E503; NoPlan."""
        from niels_gpt.eagle3.build import seal

        if self.plan is None:
            return self._finished(self.current_meta())
        while (meta := self._sealed(self.plan)) is None:
            try:
                with versions.build_lock(self.path, wait=wait):
                    if self.is_current() or not self.plan.is_there or self._is_committed(self.plan):
                        continue
                    versions.refuse_if_partition_is_built(self.plan.folder)
                    how: dict[str, Any] = {"named": self.path, "commands": self._commands, "progress": progress}
                    sealed = seal(self.plan.folder / WORK_NAME, deep=deep, **how).meta
                    return self._finished(self._commit(self.plan, str(sealed["content_sha256"])))
            except CacheError as error:
                if error.code != "E503" or not wait:
                    raise
                time.sleep(_PAUSE_SECONDS)
        return self._finished(meta)

    def restart(self, number: int) -> bool:
        """Make the next build of a partition start from scratch. Returns False, and does nothing, for a current cache.

        Raises: CacheError E503 while it is being built, or the cache sealed.
        """
        from niels_gpt.eagle3.format.layout import shard_path
        from niels_gpt.eagle3.format.plan import shards_of_part
        from niels_gpt.eagle3.format.shard_writer import receipt_path
        from niels_gpt.eagle3.partitions import refuse_running

        if self.plan is None:
            return False
        part, work = (number + 1, self.settings.partitions), self.plan.folder / WORK_NAME
        with versions.build_lock(self.plan.folder / f"{number}-of-{part[1]}"), versions.build_lock(self.path):
            refuse_running(work, part)
            for shard in shards_of_part(self._prepared.plan.num_shards, part):
                for path in (receipt_path(work, shard), Path(shard_path(work, shard))):
                    fileio.remove(path)
        return True

    def _commit(self, plan: PartitionPlan, sealed: str) -> dict[str, Any]:
        """Commit the finished version, and remove its plan. `build_lock` is held."""
        from niels_gpt.eagle3.format.layout import LOCK_NAME, SIDECAR

        work = plan.folder / WORK_NAME
        fileio.remove(work / SIDECAR / LOCK_NAME)
        fileio.write_bytes(plan.folder / _SEALED, sealed.encode())  # for a run after one that is killed from here on
        version = versions.commit(work, self.path, sealed)
        meta = read_meta(str(version / META_NAME))
        self.found.record(KEY, meta)
        discard_plan(plan)
        self._has_committed = True
        return meta

    def _is_committed(self, plan: PartitionPlan | None) -> bool:
        """Finish a commit that was killed after the version had left its folder; return whether there was one."""
        with suppress(FileNotFoundError):
            if plan is not None and not (plan.folder / WORK_NAME).is_dir():
                self._commit(plan, read_regular(plan.folder / _SEALED, _MOST_BYTES).decode("ascii", "replace"))
                return True
        return False

    def current_meta(self) -> dict[str, Any]:
        """Return meta.json of the committed cache; build the draft vocabulary again if it is gone."""
        if current_draft_vocab(self.found) is None:  # removed, or of an earlier version
            commit_draft_vocab(prepare(self.found))
        if (plan := self._plan_there()) is not None:
            with suppress(CacheError, OSError), versions.build_lock(self.path):
                discard_plan(plan)
        return _with_all_files(self.found, self.path)

    def _finished(self, meta: dict[str, Any]) -> Outcome:
        reused = not self._has_committed
        return finish(self.settings, KEY, self.path, meta, reused, self._measurement.end(), self.fingerprint)


def _take_earlier(path: Path, work: Path, key: str) -> None:
    """Move an unfinished version from its place in earlier releases, beside its journal."""
    earlier = versions.versions_dir(path) / f"{versions.BUILDING}-{key[: versions.VERSION_DIGITS]}"
    journal = earlier.with_name(f"{earlier.name}{versions.JOURNAL_SUFFIX}")
    if earlier.is_dir() and not earlier.is_symlink() and (journal / versions.JOURNAL_NAME).is_file():
        fileio.rename(earlier, work)
        versions.discard(journal)


def _together(number: int, shards: list[Unit]) -> Unit:
    """Return the state of a partition by the states of its shards."""
    bad = [shard for shard in shards if shard.state != "finished"]
    items, tokens = (sum(getattr(shard, name) for shard in shards) for name in ("items", "tokens"))
    if not bad:
        return Unit(number, "finished", items=items, tokens=tokens)
    return Unit(number, bad[0].state, f"shard {bad[0].number}: {bad[0].found}", items=items, tokens=tokens)


def _receipt(prepared: Prepared, partition: Partition, plan: PartitionPlan) -> dict[str, Any]:
    """Return a partition's record, with keys of meta.json."""
    from niels_gpt.eagle3.format.plan import shards_of_part

    shards, firsts = prepared.plan.num_shards, prepared.plan.firsts
    starts, mine = prepared.samples.starts, shards_of_part(shards, (partition.number + 1, partition.total))
    tokens = sum(int(starts[firsts[shard + 1]] - starts[firsts[shard]]) for shard in mine)
    return {
        "kind": "eagle3",
        "partition": {"number": partition.number, "total": partition.total, "plan": plan.sha256},
        "totals": {"samples": sum(prepared.plan.rows_of(shard) for shard in mine), "tokens": tokens},
    }


# --- what a build would do --------------------------------------------------------------------------------------------


def planned_action(settings: Settings, key: str, tokenizer: FullTokenizer | None) -> tuple[str, str]:
    """Return what a build would do, and from what.

    The first text is "up to date", "build", or "left out" or "cannot be built" with the reason; the second names target
    and source, or the missing setting. tokenizer: of the caches; None if it is not trained or downloaded yet.
    """
    problem = why_left_out(settings)
    if problem is not None:
        return "left out", problem.found
    source = f"{SMALL_TARGET if has_small_target(settings) else settings.eagle3_target} over {settings.eagle3_source}"
    try:
        if has_small_target(settings) and tokenizer is not None and not tokenizer.special_token_ids():
            raise no_sentinels(settings, [key], cache_root(settings) / TOKENIZER_KEY)
        if _is_current(settings, key, tokenizer):
            return "up to date", source
    except LeftOut as error:
        return f"left out: {error.found}", source
    except (OSError, ValueError, ImportError) as error:
        return f"cannot be built: {error}", source
    action = "build" if settings.partitions == 1 or key != KEY else f"build in {many(settings.partitions, 'partition')}"
    is_there = key == KEY and unfinished_versions(cache_root(settings) / key)
    return f"{action} (an unfinished one is there)" if is_there else action, source


def _is_current(settings: Settings, key: str, tokenizer: FullTokenizer | None) -> bool:
    if not recorded_recipe(cache_root(settings) / key).get("fingerprint"):
        return False
    target, how = None, {"reads_hub": False}
    if has_small_target(settings):
        if tokenizer is None or not (target := small_target_folder(settings, tokenizer.sha256)).is_dir():
            return False
    elif not _is_known_without_hub(settings):
        return False
    if key == VOCAB_KEY:
        return current_draft_vocab(resolved_for_vocab(settings, target=target), **how) is not None
    return are_current_targets(resolved(settings, observed=None, target=target), **how)


def _is_known_without_hub(settings: Settings) -> bool:
    """Return whether the revisions of target and chats are recorded, or not needed."""
    from niels_gpt.eagle3.resume import recorded_plan
    from niels_gpt.hub.models import is_local
    from niels_gpt.recipes.resolve import resolve_whole

    target = str(settings.eagle3_target)
    plan = recorded_plan(folder_with_plan(cache_root(settings) / KEY))
    name, input_data = plan.get("target", {}).get("name"), plan.get("source", {}).get("input_data")
    chats = raw_source(settings)
    is_file = chats is None or resolve_whole(settings, chats).kind != "hub"
    is_target_known = is_local(target) or name == stable_name(settings, target)
    return is_target_known and (is_file or input_data == settings.eagle3_source)


EAGLE3_RECIPES = HomeRecipes(
    {VOCAB_KEY: build_draft_vocab, KEY: build_targets},
    planned_action,
    settings_fingerprint,
    why_left_out,
    has_small_target,
    raw_source,
    units={KEY: TargetUnits},
)
