"""What all recipes share: is there anything to do, build, measure, record."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.build.describe import BUILDER_VERSION, FORMAT_VERSION, Source
from niels_gpt.build.journal import sealed_builds, unfinished_builds
from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import find_meta, listed_meta, read_meta
from niels_gpt.data.exclude import read_exclusion
from niels_gpt.fileio import META_NAME, CacheError, canonical_json, write_bytes
from niels_gpt.recipes.disk import left_bytes, need_of, refuse_without_room
from niels_gpt.recipes.measured import Measured
from niels_gpt.recipes.origins import Origin
from niels_gpt.recipes.own import said_credit
from niels_gpt.records import (
    checked_count,
    file_records,
    meta_bytes,
    open_regular,
    parse_object,
    path_inside,
    read_regular,
    resolved,
    sha256_regular,
)
from niels_gpt.remedies import build_command
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import MODEL_NAME, SentencePieceTokenizer, load_tokenizer
from niels_gpt.versions import (
    ATTEMPTS_NAME,
    RECIPE_NAME,
    build_lock,
    clear_leftovers,
    discard,
    discard_unfinished,
    versions_dir,
)

logger = logging.getLogger(__name__)

TOKENIZER_KEY = "tokenizer"
RUNS_DIR = ".runs"
"""In the cache folder: what differs from one build to another of the same bytes (D10)."""
_RUNS_BYTES = 1 << 20  # of its end: the newest line


@dataclass(frozen=True)
class Outcome:
    """What one recipe did."""

    key: str
    """tokenizer, pretrain/NAME, sft/NAME or eagle3/targets."""
    path: Path
    """The public folder."""
    meta: dict[str, Any]
    """Its meta.json."""
    reused: bool
    """True where nothing had to be built."""
    seconds: float
    """Wall time, the check for a no-op included."""
    peak_bytes: int | None
    """Peak resident memory of this process during the recipe; None where the system does not tell."""
    fingerprint: str
    """Of the recipe: settings read, tokenizer, source, format."""

    @property
    def tokens(self) -> int:
        """Of train and val together, or of eagle3/targets; 0 for a tokenizer and a stub."""
        totals = self.meta.get("totals") or {}
        return int(totals.get("tokens", sum(totals.get(f"{split}_tokens", 0) for split in SPLITS)))

    @property
    def tokens_per_second(self) -> float | None:
        """None where nothing was tokenized, or where nobody wrote down how long it took."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 and not self.reused else None

    @property
    def disk_bytes(self) -> int:
        """Of all files that meta.json names; of eagle3/targets, whose shards it only counts, what it says."""
        return int(self.meta.get("disk_bytes", sum(record["bytes"] for record in file_records(self.meta))))


@dataclass(frozen=True)
class Ingredients:
    """What a recipe hands to its builder."""

    tokenizer: SentencePieceTokenizer
    """The cache's tokenizer."""
    source: Source
    """For meta.json; its counters fill while the stream is read."""
    counters: Counter[str]
    """The same counters, for the loader to write."""
    revision: str | None
    """The hub's commit; None for files."""
    committed: Callable[[dict[str, Any]], None]
    """To be called with the meta when the cache is committed: writes down which recipe made it."""


def cache_root(settings: Settings) -> Path:
    """Return the folder that the caches go to: the sample has one of its own (D20)."""
    root = Path(settings.cache_dir)
    return root / "sample" if settings.source_root == "sample" else root


def num_threads(settings: Settings) -> int:
    """Return the number of tokenizer threads: what the setting says, or one per usable core."""
    return settings.threads or len(os.sched_getaffinity(0))


def recipe_fingerprint(settings: Settings, key: str, reads: tuple[str, ...], tokenizer: str, source: str) -> str:
    """Return the sha256 of everything that a recipe's output depends on.

    Raises: FileNotFoundError, ValueError if the file of what is left out cannot be read.
    """
    parts: dict[str, Any] = {
        "recipe": key,
        "settings": {name: getattr(settings, name) for name in reads},
        "tokenizer": tokenizer,
        "source": source,
        "versions": [FORMAT_VERSION, BUILDER_VERSION],
    }
    if said := said_credit(settings, key.rpartition("/")[2]):
        parts["credit"] = said
    if settings.exclude is not None:
        parts["exclude"] = read_exclusion(settings.exclude).facts["sha256"]
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def recorded_recipe(path: Path) -> dict[str, Any]:
    """Return the record of the recipe that built the committed version at `path`; {} where there is none."""
    record = versions_dir(path) / RECIPE_NAME
    try:
        recipe = parse_object(read_regular(record))
    except (FileNotFoundError, ValueError):
        return {}
    committed = path.is_symlink() and recipe.get("version") == Path(os.readlink(path)).name
    return recipe if committed else {}


def is_current(path: Path, fingerprint: str) -> bool:
    """Whether the committed cache is of this recipe and its files have the sizes that its meta.json gives (D12)."""
    recipe, meta_path = recorded_recipe(path), path / META_NAME
    if recipe.get("fingerprint") != fingerprint or not meta_path.is_file():
        return False
    version = path.resolve()
    try:
        if sha256_regular(version / META_NAME) != recipe.get(
            "meta_sha256"
        ):  # damaged, or of a builder without a recipe
            return False
        records = file_records(read_meta(str(meta_path)), str(meta_path))
        files = {path_inside(version, record["name"]): record["bytes"] for record in records}
    except CacheError:
        return False
    sizes = {file: file.lstat().st_size for file in files if file.is_file()}  # none is a link: path_inside has looked
    return sizes == files


def restart(settings: Settings, key: str) -> None:
    """Let the next build of the cache `key` start from scratch: what unfinished builds did is removed, whatever their
    settings, and a committed cache, which stays as it is until then, no longer counts as up to date.

    Raises: CacheError if somebody builds it.
    """
    path = cache_root(settings) / key
    if not versions_dir(path).is_dir():
        return
    with build_lock(path) as folder:
        discard_unfinished(folder)
        known = recorded_recipe(path)
        if known.pop("fingerprint", None) is not None:  # the hub's revision in it still counts
            write_bytes(folder / RECIPE_NAME, canonical_json(known))


def produce(
    settings: Settings,
    key: str,
    *,
    reads: tuple[str, ...],
    origin: Origin,
    build: Callable[[Ingredients, Path], dict[str, Any]],
    refresh: bool,
    observed: str | None,
    tokenizer_folder: Path | None = None,
) -> Outcome:
    """Run one recipe: reuse the committed cache if it is current, else build, and record what was done.

    reads: the names of the settings that decide the output.
    refresh: ask the hub for its newest revision instead of keeping the recorded one.
    observed: the source's fingerprint, where somebody has looked since the cache was built; on the hub it is what is
        built. One of another dataset, or of files, is passed over.
    tokenizer_folder: where the tokenizer is; None: <cache>/tokenizer.
    """
    path = cache_root(settings) / key
    folder = tokenizer_folder or cache_root(settings) / TOKENIZER_KEY
    with Measured() as measured:
        tokenizer = _tokenizer_of(settings, key, origin, folder)
        recipe = {name: getattr(settings, name) for name in reads}
        known = _unfinished_facts(origin, path, recipe)
        facts = origin.facts(known or None if refresh else _known_facts(folder, origin, path, observed, known))
        fingerprint = recipe_fingerprint(settings, key, reads, tokenizer.sha256, str(facts["fingerprint"]))
        reused = is_current(path, fingerprint)
        if reused:
            meta = read_meta(str(path / META_NAME))
            _tidy(path)
        else:
            if settings.disk_check:
                refuse_without_room(
                    settings, cache_root(settings), {key: need_of(settings, key, origin)}, left_bytes(path)
                )
            counters: Counter[str] = Counter()
            exclude = {} if settings.exclude is None else {"exclude": read_exclusion(settings.exclude).facts}
            said = said_credit(settings, origin.source)
            about = {**facts, **said, **exclude}
            again = build_command(settings, key, "--restart")
            position: dict[str, int] | None = None if origin.kind == "hub" else {}  # its fingerprint is no files'
            source = Source(origin.dataset, origin.config, origin.streaming, about, recipe, counters, again, position)
            record = partial(record_recipe, path, fingerprint, facts)
            meta = build(Ingredients(tokenizer, source, counters, facts["revision"], record), path)
    return finish(settings, key, path, meta, reused, measured, fingerprint)


def _tidy(path: Path) -> None:
    """Remove what killed builds of a cache that is up to date have left: those that were committed, and half files."""
    clear_leftovers(path)
    attempts = versions_dir(path) / ATTEMPTS_NAME
    if attempts.is_file() and not attempts.is_symlink() and not unfinished_builds(path):
        with contextlib.suppress(OSError):
            attempts.unlink()
    if sealed_builds(path):
        with contextlib.suppress(CacheError, OSError), build_lock(path):
            for folder in sealed_builds(path):
                discard(folder)


def _unfinished_facts(origin: Origin, path: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the hub revision with which a killed build of this recipe began: it goes on with that one. {} for none."""
    for identity in unfinished_builds(path):
        source = identity.get("source")
        if identity.get("recipe") != recipe or not isinstance(source, dict) or source.get("name") != origin.dataset:
            continue
        if origin.kind == "hub" and isinstance(source.get("revision"), str):
            logger.info("%s: an unfinished build is of revision %s", path, source["revision"])
            return {**_at(f"{origin.dataset}@{source['revision']}"), "asked_revision": source.get("asked_revision")}
    return {}


def _known_facts(
    tokenizer_folder: Path, origin: Origin, path: Path, observed: str | None, unfinished: dict[str, Any]
) -> dict[str, Any]:
    """Return what is known of the source without a look at it: its revision as observed, as built, or as trained on."""
    recorded: dict[str, Any] = recorded_recipe(path).get("source") or unfinished
    if "fingerprint" not in recorded:
        tokenizer = find_meta(tokenizer_folder) or {}
        recorded = _at(tokenizer.get("trained_on_sources", {}).get(origin.source))
    dataset, _, revision = (observed or "").rpartition("@")
    if dataset == origin.dataset and revision != "None":  # what nobody has asked for, as a stub's
        return {**recorded, **_at(observed)}
    return recorded


def _at(fingerprint: str | None) -> dict[str, Any]:
    return {"fingerprint": fingerprint, "revision": fingerprint.rpartition("@")[2]} if fingerprint else {}


def record_recipe(path: Path, fingerprint: str, source: dict[str, Any], meta: dict[str, Any]) -> None:
    """Write down which recipe the committed version at `path`, which has this meta.json, came from."""
    record = {
        "fingerprint": fingerprint,
        "meta_sha256": hashlib.sha256(meta_bytes(meta)).hexdigest(),
        "source": source,
        "version": Path(os.readlink(path)).name,
    }
    write_bytes(versions_dir(path) / RECIPE_NAME, canonical_json(record))


def finish(
    settings: Settings, key: str, path: Path, meta: dict[str, Any], reused: bool, measured: Measured, fingerprint: str
) -> Outcome:
    """Make the outcome and append what was built to <cache>/.runs/, where times belong: meta.json has none (D10)."""
    outcome = Outcome(key, path, meta, reused, measured.seconds, measured.peak_bytes, fingerprint)
    if reused:
        return outcome
    runs = _runs_file(cache_root(settings), key)
    path_inside(resolved(cache_root(settings)), f"{RUNS_DIR}/{runs.name}")  # a link there would lead outside
    runs.parent.mkdir(parents=True, exist_ok=True)
    line = {
        "time": time.time(),
        "key": key,
        "seconds": round(measured.seconds, 3),
        "peak_bytes": measured.peak_bytes,
        "fingerprint": fingerprint,
        "content_sha256": meta.get("content_sha256"),
        "totals": meta.get("totals"),
        "settings": asdict(settings),
    }
    with open(
        os.open(runs, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "a"
    ) as file:
        file.write(json.dumps(line, sort_keys=True) + "\n")
    return outcome


def recorded_outcomes(root: Path) -> tuple[list[Outcome], dict[str, Exception]]:
    """Return what made each committed cache below `root`, by its meta.json and .runs/, and whose meta.json is damaged.

    A cache that was copied here has no line in .runs/: its seconds are nan and its fingerprint is empty.
    Raises: FileNotFoundError if there is no cache.
    """
    families = [sorted(root.glob(f"{family}/[!.]*")) for family in ("pretrain", "sft", "eagle3")]
    outcomes: list[Outcome] = []
    damaged: dict[str, Exception] = {}
    for path in itertools.chain([root / TOKENIZER_KEY], *families):
        key = path.relative_to(root).as_posix()
        try:
            meta = listed_meta(path)
            if key == TOKENIZER_KEY and meta is not None:
                checked_count(meta.get("vocab_size"), "vocab_size", str(path / META_NAME))
        except CacheError as error:
            damaged[key] = error
            continue
        if meta is not None:
            run = _newest_run(root, key)
            about = (run.get("seconds", math.nan), run.get("peak_bytes"), run.get("fingerprint", ""))
            outcomes.append(Outcome(key, path, meta, False, *about))
    if not outcomes and not damaged:
        raise FileNotFoundError(f"{root}: no cache there. Name the folder that holds pretrain/ and sft/, or build some")
    return outcomes, damaged


def _newest_run(root: Path, key: str) -> dict[str, Any]:
    """Return the last whole line; {} where there is none in the last megabyte, or no file."""
    try:
        with open(open_regular(path_inside(resolved(root), f"{RUNS_DIR}/{_runs_file(root, key).name}")), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _RUNS_BYTES))
            lines = file.read(_RUNS_BYTES).splitlines()
    except (OSError, CacheError):
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # half a line, where its writer was killed
            run = parse_object(line)
            sound = type(run.get("seconds")) in (int, float) and type(run.get("peak_bytes")) in (int, type(None))
            return run if sound and type(run.get("fingerprint")) is str else {}
    return {}


def _runs_file(root: Path, key: str) -> Path:
    return root / RUNS_DIR / f"{key.replace('/', '.')}.jsonl"


def _tokenizer_of(settings: Settings, key: str, origin: Origin, folder: Path) -> SentencePieceTokenizer:
    removed = shlex.join(["rm", *([] if folder.is_symlink() else ["-r"]), str(folder)])
    again = f"{removed} && {build_command(settings, key)}"
    meta = read_meta(str(folder / META_NAME))
    if settings.source_root != "sample" and meta.get("trained_on") == "sample":
        raise CacheError(
            f"{folder / META_NAME}: this tokenizer was trained on the bundled sample, so it must not encode real text. "
            f"Name another one with --tokenizer-model, or have one trained: {again}"
        )
    if origin.own is None and meta.get("trained_on") == "own":
        logger.warning(
            "%s: trained on your own sources only, and used for %s. Remove it to have one trained on all sources",
            folder,
            origin.source,
        )
    tokenizer = load_tokenizer(folder / MODEL_NAME, follow_links=False)
    if tokenizer.sha256 != meta.get("tokenizer_sha256"):
        raise CacheError(
            f"{folder / MODEL_NAME}: sha256 {tokenizer.sha256[:12]}, not the {str(meta.get('tokenizer_sha256'))[:12]} "
            f"of its {META_NAME}. Make another one: {again}"
        )
    return tokenizer
