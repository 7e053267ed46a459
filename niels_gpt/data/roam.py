"""Roam-style notes: a folder of markdown files, each a document."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from niels_gpt.data import places
from niels_gpt.data.text_files import MAX_DOCUMENT_BYTES
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.upstream_rows import UpstreamRows

SOURCE = "roam"
FOLDER = "roam"


def roam_dir_of(
    source_root: str | os.PathLike[str], *, roam_dir: str | os.PathLike[str], follow_links: bool = False
) -> Path:
    """Find the notes: `roam/` in a mirror or the sample; `roam_dir` for "hub", which holds nobody's notes.

    follow_links: that `roam/` may be a link; `roam_dir` may be one in any case, for its user names it.
    """
    root = places.mirror_root(source_root)
    folder = Path(roam_dir).expanduser().absolute() if root is None else root / FOLDER
    if root is not None and folder.is_symlink() and not follow_links:
        raise FileNotFoundError(
            f"{folder} is a symbolic link, which is not followed: pass --follow-links if it may be, or put the notes "
            "there"
        )
    if not folder.is_dir():
        remedy = "pass --roam-dir FOLDER" if root is None else "put the notes there"
        raise FileNotFoundError(
            f"no notes: expected a folder of .md files at {folder}; {remedy}, or use --source-root sample"
        )
    return folder


def list_roam_paths(
    dir: str | os.PathLike[str], *, follow_links: bool = False, links: list[Path] | None = None
) -> list[str]:
    """List absolute paths of all .md files below `dir`, in order of relative path; hidden ones are left out.

    follow_links: below `dir`, which may itself be one; else `links` receives those that are not followed.
    Raises FileNotFoundError if there is no such folder (PR-02 for the name and the order).
    """
    folder = Path(dir).absolute()
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder of notes at {folder}; pass the folder that holds the .md files")
    return [str(path) for path in places.walk_files(folder, suffixes=(".md",), follow_links=follow_links, links=links)]


def load_texts(paths: Iterable[str | os.PathLike[str]], *, counters: Counter[str] | None = None) -> Iterator[str]:
    """Stream whole files as text; bytes that are not UTF-8 become U+FFFD and count once a file.

    Raises: ValueError for a file of more than MAX_DOCUMENT_BYTES.
    """
    for path in paths:
        yield places.read_text(path, counters=counters)


def iter_notes(
    paths: Iterable[str | os.PathLike[str]],
    *,
    folder: Path,
    counters: Counter[str] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
) -> Iterator[PretrainSample]:
    """Stream notes, each with meta["path"], relative to `folder`; one that is too large counts as "too_large"."""
    rows = UpstreamRows(SOURCE, counters, max_document_bytes)
    for path in paths:
        for text in rows.document(Path(path)):
            yield PretrainSample(text, SOURCE, {"path": os.path.relpath(path, folder)})


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
