"""What all recipes share: is the committed cache current? If not: check the disk, build, measure, record the run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.cache.formats import FORMAT_VERSION, SPLITS
from niels_gpt.cache.meta import find_meta, read_meta
from niels_gpt.data.exclude import Exclusion, read_exclusion
from niels_gpt.engine.journal import sealed_builds, unfinished_builds
from niels_gpt.engine.meta import BUILDER_VERSIONS, Source
from niels_gpt.engine.units import discard_plan, plans_of
from niels_gpt.kinds.kind import has_partitions
from niels_gpt.recipes.disk import needed_bytes, refuse_without_room, unfinished_bytes
from niels_gpt.recipes.rebuilt import warn_of_changes
from niels_gpt.recipes.resolve import ResolvedSource
from niels_gpt.recipes.sources import named
from niels_gpt.recipes.templates import recipe_settings
from niels_gpt.recipes.user_sources import stated_credit
from niels_gpt.settings import Settings, usable_cores
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, canonical_json, write_bytes
from niels_gpt.storage.locks import apply_lock_setting
from niels_gpt.storage.meta_json import (
    file_records,
    meta_bytes,
    parse_object,
    path_inside,
    read_regular,
    resolved,
    sha256_regular,
)
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
from niels_gpt.tokenizers.document_tokens import document_end, document_start
from niels_gpt.tokenizers.engine import engine_name
from niels_gpt.tokenizers.protocol import FullTokenizer

logger = logging.getLogger(__name__)

_MOST_LISTED = 1 << 20  # characters of the entries of --exclude that are recorded, to be compared with another list
TOKENIZER_KEY = "tokenizer"
RUNS_DIR = ".runs"
"""In the cache folder: one line of JSON for each build. Times are here and not in meta.json (D10)."""


class Measurement:
    """Wall time and peak memory of a block. The peak is known on Linux, where a process can reset it."""

    seconds: float = 0.0
    peak_bytes: int | None = None

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._can_reset = True
        except OSError:
            self._can_reset = False

    def end(self) -> Measurement:
        """Set both for the time since this object was made; may be called again."""
        self.seconds = time.perf_counter() - self._begin
        if self._can_reset:
            lines = Path("/proc/self/status").read_text().splitlines()
            self.peak_bytes = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        return self

    def __enter__(self) -> Measurement:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


@dataclass(frozen=True)
class Outcome:
    """What one recipe did."""

    key: str
    """tokenizer, pretrain/NAME, sft/NAME, trees/NAME, rollouts/NAME or eagle3/targets."""
    path: Path
    """The public folder."""
    meta: dict[str, Any]
    """Its meta.json."""
    reused: bool
    """True where the committed cache was current and nothing was built."""
    seconds: float
    """Wall time, the check whether the cache is current included."""
    peak_bytes: int | None
    """Peak resident memory of this process during the recipe; None where the system does not report it."""
    fingerprint: str
    """Of the recipe: settings read, tokenizer, source, format."""
    engine: str | None = None
    """What encoded, of Engine.name; None for a tokenizer and where nothing was built."""

    @property
    def tokens(self) -> int:
        """Tokens of train and val together, or of eagle3/targets; 0 for a tokenizer and a stub."""
        totals = self.meta.get("totals") or {}
        return int(totals.get("tokens", sum(totals.get(f"{split}_tokens", 0) for split in SPLITS)))

    @property
    def tokens_per_second(self) -> float | None:
        """None where nothing was tokenized, or where no time is recorded."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 and not self.reused else None

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files that meta.json names; of eagle3/targets, whose shards it only counts, its own figure."""
        return int(self.meta.get("disk_bytes", sum(record["bytes"] for record in file_records(self.meta))))


@dataclass(frozen=True)
class BuildInputs:
    """What a recipe passes to its builder."""

    tokenizer: FullTokenizer | None
    """The cache's tokenizer; None for recorded ids."""
    source: Source
    """For meta.json; its counters fill while the stream is read."""
    counters: Counter[str]
    """The same counters, for the loader to write."""
    revision: str | None
    """The hub's commit; None for files."""
    committed: Callable[[dict[str, Any]], None]
    """To be called with the meta when the cache is committed: records which recipe built it."""


def cache_root(settings: Settings) -> Path:
    """Return the folder that the caches are written to: the sample has its own (D20)."""
    root = Path(settings.cache_dir)
    return root / "sample" if settings.source_root == "sample" else root


def num_threads(settings: Settings) -> int:
    """Return the number of tokenizer threads: the setting, or one per usable core."""
    return settings.threads or usable_cores()


def recipe_fingerprint(
    settings: Settings,
    key: str,
    reads: tuple[str, ...],
    tokenizer: FullTokenizer | None,
    source: str,
    listed: Exclusion | None = None,
) -> str:
    """Return the sha256 of everything that a recipe's output depends on.

    tokenizer: None: that it is unknown. listed: what --exclude lists.
    Raises: ValueError for a document_start or document_end that the tokenizer does not have.
    """
    chosen = recipe_settings(settings, reads, tokenizer)
    if key == TOKENIZER_KEY:  # under the name of before, and without the kind that was the only one
        chosen["tokenizer_model"] = chosen.pop("tokenizer")
        if chosen["tokenizer_kind"] == Settings.tokenizer_kind:
            del chosen["tokenizer_kind"]
    if "document_end" in chosen:
        chosen |= _known_end(tokenizer, chosen.pop("document_end"))
    if tokenizer is not None and (start := document_start(tokenizer, chosen.get("document_start"))) is not None:
        chosen["document_start"] = [start.id, start.token]
    family = key.partition("/")[0]
    parts: dict[str, Any] = {
        "recipe": key,
        "settings": chosen,
        "tokenizer": "" if tokenizer is None else tokenizer.sha256,
        "source": source,
        "versions": [FORMAT_VERSION, BUILDER_VERSIONS["rollouts" if family == "trees" else family]],
    }
    if tokenizer is not None and tokenizer.kind == "huggingface":  # the files beside tokenizer.json can change them
        parts["control_ids"] = sorted(tokenizer.control_ids)
    if stated := stated_credit(settings, key.rpartition("/")[2]):
        parts["credit"] = stated
    if settings.partitions > 1 and has_partitions(key):
        parts["partitions"] = settings.partitions
    if listed is not None:
        parts["exclude"] = listed.facts["sha256"]
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def _known_end(tokenizer: FullTokenizer | None, choice: str) -> dict[str, Any]:
    """Return what a fingerprint has of the end of documents: with the sentinel, or without a token, as before there
    were others, so that older caches stay current."""
    if tokenizer is None:
        return {"auto": {"append_eot": True}, "eot": {"append_eot": True}, "none": {"append_eot": False}}.get(
            choice, {"document_end": choice}
        )
    end = document_end(tokenizer, choice)
    if end is None or end.id == tokenizer.special_token_ids().get("eot"):
        return {"append_eot": end is not None}
    return {"document_end": [end.id, end.token]}


def recorded_recipe(path: Path) -> dict[str, Any]:
    """Return the record of the recipe that built the committed version at `path`; {} without one."""
    recipe = _read_record(path)
    return recipe if path.is_symlink() and recipe.get("version") == Path(os.readlink(path)).name else {}


def _read_record(path: Path) -> dict[str, Any]:
    """Return the last record of a recipe, whatever version is committed; {} without one."""
    try:
        return parse_object(read_regular(versions_dir(path) / RECIPE_NAME))
    except (FileNotFoundError, ValueError):
        return {}


def is_committed(path: Path, fingerprint: str) -> bool:
    """Whether the committed cache is of this recipe, with a good meta.json; its other files may be damaged."""
    recipe, meta_path = recorded_recipe(path), path / META_NAME
    if recipe.get("fingerprint") != fingerprint or not meta_path.is_file():
        return False
    try:  # another sha256: damaged, or written by a builder that records no recipe
        found = sha256_regular(resolved(path) / META_NAME)
    except CacheError:
        return False
    return found in (recipe.get("meta_sha256"), recipe.get("next_meta_sha256"))


def is_current(path: Path, fingerprint: str) -> bool:
    """Whether the committed cache is of this recipe and its files have the sizes in its meta.json (D12)."""
    if not is_committed(path, fingerprint):
        return False
    version, meta_path = resolved(path), path / META_NAME
    try:
        records = file_records(read_meta(str(meta_path)), str(meta_path))
        files = {path_inside(version, record["name"]): record["bytes"] for record in records}
    except CacheError:
        return False
    sizes = {file: file.lstat().st_size for file in files if file.is_file()}  # path_inside has refused links
    return sizes == files


def fingerprint_by_list(
    settings: Settings,
    path: Path,
    fingerprint_of: Callable[[Exclusion | None], str],
    named: Callable[[Exclusion], Iterable[str]] | None,
) -> str:
    """Return a recipe's fingerprint by the list of --exclude; by the list of the committed cache, where the cache is
    current but for it, and no entry that is in one of the two lists alone names anything in the source.

    fingerprint_of: called with a list, None for none. named: reads the source, and yields the entries of a list that
    name something; None: it is not read for this, so that any change of the list counts.
    """
    now = None if settings.exclude is None else read_exclusion(settings.exclude)
    recorded = recorded_recipe(path).get("exclude")
    before = Exclusion(frozenset(map(str, recorded))) if recorded and isinstance(recorded, list) else None
    differing = Exclusion((now.entries if now else frozenset()) ^ (before.entries if before else frozenset()))
    fingerprint = fingerprint_of(now)
    if named is None or not differing.entries or is_current(path, fingerprint):
        return fingerprint
    if not is_current(path, known := fingerprint_of(before)) or any(True for _ in named(differing)):
        return fingerprint
    if now is not None:
        now.absent[path] = differing.entries
    return known


def restart(settings: Settings, key: str) -> None:
    """Make the next build of the cache `key` start from scratch.

    Unfinished builds and partitions are removed. A committed cache stays readable but is no longer current; when it was
    built is still known. Raises: CacheError if it, or a partition, is being built.
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


def run_recipe(
    settings: Settings,
    key: str,
    *,
    reads: tuple[str, ...],
    source: ResolvedSource,
    build: Callable[[BuildInputs, Path], dict[str, Any]],
    refresh: bool,
    observed: str | None,
    tokenizer: FullTokenizer | None,
    tokenizer_folder: Path | None,
) -> Outcome:
    """Run one recipe: reuse the committed cache if it is current, else build it and record the run.

    reads: the names of the settings that decide the output.
    refresh: ask the hub for its newest revision instead of keeping the recorded one.
    observed: a fingerprint of the source from an observation newer than the cache; on the hub this revision is built.
        One of another dataset, or of files, is ignored.
    tokenizer, tokenizer_folder: to encode with, and the folder that it was opened in; None for recorded ids.
    """
    apply_lock_setting(cache_root(settings), settings.lock)
    with Measurement() as measurement:
        path = cache_root(settings) / key
        unfinished = _unfinished_provenance(source, path, recipe_settings(settings, reads, tokenizer))
        recorded = unfinished or None
        if not refresh:
            recorded = recorded_provenance(tokenizer_folder, source, path, observed, unfinished)
        asked = AskedCache.of(settings, key, reads, source, tokenizer, source.provenance(recorded))
        meta = asked.current_meta()
        reused = meta is not None
        if meta is None:
            asked.refuse_without_room()
            described = asked.described()
            counters = described.counters
            assert isinstance(counters, Counter)
            inputs = BuildInputs(tokenizer, described, counters, asked.provenance["revision"], asked.record)
            meta = build(inputs, path)
    return asked.finish(meta, reused, measurement)


@dataclass(frozen=True)
class AskedCache:
    """A cache as the settings ask for it: what decides its bytes, and where it lies."""

    settings: Settings
    key: str
    path: Path
    """Its public path."""
    source: ResolvedSource
    tokenizer: FullTokenizer | None
    """To encode with; None for recorded ids."""
    recipe: dict[str, Any]
    """The settings that decide its bytes, by name."""
    provenance: dict[str, Any]
    """Of the source: of files with the fingerprint of their bytes, on the hub with the revision."""
    fingerprint: str
    """Of the recipe."""

    @classmethod
    def of(
        cls,
        settings: Settings,
        key: str,
        reads: tuple[str, ...],
        source: ResolvedSource,
        tokenizer: FullTokenizer | None,
        provenance: dict[str, Any],
    ) -> AskedCache:
        """Return the cache that is made of a source as `provenance` has it.

        Raises: FileNotFoundError, ValueError if the file of --exclude cannot be read; as `recipe_fingerprint`.
        """
        path, recipe = cache_root(settings) / key, recipe_settings(settings, reads, tokenizer)
        fingerprint_of = partial(recipe_fingerprint, settings, key, reads, tokenizer, str(provenance["fingerprint"]))
        # A stream would be read to its end, and partitions are there so that no machine reads the whole text.
        is_read = not source.streaming and settings.partitions == 1
        read = partial(named, settings, source, provenance["revision"]) if is_read else None
        fingerprint = fingerprint_by_list(settings, path, fingerprint_of, read)
        return cls(settings, key, path, source, tokenizer, recipe, provenance, fingerprint)

    def current_meta(self) -> dict[str, Any] | None:
        """Return the meta of the committed cache if it is current, and remove what killed builds have left; else
        None."""
        if not is_current(self.path, self.fingerprint):
            return None
        meta = read_meta(str(self.path / META_NAME))
        _clear_finished_builds(self.path)
        return meta

    def refuse_without_room(self) -> None:
        """Raise NoRoomError where a build does not fit on the disk, unless the settings leave that unchecked."""
        if self.settings.disk_check:
            num_ids = self.tokenizer.vocab_size if self.tokenizer else None
            needs = {self.key: needed_bytes(self.settings, self.source, num_ids)}
            written = unfinished_bytes(self.path, self.fingerprint)
            refuse_without_room(self.settings, cache_root(self.settings), needs, written)

    def described(self, *flags: str) -> Source:
        """Return what meta.json says of the source. flags: of the command from scratch, before --restart."""
        exclude = {} if self.settings.exclude is None else {"exclude": read_exclusion(self.settings.exclude).facts}
        return Source(
            self.source.dataset,
            self.source.config,
            self.source.streaming,
            {**self.provenance, **stated_credit(self.settings, self.source.source), **exclude},
            self.recipe,
            Counter(),
            build_command(self.settings, self.key, *flags, "--restart"),
            None if self.source.kind == "hub" else {},  # a position is in files; the hub's fingerprint is not of files
        )

    def record(self, meta: dict[str, Any], **more: Any) -> None:
        """Record which recipe made the committed version. meta: of that version; more: further keys."""
        before = _read_record(self.path)
        record_recipe(self.settings, self.path, self.fingerprint, self.provenance, meta, **more)
        warn_of_changes(self.settings, self.key, self.path, before)

    def finish(self, meta: dict[str, Any], reused: bool, measurement: Measurement) -> Outcome:
        """Return the outcome, as `finish`."""
        engine = None if reused or self.tokenizer is None else engine_name(self.tokenizer, self.settings.engine)
        return finish(self.settings, self.key, self.path, meta, reused, measurement, self.fingerprint, engine)


def _clear_finished_builds(path: Path) -> None:
    """Remove what killed builds of a current cache have left: builds that were committed, and temporary files."""
    clear_leftovers(path)
    attempts = versions_dir(path) / ATTEMPTS_NAME
    if attempts.is_file() and not attempts.is_symlink() and not unfinished_builds(path):
        with contextlib.suppress(OSError):
            attempts.unlink()
    if sealed_builds(path):
        with contextlib.suppress(CacheError, OSError), build_lock(path):
            for folder in sealed_builds(path):
                discard(folder)


def _unfinished_provenance(source: ResolvedSource, path: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the hub revision that an unfinished build of this recipe reads: it is resumed with it. {} without one."""
    for identity in unfinished_builds(path):
        known = identity.get("source")
        if identity.get("recipe") != recipe or not isinstance(known, dict) or known.get("name") != source.dataset:
            continue
        if source.kind == "hub" and isinstance(known.get("revision"), str):
            logger.info("%s: an unfinished build is of revision %s", path, known["revision"])
            return {**_at(f"{source.dataset}@{known['revision']}"), "asked_revision": known.get("asked_revision")}
    return {}


def recorded_provenance(
    tokenizer_folder: Path | None, source: ResolvedSource, path: Path, observed: str | None, unfinished: dict[str, Any]
) -> dict[str, Any]:
    """Return the source's revision as it was observed, built, or used to train the tokenizer, in this order."""
    recorded: dict[str, Any] = recorded_recipe(path).get("source") or unfinished
    if "fingerprint" not in recorded:
        tokenizer = (tokenizer_folder and find_meta(tokenizer_folder)) or {}
        recorded = _at(tokenizer.get("trained_on_sources", {}).get(source.source))
    dataset, _, revision = (observed or "").rpartition("@")
    if dataset == source.dataset and revision != "None":  # None: never asked for, as of a stub
        return {**recorded, **_at(observed)}
    return recorded


def _at(fingerprint: str | None) -> dict[str, Any]:
    return {"fingerprint": fingerprint, "revision": fingerprint.rpartition("@")[2]} if fingerprint else {}


def record_recipe(
    settings: Settings, path: Path, fingerprint: str, source: dict[str, Any], meta: dict[str, Any], **more: Any
) -> None:
    """Record the recipe of the committed version at `path`. source: its provenance; meta: of that version."""
    listed = [] if settings.exclude is None else sorted(read_exclusion(settings.exclude).entries)
    if 0 < sum(map(len, listed)) <= _MOST_LISTED:
        more["exclude"] = listed
    record = {
        **more,
        "fingerprint": fingerprint,
        "meta_sha256": hashlib.sha256(meta_bytes(meta)).hexdigest(),
        "source": source,
        "version": Path(os.readlink(path)).name,
    }
    write_bytes(versions_dir(path) / RECIPE_NAME, canonical_json(record))


def finish(
    settings: Settings,
    key: str,
    path: Path,
    meta: dict[str, Any],
    reused: bool,
    measurement: Measurement,
    fingerprint: str,
    engine: str | None = None,
) -> Outcome:
    """Return the outcome of a recipe; a build is appended to <cache>/.runs/KEY.jsonl."""
    outcome = Outcome(key, path, meta, reused, measurement.seconds, measurement.peak_bytes, fingerprint, engine)
    if reused:
        return outcome
    line = {
        "time": time.time(),
        "key": key,
        "seconds": round(measurement.seconds, 3),
        "peak_bytes": measurement.peak_bytes,
        "fingerprint": fingerprint,
        "engine": engine,
        "content_sha256": meta.get("content_sha256"),
        "totals": meta.get("totals"),
        "settings": asdict(settings),
    }
    append_run(cache_root(settings), key, line)
    return outcome


def append_run(root: Path, key: str, line: Mapping[str, Any]) -> None:
    """Append a line to the runs of a cache. Raises: CacheError E205 for a link, and where they have no folder."""
    runs = runs_file(root, key)
    path_inside(resolved(root), f"{RUNS_DIR}/{runs.name}")  # refuses a link that leads outside
    if runs.parent.exists() and not runs.parent.is_dir():
        remedy = f"The cache {key} is finished. Remove this: rm {shlex.quote(str(runs.parent))}"
        raise CacheError(runs.parent, "no folder", "the folder of the records of builds", remedy, code="E205")
    runs.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(runs, flags, 0o666), "a") as file:
        file.write(json.dumps(line, sort_keys=True) + "\n")


def runs_file(root: Path, key: str) -> Path:
    """Return the file that has a line for each build of a cache."""
    return root / RUNS_DIR / f"{key.replace('/', '.')}.jsonl"
