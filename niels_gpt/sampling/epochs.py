"""EpochStream: which window of a split a sample is; each window exactly once per epoch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import TokenDtype
from niels_gpt.cache.mmap import IO, public_file
from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.display.numbers import number_of
from niels_gpt.sampling.permutation import ROUNDS, mix, permute, random_keys
from niels_gpt.sampling.state import key_check, limited
from niels_gpt.sampling.stream import STREAM_VERSION, Places, SampleStream
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import checked_int, printable
from niels_gpt.storage.versions import version_name


class EpochStream(SampleStream):
    """Windows of T + 1 tokens at stride T: (n - 1) // T of a shard of n tokens; none crosses two shards.

    Sample k is window `permute(k % num_windows)` of epoch `k // num_windows`: an order of O(1) memory, without index
    files. A global batch may hold the end of one epoch and the start of the next. Every rank, with any number of
    DataLoader workers, sees its part of the one order that the seed gives; see `SampleStream` and docs/reading.md.
    """

    def __init__(
        self,
        shards_dir: str | os.PathLike[str],
        *,
        T: int,
        global_batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        device: str = "cpu",
        epochs: int | None = None,
        drop_last: bool = False,
        random_offset: bool = False,
        tokenizer_sha256: str | None = None,
        expect: Mapping[str, Any] | None = None,
        io: IO = "mmap",
        dtype: TokenDtype | None = None,
    ) -> None:
        """Open a split. shards_dir, tokenizer_sha256, expect, io, dtype: as for `PretrainSplit`.

        global_batch_size: rows of a batch over all ranks, a multiple of world_size; each rank gets an equal part.
        epochs: how many until the stream ends; None: never. The last batch may be short, and the part of a rank empty
            ([0, T]); warns if ranks get different numbers of rows.
        drop_last: skip the last batch if it is short.
        random_offset: start the windows of a shard at a seeded token from 0 to (n - 1) % T, another one in each epoch.
            Windows of shards where that is 0 cannot move; warns if they are more than a twentieth of all.
        Raises: FileNotFoundError, CacheError (each names the file), ValueError for the numbers.
        """
        super().__init__(
            global_batch_size=global_batch_size, rank=rank, world_size=world_size, device=device, drop_last=drop_last
        )
        if not isinstance(random_offset, bool):
            raise ValueError(f"random_offset={random_offset!r}: expected True or False")
        self.T = T = checked_int("T", T, 1)
        self.epochs = None if epochs is None else checked_int("epochs", epochs, 1)
        self.seed, self.random_offset = checked_int("seed", seed, -(2**63)), random_offset
        keys = random_keys(self.seed, ROUNDS + 1)
        self._keys, self._offset_key = keys[:ROUNDS], keys[ROUNDS]
        self.split = PretrainSplit(shards_dir, tokenizer_sha256=tokenizer_sha256, expect=expect, io=io, dtype=dtype)
        self.files, self.vocab_size = self.split.files, self.split.vocab_size
        lengths = self.split.lengths
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
        self.num_samples = None if self.epochs is None else limited("epochs", self.epochs, self.num_windows)
        self._check_last_batch()
        fixed = int(counts[self._remainders == 0].sum())
        if random_offset and 20 * fixed > self.num_windows:
            where = printable(str(public_file(self.split.folder)))
            found = f"{where}: random_offset moves none of {fixed} of {self.num_windows} windows"
            why = f"their shards have n tokens with (n - 1) % T == 0. Take another T, such as {T - 1 or T + 1}"
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

    def identity(self) -> dict[str, Any]:
        """Return what decides which window a sample is: the stream's arguments and the content of its split."""
        arguments = {"stream": STREAM_VERSION, "seed": self.seed, "key_check": key_check(self._keys)}
        return {**arguments, "T": self.T, "random_offset": self.random_offset, **self.split.fingerprint()}

    def _progress(self, consumed: int) -> dict[str, int]:
        return {"epoch": consumed // self.num_windows, "consumed_samples": consumed}

    def locate(self, samples: NDArray[np.int64]) -> Places:
        """Return where the windows of these samples begin: [n]."""
        epochs, positions = np.divmod(samples, self.num_windows)
        if len(epochs) and epochs.min() == epochs.max():
            epochs = epochs[:1]  # a single tweak
        windows = permute(positions, self.num_windows, self._keys, epochs)
        shards = np.searchsorted(self._ends, windows, side="right")
        starts = (windows - self._begins[shards]) * self.T
        if self.random_offset:
            hashed = mix(mix(self._offset_key + epochs.astype(np.uint64)) + shards.astype(np.uint64))
            starts += (hashed % (self._remainders[shards] + 1).astype(np.uint64)).astype(np.int64)
        return Places(shards, starts + self.files.first_tokens[shards])
