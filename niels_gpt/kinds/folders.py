"""Decide which folders are caches, for commands that take a folder of caches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from niels_gpt.cache.formats import SPLITS
from niels_gpt.cache.meta import find_meta
from niels_gpt.kinds.kind import Cache, Kind, kind_named, kinds
from niels_gpt.storage.errors import CacheError, NotFound
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import resolved
from niels_gpt.storage.mounted import shown
from niels_gpt.storage.remedies import BUILD_ALL, instead_of
from niels_gpt.storage.versions import BUILDING, PARTITIONS, VERSIONS_DIR, versions_below

_UNFINISHED = (BUILDING, f"{PARTITIONS}-")
MAX_DEPTH = 4  # sample/pretrain/NAME, and one more
_ONLY_IN_CACHES = (
    "{train,val}/shard_[0-9]*.bin",
    "{train,val}_tokens.bin",
    "{train,val}_idx.npy",
    "{train,val}_loss.bits",
    "index/{train,val}_docs.npy",
    "index/{train,val}_ids.txt",
    "index/crc32.bin",
)


def open_cache(path: str | os.PathLike[str]) -> Cache:
    """Open a cache of any kind.

    Raises: FileNotFoundError if there is no cache; CacheError E209 for a part of a cache, E202 or E204 for a bad or
        missing meta.json, E208 for an unknown kind.
    """
    refuse_unless_cache(Path(path))
    return Cache.open(path)


def kind_at(path: Path) -> Kind | None:
    """Return the kind of a cache by its meta.json, else by its files; None if neither tells."""
    with suppress(CacheError, OSError, RuntimeError):
        folder = resolved(path)
        meta = find_meta(folder)
        if meta is None:
            return next((kind for kind in kinds() if kind.recognizes(folder)), None)
        return kind_named(meta.get("kind"))
    return None


def sealing_kind(path: Path) -> Kind | None:
    """Return the kind that seals units in this folder, or has sealed them; None for a folder without units."""
    if not path.is_dir():
        return None
    kind = next((kind for kind in kinds() if kind.has_unsealed(path)), None)
    if kind is None and _has_meta(path):
        kind = kind_at(path)
    return kind if kind is not None and kind.has("seal") else None


def caches_below(path: Path) -> list[Path]:
    """Return `path` if it is a cache, else every cache below it in order: pretrain/NAME, sft/NAME, tokenizer.

    Includes damaged caches: a public link without its version, and folders of versions or token files without
    meta.json. Follows no link to look for caches.
    Raises: FileNotFoundError if there is none; CacheError for folders of a build in progress.
    """
    if _is_in_versions(path) and path.name.startswith(_UNFINISHED):
        raise CacheError(
            path, "a build in progress or unfinished, not a cache", remedy=f"Its cache is {_public(path)}", code="E212"
        )
    caches = [path] if _is_cache(path) else list(_below(path, MAX_DEPTH))
    if not caches:
        what = "no cache there" if path.is_dir() else "no such folder"
        remedy = _instead(path, "Name a cache, or the folder that holds pretrain/ and sft/")
        raise FileNotFoundError(f"{path}: {what}. {remedy}")
    return caches


def caches_of(paths: Iterable[Path]) -> tuple[list[Path], dict[str, Exception]]:
    """Return the caches below several paths, each once, and errors for paths without any."""
    caches: list[Path] = []
    errors: dict[str, Exception] = {}
    for path in paths:
        try:
            caches += caches_below(path)
        except (CacheError, OSError) as error:
            errors[str(path)] = error
    return list(dict.fromkeys(caches)), errors


def refuse_unless_cache(path: Path) -> None:
    """Raise an error for a path that is not a cache: a wrong argument, not damage.

    Accepts a damaged cache: its meta.json cannot be read, or is missing beside its tokens, or its version is gone.
    Raises: FileNotFoundError if there is no folder, or no cache in it; CacheError E209 for a part of a cache.
    """
    if _is_cache(path):
        return
    whole = next((above for above in list(path.absolute().parents)[:2] if _has_meta(above)), None)
    if whole is not None and os.path.lexists(path):
        raise CacheError(path, "a part of a cache", f"the whole cache, {shown(whole)}", code="E209")
    what = "no cache" if path.is_dir() else "not a folder" if path.exists() else "no such folder"
    raise NotFound(f"{path}: {what}. {_instead(path, 'Name the folder of one cache, such as cache/sft/oasst1')}")


def _instead(path: Path, otherwise: str) -> str:
    """Return a hint for a path without a cache: the command for a URL, or similar names nearby."""
    found = "" if path.exists() else instead_of(path)
    return otherwise if not found or found.endswith(BUILD_ALL) else found


def _has_meta(path: Path) -> bool:
    return os.path.lexists(path / META_NAME)


def refuse_without_caches(folder: Path) -> None:
    """Raise FileNotFoundError for a folder without caches and unfinished builds."""
    if not folder.is_dir() or versions_below(folder):
        return
    if _is_cache(folder) or not any(True for _ in _below(folder, MAX_DEPTH)):
        why = ", for it is one" if _is_cache(folder) else ""
        raise FileNotFoundError(f"{folder}: no caches below it{why}. Name the folder that holds pretrain/ and sft/")


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.name.startswith("."):
            continue
        if _is_cache(entry):
            yield entry
        elif depth > 1 and not entry.is_symlink():
            yield from _below(entry, depth - 1)


def _is_cache(path: Path) -> bool:
    if _is_in_versions(path):
        return path.is_dir() and not path.name.startswith(_UNFINISHED)
    if _has_meta(path) or (not path.is_symlink() and _holds_tokens(path)):
        return True
    if path.is_dir() and any(kind.recognizes(path) for kind in kinds()):
        return True
    return path.is_symlink() and Path(os.readlink(path)).parent.parent.name == VERSIONS_DIR


def _holds_tokens(path: Path) -> bool:
    patterns = (pattern.replace("{train,val}", split) for pattern in _ONLY_IN_CACHES for split in SPLITS)
    return path.is_dir() and any(any(path.glob(pattern)) for pattern in patterns)


def _is_in_versions(path: Path) -> bool:
    return path.absolute().parent.parent.name == VERSIONS_DIR


def _public(path: Path) -> Path:
    versions = path.parent.parent
    return versions.parent / path.parent.name
