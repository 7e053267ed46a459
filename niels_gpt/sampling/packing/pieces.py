"""Pieces of at most T tokens: the documents or examples of a split, those longer than T cut, truncated or left out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.sft_counts import OverLength
from niels_gpt.sampling.packing.plan import MAX_PIECES
from niels_gpt.storage.errors import CacheError


@dataclass(frozen=True)
class PackedCounts:
    """How T and over_length change a split; a document is an example, in an sft cache."""

    documents: int  # of the split
    documents_cut: int  # in two or more pieces
    documents_truncated: int
    documents_dropped: int
    pieces: int
    tokens: int  # of all pieces
    tokens_lost: int  # of the split, in no row: truncated or dropped
    rows: int  # of an epoch
    T: int
    supervised_tokens: int  # of all whole documents; 0 of a pretrain cache, where every token but a first one is
    supervised_tokens_lost: int  # those that are no target: truncated or dropped

    def check(self, path: Path) -> None:
        """Raise CacheError if no token of any row of an sft cache is a target. path: for messages."""
        if self.supervised_tokens == self.supervised_tokens_lost:
            found = f"no target is left in any row: {self.supervised_tokens} supervised tokens are there"
            remedy = 'Pass a larger T, or over_length="split"' if self.supervised_tokens else "Take another split"
            raise CacheError(path, found, "a cache with targets in rows of T tokens", remedy, code="E107")

    @property
    def fill(self) -> float:
        """Return the share of the rows' tokens that are not padding."""
        return self.tokens / (self.rows * self.T)


class Pieces:
    """The pieces of a split in its order, P of them: number -> document and tokens.

    Takes 8 bytes for a piece where a document is cut, 4 where one is dropped, else none.
    """

    def __init__(self, starts: NDArray[np.int64], T: int, over_length: OverLength, path: Path) -> None:
        """starts: where each document begins in tokens of the split, and where the last one ends: int64 [D + 1].

        path: for messages. Raises: ValueError for another over_length; CacheError for more than MAX_PIECES pieces, for
            a longer document if over_length="error", and if no piece is left.
        """
        if over_length not in get_args(OverLength):
            raise ValueError(f"over_length={over_length!r}: expected one of {', '.join(get_args(OverLength))}")
        self._starts, self._T, self._documents, self._parts = starts, T, None, None
        lengths = np.diff(starts)
        self.num_long = int(np.count_nonzero(lengths > T))
        """Documents of more than T tokens."""
        if self.num_long and over_length == "error":
            longest = int(lengths.argmax())
            found = (
                f"{self.num_long} of {len(lengths)} are longer than T = {T} tokens, the longest is number {longest} "
                f"with {lengths[longest]}"
            )
            remedy = f'Pass T={lengths[longest]}, or over_length="split", "truncate" or "drop"'
            raise CacheError(path, found, remedy=remedy, code="E107")
        count = int((-(-lengths // T)).sum()) if over_length == "split" else len(lengths)
        if count > MAX_PIECES:
            remedy = "Take a larger T, or a cache of a part of the text"
            raise CacheError(path, f"{count} pieces", f"at most {MAX_PIECES}", remedy, code="E107")
        if self.num_long and over_length == "split":
            lengths = self._cut(lengths)
        elif self.num_long and over_length == "drop":
            self._documents = np.flatnonzero(lengths <= T).astype(np.int32)
            lengths = lengths[self._documents]
            if not len(lengths):
                found = f"no row is left: all {self.num_long} are longer than T = {T} tokens"
                raise CacheError(path, found, remedy='Pass a larger T, or over_length="split"', code="E107")
        self.lengths: NDArray[np.int32] = np.minimum(lengths, T).astype(np.int32)
        """The tokens of each piece, 1 to T: int32 [P]. Only the plan needs it: the stream drops it."""

    _documents: NDArray[np.int32] | None
    _parts: NDArray[np.int32] | None

    def _cut(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number the parts of cut documents; return the lengths of all pieces."""
        counts = -(-lengths // self._T)
        self._documents = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
        firsts = (np.cumsum(counts) - counts).astype(np.int32)
        self._parts = np.arange(len(self._documents), dtype=np.int32) - firsts[self._documents]
        of_pieces = np.full(len(self._documents), self._T, dtype=np.int64)
        of_pieces[np.cumsum(counts) - 1] = lengths - (counts - 1) * self._T
        return of_pieces

    def located(
        self, pieces: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]:
        """Return of each piece its document and first token, and where the document ends: int64 [n].

        None in place of the end if every piece is a whole document.
        """
        documents = pieces if self._documents is None else self._documents.take(pieces).astype(np.int64)
        begins = self._starts.take(documents)
        if self._parts is not None:
            begins += self._parts.take(pieces).astype(np.int64) * self._T
        return documents, begins, self._starts.take(documents + 1) if self.num_long else None
