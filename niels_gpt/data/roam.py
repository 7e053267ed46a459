"""Notes: a folder of markdown files. Each file is a document; the split into train and val goes by file."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from niels_gpt.data.files import mirrors
from niels_gpt.data.files.part import FilePart, is_first
from niels_gpt.data.files.text import MAX_DOCUMENT_BYTES, REPAIRED, TOO_LARGE, read_text
from niels_gpt.data.files.walk import walk_files
from niels_gpt.data.local import LocalFiles
from niels_gpt.data.spec import Credit, LoadRequest, Part, SourceSpec
from niels_gpt.data.types import PretrainSample
from niels_gpt.data.upstream_rows import UpstreamRows
from niels_gpt.documents import Partition
from niels_gpt.settings import Settings
from niels_gpt.signals import GIT_LFS_POINTER
from niels_gpt.storage.errors import SourceNotFound

SOURCE = "roam"
FOLDER = "roam"


def roam_dir_of(
    source_root: str | os.PathLike[str], *, roam_dir: str | os.PathLike[str], follow_links: bool = False
) -> Path:
    """Return the folder of notes: `roam/` in a mirror or the sample; `roam_dir` for "hub", which has no notes.

    follow_links: allow `roam/` to be a link. `roam_dir`, which the user names, may always be one.
    Raises: SourceNotFound E301 if there is no such folder, or if it is a link that is not followed.
    """
    root = mirrors.mirror_root(source_root)
    folder = Path(roam_dir).expanduser().absolute() if root is None else root / FOLDER
    if root is not None and folder.is_symlink() and not follow_links:
        raise SourceNotFound(
            f"{folder} is a symbolic link, which is not followed: pass --follow-links if it may be, or put the notes "
            "there"
        )
    if not folder.is_dir():
        remedy = "pass --roam-dir FOLDER" if root is None else "put the notes there"
        raise SourceNotFound(
            f"no notes: expected a folder of .md files at {folder}; {remedy}, or use --source-root sample"
        )
    return folder


def list_roam_paths(
    dir: str | os.PathLike[str],
    *,
    follow_links: bool = False,
    links: list[Path] | None = None,
    forks: list[Path] | None = None,
) -> list[str]:
    """List the absolute paths of all .md files below `dir` in order of relative path, without hidden ones (PR-02).

    follow_links: follow links below `dir`; otherwise `links` receives them. `dir` may itself be a link.
    forks: receives the resource forks of macOS: see walk.walk_files.
    Raises: SourceNotFound E301 if there is no such folder.
    """
    folder = Path(dir).absolute()
    if not folder.is_dir():
        raise SourceNotFound(f"no folder of notes at {folder}; pass the folder that holds the .md files")
    found = walk_files(folder, suffixes=(".md",), follow_links=follow_links, links=links, forks=forks)
    return [str(path) for path in found]


def load_texts(paths: Iterable[str | os.PathLike[str]], *, counters: Counter[str] | None = None) -> Iterator[str]:
    """Yield whole files as text; invalid UTF-8 becomes U+FFFD and counts once per file.

    Raises: UnusableFile E302 for a file of more than MAX_DOCUMENT_BYTES, and for a pointer of git-lfs.
    """
    for path in paths:
        yield read_text(path, counters=counters)


def iter_notes(
    paths: Iterable[str | os.PathLike[str]],
    *,
    folder: Path,
    counters: Counter[str] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
) -> Iterator[PretrainSample]:
    """Yield notes with meta["path"] relative to `folder`. A note that is too large is dropped, and counted."""
    rows = UpstreamRows(SOURCE, counters, max_document_bytes)
    for path in paths:
        if (text := rows.document(Path(path))) is not None:
            yield PretrainSample(text, SOURCE, {"path": os.path.relpath(path, folder)})


def notes_by_split(
    paths: Sequence[Path],
    *,
    folder: Path,
    val_frac: float,
    seed: int,
    counters: Counter[str],
    max_document_bytes: int,
    partition: Partition | None = None,
) -> Iterator[tuple[str, Iterator[PretrainSample]]]:
    """Yield train and val with their notes. `split_roam_paths` splits distinct texts; equal notes follow the first.

    Every note is read for the split, then once more when it is yielded: only 16 bytes of each are held.
    partition: yield and count only its notes.
    """
    read = partial(iter_notes, folder=folder, max_document_bytes=max_document_bytes)
    part = FilePart(partition, len(paths))
    # Counters that are not 0 keep these notes out of the log: other partitions count and log them.
    of_others = Counter((REPAIRED, TOO_LARGE, GIT_LFS_POINTER))
    digests, own = dict[str, bytes](), set[str]()
    for file, path in enumerate(paths):
        is_own = part.has_document(file)
        for note in read([path], counters=counters if is_own else of_others):
            digests[note.meta["path"]] = hashlib.sha256(note.text.encode()).digest()[:16]
            own |= {note.meta["path"]} if is_own else set()
    first = {digest: name for name, digest in reversed(digests.items())}
    distinct = [name for name, digest in digests.items() if first[digest] == name]
    in_val = set(split_roam_paths(distinct, val_frac=val_frac, seed=seed)[1])
    counted = Counter(counters)  # the first reading has counted and logged everything
    for split in ("train", "val"):
        chosen = [name for name in digests if name in own and (first[digests[name]] in in_val) == (split == "val")]
        yield split, read((os.path.join(folder, name) for name in chosen), counters=counted)


def split_roam_paths(paths: Sequence[str], *, val_frac: float = 0.1, seed: int) -> tuple[list[str], list[str]]:
    """Split a list of files into (train, val), both in the given order (PR-02).

    val gets max(1, int(n * val_frac)) files, chosen by torch.randperm; none if `val_frac` is 0 or there are fewer than
    two files.
    Raises: ValueError unless 0 <= val_frac < 1.
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


def _files(settings: Settings, root: Path | None) -> LocalFiles:
    follow, links, forks = settings.follow_links, list[Path](), list[Path]()
    folder = roam_dir_of(settings.source_root, roam_dir=settings.roam_dir, follow_links=follow)
    files = tuple(Path(path) for path in list_roam_paths(folder, follow_links=follow, links=links, forks=forks))
    if links and not files:
        raise SourceNotFound(
            f"expected .md files in {folder}, found symbolic links only, such as {min(links)}, which are not "
            "followed: pass --follow-links if they may be"
        )
    return LocalFiles(folder, files, 0, links=tuple(links), resource_forks=len(forks))


def _load(request: LoadRequest) -> Iterator[Part]:
    """Load the notes of train, then of val. The split goes by file (PR-02); equal notes follow the first one."""
    assert request.found is not None
    if is_first(request.partition):
        request.found.note_what_is_beside(request.counters)
    yield from notes_by_split(
        request.found.files,
        folder=request.found.root,
        val_frac=request.settings.roam_val_frac,
        seed=request.settings.seed,
        counters=request.counters,
        max_document_bytes=request.settings.max_document_bytes,
        partition=request.partition,
    )


SPEC = SourceSpec(
    name="roam",
    family="pretrain",
    description="Token cache of a folder of markdown notes, split by file, with end-of-texts.",
    credit=Credit("the notes' owner's", "the notes' owner"),
    load=_load,
    files=_files,
    split_rule="by file: of n distinct texts in order of path, the first max(1, int(n * val_frac)) of "
    "torch.randperm(n) seeded with seed go to val (none where n = 1 or val_frac = 0); equal ones follow",
    val_frac="roam_val_frac",
    training_rank=1,
)
