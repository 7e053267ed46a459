"""Readers of a pretrain cache: one split, and random windows of it for training.

B: rows of a batch, T: tokens of a row.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import SPLITS, Ids, token_dtype_of
from niels_gpt.cache.meta import existing_cache, sentinel_names, split_shards, tokenizer_of
from niels_gpt.cache.mmap import TokenFiles, load_idx, public_file, public_name, token_files
from niels_gpt.cache.reader import OpeningTokens, Reader, local_path, named_split
from niels_gpt.display.decoded import Decoded, DecodedItems
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.errors import REBUILD, CacheError, OutOfRange
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import checked_int, open_regular, path_inside, resolved
from niels_gpt.storage.versions import public_path, version_name
from niels_gpt.tokenizers.protocol import MAX_IDS

if TYPE_CHECKING:
    import torch


class PretrainSplit(Reader):
    """The shards of one split of one version of a cache.

    Versions, forks and pickles: as `niels_gpt.cache.reader.Reader`. Sizes are checked at once; a shard is opened at its
    first read.
    """

    kind = "pretrain"
    _not_copied = ("_documents",)
    _documents: NDArray[np.int64] | None = None

    def __init__(
        self,
        shards_dir: str | os.PathLike[str],
        *,
        split: str | None = None,
        in_order: bool = False,
        **opening: Unpack[OpeningTokens],
    ) -> None:
        """shards_dir: a cache with `split`, or a split's folder, such as cache/pretrain/fineweb_edu/train.

        split: "train" or "val"; None: `shards_dir` says it.
        in_order: windows will be read one after the other, not at random.
        opening: see `niels_gpt.cache.reader.OpeningTokens`.
        Raises: FileNotFoundError, CacheError (each names the file), ValueError for another split, io, dtype or check.
        """
        cache, name = named_split(local_path(shards_dir, opening), split)
        folder = existing_cache(resolved_split(cache if name is None else cache / name), shards_dir)
        self._how: dict[str, Any] = {"in_order": in_order, "dtype": opening.pop("dtype", None)}
        self._how["io"] = opening.pop("io", "mmap")
        self._open_version(folder.parent, folder.name, **opening)

    def _prepare(self) -> None:
        tokens = token_dtype_of(self.meta, self.cache / META_NAME, self._how.pop("dtype"))
        shards = split_shards(self.cache, self.meta, self.split)
        self.files = token_files(shards, self._sums, **self._how, dtype=tokens)
        self.num_tokens = int(self.lengths.sum())
        if not self.files.paths and (self.folder / META_NAME).exists():
            found, expected = "a whole cache", "the folder of a split of a pretrain cache in it"
            remedy = f'Open {public_name(self.folder / SPLITS[0])}, or pass split="{SPLITS[0]}"'
            raise CacheError(self.folder, found, expected, remedy, code="E209")
        if not self.files.paths:
            remedy = "Give its source more text, then build it again"
            raise CacheError(self.folder, "this split has no shard", remedy=remedy, code="E204")

    def _open(self) -> None:
        self._documents = None  # shards are opened at their first read, and a copy brings their sizes

    def open_all(self) -> None:
        """Look at every file now, as its first read does; at a URL at none. Raises: CacheError."""
        for path in () if self.is_fetched else self.files.paths:
            with open(open_regular(path), "rb") as file:
                self._sums.check_opened(path, file.fileno())
        if (self.meta or {}).get("index"):
            self._documents = self.documents

    def _sizes(self) -> str:
        return f"{len(self.lengths)} shards, {self.num_tokens:,} tokens"

    @property
    def folder(self) -> Path:
        """The split's folder."""
        return self.cache / self.split

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards."""
        return self.num_tokens * self.files.dtype.itemsize

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each shard: int64 [shards]."""
        return self.files.lengths

    def rows(self, shards: NDArray[np.int64], starts: NDArray[np.int64], width: int) -> Ids:
        """Return ids [B, width]: `width` tokens of shard shards[b] from its token starts[b] on, all inside it.

        Raises: IndexError for a window that is not inside its shard; CacheError, naming file and place, for an id
            outside meta.json's vocab_size.
        """
        outside = np.flatnonzero((starts < 0) | (starts + width > self.lengths[shards]))
        if len(outside):
            shard, start = int(shards[outside[0]]), int(starts[outside[0]])
            path, length = self.files.paths[shard], int(self.lengths[shard])
            raise OutOfRange(f"{path}: no window of {width} tokens at token {start}: it has {length}")
        return gathered(self.files, self.vocab_size, shards, starts + self.files.first_tokens[shards], width)

    @property
    def documents(self) -> NDArray[np.int64]:
        """Where each document starts and where the last one ends, in tokens of the split: int64 [documents + 1].

        The index file, mapped and checked at the first use. Raises: FileNotFoundError, CacheError.
        """
        if self._documents is None:
            name, total = f"index/{self.split}_docs.npy", self.num_tokens
            path, most = path_inside(self.cache, name), np.iinfo(np.int64).max
            record = (self.meta or {}).get("index", {}).get(self.split, {})
            size = record["bytes"] if record.get("name") == name else None
            starts = load_idx(path, num_tokens=most, expected_bytes=size, sums=self._sums)
            if starts[-1] != total:
                expected = f"{total}, the tokens of the shards"
                raise CacheError(path, f"ends at token {starts[-1]}", expected, REBUILD, code="E201")
            self._documents = starts
        return self._documents

    def read(
        self,
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        pads: NDArray[np.int64] | None = None,
        pad_id: int = 0,
    ) -> Ids:
        """Return tokens begins[i] to ends[i] - 1 of the split, which may lie in several shards, end to end: ids [sum].

        begins, ends: [n], none of the ranges empty. pads: int64 [n], how many pad_id follow each range; None: none.
        Raises: IndexError for a range that is not inside the split; CacheError, naming file and place, for an id
            outside meta.json's vocab_size.
        """
        stops = self._stops
        wrong = np.flatnonzero((begins < 0) | (begins >= ends) | (ends > stops[-1]))
        if len(wrong):
            begin, end = int(begins[wrong[0]]), int(ends[wrong[0]])
            raise OutOfRange(f"{self.folder}: no tokens {begin} to {end - 1}: it has {stops[-1]}")
        shards = np.zeros(len(begins), dtype=np.int64)
        if len(stops) > 1:
            shards, last = stops.searchsorted(begins, side="right"), stops.searchsorted(ends, side="left")
            if (shards != last).any():  # a range of n shards as n ranges
                counts = last - shards + 1
                until = np.cumsum(counts)
                shards = np.repeat(last + 1 - until, counts) + np.arange(until[-1])
                begins = np.maximum(np.repeat(begins, counts), stops[shards] - self.lengths[shards])
                ends = np.minimum(np.repeat(ends, counts), stops[shards])
                if pads is not None:
                    after, pads = pads, np.zeros(len(begins), dtype=np.int64)
                    pads[until - 1] = after
        to_places = (self.files.first_tokens + self.lengths - stops).take(shards)
        ids = self.files.gather_ranges(shards, begins + to_places, ends + to_places, pads, pad_id)
        limit = id_limit(self.vocab_size, ids)
        if limit is not None and ids.size and ids.item(ids.argmax()) >= limit:
            place = int((ids >= limit).argmax())
            until = np.cumsum(ends - begins + (0 if pads is None else pads))
            part = int(until.searchsorted(place, side="right"))
            file, at = int(shards[part]), place - (int(until[part - 1]) if part else 0)
            token = int(begins[part]) + at - int(stops[file] - self.lengths[file])
            path, itemsize = self.files.paths[file], self.files.itemsize(file)
            raise outside_vocabulary(path, token, itemsize, int(ids[place]), self.vocab_size)
        return ids

    def will_read(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Say which ranges will be read next, in this order: those of a cache at a URL are fetched ahead."""
        if self.is_fetched:
            shards = self._stops.searchsorted(begins, side="right")
            to_places = (self.files.first_tokens + self.lengths - self._stops)[shards]
            ends = np.minimum(ends, self._stops[shards])  # what lies in the next shard is not fetched ahead
            self.files.will_read(shards, begins + to_places, ends + to_places)

    @property
    def _stops(self) -> NDArray[np.int64]:
        """Where each shard ends, in tokens of the split: int64 [shards]."""
        return np.cumsum(self.lengths)

    def stream(self, start: int, end: int) -> Ids:
        """Return tokens start to end - 1 of the split, which may lie in several shards: ids [end - start].

        Raises: CacheError, naming file and place, for an id outside meta.json's vocab_size.
        """
        if start >= end:
            return np.zeros(0, dtype=self.files.dtype)
        return self.read(np.array([start]), np.array([end]))


class PretrainTokenStreamDataset(DecodedItems):
    """Draws windows of T + 1 tokens, all windows of all shards equally likely; none crosses two shards (PR-03, D13).

    dataset[i] is document i, to look at: its ids and its text. Length and iteration also go over documents.
    Versions, forks and pickles: see `PretrainSplit`. For every window exactly once: `niels_gpt.sampling.EpochStream`.
    """

    def __init__(
        self,
        shards_dir: str | os.PathLike[str],
        *,
        T: int,
        device: str = "cpu",
        split: str | None = None,
        **opening: Unpack[OpeningTokens],
    ) -> None:
        """shards_dir, split, opening: see `PretrainSplit`.

        Raises: FileNotFoundError, CacheError (each names the file), ValueError for T < 1.
        """
        self.T, self.device = checked_int("T", T, 1), device
        self._split = PretrainSplit(shards_dir, split=split, **opening)
        self.shards_dir, self.meta, self.vocab_size = self._split.folder, self._split.meta, self._split.vocab_size
        lengths = self._split.lengths
        self.skipped_shards, self.skipped_tokens = int((lengths <= T).sum()), int(lengths[lengths <= T].sum())
        if self.skipped_shards == len(lengths):
            raise CacheError(
                public_file(self.shards_dir),
                f"the longest shard has {lengths.max()} tokens",
                f"T + 1 = {T + 1}",
                code="E107",
            )
        # Window w of all is window w - begins[s] of shard s, the first shard with w < ends[s].
        counts = np.maximum(lengths - T, 0)
        self._ends: NDArray[np.int64] = np.cumsum(counts)
        self._to_places = self._split.files.first_tokens - (self._ends - counts)
        self.num_windows = int(self._ends[-1])
        """Number of different windows."""
        if self.skipped_shards:
            where = public_name(self.shards_dir)
            found = (
                f"{self.skipped_shards} shards ({self.skipped_tokens} tokens) are shorter than T + 1 = {T + 1} tokens"
            )
            warnings.warn(CodedWarning("W202", f"{where}: {found} and are left out"), stacklevel=2)

    def __repr__(self) -> str:
        """Name the cache and the form of a batch."""
        return f"PretrainTokenStreamDataset({self._split!r}, x, y: int64 [B, {self.T}] on {self.device})"

    def _repr_html_(self) -> str:
        from niels_gpt.display.numbers import number_of
        from niels_gpt.display.tables import html_table

        split = self._split
        rows = {
            "cache": version_name(split.cache),
            "split": f"{split.split}: {number_of(len(split.lengths), 'shard')}, {split.num_tokens:,} tokens",
            "windows": f"{self.num_windows:,} of T + 1 = {self.T + 1} tokens",
            "batch": f"x, y: int64 [B, {self.T}] on {self.device}",
        }
        return html_table("PretrainTokenStreamDataset", rows.items())

    def __len__(self) -> int:
        """Number of documents. Raises: FileNotFoundError, CacheError if the index of documents cannot be read."""
        return len(self._split.documents) - 1

    def _item(self, number: int) -> Decoded:
        split = self._split
        cache, (start, end) = split.cache, split.documents[number : number + 2].tolist()
        tokenizer = partial(tokenizer_of, cache, split.fingerprint()["tokenizer_sha256"])
        name = f"document {number:,} of {(public_path(cache) or cache).name}, {split.split}"
        return Decoded(name, split.stream(start, end), None, sentinel_names(cache, split.meta), tokenizer)

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of these tokens for a checkpoint; `expect` compares it at open."""
        return self._split.fingerprint()

    def get_batch(self, *, B: int, generator: torch.Generator) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Return x, y: int64 [B, T], contiguous, on `device`, with y[:, :-1] == x[:, 1:].

        So y is shifted. Labels of a model of transformers are not: it shifts them itself (`Batch.for_transformers`).
        One draw from `generator` per batch, on the generator's device.
        Raises: CacheError, naming file and place, for an id outside meta.json's vocab_size.
        """
        import torch

        drawn = torch.randint(self.num_windows, (B,), generator=generator, device=generator.device)
        windows = drawn.numpy() if drawn.is_cpu else drawn.cpu().numpy()
        if len(self._ends) == 1:  # saves a tenth of the time of a small batch
            shards, places = np.zeros(B, dtype=np.int64), windows
        else:
            shards = self._ends.searchsorted(windows, "right")
            places = windows + self._to_places[shards]
        files = self._split.files
        if files.is_fetched:
            files.will_read(shards, places, places + (self.T + 1))
        return split_rows(gathered(files, self.vocab_size, shards, places, self.T + 1), self.device)


def gathered(
    files: TokenFiles, vocab_size: int | None, shards: NDArray[np.int64], places: NDArray[np.int64], width: int
) -> Ids:
    """Return `files.gather(shards, places, width)`.

    Raises: CacheError, naming file and place, for an id outside vocab_size; None: any id below 2**31.
    """
    rows = files.gather(shards, places, width)
    limit = id_limit(vocab_size, rows)
    # numpy's argmax takes half the time of max.
    if limit is not None and rows.size and rows.item(rows.argmax()) >= limit:
        row, column = np.argwhere(rows >= limit)[0].tolist()
        token, file = int(places[row] - files.first_tokens[shards[row]]) + column, int(shards[row])
        raise outside_vocabulary(files.paths[file], token, files.itemsize(file), int(rows[row, column]), vocab_size)
    return rows


def id_limit(vocab_size: int | None, ids: Ids) -> int | None:
    """Return the number that all ids must be below; None: any id of their dtype is accepted.

    Even of an unknown vocabulary no id is 2**31 or more: torch gets uint32 as int32.
    """
    return MAX_IDS if vocab_size is None and ids.itemsize > 2 else vocab_size


def split_rows(rows: Ids, device: str | torch.device) -> tuple[Any, Any]:
    """Return (rows[:, :-1], rows[:, 1:]) as contiguous int64 tensors on `device`; rows: uint16 or uint32 [B, T + 1].

    The narrow form is copied to another device once, and cast there; to CUDA through pinned memory, so that the call
    does not wait for the copy.
    """
    import torch

    if str(device) == "cpu":  # numpy casts in half the time of torch
        if rows.size < _FRESH_TOKENS:
            return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))
        x, y = recycled_int64((2, rows.shape[0], rows.shape[1] - 1))
        x[...], y[...] = rows[:, :-1], rows[:, 1:]
        return torch.from_numpy(x), torch.from_numpy(y)
    narrow = torch.from_numpy(_known_to_torch(rows))
    on_cuda = torch.device(device).type == "cuda"
    moved = (narrow.pin_memory() if on_cuda else narrow).to(device, non_blocking=on_cuda)
    return moved[:, :-1].to(torch.int64).contiguous(), moved[:, 1:].to(torch.int64).contiguous()


def as_int64(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return the values as int64; a large copy is in recycled memory."""
    if values.size < _FRESH_TOKENS or values.itemsize == 8:
        return values.astype(np.int64, copy=False)
    copy = recycled_int64(values.shape)
    copy[...] = values
    return copy


def empty_int64(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return an uninitialized array; a large one is in recycled memory."""
    return np.empty(shape, dtype=np.int64) if math.prod(shape) < _FRESH_TOKENS else recycled_int64(shape)


def _known_to_torch(rows: Ids) -> NDArray[Any]:
    """Return uint32 rows as int32: the same numbers below 2 ** 31, and torch has few operations of uint32."""
    return rows.view(np.int32) if rows.itemsize == 4 else rows


_FRESH_TOKENS = 1 << 17  # 1 MiB as int64: below, malloc returns memory that the process has touched before
_unused: deque[NDArray[np.int64]] = deque(maxlen=2)


def recycled_int64(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return an uninitialized array, in the memory of an earlier one of that size if possible.

    Large arrays get fresh pages each time, whose page faults cost several times as much as filling the arrays.
    The memory of an array is reused when the array, its views, and the tensors made from them are deleted; the memory
    of at most two arrays is kept.
    """
    memory = _unused_memory(math.prod(shape))
    return np.asarray(_Lease(np.empty(shape, dtype=np.int64) if memory is None else memory)).reshape(shape)


def _unused_memory(size: int) -> NDArray[np.int64] | None:
    for _ in range(len(_unused)):
        try:
            memory = _unused.popleft()  # removed before it is examined: no thread or signal handler gets it, too
        except IndexError:
            return None
        if memory.size == size:
            return memory
        _unused.append(memory)
    return None


class _Lease:
    """Memory as an array interface for numpy; returned to `_unused` with the last reference to that array."""

    def __init__(self, memory: NDArray[np.int64]) -> None:
        self._memory, self.__array_interface__ = memory, memory.__array_interface__

    def __del__(self, give_back: Callable[[NDArray[np.int64]], None] = _unused.append) -> None:
        give_back(self._memory)


def outside_vocabulary(path: Path, token: int, itemsize: int, id: int, vocab_size: int | None) -> CacheError:
    """Return the error of token number `token` of a file, whose id has no embedding in a model of that vocabulary.

    vocab_size: None if it is not known: the id is then one that no vocabulary has.
    """
    found = f"token {token} at byte {token * itemsize} is id {id}"
    if vocab_size is None:
        return CacheError(path, found, "ids below 2**31", "Leave dtype out if these tokens have 16 bits", code="E409")
    remedy = f"The file is damaged, or its meta.json belongs to another cache. {REBUILD}"
    return CacheError(path, found, f"ids below vocab_size {vocab_size}", remedy, code="E409")


def resolved_split(shards_dir: Path) -> Path:
    """Resolve the cache's folder to one version, but not the split's folder in it, which must not be a link.

    ~ is the home folder.
    """
    shards_dir = Path(os.path.expanduser(shards_dir))
    if shards_dir.name in ("", ".."):
        return resolved(shards_dir)
    cache = resolved(shards_dir.parent)
    if os.path.lexists(cache / META_NAME):
        return path_inside(cache, shards_dir.name)
    return resolved(cache / shards_dir.name)
