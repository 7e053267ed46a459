"""Which folders are caches: what a command that takes a folder of caches looks at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from niels_gpt.fileio import META_NAME
from niels_gpt.versions import VERSIONS_DIR

_MAX_DEPTH = 4  # sample/pretrain/NAME, and one more


def caches_below(path: Path) -> list[Path]:
    """Return `path` if it is a cache, or every cache below it in order: pretrain/NAME, sft/NAME, tokenizer.

    A public link counts as a cache even where its version is gone, and a version's folder where its meta.json is.
    Links are not followed to look for caches. Raises: FileNotFoundError where there is none.
    """
    found = [path] if _is_cache(path) else list(_below(path, _MAX_DEPTH))
    if not found:
        what = "no cache there" if path.is_dir() else "no such folder"
        raise FileNotFoundError(f"{path}: {what}. Name a cache, or the folder that holds pretrain/ and sft/")
    return found


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.name.startswith("."):
            continue
        if _is_cache(entry):
            yield entry
        elif depth > 1 and not entry.is_symlink():
            yield from _below(entry, depth - 1)


def _is_cache(path: Path) -> bool:
    if os.path.lexists(path / META_NAME) or path.absolute().parent.parent.name == VERSIONS_DIR:
        return True
    return path.is_symlink() and Path(os.readlink(path)).parent.parent.name == VERSIONS_DIR
