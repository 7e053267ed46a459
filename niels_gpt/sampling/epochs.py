"""EpochStream: which window of a split a sample is; each window exactly once per epoch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.checksums import Check
from niels_gpt.cache.formats import IGNORE_INDEX, TokenDtype
from niels_gpt.cache.mmap import IO, public_file
from niels_gpt.cache.pretrain_dataset import PretrainSplit, gathered, split_rows
from niels_gpt.display.numbers import number_of
from niels_gpt.sampling.batch import Rows, Segments
from niels_gpt.sampling.permutation import ROUNDS, mix, random_keys
from niels_gpt.sampling.state import key_check
from niels_gpt.sampling.stream import STREAM_VERSION, CacheStream, MadeAhead
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import printable
from niels_gpt.storage.versions import version_name


class EpochStream(CacheStream):
    """Windows of T + 1 tokens at stride T: (n - 1) // T of a shard of n tokens; none crosses two shards.

    Sample k is window `permute(k % num_windows)` of epoch `k // num_windows`: an order of O(1) memory, without index
    files. A global batch may hold the end of one epoch and the start of the next. Every rank, with any number of
    DataLoader workers, sees its part of the one order that the seed gives; see `SampleStream` and docs/reading.md.
    """

    split: PretrainSplit
    documents: bool

    def __init__(
        self,
        shards_dir: str | os.PathLike[str],
        *,
        split: str | None = None,
        T: int,
        global_batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        device: str = "cpu",
        epochs: int | None = None,
        drop_last: bool = False,
        random_offset: bool = False,
        documents: bool = False,
        tokenizer_sha256: str | None = None,
        expect: Mapping[str, Any] | None = None,
        io: IO = "mmap",
        dtype: TokenDtype | None = None,
        check: Check = "ends",
    ) -> None:
        """Open a split. shards_dir, split, tokenizer_sha256, expect, io, dtype, check: as for `PretrainSplit`.

        global_batch_size: rows of a batch over all ranks, a multiple of world_size; each rank gets an equal part.
        epochs: how many until the stream ends; None: never. The last batch may be short, and the part of a rank empty
            ([0, T]); warns if ranks get different numbers of rows.
        drop_last: skip the last batch if it is short.
        random_offset: start the windows of a shard at a seeded token from 0 to (n - 1) % T, another one in each epoch.
            Windows of shards where that is 0 cannot move; warns if they are more than a twentieth of all.
        documents: batches have the same rows in the same order, and say which tokens are of one document, by the index
            of the cache: `cu_seqlens`, `position_ids`, `documents` (`piece_ids` is the same). y is -100 where the next
            token is of another document. No part of the state: a run may resume with or without it.
        Raises: FileNotFoundError, CacheError (each names the file), ValueError for the numbers.
        """
        super().__init__(
            T=T,
            global_batch_size=global_batch_size,
            seed=seed,
            rank=rank,
            world_size=world_size,
            device=device,
            epochs=epochs,
            drop_last=drop_last,
        )
        for flag, value in (("random_offset", random_offset), ("documents", documents)):
            if not isinstance(value, bool):
                raise ValueError(f"{flag}={value!r}: expected True or False")
        self.random_offset, self.documents = random_offset, documents
        keys = random_keys(self.seed, ROUNDS + 1)
        self._keys, self._offset_key = keys[:ROUNDS], keys[ROUNDS]
        options: dict[str, Any] = {"tokenizer_sha256": tokenizer_sha256, "expect": expect, "io": io, "dtype": dtype}
        self.split = PretrainSplit(shards_dir, split=split, check=check, **options)
        self.files, self.folder = self.split.files, self.split.folder
        fixed = self._count_windows()
        if documents:
            self._open_index()
        self._set_samples(self.num_windows)
        if random_offset:
            self._warn_of_fixed(fixed)

    def _count_windows(self) -> int:
        """Count the windows of the shards; returns how many no offset can move. Raises: CacheError if there is none."""
        lengths, T = self.split.lengths, self.T
        counts = (lengths - 1) // T
        self._ends: NDArray[np.int64] = np.cumsum(counts)
        self._begins, self._remainders = self._ends - counts, (lengths - 1) % T
        self.num_windows = int(self._ends[-1])
        """Windows per epoch."""
        self.remainder_tokens = int(self._remainders.sum())
        """Tokens after the last windows of the shards: not used in an epoch without offsets."""
        if not self.num_windows:
            found = f"the longest shard has {lengths.max()} tokens"
            raise CacheError(public_file(self.split.folder), found, f"T + 1 = {T + 1}", "Take a smaller T", code="E107")
        return int(counts[self._remainders == 0].sum())

    def _open_index(self) -> None:
        """Map the index of documents. Raises: CacheError where there is none, or as `PretrainSplit.documents`."""
        try:
            _ = self.split.documents
        except FileNotFoundError as error:
            if self.split.meta is not None:
                raise
            path = public_file(self.folder).parent / "index" / f"{self.folder.name}_docs.npy"
            raise CacheError(
                path,
                "no such file, and documents=True reads from it where documents begin",
                "the index of a cache that this project built",
                "Open the shards without documents=True, or write their index as docs/formats.md describes it",
                code="E204",
            ) from error
        self.COLUMNS, self._made_ahead = 6, MadeAhead[_Windows]()
        lengths = self.split.lengths
        self._to_split: NDArray[np.int64] = np.cumsum(lengths) - lengths - self.files.first_tokens
        """Of each shard: what to add to a place of `TokenFiles.gather`, which makes it a token of the split."""

    def _warn_of_fixed(self, fixed: int) -> None:
        """Warn if random_offset does not move more than a twentieth of the windows. fixed: those."""
        if 20 * fixed > self.num_windows:
            where = printable(str(public_file(self.folder)))
            found = f"{where}: random_offset moves none of {fixed} of {self.num_windows} windows"
            why = (
                f"their shards have n tokens with (n - 1) % T == 0. Take another T, such as {self.T - 1 or self.T + 1}"
            )
            warnings.warn(CodedWarning("W102", f"{found}: {why}"), stacklevel=3)

    def __repr__(self) -> str:
        """Return the cache, the shape of a batch, the rank and the position."""
        epochs = "without end" if self.epochs is None else f"{self.epochs} epochs"
        return f"EpochStream({self.split!r}, {self.num_windows:,} windows, {epochs}, {self._described()})"

    def _sources(self) -> dict[str, object]:
        lengths = self.split.lengths
        return {
            "cache": version_name(self.split.folder.parent),
            "split": f"{self.split.folder.name}: {number_of(len(lengths), 'shard')}, {int(lengths.sum()):,} tokens",
            "windows": f"{self.num_windows:,} an epoch",
        }

    def identity(self) -> dict[str, Any]:
        """Return what decides which window a sample is: the stream's arguments and the content of its split."""
        arguments = {"stream": STREAM_VERSION, "seed": self.seed, "key_check": key_check(self._keys)}
        return {**arguments, "T": self.T, "random_offset": self.random_offset, **self.split.fingerprint()}

    @property
    def name(self) -> str:
        """Return the cache, its version and the split, for messages."""
        return f"{version_name(self.folder.parent)}, {printable(self.folder.name)}"

    def locate(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the windows of these samples begin, as arguments of `TokenFiles.gather`: int64 [2, n].

        With `documents` it is [6, n]: also the first token in the split, the first document, the one after the last,
        and a number, see `MadeAhead.numbered`. They are looked up for thousands of windows at once, in a third of the
        time.
        """
        epochs, windows = self._in_order(samples)
        shards = np.searchsorted(self._ends, windows, side="right")
        starts = (windows - self._begins[shards]) * self.T
        if self.random_offset:
            hashed = mix(mix(self._offset_key + epochs.astype(np.uint64)) + shards.astype(np.uint64))
            starts += (hashed % (self._remainders[shards] + 1).astype(np.uint64)).astype(np.int64)
        places = starts + self.files.first_tokens[shards]
        if not self.documents:
            return np.stack((shards, places))
        begins, index = places + self._to_split[shards], self.split.documents
        firsts, nexts = index.searchsorted(begins, side="right") - 1, index.searchsorted(begins + self.T, side="left")
        return self._made_ahead.numbered(shards, places, begins, firsts, nexts)

    def read(self, places: NDArray[np.int64]) -> Rows:
        """Return the windows at places from `locate`. Raises: CacheError for an id outside the vocabulary."""
        ids = gathered(self.files, self.split.vocab_size, places[0], places[1], self.T + 1)
        x, y = split_rows(ids, self.device)
        if not self.documents:
            return Rows(x, y)
        windows, first = self._made_ahead.of(places, self.T, self._windows)
        segments, lasts = windows.part(first, places.shape[1])
        _cut(y, lasts)
        return Rows(x, y, segments)

    def _windows(self, places: NDArray[np.int64]) -> _Windows:
        return _Windows(self.split.documents, self.T, *places[2:5])


class _Windows:
    """The documents of windows, as segments."""

    def __init__(
        self,
        documents: NDArray[np.int64],
        T: int,
        begins: NDArray[np.int64],
        firsts: NDArray[np.int64],
        nexts: NDArray[np.int64],
    ) -> None:
        """documents: as `PretrainSplit.documents`. begins, firsts, nexts: of each window, from `locate`: int64 [n]."""
        counts = nexts - firsts
        stops = counts.cumsum()
        numbers = (nexts - stops).repeat(counts)
        numbers += np.arange(len(numbers))
        starts = documents[numbers]
        starts += (np.arange(0, len(begins) * T, T) - begins).repeat(counts)
        starts[stops - counts] = np.arange(0, len(begins) * T, T)  # a row may begin inside a document
        starts = np.append(starts, len(begins) * T)
        is_cut: NDArray[np.bool_] = np.ones(len(numbers), dtype=np.bool_)
        is_cut[stops - 1] = documents[nexts] == begins + T
        self._T, self._numbers, self._starts = T, numbers, starts.astype(np.int32)
        self._lasts = starts[1:][is_cut] - 1
        self._stops, self._last_stops = [0, *stops.tolist()], [0, *is_cut.cumsum()[stops - 1].tolist()]

    def part(self, first: int, count: int) -> tuple[Segments, NDArray[np.int64]]:
        """Return the segments of windows first to first + count - 1, and the last tokens of documents in them."""
        last, begin = first + count, first * self._T
        at, to = self._stops[first], self._stops[last]
        numbers = self._numbers[at:to]
        lasts = self._lasts[self._last_stops[first] : self._last_stops[last]] - begin
        return Segments(self._starts[at : to + 1] - np.int32(begin), numbers, numbers.copy()), lasts


def _cut(y: torch.Tensor, lasts: NDArray[np.int64]) -> None:
    """Set targets to -100, in place. lasts: their places in y.view(-1)."""
    if y.is_cpu:
        y.numpy().reshape(-1)[lasts] = IGNORE_INDEX
        return
    places = torch.from_numpy(lasts)
    moved = (places.pin_memory() if y.is_cuda else places).to(y.device, non_blocking=y.is_cuda)
    y.view(-1).index_fill_(0, moved, IGNORE_INDEX)
