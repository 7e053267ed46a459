"""Assemble a cache from files of tokens: link or rewrite them, and write index, names, checksums and meta.json.

One pass over the bytes hashes every file and compares every id with the vocabulary.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.build_sft import packed
from niels_gpt.cache.formats import (
    BLOCK_BYTES,
    IMPORTED_TEMPLATE,
    OFFSET_DTYPE,
    PARTITIONED_VERSION,
    SPLITS,
    npy_header,
)
from niels_gpt.engine.checkpoints import CHECKSUMS
from niels_gpt.engine.journal import BlockHashes, HashedFile, npy_parts, write_whole
from niels_gpt.engine.meta import Source, write_description
from niels_gpt.exchange.foreign import ForeignFile, read_pieces
from niels_gpt.exchange.output import Modes
from niels_gpt.kinds.kind import Kind
from niels_gpt.settings import usable_cores
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import META_NAME, OutputFile
from niels_gpt.storage.meta_json import MAX_JSON_BYTES, open_regular
from niels_gpt.tokenizers.document_tokens import DocumentToken
from niels_gpt.tokenizers.protocol import token_dtype
from niels_gpt.work import Progress

_MOST_THREADS = 8
_COUNTED = 1 << 18  # ids that are counted at once: numpy makes them int64, which then fits a core's cache

Ends = NDArray[np.int64]


@dataclass(frozen=True)
class About:
    """Content of meta.json that the token files do not decide."""

    kind: Kind
    """For a kind with loss, every file has `loss`, and each split is one file of tokens."""
    vocabulary: Mapping[str, Any]
    """tokenizer_sha256, vocab_size, token_dtype and special_token_ids."""
    source: Source
    """dataset_name, dataset_config, and the key `source`."""
    imported: Mapping[str, Any]
    """The key `imported`: format, borders, files, tokenizer."""
    end: DocumentToken | None = None
    """Token that may end documents; decides the borders of files without borders."""
    noticed: Mapping[str, int] = field(default_factory=dict)
    """Counts of what the format left out or changed, by reason."""
    pad_id: int | None = None
    """Pads the rows of an sft cache."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of meta.json; they replace the keys above."""


@dataclass(frozen=True)
class Assembled:
    """Files of a cache before its meta.json is written."""

    work: Path
    dtype: np.dtype[Any]
    shards: dict[str, list[dict[str, Any]]]
    """Records of the token files, by split."""
    docs: dict[str, int]
    """Documents by split; their starts are in index/SPLIT_docs.npy or SPLIT_idx.npy."""
    ended: dict[str, int]
    """Documents by split that end with `About.end`."""
    cut: dict[str, bool]
    """Whether the last document of a split lacks that end."""
    id_counts: dict[str, NDArray[np.int64]]
    """How often each counted id occurs, by split: int64 [vocab_size]; 0 for other ids."""
    linked_bytes: int
    """Bytes of the token files that are hard links."""


Examine = Callable[[Assembled], Mapping[str, Any]]
"""Looks at the written files and returns more keys of meta.json. Adds its counts in `noticed` to `About.noticed`."""


def assemble(
    work: Path,
    files: Sequence[ForeignFile],
    about: About,
    links: Modes | None,
    *,
    counted: Sequence[int] | None = (),
    examine: Examine | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write all files of a cache, meta.json last, into an empty folder. Returns the meta.

    links: remembers the modes of linked files; None: link nothing. counted: ids whose occurrences `examine` needs;
        None: all. Counting all takes longer than the sha256.
    progress: called with files, bytes of tokens read, and bytes of tokens in all.
    Raises: CacheError E222 for an id outside the vocabulary, E221 for a file that its format describes otherwise, E206
        for more files than a meta.json can list; OSError.
    """
    for folder in ("index", *(() if about.kind.has_loss else SPLITS)):
        fileio.make_dir(work / folder)
    taker = _Taker(work, about, links, sum(file.tokens for file in files), counted, progress)
    borders = {split: _Borders(work, split, about) for split in SPLITS}
    shards: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    crcs: list[bytes] = []  # of all files in the order of `file_records`: readers find a file's blocks by counting
    with ThreadPoolExecutor(min(_MOST_THREADS, usable_cores())) as executor:
        for split, taken in _in_order(executor, taker, _token_files(about.kind, files)):
            shards[split].append(taken.record)
            crcs.append(taken.checksums)
            for part in taken.parts:
                borders[split].add(part)
    index = {split: borders[split].write_index(crcs) for split in SPLITS}
    ids = {split: borders[split].finish_names(crcs) for split in SPLITS}
    loss = _write_loss(work, files, borders, crcs) if about.kind.has_loss else {}
    checksums = {**write_whole(work, CHECKSUMS, crcs), "block_bytes": BLOCK_BYTES}
    docs, ended = ({split: getattr(borders[split], name) for split in SPLITS} for name in ("docs", "ended"))
    cut = {split: not borders[split].is_ended for split in SPLITS}
    done = Assembled(work, taker.dtype, shards, docs, ended, cut, taker.id_counts, taker.linked_bytes)
    more = dict(examine(done)) if examine is not None else {}
    noticed = {**about.noticed, **loss.pop("noticed", {}), **more.pop("noticed", {})}
    keys = {**_described(about, done), **loss, **about.keys, **more}
    keys["noticed"] = {reason: count for reason, count in sorted(noticed.items()) if count}
    for split in SPLITS:
        fileio.remove(borders[split].starts_path)
    meta = write_description(
        work,
        vocabulary=about.vocabulary,
        source=about.source,
        counters=about.source.counters,
        seed=keys.pop("seed", None),
        shards=shards,
        index=index,
        ids=ids,
        checksums=checksums,
        **keys,
    )
    if (size := (work / META_NAME).stat().st_size) > MAX_JSON_BYTES:
        found = f"{len(files):,} files, whose {META_NAME} has {size:,} bytes"
        raise CacheError(work, found, f"{MAX_JSON_BYTES:,} bytes", "Join the files to fewer", code="E206")
    return meta


def _described(about: About, done: Assembled) -> dict[str, Any]:
    """Return the keys of meta.json that settings and counts decide in a build; null for settings an import lacks."""
    tokens = {split: sum(record["tokens"] for record in done.shards[split]) for split in SPLITS}
    totals = {f"{split}_tokens": tokens[split] for split in SPLITS}
    common: dict[str, Any] = {
        "format_version": PARTITIONED_VERSION,
        "kind": about.kind.name,
        "built": True if all(tokens.values()) else "partial",
        "imported": dict(about.imported),
        "split_rule": "as imported",
        "val_frac": None,
        "on_special": None,
        "dropped": {},
    }
    if about.kind.has_loss:
        more = {"pad_id": about.pad_id, "chat_template": IMPORTED_TEMPLATE, "examples_read": sum(done.docs.values())}
        return {**common, **more, "totals": totals | {f"{split}_examples": done.docs[split] for split in SPLITS}}
    return {
        **common,
        **_end_of(about, done),
        "totals": totals,
        "docs": done.docs,
        "documents_read": sum(done.docs.values()),
        "shard_bytes": None,
        "shuffle": None,
        **{f"max_{split}_tokens": None for split in SPLITS},
        "budget_reached": dict.fromkeys(SPLITS),
    }


def _end_of(about: About, done: Assembled) -> dict[str, Any]:
    """Return `document_end` and `cut`. As in a build, only the last document of a split may lack its end."""
    if about.end is None or any(done.docs[split] != done.ended[split] + done.cut[split] for split in SPLITS):
        return {"document_end": None, "cut": {"documents": 0, "tokens": 0}}
    return {
        "document_end": {"id": about.end.id, "token": about.end.token},
        "cut": {"documents": sum(done.cut.values()), "tokens": 0},
    }


# --- token files ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Where the documents of one source file end."""

    file: ForeignFile
    ends: Ends
    ended: int
    """Documents that end with the end-of-document id."""
    is_ended: bool
    """Whether that id is the last one of the file."""


@dataclass(frozen=True)
class _Taken:
    """A written token file."""

    record: dict[str, Any]
    checksums: bytes
    parts: list[_Part]


def _token_files(kind: Kind, files: Sequence[ForeignFile]) -> Iterator[tuple[str, str, list[ForeignFile]]]:
    """Yield split, name and source files of each token file. Pretrain: one for each source; sft: one for each split."""
    for split in SPLITS:
        of_split = [file for file in files if file.split == split]
        if kind.has_loss:
            yield split, f"{split}_tokens.bin", of_split
        else:
            yield from ((split, f"{split}/shard_{at:05d}.bin", [file]) for at, file in enumerate(of_split))


def _in_order(
    executor: ThreadPoolExecutor, taker: _Taker, jobs: Iterable[tuple[str, str, list[ForeignFile]]]
) -> Iterator[tuple[str, _Taken]]:
    """Take several token files at once, and yield them in order. Few run ahead, so that few indexes are in memory."""
    waiting: deque[tuple[str, Future[_Taken]]] = deque()
    try:
        for split, name, files in jobs:
            waiting.append((split, executor.submit(taker.take, name, files)))
            if len(waiting) > _MOST_THREADS:
                before, first = waiting.popleft()
                yield before, first.result()
        while waiting:
            before, first = waiting.popleft()
            yield before, first.result()
    finally:
        for _, future in waiting:
            future.cancel()


class _Taker:
    """Link or rewrite token files, in several threads."""

    def __init__(
        self,
        work: Path,
        about: About,
        links: Modes | None,
        tokens: int,
        counted: Sequence[int] | None,
        progress: Progress | None,
    ) -> None:
        self.work, self.about, self._links, self._progress = work, about, links, progress
        self._counted = counted
        self.size = int(about.vocabulary["vocab_size"])
        self.dtype = token_dtype(self.size)
        self.id_counts = {split: np.zeros(self.size, dtype=np.int64) for split in SPLITS}
        self.linked_bytes = self._files = self._read = 0
        self._total, self._lock = tokens * self.dtype.itemsize, threading.Lock()

    def take(self, name: str, files: Sequence[ForeignFile]) -> _Taken:
        """Write one token file. Raises: CacheError E221, E222; OSError."""
        path = self.work / name
        if self._links is not None and len(files) == 1 and self._may_link(files[0]):
            self._link(files[0], path, self._links)
            hashes = BlockHashes()
            parts = [self._looked_at(files[0], read_pieces(path, self.dtype), hashes.update)]
        else:
            out = HashedFile(path)
            try:
                parts = [self._looked_at(file, file.pieces(), out.write) for file in files]
            finally:
                out.close()
            hashes = out.hashes
        tokens = sum(file.tokens for file in files)
        record = {"name": name, "tokens": tokens, "bytes": hashes.num_bytes, "sha256": hashes.sha256}
        return _Taken(record, hashes.checksums(), parts)

    def _may_link(self, file: ForeignFile) -> bool:
        return file.token_file is not None and file.itemsize == self.dtype.itemsize

    def _link(self, file: ForeignFile, path: Path, links: Modes) -> None:
        assert file.token_file is not None
        os.close(open_regular(file.token_file))  # refuses links and pipes, which a hard link would keep
        is_linked = fileio.link_or_copy(file.token_file, path) and links.made_read_only(path, file.token_file)
        if (size := path.lstat().st_size) != file.tokens * self.dtype.itemsize:
            expected = f"{file.tokens * self.dtype.itemsize:,}, as when it was looked at"
            raise CacheError(file.token_file, f"{size:,} bytes", expected, code="E221")
        with self._lock:
            self.linked_bytes += size * is_linked

    def _looked_at(
        self, file: ForeignFile, pieces: Iterable[NDArray[Any]], write: Callable[[NDArray[Any]], None]
    ) -> _Part:
        """Check the ids of a file and write them. Returns where its documents end."""
        ends = None if file.ends is None else _checked_ends(file, file.ends())
        end = None if self.about.end is None else self.about.end.id
        counts, found = np.zeros(1, dtype=np.int64), [np.zeros(0, dtype=np.int64)]
        done, ended, is_ended = 0, 0, False
        for piece in pieces:
            if not len(piece):
                continue
            ids = self._checked(file, piece, done)
            write(ids)
            counts = counts + self._counts(ids)
            if ends is None and end is not None:
                found.append((ids == end).nonzero()[0] + (done + 1))
            elif ends is not None and end is not None:
                first, last = ends.searchsorted([done, done + len(ids)], side="right")
                ended += int(np.count_nonzero(ids[ends[first:last] - (done + 1)] == end))
            is_ended = int(ids[-1]) == end
            done += len(ids)
            self._report(len(ids))
        if done != file.tokens:
            raise CacheError(file.name, f"{done:,} tokens", f"{file.tokens:,}, as when it was looked at", code="E221")
        if ends is None:
            ends = np.concatenate(found)
            ended = len(ends)
            ends = ends if is_ended else np.append(ends, np.int64(done))
        with self._lock:
            self.id_counts[file.split][slice(None) if self._counted is None else [*self._counted]] += counts
        self._report(0, files=1)
        return _Part(file, ends, ended, is_ended)

    def _counts(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """Return how often each counted id occurs."""
        if self._counted is not None:
            return np.array([np.count_nonzero(ids == each) for each in self._counted], dtype=np.int64)
        parts = range(0, len(ids), _COUNTED)
        return sum(
            (np.bincount(ids[at : at + _COUNTED], minlength=self.size) for at in parts), np.zeros(self.size, np.int64)
        )

    def _checked(self, file: ForeignFile, piece: NDArray[Any], done: int) -> NDArray[Any]:
        """Return ids in the dtype of the cache. Raises: CacheError E222 for one outside the vocabulary."""
        if piece.max() >= self.size or (piece.dtype.kind == "i" and piece.min() < 0):
            wrong = int(((piece >= self.size) | (piece < 0)).argmax())
            found = f"token {done + wrong:,} is id {int(piece[wrong])}"
            raise CacheError(file.name, found, f"ids below {self.size:,}, of the tokenizer's vocabulary", code="E222")
        return piece.astype(self.dtype, copy=False)

    def _report(self, tokens: int, files: int = 0) -> None:
        if self._progress is not None:
            with self._lock:
                self._files, self._read = self._files + files, self._read + tokens * self.dtype.itemsize
                self._progress(self._files, self._read, self._total)


def _checked_ends(file: ForeignFile, ends: Ends) -> Ends:
    """Return `ends`. Raises: CacheError E221 unless they ascend strictly to the file's last token."""
    if not len(ends) or ends[0] <= 0 or ends[-1] != file.tokens or (np.diff(ends) <= 0).any():
        found = f"{len(ends):,} ends of documents that do not ascend from 1 to its {file.tokens:,} tokens"
        raise CacheError(file.name, found, code="E221")
    return ends


# --- borders and names ------------------------------------------------------------------------------------------------


class _Borders:
    """Starts and names of the documents of a split, appended file by file."""

    def __init__(self, work: Path, split: str, about: About) -> None:
        self.work, self.split, self._kind = work, split, about.kind
        self._by_id = about.end is not None
        self.starts_path = work / f"{split}_starts.bin"
        self._starts, self._names = OutputFile(self.starts_path), HashedFile(work / f"index/{split}_ids.txt")
        self.docs = self.ended = self.tokens = 0
        self.is_ended = True  # the file before

    def add(self, part: _Part) -> None:
        """Append the documents of a file. The first one may continue the last document of the file before."""
        # Without borders of its own a file whose predecessor lacks the last end continues that document.
        joins = not self.is_ended if part.file.ends is None and self._by_id else part.file.continues
        if joins and not self.tokens:
            raise CacheError(part.file.name, "begins inside a document, and no file is before it", code="E221")
        self._starts.write((np.append(0, part.ends[:-1])[int(joins) :] + self.tokens).astype(OFFSET_DTYPE))
        for lines in part.file.name_lines(len(part.ends), int(joins)):
            self._names.write(lines)
        self.docs += len(part.ends) - joins
        self.ended += part.ended - (joins and self.is_ended)  # the id that ends the file before ended no document
        self.tokens, self.is_ended = self.tokens + part.file.tokens, part.is_ended

    def write_index(self, crcs: list[bytes]) -> dict[str, Any]:
        """Write the file of starts. Returns its record."""
        self._starts.close()
        if self._kind.has_loss:
            record = write_whole(self.work, f"{self.split}_idx.npy", self._idx_parts(), crcs)
            return {**record, "entries": self.docs}
        parts = npy_parts(self.starts_path, self.docs + 1, self.tokens)
        return {**write_whole(self.work, f"index/{self.split}_docs.npy", parts, crcs), "entries": self.docs + 1}

    def _idx_parts(self) -> Iterator[Any]:
        yield npy_header(self.docs)
        yield from read_pieces(self.starts_path, OFFSET_DTYPE)

    def finish_names(self, crcs: list[bytes]) -> dict[str, Any]:
        """Close the file of names. Returns its record."""
        self._names.close()
        crcs.append(self._names.checksums())
        record = {"name": f"index/{self.split}_ids.txt", "bytes": self._names.num_bytes, "sha256": self._names.sha256}
        return {**record, "entries": self.docs}


# --- loss -------------------------------------------------------------------------------------------------------------


class _Loss:
    """Which tokens of an sft split carry loss. The first token of an example never does."""

    def __init__(self, starts: NDArray[np.int64]) -> None:
        self._starts, self._last = starts, -1
        self.supervised = self.cleared = self.examples = 0

    def parts(self, files: Sequence[ForeignFile]) -> Iterator[NDArray[np.uint8]]:
        """Yield 1 for each token with loss, else 0, in order, and count them."""
        done = 0
        for file in files:
            assert file.loss is not None
            before = done
            for part in file.loss():
                values = np.array(part, dtype=np.bool_)
                first, last = self._starts.searchsorted([done, done + len(values)])
                begins = self._starts[first:last] - done
                self.cleared += int(np.count_nonzero(values[begins]))
                values[begins] = False
                owners = np.unique(self._starts.searchsorted(values.nonzero()[0] + done, side="right"))
                self.examples += len(owners) - bool(len(owners) and owners[0] == self._last)
                self._last = int(owners[-1]) if len(owners) else self._last
                self.supervised += int(np.count_nonzero(values))
                done += len(values)
                yield values.view(np.uint8)
            if done - before != file.tokens:
                raise CacheError(file.name, f"loss of {done - before:,} tokens", f"{file.tokens:,}", code="E221")


def _write_loss(
    work: Path, files: Sequence[ForeignFile], borders: Mapping[str, _Borders], crcs: list[bytes]
) -> dict[str, Any]:
    """Write the loss bits of both splits. Returns their keys of meta.json, and the counts for `noticed`."""
    records, supervised, cleared, without = {}, {}, 0, 0
    for split in SPLITS:
        loss = _Loss(np.fromfile(borders[split].starts_path, dtype=OFFSET_DTYPE))
        parts = loss.parts([file for file in files if file.split == split])
        records[split] = write_whole(work, f"{split}_loss.bits", packed(parts), crcs)
        supervised[split] = loss.supervised
        cleared, without = cleared + loss.cleared, without + borders[split].docs - loss.examples
    noticed = {"first_tokens_with_loss": cleared, "examples_without_loss": without}
    return {"loss_bits": records, "supervised_tokens": supervised, "noticed": noticed}
