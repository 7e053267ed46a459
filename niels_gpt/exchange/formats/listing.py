"""List the token files of a folder of another tool: splits, order, and the files beside each.

Also the pieces that several formats share when they write: arrays in pieces, the error for a shard that is too long.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS
from niels_gpt.exchange.foreign import (
    ForeignFile,
    ForeignFolder,
    manifest_files,
    names_below,
    read_manifest,
    read_pieces,
    size_of,
    split_of,
)
from niels_gpt.exchange.output import TokenFile
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import path_inside
from niels_gpt.tokenizers.document_tokens import end_of_documents
from niels_gpt.tokenizers.protocol import TOKEN_DTYPES, token_dtype_name

_CHUNK = 1 << 19  # numbers that are written at once


@dataclass(frozen=True)
class Listed:
    """A token file."""

    base: Path
    """Folder that names are relative to."""
    name: str
    split: str
    path: Path
    size: int
    """Bytes, more than 0."""
    continues: bool
    """Whether its first document begins in the file before, by the manifest; False without one."""

    def beside(self, name: str) -> Path | None:
        """Return the path of another file below the folder; None if absent. Raises: CacheError E205 for a link."""
        path = path_inside(self.base, name)
        return path if os.path.lexists(path) else None

    def tokens_of(self, width: int) -> int:
        """Return how many ids of `width` bytes it holds. Raises: CacheError E221 for a rest."""
        if self.size % width:
            raise CacheError(self.path, f"{self.size:,} bytes", f"ids of {width} bytes", code="E221")
        return self.size // width

    def plain(self, width: int, **more: Any) -> ForeignFile:
        """Return the file as one of only ids, uint16 or uint32 by `width`. more: further fields of ForeignFile."""
        dtype = np.dtype(f"<u{width}")
        tokens, pieces = self.tokens_of(width), partial(read_pieces, self.path, dtype)
        given = {"pieces": pieces, "continues": self.continues, "ends": None, **more}
        return ForeignFile(self.split, self.name, tokens, token_file=self.path, itemsize=width, **given)


@dataclass(frozen=True)
class Listing:
    """Token files of a folder."""

    files: list[Listed]
    """Files of train in their order, then of val."""
    manifest: Mapping[str, Any] | None
    noticed: Counter[str] = field(default_factory=Counter)
    """Counts of what was left out, by reason."""

    def width(self, vocab_size: int | None) -> int | None:
        """Return the bytes of an id, by the manifest or by the size of the vocabulary; None without both."""
        cache = (self.manifest or {}).get("cache", {})
        name = cache.get("token_dtype") or (token_dtype_name(vocab_size) if vocab_size else None)
        return TOKEN_DTYPES[name].itemsize if name is not None else None

    def folder(self, files: Sequence[ForeignFile], tokenizer: str | None = None) -> ForeignFolder:
        """Return the folder for an import. Raises: CacheError E221 if only some files have a loss mask."""
        silent = [file.name for file in files if file.loss is None]
        if silent and len(silent) < len(files):
            found = "has no loss mask beside it, and other files have one"
            raise CacheError(next(each.path for each in self.files if each.name == silent[0]), found, code="E221")
        cache = (self.manifest or {}).get("cache", {})
        end = end_of_documents(cache, "niels_gpt.json")
        known = {"vocab_size": cache.get("vocab_size"), "document_end": end[0] if end else None}
        return ForeignFolder(list(files), tokenizer, manifest=self.manifest, noticed=+self.noticed, **known)


def listed(
    source: Path, suffix: str, format: str, val_glob: str | None, keep: Callable[[str], bool] = lambda name: True
) -> Listing:
    """List the token files of a folder, or one file, by the manifest of an export, else by their names.

    keep: tells which names with the suffix are token files.
    Raises: FileNotFoundError; CacheError E221 if there is none, E205 for a link.
    """
    manifest, names = read_manifest(source, format), [name for name in names_below(source, suffix) if keep(name)]
    base, noticed, files = source if source.is_dir() else source.parent, Counter[str](), []
    known = manifest_files(manifest)
    noticed["files_not_in_the_manifest"] = len({*names} - {*known}) if known else 0
    for name in known or names:
        split = str(known[name]["split"]) if known and val_glob is None else split_of(name, val_glob)
        path = path_inside(base, name)
        size = size_of(path)
        if split is None or not size:
            noticed["empty_files" if split else "files_of_a_test_split"] += 1
            continue
        files.append(Listed(base, name, split, path, size, bool(known and known[name]["of"][0]["continues"])))
    if not files:
        raise CacheError(source, f"no tokens in a file *{suffix}", f"files of {format}", code="E221")
    return Listing(sorted(files, key=lambda each: SPLITS.index(each.split)), manifest, noticed)


def numbers(path: Path, dtype: str, offset: int = 0, count: int = -1) -> NDArray[np.int64]:
    """Return `count` numbers of a file as int64; -1: all after `offset` bytes.

    Raises: FileNotFoundError; CacheError E205 for anything but a regular file, E203 if it is too short, E221 for half a
        number.
    """
    width = np.dtype(dtype).itemsize
    if count < 0 and (path.stat().st_size - offset) % width:
        raise CacheError(path, f"{path.stat().st_size:,} bytes", f"whole numbers of {width} bytes", code="E221")
    parts = [part.astype(np.int64) for part in read_pieces(path, np.dtype(dtype), offset=offset, count=count)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def checked_ends(ends: NDArray[np.int64], tokens: int, where: Path, noticed: Counter[str] | None) -> NDArray[np.int64]:
    """Return the ends of documents without empty documents, which are counted.

    Raises: CacheError E221 unless they ascend, and the last is the end of the file.
    """
    if len(ends) and (ends[0] < 0 or np.any(ends[1:] < ends[:-1])):
        raise CacheError(where, "ends of documents that do not ascend", code="E221")
    if not len(ends) or ends[-1] != tokens:
        last = f"documents end at token {ends[-1] if len(ends) else 0:,}"
        raise CacheError(where, last, f"{tokens:,}, the tokens of its file", code="E221")
    is_full = np.diff(ends, prepend=0) > 0
    if noticed is not None:
        noticed["empty_documents"] += int(len(ends) - is_full.sum())
    return ends[is_full]


def loss_of(path: Path, tokens: int) -> Callable[[], Iterator[NDArray[np.bool_]]]:
    """Return a function that yields a mask of one byte per token. Raises: CacheError E221 for another size or byte."""
    if (size := size_of(path)) != tokens:
        raise CacheError(path, f"{size:,} bytes", f"{tokens:,}, one for each token", code="E221")

    def pieces() -> Iterator[NDArray[np.bool_]]:
        for part in read_pieces(path, np.dtype("u1")):
            if part.max() > 1:
                raise CacheError(path, f"a byte {part.max()}", "0 or 1 for each token", code="E221")
            yield part.view(np.bool_)

    return pieces


# --- what several formats write alike ---------------------------------------------------------------------------------


def chunked(ends: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield an array in pieces of some MiB."""
    for begin in range(0, len(ends), _CHUNK):
        yield ends[begin : begin + _CHUNK]


def spans(ends: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the start and end of each document, in pieces: int64 [some documents, 2]."""
    first = 0
    for some in chunked(ends):
        yield np.stack([np.append(first, some[:-1]), some], axis=1)
        first = int(some[-1])


def too_long(file: TokenFile, limit: str) -> CacheError:
    """Return the error for a token file with more tokens than a format can count."""
    remedy = "Build the cache with a smaller --shard-bytes, for instance 134217728"
    return CacheError(file.path, f"{file.tokens:,} tokens", f"at most 2**31 - 1, which {limit}", remedy, code="E220")
