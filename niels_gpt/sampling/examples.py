"""SFTStream: which example of an sft split a sample is; each example, or each piece of it, exactly once per epoch."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.checksums import Check
from niels_gpt.cache.formats import TokenDtype
from niels_gpt.cache.mmap import IO
from niels_gpt.cache.pretrain_dataset import as_int64, split_rows
from niels_gpt.cache.sft_counts import OverLength, count_rows, warn_of_counts
from niels_gpt.cache.sft_dataset import chosen_targets
from niels_gpt.cache.sft_split import SFTSplit
from niels_gpt.sampling.batch import Rows, Segments
from niels_gpt.sampling.permutation import ROUNDS, random_keys
from niels_gpt.sampling.state import key_check
from niels_gpt.sampling.stream import CacheStream
from niels_gpt.storage.meta_json import printable
from niels_gpt.storage.versions import version_name

EXAMPLES_VERSION = 1
"""Version of the order: increased when the same seed and number mean another sample."""
_PURPOSE = 2
"""Of the keys: a pretrain split and an sft split of equally many rows have unrelated orders."""


class SFTStream(CacheStream):
    """Examples of an sft split, a row each, padded to T + 1 tokens; loss on the assistant's replies only.

    Sample k is row `permute(k % rows)` of epoch `k // rows`. Ranks, DataLoader workers and the state are as in an
    EpochStream; see `SampleStream` and docs/reading.md. Of a batch: x is padded with the cache's pad_id; y has -100
    where there is no loss, and at padding, as y_masked of `SFTExampleDataset.get_batch`, whose y has every token. A
    row is a segment of its example, and one of its padding, whose piece and document are -1. A piece has
    the number of its example, the document; with over_length="split" pieces are counted through the split.
    """

    COLUMNS = 4
    split: SFTSplit

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
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
        over_length: OverLength = "truncate",
        require_targets: bool = False,
        tokenizer_sha256: str | None = None,
        expect: Mapping[str, Any] | None = None,
        io: IO = "mmap",
        dtype: TokenDtype | None = None,
        check: Check = "ends",
    ) -> None:
        """cache_dir, split, tokenizer_sha256, expect, io, dtype, check: as for `SFTSplit`.

        global_batch_size, epochs, drop_last: as for `EpochStream`.
        over_length: what becomes of an example of L > T + 1 tokens: "truncate" to T + 1; "drop"; "error"; or "split" in
            windows of T + 1 tokens at stride T, the last one shorter. Each token after the first is then the target of
            exactly one of ceil((L - 1) / T) rows.
        require_targets: leave out rows without a target.

        All tokens are read once, here, for `counts`. Warns of rows without a target and of lost supervised tokens.
        Raises: FileNotFoundError; CacheError (each names the file; also if no row is left); ValueError for the numbers.
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
        if over_length not in get_args(OverLength):
            raise ValueError(f"over_length={over_length!r}: expected one of {', '.join(get_args(OverLength))}")
        if not isinstance(require_targets, bool):
            raise ValueError(f"require_targets={require_targets!r}: expected True or False")
        self.over_length, self.require_targets = over_length, require_targets
        self._keys = random_keys(self.seed, ROUNDS, purpose=_PURPOSE)
        options: dict[str, Any] = {"tokenizer_sha256": tokenizer_sha256, "expect": expect, "io": io, "dtype": dtype}
        self.split = SFTSplit(cache_dir, split, check=check, **options)
        self.folder = self.split.folder
        settings: Any = {"T": self.T, "over_length": over_length}
        self.counts, self._rows = count_rows(self.split, **settings, require_targets=require_targets)
        warn_of_counts(self.split, self.counts, **settings)
        self._set_samples(self.counts.rows)

    def __repr__(self) -> str:
        """Return the cache, the shape of a batch, the rank and the position."""
        epochs = "without end" if self.epochs is None else f"{self.epochs} epochs"
        return f"SFTStream({self.split!r}, {self.counts.rows:,} rows, {epochs}, {self._described()})"

    def _sources(self) -> dict[str, object]:
        counts = self.counts
        lost = counts.supervised_tokens_lost
        return {
            "cache": version_name(self.folder),
            "split": f"{self.split.split}: {counts.examples:,} examples",
            "rows": f"{counts.rows:,} an epoch, over_length={self.over_length}",
            "supervised tokens": f"{counts.supervised_tokens:,}, {lost:,} of them in no row",
        }

    def identity(self) -> dict[str, Any]:
        """Return what decides which row a sample is: the stream's arguments and the content of its split."""
        arguments = {"kind": "sft", "stream": EXAMPLES_VERSION, "seed": self.seed, "key_check": key_check(self._keys)}
        settings = {"T": self.T, "over_length": self.over_length, "require_targets": self.require_targets}
        return {**arguments, **settings, **self.split.fingerprint()}

    @property
    def name(self) -> str:
        """Return the cache, its version and the split, for messages."""
        return f"{version_name(self.folder)}, {printable(self.split.split)}"

    def locate(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the rows of these samples are: int64 [4, n].

        The first token, the one after the last, the number of the piece, and that of its example.
        """
        _, rows = self._in_order(samples)
        return np.stack(self._rows.places(self.split, rows))

    def read(self, places: NDArray[np.int64]) -> Rows:
        """Return the rows at places from `locate`. Raises: CacheError for an id outside the vocabulary."""
        begins, ends = places[0], places[1]
        rows = self.split.padded(begins, ends, self.T + 1)
        opened = None if self._rows.opened is None else self._rows.opened[places[2]]
        segments = self._segments(ends - begins, places[2:])
        if self.device == "cpu":
            y = self.split.masked(rows, begins, ends, whole=opened is None, opened=opened)
            return Rows(torch.from_numpy(as_int64(rows[:, :-1])), torch.from_numpy(y), segments)
        is_target = self.split.targets(rows, begins, ends, whole=opened is None, opened=opened)
        x, y = split_rows(rows, self.device)
        return Rows(x, chosen_targets(y, is_target), segments)

    def _segments(self, lengths: NDArray[np.int64], numbers: NDArray[np.int64]) -> Segments:
        """Return a segment of the piece of each row, and one of its padding, where it has any.

        lengths: tokens of each piece, up to T + 1: [B]. numbers: of each piece, and of its example: [2, B].
        """
        table, is_segment = _empty_segments(len(lengths), self.T).copy(), np.ones(2 * len(lengths) + 1, dtype=np.bool_)
        table[0, 1::2] = table[0, :-1:2] + lengths
        table[1:, :-1:2] = numbers
        is_segment[1::2] = lengths < self.T
        starts, pieces, documents = table.take(is_segment.nonzero()[0], axis=1)
        return Segments(starts.astype(np.int32), pieces[:-1], documents[:-1])


@functools.lru_cache(maxsize=4)
def _empty_segments(count: int, T: int) -> NDArray[np.int64]:
    """Return starts, pieces and documents of each row's piece and its padding, in turn, and of the end: -1 where open.

    int64 [3, 2 * count + 1]. Kept: batches of 8 short rows take longer to prepare than to read.
    """
    table = np.full((3, 2 * count + 1), -1)
    table[0, ::2] = np.arange(0, count * T + 1, T)
    return table
