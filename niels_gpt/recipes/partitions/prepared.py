"""A partitioned cache with its tokenizer, its source and its plan, which is fixed by the machine that comes first."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.builders.partitions.plan import Plan, fix_plan, plans_of
from niels_gpt.builders.partitions.receipts import NotFinishedError, read_receipt
from niels_gpt.builders.partitions.refusal import Commands
from niels_gpt.builders.partitions.seal import discard_plan, is_there, seal
from niels_gpt.cache.meta import read_meta
from niels_gpt.data.files.part import PARTITION_RULE
from niels_gpt.documents import Partition
from niels_gpt.progress import Progress
from niels_gpt.recipes.partitions.documents import (
    build_documents,
    check_val_frac,
    is_partitioned,
    warn_if_partial,
    warn_of_missing_start,
)
from niels_gpt.recipes.partitions.planned import (
    Planned,
    add_listing,
    differences,
    excluded_sha256,
    make_newest,
    planned,
    settings_of,
    tokenizer_of_plan,
)
from niels_gpt.recipes.partitions.shared import check_shared_folder, code_identity
from niels_gpt.recipes.resolve import ResolvedSource, listing_of, resolve_source
from niels_gpt.recipes.run_recipe import (
    AskedCache,
    BuildInputs,
    Outcome,
    cache_root,
    is_current,
    recorded_provenance,
)
from niels_gpt.recipes.tokenizer import (
    install_tokenizer,
    log_unseen_source,
    stage_tokenizer,
    tokenizer_for,
    tokenizer_state,
)
from niels_gpt.settings import Settings, UsageError
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.locks import apply_lock_setting
from niels_gpt.storage.remedies import build_command
from niels_gpt.storage.versions import PLAN_NAME, build_lock, discard, refuse_foreign, refuse_if_building
from niels_gpt.tokenizers.protocol import FullTokenizer

logger = logging.getLogger(__name__)


class NoPlan(CacheError):
    """There is no plan of this text and these settings, and none is to be fixed."""


@dataclass
class Prepared:
    """A partitioned cache whose plan is fixed, with its tokenizer."""

    asked: AskedCache
    plan: Plan | None
    """None: the committed cache is current."""
    staged: Outcome
    """Its tokenizer, installed or not yet."""
    listing: str | None
    """Of `listing_of`."""

    def current_meta(self) -> dict[str, Any]:
        """Return the meta of the committed cache, which is current; a plan that a killed seal has left is removed."""
        meta = self.asked.current_meta() or read_meta(str(self.asked.path / META_NAME))
        for plan in plans_of(self.asked.path):
            if plan.fingerprint == self.asked.fingerprint:
                with suppress(CacheError, OSError), build_lock(plan.path):
                    discard_plan(plan)
        return meta

    def build(
        self, plan: Plan, partition: Partition, wait: bool, progress: Progress | None
    ) -> tuple[dict[str, Any], bool]:
        """Return the receipt of a partition, which is built first unless it is finished, and whether it was.

        Its meta, and True, where another process has sealed the cache. Raises: as `_sealed` and `_check_text`.
        """
        path, asked = plan.partition_path(partition.number), self.asked
        while True:
            if (sealed := self._sealed(plan)) is not None:
                return sealed, True
            if (meta := _receipt(plan, partition.number)) is not None:
                return meta, True
            described = asked.described("--partition", str(partition.number))
            counters = described.counters
            assert isinstance(counters, Counter)
            inputs = BuildInputs(asked.tokenizer, described, counters, asked.provenance["revision"], _nothing)
            try:
                meta = build_documents(asked.settings, asked.source, inputs, path, progress, partition, plan.sha256)
            except (CacheError, OSError) as error:
                is_built = isinstance(error, CacheError) and error.code == "E503"
                if not (is_built and wait) and is_there(plan):
                    raise
                if is_built and wait:  # another builds it, and may be killed
                    _wait_for(path)
                continue
            if is_there(plan):
                self._check_text(path)
                return meta, False

    def _sealed(self, plan: Plan) -> dict[str, Any] | None:
        """Return the meta of the cache if another process has sealed it; None: its partitions are needed.

        Raises: CacheError E511 where the plan was removed, and there is no cache of it.
        """
        has_plan = is_there(plan)  # asked first: a seal commits, then removes the plan
        is_sealed = is_current(self.asked.path, plan.fingerprint)
        if has_plan and not is_sealed:
            return None
        with build_lock(plan.path, wait=True):
            if not is_there(plan):
                discard_plan(plan)  # what a builder that came too late has put there
        if is_sealed:
            return self.current_meta()
        again = f"Build its partitions again: {build_command(self.asked.settings, self.asked.key)}"
        raise NoPlan(plan.folder, f"another command has removed {PLAN_NAME}", "the plan", again, code="E511")

    def _check_text(self, path: Path) -> None:
        """Raise CacheError, and remove the partition built at `path`, where the text is not that of the plan."""
        if self.listing is None:
            return
        asked = self.asked
        source = resolve_source(asked.settings, asked.key.rpartition("/")[2])
        listing = listing_of(source)
        if listing != self.listing and source.provenance(None)["fingerprint"] != asked.provenance["fingerprint"]:
            with build_lock(path, wait=True):
                discard(path)
            raise CacheError(
                asked.path,
                f"its text changed while partition {int(path.name)} was built, which is removed",
                "the text of the plan",
                f"Run the same command when the text no longer changes: it fixes a plan of the text as it is then: "
                f"{build_command(asked.settings, asked.key)}",
                code="E306",
            )
        self.listing = listing

    def seal(
        self, plan: Plan, deep: bool, progress: Progress | None, wait: bool = False
    ) -> tuple[dict[str, Any], bool]:
        """Seal all partitions; returns the meta of the cache, and whether another process has sealed it.

        Its tokenizer is installed. wait: wait for other builders of the cache and of its partitions, instead of E503.
        """
        warn_if_partial(self.asked.source)
        while True:
            try:
                meta = seal(
                    plan,
                    source=self.asked.described(),
                    deep=deep,
                    wait=wait,
                    commands=_commands(self.asked),
                    committed=partial(self.asked.record, listing=self.listing),
                    progress=progress,
                )
                break
            except CacheError as error:
                if error.code == "E503" and wait:
                    deep = True  # they may have been built again
                    for number in range(plan.total):
                        _wait_for(plan.partition_path(number))
                elif error.code != "E510" or (sealed := self._sealed(plan)) is None:
                    raise
                else:
                    return sealed, True
        asked = self.asked
        assert asked.tokenizer is not None
        warn_of_missing_start(asked.settings, asked.source, asked.tokenizer, asked.path)
        install_tokenizer(asked.settings, self.staged)
        log_unseen_source(asked.settings, self.staged.meta, asked.key)
        return meta, False


def _wait_for(path: Path) -> None:
    """Wait until no process builds a partition."""
    try:
        refuse_if_building(path)
    except CacheError:
        with build_lock(path, wait=True):
            pass


def _nothing(_: dict[str, Any]) -> None:
    """A partition has no record of a recipe: its receipt names its plan."""


def _receipt(plan: Plan, number: int) -> dict[str, Any] | None:
    """Return the receipt of a partition if it is finished and its files have their sizes; else None."""
    try:
        return read_receipt(plan, number).meta
    except NotFinishedError as error:
        if error.state not in ("missing", "started"):
            logger.info("%s is built again: %s, %s", plan.partition_path(number), error.state, error.found)
        return None


def _commands(asked: AskedCache) -> Commands:
    """Return the commands that build one partition, build all, and seal."""
    command = partial(build_command, asked.settings, asked.key)
    return Commands(lambda state: command("--partition", str(state.number)), command(), command(verb="seal"))


def prepared(
    settings: Settings, name: str, *, refresh: bool = False, observed: str | None = None, fixes: bool = True
) -> Prepared:
    """Return a cache and its plan. fixes: fix a plan where there is none; else that is an error."""
    source = resolve_source(settings, name)
    key = source.spec.key
    if not is_partitioned(settings, source):
        why = f"partitions is {settings.partitions}" if settings.partitions < 2 else "a stub, chats or rollouts"
        raise UsageError(f"{key}: {why}; expected a pretrain cache with text and 2 or more partitions (--partitions)")
    check_val_frac(settings, source)
    _check_folder(cache_root(settings).absolute())
    staged = _tokenizer(settings, source, refresh, fixes)
    tokenizer = tokenizer_for(settings, key, source, staged.path)
    listing = listing_of(source)
    recorded = partial(planned, settings, source, tokenizer, listing, observed)
    asks_hub = refresh and source.kind == "hub"
    found = None if asks_hub else recorded()
    if found is None:
        # One machine reads the files for their fingerprint, or asks the hub; the others wait, and find its plan.
        with build_lock(path := cache_root(settings) / key, wait=True):
            found = None if asks_hub else recorded()
            if found is None:
                known = None if asks_hub else recorded_provenance(staged.path, source, path, observed, {})
                found = _fixed(settings, source, tokenizer, staged, listing, known, fixes)
                if listing is not None:
                    add_listing(found, listing)
    if refresh or observed is not None:
        make_newest(found)
    if found.plan is not None:
        _refuse_other_code(found.plan, settings, key)
    return Prepared(found.asked, found.plan, staged, listing)


def _fixed(
    settings: Settings,
    source: ResolvedSource,
    tokenizer: FullTokenizer,
    staged: Outcome,
    listing: str | None,
    recorded: dict[str, Any] | None,
    fixes: bool,
) -> Planned:
    """Read the source's fingerprint; return the cache with its plan, which is fixed if there is none.

    `build_lock` of the cache is held.
    """
    key = source.spec.key
    asked = AskedCache.of(settings, key, source.spec.settings, source, tokenizer, source.provenance(recorded))
    if is_current(asked.path, asked.fingerprint):
        return Planned(asked, None)
    plans, content = plans_of(asked.path), str(staged.meta["content_sha256"])
    plan = next((plan for plan in plans if plan.fingerprint == asked.fingerprint), None)
    if plan is None and not fixes:
        raise _without_plan(asked, plans, content)
    if plan is None:
        warn_if_partial(source)
        refuse_foreign(asked.path)
        asked.refuse_without_room()
        for other in plans:
            _warn_of_other(other, asked, content)
        plan = fix_plan(asked.path, _content(asked, tokenizer, content, listing))
    return Planned(asked, plan)


def _content(
    asked: AskedCache, tokenizer: FullTokenizer, tokenizer_content: str, listing: str | None
) -> dict[str, Any]:
    """Return what plan.json holds. tokenizer_content: content_sha256 of the tokenizer."""
    return {
        "plan_version": 1,
        "kind": "partition_plan",
        "cache": asked.key,
        "partitions": asked.settings.partitions,
        "rule": PARTITION_RULE,
        "fingerprint": asked.fingerprint,
        "recipe": asked.recipe,
        "source": asked.provenance,
        "listing": listing,
        "tokenizer_sha256": tokenizer.sha256,
        "tokenizer_content_sha256": tokenizer_content,
        "exclude_sha256": excluded_sha256(asked.settings),
        "code": code_identity(),
    }


@functools.cache
def _check_folder(folder: Path) -> None:
    """Check the folder of caches once in a process: another machine may have it mounted differently."""
    check_shared_folder(folder)


def _refuse_other_code(plan: Plan, settings: Settings, key: str) -> None:
    here, there = map(_flat, (code_identity(), plan.content["code"]))
    if here == there:
        return
    differing = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    found = ", ".join(f"{name} {there.get(name)!s:.12}, here {here.get(name)!s:.12}" for name in differing)
    raise CacheError(
        plan.folder,
        f"partitions are built by another program: {found}",
        "the same versions on every machine",
        f"Install these versions here, or start over with those that are here: "
        f"{build_command(settings, key, '--restart')}",
        code="E511",
    )


def _flat(code: Mapping[str, Any]) -> dict[str, Any]:
    """Return what identifies a program, with its libraries' versions among it."""
    libraries = code.get("libraries")
    return {**code, **(libraries if isinstance(libraries, dict) else {}), "libraries": None}


def _warn_of_other(plan: Plan, asked: AskedCache, tokenizer_content: str) -> None:
    there = settings_of(plan, asked.settings, tokenizer_content)
    back = (
        ""
        if there in (None, asked.settings)
        else f". To go on with them: {build_command(there or asked.settings, asked.key)}"
    )
    logger.warning(
        "%s: partitions of another plan are there, and nothing of them is used (%s)%s",
        asked.path,
        "; ".join([plan.folder.name, *differences(plan, asked, tokenizer_content)]),
        back,
        extra={"code": "W507"},
    )


def _without_plan(asked: AskedCache, plans: list[Plan], tokenizer_content: str) -> NoPlan:
    """Return the error where no plan may be fixed: none is there at all, or one of other settings."""
    if not plans:
        return _none_there(asked.settings, asked.key)
    differing = {plan.sha256: differences(plan, asked, tokenizer_content) for plan in plans}
    plan = min(plans, key=lambda plan: len(differing[plan.sha256]))
    found = f"its partitions are of another plan ({'; '.join([plan.folder.name, *differing[plan.sha256]])})"
    there = settings_of(plan, asked.settings, tokenizer_content)
    if there == asked.settings:
        again = f"Build those of the source as it is now: {build_command(there, asked.key)}"
        return NoPlan(asked.path, found, "the source and tokenizer of their builds", again, code="E511")
    return NoPlan(asked.path, found, "the flags of their builds", _seals(there, asked.key), code="E511")


def _none_there(settings: Settings, key: str) -> NoPlan:
    build = build_command(settings, key)
    path = cache_root(settings) / key
    return NoPlan(path, "none of its partitions is there", remedy=f"Build them: {build}", code="E510")


def _seals(there: Settings | None, key: str) -> str:
    """Return the remedy of a seal with other flags than the builds. there: their settings; None: not known here."""
    if there is None:
        return "Seal with the flags of the builds, among them --tokenizer and --exclude"
    return f"With these: {build_command(there, key, verb='seal')}"


def _tokenizer(settings: Settings, source: ResolvedSource, refresh: bool, fixes: bool) -> Outcome:
    """Return the tokenizer: that of a plan where the settings do not say which, else as `stage_tokenizer`.

    Raises: CacheError for one that would have to be trained where no plan may be fixed.
    """
    key, root = source.spec.key, cache_root(settings)
    apply_lock_setting(root, settings.lock)
    if not refresh and (known := tokenizer_of_plan(settings, key)) is not None:
        return known
    if not fixes and tokenizer_state(settings) == "train":
        if not (plans := plans_of(root / key)):
            raise _none_there(settings, key)
        plan = next((plan for plan in plans if plan.total == settings.partitions), plans[0])
        found = f"its partitions ({plan.folder.name}) have a tokenizer that these settings do not name"
        remedy = _seals(settings_of(plan, settings, None), key)
        raise NoPlan(root / key, found, "the tokenizer of their builds", remedy, code="E511")
    return stage_tokenizer(settings, user_sources_only=source.user is not None, refresh=refresh)
