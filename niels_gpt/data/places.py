"""Where source text comes from: the Hugging Face hub, the packaged sample, or a mirror folder of one's own.

A mirror holds `<hub dataset id>/` for each hub dataset, and `roam/` and `gutenberg/` for plain folders. The sample is a
mirror too. Loaders count whatever they drop or repair in an optional `collections.Counter`, by reason.
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import json
import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from niels_gpt.data import json_stream
from niels_gpt.data.parquet_stream import iter_parquet
from niels_gpt.fileio import sha256_file

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


def walk_files(folder: Path, *, suffixes: Sequence[str]) -> list[Path]:
    """List files below `folder` by suffix in order of relative path, by its bytes, whatever the locale.

    Hidden files and folders (`.git`, `.obsidian`) are left out; links to folders are not followed. A folder that may
    not be read, a pipe, and a link to nothing are passed over with a warning in the log.
    """
    found: list[Path] = []
    for where, folders, names in os.walk(folder, onerror=_warn_of):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(where, n) for n in names if not n.startswith(".") and n.endswith(tuple(suffixes))]
    return sorted(filter(_is_regular, found), key=lambda path: os.fsencode(path.relative_to(folder)))


def walk_folders(folder: Path) -> Iterator[Path]:
    """Yield `folder` and those below it but hidden ones; links are followed, and each real folder comes once.

    Its path is that of the fewest links, then of the fewest parts, then the first by its bytes.
    """
    root = Path(os.path.realpath(folder))
    seen: set[Path] = set()
    waiting = [(0, 0, b"", folder)]
    while waiting:
        links, depth, _, where = heapq.heappop(waiting)
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
                    if not entry.name.startswith(".") and os.path.isdir(entry):
                        key = (links + entry.is_symlink(), depth + 1, os.fsencode(entry.path) + b"/")
                        heapq.heappush(waiting, (*key, Path(entry.path)))
        except OSError as error:
            _warn_of(error)


def _is_regular(path: Path) -> bool:
    if os.path.isfile(path):
        return True
    logger.warning("%s: found a pipe, a device or a link to nothing, expected a file; passed over", path)
    return False


def _warn_of(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):  # the caller says so of those
        logger.warning("%s: cannot be read, passed over: %s", error.filename, error.strerror)


def source_files(root: Path, dataset_id: str, *, suffixes: Sequence[str] | None = None) -> list[Path]:
    """List a source's files in a mirror, in order of relative path; FileNotFoundError if there are none."""
    folder = root / dataset_id
    wanted = tuple(suffixes or KNOWN_SUFFIXES)
    files = walk_files(folder, suffixes=wanted)
    if not files:
        state = "it has no such file" if folder.is_dir() else "there is no such folder"
        raise FileNotFoundError(
            f"expected {' '.join(wanted)} files in {folder}, but {state}; "
            "put them there, or use --source-root hub or --source-root sample"
        )
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
) -> list[Path]:
    """List the files of one split, or with "all" of every split: train, validation, test.

    The first of `folders` that exists inside the dataset's folder is read alone: a copy of a hub repository holds one
    folder per config, or other forms of the same rows beside it.
    """
    check_split(split, allow_all=True)
    inner = next((name for name in folders if (root / dataset_id / name).is_dir()), None)
    files = source_files(root, dataset_id if inner is None else f"{dataset_id}/{inner}", suffixes=suffixes)
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


def count(counters: Counter[str] | None, reason: str, number: int = 1) -> None:
    """Add to a counter if the caller passed one; a reason that never happened gets no entry."""
    if counters is not None and number:
        counters[reason] += number


def shuffled(items: Iterable[T], seed: int) -> Iterator[T]:
    """Yield all items in an order of torch.randperm; holds them in memory."""
    import torch

    held = list(items)
    for index in torch.randperm(len(held), generator=torch.Generator().manual_seed(seed)).tolist():
        yield held[index]


def decode(data: bytes, *, counters: Counter[str] | None = None) -> str:
    """Decode UTF-8, putting U+FFFD in place of what is not; counts "undecodable_utf8" once per document."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        count(counters, "undecodable_utf8")
        return data.decode("utf-8", errors="replace")


def read_text(path: str | os.PathLike[str], *, counters: Counter[str] | None = None) -> str:
    """Read a whole file with its newlines and byte order mark as they are; see `decode` for bad bytes."""
    return decode(Path(path).read_bytes(), counters=counters)


def iter_rows(paths: Iterable[Path], *, counters: Counter[str] | None = None) -> Iterator[dict[str, Any]]:
    """Stream rows in file order; a .txt file gives one {"text": line} per line, newline kept.

    Raises ValueError naming the file, and for JSON the line or item, where something is no JSON object or is damaged.
    """
    for path in paths:
        yield from (row for _, row in numbered_rows(path, counters=counters))


def numbered_rows(
    path: Path,
    *,
    counters: Counter[str] | None = None,
    columns: Collection[str] | None = None,
    unreadable: Callable[[str], None] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Stream a file's rows, each with its number from 1: that of the line, of the array's item, or of the parquet row.

    columns: the only ones to read of a parquet file, as far as it has them; None: all.
    unreadable: is told what is wrong with a line or item that is no JSON object, which is then passed over.
    Raises: ValueError naming the file if it is damaged as a whole, or is an array that breaks off; and without
        `unreadable` for a line or item that is no JSON object.
    """
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from enumerate(iter_parquet(path, decode=partial(decode, counters=counters), columns=columns), 1)
    elif name.endswith(".txt"):
        with path.open("rb") as lines:
            yield from ((number, {"text": decode(line, counters=counters)}) for number, line in enumerate(lines, 1))
    elif name.endswith((".jsonl", ".jsonl.gz", ".json", ".json.gz")):
        for number, row in _json_rows(path, counters):
            if isinstance(row, dict):
                yield number, row
            elif unreadable is None:
                raise ValueError(row)
            else:
                unreadable(row)
    else:
        raise ValueError(f"{path}: rows come from {' '.join(TABLE_SUFFIXES)} .json .txt, not from this kind of file")


def _json_rows(path: Path, counters: Counter[str] | None) -> Iterator[tuple[int, dict[str, Any] | str]]:
    # A row, or what is wrong with it.
    try:
        name = path.name.lower()
        with cast(BinaryIO, gzip.open(path, "rb") if name.endswith(".gz") else path.open("rb")) as file:
            is_jsonl = name.endswith((".jsonl", ".jsonl.gz"))
            by_line = is_jsonl or not json_stream.spans_lines(file)
            file.seek(0)
            if not by_line:
                for number, value, text in json_stream.iter_values(file, str(path)):
                    yield number, _json_item(value, text, f"{path}, item {number}", counters)
                return
            for number, line in enumerate(file, 1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    row = _json_object(line, f"{path}, line {number}", counters)
                    yield number, row if isinstance(row, dict) else row + _remedy(line, is_jsonl and number == 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged gzip file ({error}); fetch it again") from error


def _json_object(line: bytes, where: str, counters: Counter[str] | None) -> dict[str, Any] | str:
    try:
        row = json.loads(decode(line, counters=counters))
        if isinstance(row, dict):
            return _without_surrogates(row, counters) if b"\\ud" in line or b"\\uD" in line else row
        reason = ""
    except (ValueError, RecursionError) as error:  # of RecursionError: [[[[...
        reason = f" ({error})"
    return f"{where}: expected a JSON object{reason}, found {line[:60]!r}"


def _remedy(line: bytes, may_open_array: bool) -> str:
    if b"\0" in line:
        return ". NUL bytes are a sign of UTF-16: save the file as UTF-8"
    if may_open_array and (line.strip() == b"[" or (line.lstrip().startswith(b"[") and b"{" in line)):
        return ". An array of rows is read from .json and .json.gz: rename the file"
    return ""


def _json_item(value: Any, text: str, where: str, counters: Counter[str] | None) -> dict[str, Any] | str:
    try:
        text.encode()
    except UnicodeEncodeError:  # it has bytes that are not utf-8
        return _json_object(text.encode("utf-8", "surrogateescape"), where, counters)
    if not isinstance(value, dict):
        return f"{where}: expected a JSON object, found {text[:60]!r}"
    return _without_surrogates(value, counters) if "\\ud" in text or "\\uD" in text else value


def _without_surrogates(row: dict[str, Any], counters: Counter[str] | None) -> dict[str, Any]:
    # JSON can spell half of a surrogate pair ("\ud83d"), which Python reads but no UTF-8 encoder accepts.
    repaired = _repaired(row)
    count(counters, "undecodable_utf8", int(repaired != row))
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
