"""Record in the folder of caches which recipe made a cache, and its runs; decide whether a cache is current.

recipe.json beside a cache records the recipe of the committed version. .runs/ has a line for each build, with the
values that differ from run to run (D10).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import listed_meta, read_meta
from niels_gpt.kinds.kind import kinds
from niels_gpt.paths import FAMILIES
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, canonical_json, write_bytes
from niels_gpt.storage.meta_json import (
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
from niels_gpt.storage.remedies import build_command, recorded_settings
from niels_gpt.storage.versions import RECIPE_NAME, failed_checks, public_path, versions_dir

if TYPE_CHECKING:  # `list` reads records alone
    from niels_gpt.data.exclude import Exclusion
    from niels_gpt.settings import Settings

TOKENIZER_KEY = "tokenizer"
RUNS_DIR = ".runs"
"""In the folder of caches: a line of JSON for each build. Times stand here and not in meta.json (D10)."""
_MOST_LISTED = 1 << 20  # characters of the entries of --exclude that are recorded, to be compared with another list
_FOLDERS = re.compile(r"(?:(?<=^)|(?<=[=;,:\s]))(?:~|/)[^;,]*/(?=[^;,])")  # of absolute paths in a setting
_RUNS_BYTES = 1 << 20  # read from the end of a file of runs


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
    """Result of one recipe."""

    key: str
    """tokenizer, pretrain/NAME, sft/NAME, trees/NAME, rollouts/NAME or eagle3/targets."""
    path: Path
    """Public folder."""
    meta: dict[str, Any]
    """Content of meta.json."""
    reused: bool
    """Whether the committed cache was current, so that nothing was built."""
    seconds: float
    """Wall time, with the check whether the cache is current."""
    peak_bytes: int | None
    """Peak resident memory of this process during the recipe; None if the system does not report it."""
    fingerprint: str
    """Sha256 of the recipe: settings, tokenizer, source, format."""
    engine: str | None = None
    """Name of the Engine that encoded; None for a tokenizer, and if nothing was built."""

    @property
    def tokens(self) -> int:
        """Tokens of train and val, or of eagle3/targets; 0 for a tokenizer and a stub."""
        totals = self.meta.get("totals") or {}
        return int(totals.get("tokens", sum(totals.get(f"{split}_tokens", 0) for split in SPLITS)))

    @property
    def tokens_per_second(self) -> float | None:
        """None if nothing was tokenized or no time is recorded."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 and not self.reused else None

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files that meta.json names; for eagle3/targets, which only counts its shards, its own figure."""
        return int(self.meta.get("disk_bytes", sum(record["bytes"] for record in file_records(self.meta))))


def cache_root(settings: Settings) -> Path:
    """Return the folder of caches. The sample has a folder of its own (D20)."""
    root = Path(settings.cache_dir)
    return root / "sample" if settings.source_root == "sample" else root


def num_threads(settings: Settings) -> int:
    """Return the number of tokenizer threads: the setting, or one per usable core."""
    from niels_gpt.settings import usable_cores

    return settings.threads or usable_cores()


# --- the record of a recipe -------------------------------------------------------------------------------------------


def recorded_recipe(path: Path) -> dict[str, Any]:
    """Return the record of the recipe that built the committed version at `path`; {} without one."""
    recipe = read_record(path)
    return recipe if path.is_symlink() and recipe.get("version") == Path(os.readlink(path)).name else {}


def read_record(path: Path) -> dict[str, Any]:
    """Return the last record of a recipe, for any version; {} without one."""
    try:
        return parse_object(read_regular(versions_dir(path) / RECIPE_NAME))
    except (FileNotFoundError, ValueError):
        return {}


def is_committed(path: Path, fingerprint: str) -> bool:
    """Return whether the committed cache has this recipe, and a good meta.json. Looks at no other file."""
    recipe, meta_path = recorded_recipe(path), path / META_NAME
    if recipe.get("fingerprint") != fingerprint or not meta_path.is_file():
        return False
    try:  # another sha256: damaged, or written by a builder that records no recipe
        found = sha256_regular(resolved(path) / META_NAME)
    except CacheError:
        return False
    return found in (recipe.get("meta_sha256"), recipe.get("next_meta_sha256"))


def is_current(path: Path, fingerprint: str) -> bool:
    """Return whether the committed cache has this recipe, its files have the sizes in meta.json (D12), and no check has
    failed that a build may repair."""
    # Sizes only, so that a build of nothing takes milliseconds; `verify --deep` and the readers compare bytes.
    if not is_committed(path, fingerprint) or failed_checks(path).repairable:
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
    """Return a recipe's fingerprint with the list of --exclude.

    A changed list does not make a cache stale if it changes nothing: if the cache is current by its own list, and no
    entry that only one of the two lists has names anything in the source, the fingerprint is by the cache's list.
    fingerprint_of: called with a list; None for no list. named: reads the source and yields the entries of a list that
        name something; None: read nothing, so that any change of the list counts.
    """
    from niels_gpt.data.exclude import Exclusion, read_exclusion

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


def record_recipe(
    settings: Settings, path: Path, fingerprint: str, source: dict[str, Any], meta: dict[str, Any], **more: Any
) -> None:
    """Record the recipe of the committed version at `path`. source: its provenance. meta: of that version."""
    from niels_gpt.data.exclude import read_exclusion

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


# --- runs -------------------------------------------------------------------------------------------------------------


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
    """Return the outcome of a recipe. Appends a line to <cache>/.runs/KEY.jsonl for a build."""
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
    """Append a line to the runs of a cache. Raises: CacheError E205 for a link, or if the folder of runs is none."""
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


def recorded_outcomes(root: Path) -> tuple[list[Outcome], dict[str, Exception]]:
    """Return the outcome of each committed cache in `root`, and the error of each damaged meta.json by key.

    A cache that was copied here has no line in .runs/: its seconds are nan, and its fingerprint is empty.
    Raises: FileNotFoundError if there is no cache.
    """
    names, known = {entry.name for entry in os.scandir(root) if entry.name[:1] != "."} if root.is_dir() else set(), []
    if not names <= {*FAMILIES, TOKENIZER_KEY}:  # then other packages are asked for their kinds
        known = [key.rstrip("/") for kind in kinds() for key in kind.keys if key.endswith("/")]
    families = [sorted(root.glob(f"{family}/[!.]*")) for family in dict.fromkeys([*FAMILIES, *known])]
    outcomes: list[Outcome] = []
    damaged: dict[str, Exception] = {}
    for path in itertools.chain([root / TOKENIZER_KEY], *families):
        key = path.relative_to(root).as_posix()
        try:
            meta = listed_meta(path)
            if meta is None and (text := next(filter(None, (kind.unfinished(path) for kind in kinds())), "")):
                raise CacheError(path, text.strip(), code="E702")
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
        raise FileNotFoundError(
            f"{root}: no cache there. Name the folder that holds pretrain/ and sft/, or build the sample's caches: "
            "niels-gpt demo cache"
        )
    return outcomes, damaged


def made_by(cache: Path) -> str | None:
    """Return the command of the last recorded run of a cache, without folders of this machine.

    Returns None if no run is recorded, or it made another version.
    """
    from niels_gpt.settings import Settings

    meta, public = listed_meta(cache), public_path(resolved(cache)) or cache.absolute()
    key = TOKENIZER_KEY if public.name == TOKENIZER_KEY else f"{public.parent.name}/{public.name}"
    root = public.parent if key == TOKENIZER_KEY else public.parent.parent
    if meta is None or _newest_run(root, key).get("content_sha256") != meta.get("content_sha256"):
        return None
    settings = replace(recorded_settings(root, key), cache_dir=Settings.cache_dir)
    texts = {name: _FOLDERS.sub("", text) for name, text in asdict(settings).items() if isinstance(text, str)}
    return build_command(replace(settings, **texts), key)  # type: ignore[arg-type]  # texts of fields that are texts


def _newest_run(root: Path, key: str) -> dict[str, Any]:
    """Return the last whole line of the runs of `key`; {} if the last megabyte has none."""
    try:
        with open(open_regular(path_inside(resolved(root), f"{RUNS_DIR}/{runs_file(root, key).name}")), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _RUNS_BYTES))
            lines = file.read(_RUNS_BYTES).splitlines()
    except (OSError, CacheError):
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # half a line of a killed writer
            run = parse_object(line)
            sound = type(run.get("seconds")) in (int, float) and type(run.get("peak_bytes")) in (int, type(None))
            return run if sound and type(run.get("fingerprint")) is str else {}
    return {}
