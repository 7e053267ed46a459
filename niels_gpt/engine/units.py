"""A cache in units (users say partitions): each is built by itself, on any machine; the seal joins them into a cache.

plan.json fixes everything that the units share. The first machine writes it, and nobody changes it. A unit is a cache
of its own in the plan's folder. Its meta.json is its receipt, and names the plan's sha256. A kind of cache says how a
unit can be damaged and how units are joined: `UnitKind`. No file in the folder is trusted.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from niels_gpt.cache.formats import FORMAT_VERSION, SPLITS
from niels_gpt.documents import MAX_PARTITIONS, Partition
from niels_gpt.engine.build import CANNOT_WRITE
from niels_gpt.engine.meta import BUILDER_VERSIONS, Source
from niels_gpt.settings import usable_cores
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, canonical_json, write_bytes
from niels_gpt.storage.meta_json import (
    MAX_JSON_BYTES,
    checked_sha256,
    file_records,
    link_in_the_way,
    parse_object,
    path_inside,
    printable,
    read_regular,
    wrong_value,
)
from niels_gpt.storage.versions import (
    BUILDING,
    MAX_PLAN_BYTES,
    PARTITIONS,
    PLAN_KIND,
    PLAN_NAME,
    VERSION_DIGITS,
    VERSIONS_DIR,
    versions_dir,
)
from niels_gpt.work import Progress

logger = logging.getLogger(__name__)

PLAN_VERSION = 1
LISTINGS_NAME = "listings"
"""A file beside plan.json with further listings of the same text, one a line. The plan's sha256 does not cover it."""
SHARDS_RULE = "shards"
"""`rule` of a plan whose units are the shards of one folder: any number of builders may share them. Another plan says
where the shards are cut."""
_SIZES = {SHARDS_RULE: (1, 1_000_000)}  # how many units a plan of a rule has: a shard's name has six digits
_DIGITS = 5  # of a unit's folder
_TARGET = re.compile(r"\.versions/([0-9]{5})/([0-9a-f]{12})")
_HALF_WRITTEN = re.compile(r"\.plan\.json\.[0-9a-f]{8}\.tmp")
_MOST_REMEDIES = 20
_TICK_S = 0.2  # between two calls of a progress
_WAITING = 4  # units for each thread that wait to be read
_MOST_CHARACTERS = 4_000  # of the list of unfinished units: 100,000 of them may be missing

Meta = dict[str, Any]


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartitionPlan:
    """The plan of a cache in units."""

    path: Path
    """The cache's public path, absolute."""
    content: Mapping[str, Any]
    """The object in plan.json: see `fix_plan`."""

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of plan.json and of all units."""
        return versions_dir(self.path) / f"{PARTITIONS}-{self.fingerprint[:VERSION_DIGITS]}"

    @property
    def total(self) -> int:
        """Number of units."""
        return int(self.content["partitions"])

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the recipe: 64 hex digits."""
        return str(self.content["fingerprint"])

    @functools.cached_property
    def sha256(self) -> str:
        """Hex sha256 of plan.json's bytes; each receipt names it."""
        return hashlib.sha256(canonical_json(self.content)).hexdigest()

    @property
    def is_there(self) -> bool:
        """Whether plan.json exists with this content. A seal, `restart` and gc remove it."""
        try:
            return read_regular(self.folder / PLAN_NAME, MAX_PLAN_BYTES) == canonical_json(self.content)
        except (OSError, CacheError):
            return False

    def partition(self, number: int) -> Partition:
        """Return a unit's number with the total. Raises: ValueError unless 0 <= number < total."""
        return Partition.checked(number, self.total)

    def unit_path(self, number: int) -> Path:
        """Return the public path of a unit, which may not exist yet. Raises: ValueError."""
        return self.folder / f"{self.partition(number).number:0{_DIGITS}d}"


def fix_plan(path: str | os.PathLike[str], content: Mapping[str, Any]) -> PartitionPlan:
    """Write plan.json if it does not exist, and return the plan. The caller holds `build_lock(path)`.

    content: plan_version 1, kind "partition_plan", cache (such as "pretrain/roam"), partitions (the number of units, 2
        or more; of shards 1 or more), rule, fingerprint (of the recipe, 64 hex digits), recipe, source and code
        (objects), tokenizer_sha256, tokenizer_content_sha256 (both null for recorded ids); listing and exclude_sha256
        (both may be null).
    Raises: CacheError E511 for another content under the same fingerprint, with the keys that differ; CacheError E202
        for a content in another form; CacheError E205 if a link or a folder is at its place.
    """
    plan = PartitionPlan(Path(os.path.abspath(path)), parse_object(canonical_json(content)))
    _check_content(plan.content, f"{path}: {PLAN_NAME}")
    where = plan.folder / PLAN_NAME
    if plan.folder.is_symlink():
        raise link_in_the_way(plan.folder, "the folder of a plan")
    if not os.path.lexists(where):
        fileio.make_dir(plan.folder)
        write_bytes(where, canonical_json(plan.content))
        return plan
    found = parse_object(read_regular(where, MAX_PLAN_BYTES))
    if found != plan.content:
        keys = sorted(key for key in {*found, *plan.content} if found.get(key) != plan.content.get(key))
        raise CacheError(
            where,
            f"another plan of the same cache, which differs in {', '.join(keys)}",
            "the plan that this machine makes",
            "Use the same program and source on all machines, or build from scratch with --restart",
            code="E511",
        )
    return plan


def plans_of(path: str | os.PathLike[str]) -> list[PartitionPlan]:
    """Return the plans of the cache at `path`, the most recently written first. Folders without a plan are left out."""
    dated: list[tuple[int, str, PartitionPlan]] = []
    for folder in versions_dir(path).glob(f"{PARTITIONS}-*"):
        with suppress(OSError, ValueError):
            plan = _read_plan(Path(os.path.abspath(path)), folder)
            dated.append(((folder / PLAN_NAME).lstat().st_mtime_ns, folder.name, plan))
    return [plan for *_, plan in sorted(dated, key=lambda entry: entry[:2], reverse=True)]


def discard_plan(plan: PartitionPlan) -> bool:
    """Remove a plan and its units, unless one is being built; return whether it is gone. `build_lock` is held."""
    try:
        versions.refuse_if_partition_is_built(plan.folder)
    except CacheError as error:
        logger.info("%s is not removed: %s", plan.folder, error)
        return False
    versions.discard(plan.folder)
    return True


def _read_plan(path: Path, folder: Path) -> PartitionPlan:
    """Return the plan in a folder. Raises: OSError; ValueError, also as CacheError, if there is no valid plan."""
    if folder.is_symlink():
        raise CacheError(folder, "a symbolic link", "the folder of a plan", code="E205")
    raw = read_regular(folder / PLAN_NAME, MAX_PLAN_BYTES)
    plan = PartitionPlan(path, parse_object(raw))
    _check_content(plan.content, str(folder / PLAN_NAME))
    if plan.folder.name != folder.name or canonical_json(plan.content) != raw:
        raise wrong_value(str(folder / PLAN_NAME), "fingerprint", plan.fingerprint, f"the one in {folder.name}")
    return plan


def _check_content(content: Mapping[str, Any], where: str) -> None:
    """Raise CacheError E202 for a plan in another form."""
    for key, expected in (("plan_version", PLAN_VERSION), ("kind", PLAN_KIND)):
        if content.get(key) != expected or type(content[key]) is not type(expected):
            raise wrong_value(where, key, content.get(key), repr(expected))
    total, (least, most) = content.get("partitions"), _SIZES.get(str(content.get("rule")), (2, MAX_PARTITIONS))
    if type(total) is not int or not least <= total <= most:
        raise wrong_value(where, "partitions", total, f"{least} to {most:,}")
    of_tokenizer = ("tokenizer_sha256", "tokenizer_content_sha256")
    checked_sha256(content.get("fingerprint"), "fingerprint", where)
    for key in of_tokenizer if any(content.get(key) is not None for key in of_tokenizer) else ():
        checked_sha256(content.get(key), key, where)
    for key in ("listing", "exclude_sha256"):
        if content.get(key) is not None:
            checked_sha256(content[key], key, where)
    for keys, form, name in ((("cache", "rule"), str, "a text"), (("recipe", "source", "code"), dict, "an object")):
        for key in keys:
            if not isinstance(content.get(key), form):
                raise wrong_value(where, key, content.get(key), name)


# --- a unit -----------------------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """The state of one unit."""

    number: int
    """From 0; -1 for an entry of the plan's folder that belongs to no unit."""
    state: str
    """One of

    finished
    missing     no receipt
    started     an unfinished build
    doubled     its receipt claims another number, or it has the documents of another unit
    foreign     no build of this project made it, or it is a link out of the folder
    stale       another plan or version of the builder made it
    damaged     its files differ from its receipt
    """
    found: str = ""
    """The problem, for a message; with number -1, the entry's name and the problem."""
    version: str = ""
    """Name of the version that its link points to, made from its content; "" without a good receipt."""
    items: int = 0
    """Documents, chats or groups in both splits, by a good receipt."""
    tokens: int = 0
    """Tokens in both splits, by a good receipt."""
    entry: Path | None = None
    """With number -1: the entry's path, with its name unescaped."""
    receipt: Meta | None = None
    """Its meta.json if `look_at` found it finished; None in the list of `states_of`."""

    @property
    def is_unbuilt(self) -> bool:
        """Whether it is missing or started: its build repairs that, and nothing needs to be removed first."""
        return self.state in ("missing", "started")


class Mended(NamedTuple):
    """The result of a repair of damaged files of a sealed cache."""

    files: list[str]
    """Names of the files that have their recorded bytes again."""
    left: list[str]
    """Names of the files that are still damaged: bytes of other units are in them."""
    unit: int | None
    """Number of the unit to build next for the first of `left`; None if unknown."""


Mend = Callable[[Path, Meta, Mapping[int, tuple[Path, Meta]]], Mended]


class UnitPlan(Protocol):
    """A plan as `states_of` and `not_finished` need it: its units are folders, or files in one folder."""

    @property
    def path(self) -> Path:
        """The cache's public path."""

    @property
    def total(self) -> int:
        """Number of units."""


PlanT = TypeVar("PlanT", bound=UnitPlan)


class Looks(Generic[PlanT]):
    """How units of a kind are examined: where a receipt is, how a unit is damaged, which files block its build."""

    word: ClassVar[str] = "partition"
    """The word for a unit in messages."""

    def look(self, plan: PlanT, number: int) -> Unit:
        """Return the state of a unit by its receipt and the sizes of its files, without reading them."""
        raise NotImplementedError

    def looks(self, plan: PlanT) -> Iterator[Unit]:
        """Yield each unit by number. A unit that conflicts with a later one is yielded again, in another state."""
        return (self.look(plan, number) for number in range(plan.total))

    def size(self, plan: PlanT, unit: Unit) -> int:
        """Return the bytes of a finished unit's files."""
        raise NotImplementedError

    def damage(self, plan: PlanT, unit: Unit, progress: Progress | None) -> str:
        """Read all files of a finished unit, and return the damage, "" without any."""
        raise NotImplementedError

    def foreign(self, plan: PlanT) -> Iterator[tuple[Path, str]]:
        """Yield each foreign file or folder among the units, with the reason."""
        raise NotImplementedError

    def in_the_way(self, plan: PlanT, unit: Unit) -> list[Path]:
        """Return the paths to remove before a bad unit is built again."""
        raise NotImplementedError

    def refusal(self, path: Path, found: str, remedy: str) -> CacheError:
        """Return the error E510 that names the unfinished units."""
        return CacheError(path, found, remedy=remedy, code="E510")


@dataclass(frozen=True)
class UnitKind(Looks[PartitionPlan]):
    """The units of a kind where each unit is a cache of its own."""

    name: str
    """`kind` in the receipts."""
    same: tuple[str, ...]
    """Keys of meta.json that are equal in all units of a cache, and in the cache."""
    examine: Callable[[Path, bool, Progress | None], tuple[Meta | None, str]]
    """Takes a unit's folder, whether to read every file, and progress. Returns its meta.json (None if unreadable) and
    the damage ("" without any)."""
    items: Callable[[Meta], int]
    """Returns the documents, chats or groups in a receipt."""
    read: str
    """Key of a receipt that counts the items read, dropped ones included."""
    join: Callable[[Path, PartitionPlan, Source, Iterator[tuple[Path, Meta]]], Meta]
    """Takes the folder to write to, the plan, the source, and the folder and receipt of each unit in order. Writes all
    files of the cache, then meta.json; returns the meta."""
    warn: Callable[[Path, Meta], None]
    """Takes the cache's path and its meta. Logs the warnings that no single unit can give."""
    mend: Mend | None = None
    """Takes the folder of a sealed version, its meta, and the folder and receipt of each unit that was built again, by
    number. Replaces damaged files. None: a damaged cache is built again as a whole."""
    units_at: Callable[[Path, Meta, str, int, int], list[int]] | None = None
    """Takes the folder of a sealed version, its meta, a file's name, the first byte and the byte after the last one.
    Returns the units that wrote these bytes, [] if unknown. None: no unit repairs a file."""

    def look(self, plan: PartitionPlan, number: int) -> Unit:
        """Examine the unit's link too."""
        return look_at(plan, self, number)

    def looks(self, plan: PartitionPlan) -> Iterator[Unit]:
        """Yield each unit; a stale one differs from the first in a key of `same`, two doubled ones have equal text."""
        common, made = Meta(), dict[tuple[str, bytes], int]()
        for unit in super().looks(plan):
            number, receipt = unit.number, unit.receipt
            if receipt is None:
                yield unit
                continue
            found = {key: receipt.get(key) for key in self.same}
            common = common or found
            twin = made.setdefault(_origin(receipt), number) if unit.items > 1 else number
            if differing := [key for key in self.same if found[key] != common[key]]:
                yield Unit(number, "stale", f"it differs from other partitions in {', '.join(differing)}")
            elif twin != number:
                yield Unit(number, "doubled", f"it has the documents of partition {twin}")
                yield Unit(twin, "doubled", f"it has the documents of partition {number}")
            else:
                yield unit

    def size(self, plan: PartitionPlan, unit: Unit) -> int:
        """Return the bytes of the files that a receipt names."""
        return sum(record["bytes"] for record in file_records(unit.receipt or {}))

    def damage(self, plan: PartitionPlan, unit: Unit, progress: Progress | None) -> str:
        """Compare the sha256 and the block checksums of every file."""
        return self.examine(version_folder(plan, unit), True, progress)[1]

    def foreign(self, plan: PartitionPlan) -> Iterator[tuple[Path, str]]:
        """Yield each entry of the plan's folder and its `.versions` that no build put there."""
        names = {plan.unit_path(number).name for number in range(plan.total)}
        for folder, known in (
            (plan.folder, {*names, PLAN_NAME, LISTINGS_NAME, VERSIONS_DIR}),
            (plan.folder / VERSIONS_DIR, names),
        ):
            if folder.is_symlink():
                yield folder, f"{folder.name}: a symbolic link"
                continue
            for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
                if name not in known and not _HALF_WRITTEN.fullmatch(name):
                    below = "" if folder == plan.folder else f"{VERSIONS_DIR}/"
                    yield folder / name, f"{below}{printable(name)}: no partition of the {plan.total} of this plan"

    def in_the_way(self, plan: PartitionPlan, unit: Unit) -> list[Path]:
        """Return the unit's link, and its versions."""
        path = plan.unit_path(unit.number)
        return [path, versions_dir(path)]


def look_at(plan: PartitionPlan, kind: UnitKind, number: int) -> Unit:
    """Return the state of a unit by its link, its receipt and the sizes of its files, without reading them."""
    path = plan.unit_path(number)
    if not os.path.lexists(path):
        if any(versions_dir(path).glob(f"{BUILDING}-*")):
            return Unit(number, "started", "an unfinished build")
        return Unit(number, "missing", "no receipt")
    target = _TARGET.fullmatch(os.readlink(path)) if path.is_symlink() else None
    if target is None or target[1] != path.name:
        return Unit(number, "foreign", f"no link to a version below {VERSIONS_DIR}/{path.name}")
    try:
        path_inside(plan.folder, f"{target[0]}/{META_NAME}")
        meta, problem = kind.examine(plan.folder / target[0], False, None)
    except CacheError as error:
        return Unit(number, "foreign", error.problem)
    if meta is not None and (wrong := _claim(plan, kind, number, meta)):
        return Unit(number, *wrong)
    if meta is None or problem or meta.get("content_sha256", "")[:VERSION_DIGITS] != target[2]:
        return Unit(number, "damaged", printable(problem or "content_sha256 is not the one of its version"))
    tokens = sum(meta["totals"][f"{split}_tokens"] for split in SPLITS)
    return Unit(number, "finished", "", target[2], kind.items(meta), tokens, None, meta)


def version_folder(plan: PartitionPlan, unit: Unit) -> Path:
    """Return the folder of a finished unit's version."""
    return versions_dir(plan.unit_path(unit.number)) / unit.version


def _claim(plan: PartitionPlan, kind: UnitKind, number: int, meta: Meta) -> tuple[str, str] | None:
    """Return the state and the problem of a receipt of another plan, version or number; None for a good receipt."""
    claim = meta.get("partition")
    if meta.get("kind") != kind.name or not isinstance(claim, dict):
        return "foreign", f"its {META_NAME} is no receipt of a partition"
    if claim.get("plan") != plan.sha256 or claim.get("total") != plan.total:
        return "stale", "its receipt belongs to another plan"
    made, ours = (meta.get("format_version"), meta.get("builder_version")), BUILDER_VERSIONS[kind.name]
    if made != (FORMAT_VERSION, ours):
        return "stale", f"made by version {made[1]!r:.20} of the builder, not {ours}"
    if meta.get("tokenizer_sha256") != plan.content["tokenizer_sha256"]:
        return "stale", "another tokenizer than the plan's made its ids"
    if claim.get("number") != number or type(claim["number"]) is not int:
        return "doubled", f"its receipt claims number {claim.get('number')!r:.20}"
    return None


def states_of(plan: PlanT, kind: Looks[PlanT], *, deep: bool = False, progress: Progress | None = None) -> list[Unit]:
    """Return the state of each unit by number, then each foreign entry of the folder, with number -1.

    deep: read every file and compare its checksums; otherwise receipts and sizes only.
    progress: called with files, bytes read, and bytes to read in all.
    """
    found, sizes = dict[int, Unit](), dict[int, int]()
    for unit in kind.looks(plan):
        found[unit.number] = unit._replace(receipt=None)  # receipts of 100,000 units take much memory
        if deep and unit.state == "finished":
            sizes[unit.number] = kind.size(plan, unit)
    units = [found[number] for number in range(plan.total)]
    sizes = {number: size for number, size in sizes.items() if units[number].state == "finished"}
    for number, problem in _damages(plan, kind, units, sizes, progress) if deep else ():
        units[number] = Unit(number, "damaged", printable(problem))
    return units + [Unit(-1, "foreign", found, entry=entry) for entry, found in kind.foreign(plan)]


def _origin(receipt: Meta) -> tuple[str, bytes]:
    """Return a unit's content and the place where its source ended, if known: two units cannot have both in common.

    Equal content does not prove that a receipt was copied: two files of a source may be equal.
    """
    return receipt["content_sha256"], canonical_json(receipt["partition"].get("end"))


def _damages(
    plan: PlanT, kind: Looks[PlanT], units: Sequence[Unit], sizes: Mapping[int, int], progress: Progress | None
) -> Iterator[tuple[int, str]]:
    """Read every file of the finished units, several units at once; yield number and damage of a damaged one.

    progress is called here, not in the threads: its exception ends the reading, and is not a unit's damage.
    """
    total, heard, stopped = sum(sizes.values()), {number: (0, 0) for number in sizes}, Event()

    def examine(number: int) -> str:
        def add(files: int, read: int, _: int | None) -> None:
            if stopped.is_set():
                raise _Stopped
            heard[number] = files, read

        found = kind.damage(plan, units[number], add)
        heard[number] = heard[number][0], sizes[number]  # a damaged one is not read to its end
        return found

    threads = min(16, usable_cores())
    with ThreadPoolExecutor(threads) as executor:
        numbers, left = iter(sizes), dict[Future[str], int]()
        try:
            while True:
                for number in islice(numbers, _WAITING * threads - len(left)):
                    left[executor.submit(examine, number)] = number
                if not left:
                    return
                for future in wait(left, _TICK_S, FIRST_COMPLETED).done:
                    if found := future.result():
                        yield left[future], found
                    del left[future]
                if progress is not None:
                    files, read = (sum(counts) for counts in zip(*heard.values(), strict=True))
                    progress(files, read, total)
        finally:
            stopped.set()
            for future in left:
                future.cancel()


class _Stopped(BaseException):
    """Ends a thread that reads a unit."""


# --- the seal ---------------------------------------------------------------------------------------------------------


class Commands(NamedTuple):
    """The commands in the error of a refused seal."""

    unit: Callable[[int], str]
    """Takes a unit's number. Returns the command that builds it."""
    whole: str
    """Builds all missing units, and seals."""
    seal: str


def seal(
    plan: PartitionPlan,
    kind: UnitKind,
    *,
    source: Source,
    deep: bool = True,
    wait: bool = False,
    commands: Commands | None = None,
    committed: Callable[[Meta], None] | None = None,
    progress: Progress | None = None,
) -> Meta:
    """Join all units into the cache at `plan.path`, commit it, remove the plan's folder, and return its meta.json.

    Takes `build_lock(plan.path)`. The bytes depend only on the receipts. A seal that was killed can be repeated.
    source: name, config, streaming and from_scratch as for `build_pretrain`. provenance: the key `source` of the meta
        without `counters`, which are the sums over the receipts. position and counters are not used.
    deep: compare the sha256 of every file of every unit; otherwise sizes. wait: wait for the lock, as in `build_lock`.
    commands: named in E510; None: the command of `source`.
    committed: called with the meta after the commit, before the plan's folder is removed.
    progress: called with files, bytes read, and bytes to read in all.
    Warns W509 if the plan's folder stays because a unit is being built in it.
    Raises: CacheError E510 with each unit that is not finished, or if plan.json is gone; CacheError E503 while a unit
        is being built, or while another process seals, unless `wait`; CacheError E206 for a meta.json larger than
        readers accept; NoTextError E303 if no unit has a token for train; OSError.
    """
    with _saying_what_is_kept(plan.path), versions.building(plan.path, wait=wait) as work:
        if not plan.is_there:
            raise CacheError(plan.folder, f"has no {PLAN_NAME} of this plan", code="E510")
        versions.refuse_if_partition_is_built(plan.folder)
        units = states_of(plan, kind, deep=deep, progress=progress)
        if any(unit.state != "finished" for unit in units):
            raise not_finished(plan, kind, units, commands, source.from_scratch)
        meta = kind.join(work, plan, source, _receipts(plan, kind, units))
        if (size := (work / META_NAME).stat().st_size) > MAX_JSON_BYTES:
            advice = "Build with a larger --shard-bytes or with fewer --partitions"
            raise CacheError(
                plan.path, f"its {META_NAME} has {size:,} bytes", f"{MAX_JSON_BYTES:,}", advice, code="E206"
            )
        versions.commit(work, plan.path, str(meta["content_sha256"]))
        if committed is not None:
            committed(meta)
        # Only now: a seal that is killed before the commit finds all units again.
        if not discard_plan(plan):
            logger.warning(
                "%s: not removed, because one of its partitions is being built. Later: %s",
                plan.folder,
                shlex.join(["niels-gpt", "gc", str(plan.path.parent)]),
                extra={"code": "W509"},
            )
    kind.warn(plan.path, meta)
    return meta


def _receipts(plan: PartitionPlan, kind: UnitKind, units: Sequence[Unit]) -> Iterator[tuple[Path, Meta]]:
    """Yield folder and receipt of each unit, in order. Raises: CacheError E510 for one that changed after its check."""
    for unit in units:
        now = look_at(plan, kind, unit.number)
        if now.receipt is None or now.version != unit.version:
            found = f"version {now.version}, and {unit.version} was checked" if now.receipt else now.found
            state = "replaced" if now.receipt else now.state
            raise CacheError(
                plan.unit_path(unit.number),
                f"{state}, though it was finished just now: {found}",
                remedy="Let no other process change the partitions, and seal again",
                code="E510",
            )
        yield version_folder(plan, now), now.receipt


@contextmanager
def _saying_what_is_kept(path: Path) -> Iterator[None]:
    """Add to the error of a full or read-only disk that the units are kept."""
    try:
        yield
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        kept = "Its partitions are kept: the same command seals them once that is fixed"
        raise OSError(error.errno, f"{error.strerror}. {kept}", error.filename or os.fspath(path)) from error


def not_finished(
    plan: PlanT,
    kind: Looks[PlanT],
    units: Sequence[Unit],
    commands: Commands | None,
    from_scratch: str | None = None,
) -> CacheError:
    """Return the error E510 with each unit that is not finished, and the commands that build them and seal.

    If more than 20 are missing, one command builds them all.
    """
    bad = sorted((unit for unit in units if unit.state != "finished"), key=lambda unit: (unit.state, unit.number))
    groups = [(name, list(some)) for name, some in groupby(bad, key=lambda unit: unit.state)]
    found = "; ".join(f"{name}: {_described(some)}" for name, some in groups)
    if len(found) > _MOST_CHARACTERS:
        found = f"{found[:_MOST_CHARACTERS]} ..."
    last = commands.seal if commands else None
    if commands and sum(unit.is_unbuilt for unit in bad) > _MOST_REMEDIES:
        bad, last = [unit for unit in bad if not unit.is_unbuilt], commands.whole
    remedies = list(dict.fromkeys(_remedy(plan, kind, unit, commands, from_scratch) for unit in bad[:_MOST_REMEDIES]))
    if len(bad) > _MOST_REMEDIES:
        last = f"and so on for {len(bad) - _MOST_REMEDIES:,} more"
    finished = sum(unit.state == "finished" for unit in units)
    return kind.refusal(
        plan.path,
        f"{finished:,} of {plan.total:,} {kind.word}s are finished; {found}",
        "\n".join(["Build them, then seal:", *remedies, *([last] if last else [])]),
    )


def _described(units: Sequence[Unit]) -> str:
    """Return the numbers of units in one state, with runs as 3-5; of bad units, each number with its problem."""
    if not units[0].is_unbuilt:
        return ", ".join(f"{unit.number} ({unit.found})" if unit.number >= 0 else unit.found for unit in units)
    runs = [
        [unit.number for _, unit in run]
        for _, run in groupby(enumerate(units), key=lambda pair: pair[1].number - pair[0])
    ]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _remedy(plan: PlanT, kind: Looks[PlanT], unit: Unit, commands: Commands | None, from_scratch: str | None) -> str:
    """Return the commands that repair a unit, as one line of bash."""
    if unit.entry is not None:
        return f"rm -rf {_quoted(str(unit.entry))}"
    build = commands.unit(unit.number) if commands is not None else from_scratch or f"build partition {unit.number}"
    if unit.is_unbuilt:
        return build
    return f"{shlex.join(['rm', '-rf', *map(str, kind.in_the_way(plan, unit))])} && {build}"


def _quoted(path: str) -> str:
    """Return a path as a word of bash on one line; one with unprintable characters as escaped bytes in $'...'."""
    if path.isprintable():
        return shlex.quote(path)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\{byte:03o}" for byte in os.fsencode(path))
    return f"$'{''.join(plain)}'"
