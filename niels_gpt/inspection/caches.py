"""Which folders are caches: what a command that takes a folder of caches looks at."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from niels_gpt.cache.formats import SPLITS
from niels_gpt.fileio import META_NAME, CacheError
from niels_gpt.versions import BUILDING, VERSIONS_DIR, versions_below

_MAX_DEPTH = 4  # sample/pretrain/NAME, and one more
_ONLY_IN_CACHES = (
    "{train,val}/shard_[0-9]*.bin",
    "{train,val}_tokens.bin",
    "{train,val}_idx.npy",
    "index/{train,val}_docs.npy",
    "index/{train,val}_ids.txt",
    "index/crc32.bin",
)


def caches_below(path: Path) -> list[Path]:
    """Return `path` if it is a cache, or every cache below it in order: pretrain/NAME, sft/NAME, tokenizer.

    A public link counts as a cache even where its version is gone, and a version's folder where its meta.json is.
    So does a folder that holds what only caches do, where its meta.json is gone: it is damaged, and not to be passed
    over. Links are not followed to look for caches.
    Raises: FileNotFoundError where there is none; CacheError for the folders of a build in progress.
    """
    if _is_in_versions(path) and path.name.startswith(BUILDING):
        raise CacheError(f"{path}: a build in progress or unfinished, not a cache. Its cache is {_public(path)}")
    found = [path] if _is_cache(path) else list(_below(path, _MAX_DEPTH))
    if not found:
        what = "no cache there" if path.is_dir() else "no such folder"
        raise FileNotFoundError(f"{path}: {what}. Name a cache, or the folder that holds pretrain/ and sft/")
    return found


def caches_of(paths: Iterable[Path]) -> tuple[list[Path], dict[str, str]]:
    """Return `caches_below` of several paths, each cache once, and why there are none: path -> message."""
    caches: list[Path] = []
    errors: dict[str, str] = {}
    for path in paths:
        try:
            caches += caches_below(path)
        except (CacheError, OSError) as error:
            errors[str(path)] = str(error)
    return list(dict.fromkeys(caches)), errors


def refuse_without_caches(folder: Path) -> None:
    """Raise FileNotFoundError where a folder holds neither caches nor what builds left; it may be a cache itself."""
    if not folder.is_dir() or versions_below(folder):
        return
    found = [] if _is_cache(folder) else list(_below(folder, _MAX_DEPTH))
    if not found:
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
        return path.is_dir() and not path.name.startswith(BUILDING)
    if os.path.lexists(path / META_NAME) or (not path.is_symlink() and _holds_tokens(path)):
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
