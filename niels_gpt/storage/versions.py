"""Versions of a cache: locks, resumes and commits a build; lists the leftovers that gc may remove.

A cache at PATH is a relative symlink to a finished version. The tokens of a version never change. Its meta.json is
replaced atomically if equal tokens get a new description:

    <parent>/NAME                          -> .versions/NAME/<content sha256, 12 digits>
    <parent>/.versions/NAME/<sha12>/       a finished version; its meta.json was written last
    <parent>/.versions/NAME/building-KEY/          a build in progress, or interrupted: the next run resumes it
    <parent>/.versions/NAME/building-KEY.journal/  its checkpoints
    <parent>/.versions/NAME/partitions-KEY/        a cache built in partitions, each a cache in it; see is_plan
    <parent>/.versions/NAME/adoptedN/      a folder without a content_sha256 that was at PATH before
    <parent>/.versions/NAME/attempts.json  number of runs of an unfinished build without progress, for a warning
    <parent>/.versions/NAME/recipe.json    the recipe of the committed version
    <parent>/.versions/NAME/failed.json    checks of the committed version that have failed; see FailedChecks
    <parent>/.versions/NAME/lock           held by flock(2) during a build, with the builder's name; or a lease in the
                                           folder of caches takes its place: niels_gpt/storage/locks
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from niels_gpt.storage import fileio, locks
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, PathLike, canonical_json, write_bytes
from niels_gpt.storage.meta_json import (
    file_records,
    link_in_the_way,
    open_regular,
    parse_object,
    printable,
    read_regular,
    sha256_regular,
)
from niels_gpt.storage.mounted import shown

_BUILT = "is being built"  # the state of a locked cache
VERSIONS_DIR = ".versions"
VERSION_DIGITS = 12
BUILDING, DAMAGED, LINK = "building", "damaged", "link"
JOURNAL_SUFFIX = ".journal"
JOURNAL_NAME, RECIPE_NAME, FAILED_NAME = "journal.jsonl", "recipe.json", "failed.json"
ATTEMPTS_NAME, LOCK_NAME = "attempts.json", "lock"
PARTITIONS = "partitions"
PLAN_NAME, PLAN_KIND = "plan.json", "partition_plan"
MAX_PLAN_BYTES = 1 << 22
SHA256_DIGITS = re.compile("[0-9a-f]{64}")
BUILD_NAME = re.compile(r"building-[0-9a-f]{12}(\.journal)?")
_PARTITIONS = re.compile(PARTITIONS + "-[0-9a-f]{12}")
_HALF_WRITTEN = re.compile(r"\.(recipe|failed|meta|plan)\.json\.[0-9a-f]{8}\.tmp")  # of fileio.write_bytes
_BUILDERS_FILE = re.compile(r"[a-z0-9_]+\.(bin|bits|npy|txt|json|jsonl|model)")
VERSION_NAME = re.compile(r"[0-9a-f]{12}|adopted\d+")
PROBE = re.compile(r"\.probe-[0-9a-f]{8}")
"""Name of the hidden folder in which a build tests the file system. A killed build leaves it."""
_ADOPTED = re.compile(r"adopted\d+")
_KILLED = "left by a process that was killed"
_MAX_LINE = 1 << 24  # bytes of a line of a journal
KINDS = ("pretrain", "sft", "tokenizer", "rollouts", "eagle3", "draft_vocab")
"""`kind` in the meta.json of every kind of cache."""


def versions_dir(path: PathLike) -> Path:
    """Return the folder with the versions, the lock and the recipe of the cache at `path`."""
    public = Path(os.path.abspath(path))
    return public.parent / VERSIONS_DIR / public.name


def public_path(version: Path) -> Path | None:
    """Return the path that a version's folder was committed to; None for any other folder."""
    names = version.parent
    return names.parent.parent / names.name if names.parent.name == VERSIONS_DIR else None


def refuse_among_versions(path: PathLike) -> None:
    """Raise CacheError E704 if a new folder at `path` would lie in a folder .versions, by its name or through links."""
    parent, name = os.path.split(os.path.abspath(path))
    parts = (*Path(os.path.realpath(parent)).parts, name)
    if VERSIONS_DIR in parts:
        outside = Path(*parts[: parts.index(VERSIONS_DIR)])
        found = f"lies in {outside / VERSIONS_DIR}, which is for versions of caches only"
        raise CacheError(path, found, remedy=f"Name a folder elsewhere, such as {outside / 'NAME'}", code="E704")


def version_name(folder: Path) -> str:
    """Return the public path and version of a version's folder, or another folder's path: one printable line."""
    public = public_path(folder)
    kind = "" if folder.name.startswith((BUILDING, PARTITIONS)) else "version "
    return printable(shown(folder) if public is None else f"{public} ({kind}{folder.name})")


@contextmanager
def build_lock(path: PathLike, *, wait: bool = False) -> Iterator[Path]:
    """Lock the cache at `path` against other builders; yield the versions folder.

    wait: wait without a limit while another process builds.
    Raises: CacheError E503 with the other builder, unless `wait`; CacheError E205 if `.versions` is a link; and the
        other errors of `file_lock`.
    """
    folder = versions_dir(path)
    for link in (folder.parent, folder):
        if link.is_symlink():
            raise link_in_the_way(link, "a folder: nothing is written through links")
    with locks.file_lock(folder / LOCK_NAME, path, _BUILT, wait=wait):
        yield folder


def refuse_if_building(path: PathLike) -> None:
    """Raise CacheError E503 if another process builds the cache at `path`. Writes nothing, and keeps no lock."""
    locks.refuse_if_held(versions_dir(path) / LOCK_NAME, path, _BUILT)


@contextmanager
def building(path: PathLike, *, wait: bool = False) -> Iterator[Path]:
    """Lock the cache at `path` and yield an empty folder for a build that is not resumed. On failure it is removed.

    The cache at `path` stays readable until `commit`. wait: see `build_lock`.
    Raises: CacheError E504 if other files are at `path`; the errors of `build_lock`.
    """
    refuse_foreign(path)
    with build_lock(path, wait=wait) as folder:
        _discard_dead(folder)
        fileio.remove(folder / BUILDING)
        # Under a lease, a name of its own: a process that was stopped may still write beside the one that took over.
        name = (
            f"{BUILDING}-{os.urandom(VERSION_DIGITS // 2).hex()}" if locks.is_leased(folder / LOCK_NAME) else BUILDING
        )
        work = folder / name
        fileio.make_dir(work)
        process = os.getpid()
        try:
            yield work
        except Exception:
            locks.check_lease(folder / LOCK_NAME)  # a lost lease explains the error: the taker removed this folder
            raise
        finally:
            if os.getpid() == process:  # not in a forked child
                fileio.remove(work)


@contextmanager
def resumable(path: PathLike, key: str, *, wait: bool = False) -> Iterator[tuple[Path, Path]]:
    """Lock the cache at `path`; yield the folders of a build and of its journal, as the last run left them.

    key: a hash of everything that decides the bytes. A build with another key has other folders, which stay.
    wait: see `build_lock`.
    Both folders are removed when the block succeeds. On failure they stay for the next run if there is a journal.
    Raises: CacheError E205 if one of them is a link; the errors of `building`.
    """
    refuse_foreign(path)
    with build_lock(path, wait=wait) as folder:
        _discard_dead(folder)
        work = folder / f"{BUILDING}-{key[:VERSION_DIGITS]}"
        journal = work.with_name(work.name + JOURNAL_SUFFIX)
        for path_of in (work, journal):
            if path_of.is_symlink():
                raise link_in_the_way(path_of, "the folder of a build")
        if not (journal / JOURNAL_NAME).is_file():  # killed before the first checkpoint, or to be built from scratch
            _remove_build(work, journal)
        process = os.getpid()
        try:
            fileio.make_dir(journal)
            for above in (folder, folder.parent, folder.parent.parent):  # a killed run may have made them
                fileio.fsync_dir(above)
            if locks.is_leased(folder / LOCK_NAME):
                fileio.renew(journal)  # a process that lost its lease may still write to its open files
            yield work, journal
        except BaseException:
            if (
                os.getpid() == process
                and not locks.is_lost(folder / LOCK_NAME)
                and not (journal / JOURNAL_NAME).is_file()
            ):
                _remove_build(work, journal)
            raise
        if os.getpid() == process:
            locks.check_lease(folder / LOCK_NAME)
            _remove_build(work, journal)


def _remove_build(work: Path, journal: Path) -> None:
    discard(journal)
    fileio.remove(work)


def clear_leftovers(path: PathLike) -> None:
    """Remove the useless files (`_dead`) that killed processes left of the cache at `path`.

    Writes nothing if there are none, if another process builds, or without permission. Never raises for these.
    """
    folder = versions_dir(path)
    with suppress(CacheError, OSError):
        if _dead(folder) or (folder / LOCK_NAME).stat().st_size:  # releasing the lock removes its text
            with build_lock(path):
                _discard_dead(folder)


def _discard_dead(folder: Path) -> None:
    for entry in _dead(folder):
        discard(entry)


def _dead(folder: Path) -> list[Path]:
    """Return half-written files, and folders of builds whose journal is gone. The build lock is held.

    Builders of this project made them, and they are useless: the journal of a finished build is removed first.
    """
    dead = []
    for entry in folder.iterdir():
        if BUILD_NAME.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            journal = entry.with_name(entry.name.removesuffix(JOURNAL_SUFFIX) + JOURNAL_SUFFIX) / JOURNAL_NAME
            dead += [] if os.path.lexists(journal) or not _has_builders_files_only(entry) else [entry]
        elif is_half_written(entry) and entry.is_file() and not entry.is_symlink():
            dead.append(entry)
        elif _PARTITIONS.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            left = list(entry.iterdir())
            half = [file for file in left if is_half_written(file) and not file.is_symlink()]
            dead += [entry] if len(half) == len(left) else half  # killed before plan.json was there
        elif VERSION_NAME.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            dead += [file for file in entry.iterdir() if is_half_written(file) and not file.is_symlink()]
    return sorted(dead, key=journals_first)


def journals_first(entry: Path) -> tuple[bool, str]:
    """Return a sort key that puts the journals of builds before the other entries of a versions folder."""
    return entry.suffix != JOURNAL_SUFFIX, entry.name


def is_half_written(entry: Path) -> bool:
    """Whether a file's name is one of `write_bytes` before its rename: a process was killed while it wrote it."""
    return _HALF_WRITTEN.fullmatch(entry.name) is not None


def _has_builders_files_only(folder: Path) -> bool:
    names = (name.rpartition("/")[2] for name in _names_below(folder))
    return all(_BUILDERS_FILE.fullmatch(name) or _HALF_WRITTEN.fullmatch(name) for name in names)


def discard_unfinished(folder: Path) -> None:
    """Remove every unfinished build in the versions folder of a cache, also partitions. `build_lock` is held.

    Raises: CacheError E503 while a partition is being built; nothing is removed then.
    """
    entries = sorted(folder.iterdir(), key=journals_first)
    plans = [entry for entry in entries if is_plan(entry)]
    for plan in plans:
        refuse_if_partition_is_built(plan)
    for entry in entries:
        if BUILD_NAME.fullmatch(entry.name) or entry in plans:
            discard(entry)


def is_plan(folder: Path) -> bool:
    """Whether a folder holds the partitions of a cache: it has a plan.json that a build of this project wrote."""
    if not _PARTITIONS.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
        return False
    try:
        plan = parse_object(read_regular(folder / PLAN_NAME, MAX_PLAN_BYTES))
    except (OSError, ValueError):
        return False
    begins = str(plan.get("fingerprint")).startswith(folder.name.removeprefix(f"{PARTITIONS}-"))
    return plan.get("kind") == PLAN_KIND and begins


def refuse_if_partition_is_built(plan: Path, *, dry_run: bool = False) -> None:
    """Raise CacheError E503 while a process builds a partition in the folder of a plan.

    dry_run: write nothing; a lease that may have run out counts as held.
    """
    # Otherwise it is watched, and removed if it has run out. Nobody else would: a machine may have died after it had
    # committed its partition.
    refuse = locks.refuse_if_held if dry_run else locks.refuse_while_held
    inner = plan / VERSIONS_DIR
    for folder in [] if inner.is_symlink() else sorted(inner.glob("*")):  # a lease leaves no file in it
        refuse(folder / LOCK_NAME, plan / folder.name, _BUILT)


def discard(path: Path) -> None:
    """Remove a file or folder that `removable` lists."""
    # The order makes a killed removal recognizable: plan.json goes after the partitions, so the folder still names its
    # cache; a journal goes before the files that it describes, so what is left is dead and not a build to resume.
    if is_plan(path):
        for entry in path.iterdir():
            if entry.name != PLAN_NAME:
                fileio.remove(entry)
        fileio.fsync_dir(path)
    if path.suffix == JOURNAL_SUFFIX and path.is_dir() and not path.is_symlink():
        fileio.remove(path / JOURNAL_NAME)
        fileio.fsync_dir(path)
    fileio.remove(path)


def commit(work: Path, path: PathLike, content_sha256: str) -> Path:
    """Make the finished folder `work` the cache at `path`, atomically; return the version's folder (D11).

    One rename(2) moves the public name from the old version to the new one, so a reader sees one of them, never a
    mixture and never nothing. Exceptions: a real folder at `path`, and a damaged version with the same content, are
    moved away just before. Older versions stay for their readers. If a call was killed after it renamed `work`, the
    next call finishes it.
    Raises: CacheError E504 if other files are at `path`; CacheError E512 if the lease was lost; OSError.
    """
    version = store(work, path, content_sha256)
    publish(version, path)
    return version


def store(work: Path, path: PathLike, content_sha256: str) -> Path:
    """Make the finished folder `work` a version of the cache at `path`. Readers still open the committed version."""
    public = Path(os.path.abspath(path))
    folder = versions_dir(public)
    if not SHA256_DIGITS.fullmatch(content_sha256):
        raise CacheError(work / META_NAME, f"content_sha256 is {content_sha256!r:.80}", "64 hex digits", code="E202")
    version = folder / content_sha256[:VERSION_DIGITS]
    refuse_foreign(public)  # again: files may have appeared during a long build
    if work.is_dir():
        fileio.sync_tree(work)  # before any name points to it; that may take long, so the lease is checked afterwards
        locks.check_lease(folder / LOCK_NAME)
        if (version / META_NAME).exists() and _same_files(work, version):
            write_bytes(version / META_NAME, read_regular(work / META_NAME))  # equal content, another description
            os.utime(version)  # make it the newest
        else:
            fileio.remove(folder / DAMAGED)
            if version.exists():  # damaged: its readers find good files at the same paths from now on
                fileio.rename(version, folder / DAMAGED)
            fileio.rename(work, version)
    fileio.remove(folder / DAMAGED)
    for file in filter(is_half_written, version.iterdir()):
        fileio.remove(file)
    return version


def publish(version: Path, path: PathLike) -> None:
    """Point the public name of the cache at `path` to one of its versions. `build_lock` is held."""
    public = Path(os.path.abspath(path))
    folder = versions_dir(public)
    locks.check_lease(folder / LOCK_NAME)
    _make_way(public, folder)
    link = folder / LINK
    if os.path.lexists(link) and not link.is_symlink():
        raise CacheError(link, "not made by a commit", "the link of a commit, or nothing", "Move it away", code="E504")
    # A symlink cannot be replaced in place: make another one, and rename it over the public name.
    fileio.remove(link)
    fileio.symlink(Path(VERSIONS_DIR) / public.name / version.name, link)
    locks.check_lease(folder / LOCK_NAME)
    fileio.rename(link, public)
    note_built_again(public)


class FailedChecks(NamedTuple):
    """Checks of the committed version that have failed, by name, in the file failed.json."""

    repairable: frozenset[str] = frozenset()
    """Since the version was built: the next build makes it again."""
    in_vain: frozenset[str] = frozenset()
    """Before and after a build of the same content: another one does not help."""


def failed_checks(path: PathLike) -> FailedChecks:
    """Return the checks of the committed version that have failed and not passed since."""
    failed, built_for = _failures(path, committed_version(path))
    return FailedChecks(frozenset(failed - built_for), frozenset(failed & built_for))


def committed_version(path: PathLike) -> str | None:
    """Return the name of the version that the public name links to; None without one."""
    with suppress(OSError):
        return os.path.basename(os.readlink(path))
    return None


def note_check(path: PathLike, version: str | None, name: str, *, has_failed: bool) -> None:
    """Record that a check of a version has failed or passed. Does nothing if that is known, or for another version.

    name: of a check whose failure a build from scratch may repair. Raises: as `build_lock`; OSError.
    """

    def with_it() -> tuple[set[str], set[str]]:
        failed, built_for = _failures(path, version)
        return (failed | {name}, built_for) if has_failed else (failed - {name}, built_for - {name})

    if version is None or with_it() == _failures(path, version):
        return
    with build_lock(path):
        if committed_version(path) == version:
            _write_failures(path, version, *with_it())


def note_built_again(path: PathLike) -> None:
    """Record that the committed version was just built, or mended. `build_lock` is held."""
    version = committed_version(path)
    failed, built_for = _failures(path, version)
    if version is not None and os.path.lexists(versions_dir(path) / FAILED_NAME):
        _write_failures(path, version, set(), failed | built_for)


def _failures(path: PathLike, version: str | None) -> tuple[set[str], set[str]]:
    """Return the checks that have failed since a version was built, and those for which it was built again."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        found = parse_object(read_regular(versions_dir(path) / FAILED_NAME))
        if found["version"] == version:
            return set(map(str, found["failed"])), set(map(str, found["built_again_for"]))
    return set(), set()


def _write_failures(path: PathLike, version: str, failed: set[str], built_for: set[str]) -> None:
    file = versions_dir(path) / FAILED_NAME
    if failed or built_for:
        content = {"built_again_for": sorted(built_for), "failed": sorted(failed), "version": version}
        write_bytes(file, canonical_json(content))
    else:
        fileio.remove(file)


def _same_files(left: Path, right: Path) -> bool:
    sizes = _sizes(left)
    if sizes != _sizes(right):
        return False
    try:
        return all(sha256_regular(left / name) == sha256_regular(right / name) for name in sizes)
    except CacheError:  # not a regular file
        return False


def _sizes(root: Path) -> dict[str, int]:
    names = (name for name in _names_below(root) if name != META_NAME and not is_half_written(Path(name)))
    return {name: (root / name).lstat().st_size for name in names}


def _names_below(root: Path) -> set[str]:
    """Return the relative names of everything below a folder except folders."""
    return {"/".join(names) for _, names, about in fileio.walked(root) if not stat.S_ISDIR(about.st_mode)}


def refuse_foreign(path: PathLike) -> None:
    """Raise CacheError E504 if a commit to `path` would replace something other than a cache.

    A commit replaces a symlink, an empty folder, and a folder with only the files that its meta.json names.
    """
    public = Path(path)
    try:
        mode = public.lstat().st_mode  # once: another process may commit a link just now
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        return
    if not stat.S_ISDIR(mode):
        raise CacheError(
            public, "is a file", "a cache folder or nothing", "Move it away, then build again", code="E504"
        )
    names = _names_below(public)
    if not names:
        return
    foreign = sorted(names - _named_files(public))
    if foreign:
        found = f"contains {len(foreign)} files that do not belong to a cache (such as {foreign[0]})"
        raise CacheError(public, found, remedy="Move the folder away, then build again", code="E504")


def _named_files(public: Path) -> set[str]:
    try:
        meta = parse_object(read_regular(public / META_NAME))
        return {META_NAME, "spm.model", *(str(record["name"]) for record in file_records(meta))}
    except FileNotFoundError:
        return set()
    except ValueError as error:
        found = f"is not a cache's meta.json ({error})"
        raise CacheError(public / META_NAME, found, remedy="Move the folder away", code="E504") from error


def _make_way(public: Path, folder: Path) -> None:
    """Move a real folder at the public path to the versions. `refuse_foreign` has checked it."""
    if public.is_symlink() or not public.exists():
        return
    if not _names_below(public):
        fileio.remove(public)
        return
    content = str(parse_object(read_regular(public / META_NAME)).get("content_sha256"))
    version = folder / content[:VERSION_DIGITS]
    if not SHA256_DIGITS.fullmatch(content):  # untrusted: not part of a file name
        free = (folder / f"adopted{number}" for number in itertools.count())
        fileio.rename(public, next(path for path in free if not path.exists()))
    elif (version / META_NAME).is_file() and _same_files(public, version):
        write_bytes(version / META_NAME, read_regular(public / META_NAME))
        fileio.remove(public)
    else:
        if version.exists():  # with other files: damaged
            fileio.rename(version, folder / DAMAGED)
        fileio.rename(public, version)
        fileio.remove(folder / DAMAGED)


def versions_below(folder: Path) -> list[Path]:
    """Return the folders below `folder` that may contain the versions of a cache, sorted. Follows no links.

    Leaves out partitions, which are parts of an unfinished build.
    """
    found: list[Path] = []
    waiting = [os.fspath(folder)]
    while waiting:
        parent = waiting.pop()
        try:
            with os.scandir(parent) as entries:
                folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:  # not readable, or its path is too long
            continue
        if os.path.basename(parent) == VERSIONS_DIR:
            found += map(Path, folders)
        waiting += (each for each in folders if not is_plan(Path(each)))
    return sorted(found)


class Leftover(NamedTuple):
    """A file or folder in a versions folder that the cache does not need."""

    path: Path
    why: str
    is_ours: bool
    """Whether this project made it. gc removes nothing else."""


def removable(path: PathLike, kinds: Collection[str] = KINDS) -> list[tuple[Path, str]]:
    """Return the files and folders that gc may remove for the cache at `path`, each with the reason.

    These are the `leftovers` that this project made. Hold `build_lock`.
    """
    return [(entry.path, entry.why) for entry in leftovers(path, kinds) if entry.is_ours]


def leftovers(path: PathLike, kinds: Collection[str] = KINDS) -> list[Leftover]:
    """Return all versions of the cache at `path` except the two newest, and the rest of dead builds (D11).

    The committed version always stays. Hold `build_lock`, or a build in progress looks dead. A reader may have an old
    version open: see `niels_gpt.storage.locks.unless_held`.
    kinds: `kind` in the meta.json of this project's caches.

    This project made an entry if its content proves it: a version has a meta.json of a known kind, and is named after
    its content; a journal begins with a builder's first line, and lies beside its build. Entries without such content,
    such as building, count as ours if the folder also has one that is proven, or a recipe.json.
    """
    folder = versions_dir(path)
    if folder.is_symlink() or folder.parent.is_symlink():
        return []  # the folder belongs to another cache
    names = (entry for entry in folder.parent.parent.iterdir() if entry.is_symlink())
    committed = {os.path.normpath(name.parent / os.readlink(name)) for name in names}
    entries = sorted(folder.iterdir(), key=journals_first)
    marked = {entry for entry in entries if _is_marked(entry, kinds)}
    found: list[Leftover] = []
    versions: list[Path] = []
    for entry in entries:
        if BUILD_NAME.fullmatch(entry.name) and (entry.suffix or Path(f"{entry}{JOURNAL_SUFFIX}") in entries):
            what = "its journal" if entry.suffix == JOURNAL_SUFFIX else "the same build would resume from it"
            found.append(Leftover(entry, f"an unfinished build: {what}", bool(marked)))
        elif _is_partitions(entry):
            found.append(Leftover(entry, "an unfinished build: its partitions", entry in marked))
        elif entry.name == ATTEMPTS_NAME and entry.is_file() and not entry.is_symlink():
            found.append(Leftover(entry, "of unfinished builds", bool(marked)))
        elif (
            entry.name in (BUILDING, DAMAGED)
            or BUILD_NAME.fullmatch(entry.name)
            or is_half_written(entry)
            or (entry.name == LINK and entry.is_symlink())
        ):
            found.append(Leftover(entry, _KILLED, bool(marked)))
        elif entry in marked and VERSION_NAME.fullmatch(entry.name):
            versions.append(entry)
            found += [Leftover(file, _KILLED, True) for file in entry.iterdir() if is_half_written(file)]
        elif VERSION_NAME.fullmatch(entry.name) and not entry.is_symlink() and os.path.lexists(entry / META_NAME):
            if _ADOPTED.fullmatch(entry.name) and marked and (entry / META_NAME).is_file():
                versions.append(entry)
            else:
                found.append(Leftover(entry, "a version", False))
    versions.sort(key=lambda entry: entry.lstat().st_mtime_ns)
    older = [entry for entry in versions if str(entry) not in committed]
    return found + [Leftover(entry, "an old version", True) for entry in older[: max(0, len(older) - 1)]]


def _is_partitions(entry: Path) -> bool:
    return entry.name.startswith(f"{PARTITIONS}-") and entry.is_dir() and not entry.is_symlink()


def _is_marked(entry: Path, kinds: Collection[str]) -> bool:
    """Return whether the content of an entry of a versions folder proves that this project made it."""
    try:
        if entry.name == RECIPE_NAME:
            return {"fingerprint", "meta_sha256", "version"} <= parse_object(read_regular(entry)).keys()
        if entry.is_symlink() or not entry.is_dir():
            return False
        if _is_partitions(entry):
            return is_plan(entry)
        if entry.suffix == JOURNAL_SUFFIX and BUILD_NAME.fullmatch(entry.name):
            return is_journal(entry / JOURNAL_NAME)
        if not VERSION_NAME.fullmatch(entry.name):
            return False
        meta = parse_object(read_regular(entry / META_NAME))
    except (OSError, ValueError):
        return False
    content = str(meta.get("content_sha256"))
    named = content.startswith(entry.name) or _ADOPTED.fullmatch(entry.name) is not None
    return meta.get("kind") in kinds and named and SHA256_DIGITS.fullmatch(content) is not None


def is_journal(path: Path) -> bool:
    """Return whether a file begins with the first line of a build's journal.

    Raises: FileNotFoundError; CacheError E203 or E205 if `open_regular` refuses it.
    """
    with open(open_regular(path), "rb") as file:
        line = file.readline(_MAX_LINE)
    if line[-1:] != b"\n" or line[:9] != f"{zlib.crc32(line[9:-1]):08x} ".encode():
        return False
    return {"identity", "journal_version"} <= parse_object(line[9:]).keys()
