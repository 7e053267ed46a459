"""Versioned caches: whatever stands at a public path is complete, and a build replaces it in one step.

A cache at PATH is a relative symlink to a finished version. The tokens of a version never change; its meta.json is
replaced, atomically, when the same tokens are described anew:

    <parent>/NAME                          -> .versions/NAME/<content sha256, 12 digits>
    <parent>/.versions/NAME/<sha12>/       a finished version; its meta.json was written last
    <parent>/.versions/NAME/building/      the build in progress, or a dead one that the next build clears
    <parent>/.versions/NAME/lock           flock(2)ed while somebody builds; its text says who
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from niels_gpt.fileio import META_NAME, CacheError, fsync_dir, sha256_file, write_bytes
from niels_gpt.locks import file_lock
from niels_gpt.records import file_records

VERSIONS_DIR = ".versions"
VERSION_DIGITS = 12


def versions_dir(path: str | os.PathLike[str]) -> Path:
    """Return the folder that keeps the versions, the lock and the recipe record of the cache at `path`."""
    public = Path(os.path.abspath(path))
    return public.parent / VERSIONS_DIR / public.name


@contextmanager
def build_lock(path: str | os.PathLike[str], *, wait: bool = False) -> Iterator[Path]:
    """Hold the only right to build the cache at `path`; yields the versions folder. The rest is as in `file_lock`."""
    folder = versions_dir(path)
    with file_lock(folder / "lock", f"{os.fspath(path)}: is being built", wait=wait):
        yield folder


@contextmanager
def building(path: str | os.PathLike[str], *, wait: bool = False) -> Iterator[Path]:
    """Lock the cache at `path` and yield an empty folder to build it in; on failure that folder is removed.

    Whatever stands at `path` stays as it is, and readable, until `commit`. wait: as in `build_lock`.
    """
    refuse_foreign(path)
    with build_lock(path, wait=wait) as folder:
        work = folder / "building"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def commit(work: Path, path: str | os.PathLike[str], content_sha256: str) -> Path:
    """Make the finished folder `work` the cache at `path`, atomically; returns the version's folder.

    The public name goes from the old version to the new one in one rename(2), so a reader finds one of them, never a
    mixture and never nothing; only a real folder in the way, and a damaged version of the same content, are moved aside
    a moment before. Older versions stay: a reader that holds one is not disturbed.
    """
    public = Path(os.path.abspath(path))
    folder = versions_dir(public)
    version = folder / content_sha256[:VERSION_DIGITS]
    refuse_foreign(public)  # again: a build takes long, and somebody may have put something there
    _sync_tree(work)
    if (version / META_NAME).exists() and _same_files(work, version):
        write_bytes(version / META_NAME, (work / META_NAME).read_bytes())  # equal content; its description may differ
        os.utime(version)  # the newest again
    else:
        damaged = folder / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        if version.exists():
            os.rename(version, damaged)  # files are missing, cut or changed
        os.rename(work, version)
        shutil.rmtree(damaged, ignore_errors=True)
    fsync_dir(folder)
    _make_way(public, folder)
    link = folder / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(VERSIONS_DIR) / public.name / version.name)
    os.replace(link, public)
    fsync_dir(public.parent)
    return version


def removable(path: str | os.PathLike[str]) -> list[Path]:
    """Return what the cache at `path` no longer needs: all versions but the two newest, and dead builds (D11).

    The committed version always stays. Call it with `build_lock` held, or a build in progress looks dead.
    """
    public, folder = Path(os.path.abspath(path)), versions_dir(path)
    committed = public.resolve() if public.is_symlink() else None
    found = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()]
    dead = [entry for entry in found if entry.name in ("building", "damaged")]
    versions = sorted((entry for entry in found if entry not in dead), key=lambda entry: entry.stat().st_mtime_ns)
    older = [entry for entry in versions if entry.resolve() != committed]
    return dead + older[: max(0, len(older) - 1)]


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            with open(Path(folder, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_dir(folder)


def _same_files(left: Path, right: Path) -> bool:
    sizes = _sizes(left)
    return sizes == _sizes(right) and all(sha256_file(left / name) == sha256_file(right / name) for name in sizes)


def _sizes(root: Path) -> dict[str, int]:
    return {name: (root / name).lstat().st_size for name in _names_below(root) if name != META_NAME}


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
        meta = json.loads((public / META_NAME).read_text(encoding="utf-8"))
        return {META_NAME, "spm.model", *(str(record["name"]) for record in file_records(meta))}
    except FileNotFoundError:
        return set()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CacheError(f"{public / META_NAME}: is not a cache's meta.json ({error}). Move the folder away") from error


def _make_way(public: Path, folder: Path) -> None:
    """Adopt a real folder in the way as a version of its own; `refuse_foreign` has looked at it."""
    if public.is_symlink() or not public.exists():
        return
    if not _names_below(public):
        shutil.rmtree(public)
        return
    content = str(json.loads((public / META_NAME).read_text(encoding="utf-8")).get("content_sha256"))
    known = re.fullmatch("[0-9a-f]{64}", content)  # a name from a file that anybody may have written
    if not known:
        os.rename(public, folder / f"adopted{len(list(folder.glob('adopted*')))}")
    elif (folder / content[:VERSION_DIGITS]).exists():
        shutil.rmtree(public)  # the same content is a version already
    else:
        os.rename(public, folder / content[:VERSION_DIGITS])
