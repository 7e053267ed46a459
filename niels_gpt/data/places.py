"""Where source text comes from: the Hugging Face hub, the packaged sample, or a mirror folder of one's own.

A mirror holds `<hub dataset id>/` for each hub dataset, and `roam/` and `gutenberg/` for plain folders. The sample is a
mirror too. Loaders count whatever they drop or repair in an optional `collections.Counter`, by reason.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from niels_gpt.data import json_stream
from niels_gpt.data.parquet_stream import iter_parquet
from niels_gpt.data.text_files import (
    LINKS,
    MAX_DOCUMENT_BYTES,
    REPAIRED,
    Problem,
    count,
    decode,
    lines_of,
    note,
    opened_text,
    read_text,
)
from niels_gpt.fileio import sha256_file

__all__ = ["count", "decode", "note", "read_text"]  # and all that is defined here

logger = logging.getLogger(__name__)

T = TypeVar("T")

TABLE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
KNOWN_SUFFIXES = (*TABLE_SUFFIXES, ".txt", ".md")
SPLITS = ("train", "validation", "test")
SAMPLE_DIR = Path(__file__).resolve().parent / "sample"
_SURROGATE = re.compile("[\ud800-\udfff]")


def mirror_root(source_root: str | os.PathLike[str]) -> Path | None:
    """Resolve `source_root` ("hub", "sample" or a folder) to the folder to read; None stands for the hub."""
    if str(source_root) == "hub":
        return None
    if str(source_root) == "sample":
        return SAMPLE_DIR
    root = Path(source_root).expanduser().absolute()  # files are named relative to it wherever they were listed from
    if not root.is_dir():
        raise FileNotFoundError(
            f"source root {os.fspath(source_root)!r}: no folder at {root.absolute()}; "
            'expected "hub", "sample" or an existing mirror folder: pass --source-root MIRROR or --source-root sample'
        )
    return root


def walk_files(
    folder: Path, *, suffixes: Sequence[str], follow_links: bool = False, links: list[Path] | None = None
) -> list[Path]:
    """List files below `folder` by suffix in order of relative path, by its bytes, whatever the locale.

    Hidden files and folders (`.git`, `.obsidian`) are left out. A folder that may not be read, a pipe, and a link to
    nothing are passed over with a warning in the log.
    follow_links: below `folder`, which may itself be one. Each file comes once then, by the name of the fewest links.
    links: receives the links to folders, and those with such a suffix, that are not followed.
    """
    found: list[Path] = []
    for where in walk_folders(folder, follow_links=follow_links, links=links):
        for name in _names_in(where):
            path = where / name
            if name.startswith(".") or not name.endswith(tuple(suffixes)) or path.is_dir():
                continue
            if path.is_symlink() and not follow_links:
                if links is not None:
                    links.append(path)
            elif _is_regular(path):
                found.append(path)
    once = once_each(found).values() if follow_links else found
    return sorted(once, key=lambda path: os.fsencode(path.relative_to(folder)))


def walk_folders(folder: Path, *, follow_links: bool = False, links: list[Path] | None = None) -> Iterator[Path]:
    """Yield `folder`, which may be a link, and the folders below it but hidden ones.

    follow_links: below `folder` too. Each real folder comes once then, by the path of the fewest links, then of the
        fewest parts, then the first by its bytes.
    links: receives the links to folders that are not followed.
    """
    root = Path(os.path.realpath(folder))
    seen: set[Path] = set()
    waiting = [(0, 0, b"", folder)]
    while waiting:
        steps, depth, _, where = heapq.heappop(waiting)
        real = Path(os.path.realpath(where))
        # A link to what is hidden leads nowhere: a cache beside notes is one, and changes with every build.
        hidden = real.is_relative_to(root) and any(part.startswith(".") for part in real.relative_to(root).parts)
        if hidden or real in seen:
            continue
        seen.add(real)
        yield where
        try:
            with os.scandir(where) as entries:
                for entry in entries:
                    if entry.name.startswith(".") or not os.path.isdir(entry):
                        continue
                    if follow_links or not entry.is_symlink():
                        key = (steps + entry.is_symlink(), depth + 1, os.fsencode(entry.path) + b"/")
                        heapq.heappush(waiting, (*key, Path(entry.path)))
                    elif links is not None:
                        links.append(Path(entry.path))
        except OSError as error:
            _warn_of(error)


def once_each(paths: Iterable[Path]) -> dict[str, Path]:
    """Return the best of the names of each file, by what it resolves to: that of the fewest links, as walk_folders."""
    names: dict[str, list[Path]] = {}
    for path in paths:
        names.setdefault(os.path.realpath(path), []).append(path)
    return {real: found[0] if len(found) == 1 else min(found, key=_detours) for real, found in names.items()}


def _detours(path: Path) -> tuple[int, int, bytes]:
    return sum(map(os.path.islink, (path, *path.parents))), len(path.parts), os.fsencode(path)


def first_link(root: Path, path: Path) -> Path | None:
    """Return the first link on the way from `root` down to `path`, which may be one itself; None: there is none."""
    for parent in (*reversed(path.relative_to(root).parents), path.relative_to(root)):
        if (found := root / parent) != root and found.is_symlink():
            return found
    return None


def note_links(counters: Counter[str] | None, links: Sequence[Path]) -> None:
    """Count links that are not followed, once however often they are met, and log the first."""
    if counters is not None and links and not counters[LINKS]:
        counters[LINKS] = len(set(links))
        logger.warning(
            "%s: a symbolic link, which is not followed; --follow-links reads what it stands for. Counted as %s: %d",
            min(links),
            LINKS,
            counters[LINKS],
        )


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # walk_folders has said so
        return []


def _is_regular(path: Path) -> bool:
    if os.path.isfile(path):
        return True
    logger.warning("%s: found a pipe, a device or a link to nothing, expected a file; passed over", path)
    return False


def _warn_of(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):  # the caller says so of those
        logger.warning("%s: cannot be read, passed over: %s", error.filename, error.strerror)


def source_files(
    root: Path,
    dataset_id: str,
    *,
    suffixes: Sequence[str] | None = None,
    follow_links: bool = False,
    counters: Counter[str] | None = None,
) -> list[Path]:
    """List a source's files in a mirror, in order of relative path; FileNotFoundError if there are none.

    follow_links: below `root`, which may itself be a link; else links are counted and the first is logged.
    """
    folder = root / dataset_id
    wanted = tuple(suffixes or KNOWN_SUFFIXES)
    links = [link] if not follow_links and (link := first_link(root, folder)) else []
    files = [] if links else walk_files(folder, suffixes=wanted, follow_links=follow_links, links=links)
    if not files:
        state = "it has no such file" if folder.is_dir() else "there is no such folder"
        if links:
            state = f"{links[0]} is a symbolic link, which is not followed: pass --follow-links if it may be"
        raise FileNotFoundError(
            f"expected {' '.join(wanted)} files in {folder}, but {state}; "
            "put them there, or use --source-root hub or --source-root sample"
        )
    note_links(counters, links)
    return files


def split_of(path: str | os.PathLike[str]) -> str:
    """Tell a file's split by the start of its name: train, validation or test; any other name is train."""
    name = Path(path).name
    return next((split for split in SPLITS if name.startswith(split)), "train")


def split_files(
    root: Path,
    dataset_id: str,
    *,
    split: str,
    suffixes: Sequence[str] = TABLE_SUFFIXES,
    folders: Sequence[str] = (),
    follow_links: bool = False,
    counters: Counter[str] | None = None,
) -> list[Path]:
    """List the files of one split, or with "all" of every split: train, validation, test; links as `source_files`.

    The first of `folders` that exists inside the dataset's folder is read alone: a copy of a hub repository holds one
    folder per config, or other forms of the same rows beside it.
    """
    check_split(split, allow_all=True)
    inner = next((name for name in folders if (root / dataset_id / name).is_dir()), None)
    folder = dataset_id if inner is None else f"{dataset_id}/{inner}"
    files = source_files(root, folder, suffixes=suffixes, follow_links=follow_links, counters=counters)
    if split == "all":
        return sorted(files, key=lambda path: SPLITS.index(split_of(path)))  # stable: path order within a split
    chosen = [path for path in files if split_of(path) == split]
    if not chosen:
        names = ", ".join(path.relative_to(root / dataset_id).as_posix() for path in files[:8])
        raise FileNotFoundError(f"{root / dataset_id} has no file of split {split!r}; found: {names}")
    return chosen


def check_split(split: str, *, allow_all: bool = False) -> None:
    """Raise ValueError unless `split` is train, validation, test or, where allowed, "all"."""
    names = (*SPLITS, "all") if allow_all else SPLITS
    if split not in names:
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join(names)}")


def check_take(take: int | None) -> None:
    """Raise ValueError for a negative limit; None stands for no limit."""
    if take is not None and take < 0:
        raise ValueError(f"cannot take {take} samples; expected None or a number of at least 0")


def shuffled(items: Iterable[T], seed: int) -> Iterator[T]:
    """Yield all items in an order of torch.randperm; holds them in memory."""
    import torch

    held = list(items)
    for index in torch.randperm(len(held), generator=torch.Generator().manual_seed(seed)).tolist():
        yield held[index]


def iter_rows(
    paths: Iterable[Path], *, counters: Counter[str] | None = None, max_document_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[dict[str, Any]]:
    """Stream rows in file order; a .txt file gives one {"text": line} per line, newline kept.

    Raises ValueError naming the file, and for JSON the line or item, where something is no JSON object, is larger than
    `max_document_bytes`, or is damaged.
    """
    for path in paths:
        rows = numbered_rows(path, counters=counters, max_document_bytes=max_document_bytes)
        yield from (row for _, row in rows)


def numbered_rows(
    path: Path,
    *,
    counters: Counter[str] | None = None,
    columns: Collection[str] | None = None,
    unreadable: Callable[[Problem], None] | None = None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    behind: int = 0,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Stream a file's rows, each with its number from 1: that of the line, of the array's item, or of the parquet row.

    columns: the only ones to read of a parquet file, as far as it has them; None: all.
    unreadable: receives what is wrong with a row that is no JSON object or too large, which is then passed over. Of a
        parquet file it may be several rows at once, which can only be read together: see parquet_stream.
    max_document_bytes: of a line or item, its end included, or of a parquet row's values; a larger one is never held.
    behind: number of a row that was yielded before: it and those before it are passed over, and neither decoded, but in
        an array, nor counted.
    Raises: ValueError naming the file if it is damaged as a whole, or is an array that breaks off; and without
        `unreadable` for a row that would be passed over.
    """
    name = path.name.lower()
    rows: Iterator[tuple[int, dict[str, Any] | Problem]]
    if name.endswith(".parquet"):
        decoded = partial(decode, counters=counters, where=os.fspath(path))
        rows = iter_parquet(path, decode=decoded, columns=columns, max_row_bytes=max_document_bytes, behind=behind)
    elif name.endswith(".txt"):
        rows = _text_lines(path, counters, max_document_bytes, behind)
    elif name.endswith((".jsonl", ".jsonl.gz", ".json", ".json.gz")):
        rows = _json_rows(path, counters, max_document_bytes, behind)
    else:
        raise ValueError(f"{path}: rows come from {' '.join(TABLE_SUFFIXES)} .json .txt, not from this kind of file")
    for number, row in rows:
        if isinstance(row, dict):
            yield number, row
        elif unreadable is None:
            raise ValueError(row)
        else:
            unreadable(row)


def _text_lines(
    path: Path, counters: Counter[str] | None, limit: int, behind: int
) -> Iterator[tuple[int, dict[str, Any] | Problem]]:
    with opened_text(path, counters=None if behind else counters) as file:
        for number, line in lines_of(file, limit):
            if number <= behind:
                continue
            if line is None:
                yield number, Problem.too_large(f"{path}, line {number}", limit)
                continue
            try:
                text = line.decode()
            except UnicodeDecodeError:
                text = decode(line, counters=counters, where=f"{path}, line {number}")
            yield number, {"text": text}


def _json_rows(
    path: Path, counters: Counter[str] | None, limit: int, behind: int
) -> Iterator[tuple[int, dict[str, Any] | Problem]]:
    name = path.name.lower()
    is_jsonl = name.endswith((".jsonl", ".jsonl.gz"))
    by_line = is_jsonl
    if not is_jsonl:
        with opened_text(path) as file:
            by_line = not json_stream.spans_lines(file, limit)
    with opened_text(path, counters=None if behind else counters) as file:
        if not by_line:
            for number, value, text in json_stream.iter_values(file, str(path), limit):
                if number <= behind:
                    continue
                where = f"{path}, item {number}"
                yield number, value if isinstance(value, Problem) else _json_item(value, text, where, counters)
            return
        for number, line in lines_of(file, limit):
            if number <= behind:
                continue
            where = f"{path}, line {number}"
            if line is None:
                yield number, Problem.too_large(where, limit)
            elif line.strip():
                row = _json_object(line, where, counters)
                if isinstance(row, Problem):
                    row = Problem(row + _remedy(line, is_jsonl and number == 1))
                yield number, row


def _json_object(line: bytes, where: str, counters: Counter[str] | None) -> dict[str, Any] | Problem:
    try:
        row = json.loads(decode(line, counters=counters, where=where))
        if isinstance(row, dict):
            return _without_surrogates(row, counters, where) if b"\\ud" in line or b"\\uD" in line else row
        reason = ""
    except (ValueError, RecursionError) as error:  # of RecursionError: [[[[...
        reason = f" ({error})"
    return Problem(f"{where}: expected a JSON object{reason}, found {line[:60]!r}")


def _remedy(line: bytes, may_open_array: bool) -> str:
    if b"\0" in line:
        return ". NUL bytes are a sign of UTF-16 without a byte-order mark: save the file as UTF-8"
    if may_open_array and (line.strip() == b"[" or (line.lstrip().startswith(b"[") and b"{" in line)):
        return ". An array of rows is read from .json and .json.gz: rename the file"
    return ""


def _json_item(value: Any, text: str, where: str, counters: Counter[str] | None) -> dict[str, Any] | Problem:
    try:
        text.encode()
    except UnicodeEncodeError:  # it has bytes that are not utf-8
        return _json_object(text.encode("utf-8", "surrogateescape"), where, counters)
    if not isinstance(value, dict):
        return Problem(f"{where}: expected a JSON object, found {text[:60]!r}")
    try:
        return _without_surrogates(value, counters, where) if "\\ud" in text or "\\uD" in text else value
    except RecursionError:  # the decoder goes deeper than Python's own functions
        return Problem(f"{where}: expected a JSON object, found one that is nested too deeply, {text[:60]!r}")


def _without_surrogates(row: dict[str, Any], counters: Counter[str] | None, where: str) -> dict[str, Any]:
    # JSON can spell half of a surrogate pair ("\ud83d"), which Python reads but no UTF-8 encoder accepts.
    repaired = _repaired(row)
    if repaired != row:
        note(counters, REPAIRED, f"{where}: half a surrogate pair in its JSON; kept, with U+FFFD in its place")
    return cast(dict[str, Any], repaired)


def _repaired(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_repaired(item) for item in value]
    return {_repaired(key): _repaired(item) for key, item in value.items()} if isinstance(value, dict) else value


def files_fingerprint(root: Path, paths: Iterable[Path]) -> str:
    """Hash names and contents: sha256 over "relpath, NUL, size, NUL, sha256, newline" in order of relative path.

    Neither the place of `root` nor modification times matter.
    """
    total = hashlib.sha256()
    for name, path in sorted((os.fsencode(path.relative_to(root)), path) for path in paths):
        total.update(name + f"\0{path.stat().st_size}\0{sha256_file(path)}\n".encode())
    return total.hexdigest()
