"""Where source text comes from: the Hugging Face hub, the packaged sample, or a mirror folder of one's own.

A mirror holds `<hub dataset id>/` for each hub dataset, and `roam/` and `gutenberg/` for plain folders. The sample is a
mirror too. Loaders count whatever they drop or repair in an optional `collections.Counter`, by reason.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from niels_gpt.fileio import sha256_file

T = TypeVar("T")

TABLE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
KNOWN_SUFFIXES = (*TABLE_SUFFIXES, ".txt", ".md")
SPLITS = ("train", "validation", "test")
SAMPLE_DIR = Path(__file__).resolve().parent / "sample"
PARQUET_BATCH_ROWS = 1_000  # bounds memory; a fineweb-edu row group would be several hundred megabytes

LICENCES: dict[str, str] = {
    "fineweb_edu": "ODC-BY 1.0",
    "wikitext": "CC BY-SA 3.0 and GFDL",
    "roam": "the notes' owner's",
    "gutenberg": "public domain in the United States",
    "dolly15k": "CC BY-SA 3.0",
    "oasst1": "Apache-2.0",
}


def licence_of(source: str, source_root: str | os.PathLike[str]) -> str:
    """Name the licence of a source's text; the sample is MIT throughout, written for this project."""
    if source not in LICENCES:
        raise ValueError(f"unknown source {source!r}; expected one of {', '.join(LICENCES)}")
    return "MIT" if str(source_root) == "sample" else LICENCES[source]


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

    Hidden files and folders (`.git`, `.obsidian`) are left out; links to folders are not followed.
    """
    found: list[Path] = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(where, n) for n in names if not n.startswith(".") and n.endswith(tuple(suffixes))]
    return sorted(found, key=lambda path: os.fsencode(path.relative_to(folder)))


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

    Raises ValueError naming the file, and for JSON the line, where something is not a JSON object or is damaged.
    """
    for path in paths:
        if path.name.endswith(".parquet"):
            yield from _parquet_rows(path, counters)
        elif path.name.endswith(".txt"):
            with path.open("rb") as lines:
                yield from ({"text": decode(line, counters=counters)} for line in lines)
        elif path.name.endswith((".jsonl", ".jsonl.gz", ".json.gz")):
            yield from _json_rows(path, counters)
        else:
            raise ValueError(f"{path}: rows come from {' '.join(TABLE_SUFFIXES)} .txt, not from this kind of file")


def _json_rows(path: Path, counters: Counter[str] | None) -> Iterator[dict[str, Any]]:
    packed = path.name.endswith(".gz")
    try:
        with cast(BinaryIO, gzip.open(path, "rb") if packed else path.open("rb")) as lines:
            for number, line in enumerate(lines, 1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if number == 1 and path.name.endswith(".json.gz") and line.lstrip()[:1] == b"[":
                    yield from _json_array(path, line + lines.read(), counters)
                elif line.strip():
                    yield _json_object(line, f"{path}, line {number}", counters)
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path}: damaged gzip file ({error}); fetch it again") from error


def _json_array(path: Path, data: bytes, counters: Counter[str] | None) -> Iterator[dict[str, Any]]:
    try:
        items = json.loads(decode(data, counters=counters))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: expected one JSON array of objects ({error})") from error
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(f"{path}, item {index}: expected a JSON object, found {type(item).__name__}")
        yield _without_surrogates(item, counters)


def _json_object(line: bytes, where: str, counters: Counter[str] | None) -> dict[str, Any]:
    try:
        row = json.loads(decode(line, counters=counters))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected a JSON object ({error}), found {line[:60]!r}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, found {line[:60]!r}")
    return _without_surrogates(row, counters) if b"\\ud" in line or b"\\uD" in line else row


def _without_surrogates(row: dict[str, Any], counters: Counter[str] | None) -> dict[str, Any]:
    # JSON can spell half of a surrogate pair ("\ud83d"), which Python reads but no UTF-8 encoder accepts.
    for key, value in row.items():
        if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            count(counters, "undecodable_utf8")
            row[key] = "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in value)
    return row


def _parquet_rows(path: Path, counters: Counter[str] | None) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a whole parquet file ({error}); fetch it again") from error
    with table:
        for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS):
            columns: list[list[Any]] = []
            for column in batch.columns:
                try:
                    columns.append(column.to_pylist())
                except UnicodeDecodeError:
                    raw = column.cast(pa.large_binary()).to_pylist()
                    columns.append([None if item is None else decode(item, counters=counters) for item in raw])
            yield from (dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True))


def files_fingerprint(root: Path, paths: Iterable[Path]) -> str:
    """Hash names and contents: sha256 over "relpath, NUL, size, NUL, sha256, newline" in order of relative path.

    Neither the place of `root` nor modification times matter.
    """
    total = hashlib.sha256()
    for name, path in sorted((os.fsencode(path.relative_to(root)), path) for path in paths):
        total.update(name + f"\0{path.stat().st_size}\0{sha256_file(path)}\n".encode())
    return total.hexdigest()
