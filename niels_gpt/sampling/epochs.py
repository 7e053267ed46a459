"""Epochs: each unit of a split exactly once an epoch, in a seeded order; EpochStream: windows as units.

Units       what an epoch serves: windows, examples, packed rows, or items of an EAGLE-3 cache
Epochs      sample k is unit permute(k % n) of epoch k // n
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import IGNORE_INDEX
from niels_gpt.cache.mmap import TokenFiles, public_file, public_name
from niels_gpt.cache.pretrain_dataset import PretrainSplit, gathered, split_rows
from niels_gpt.cache.reader import OpeningTokens
from niels_gpt.display.numbers import number_of
from niels_gpt.sampling.batch import Batch, Rows
from niels_gpt.sampling.permutation import ROUNDS, mix, permute, random_keys
from niels_gpt.sampling.rows import Ahead, ReadRows
from niels_gpt.sampling.state import Origin, key_check, limited
from niels_gpt.sampling.stream import Located, Numbers, Samples, Stream
from niels_gpt.sampling.stretches import OPEN_SHARDS, STRETCH_TOKENS, Order, Stretches
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.errors import CacheError, StateError, UsageError
from niels_gpt.storage.meta_json import checked_int, printable
from niels_gpt.storage.versions import version_name

STREAM_VERSION = 1
"""Version of the order: increased when the same seed and number mean another sample."""


class Units(ABC):
    """What an epoch serves, numbered from 0: the windows, examples, packed rows or items of one split."""

    version: ClassVar[dict[str, Any]]
    """`kind` and version of the order, as a state names them."""
    purpose: ClassVar[int] = 0
    """Purpose of the keys, so that units of other kinds with the same seed have unrelated orders."""
    split: Any
    """What they are read from: `PretrainSplit`, `SFTSplit`, or a dataset of EAGLE-3."""
    folder: Path
    """Folder of the cache, or of the split in it, for messages."""
    T: int
    vocab_size: int | None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of units."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the cache, its version and the split, for messages."""

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of the content."""
        content: dict[str, Any] = self.split.fingerprint()
        return content

    def form(self) -> dict[str, Any]:
        """Return what a mixture's sources have in common beside T."""
        return {"rows": "tokens"}

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the arguments that decide what a unit is, fit for JSON."""

    def stretches(self) -> Numbers:
        """Return the units of each stretch, as stretches.py defines them, none of them 0: int64 [P].

        Raises: UsageError for units that have no place of their own in the split.
        """
        raise UsageError(f"order='shards': {self.name} is served in order='all' only")

    def num_bytes(self) -> int | None:
        """Return the bytes of the files that the units are read from; None: not known."""
        return None

    @abstractmethod
    def locate(self, units: Numbers, epochs: Numbers, key: NDArray[np.uint64]) -> Located:
        """Look up units by number, each in an epoch: int64 [n] both. key: uint64 [1], for what the seed decides too."""


class Epochs(Samples):
    """The units of one split, epoch after epoch: each exactly once an epoch."""

    def __init__(
        self,
        units: Units,
        *,
        seed: int,
        epochs: int | None,
        order: Order = "all",
        open_shards: int | None = None,
    ) -> None:
        """epochs: how many until the samples end; None: never. order, open_shards: see stretches.py.

        Raises: ValueError for too many epochs, for another order, for units that it cannot have, and for open_shards
            without it.
        """
        if order not in get_args(Order):
            raise UsageError(f"order={order!r}: expected one of {', '.join(get_args(Order))}")
        if order == "all" and open_shards is not None:
            raise UsageError(f"open_shards={open_shards!r}: expected order='shards' with it")
        most = OPEN_SHARDS if open_shards is None else open_shards
        self._stretches = None if order == "all" else Stretches(units.stretches(), most, seed, units.purpose)
        self.units, self.seed, self.epochs = units, seed, epochs
        self._warn_of_folder()
        self.samples_per_epoch = len(units)
        keys = random_keys(seed, ROUNDS + 1, purpose=units.purpose)
        self._keys, self._unit_key = keys[:ROUNDS], keys[ROUNDS:]
        self.begin(Origin(0, (0,)))

    def _warn_of_folder(self) -> None:
        """Warn (W612) if the local folder of a cache at a URL is so small that pieces are fetched again and again."""
        room, size = getattr(self.units.split, "local_bytes", None), self.units.num_bytes()
        if room is None or size is None:
            return
        found = f"{self.units.name}: max_bytes is {room / 2**20:,.0f} MiB, and "
        if self._stretches is None and size > room:
            found += (
                f"the {size / 2**20:,.0f} MiB of the split are read in a random order, most rows as a MiB of their own"
            )
            remedy = "Raise max_bytes, or where the stream has it pass order='shards'"
        elif self._stretches is not None and 2 * (group := size * self._stretches.largest_share()) > room:
            found += f"{self._stretches.open_shards} open shards have {group / 2**20:,.0f} MiB, more than half of it"
            remedy = "Raise max_bytes to two such groups, or open fewer shards: open_shards"
        else:
            return
        warnings.warn(CodedWarning("W612", f"{found}, so pieces are fetched again and again. {remedy}"), stacklevel=4)

    def begin(self, origin: Origin) -> None:
        (position,), (limit,) = origin.positions, self.limits()
        if limit is not None and position >= limit:
            raise StateError(f"all {limit} samples had been served at sample {origin.sample}: allow more epochs")
        self.origin, self._skipped = origin, origin.sample - position
        """Samples of the run that are not of this order."""
        self.num_samples = None if limit is None else limit + self._skipped

    def limits(self) -> list[int | None]:
        return [None if self.epochs is None else limited("epochs", self.epochs, self.samples_per_epoch)]

    @property
    def sources(self) -> list[Epochs]:
        return [self]

    def identity(self) -> dict[str, Any]:
        order: dict[str, Any] = {"seed": self.seed, "key_check": key_check(self._keys)}
        if self._stretches is not None:
            order |= {"order": "shards", "open_shards": self._stretches.open_shards}
        return {**self.units.version, **order, **self.units.settings(), **self.units.fingerprint()}

    def progress(self, consumed: int) -> dict[str, int]:
        return {"epoch": (consumed - self._skipped) // self.samples_per_epoch, "consumed_samples": consumed}

    def locate(self, numbers: Numbers) -> Located:
        epochs, positions = np.divmod(numbers - self._skipped, self.samples_per_epoch)
        if self._stretches is not None:
            return self.units.locate(self._stretches.units(epochs, positions, self._keys), epochs, self._unit_key)
        is_one = len(epochs) and epochs.min() == epochs.max()  # a single tweak takes less time
        units = permute(positions, self.samples_per_epoch, self._keys, epochs[:1] if is_one else epochs)
        return self.units.locate(units, epochs, self._unit_key)


class Windows(Units):
    """Windows of T + 1 tokens at stride T: (n - 1) // T of a shard of n tokens; none crosses two shards."""

    version: ClassVar[dict[str, Any]] = {"stream": STREAM_VERSION}

    def __init__(self, split: PretrainSplit, T: int, *, random_offset: bool, documents: bool) -> None:
        """Count the windows of the shards. Raises: CacheError if there is none; as `_open_index`."""
        self.split, self.files, self.folder, self.T = split, split.files, split.folder, T
        self.vocab_size, self.random_offset, self.documents = split.vocab_size, random_offset, documents
        lengths = split.lengths
        counts = (lengths - 1) // T
        self._ends: Numbers = np.cumsum(counts)
        self._begins, self.remainders = self._ends - counts, (lengths - 1) % T
        if not len(self):
            found = f"the longest shard has {lengths.max()} tokens"
            raise CacheError(public_file(split.folder), found, f"T + 1 = {T + 1}", "Take a smaller T", code="E107")
        self.fixed = int(counts[self.remainders == 0].sum())
        """Windows that no offset can move."""
        if documents:
            self._open_index()
            self._to_split: Numbers = np.cumsum(lengths) - lengths - self.files.first_tokens
            """For each shard, the number that turns a place of `TokenFiles.gather` into a token of the split."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def stretches(self) -> Numbers:
        counts = self._ends - self._begins
        of_shard = np.where(counts > 0, (counts - 1) * self.T // STRETCH_TOKENS + 1, 0)
        numbers = np.arange(of_shard.sum()) - (of_shard.cumsum() - of_shard).repeat(of_shard)
        firsts = -(-numbers * STRETCH_TOKENS // self.T)  # the first window that begins in stretch k of its shard
        lasts = np.minimum(-(-(numbers + 1) * STRETCH_TOKENS // self.T), counts.repeat(of_shard))
        found: Numbers = (lasts - firsts)[lasts > firsts]
        return found

    @property
    def name(self) -> str:
        return f"{version_name(self.folder.parent)}, {printable(self.folder.name)}"

    def num_bytes(self) -> int:
        return int(self.split.num_bytes)

    def settings(self) -> dict[str, Any]:
        return {"T": self.T, "random_offset": self.random_offset}

    def _open_index(self) -> None:
        """Map the index of documents. Raises: CacheError E204 without one; the errors of `PretrainSplit.documents`."""
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

    def locate(self, units: Numbers, epochs: Numbers, key: NDArray[np.uint64]) -> LocatedWindows | Ahead:
        shards = np.searchsorted(self._ends, units, side="right")
        starts = (units - self._begins[shards]) * self.T
        if self.random_offset:
            hashed = mix(mix(key + epochs.astype(np.uint64)) + shards.astype(np.uint64))
            starts += (hashed % (self.remainders[shards] + 1).astype(np.uint64)).astype(np.int64)
        places = starts + self.files.first_tokens[shards]
        if not self.documents:
            return LocatedWindows(self.files, self.vocab_size, self.T, shards, places)
        self.files.will_read(shards, places, places + (self.T + 1))
        return Ahead(
            len(units),
            self.T,
            lambda some: self._with_documents(shards[some], places[some]),
            slowly=self.split.is_fetched,
        )

    def _with_documents(self, shards: Numbers, places: Numbers) -> ReadRows:
        """Read windows whose segments are their documents. shards, places: see `TokenFiles.gather`."""
        T, index = self.T, self.split.documents
        begins, rows = places + self._to_split[shards], np.arange(0, len(places) * self.T, self.T)
        firsts, nexts = index.searchsorted(begins, side="right") - 1, index.searchsorted(begins + T, side="left")
        counts = nexts - firsts
        stops = counts.cumsum()
        numbers = (nexts - stops).repeat(counts)
        numbers += np.arange(len(numbers))
        starts = np.empty(len(numbers) + 1, dtype=np.int32)
        starts[:-1] = index[numbers] + (rows - begins).repeat(counts)
        starts[stops - counts], starts[-1] = rows, len(rows) * T  # a row may begin inside a document
        ids = gathered(self.files, self.vocab_size, shards, places, T + 1)
        is_last = np.ones(len(numbers), dtype=np.bool_)
        is_last[stops - 1] = index[nexts] == begins + T  # or its document goes on
        lasts = starts[1:][is_last].astype(np.int64) - 1
        others = lasts, np.full(len(lasts), IGNORE_INDEX)
        return ReadRows(ids[:, :-1], ids[:, 1:], (starts, np.stack((numbers, numbers)), counts), others)


class LocatedWindows:
    """Windows whose places are known, of one cache or of the joined files of a mixture's."""

    def __init__(self, files: TokenFiles, vocab_size: int | None, T: int, shards: Numbers, places: Numbers) -> None:
        """shards, places: of each window, as arguments of `TokenFiles.gather`: int64 [n]."""
        self._is_planned = False
        self._files, self._vocab_size, self._T = files, vocab_size, T
        self.shards, self.places = shards, places

    def read(self, first: int, count: int, device: str) -> Rows:
        if not self._is_planned:
            self._files.will_read(self.shards[first:], self.places[first:], self.places[first:] + (self._T + 1))
            self._is_planned = True
        last = first + count
        shards, places = self.shards[first:last], self.places[first:last]
        return Rows(*split_rows(gathered(self._files, self._vocab_size, shards, places, self._T + 1), device))


class EpochStream(Stream[Batch]):
    """Windows of T + 1 tokens at stride T: (n - 1) // T of a shard of n tokens; none crosses two shards.

    Sample k is window `permute(k % num_windows)` of epoch `k // num_windows`: an order of O(1) memory, without index
    files. A global batch may hold the end of one epoch and the start of the next. Every rank, with any number of
    DataLoader workers, sees its part of the one order that the seed gives; see `Stream` and docs/reading.md.
    """

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
        order: Order = "all",
        open_shards: int | None = None,
        **opening: Unpack[OpeningTokens],
    ) -> None:
        """Open a split. shards_dir, split, opening: see `PretrainSplit`.

        global_batch_size: rows of a batch over all ranks, a multiple of world_size; each rank gets an equal part.
        epochs: how many until the stream ends; None: never. The last batch may be short, and the part of a rank empty
            ([0, T]); warns if ranks get different numbers of rows.
        drop_last: skip the last batch if it is short.
        random_offset: start the windows of a shard at a seeded token from 0 to (n - 1) % T, another one in each epoch.
            Windows of shards where (n - 1) % T is 0 cannot move; warns if they are more than a twentieth of all.
        documents: batches have the same rows in the same order, and say which tokens belong to one document, by the
                index of the cache: `cu_seqlens`, `position_ids`, `documents` (`piece_ids` is the same). y is -100 where
                the next token belongs to another document. Not part of the state: a run may resume with or without it.
        order: "shards": shards in a random order, and windows of open_shards (16) of them at a time, shuffled; for a
            split in a bucket that does not fit its local folder. A longer shard counts as several, of 8,388,608 tokens.
        Raises: FileNotFoundError, CacheError (each names the file), ValueError for the numbers.
        """
        counts: dict[str, Any] = {"global_batch_size": global_batch_size, "rank": rank, "world_size": world_size}
        super().__init__(**counts, seed=seed, epochs=epochs, device=device, drop_last=drop_last)
        self.T = checked_int("T", T, 1)
        for flag, value in (("random_offset", random_offset), ("documents", documents)):
            if not isinstance(value, bool):
                raise ValueError(f"{flag}={value!r}: expected True or False")
        self.random_offset, self.documents = random_offset, documents
        self.split = PretrainSplit(shards_dir, split=split, **opening)
        self.files, self.folder = self.split.files, self.split.folder
        windows = Windows(self.split, self.T, random_offset=random_offset, documents=documents)
        self.samples_per_epoch = self.num_windows = len(windows)
        """Windows per epoch."""
        self.remainder_tokens = int(windows.remainders.sum())
        """Tokens after the last windows of the shards: not used in an epoch without offsets."""
        self._serve(Epochs(windows, seed=self.seed, epochs=self.epochs, order=order, open_shards=open_shards))
        if random_offset and 20 * windows.fixed > len(windows):
            where = public_name(self.folder)
            found = f"{where}: random_offset moves none of {windows.fixed} of {self.num_windows} windows"
            other = self.T - 1 or self.T + 1
            why = f"their shards have n tokens with (n - 1) % T == 0. Take another T, such as {other}"
            warnings.warn(CodedWarning("W102", f"{found}: {why}"), stacklevel=2)

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
