"""Roam-style notes: a folder of markdown files, each a document."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from niels_gpt.data import places

SOURCE = "roam"
FOLDER = "roam"


def roam_dir_of(source_root: str | os.PathLike[str], *, roam_dir: str | os.PathLike[str]) -> Path:
    """Find the notes: `roam/` in a mirror or the sample; `roam_dir` for "hub", which holds nobody's notes."""
    root = places.mirror_root(source_root)
    folder = Path(roam_dir).expanduser().absolute() if root is None else root / FOLDER
    if not folder.is_dir():
        remedy = "pass --roam-dir FOLDER" if root is None else "put the notes there"
        raise FileNotFoundError(
            f"no notes: expected a folder of .md files at {folder}; {remedy}, or use --source-root sample"
        )
    return folder


def list_roam_paths(dir: str | os.PathLike[str]) -> list[str]:
    """List absolute paths of all .md files below `dir`, in order of relative path; hidden ones are left out.

    Raises FileNotFoundError if there is no such folder (PR-02 for the name and the order).
    """
    folder = Path(dir).absolute()
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder of notes at {folder}; pass the folder that holds the .md files")
    return [str(path) for path in places.walk_files(folder, suffixes=(".md",))]


def load_texts(paths: Iterable[str | os.PathLike[str]], *, counters: Counter[str] | None = None) -> Iterator[str]:
    """Stream whole files as text; bytes that are not UTF-8 become U+FFFD and count once a file."""
    for path in paths:
        yield places.read_text(path, counters=counters)


def split_roam_paths(paths: Sequence[str], *, val_frac: float = 0.1, seed: int) -> tuple[list[str], list[str]]:
    """Split a list of files into (train, val), both in the order given (PR-02).

    val gets max(1, int(n * val_frac)) files, chosen by torch.randperm; none if `val_frac` is 0 or there are fewer than
    two files. Raises ValueError unless 0 <= val_frac < 1.
    """
    import torch

    if not 0 <= val_frac < 1:
        raise ValueError(f"val_frac is {val_frac}; expected at least 0 and less than 1")
    if len(paths) < 2 or val_frac == 0:
        return list(paths), []
    number = max(1, int(len(paths) * val_frac))
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(seed))
    chosen = set(order[:number].tolist())
    train = [path for index, path in enumerate(paths) if index not in chosen]
    return train, [path for index, path in enumerate(paths) if index in chosen]
