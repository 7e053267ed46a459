"""PackedStream: rows of exactly T tokens made of whole documents or examples, each exactly once an epoch."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.meta import reader_meta
from niels_gpt.cache.mmap import public_file, public_name
from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.cache.reader import OpeningTokens, local_path, named_cache
from niels_gpt.cache.sft_counts import OverLength
from niels_gpt.sampling.batch import Batch
from niels_gpt.sampling.epochs import Epochs, Units
from niels_gpt.sampling.packing.pieces import PackedCounts, Pieces
from niels_gpt.sampling.packing.plan import PLAN_VERSION, Plan, Turn
from niels_gpt.sampling.rows import Ahead, PlacedPieces, ReadRows, read_pieces
from niels_gpt.sampling.stream import Numbers, Stream
from niels_gpt.sampling.stretches import Order
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.errors import UsageError
from niels_gpt.storage.meta_json import checked_int, printable
from niels_gpt.storage.versions import version_name

_TURNS_KEPT = 4  # of the epochs last read: a batch may hold the end of one and the start of the next


class PackedRows(Units):
    """The rows of a split: pieces of at most T tokens, packed by a plan that holds for every epoch."""

    version: ClassVar[dict[str, Any]] = {"kind": "packed", "stream": PLAN_VERSION}
    purpose = 3

    def __init__(self, split: Any, folder: Path, T: int, over_length: OverLength) -> None:
        """Plan the rows. split: `PretrainSplit` or `SFTSplit`; folder: of the cache. Raises: CacheError E107."""
        self.split, self.folder, self.T, self.over_length = split, folder, T, over_length
        self.vocab_size, self.is_pretrain = split.vocab_size, isinstance(split, PretrainSplit)
        self._set_plan()
        self.counts = self._counted()

    def _set_plan(self) -> None:
        """Cut the pieces and plan the rows, which a pickled copy lacks."""
        self._pieces = Pieces(self._starts(), self.T, self.over_length, public_file(self.folder))
        self._plan = Plan(self._pieces.lengths, self.T)
        del self._pieces.lengths
        self._turns: dict[int, Turn] = {}

    def __getstate__(self) -> dict[str, Any]:
        made = ("_pieces", "_plan", "_turns")
        return {key: value for key, value in self.__dict__.items() if key not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_plan()

    def __len__(self) -> int:
        return len(self._plan)

    @property
    def name(self) -> str:
        return f"{version_name(self.folder)}, {printable(self.split.fingerprint()['split'])}"

    @property
    def pad_id(self) -> int:
        """The id of x in padding: the cache's own; 0 of a pretrain cache, which has none."""
        return 0 if self.is_pretrain else int(self.split.pad_id)

    def settings(self) -> dict[str, Any]:
        return {"T": self.T, "over_length": self.over_length}

    def num_bytes(self) -> int:
        return int(self.split.num_bytes)

    def stretches(self) -> Numbers:
        why = "a row has pieces of the whole split, so that no few shards have all of it"
        raise UsageError(f"order='shards': packed rows of {self.name} have order='all' only: {why}")

    def _starts(self) -> NDArray[np.int64]:
        """Return the first token of each document in the split, and the end of the last one: int64 [documents + 1]."""
        starts: NDArray[np.int64] = self.split.documents if self.is_pretrain else self.split.starts
        return starts

    def _counted(self) -> PackedCounts:
        starts, tokens, long = self._starts(), int(self._plan.lengths.sum(dtype=np.int64)), self._pieces.num_long
        targets = lost = 0
        if not self.is_pretrain:
            from niels_gpt.cache.sft_counts import count_targets

            targets, lost = count_targets(self.split, T=self.T, over_length=self.over_length)
        counts = PackedCounts(
            documents=len(starts) - 1,
            documents_cut=long * (self.over_length == "split"),
            documents_truncated=long * (self.over_length == "truncate"),
            documents_dropped=long * (self.over_length == "drop"),
            pieces=len(self._plan.slots),
            tokens=tokens,
            tokens_lost=int(starts[-1]) - tokens,
            rows=len(self._plan),
            T=self.T,
            supervised_tokens=targets,
            supervised_tokens_lost=lost,
        )
        if not self.is_pretrain:
            counts.check(public_file(self.folder))
        return counts

    @property
    def num_long(self) -> int:
        """Documents of more than T tokens."""
        return self._pieces.num_long

    def locate(self, units: Numbers, epochs: Numbers, key: NDArray[np.uint64]) -> Ahead:
        if self.split.is_fetched:
            placed = self._placed(units, epochs, key)
            self.split.will_read(placed.begins, placed.ends)
        is_fetched = self.split.is_fetched
        return Ahead(len(units), self.T, lambda some: self._read(units[some], epochs[some], key), slowly=is_fetched)

    def _read(self, rows: Numbers, epochs: Numbers, key: NDArray[np.uint64]) -> ReadRows:
        """Read rows; arguments as of `_placed`. Tokens before a cut piece say whether it begins inside a reply."""
        placed = self._placed(rows, epochs, key)
        if self.num_long and not self.is_pretrain and not self.split.has_bits:
            placed = placed._replace(opened=self.split.opened(placed.begins, self._starts().take(placed.numbers[1])))
        return read_pieces(self.split, placed, self.T, self.pad_id)

    def _placed(self, rows: Numbers, epochs: Numbers, key: NDArray[np.uint64]) -> PlacedPieces:
        """Return the pieces of rows of the plan, each in an epoch: int64 [n] both; key: uint64 [1], of the turns.

        By the index alone: no token is read.
        """
        counts, at = self._plan.located(rows)
        pieces = self._pieces_at(at, counts, epochs, key)
        documents, begins, document_ends = self._pieces.located(pieces)
        ends = begins + self._plan.lengths.take(at)
        is_cut = None if document_ends is None else ends < document_ends
        return PlacedPieces(counts, np.stack((pieces, documents)), begins, ends, is_cut)

    def _pieces_at(self, at: Numbers, counts: Numbers, epochs: Numbers, key: NDArray[np.uint64]) -> Numbers:
        """Return the pieces of rows. at: their places in the plan's slots; counts: of pieces of each row."""
        first = int(epochs[0])
        if (epochs == first).all():
            return self._plan.pieces_at(at, self._turn(first, key))
        pieces, of_piece = np.empty_like(at), np.repeat(epochs, counts)
        for epoch in np.unique(epochs).tolist():
            chosen = of_piece == epoch
            pieces[chosen] = self._plan.pieces_at(at[chosen], self._turn(epoch, key))
        return pieces

    def _turn(self, epoch: int, key: NDArray[np.uint64]) -> Turn:
        turn = self._turns.get(epoch)
        if turn is None:
            turns = {**self._turns, epoch: Turn.of(epoch, self._plan.counts, key)}
            self._turns = {number: turns[number] for number in list(turns)[-_TURNS_KEPT:]}  # replaced: threads may read
            turn = turns[epoch]
        return turn


class PackedStream(Stream[Batch]):
    """Rows of T tokens from whole pieces: documents of a pretrain cache, examples of an sft cache.

    x holds each piece whole. y holds the next tokens of the same document, and -100 at the last token of a document
    and, in an sft cache, at tokens without loss. A document of more than T tokens is cut: pieces of T tokens and a
    rest; the last token of a cut piece has the first one of the next piece as its target. So every token of a document
    but its first is a target exactly once an epoch, unless it carries no loss. A row of an sft cache may
    have no target at all, and its mean loss is nan: add up the losses of tokens, and divide by the number
    of targets. The end of a row is padded: with `pad_id` in x, with -100 in y.

    Which pieces share a row is planned once, when the stream is opened, only from the lengths (see plan.py). Of 10
    million pieces this takes 2 s and 170 to 270 MiB, and 500 to 560 MiB meanwhile. Rows are read ahead, up to a million
    tokens, which takes 12 MiB for ids of 16 bits, and 350 bytes for each piece. The seed and the epoch decide which
    piece of a length stands in which place, and the order of the rows. Pieces of rare lengths share a row with the same
    others in every epoch. Attention has to keep the segments of a batch apart: `block_causal_mask`.

    Forked DataLoader workers share the plan; a pickled copy, as a spawned worker gets, makes it again from the index.
    Ranks, workers and states are as in an EpochStream. Pieces are numbered in the order of the split, from 0, without
    those that are dropped.
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
        over_length: OverLength = "split",
        order: Order = "all",
        **opening: Unpack[OpeningTokens],
    ) -> None:
        """Open a split of a pretrain or sft cache, and plan its rows.

        cache_dir, split: a cache and "train" or "val", or CACHE/SPLIT; neither: "train".
        over_length: what becomes of documents of more than T tokens: "split" cuts them, "truncate" keeps their first T
            tokens, "drop" leaves them out, both with a warning; "error" refuses them.
        order: "shards" is refused, because a row has pieces of the whole split.
        Other arguments: see `EpochStream`.
        Raises: FileNotFoundError, CacheError (each names the file), ValueError for arguments.
        """
        counts: dict[str, Any] = {"global_batch_size": global_batch_size, "rank": rank, "world_size": world_size}
        super().__init__(**counts, seed=seed, epochs=epochs, device=device, drop_last=drop_last)
        self.T = checked_int("T", T, 1)
        cache, name = named_cache(local_path(cache_dir, opening), split)
        self.split = _opened(cache, name, opening)
        self.folder, self.over_length = cache, over_length
        self._packed = PackedRows(self.split, cache, self.T, over_length)
        self.counts, self.pad_id, self.samples_per_epoch = self._packed.counts, self._packed.pad_id, len(self._packed)
        self._texts = "documents" if self._packed.is_pretrain else "examples"
        self._warn_of_lost()
        self._serve(Epochs(self._packed, seed=self.seed, epochs=self.epochs, order=order))

    def _warn_of_lost(self) -> None:
        """Warn of the tokens that are in no row."""
        counts = self.counts
        if counts.tokens_lost:
            total = counts.tokens + counts.tokens_lost
            what = "truncated" if counts.documents_truncated else "dropped"
            targets, lost = counts.supervised_tokens, counts.supervised_tokens_lost
            and_targets = f", and {lost} of {targets} supervised tokens ({lost / targets:.1%}) are lost" if lost else ""
            text = (
                f"{public_name(self.folder)}: {self._packed.num_long} of {counts.documents} "
                f"{self._texts} are longer than T = {self.T} tokens and are "
                f"{what}: {counts.tokens_lost} of {total} tokens ({counts.tokens_lost / total:.1%}) are in no row"
                f"{and_targets}. "
                'Pass a larger T, or over_length="split"'
            )
            warnings.warn(CodedWarning("W203", text), stacklevel=3)

    def __repr__(self) -> str:
        """Return the cache, its rows, the shape of a batch, the rank and the position."""
        epochs, counts = "without end" if self.epochs is None else f"{self.epochs} epochs", self.counts
        rows = f"{counts.rows:,} rows of {counts.pieces:,} pieces, {counts.fill:.1%} filled"
        return f"PackedStream({self._packed.name}: {rows}, {epochs}, {self._described()})"

    def _sources(self) -> dict[str, object]:
        counts = self.counts
        return {
            "cache": self._packed.name,
            "pieces": f"{counts.pieces:,} of {counts.documents:,} {self._texts}",
            "rows": f"{counts.rows:,} an epoch, {counts.fill:.2%} filled",
        }


def _opened(cache: Path, split: str, opening: OpeningTokens) -> Any:
    """Open a split of a cache of either family, by the kind in its meta.json; without one it is a pretrain cache."""
    meta = reader_meta(cache)
    if meta is not None and meta.get("kind") == "sft":
        from niels_gpt.cache.sft_split import SFTSplit

        return SFTSplit(cache, split, **opening)
    return PretrainSplit(cache, split=split, **opening)
