"""Describe a folder of another tool to an import: token files, where documents end, and which tokens carry loss.

The module of a format reads and checks sizes, headers and borders; no ids are read before the import asks for them.
Folders come from strangers: no link is followed, nothing is executed, and sizes are bounded before memory is taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.exchange.output import MANIFEST_NAME, MANIFEST_VERSION
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import id_lines
from niels_gpt.storage.meta_json import (
    checked_count,
    checked_name,
    checked_record,
    checked_sha256,
    open_regular,
    parse_object,
    path_inside,
    printable,
    read_regular,
    shortened,
)
from niels_gpt.tokenizers.document_tokens import end_of_documents, start_of_documents
from niels_gpt.tokenizers.protocol import check_vocab_size, integer

MAX_FILES = 1_000_000
"""Most files of a folder that an import looks at."""
_MAX_DEPTH = 100
_NAMES = 1 << 10  # documents whose names are made at once: each may have 64 KiB
PIECE_BYTES = 1 << 18
"""Bytes of a token file read at once: all checks and hashes then find them in a core's cache."""
_VAL_WORDS = frozenset({"val", "valid", "validation", "dev", "eval"})
_TEST_WORDS = frozenset({"test"})


@dataclass(frozen=True)
class ForeignFile:
    """A token file of another tool, which becomes one shard of a cache."""

    split: str
    """train or val."""
    name: str
    """Its path below the source's folder. Documents without names of their own are called NAME#NUMBER."""
    tokens: int
    """Tokens in it, more than 0."""
    pieces: Callable[[], Iterator[NDArray[Any]]]
    """Yields its ids in order: arrays of any integer dtype, a few MiB each."""
    ends: Callable[[], NDArray[np.int64]] | None
    """Returns where each document ends, in tokens of this file: int64 [documents], ascending strictly, the last is
    `tokens`. None: the format has no borders, and the end-of-document id decides."""
    token_file: Path | None = None
    """A regular file that holds exactly these ids, little-endian, `itemsize` bytes each: it may be linked."""
    itemsize: int = 0
    """Bytes of an id in `token_file`, 2 or 4."""
    loss: Callable[[], Iterator[NDArray[np.bool_]]] | None = None
    """Yields, in order, whether each token carries loss; None if the format does not say."""
    ids: Callable[[], Iterator[str]] | None = None
    """Yields the names of the documents; None if the format has none."""
    continues: bool = False
    """Whether its first document begins in the file before, by the manifest of an export."""

    def name_lines(self, documents: int, first: int) -> Iterator[bytes]:
        """Yield the lines of a file of names for its n documents, from number `first` on.

        Raises: CacheError E221 if the format has names for more or fewer documents.
        """
        if self.ids is None:
            prefix = id_lines([f"{self.name}#"]).decode().removesuffix("\n")
            for at in range(first, documents, _NAMES):
                numbers = map(str, range(at, min(at + _NAMES, documents)))
                yield (prefix + f"\n{prefix}".join(numbers) + "\n").encode()
            return
        names, written = self.ids(), 0
        while some := list(islice(names, _NAMES)):
            yield id_lines(some[first:] if not written else some)
            written += len(some)
        if written != documents:
            raise CacheError(self.name, f"names of {written:,} documents", f"{documents:,}", code="E221")


@dataclass(frozen=True)
class ForeignFolder:
    """Everything that an import knows of a folder."""

    files: list[ForeignFile]
    """Files of train in their order, then of val."""
    tokenizer: str | None = None
    """Name or path of the tokenizer, by the folder itself; never opened without being asked."""
    vocab_size: int | None = None
    """By the folder; None if it does not say."""
    document_end: int | None = None
    """Id that ends each document, by the folder."""
    manifest: Mapping[str, Any] | None = None
    """Checked manifest of an export of this project; None without one."""
    noticed: Mapping[str, int] = field(default_factory=dict)
    """Counts of what was left out or changed, by reason; meta.json records them."""


def split_of(name: str, val_glob: str | None = None) -> str | None:
    """Return the split of a file by its path below the source's folder: train, val, or None for a test split.

    val_glob: pattern for files of val, by path or file name; all others are train. Without it, a file belongs to val if
        its name or a folder in its path has the word val, valid, validation, dev or eval, and test files are left out.

    >>> split_of("web/validation/part_2.bin"), split_of("web/test/0.bin"), split_of("val/0.bin", val_glob="b_*")
    ('val', None, 'train')
    """
    if val_glob is not None:
        return "val" if fnmatchcase(name, val_glob) or fnmatchcase(name.rpartition("/")[2], val_glob) else "train"
    words = frozenset(re.split("[^a-z]+", name.lower()))
    if words & _VAL_WORDS:
        return "val"
    return None if words & _TEST_WORDS else "train"


def natural_order(path: str) -> tuple[tuple[tuple[str | int, ...], ...], str]:
    """Return a key that sorts paths as people do, part by part.

    >>> sorted(["a/file10", "a/file2", "a10/x", "a9/x"], key=natural_order)
    ['a/file2', 'a/file10', 'a9/x', 'a10/x']
    """
    parts = (re.split("([0-9]+)", name) for name in path.split("/"))
    return tuple(tuple(int(part) if at % 2 else part for at, part in enumerate(name)) for name in parts), path


def names_below(source: Path, *suffixes: str) -> list[str]:
    """Return paths of files below a folder that end in one of `suffixes`, in natural order. Of a file, return its name.

    Leaves hidden files and folders out. Lists files that are links: opening one is refused.
    Raises: FileNotFoundError; CacheError E221 for more than MAX_FILES files, E205 for a folder that is a link.
    """
    if source.is_file():
        return [source.name]
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: no such file or folder")
    found, waiting = list[str](), [""]
    while waiting:
        below = waiting.pop()
        if below.count("/") > _MAX_DEPTH:
            raise CacheError(source / below, f"below more than {_MAX_DEPTH} folders", code="E221")
        with os.scandir(source / below) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if os.path.isdir(entry):
                    if entry.is_symlink():
                        expected = "a folder: links are not followed"
                        raise CacheError(entry.path, "a symbolic link", expected, code="E205")
                    waiting.append(f"{below}{entry.name}/")
                elif entry.name.endswith(suffixes):
                    found.append(usable_name(source, below + entry.name))
        if len(found) > MAX_FILES:
            raise CacheError(source, f"more than {MAX_FILES:,} files", "fewer in one folder", code="E221")
    return sorted(found, key=natural_order)


def usable_name(where: Path, name: str) -> str:
    """Return `name` if a cache can record it and the names of the files beside it.

    Raises: CacheError E221 if it has unprintable characters or is too long.
    """
    try:
        for each in (name, f"{name}.metadata"):
            checked_name(each, "name", str(where))
    except CacheError:
        found, expected = f"a file called {shortened(name)}", "a name of printable characters, 240 bytes at most"
        raise CacheError(where, found, expected, "Rename it", code="E221") from None
    return name


def read_pieces(path: Path, dtype: np.dtype[Any], *, offset: int = 0, count: int = -1) -> Iterator[NDArray[Any]]:
    """Yield the numbers in a regular file in order, PIECE_BYTES at a time. Refuses links.

    offset: bytes to skip. count: numbers to read; -1: all that follow.
    Raises: FileNotFoundError; CacheError E205 for a link or anything but a regular file, E203 if the file is too short,
            or does not end with a whole number.
    """
    with open(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        left = size - offset if count < 0 else count * dtype.itemsize
        if offset + left > size or left < 0:
            raise CacheError(path, f"{size:,} bytes", f"at least {offset + left:,}", code="E203")
        if left % dtype.itemsize:  # it has grown since its size was compared
            raise CacheError(path, f"{size:,} bytes", f"numbers of {dtype.itemsize} bytes", code="E203")
        file.seek(offset)
        while left:
            piece = np.empty(min(left, PIECE_BYTES) // dtype.itemsize, dtype=dtype)
            view = piece.data.cast("B")
            while view:
                got = file.readinto(view)
                if not got:
                    raise CacheError(path, "ends while it is read", f"{size:,} bytes", code="E203")
                view = view[got:]
            left -= piece.nbytes
            yield piece


def size_of(path: Path) -> int:
    """Return the size of a regular file in bytes. Raises: FileNotFoundError; CacheError E205 for any other file."""
    with open(open_regular(path), "rb") as file:
        return os.fstat(file.fileno()).st_size


def not_ours(error: CacheError) -> CacheError:
    """Return the error with a remedy for a file of another tool, which no build makes again."""
    remedy = error.own_remedy or ("Put a copy of the real file there" if error.code == "E205" else "")
    return CacheError(error.path, error.found, error.expected, remedy, code=error.code)


def read_manifest(source: Path, format: str | None = None) -> Mapping[str, Any] | None:
    """Return the checked manifest of an export of this project. None for a file, or a folder without a manifest.

    format: the format that it must name; None for any. Each token file must be a regular file below `source`, with the
        size in the manifest.
    Raises: CacheError E221 for another kind, version or format, and for a wrong value; E205 for a link.
    """
    path = source / MANIFEST_NAME
    if not source.is_dir() or not os.path.lexists(path):
        return None
    try:
        manifest = parse_object(read_regular(path))
        _check_manifest(manifest, str(path))
        for record in manifest["files"]:
            if "of" in record and (size := size_of(path_inside(source, record["name"]))) != record["bytes"]:
                raise ValueError(
                    f"{record['name']} has {size:,} bytes, expected the {record['bytes']:,} in the manifest"
                )
    except (CacheError, OSError, ValueError) as error:
        if isinstance(error, CacheError) and error.path != str(path):
            raise not_ours(error) from error
        found = error.problem if isinstance(error, CacheError) else printable(str(error))
        remedy = f"Remove {MANIFEST_NAME} to import the files without it"
        raise CacheError(path, found, remedy=remedy, code="E221") from error
    if format not in (None, manifest["format"]):
        found = f"an export to {printable(manifest['format'])}"
        raise CacheError(path, found, f"one to {format}", f"Pass --from {printable(manifest['format'])}", code="E221")
    return manifest


def manifest_files(manifest: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the token files of a manifest, name -> record, in its order; {} without a manifest.

    A record has name, bytes, sha256, split, and `of`, the name and `continues` of each shard in the file.
    """
    return {record["name"]: record for record in (manifest or {}).get("files", []) if "of" in record}


def _check_manifest(manifest: dict[str, Any], where: str) -> None:
    """Raise CacheError or ValueError unless every key that an import uses has the right type."""
    if manifest.get("kind") != "export" or manifest.get("manifest_version") != MANIFEST_VERSION:
        version = f"kind {manifest.get('kind')!r:.40}, manifest_version {manifest.get('manifest_version')!r:.40}"
        raise ValueError(f"{version}, expected 'export' and {MANIFEST_VERSION}")
    cache, files = manifest.get("cache"), manifest.get("files")
    source = cache.get("source") if isinstance(cache, dict) else None
    if not isinstance(cache, dict) or not isinstance(files, list) or not isinstance(source, dict):
        raise ValueError("expected cache with source, and files")
    if not isinstance(manifest.get("format"), str) or any(
        not isinstance(value, str | None) for value in (*source.values(), cache.get("dataset_name"), cache.get("kind"))
    ):
        raise ValueError("format, cache.dataset_name and the values of cache.source, expected texts")
    for key in ("content_sha256", "tokenizer_sha256"):
        if cache.get(key) is not None:
            checked_sha256(cache[key], f"cache.{key}", where)
    check_vocab_size(cache, where)
    start_of_documents(cache, where)
    end_of_documents(cache, where)
    if cache.get("pad_id") is not None and integer(cache["pad_id"], 0, cache.get("vocab_size") or 2**31) is None:
        raise ValueError(f"cache.pad_id is {cache['pad_id']!r:.40}, expected an id")
    names = [_check_file(record, f"files[{number}]", where) for number, record in enumerate(files)]
    if len({*names}) != len(names):
        raise ValueError("a file is named twice")


def _check_file(value: Any, key: str, where: str) -> str:
    record = checked_record(value, key, where)
    if "of" not in record:
        return str(record["name"])
    if record.get("split") not in SPLITS or not isinstance(record["of"], list) or not record["of"]:
        raise ValueError(f"{key}: expected a split, and the token files in it")
    for number, each in enumerate(record["of"]):
        if not isinstance(each, dict) or not isinstance(each.get("continues"), bool):
            raise ValueError(f"{key}.of[{number}]: expected name and continues")
        checked_name(each.get("name"), f"{key}.of[{number}].name", where)
        checked_count(each.get("tokens", 0), f"{key}.of[{number}].tokens", where)
    return str(record["name"])
