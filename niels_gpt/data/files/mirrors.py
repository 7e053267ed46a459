"""Which files of a mirror folder belong to a source and a split.

A mirror has a folder `<hub dataset id>/` for each hub dataset, and `roam/` and `gutenberg/`, which are plain folders.
The packaged sample is a mirror too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from niels_gpt.data.files.rows import TABLE_SUFFIXES
from niels_gpt.data.files.walk import first_link, note_forks, note_links, walk_files
from niels_gpt.storage.errors import SourceError, SourceNotFound

KNOWN_SUFFIXES = (*TABLE_SUFFIXES, ".txt", ".md")
SPLITS = ("train", "validation", "test")
SAMPLE_DIR = Path(__file__).resolve().parent.parent / "sample"


def mirror_root(source_root: str | os.PathLike[str]) -> Path | None:
    """Return the folder of `source_root` ("hub", "sample" or a mirror); None for the hub.

    Raises: SourceNotFound E301 if there is no such folder.
    """
    if str(source_root) == "hub":
        return None
    if str(source_root) == "sample":
        return SAMPLE_DIR
    root = Path(source_root).expanduser().absolute()  # files are named relative to it
    if not root.is_dir():
        raise SourceNotFound(
            f"source root {os.fspath(source_root)!r}: no folder at {root.absolute()}; "
            'expected "hub", "sample" or an existing mirror folder: pass --source-root MIRROR or --source-root sample'
        )
    return root


def source_files(
    root: Path,
    dataset_id: str,
    *,
    suffixes: Sequence[str] | None = None,
    follow_links: bool = False,
    counters: Counter[str] | None = None,
    not_followed: list[Path] | None = None,
    forks: list[Path] | None = None,
) -> list[Path]:
    """List a source's files in a mirror, in order of relative path.

    follow_links: follow links below `root`, which may itself be one; otherwise they are counted, and the first is
        logged. not_followed: receives these links.
    forks: receives the resource forks of macOS: see walk_files. They are counted too.
    Raises: SourceNotFound E301 if there are no files.
    """
    folder = root / dataset_id
    wanted = tuple(suffixes or KNOWN_SUFFIXES)
    links = [link] if not follow_links and (link := first_link(root, folder)) else []
    hidden = list[Path]() if forks is None else forks
    how: dict[str, Any] = {"follow_links": follow_links, "links": links, "forks": hidden}
    files = [] if links else walk_files(folder, suffixes=wanted, **how)
    if not files:
        state = "it has no such file" if folder.is_dir() else "there is no such folder"
        if links:
            state = f"{links[0]} is a symbolic link, which is not followed: pass --follow-links if it may be"
        raise SourceNotFound(
            f"expected {' '.join(wanted)} files in {folder}, but {state}; "
            "put them there, or use --source-root hub or --source-root sample"
        )
    note_links(counters, links)
    note_forks(counters, len(hidden))
    if not_followed is not None:
        not_followed += links
    return files


def split_of(path: str | os.PathLike[str]) -> str:
    """Return the split that a file's name starts with: train, validation or test; train for any other name."""
    name = Path(path).name
    return next((split for split in SPLITS if name.startswith(split)), "train")


def split_files(
    root: Path,
    dataset_id: str,
    *,
    split: str,
    suffixes: Sequence[str] = TABLE_SUFFIXES,
    folders: Sequence[str] = (),
    **beside: Any,
) -> list[Path]:
    """List the files of one split, train, validation or test; with "all" the files of every split.

    folders: only the first one that exists inside the dataset's folder is listed. A copy of a hub repository has a
        folder for each config, or the same rows in other formats beside it.
    beside: follow_links, counters, not_followed and forks of `source_files`.
    Raises: SourceNotFound E301 if there are no files of the split; SourceError E302 for an unknown split.
    """
    check_split(split, allow_all=True)
    inner = next((name for name in folders if (root / dataset_id / name).is_dir()), None)
    folder = dataset_id if inner is None else f"{dataset_id}/{inner}"
    files = source_files(root, folder, suffixes=suffixes, **beside)
    if split == "all":
        return sorted(files, key=lambda path: SPLITS.index(split_of(path)))  # stable: in path order within a split
    chosen = [path for path in files if split_of(path) == split]
    if not chosen:
        names = ", ".join(path.relative_to(root / dataset_id).as_posix() for path in files[:8])
        raise SourceNotFound(f"{root / dataset_id} has no file of split {split!r}; found: {names}")
    return chosen


def check_split(split: str, *, allow_all: bool = False) -> None:
    """Check the name of a split. Raises: SourceError E302 unless it is one of SPLITS, or "all" where allowed."""
    names = (*SPLITS, "all") if allow_all else SPLITS
    if split not in names:
        raise SourceError(f"unknown split {split!r}; expected one of {', '.join(names)}")
