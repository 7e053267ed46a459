"""Versioned caches: whatever stands at a public path is complete, and a build replaces it in one step.

A cache at PATH is a relative symlink to a finished version. The tokens of a version never change; its meta.json is
replaced, atomically, when the same tokens are described anew:

    <parent>/NAME                          -> .versions/NAME/<content sha256, 12 digits>
    <parent>/.versions/NAME/<sha12>/       a finished version; its meta.json was written last
    <parent>/.versions/NAME/building-KEY/          a build in progress, or a dead one that the next run goes on with
    <parent>/.versions/NAME/building-KEY.journal/  how far it has come
    <parent>/.versions/NAME/adoptedN/      a folder of another origin that stood at PATH
    <parent>/.versions/NAME/recipe.json    which recipe made the committed version
    <parent>/.versions/NAME/lock           flock(2)ed while somebody builds; its text says who
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from niels_gpt import fileio
from niels_gpt.fileio import META_NAME, CacheError, sha256_file, write_bytes
from niels_gpt.locks import file_lock
from niels_gpt.records import file_records, parse_object, read_regular

VERSIONS_DIR = ".versions"
VERSION_DIGITS = 12
BUILDING = "building"
DAMAGED = "damaged"
LINK = "link"
JOURNAL_SUFFIX = ".journal"
JOURNAL_NAME = "journal.jsonl"
_SHA256 = re.compile("[0-9a-f]{64}")
_BUILD = re.compile(r"building-[0-9a-f]{12}(\.journal)?")
_VERSION = re.compile(r"[0-9a-f]{12}|adopted\d+")


def versions_dir(path: str | os.PathLike[str]) -> Path:
    """Return the folder that keeps the versions, the lock and the recipe record of the cache at `path`."""
    public = Path(os.path.abspath(path))
    return public.parent / VERSIONS_DIR / public.name


def public_path(version: Path) -> Path | None:
    """Return the path that the folder of a version was committed to; None for a folder that is no version."""
    names = version.parent
    return names.parent.parent / names.name if names.parent.name == VERSIONS_DIR else None


def shown(folder: Path) -> str:
    """Return the name of a cache for people: its public path and the version, where it is one."""
    public = public_path(folder)
    return str(folder) if public is None else f"{public} (version {folder.name})"


@contextmanager
def build_lock(path: str | os.PathLike[str], *, wait: bool = False) -> Iterator[Path]:
    """Hold the only right to build the cache at `path`; yields the versions folder. The rest is as in `file_lock`."""
    folder = versions_dir(path)
    with file_lock(folder / "lock", f"{os.fspath(path)}: is being built", wait=wait):
        yield folder


@contextmanager
def building(path: str | os.PathLike[str], *, wait: bool = False) -> Iterator[Path]:
    """Lock the cache at `path` and yield an empty folder to build it in; on failure that folder is removed.

    For what is made in one go. Whatever stands at `path` stays as it is, and readable, until `commit`. wait: as in
    `build_lock`.
    """
    refuse_foreign(path)
    with build_lock(path, wait=wait) as folder:
        work = folder / BUILDING
        fileio.remove(work)
        fileio.make_dir(work)
        process = os.getpid()
        try:
            yield work
        finally:
            if os.getpid() == process:  # a forked child that ends here has nothing to clear up
                fileio.remove(work)


@contextmanager
def resumable(path: str | os.PathLike[str], key: str) -> Iterator[tuple[Path, Path]]:
    """Lock the cache at `path`; yield the folder of the build `key` and the folder of its journal, as they were left.

    key: stands for everything that decides the bytes. The build of another key has other folders and is left alone.
    Both folders go when the block ends well. On failure they stay, for the next run to go on, if there is a journal.
    """
    refuse_foreign(path)
    with build_lock(path) as folder:
        work = folder / f"{BUILDING}-{key[:VERSION_DIGITS]}"
        journal = work.with_name(work.name + JOURNAL_SUFFIX)
        for path_of in (work, journal):
            if path_of.is_symlink():
                raise CacheError(f"{path_of}: a link, expected a folder of a build. Remove it")
        if not (journal / JOURNAL_NAME).is_file():  # killed before the first record, or told to begin anew
            _remove_build(work, journal)
        process = os.getpid()
        try:
            fileio.make_dir(journal)
            for above in (folder, folder.parent, folder.parent.parent):  # they may have been made by a killed run
                fileio.fsync_dir(above)
            yield work, journal
        except BaseException:
            if os.getpid() == process and not (journal / JOURNAL_NAME).is_file():
                _remove_build(work, journal)
            raise
        if os.getpid() == process:  # and is no forked child's
            _remove_build(work, journal)


def _remove_build(work: Path, journal: Path) -> None:
    discard(journal)
    fileio.remove(work)


def discard(path: Path) -> None:
    """Remove what `removable` names. The journal of a build goes before what it speaks of, at whatever moment."""
    if path.suffix == JOURNAL_SUFFIX and path.is_dir() and not path.is_symlink():
        fileio.remove(path / JOURNAL_NAME)
        fileio.fsync_dir(path)
    fileio.remove(path)


def commit(work: Path, path: str | os.PathLike[str], content_sha256: str) -> Path:
    """Make the finished folder `work` the cache at `path`, atomically; returns the version's folder.

    The public name goes from the old version to the new one in one rename(2), so a reader finds one of them, never a
    mixture and never nothing; only a real folder in the way, and a damaged version of the same content, are moved aside
    a moment before. Older versions stay: a reader that holds one is not disturbed. Where an earlier call was killed
    after it had renamed `work`, this one goes on from there.
    """
    public = Path(os.path.abspath(path))
    folder = versions_dir(public)
    if not _SHA256.fullmatch(content_sha256):
        raise CacheError(f"{work / META_NAME}: content_sha256 is {content_sha256!r:.80}, expected 64 hex digits")
    version = folder / content_sha256[:VERSION_DIGITS]
    refuse_foreign(public)  # again: a build takes long, and somebody may have put something there
    if work.is_dir():
        fileio.sync_tree(work)
        if (version / META_NAME).exists() and _same_files(work, version):
            write_bytes(version / META_NAME, (work / META_NAME).read_bytes())  # equal content, described anew
            os.utime(version)  # the newest again
        else:
            fileio.remove(folder / DAMAGED)
            if version.exists():  # and files are missing, cut or changed: its readers find good ones at the same paths
                fileio.rename(version, folder / DAMAGED)
            fileio.rename(work, version)
    fileio.remove(folder / DAMAGED)
    for left in filter(_is_leftover, version.iterdir()):
        fileio.remove(left)
    _make_way(public, folder)
    link = folder / LINK
    fileio.remove(link)
    fileio.symlink(Path(VERSIONS_DIR) / public.name / version.name, link)
    fileio.rename(link, public)
    return version


def removable(path: str | os.PathLike[str]) -> list[tuple[Path, str]]:
    """Return what the cache at `path` no longer needs, and why: all versions but the two newest, and dead builds (D11).

    The committed version always stays. Call it with `build_lock` held, or a build in progress looks dead. Whether a
    reader has an old version open is not asked here: see `niels_gpt.locks.unless_held`.
    """
    folder = versions_dir(path)
    if folder.is_symlink() or folder.parent.is_symlink():
        return []  # another cache's
    names = (entry for entry in folder.parent.parent.iterdir() if entry.is_symlink())
    committed = {os.path.normpath(name.parent / os.readlink(name)) for name in names}
    found: list[tuple[Path, str]] = []
    versions: list[Path] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: (entry.suffix != JOURNAL_SUFFIX, entry.name)):
        if _BUILD.fullmatch(entry.name):
            what = "its journal" if entry.suffix == JOURNAL_SUFFIX else "the same build would go on with it"
            found.append((entry, f"an unfinished build: {what}"))
        elif entry.name in (BUILDING, DAMAGED) or (entry.name == LINK and entry.is_symlink()) or _is_leftover(entry):
            found.append((entry, "left by a process that was killed"))
        elif _VERSION.fullmatch(entry.name) and (entry / META_NAME).is_file() and not entry.is_symlink():
            versions.append(entry)
            found += [(file, "left by a process that was killed") for file in entry.iterdir() if _is_leftover(file)]
    versions.sort(key=lambda entry: entry.stat().st_mtime_ns)
    older = [entry for entry in versions if str(entry) not in committed]  # under whatever name
    return found + [(entry, "an old version") for entry in older[: max(0, len(older) - 1)]]


def _is_leftover(entry: Path) -> bool:
    return entry.name.startswith(".") and entry.suffix == ".tmp"  # of fileio.write_bytes


def _same_files(left: Path, right: Path) -> bool:
    sizes = _sizes(left)
    if sizes != _sizes(right) or any((right / name).is_symlink() for name in sizes):
        return False
    return all(sha256_file(left / name) == sha256_file(right / name) for name in sizes)


def _sizes(root: Path) -> dict[str, int]:
    names = (name for name in _names_below(root) if name != META_NAME and not _is_leftover(Path(name)))
    return {name: (root / name).lstat().st_size for name in names}


def _names_below(root: Path) -> set[str]:
    """Return the relative names of files and links below a folder; os.walk takes a link to a folder for a folder."""
    found = (Path(where, name) for where, folders, files in os.walk(root) for name in [*folders, *files])
    return {str(path.relative_to(root)) for path in found if path.is_symlink() or not path.is_dir()}


def refuse_foreign(path: str | os.PathLike[str]) -> None:
    """Raise CacheError if a commit to `path` would put away something that is not a cache.

    Ours: nothing, a symlink, an empty folder, or a folder that holds only the files that its meta.json names.
    """
    public = Path(path)
    if public.is_symlink() or not public.exists():
        return
    if not public.is_dir():
        raise CacheError(f"{public}: is a file, expected a cache folder or nothing. Move it away, then build again")
    found = _names_below(public)
    if not found:
        return
    strangers = sorted(found - _named_files(public))
    if strangers:
        raise CacheError(
            f"{public}: holds {len(strangers)} files that no cache put there (such as {strangers[0]}). "
            "Move the folder away, then build again"
        )


def _named_files(public: Path) -> set[str]:
    try:
        meta = parse_object(read_regular(public / META_NAME))
        return {META_NAME, "spm.model", *(str(record["name"]) for record in file_records(meta))}
    except FileNotFoundError:
        return set()
    except ValueError as error:
        raise CacheError(f"{public / META_NAME}: is not a cache's meta.json ({error}). Move the folder away") from error


def _make_way(public: Path, folder: Path) -> None:
    """Adopt a real folder in the way as a version of its own; `refuse_foreign` has looked at it."""
    if public.is_symlink() or not public.exists():
        return
    if not _names_below(public):
        fileio.remove(public)
        return
    content = str(parse_object(read_regular(public / META_NAME)).get("content_sha256"))
    version = folder / content[:VERSION_DIGITS]
    if not _SHA256.fullmatch(content):  # a name from a file that anybody may have written
        numbers = itertools.count()
        free = (folder / f"adopted{number}" for number in numbers)
        fileio.rename(public, next(path for path in free if not path.exists()))
    elif (version / META_NAME).is_file() and _same_files(public, version):
        write_bytes(version / META_NAME, (public / META_NAME).read_bytes())
        fileio.remove(public)
    else:
        if version.exists():  # of the same name, and damaged
            fileio.rename(version, folder / DAMAGED)
        fileio.rename(public, version)
        fileio.remove(folder / DAMAGED)
