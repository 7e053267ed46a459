"""SFTStream: which example of an sft split a sample is; each example, or each piece of it, exactly once per epoch."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.reader import OpeningTokens
from niels_gpt.cache.sft_counts import OverLength, count_rows, warn_of_counts
from niels_gpt.cache.sft_split import SFTSplit
from niels_gpt.sampling.batch import Batch
from niels_gpt.sampling.epochs import Epochs, Units
from niels_gpt.sampling.rows import Ahead, PlacedPieces, ReadRows, read_pieces
from niels_gpt.sampling.stream import Numbers, Stream
from niels_gpt.sampling.stretches import STRETCH_TOKENS, Order
from niels_gpt.storage.meta_json import checked_int, printable
from niels_gpt.storage.versions import version_name

EXAMPLES_VERSION = 1
"""Version of the order: increased when the same seed and number mean another sample."""


class Examples(Units):
    """The examples of an sft split, or their windows, as rows of at most T + 1 tokens."""

    version: ClassVar[dict[str, Any]] = {"kind": "sft", "stream": EXAMPLES_VERSION}
    purpose = 2
    split: SFTSplit

    def __init__(self, split: SFTSplit, T: int, *, over_length: OverLength, require_targets: bool) -> None:
        """Count the rows: all tokens are read once. Raises: CacheError E107 if no row is left."""
        self.split, self.folder, self.T, self.vocab_size = split, split.folder, T, split.vocab_size
        self.over_length, self.require_targets = over_length, require_targets
        self.counts, self.rows = count_rows(split, T=T, over_length=over_length, require_targets=require_targets)

    def __len__(self) -> int:
        return self.counts.rows

    @property
    def name(self) -> str:
        return f"{version_name(self.folder)}, {printable(self.split.split)}"

    def settings(self) -> dict[str, Any]:
        return {"T": self.T, "over_length": self.over_length, "require_targets": self.require_targets}

    def num_bytes(self) -> int:
        return self.split.num_bytes

    def stretches(self) -> Numbers:
        begins = self.rows.places(self.split, np.arange(len(self)))[0]
        changes = np.flatnonzero(np.diff(begins // STRETCH_TOKENS)) + 1
        return np.diff(changes, prepend=0, append=len(begins))

    def locate(self, units: Numbers, epochs: Numbers, key: NDArray[np.uint64]) -> Ahead:
        begins, ends, pieces, examples = self.rows.places(self.split, units)
        self.split.will_read(begins, ends)
        return Ahead(
            len(units),
            self.T,
            lambda some: self._read(begins[some], ends[some], pieces[some], examples[some]),
            slowly=self.split.is_fetched,
        )

    def _read(self, begins: Numbers, ends: Numbers, pieces: Numbers, examples: Numbers) -> ReadRows:
        """Read rows of one piece each, whose token T is the target of token T - 1."""
        last, opened = begins + self.T, self.rows.opened
        inside = None if opened is None or self.split.has_bits else opened[pieces]
        numbers, counts = np.stack((pieces, examples)), np.ones_like(begins)
        placed = PlacedPieces(counts, numbers, begins, np.minimum(ends, last), ends > last, inside)
        return read_pieces(self.split, placed, self.T, self.split.pad_id)


class SFTStream(Stream[Batch]):
    """Examples of an sft split, a row each, padded to T + 1 tokens; loss on the assistant's replies only.

    Sample k is row `permute(k % rows)` of epoch `k // rows`. Ranks, DataLoader workers and the state are as in an
    EpochStream; see `Stream` and docs/reading.md. x is padded with the cache's pad_id; y has -100 where there is no
    loss, and at padding, like y_masked of `SFTExampleDataset.get_batch`, whose y has every token. A row has two
    segments: its example, and its padding with piece and document -1. Piece and document are the number of the example;
    with over_length="split" pieces are numbered through the split.
    """

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
        order: Order = "all",
        open_shards: int | None = None,
        **opening: Unpack[OpeningTokens],
    ) -> None:
        """Open a split. cache_dir, split, opening: see `SFTSplit`.

        global_batch_size, epochs, drop_last, order, open_shards: see `EpochStream`.
        over_length: what becomes of an example of L > T + 1 tokens: "truncate" to T + 1; "drop"; "error"; or "split" in
            windows of T + 1 tokens at stride T, the last one shorter. Each token after the first is then the target of
            exactly one of ceil((L - 1) / T) rows.
        require_targets: leave out rows without a target.

        All tokens (or loss bits) are read once, here, for `counts`; of a cache at a URL they are all fetched. Warns of
        rows without a target and of lost supervised tokens.
        Raises: FileNotFoundError; CacheError (each names the file; also if no row is left); ValueError for the numbers.
        """
        counts: dict[str, Any] = {"global_batch_size": global_batch_size, "rank": rank, "world_size": world_size}
        super().__init__(**counts, seed=seed, epochs=epochs, device=device, drop_last=drop_last)
        self.T = checked_int("T", T, 1)
        if over_length not in get_args(OverLength):
            raise ValueError(f"over_length={over_length!r}: expected one of {', '.join(get_args(OverLength))}")
        if not isinstance(require_targets, bool):
            raise ValueError(f"require_targets={require_targets!r}: expected True or False")
        self.over_length, self.require_targets = over_length, require_targets
        self.split = SFTSplit(cache_dir, split, **opening)
        self.folder = self.split.folder
        examples = Examples(self.split, self.T, over_length=over_length, require_targets=require_targets)
        self.counts, self.samples_per_epoch = examples.counts, len(examples)
        warn_of_counts(self.split, self.counts, T=self.T, over_length=over_length)
        self._serve(Epochs(examples, seed=self.seed, epochs=self.epochs, order=order, open_shards=open_shards))

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
