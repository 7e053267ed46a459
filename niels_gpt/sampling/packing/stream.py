"""PackedStream: rows of exactly T tokens made of whole documents or examples, each exactly once an epoch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from niels_gpt.cache.checksums import Check
from niels_gpt.cache.formats import TokenDtype
from niels_gpt.cache.meta import reader_meta
from niels_gpt.cache.mmap import IO, public_file
from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.cache.reader import named_cache
from niels_gpt.cache.sft_counts import OverLength
from niels_gpt.sampling.batch import Rows, Segments
from niels_gpt.sampling.packing.pieces import PackedCounts, Pieces
from niels_gpt.sampling.packing.plan import PLAN_VERSION, Plan, Turn
from niels_gpt.sampling.packing.rows import PlacedPieces, ReadRows
from niels_gpt.sampling.permutation import ROUNDS, random_keys
from niels_gpt.sampling.state import key_check
from niels_gpt.sampling.stream import CacheStream, MadeAhead
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.meta_json import printable
from niels_gpt.storage.versions import version_name

_PURPOSE = 3
"""Of the keys: streams of other kinds with the same seed have unrelated orders."""
_TURNS_KEPT = 4  # of the epochs last read: a batch may hold the end of one and the start of the next


class PackedStream(CacheStream):
    """Rows of T tokens from whole pieces: documents of a pretrain cache, examples of an sft cache.

    A piece of L tokens stands in x whole. Its targets are the next tokens of the same document: -100 for the last token
    of a document, and in an sft cache where there is no loss. A document of more than T tokens is cut: pieces of T
    tokens and a rest; the last token of a cut piece has the first one of the next piece as its target. So every token
    of a document but its first is a target exactly once an epoch, unless it carries no loss. A row of an sft cache may
    have no target at all, and its mean loss is nan: add up the losses of tokens, and divide by the number
    of targets. A row's end is padded: x is `pad_id` there, and the target -100.

    Which pieces share a row is planned once, when the stream is opened, from the lengths alone (see plan.py). Of 10
    million pieces this takes 2 s and 170 to 270 MiB, and 500 to 560 MiB meanwhile. Rows are read ahead, up to a million
    tokens, which takes 12 MiB for ids of 16 bits, and 350 bytes for each piece. The seed and the epoch decide which
    piece of a length stands in which place, and the order of the rows. Pieces of rare lengths share a row with the same
    others in every epoch. Attention has to keep the segments of a batch apart: `block_causal_mask`.

    Forked DataLoader workers share the plan; a pickled copy, as a spawned worker gets, makes it again from the index.
    Ranks, workers and states are as in an EpochStream. Pieces are numbered in the order of the split, from 0, without
    those that are dropped.
    """

    COLUMNS = 3
    split: Any
    """`PretrainSplit` or `SFTSplit`."""

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
        tokenizer_sha256: str | None = None,
        expect: Mapping[str, Any] | None = None,
        io: IO = "mmap",
        dtype: TokenDtype | None = None,
        check: Check = "ends",
    ) -> None:
        """Open a split of a pretrain or sft cache, and plan its rows.

        cache_dir, split: a cache and "train" or "val", or CACHE/SPLIT; neither: "train".
        over_length: what becomes of documents of more than T tokens: "split" cuts them, "truncate" keeps their first T
            tokens, "drop" leaves them out, both with a warning; "error" refuses them.
        Other arguments: as for `EpochStream`.
        Raises: FileNotFoundError, CacheError (each names the file), ValueError for arguments.
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
        cache, name = named_cache(cache_dir, split)
        options: dict[str, Any] = {"tokenizer_sha256": tokenizer_sha256, "expect": expect, "io": io, "dtype": dtype}
        self.split = _opened(cache, name, {**options, "check": check})
        self.folder, self.over_length = cache, over_length
        keys = random_keys(self.seed, ROUNDS + 1, purpose=_PURPOSE)
        self._keys, self._turn_key = keys[:ROUNDS], keys[ROUNDS:]
        self._set_plan()
        self.counts = self._counted()
        """What T and over_length make of the split."""
        self._warn_of_lost()
        self._set_samples(len(self._plan))

    def _set_plan(self) -> None:
        """Make what a pickled copy lacks: pieces and rows."""
        self._pieces = Pieces(self._starts(), self.T, self.over_length, public_file(self.folder))
        self._plan = Plan(self._pieces.lengths, self.T)
        del self._pieces.lengths
        self._turns: dict[int, Turn] = {}
        self._made_ahead = MadeAhead[ReadRows]()

    def __getstate__(self) -> dict[str, Any]:
        made = ("_pieces", "_plan", "_turns", "_made_ahead")
        return {key: value for key, value in self.__dict__.items() if key not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_plan()

    def _starts(self) -> NDArray[np.int64]:
        """Where each document begins, in tokens of the split, and where the last one ends: int64 [documents + 1]."""
        starts: NDArray[np.int64] = self.split.documents if self._is_pretrain else self.split.starts
        return starts

    @property
    def _is_pretrain(self) -> bool:
        return isinstance(self.split, PretrainSplit)

    @property
    def pad_id(self) -> int:
        """The id of x in padding: the cache's own, of an sft cache; 0 of a pretrain cache, which has none."""
        return 0 if self._is_pretrain else int(self.split.pad_id)

    def _counted(self) -> PackedCounts:
        starts, tokens, long = self._starts(), int(self._plan.lengths.sum(dtype=np.int64)), self._pieces.num_long
        targets = lost = 0
        if not self._is_pretrain:
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
        if not self._is_pretrain:
            counts.check(public_file(self.folder))
        return counts

    def _warn_of_lost(self) -> None:
        """Warn of the tokens that are in no row."""
        counts = self.counts
        if counts.tokens_lost:
            total = counts.tokens + counts.tokens_lost
            what = "truncated" if counts.documents_truncated else "dropped"
            targets, lost = counts.supervised_tokens, counts.supervised_tokens_lost
            and_targets = f", and {lost} of {targets} supervised tokens ({lost / targets:.1%}) are lost" if lost else ""
            text = (
                f"{printable(str(public_file(self.folder)))}: {self._pieces.num_long} of {counts.documents} "
                f"{'documents' if self._is_pretrain else 'examples'} are longer than T = {self.T} tokens and are "
                f"{what}: {counts.tokens_lost} of {total} tokens ({counts.tokens_lost / total:.1%}) are in no row"
                f"{and_targets}. "
                'Pass a larger T, or over_length="split"'
            )
            warnings.warn(CodedWarning("W203", text), stacklevel=3)

    @property
    def name(self) -> str:
        """Return the cache, its version and the split, for messages."""
        return f"{version_name(self.folder)}, {printable(self.split.fingerprint()['split'])}"

    def __repr__(self) -> str:
        """Return the cache, its rows, the shape of a batch, the rank and the position."""
        epochs, counts = "without end" if self.epochs is None else f"{self.epochs} epochs", self.counts
        rows = f"{counts.rows:,} rows of {counts.pieces:,} pieces, {counts.fill:.1%} filled"
        return f"PackedStream({self.name}: {rows}, {epochs}, {self._described()})"

    def _sources(self) -> dict[str, object]:
        counts = self.counts
        return {
            "cache": self.name,
            "pieces": f"{counts.pieces:,} of {counts.documents:,} {'documents' if self._is_pretrain else 'examples'}",
            "rows": f"{counts.rows:,} an epoch, {counts.fill:.2%} filled",
        }

    def identity(self) -> dict[str, Any]:
        """Return what decides which pieces a sample has: the stream's arguments and the content of its split."""
        versions = {"kind": "packed", "stream": PLAN_VERSION}
        arguments = {"seed": self.seed, "key_check": key_check(self._keys), "T": self.T}
        return {**versions, **arguments, "over_length": self.over_length, **self.split.fingerprint()}

    def locate(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of the plan and the epoch, and a number, see `MadeAhead.numbered`: int64 [3, n]."""
        epochs, rows = self._in_order(samples)
        return self._made_ahead.numbered(rows, epochs)

    def read(self, places: NDArray[np.int64]) -> Rows:
        """Return the rows at places from `locate`; the rows after them are read ahead.

        Raises: CacheError for an id outside the vocabulary, also of a row that is read ahead.
        """
        count = places.shape[1]
        if not count:
            empty = torch.empty((0, self.T), dtype=torch.int64, device=self.device)
            return Rows(empty, empty.clone(), Segments.whole_rows(0, self.T))
        rows, first = self._made_ahead.of(places, self.T, self._read)
        x, y, segments = rows.part(first, count)
        return Rows(self._on_device(x), self._on_device(y), segments)

    def _read(self, places: NDArray[np.int64]) -> ReadRows:
        return ReadRows(self.split, self._placed(places), self.T, self.pad_id)

    def _placed(self, places: NDArray[np.int64]) -> PlacedPieces:
        """Return the pieces of the rows at places from `locate`."""
        counts, at = self._plan.located(places[0])
        pieces = self._pieces_at(at, counts, places[1])
        documents, begins, document_ends = self._pieces.located(pieces)
        return PlacedPieces(counts, pieces, documents, begins, begins + self._plan.lengths.take(at), document_ends)

    def _pieces_at(
        self, at: NDArray[np.int64], counts: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the pieces of rows. at: their places in the plan's slots; counts: of pieces of each row."""
        first = int(epochs[0])
        if (epochs == first).all():
            return self._plan.pieces_at(at, self._turn(first))
        pieces, of_piece = np.empty_like(at), np.repeat(epochs, counts)
        for epoch in np.unique(epochs).tolist():
            chosen = of_piece == epoch
            pieces[chosen] = self._plan.pieces_at(at[chosen], self._turn(epoch))
        return pieces

    def _turn(self, epoch: int) -> Turn:
        turn = self._turns.get(epoch)
        if turn is None:
            turns = {**self._turns, epoch: Turn.of(epoch, self._plan.counts, self._turn_key)}
            self._turns = {key: turns[key] for key in list(turns)[-_TURNS_KEPT:]}  # replaced: threads may read too
            turn = turns[epoch]
        return turn

    def _on_device(self, values: NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        if str(self.device) == "cpu":
            return tensor
        on_cuda = torch.device(self.device).type == "cuda"  # pinned, so that the call does not wait for the copy
        return (tensor.pin_memory() if on_cuda else tensor).to(self.device, non_blocking=on_cuda)


def _opened(cache: Path, split: str, options: dict[str, Any]) -> Any:
    """Open a split of a cache of either family, by the kind in its meta.json; without one it is a pretrain cache."""
    meta = reader_meta(cache)
    if meta is not None and meta.get("kind") == "sft":
        from niels_gpt.cache.sft_split import SFTSplit

        return SFTSplit(cache, split, **options)
    return PretrainSplit(cache, split=split, **options)
