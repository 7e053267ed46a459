"""Versioned caches: whatever stands at a public path is complete, and a build replaces it in one step.

A cache at PATH is a relative symlink to a finished version. The tokens of a version never change; its meta.json is
replaced, atomically, when the same tokens are described anew:

    <parent>/NAME                          -> .versions/NAME/<content sha256, 12 digits>
    <parent>/.versions/NAME/<sha12>/       a finished version; its meta.json was written last
    <parent>/.versions/NAME/building-KEY/          a build in progress, or a dead one that the next run goes on with
    <parent>/.versions/NAME/building-KEY.journal/  how far it has come
    <parent>/.versions/NAME/adoptedN/      a folder of another origin that stood at PATH
    <parent>/.versions/NAME/attempts.json  how many runs of an unfinished build have gained nothing; for a warning
    <parent>/.versions/NAME/recipe.json    which recipe made the committed version
    <parent>/.versions/NAME/lock           flock(2)ed while somebody builds; its text says who
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from niels_gpt import fileio
from niels_gpt.fileio import META_NAME, CacheError, write_bytes
from niels_gpt.locks import file_lock, refuse_if_held
from niels_gpt.records import file_records, open_regular, parse_object, read_regular, sha256_regular

VERSIONS_DIR = ".versions"
VERSION_DIGITS = 12
BUILDING = "building"
DAMAGED = "damaged"
LINK = "link"
JOURNAL_SUFFIX = ".journal"
JOURNAL_NAME = "journal.jsonl"
ATTEMPTS_NAME = "attempts.json"
"""Beside the versions, during a build: how many runs of it have gained nothing."""
_SHA256 = re.compile("[0-9a-f]{64}")
_BUILD = re.compile(r"building-[0-9a-f]{12}(\.journal)?")
_HALF_WRITTEN = re.compile(r"\.(recipe|meta)\.json\.[0-9a-f]{8}\.tmp")  # by fileio.write_bytes
_BUILDERS_FILE = re.compile(r"[a-z0-9_]+\.(bin|npy|txt|json|jsonl)")
_VERSION = re.compile(r"[0-9a-f]{12}|adopted\d+")
_ADOPTED = re.compile(r"adopted\d+")
_LEFTOVER = re.compile(r"\.(meta|recipe)\.json\.[0-9a-f]{8}\.tmp")
_MAX_LINE = 1 << 24  # of a journal
RECIPE_NAME = "recipe.json"
KINDS = ("pretrain", "sft", "tokenizer", "eagle3")
"""Of caches, as their meta.json has it."""


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
    for link in (folder.parent, folder):
        if link.is_symlink():
            raise CacheError(f"{link}: a symbolic link, expected a folder: nothing is written behind links. Remove it")
    with file_lock(folder / "lock", _being_built(path), wait=wait):
        yield folder


def refuse_if_building(path: str | os.PathLike[str]) -> None:
    """Raise CacheError where somebody builds the cache at `path`; nothing is written, and no lock is held after it."""
    refuse_if_held(versions_dir(path) / "lock", _being_built(path))


def _being_built(path: str | os.PathLike[str]) -> str:
    return f"{os.fspath(path)}: is being built"


@contextmanager
def building(path: str | os.PathLike[str], *, wait: bool = False) -> Iterator[Path]:
    """Lock the cache at `path` and yield an empty folder to build it in; on failure that folder is removed.

    For what is made in one go. Whatever stands at `path` stays as it is, and readable, until `commit`. wait: as in
    `build_lock`.
    """
    refuse_foreign(path)
    with build_lock(path, wait=wait) as folder:
        _clear(folder)
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
        _clear(folder)
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


def clear_leftovers(path: str | os.PathLike[str]) -> None:
    """Remove what killed processes have left of the cache at `path`, and nobody needs: see `_dead`.

    For who has nothing to build. Without such a thing nothing is written, and where somebody builds, or the folder is
    not to be written to, it stays.
    """
    folder = versions_dir(path)
    with suppress(CacheError, OSError):
        if _dead(folder) or (folder / "lock").stat().st_size:  # its text goes when the lock is let go
            with build_lock(path):
                _clear(folder)


def _clear(folder: Path) -> None:
    for entry in _dead(folder):
        discard(entry)


def _dead(folder: Path) -> list[Path]:
    """Return what is certainly a builder's and of no use, where nobody builds: half-written files, and what is left of
    a build whose journal is gone, which goes first when a build has ended."""
    found = []
    for entry in folder.iterdir():
        if _BUILD.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            journal = entry.with_name(entry.name.removesuffix(JOURNAL_SUFFIX) + JOURNAL_SUFFIX) / JOURNAL_NAME
            found += [] if os.path.lexists(journal) or not _only_ours(entry) else [entry]
        elif _HALF_WRITTEN.fullmatch(entry.name) and entry.is_file() and not entry.is_symlink():
            found.append(entry)
        elif _VERSION.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            found += [file for file in entry.iterdir() if _HALF_WRITTEN.fullmatch(file.name) and not file.is_symlink()]
    return sorted(found, key=lambda entry: (entry.suffix != JOURNAL_SUFFIX, entry.name))


def _only_ours(folder: Path) -> bool:
    names = (name.rpartition("/")[2] for name in _names_below(folder))
    return all(_BUILDERS_FILE.fullmatch(name) or _HALF_WRITTEN.fullmatch(name) for name in names)


def discard_unfinished(folder: Path) -> None:
    """Remove every unfinished build in the versions folder of a cache, whose lock is held."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.suffix != JOURNAL_SUFFIX):
        if _BUILD.fullmatch(entry.name):
            discard(entry)


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
    version = store(work, path, content_sha256)
    publish(version, path)
    return version


def store(work: Path, path: str | os.PathLike[str], content_sha256: str) -> Path:
    """Make the finished folder `work` a version of the cache at `path`, whose readers still find the one before."""
    public = Path(os.path.abspath(path))
    folder = versions_dir(public)
    if not _SHA256.fullmatch(content_sha256):
        raise CacheError(f"{work / META_NAME}: content_sha256 is {content_sha256!r:.80}, expected 64 hex digits")
    version = folder / content_sha256[:VERSION_DIGITS]
    refuse_foreign(public)  # again: a build takes long, and somebody may have put something there
    if work.is_dir():
        fileio.sync_tree(work)
        if (version / META_NAME).exists() and _same_files(work, version):
            write_bytes(version / META_NAME, read_regular(work / META_NAME))  # equal content, described anew
            os.utime(version)  # the newest again
        else:
            fileio.remove(folder / DAMAGED)
            if version.exists():  # and files are missing, cut or changed: its readers find good ones at the same paths
                fileio.rename(version, folder / DAMAGED)
            fileio.rename(work, version)
    fileio.remove(folder / DAMAGED)
    for left in filter(_is_leftover, version.iterdir()):
        fileio.remove(left)
    return version


def publish(version: Path, path: str | os.PathLike[str]) -> None:
    """Let the public name of the cache at `path` stand for one of its versions; `build_lock` is held."""
    public = Path(os.path.abspath(path))
    folder = versions_dir(public)
    _make_way(public, folder)
    link = folder / LINK
    fileio.remove(link)
    fileio.symlink(Path(VERSIONS_DIR) / public.name / version.name, link)
    fileio.rename(link, public)


def versions_below(folder: Path) -> list[Path]:
    """Return the folders below a folder that may hold the versions of a cache, in order; links are not followed."""
    found: list[Path] = []
    left = [os.fspath(folder)]
    while left:
        above = left.pop()
        try:
            with os.scandir(above) as entries:
                folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:  # of somebody else, or too deep to have a path
            continue
        if os.path.basename(above) == VERSIONS_DIR:
            found += map(Path, folders)
        left += folders
    return sorted(found)


class Piece(NamedTuple):
    """Something in the folder of a cache's versions that the cache does not need."""

    path: Path
    why: str
    is_ours: bool
    """Whether a cache has put it there: only then it is removed."""


def removable(path: str | os.PathLike[str]) -> list[tuple[Path, str]]:
    """Return what the cache at `path` no longer needs, and why: the `pieces` that are ours."""
    return [(piece.path, piece.why) for piece in pieces(path) if piece.is_ours]


def pieces(path: str | os.PathLike[str]) -> list[Piece]:
    """Return all versions of the cache at `path` but the two newest, and dead builds (D11).

    Ours is what carries a mark, at the place where it belongs: a version has a meta.json of a kind that we build, and
    is named by its content; a journal begins with a line of ours, and its build is beside it. Other names that we give,
    such as building, count where the folder itself is marked: by recipe.json, by a version, or by a journal.
    The committed version always stays. Call it with `build_lock` held, or a build in progress looks dead. Whether a
    reader has an old version open is not asked here: see `niels_gpt.locks.unless_held`.
    """
    folder = versions_dir(path)
    if folder.is_symlink() or folder.parent.is_symlink():
        return []  # another cache's
    names = (entry for entry in folder.parent.parent.iterdir() if entry.is_symlink())
    committed = {os.path.normpath(name.parent / os.readlink(name)) for name in names}
    entries = sorted(folder.iterdir(), key=lambda entry: (entry.suffix != JOURNAL_SUFFIX, entry.name))
    marked = {entry for entry in entries if _is_marked(entry)}
    found: list[Piece] = []
    versions: list[Path] = []
    for entry in entries:
        if _BUILD.fullmatch(entry.name):
            what = "its journal" if entry.suffix == JOURNAL_SUFFIX else "the same build would go on with it"
            found.append(Piece(entry, f"an unfinished build: {what}", bool(marked)))
        elif entry.name == ATTEMPTS_NAME and entry.is_file() and not entry.is_symlink():
            found.append(Piece(entry, "of unfinished builds", bool(marked)))
        elif entry.name in (BUILDING, DAMAGED) or (entry.name == LINK and entry.is_symlink()) or _is_leftover(entry):
            found.append(Piece(entry, _KILLED, bool(marked)))
        elif entry in marked and _VERSION.fullmatch(entry.name):
            versions.append(entry)
            found += [Piece(file, _KILLED, True) for file in entry.iterdir() if _is_leftover(file)]
        elif _VERSION.fullmatch(entry.name) and not entry.is_symlink() and os.path.lexists(entry / META_NAME):
            if _ADOPTED.fullmatch(entry.name) and marked and (entry / META_NAME).is_file():
                versions.append(entry)
            else:
                found.append(Piece(entry, "a version", False))
    versions.sort(key=lambda entry: entry.lstat().st_mtime_ns)
    older = [entry for entry in versions if str(entry) not in committed]  # under whatever name
    return found + [Piece(entry, "an old version", True) for entry in older[: max(0, len(older) - 1)]]


_KILLED = "left by a process that was killed"


def _is_marked(entry: Path) -> bool:
    """Whether something in the folder of a cache's versions is what a cache has put there, by what it holds."""
    try:
        if entry.name == RECIPE_NAME:
            return {"fingerprint", "meta_sha256", "version"} <= parse_object(read_regular(entry)).keys()
        if entry.is_symlink() or not entry.is_dir():
            return False
        if entry.suffix == JOURNAL_SUFFIX and _BUILD.fullmatch(entry.name):
            return is_journal(entry / JOURNAL_NAME)
        if not _VERSION.fullmatch(entry.name):
            return False
        meta = parse_object(read_regular(entry / META_NAME))
    except (OSError, ValueError):
        return False
    content = str(meta.get("content_sha256"))
    named = content.startswith(entry.name) or _ADOPTED.fullmatch(entry.name) is not None
    return meta.get("kind") in KINDS and named and _SHA256.fullmatch(content) is not None


def is_journal(path: Path) -> bool:
    """Whether a file begins with the line with which the journal of a build does. Raises as `open_regular`."""
    with open(open_regular(path), "rb") as file:
        line = file.readline(_MAX_LINE)
    if line[-1:] != b"\n" or line[:9] != f"{zlib.crc32(line[9:-1]):08x} ".encode():
        return False
    return {"identity", "journal_version"} <= parse_object(line[9:]).keys()


def _is_leftover(entry: Path) -> bool:
    return _LEFTOVER.fullmatch(entry.name) is not None  # of fileio.write_bytes


def _same_files(left: Path, right: Path) -> bool:
    sizes = _sizes(left)
    if sizes != _sizes(right):
        return False
    try:
        return all(sha256_regular(left / name) == sha256_regular(right / name) for name in sizes)
    except CacheError:  # a link, or another thing that is no file
        return False


def _sizes(root: Path) -> dict[str, int]:
    names = (name for name in _names_below(root) if name != META_NAME and not _is_leftover(Path(name)))
    return {name: (root / name).lstat().st_size for name in names}


def _names_below(root: Path) -> set[str]:
    """Return the relative names of files and links below a folder."""
    return {"/".join(names) for _, names, about in fileio.walked(root) if not stat.S_ISDIR(about.st_mode)}


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
        write_bytes(version / META_NAME, read_regular(public / META_NAME))
        fileio.remove(public)
    else:
        if version.exists():  # of the same name, and damaged
            fileio.rename(version, folder / DAMAGED)
        fileio.rename(public, version)
        fileio.remove(folder / DAMAGED)
