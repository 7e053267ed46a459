"""Build a cache in units, which users call partitions: fix the plan, build one unit or all, and seal.

Making an object of `Units` looks at the folder of caches first; finished units and current caches are not made again.
"""

from __future__ import annotations

import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import read_meta
from niels_gpt.documents import Partition
from niels_gpt.engine.meta import Source
from niels_gpt.engine.units import (
    LISTINGS_NAME,
    Commands,
    Mend,
    Mended,
    PartitionPlan,
    Unit,
    UnitKind,
    discard_plan,
    fix_plan,
    look_at,
    plans_of,
    seal,
    states_of,
    version_folder,
)
from niels_gpt.kinds.kind import MALFORMED, Kind, kind_of_key, units_of_key
from niels_gpt.kinds.verify import find_damage
from niels_gpt.recipes.family import Job
from niels_gpt.recipes.records import (
    Measurement,
    Outcome,
    cache_root,
    is_committed,
    is_current,
    recorded_recipe,
)
from niels_gpt.recipes.request import Inputs, build_whole, check_settings
from niels_gpt.recipes.resolve import ResolvedSource, listing_of, resolve_source
from niels_gpt.recipes.shared import check_shared_folder, code_identity
from niels_gpt.recipes.tokenizer import stage_tokenizer, tokenizer_for, tokenizer_state
from niels_gpt.recipes.unit_plans import (
    damaged_units,
    differences,
    excluded_sha256,
    is_of_seal,
    listings_of,
    recorded_units,
    settings_of,
    tokenizer_of,
)
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError, UsageError
from niels_gpt.storage.fileio import META_NAME, canonical_json, write_bytes
from niels_gpt.storage.locks import apply_lock_setting
from niels_gpt.storage.meta_json import resolved
from niels_gpt.storage.remedies import build_command
from niels_gpt.storage.versions import (
    BUILDING,
    PLAN_NAME,
    RECIPE_NAME,
    build_lock,
    discard,
    discard_unfinished,
    failed_checks,
    note_built_again,
    refuse_foreign,
    refuse_if_building,
    versions_dir,
)
from niels_gpt.work import Progress

logger = logging.getLogger(__name__)

BUILT_WHOLE = "built whole, without partitions: trees of messages and stubs have none"
"""Text of W505."""


class NoPlan(CacheError):
    """There is no plan of this text and these settings, and none may be fixed."""


class MadeUnit(NamedTuple):
    """Result of the build of one unit."""

    key: str
    """Key of the cache, such as pretrain/roam."""
    partition: Partition
    meta: dict[str, Any]
    """Receipt of the unit; the meta.json of the sealed cache if that is current, so that no unit is needed."""
    reused: bool
    """Whether the unit was finished before, or the sealed cache is current."""
    seconds: float
    """Wall time since the object of `Units` was made."""


class CacheUnits(ABC):
    """The units of one cache, which users call partitions. Making the object fixes their plan, if there is none."""

    key: str
    settings: Settings
    plan: PartitionPlan | None = None
    """None if the committed cache is current, so that no unit is needed."""
    made_tokenizer: Outcome | None = None
    """The tokenizer of the plan, which the seal installs; None if the folder's counts, or none is needed."""
    _measurement: Measurement

    @property
    def path(self) -> Path:
        """The cache's public path."""
        return cache_root(self.settings) / self.key

    @property
    def counted(self) -> str:
        """What the progress of a build counts, besides tokens."""
        kind = kind_of_key(self.key)
        return Kind.counted if kind is None else kind.counted

    @property
    def budget(self) -> int | None:
        """Tokens of all units, if known before the build."""
        return None

    @property
    @abstractmethod
    def recipe_fingerprint(self) -> str:
        """Sha256 of the recipe: of the plan, or the current cache."""

    @abstractmethod
    def states(self) -> list[Unit]:
        """Return the state of each unit in order; [] if the cache is current."""

    def unfinished(self) -> list[int]:
        """Return the numbers of the unfinished units."""
        return [unit.number for unit in self.states() if unit.state != "finished"]

    def build(self, number: int, *, wait: bool = False, progress: Progress | None = None) -> MadeUnit:
        """Build unit `number`, from 0, unless it is finished or the cache is current. A killed build resumes.

        wait: for another builder of the unit, instead of E503.
        progress: receives the items that `counted` names, tokens, and the unit's part of the budget (None without one).
        Raises: ValueError for an unknown number; CacheError E306 if the text is no longer the plan's text, E503 if
            another process builds the unit, E511 if another command removed the plan, E712 (EAGLE-3) if the first
            partition was started with other settings or another program; the errors of the builder.
        """
        partition = Partition.checked(number, self.settings.partitions)
        if self.plan is None:
            meta, reused = self.current_meta(), True
        else:
            meta, reused = self._built(self.plan, partition, wait, progress)
        return MadeUnit(self.key, partition, meta, reused, self._measurement.end().seconds)

    @abstractmethod
    def build_all(self, progress: Progress | None = None) -> Outcome:
        """Build all missing units here, and seal the cache. Raises: the errors of `build` and `seal`."""

    @abstractmethod
    def seal(self, *, deep: bool = True, wait: bool = False, progress: Progress | None = None) -> Outcome:
        """Check all units and commit their cache. Reuses a current cache.

        deep: read every file, instead of receipts and sizes only. wait: for other builders of the cache and its units,
            instead of E503. progress: receives files, bytes read, and bytes to read in all.
        Raises: CacheError E510 for unfinished units, each with its command, E503 if another process builds; OSError.
        """

    @abstractmethod
    def restart(self, number: int) -> bool:
        """Make the next build of a unit start from scratch. Returns False, and does nothing, for a current cache.

        Raises: CacheError E503 while the unit is built or the cache sealed.
        """

    def mend(self, number: int, progress: Progress | None = None) -> tuple[MadeUnit, Mended] | None:
        """Build a unit of the sealed cache again for its damaged files. Returns None if it cannot."""
        return None

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether the committed cache is the requested one."""

    @abstractmethod
    def current_meta(self) -> dict[str, Any]:
        """Return the meta of the committed, current cache. Removes a plan that a killed seal has left."""

    @abstractmethod
    def _built(
        self, plan: PartitionPlan, partition: Partition, wait: bool, progress: Progress | None
    ) -> tuple[dict[str, Any], bool]:
        """Return the receipt of a unit, built first unless it is finished, and whether it was finished.

        If the cache was sealed meanwhile: its meta, and True.
        """

    def _sealed(self, plan: PartitionPlan) -> dict[str, Any] | None:
        """Return the meta of the cache if another process has sealed it; None if its units are needed.

        Raises: NoPlan E511 if the plan was removed, and there is no cache of it.
        """
        has_plan = plan.is_there  # asked first: a seal commits, then removes the plan
        is_sealed = self.is_current()
        if has_plan and not is_sealed:
            return None
        with build_lock(self.path, wait=True):
            if not plan.is_there:
                discard_plan(plan)  # what a builder that came too late has put there
        if is_sealed:
            return self.current_meta()
        again = f"Build its partitions again: {build_command(self.settings, self.key)}"
        raise NoPlan(plan.folder, f"another command has removed {PLAN_NAME}", "the plan", again, code="E511")

    @property
    def _commands(self) -> Commands:
        """Commands that build one unit, build all, and seal."""
        command, total = partial(build_command, self.settings, self.key), self.settings.partitions
        return Commands(lambda number: command("--partition", str(number % total)), command(), command(verb="seal"))

    def _none_there(self) -> NoPlan:
        build = build_command(self.settings, self.key)
        return NoPlan(self.path, "none of its partitions is there", remedy=f"Build them: {build}", code="E510")


class Units(CacheUnits):
    """The units of a cache of text, chats or rollouts.

    Makes the tokenizer, resolves the source, and checks the folder, the program and the disk. Any machine may make an
    object, any number of times. A plan of the same settings is kept, with its revision of the hub.
    """

    def __init__(
        self,
        settings: Settings,
        source: str | ResolvedSource,
        *,
        refresh: bool = False,
        observed: str | None = None,
        fixes: bool = True,
    ) -> None:
        """source: of the cache, or its name. refresh: ask the hub for its newest revision, even if there is a plan.
        observed: as in `Inputs.found`. fixes: fix a plan if there is none; else that is an error.
        Raises: UsageError for settings without partitions, or a cache that is always built whole; NoPlan E510 or E511
            if none may be fixed; CacheError E511 if the plan was fixed with other versions, E512 for a file system
            without the needed features; NoRoomError; the errors of resolving the source and the tokenizer."""
        self._measurement = Measurement()
        self.settings = settings
        self.source = resolve_source(settings, source) if isinstance(source, str) else source
        self.key = self.source.spec.key
        kind = units_of_key(self.key)
        if not self.source.is_partitioned(settings) or not isinstance(kind, UnitKind):
            why = f"partitions is {settings.partitions}" if settings.partitions < 2 else "a stub, or trees"
            expected = "a cache of text, chats or recorded rollouts and 2 or more partitions (--partitions)"
            raise UsageError(f"{self.key}: {why}; expected {expected}")
        check_settings(settings, self.source)
        _check_folder(cache_root(settings).absolute())
        self.kind = kind
        self._fixes = fixes
        made = self._made_tokenizer(refresh) if self.source.family.takes_tokenizer else None
        tokenizer = None if made is None else tokenizer_for(settings, self.source, made.path)
        self.made_tokenizer = made
        self._inputs = Inputs(settings, self.source, tokenizer, made)
        self._listing = listing_of(self.source)
        self._find(observed, asks_hub=refresh and self.source.kind == "hub")
        if refresh or observed is not None:  # the next commands, which have neither, find this one first
            with suppress(OSError):
                os.utime(self.plan.folder / PLAN_NAME if self.plan else versions_dir(self.path) / RECIPE_NAME)
        self._accepted = {} if self.plan is None else self._other_code(self.plan)

    @property
    def budget(self) -> int | None:
        """Tokens of both budgets; None without budgets."""
        return self.source.budget(self.settings)

    @property
    def recipe_fingerprint(self) -> str:
        """Sha256 of the recipe: of the plan, or the current cache."""
        return self.asked.fingerprint

    def is_current(self) -> bool:
        """Return whether the committed cache has the plan's recipe."""
        return is_current(self.path, self.asked.fingerprint)

    # --- which plan ---

    def _find(self, observed: str | None, *, asks_hub: bool) -> None:
        """Set `asked` and `plan`. Fixes the plan if there is none."""
        if not asks_hub and self._is_recorded(observed):
            return
        # One machine reads the files for their fingerprint, or asks the hub; the others wait, and find its plan.
        with build_lock(self.path, wait=True):
            if not asks_hub and self._is_recorded(observed):
                return
            known = None if asks_hub else self._inputs.recorded_provenance(observed)
            self.asked = self._inputs.at(self.source.provenance(known))
            mends = is_committed(self.path, self.asked.fingerprint)
            self.plan = None if self.is_current() else self._fixed(mends=mends)
            if self._listing is not None:
                self._add_listing(self._listing)

    def _is_recorded(self, observed: str | None) -> bool:
        """Set `asked` and `plan` from the records of these settings, without reading the text. Returns False if there
        are none."""
        found = recorded_units(self._inputs, self._listing, observed)
        if found is not None:
            self.asked, self.plan = found
        return found is not None

    def _fixed(self, *, mends: bool = False) -> PartitionPlan:
        """Return the plan of `asked`, fixed if there is none. The caller holds the `build_lock` of the cache.

        mends: only one unit is built, so the disk need not have room for all.
        """
        plans, tokenizer = plans_of(self.path), self.asked.tokenizer
        plan = next((plan for plan in plans if plan.fingerprint == self.asked.fingerprint), None)
        if plan is not None:
            return plan
        if not self._fixes:
            raise self._no_plan(plans)
        self.source.warn_if_partial()
        refuse_foreign(self.path)
        if not mends:
            self.asked.refuse_without_room()
        for other in plans:
            self._warn_of_other(other)
        return fix_plan(
            self.path,
            {
                "plan_version": 1,
                "kind": "partition_plan",
                "cache": self.key,
                "partitions": self.settings.partitions,
                "rule": self.source.spec.partition_rule,
                "fingerprint": self.asked.fingerprint,
                "recipe": self.asked.recipe,
                "source": self.asked.provenance,
                "listing": self._listing,
                "tokenizer_sha256": None if tokenizer is None else tokenizer.sha256,
                "tokenizer_content_sha256": self.asked.tokenizer_content,
                "exclude_sha256": excluded_sha256(self.settings),
                "code": code_identity(),
            },
        )

    def _add_listing(self, listing: str) -> None:
        """Record another listing of the same text, so that later commands need not read it. The caller holds
        `build_lock`."""
        if self.plan is None:
            recipe = {**recorded_recipe(self.path), "listing": listing}
            write_bytes(versions_dir(self.path) / RECIPE_NAME, canonical_json(recipe))
        elif listing not in listings_of(self.plan):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            with suppress(OSError), open(os.open(self.plan.folder / LISTINGS_NAME, flags, 0o666), "a") as file:
                file.write(f"{listing}\n")

    # --- building and sealing ---

    @property
    def mends(self) -> bool:
        """Whether a check of the sealed cache has failed, so that a build of a unit mends its damaged files."""
        is_sealed = self.kind.mend is not None and is_committed(self.path, self.asked.fingerprint)
        return is_sealed and bool(failed_checks(self.path).repairable)

    def build(self, number: int, *, wait: bool = False, progress: Progress | None = None) -> MadeUnit:
        """Build unit `number`, or mend the sealed cache by it: see `mends`. Raises: as `CacheUnits.build`."""
        mended = self.mend(number, progress, wait=wait) if self.mends else None
        return mended[0] if mended is not None else super().build(number, wait=wait, progress=progress)

    def states(self) -> list[Unit]:
        """Return the state of each unit in order; [] if the cache is current."""
        return [] if self.plan is None else [unit for unit in states_of(self.plan, self.kind) if unit.number >= 0]

    def build_all(self, progress: Progress | None = None) -> Outcome:
        """Build all missing units here, one after the other, and seal the cache.

        Waits for other processes that build a unit or seal. Reads the files of earlier units again; `progress` counts
        their tokens from 0. Raises: the errors of `build` and `seal`.
        """
        if self.mends:
            for number in damaged_units(self.path):
                self.mend(number, progress, wait=True)
            if self.is_current():
                return self._finished(self.current_meta(), False)
        if self.plan is None:
            return self._finished(self.current_meta(), True)
        # Files written in this run were hashed while they were written; the seal reads files of earlier runs again.
        total, deep = _Total(self.budget, self.kind.read, progress), False
        for number in range(self.plan.total):
            receipt, was_there = self._built(self.plan, self.plan.partition(number), True, total)
            total.add(receipt)
            deep = deep or was_there
        return self.seal(deep=deep, wait=True, progress=total.checked)

    def seal(self, *, deep: bool = True, wait: bool = False, progress: Progress | None = None) -> Outcome:
        """Check all units, commit their cache, and install its tokenizer. Reuses a current cache.

        deep: compute the sha256 of every file, instead of looking at links, receipts and sizes only. wait: for other
            builders of the cache and its units, instead of E503. progress: receives files, bytes read, and bytes to
            read in all.
        Raises: CacheError E510 for unfinished units, each with its command, E503 if another process builds; OSError.
        """
        if self.plan is None:
            return self._finished(self.current_meta(), True)
        self.source.warn_if_partial()
        while True:
            try:
                # Commits the cache before the plan is removed: a seal killed between leaves a plan that `is_of_seal`.
                meta = seal(
                    self.plan,
                    self.kind,
                    source=self._described(),
                    deep=deep,
                    wait=wait,
                    commands=self._commands,
                    committed=partial(self.asked.record, listing=self._listing),
                    progress=progress,
                )
                break
            except CacheError as error:
                if error.code == "E503" and wait:
                    deep = True  # they may have been built again
                    for number in range(self.plan.total):
                        _wait_for(self.plan.unit_path(number))
                elif error.code != "E510" or (sealed := self._sealed(self.plan)) is None:
                    raise
                else:
                    return self._finished(sealed, True)
        self.source.family.warn(self.asked, meta)
        self.source.family.look_back(self.settings, self.path, meta)
        self.asked.install_tokenizer(built=True)  # last: a seal that fails leaves the folder's tokenizer as it was
        return self._finished(meta, False)

    def restart(self, number: int) -> bool:
        """Make the next build of a unit start from scratch; the others stay.

        Returns False, and does nothing, for a current cache, which has no units any more.
        Raises: CacheError E503 while the unit is built or the cache sealed.
        """
        if self.plan is None:
            return False
        path = self.plan.unit_path(number)
        refuse_foreign(path)
        with build_lock(path) as folder:
            if (versions_dir(self.plan.path) / BUILDING).is_dir():
                refuse_if_building(self.plan.path)  # a seal, which reads this unit
            discard_unfinished(folder)
            if path.is_symlink():
                discard(path)
        return True

    def mend(
        self, number: int, progress: Progress | None = None, *, wait: bool = False
    ) -> tuple[MadeUnit, Mended] | None:
        """Build unit `number` of the sealed cache again, and replace its damaged files.

        Returns None, and does nothing, unless a cache of these settings and this text is sealed. A killed call is
        repeated. The plan is removed at the end, but kept while files stay damaged or missing, for the next unit.
        progress: see `build`. Raises: the errors of `build`; CacheError E306, before anything is changed, if the unit
            gives other bytes now.
        """
        partition, mended = Partition.checked(number, self.settings.partitions), None
        while self.kind.mend is not None and mended is None and is_committed(self.path, self.asked.fingerprint):
            with build_lock(self.path, wait=True):
                self.plan = plan = self._fixed(mends=True)
            unit = look_at(plan, self.kind, number)
            if unit.receipt is not None and self.kind.examine(version_folder(plan, unit), True, None)[1]:
                self.restart(number)
            try:
                receipt, reused = self._built(plan, partition, wait, progress, mends=True)
                with build_lock(self.path, wait=True):
                    mended = self._mended_by(plan, number, self.kind.mend)
                    is_whole = mended is not None and not mended.left
                    # `left` has the files of all units. Shards of others may still be damaged, if a check has failed.
                    if is_whole and not (self.mends and find_damage(self.path, deep=True)):
                        note_built_again(self.path)
                        if is_current(self.path, plan.fingerprint):
                            discard_plan(plan)
            except CacheError as error:
                if error.code == "E306" and is_current(self.path, plan.fingerprint):
                    with build_lock(self.path, wait=True):
                        discard_plan(plan)
                raise
        if mended is None:
            return None
        return MadeUnit(self.key, partition, receipt, reused, self._measurement.end().seconds), mended

    def _mended_by(self, plan: PartitionPlan, number: int, mend: Mend) -> Mended | None:
        """Mend the sealed cache by all finished units of a plan. The caller holds the `build_lock` of the cache.

        Returns None if another command has removed unit `number`, or committed another version.
        """
        units = [look_at(plan, self.kind, each) for each in range(plan.total)]
        if units[number].receipt is None or not is_committed(self.path, plan.fingerprint):
            return None
        folder = resolved(self.path)
        if folder.parent != resolved(versions_dir(self.path)):
            raise CacheError(self.path, f"a link to {folder}", "a link to one of its versions", code="E205")
        there = {unit.number: (version_folder(plan, unit), unit.receipt) for unit in units if unit.receipt is not None}
        try:
            return mend(folder, read_meta(str(folder / META_NAME)), there)
        except MALFORMED as error:
            if isinstance(error, CacheError):
                raise
            found = f"not as docs/formats.md describes it ({error!r})"
            raise CacheError(folder / META_NAME, found, code="E202") from error

    def current_meta(self) -> dict[str, Any]:
        """Return the meta of the committed, current cache. Removes a plan that a killed seal has left.

        A newer plan mends this cache, and stays.
        """
        meta = self.asked.current_meta() or read_meta(str(self.path / META_NAME))
        for plan in plans_of(self.path):
            if plan.fingerprint == self.asked.fingerprint and is_of_seal(plan):
                with suppress(CacheError, OSError), build_lock(plan.path):
                    discard_plan(plan)
        return meta

    def _built(
        self,
        plan: PartitionPlan,
        partition: Partition,
        wait: bool,
        progress: Progress | None,
        *,
        mends: bool = False,
    ) -> tuple[dict[str, Any], bool]:
        """mends: the unit is for a sealed cache that lacks good files."""
        path, asked = plan.unit_path(partition.number), self.asked
        while True:
            if mends:
                with build_lock(plan.path, wait=True):
                    fix_plan(plan.path, plan.content)  # another command may have removed it
            elif (meta := self._sealed(plan)) is not None:
                return meta, True
            unit = look_at(plan, self.kind, partition.number)
            if unit.receipt is not None:
                return unit.receipt, True
            if not unit.is_unbuilt:
                logger.info("%s is built again: %s, %s", path, unit.state, unit.found)
            described = self._described("--partition", str(partition.number))
            try:
                meta = asked.family.build(asked, Job(path, described, _nothing, progress, partition, plan.sha256))
            except (CacheError, OSError) as error:
                is_built = isinstance(error, CacheError) and error.code == "E503"
                if not (is_built and wait) and plan.is_there:
                    raise
                if is_built and wait:  # another builds it, and may be killed
                    _wait_for(path)
                continue
            if plan.is_there:  # else another command has removed it, and this unit with it
                self._check_text(path)
                return meta, False

    def _described(self, *flags: str) -> Source:
        """Return the source for meta.json, with the versions that --accept-code lets differ."""
        source = self.asked.described(*flags)
        accepted = {"accepted_code": self._accepted} if self._accepted else {}
        return replace(source, provenance={**source.provenance, **accepted})

    def _check_text(self, path: Path) -> None:
        """Raise CacheError E306, and remove the unit built at `path`, unless the text is the plan's text."""
        if self._listing is None:
            return
        source = resolve_source(self.settings, self.key.rpartition("/")[2])
        listing = listing_of(source)
        if listing != self._listing:
            if source.provenance(None)["fingerprint"] != self.asked.provenance["fingerprint"]:
                with build_lock(path, wait=True):
                    discard(path)
                raise CacheError(
                    self.path,
                    f"its text changed while partition {int(path.name)} was built, which is removed",
                    "the text of the plan",
                    f"Run the same command when the text no longer changes: it fixes a plan of the text of that time: "
                    f"{self.asked.command()}",
                    code="E306",
                )
            self._listing = listing

    def _finished(self, meta: dict[str, Any], reused: bool) -> Outcome:
        return self.asked.finished(meta, reused, self._measurement.end())

    # --- what is refused ---

    def _other_code(self, plan: PartitionPlan) -> dict[str, list[Any]]:
        """Return versions that differ between a plan and this machine: name -> there and here.

        Raises: CacheError E511 unless the settings accept them.
        """
        here, there = map(_flat, (code_identity(), plan.content["code"]))
        differing = {
            name: [there[name], here[name]] for name in sorted(here) if there.get(name, here[name]) != here[name]
        }
        if self.settings.accept_code or not differing:
            return differing
        found = ", ".join(f"{name} {old!s:.12}, here {new!s:.12}" for name, (old, new) in differing.items())
        command = self.asked.command
        raise CacheError(
            plan.folder,
            f"partitions are built by another program: {found}",
            "the same versions on every machine",
            f"Install these versions here, or start over with those that are here: {command('--restart')}\n"
            f"Where you know that both give equal bytes: {command('--accept-code')}",
            code="E511",
        )

    def _warn_of_other(self, plan: PartitionPlan) -> None:
        there = settings_of(plan, self.settings, self.source.spec.settings, self.asked.tokenizer_content)
        back = "" if there in (None, self.settings) else build_command(there or self.settings, self.key)
        logger.warning(
            "%s: partitions of another plan are there, and none of them is used (%s)%s",
            self.path,
            "; ".join([plan.folder.name, *differences(plan, self.asked)]),
            f". To continue with them: {back}" if back else "",
            extra={"code": "W507"},
        )

    def _no_plan(self, plans: list[PartitionPlan]) -> NoPlan:
        """Return the error if no plan may be fixed: there is none at all, or one of other settings."""
        if not plans:
            return self._none_there()
        differing = {plan.sha256: differences(plan, self.asked) for plan in plans}
        plan = min(plans, key=lambda plan: len(differing[plan.sha256]))
        found = f"its partitions belong to another plan ({'; '.join([plan.folder.name, *differing[plan.sha256]])})"
        there = settings_of(plan, self.settings, self.source.spec.settings, self.asked.tokenizer_content)
        if there == self.settings:
            again = f"Build partitions of the current source: {build_command(there, self.key)}"
            return NoPlan(self.path, found, "the source and tokenizer of their builds", again, code="E511")
        return NoPlan(self.path, found, "the flags of their builds", self._seals(there), code="E511")

    def _seals(self, there: Settings | None) -> str:
        """Return the remedy for a seal with other flags than the builds. there: settings of the builds; None if
        unknown."""
        if there is None:
            return "Seal with the flags of the builds, among them --tokenizer and --exclude"
        return f"With these: {build_command(there, self.key, verb='seal')}"

    def _made_tokenizer(self, refresh: bool) -> Outcome:
        """Return the tokenizer: of a plan if the settings name none, else a staged one.

        Raises: NoPlan if it must be trained, and no plan may be fixed.
        """
        settings, plans = self.settings, plans_of(self.path)
        apply_lock_setting(cache_root(settings), settings.lock)
        if not refresh and (known := tokenizer_of(plans, settings)) is not None:
            return known
        if not self._fixes and tokenizer_state(settings) == "train":
            if not plans:
                raise self._none_there()
            plan = next((plan for plan in plans if plan.total == settings.partitions), plans[0])
            found = f"its partitions ({plan.folder.name}) have a tokenizer that these settings do not name"
            remedy = self._seals(settings_of(plan, settings, self.source.spec.settings, None))
            raise NoPlan(self.path, found, "the tokenizer of their builds", remedy, code="E511")
        return stage_tokenizer(settings, user_sources_only=self.source.user is not None, refresh=refresh)


class _Total:
    """Progress of several units as the progress of one cache."""

    def __init__(self, budget: int | None, read: str, progress: Progress | None) -> None:
        """read: see UnitKind."""
        self._budget, self._read, self._progress, self._documents, self._tokens = budget, read, progress, 0, 0

    def __call__(self, documents: int, tokens: int, _: int | None) -> None:
        if self._progress is not None:
            self._progress(self._documents + documents, self._tokens + tokens, self._budget)

    def add(self, receipt: dict[str, Any]) -> None:
        """Count a finished unit."""
        self._documents += receipt[self._read]
        self._tokens += sum(receipt["totals"][f"{split}_tokens"] for split in SPLITS)

    def checked(self, _: int, read: int, num_bytes: int | None) -> None:
        """Show how many units the seal has read: the bar starts again."""
        if self._progress is not None and num_bytes:
            self._progress(self._documents, self._tokens * read // num_bytes, self._tokens)


@functools.cache
def _check_folder(folder: Path) -> None:
    """Check the folder of caches once in a process, because another machine may mount it differently."""
    check_shared_folder(folder)


def _flat(code: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions of a program: its format and builder, and each library by name."""
    libraries = code.get("libraries")
    return {key: code.get(key) for key in ("format", "builder")} | (libraries if isinstance(libraries, dict) else {})


def _nothing(_: dict[str, Any]) -> None:
    """Record no recipe: the receipt of a unit names its plan."""


def _wait_for(path: Path) -> None:
    """Wait until no process builds a unit."""
    try:
        refuse_if_building(path)
    except CacheError:
        with build_lock(path, wait=True):
            pass


def build_token_cache(
    settings: Settings,
    name: str,
    *,
    refresh: bool = False,
    observed: str | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Build the cache of a source, or reuse it if it is current.

    name: of a built-in or user-defined source, or the key of one of its caches, such as trees/oasst1.
    settings: with partitions, missing ones are built here, one after the other, and sealed.
    refresh: ask the hub for its newest revisions. observed: as in `Inputs.found`.
    progress: receives documents (chats, groups), tokens, and the tokens of both budgets (None without budgets).
    Raises: ValueError for an unknown source or settings that no such cache can have; FileNotFoundError for missing
        files; ConnectionError without the hub; CacheError for the tokenizer, the folder or the text; NoRoomError; the
        errors of the builders.
    """
    source = resolve_source(settings, name)
    if settings.partitions > 1:
        if source.is_partitioned(settings):
            return Units(settings, source, refresh=refresh, observed=observed).build_all(progress)
        logger.warning("%s: %s", source.spec.key, BUILT_WHOLE, extra={"code": "W505"})
        settings = replace(settings, partitions=1)
    return build_whole(settings, source, refresh=refresh, observed=observed, progress=progress)
