"""Describe a cache as the settings request it. Everything that decides its bytes is looked up once, for all later
steps.

inputs = Inputs.of(settings, source)     the source and the tokenizer, which is made if absent
request = inputs.found(...)              adds the source's provenance, and the fingerprint of everything
request.current_meta()                   the committed cache, if it answers this request
build_whole(settings, source, ...)       that cache, or a recorded build
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import FORMAT_VERSION
from niels_gpt.cache.meta import find_meta, read_meta
from niels_gpt.data.exclude import Exclusion, read_exclusion
from niels_gpt.engine.journal import sealed_builds, unfinished_builds
from niels_gpt.engine.meta import BUILDER_VERSIONS, Source, library_of
from niels_gpt.engine.units import discard_plan, plans_of
from niels_gpt.recipes.disk import needed_bytes, refuse_without_room, unfinished_bytes
from niels_gpt.recipes.family import Family, Job, family_of
from niels_gpt.recipes.rebuilt import warn_of_changes
from niels_gpt.recipes.records import (
    TOKENIZER_KEY,
    Measurement,
    Outcome,
    cache_root,
    fingerprint_by_list,
    finish,
    is_current,
    num_threads,
    read_record,
    record_recipe,
    recorded_recipe,
)
from niels_gpt.recipes.resolve import ResolvedSource
from niels_gpt.recipes.sources import named
from niels_gpt.recipes.tokenizer import install_tokenizer, log_unseen_source, stage_tokenizer, tokenizer_for
from niels_gpt.recipes.user_sources import stated_credit
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, canonical_json, write_bytes
from niels_gpt.storage.locks import apply_lock_setting
from niels_gpt.storage.remedies import build_command
from niels_gpt.storage.versions import (
    ATTEMPTS_NAME,
    RECIPE_NAME,
    build_lock,
    clear_leftovers,
    discard,
    discard_unfinished,
    versions_dir,
)
from niels_gpt.tokenizers.engine import engine_name
from niels_gpt.tokenizers.protocol import FullTokenizer
from niels_gpt.work import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """Inputs of a cache, before the text of the source is known."""

    settings: Settings
    source: ResolvedSource
    tokenizer: FullTokenizer | None = None
    """Encodes the text; None for a family without one, and in a plan if it is not there yet."""
    made: Outcome | None = None
    """Place and meta of the tokenizer: installed, or staged until the cache is committed."""

    @classmethod
    def of(cls, settings: Settings, source: ResolvedSource, *, refresh: bool = False) -> Inputs:
        """Return the inputs of a source's cache. Makes the tokenizer first if it is absent.

        refresh: ask the hub for the newest revision of a tokenizer named by its id.
        Raises: ValueError for settings that no such cache can have; the errors of `stage_tokenizer` and
            `tokenizer_for`.
        """
        apply_lock_setting(cache_root(settings), settings.lock)
        check_settings(settings, source)
        if not source.family.takes_tokenizer:
            return cls(settings, source)
        made = stage_tokenizer(settings, user_sources_only=source.user is not None, refresh=refresh)
        return cls(settings, source, tokenizer_for(settings, source, made.path), made)

    @property
    def key(self) -> str:
        """Key of the cache: FAMILY/NAME."""
        return self.source.spec.key

    @property
    def family(self) -> Family:
        """Family of the cache."""
        return self.source.family

    @property
    def root(self) -> Path:
        """Folder of caches."""
        return cache_root(self.settings)

    @property
    def path(self) -> Path:
        """Public path of the cache."""
        return self.root / self.key

    @functools.cached_property
    def recipe(self) -> dict[str, Any]:
        """Settings that decide the cache's bytes, by name."""
        return self.family.recipe(self.settings, self.source.spec.settings, self.tokenizer)

    @property
    def tokenizer_content(self) -> str | None:
        """The content_sha256 of the tokenizer's files; None without one."""
        return None if self.made is None else str(self.made.meta["content_sha256"])

    def command(self, *flags: str, verb: str = "build") -> str:
        """Return the command that builds this cache, or seals it by `verb`, with further flags."""
        return build_command(self.settings, self.key, *flags, verb=verb)

    def found(self, *, refresh: bool = False, observed: str | None = None) -> Request:
        """Return the request for the current source. Reads files for their fingerprint.

        refresh: ask the hub for its newest revision instead of keeping the recorded one.
        observed: fingerprint of the source from an observation newer than the cache; on the hub, this revision is
            built. Ignored for files, and if it names another dataset.
        """
        unfinished = self._unfinished_provenance()
        recorded = unfinished if refresh else self.recorded_provenance(observed, unfinished)
        return self.at(self.source.provenance(recorded or None))

    def at(self, provenance: dict[str, Any], *, reads: bool = True) -> Request:
        """Return the request for the source with this provenance.

        reads: if the list of --exclude has changed, the source may be read to see whether that matters.
        Raises: FileNotFoundError or ValueError if the file of --exclude cannot be read.
        """
        about = (self.tokenizer, str(provenance["fingerprint"]))

        def fingerprint_of(listed: Exclusion | None) -> str:
            return recipe_fingerprint(self.settings, self.key, self.recipe, *about, listed)

        # A stream would be read to its end, and partitions are there so that no machine reads the whole text.
        is_long = self.source.streaming or self.source.is_partitioned(self.settings)
        is_read = reads and self.source.has_samples and not is_long
        read = functools.partial(named, self.settings, self.source, provenance.get("revision")) if is_read else None
        fingerprint = fingerprint_by_list(self.settings, self.path, fingerprint_of, read)
        inputs = {each.name: getattr(self, each.name) for each in fields(Inputs)}
        return Request(**inputs, provenance=provenance, fingerprint=fingerprint)

    def recorded_provenance(
        self, observed: str | None, unfinished: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Return the source's revision from the observation, the committed cache, or the training of the tokenizer, in
        this order.

        unfinished: of an unfinished build; counts if nothing was built.
        """
        recorded: Mapping[str, Any] = recorded_recipe(self.path).get("source") or unfinished or {}
        if "fingerprint" not in recorded:
            trained = (self.made and find_meta(self.made.path)) or {}
            recorded = _at(trained.get("trained_on_sources", {}).get(self.source.source))
        dataset, _, revision = (observed or "").rpartition("@")
        if dataset == self.source.dataset and revision != "None":  # None: never asked for, as of a stub
            return {**recorded, **_at(observed)}
        return recorded

    def _unfinished_provenance(self) -> dict[str, Any]:
        """Return the hub revision that an unfinished build of this recipe reads, so that it resumes; {} without one."""
        for identity in unfinished_builds(self.path):
            known = identity.get("source")
            if identity.get("recipe") != self.recipe or not isinstance(known, dict):
                continue
            is_revision = self.source.kind == "hub" and isinstance(known.get("revision"), str)
            if is_revision and known.get("name") == self.source.dataset:
                logger.info("%s: an unfinished build reads revision %s", self.path, known["revision"])
                at = _at(f"{self.source.dataset}@{known['revision']}")
                return {**at, "asked_revision": known.get("asked_revision")}
        return {}


@dataclass(frozen=True, kw_only=True)
class Request(Inputs):
    """A cache as the settings request it, from a source whose text is known."""

    provenance: dict[str, Any]
    """Identity of the source: the fingerprint of its files, or its revision on the hub."""
    fingerprint: str
    """Sha256 of everything that decides the cache's bytes."""

    @property
    def num_threads(self) -> int:
        """Number of tokenizer threads."""
        return num_threads(self.settings)

    def reading(
        self, source: Source
    ) -> tuple[Settings, ResolvedSource, str | None, Counter[str], dict[str, int] | None]:
        """Return the arguments of the streams in sources.py. source: from `described`; its counters and position
        change."""
        assert isinstance(source.counters, Counter)
        return self.settings, self.source, self.provenance["revision"], source.counters, source.position

    def current_meta(self) -> dict[str, Any] | None:
        """Return the meta of the committed cache if it is current, else None. Removes leftovers of killed builds of a
        current cache."""
        if not is_current(self.path, self.fingerprint):
            return None
        meta = read_meta(str(self.path / META_NAME))
        _clear_finished_builds(self.path)
        return meta

    def refuse_without_room(self) -> None:
        """Raise NoRoomError if a build does not fit on the disk, unless the settings skip the check."""
        if self.settings.disk_check:
            num_ids = self.tokenizer.vocab_size if self.tokenizer else None
            needs = {self.key: needed_bytes(self.settings, self.source, num_ids)}
            refuse_without_room(self.settings, self.root, needs, unfinished_bytes(self.path, self.fingerprint))

    def described(self, *flags: str) -> Source:
        """Return the source for meta.json. flags: of the command that builds from scratch, before --restart."""
        exclude = {} if self.settings.exclude is None else {"exclude": read_exclusion(self.settings.exclude).facts}
        return Source(
            self.source.dataset,
            self.source.config,
            self.source.streaming,
            {**self.provenance, **stated_credit(self.settings, self.source.source), **exclude},
            self.recipe,
            Counter(),
            self.command(*flags, "--restart"),
            None if self.source.kind == "hub" else {},  # a position is in files; the hub's fingerprint is not of files
        )

    def record(self, meta: dict[str, Any], **more: Any) -> None:
        """Record the recipe of the committed version, and warn of changes. meta: of that version. more: more keys.

        The release of the library that encoded is recorded, and not compared: it makes no cache stale.
        """
        before = read_record(self.path)
        if self.tokenizer is not None:
            more["libraries"] = library_of(self.tokenizer)
        record_recipe(self.settings, self.path, self.fingerprint, self.provenance, meta, **more)
        warn_of_changes(self.settings, self.key, self.path, before)

    def install_tokenizer(self, *, built: bool) -> None:
        """Install a new tokenizer in the folder, now that a cache has it. built: the cache was built just now.

        Until then a refused build leaves the tokenizer, and every cache that was built with it, unchanged.
        """
        if self.made is not None:
            install_tokenizer(self.settings, self.made)
            if built:
                log_unseen_source(self.settings, self.made.meta, self.key)

    def finished(self, meta: dict[str, Any], reused: bool, measurement: Measurement) -> Outcome:
        """Return the outcome. Records a build as a run."""
        engine = None if reused or self.tokenizer is None else engine_name(self.tokenizer, self.settings.engine)
        return finish(self.settings, self.key, self.path, meta, reused, measurement, self.fingerprint, engine)


def check_settings(settings: Settings, source: ResolvedSource) -> None:
    """Raise ValueError or CacheError for settings that no cache of a source can have, before a tokenizer is made."""
    source.family.check(settings, source.spec)
    source.family.check_early(settings)


def build_whole(
    settings: Settings, source: ResolvedSource, *, refresh: bool, observed: str | None, progress: Progress | None
) -> Outcome:
    """Build a source's cache as a whole, or reuse it if it is current.

    Takes the arguments of `build_token_cache`, and raises its errors.
    """
    inputs = Inputs.of(settings, source, refresh=refresh)
    source.warn_if_partial()
    with Measurement() as measurement:
        request = inputs.found(refresh=refresh, observed=observed)
        meta = request.current_meta()
        reused = meta is not None
        if meta is None:
            request.refuse_without_room()
            meta = request.family.build(request, Job(request.path, request.described(), request.record, progress))
            request.family.warn(request, meta)
    outcome = request.finished(meta, reused, measurement)
    request.family.look_back(settings, request.path, meta)
    request.install_tokenizer(built=not reused)
    return outcome


def recipe_fingerprint(
    settings: Settings,
    key: str,
    recipe: dict[str, Any],
    tokenizer: FullTokenizer | None,
    source: str,
    listed: Exclusion | None = None,
) -> str:
    """Return the sha256 of everything that a cache's bytes depend on.

    recipe: settings that decide them (`Inputs.recipe`). tokenizer: None if unknown. source: fingerprint of the source.
        listed: list of --exclude.
    """
    is_tokenizer = key == TOKENIZER_KEY
    family = None if is_tokenizer else family_of(key)
    parts: dict[str, Any] = {
        "recipe": key,
        "settings": family.compared(recipe, tokenizer) if family else recipe,
        "tokenizer": "" if tokenizer is None else tokenizer.sha256,
        "source": source,
        "versions": [FORMAT_VERSION, family.builder_version if family else BUILDER_VERSIONS[TOKENIZER_KEY]],
    }
    if tokenizer is not None and tokenizer.kind == "huggingface":  # the files beside tokenizer.json can change them
        parts["control_ids"] = sorted(tokenizer.control_ids)
    if stated := stated_credit(settings, key.rpartition("/")[2]):
        parts["credit"] = stated
    if settings.partitions > 1 and family is not None and family.has_partitions:
        parts["partitions"] = settings.partitions
    if listed is not None:
        parts["exclude"] = listed.facts["sha256"]
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def restart(settings: Settings, key: str) -> None:
    """Make the next build of the cache `key` start from scratch.

    Removes unfinished builds and partitions. A committed cache stays readable but is no longer current; the time of its
    build stays known. Raises: CacheError E503 while it, or a partition, is being built.
    """
    path = cache_root(settings) / key
    apply_lock_setting(cache_root(settings), settings.lock)
    if not versions_dir(path).is_dir():
        return
    with build_lock(path) as folder:
        discard_unfinished(folder)
        for plan in plans_of(path):
            if not discard_plan(plan):
                raise CacheError(plan.folder, "a partition is being built", remedy="Wait for it", code="E503")
        known = recorded_recipe(path)
        if known.pop("fingerprint", None) is not None:  # the hub's revision in it stays
            built = (record := folder / RECIPE_NAME).stat()
            write_bytes(record, canonical_json(known))
            os.utime(record, ns=(built.st_atime_ns, built.st_mtime_ns))


def _clear_finished_builds(path: Path) -> None:
    """Remove leftovers of killed builds of a current cache: committed builds, and temporary files."""
    clear_leftovers(path)
    attempts = versions_dir(path) / ATTEMPTS_NAME
    if attempts.is_file() and not attempts.is_symlink() and not unfinished_builds(path):
        with contextlib.suppress(OSError):
            attempts.unlink()
    if sealed_builds(path):
        with contextlib.suppress(CacheError, OSError), build_lock(path):
            for folder in sealed_builds(path):
                discard(folder)


def _at(fingerprint: str | None) -> dict[str, Any]:
    return {"fingerprint": fingerprint, "revision": fingerprint.rpartition("@")[2]} if fingerprint else {}
