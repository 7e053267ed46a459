"""The token files of a folder of another tool: which there are, their splits and order, and what lies beside them;
and what several formats write alike: arrays in pieces, the error of a shard that is too long for a format.
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
    """One token file."""

    base: Path
    """The folder that names are below."""
    name: str
    split: str
    path: Path
    size: int
    """In bytes, more than 0."""
    continues: bool
    """As the manifest says; False without one."""

    def beside(self, name: str) -> Path | None:
        """Return the path of another file below the folder; None where there is none. Raises: CacheError for a link."""
        path = path_inside(self.base, name)
        return path if os.path.lexists(path) else None

    def tokens_of(self, width: int) -> int:
        """Return how many ids of so many bytes it holds. Raises: CacheError E221."""
        if self.size % width:
            raise CacheError(self.path, f"{self.size:,} bytes", f"ids of {width} bytes", code="E221")
        return self.size // width

    def plain(self, width: int, **more: Any) -> ForeignFile:
        """Return it as a file of nothing but ids, uint16 or uint32 as its width is. more: of ForeignFile."""
        dtype = np.dtype(f"<u{width}")
        tokens, pieces = self.tokens_of(width), partial(read_pieces, self.path, dtype)
        given = {"pieces": pieces, "continues": self.continues, "ends": None, **more}
        return ForeignFile(self.split, self.name, tokens, token_file=self.path, itemsize=width, **given)


@dataclass(frozen=True)
class Listing:
    """The token files of a folder."""

    files: list[Listed]
    """Those of train in their order, then those of val."""
    manifest: Mapping[str, Any] | None
    noticed: Counter[str] = field(default_factory=Counter)
    """What was left out, counted by reason."""

    def width(self, vocab_size: int | None) -> int | None:
        """Return the bytes of an id, as the manifest says or as a vocabulary of this size has; None without both."""
        cache = (self.manifest or {}).get("cache", {})
        name = cache.get("token_dtype") or (token_dtype_name(vocab_size) if vocab_size else None)
        return TOKEN_DTYPES[name].itemsize if name is not None else None

    def folder(self, files: Sequence[ForeignFile], tokenizer: str | None = None) -> ForeignFolder:
        """Return what an import needs. Raises: CacheError E221 where some files have a loss mask, and others none."""
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
    """List the token files of a folder, or one file: by the manifest of an export, or else by their names.

    keep: which names with the suffix are those of token files.
    Raises: FileNotFoundError; CacheError E221 for none, E205 for a link.
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
    """Return numbers of a file as int64. Raises: as `read_pieces`; CacheError E221 for half a number."""
    width = np.dtype(dtype).itemsize
    if count < 0 and (path.stat().st_size - offset) % width:
        raise CacheError(path, f"{path.stat().st_size:,} bytes", f"whole numbers of {width} bytes", code="E221")
    parts = [part.astype(np.int64) for part in read_pieces(path, np.dtype(dtype), offset=offset, count=count)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def checked_ends(ends: NDArray[np.int64], tokens: int, where: Path, noticed: Counter[str] | None) -> NDArray[np.int64]:
    """Return where documents end without empty ones, which are counted.

    Raises: CacheError E221 where they do not ascend, and where the last is not the end of the file.
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
    """Return what yields a mask of one byte a token. Raises: CacheError E221 for another size or another byte."""
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
    """Yield where documents start and end, in pieces: int64 [some documents, 2]."""
    first = 0
    for some in chunked(ends):
        yield np.stack([np.append(first, some[:-1]), some], axis=1)
        first = int(some[-1])


def too_long(file: TokenFile, limit: str) -> CacheError:
    """Return the error of a token file with more tokens than a format counts."""
    remedy = "Build the cache with a smaller --shard-bytes, for instance 134217728"
    return CacheError(file.path, f"{file.tokens:,} tokens", f"at most 2**31 - 1, which {limit}", remedy, code="E220")
