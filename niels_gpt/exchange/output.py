"""The token cache that an export reads, and the folder that it writes.

The cache gives token files, document ends and loss. The folder takes hard links where the bytes are equal, copies, and
written files, and keeps a record of each for the manifest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.checksums import BlockSums
from niels_gpt.cache.documents import bounds, open_bits
from niels_gpt.cache.formats import SPLITS, flat_targets, has_loss_bits
from niels_gpt.cache.meta import checked_meta, special_id
from niels_gpt.cache.mmap import TokenFiles, mmap_tokens
from niels_gpt.kinds.folders import open_cache
from niels_gpt.storage import fileio
from niels_gpt.storage.fileio import META_NAME, OutputFile
from niels_gpt.storage.meta_json import open_regular, path_inside
from niels_gpt.tokenizers.document_tokens import end_of_documents
from niels_gpt.tokenizers.protocol import Ids, token_dtype_of
from niels_gpt.work import Progress

MANIFEST_NAME = "niels_gpt.json"
"""File in every exported folder that names the cache, and the shards in each file."""
MANIFEST_VERSION = 1
_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_BLOCK_TOKENS = 1 << 22
"""Tokens whose loss is computed at once; always whole examples."""


# --- the cache --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenFile:
    """A token file of a split: one shard of a pretrain cache, or a whole split of an sft cache."""

    cache: TokenCache
    split: str
    number: int
    """Its place in the split, from 0."""
    path: Path
    record: dict[str, Any]
    """Its record in meta.json: name, tokens, bytes, sha256."""
    first: int
    """Position of its first token in the split."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.record["tokens"])

    @property
    def ids(self) -> Ids:
        """Map its tokens: `cache.dtype` [tokens]. Every block is compared with its checksum.

        Raises: CacheError if the file is damaged, missing, or not a regular file.
        """
        with open(open_regular(self.path), "rb") as file:
            self.cache.sums.check_opened(self.path, file.fileno(), whole=True)
        return mmap_tokens(self.path, expected_bytes=int(self.record["bytes"]), dtype=self.cache.dtype)

    @property
    def ends(self) -> NDArray[np.int64]:
        """Return where each document or example ends, in tokens of this file: int64 [documents], the last is `tokens`.

        A document that spans several files has a piece in each.
        """
        return ends_in(self.cache.bounds(self.split), self.first, self.tokens)

    @property
    def continues(self) -> bool:
        """Whether its first document begins in the file before."""
        return continues_at(self.cache.bounds(self.split), self.first)

    def loss(self) -> Iterator[NDArray[np.bool_]]:
        """Yield whether each token carries loss, in order: bool arrays, `tokens` values in all. Only for a kind with
        loss."""
        meta, folder, ends, ids = self.cache.meta, self.cache.folder, self.ends, self.ids
        bits = open_bits(folder, meta, self.split, self.tokens) if has_loss_bits(meta) else None
        begin = 0
        while begin < self.tokens:
            last = max(int(np.searchsorted(ends, begin + _BLOCK_TOKENS, side="right")) - 1, 0)
            end = int(ends[last]) if ends[last] > begin else int(ends[np.searchsorted(ends, begin, side="right")])
            if bits is not None:
                yield bits.flat(np.array([begin]), np.array([end]))
            else:
                some = ends[(ends > begin) & (ends <= end)] - begin
                sentinels = {f"{name}_id": special_id(folder, meta, name) for name in ("asst", "eot")}
                yield flat_targets(ids[begin:end], some, np.zeros(len(some), dtype=np.bool_), **sentinels)
            begin = end


def ends_in(bounds: NDArray[np.int64], first: int, tokens: int) -> NDArray[np.int64]:
    """Return where documents end within `tokens` tokens from `first` on, relative to `first`; the last is `tokens`.

    bounds: starts of the split's documents, then the end of the last one: int64 [documents + 1].

    >>> ends_in(np.array([0, 3, 8, 10]), first=2, tokens=7)  # documents of 3, 5 and 2 tokens
    array([1, 6, 7])
    """
    begin, end = np.searchsorted(bounds, (first, first + tokens), side="right")
    ends = np.asarray(bounds[begin:end]) - first
    return ends if len(ends) and ends[-1] == tokens else np.append(ends, np.int64(tokens))


def continues_at(bounds: NDArray[np.int64], first: int) -> bool:
    """Return whether a document of a split lies on both sides of token `first`."""
    return bool(bounds[np.searchsorted(bounds, first)] != first)


class TokenCache:
    """One version of a pretrain or sft cache. gc keeps the version while this object lives."""

    def __init__(self, cache: Path) -> None:
        """Open a cache by its public folder.

        Raises: FileNotFoundError; CacheError E208 for a kind without export formats, or for a damaged meta.json.
        """
        self.path = cache
        opened = open_cache(cache)
        if not opened.kind.formats:
            raise opened.kind.lacks("formats", opened)
        self.opened, self.folder, self.meta, self.kind = opened, opened.folder, opened.meta, opened.kind
        checked_meta(self.meta, str(self.folder / META_NAME))  # as every reader does: ids below 2**31, sizes
        self.dtype: np.dtype[Any] = token_dtype_of(self.meta, self.folder / META_NAME)
        """Dtype of the ids: little-endian uint16 or uint32."""
        self.sums = BlockSums(self.folder, self.meta, "blocks")
        self._bounds: dict[str, NDArray[np.int64]] = {}

    @property
    def vocab_size(self) -> int:
        """Number of ids in the vocabulary: every id is smaller."""
        return int(self.meta["vocab_size"])

    @cached_property
    def document_end(self) -> int | None:
        """Id that ends each document of a pretrain cache; None if there is none."""
        end = end_of_documents(self.meta, str(self.folder / META_NAME))
        return None if end is None else end[0]

    def bounds(self, split: str) -> NDArray[np.int64]:
        """Return starts of the split's documents, then the end of the last one, in tokens: int64 [documents + 1]."""
        if split not in self._bounds:
            self._bounds[split] = bounds(self.folder, self.meta, split)
        return self._bounds[split]

    def files(self, split: str) -> list[TokenFile]:
        """Return the token files of a split in order; [] if it has no token."""
        found, first = [], 0
        for number, record in enumerate(self.meta["shards"][split]):
            if record["tokens"]:
                path = path_inside(self.folder, record["name"])
                found.append(TokenFile(self, split, number, path, record, first))
            first += record["tokens"]
        return found

    def checked_files(self) -> list[TokenFile]:
        """Return the token files of train, then of val, after a look at the kind, size and checksum of the end of each.

        Raises: FileNotFoundError; CacheError E203 for another size, E205 for a link, or for a file of another version.
        """
        files = [file for split in SPLITS for file in self.files(split)]
        TokenFiles([(file.path, int(file.record["bytes"])) for file in files], dtype=self.dtype)
        ends = BlockSums(self.folder, self.meta)
        for each in files:
            with open(open_regular(each.path), "rb") as file:
                ends.check_opened(each.path, file.fileno())
        return files


# --- the folder -------------------------------------------------------------------------------------------------------


class Output:
    """The folder of an export while it is written, with a record of each file."""

    def __init__(self, work: Path, cache: TokenCache, total: int, progress: Progress | None, modes: Modes) -> None:
        """work: empty folder. total: bytes of all token files. modes: remembers the modes of the cache's files.
        progress: called with files, bytes written or linked, and `total`."""
        self.work, self.cache, self._progress = work, cache, progress
        self.records: list[dict[str, Any]] = []
        """Record of each file, in the order written: name, bytes, sha256; for a token file also split and shards."""
        self.noted: dict[str, int] = {}
        """Counts of what the format could not hold as the cache has it, by reason."""
        self.modes = modes
        self.mask: str | None = None
        """Name of the mask that tells which tokens carry loss, where one was asked for."""
        self._total, self._done = total, 0

    def place(self, name: str, file: TokenFile) -> None:
        """Put a token file of the cache at `name`: a hard link, or a copy where a link is impossible.

        A link is made read-only, and the cache's file with it, because both are one file. A file of another owner
        cannot be made read-only, and is copied.
        """
        path = self.work / name
        fileio.make_dir(path.parent)
        linked = fileio.link_or_copy(file.path, path) and self.modes.made_read_only(path, file.path)
        record = {"bytes": int(file.record["bytes"]), "sha256": file.record["sha256"]}
        self._add(name, record, made="link" if linked else "copy", files=[file])

    def write(self, name: str, content: Iterable[Any], files: Iterable[TokenFile] = ()) -> None:
        """Write a file from buffers. files: token files that it holds, in order."""
        path, digest = self.work / name, hashlib.sha256()
        fileio.make_dir(path.parent)
        file = OutputFile(path)
        try:
            for part in content:
                file.write(part)
                digest.update(part)
        finally:
            file.close()
        self._add(name, {"bytes": file.num_bytes, "sha256": digest.hexdigest()}, made="written", files=list(files))

    def note(self, reason: str, count: int) -> None:
        """Count something that the format could not hold as the cache has it."""
        if count:
            self.noted[reason] = self.noted.get(reason, 0) + count

    def _add(self, name: str, record: dict[str, Any], *, made: str, files: list[TokenFile]) -> None:
        tokens = [{"name": file.record["name"], "tokens": file.tokens, "continues": file.continues} for file in files]
        split = {"split": files[0].split, "of": tokens} if files else {}
        self.records.append({"name": name, **record, "made": made, **split})
        self._done += sum(int(file.record["bytes"]) for file in files)
        if self._progress is not None:
            self._progress(len(self.records), self._done, self._total)


class Modes:
    """Original modes of linked files, to restore them if the work fails."""

    def __init__(self) -> None:
        self._before: list[tuple[Path, int]] = []

    @contextmanager
    def restored_on_failure(self) -> Iterator[Modes]:
        """Restore the mode of each file if the block raises."""
        try:
            yield self
        except BaseException:
            for path, mode in self._before:
                with suppress(OSError):
                    os.chmod(path, mode)
            raise

    def made_read_only(self, path: Path, source: Path) -> bool:
        """Make a hard link to `source` read-only, or replace it by a copy. Returns whether it is still a link."""
        mode = stat.S_IMODE(path.stat().st_mode)
        if not mode & _WRITES:
            return True
        try:
            os.chmod(path, mode & ~_WRITES)
        except PermissionError:
            linked = path.with_name(f".{path.name}.link")
            os.rename(path, linked)
            shutil.copyfile(linked, path)
            fileio.remove(linked)
            return False
        self._before.append((source, mode))
        return True
