"""Carries out a line of sources.toml: exports a cache, or pushes it to its bucket, unless that is up to date."""

from __future__ import annotations

import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any

from niels_gpt.cache.meta import find_meta
from niels_gpt.exchange.output import MANIFEST_NAME
from niels_gpt.progress import Progress
from niels_gpt.recipes.exchange.lines import PUBLISHED, Line
from niels_gpt.recipes.exchange.published import publish
from niels_gpt.recipes.run_recipe import RUNS_DIR, cache_root
from niels_gpt.settings import Settings
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.locks import file_lock
from niels_gpt.storage.meta_json import checked_name, parse_object, read_regular, sha256_regular
from niels_gpt.storage.remedies import build_command


@dataclass(frozen=True)
class Delivered:
    """What became of a line."""

    line: Line
    content_sha256: str
    """Of the cache."""
    reused: bool
    """Nothing was done: it was up to date."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Files and bytes, by the manifest or the push."""


def deliver(settings: Settings, line: Line, *, wait: bool = True, progress: Progress | None = None) -> Delivered:
    """Export or push the cache of a line, unless what is there is of its content and format.

    An export of another version is replaced by the new one, if its folder holds nothing but what its manifest
    describes, by name, size and sha256; a pushed cache, if this line pushed it, or found it up to date. wait: for
    another process that does the same.
    Raises: FileNotFoundError without the cache; CacheError E704 where the folder holds anything else, E610 where the
        bucket does; as `export_cache` and `push`.
    """
    cache = cache_root(settings) / line.cache
    meta = find_meta(cache)
    if meta is None:
        command = build_command(settings, line.cache)
        raise FileNotFoundError(f"{cache}: no cache there, and {line.path} is made of it. Build it: {command}")
    content = str(meta["content_sha256"])
    lock = cache_root(settings) / RUNS_DIR / f"{line.kind}.{line.name}.lock"
    with file_lock(lock, line.place, "is being written", wait=wait):
        if line.kind == PUBLISHED:
            done = publish(cache, line, content, lock.with_suffix(".json"), progress)
            facts = {"files": done.files, "bytes": done.num_bytes, "sent_bytes": done.sent_bytes}
            return Delivered(line, content, not done.sent_bytes, facts)
        return _export(cache, line, content, progress)


# --- exports ----------------------------------------------------------------------------------------------------------


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of an export; None where there is no folder, or an empty one.

    Raises: CacheError E704 for a folder of anything else.
    """
    if not folder.is_symlink() and (not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))):
        return None
    try:
        manifest = parse_object(read_regular(folder / MANIFEST_NAME))
        if manifest.get("kind") != "export" or folder.is_symlink():
            raise ValueError("not the manifest of an export")
        for record in manifest["files"]:
            checked_name(record["name"], "a file's name", str(folder / MANIFEST_NAME))
        return manifest
    except (OSError, ValueError, LookupError, TypeError) as error:
        found = f"is not an export of this project ({error})"
        raise CacheError(
            folder, found, "one, or nothing", "Name another folder in sources.toml", code="E704"
        ) from error


def missing_of(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Return what is wrong with the files that a manifest names, by their sizes."""
    problems = []
    for record in manifest["files"]:
        path = folder / record["name"]
        size = path.lstat().st_size if path.is_file() and not path.is_symlink() else None
        if size != record["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes"
            problems.append(f"{path}: {found}, expected {record['bytes']:,} bytes")
    return problems


def _export(cache: Path, line: Line, content: str, progress: Progress | None) -> Delivered:
    from niels_gpt.exchange.exporting import export_cache

    assert line.folder is not None and line.to is not None
    folder = line.folder
    manifest = manifest_of(folder)
    if manifest is not None:
        _refuse_foreign(folder, manifest)
        is_same = manifest["format"] == line.to and manifest["cache"]["content_sha256"] == content
        if is_same and not missing_of(folder, manifest):
            return Delivered(line, content, True, _facts(manifest))
    if manifest is None:
        export_cache(cache, line.to, folder, progress=progress)
    else:
        _refuse_foreign(folder, manifest, by_digest=True)
        _replace(cache, line.to, folder, manifest, progress)
    manifest = manifest_of(folder)
    assert manifest is not None
    return Delivered(line, str(manifest["cache"]["content_sha256"]), False, _facts(manifest))


def _replace(cache: Path, to: str, folder: Path, manifest: dict[str, Any], progress: Progress | None) -> None:
    """Export to a folder beside, and let it take the place of the old one: two renames, at once one after the other."""
    from niels_gpt.exchange.exporting import export_cache

    new, old = (folder.with_name(f".{folder.name}.{token_hex(4)}.tmp") for _ in range(2))
    try:
        export_cache(cache, to, new, progress=progress)
        _refuse_foreign(folder, manifest)  # what was put there since
        fileio.rename(folder, old)
        try:
            fileio.rename(new, folder)
        except BaseException:
            fileio.rename(old, folder)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _refuse_foreign(folder: Path, manifest: dict[str, Any], *, by_digest: bool = False) -> None:
    """Raise CacheError E704 where a folder has anything but the files that its manifest describes: it would be removed.

    by_digest: compare not only names and sizes, but sha256 too.
    """
    named = {record["name"]: record for record in manifest["files"]}
    folders = {parent.as_posix() for name in named for parent in PurePosixPath(name).parents}

    def is_of_export(path: Path, name: str) -> bool:
        state, record = path.lstat(), named.get(name)
        if record is None or not stat.S_ISREG(state.st_mode):
            return name == MANIFEST_NAME or (name in folders and stat.S_ISDIR(state.st_mode))
        is_same = state.st_size == record["bytes"]
        return is_same and (not by_digest or sha256_regular(path) == record["sha256"])

    there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    if foreign := sorted(name for name, path in there.items() if not is_of_export(path, name)):
        more = f", nor are {len(foreign) - 1:,} more" if foreign[1:] else ""
        found = f"{foreign[0]} is not as its export wrote it{more}"
        raise CacheError(folder, found, remedy="Move your own files away, then export again", code="E704")


def _facts(manifest: dict[str, Any]) -> dict[str, Any]:
    records = manifest["files"]
    return {
        "format": manifest["format"],
        "files": len(records),
        "bytes": sum(record["bytes"] for record in records),
        "linked_bytes": sum(record["bytes"] for record in records if record["made"] == "link"),
        "noted": manifest["noted"],
    }
