"""Rows of pieces, read many at once: one reading of a split serves several batches, whose own part is two casts.

Batches of few pieces, each read alone, would spend most of their time in the overhead of calls on small arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.formats import IGNORE_INDEX, Ids
from niels_gpt.cache.pretrain_dataset import PretrainSplit, empty_int64
from niels_gpt.sampling.batch import Segments

Numbers = NDArray[np.int64]


class PlacedPieces(NamedTuple):
    """The pieces of some rows, in their order."""

    counts: Numbers
    """Number of pieces of each row: int64 [R]."""
    numbers: Numbers
    """Numbers of the pieces: int64 [n]."""
    documents: Numbers
    """int64 [n]."""
    begins: Numbers
    """First token of each piece, in tokens of the split: int64 [n]."""
    ends: Numbers
    """int64 [n]."""
    document_ends: Numbers | None
    """int64 [n]; None: as `ends`."""


class ReadRows:
    """Rows [R, T] of pieces, with what has to be said of them."""

    def __init__(self, split: Any, placed: PlacedPieces, T: int, pad_id: int) -> None:
        """Read rows. split: `PretrainSplit` or `SFTSplit`. Raises: CacheError E409 for an id outside the vocabulary."""
        self._T = T
        lengths = placed.ends - placed.begins
        piece_stops, total = np.cumsum(placed.counts), np.cumsum(lengths)
        filled = np.diff(total[piece_stops - 1], prepend=0)
        (short,) = np.nonzero(filled < T)
        row_of_piece = np.repeat(np.arange(len(filled)), placed.counts)
        ends = total + (np.cumsum(T - filled) - (T - filled))[row_of_piece]  # of pieces, in the flattened rows
        is_piece: NDArray[np.bool_] = np.ones(len(total) + len(short), dtype=np.bool_)
        is_piece[piece_stops[short] + np.arange(len(short))] = False
        self._starts = np.zeros(len(is_piece) + 1, dtype=np.int32)
        self._starts[1:][is_piece], self._starts[1:][~is_piece] = ends, (short + 1) * T
        self._pieces, self._documents = np.full((2, len(is_piece)), -1, dtype=np.int64)
        self._pieces[is_piece], self._documents[is_piece] = placed.numbers, placed.documents
        segment_stops = piece_stops + np.cumsum(filled < T)
        self._segment_stops = [0, *segment_stops.tolist()]
        # The targets that are not the next token of x: a last one of each piece, and all of padding.
        sizes = np.where(is_piece, 1, np.diff(self._starts))
        stops = np.cumsum(sizes)
        self._other_at: Numbers = np.arange(stops[-1]) + np.repeat(self._starts[1:] - stops, sizes)
        self._others: Numbers = np.full(stops[-1], IGNORE_INDEX, dtype=np.int64)
        self._other_stops = [0, *stops[segment_stops - 1].tolist()]
        cut = np.zeros(0, np.int64)  # pieces that are followed by another of their document
        if placed.document_ends is not None:
            (cut,) = np.nonzero(placed.ends < placed.document_ends)
        after = placed.ends[cut]  # the tokens that are their last targets are read with the pieces
        ranges = np.concatenate((placed.begins, after)), np.concatenate((placed.ends, after + 1))
        self._has_no_loss: NDArray[np.bool_] | None = None
        if isinstance(split, PretrainSplit):
            size = len(filled) * T
            ids = _empty_ids(size + len(cut), size + len(filled), split.files.dtype)
            if len(short):
                ids.fill(pad_id)
            self._ids: Ids = split.read(*ranges, ids, np.concatenate((ends - lengths, np.arange(size, len(ids)))))
            lasts: NDArray[Any] = ids[size:]
        else:
            padding = list(zip(total[piece_stops[short] - 1].tolist(), (T - filled[short]).tolist(), strict=True))
            ids, tokens = split.read(*ranges), total[-1]
            is_target = split.is_target(ids, *ranges)
            self._ids = _spread(ids[:tokens], padding, pad_id)
            self._has_no_loss = _spread(~is_target[:tokens], padding, True)
            lasts = np.where(is_target[tokens:], ids[tokens:], np.int64(IGNORE_INDEX))
        self._others[(stops[is_piece] - 1)[cut]] = lasts

    def part(self, first: int, count: int) -> tuple[Numbers, Numbers, Segments]:
        """Return rows first to first + count - 1: x and y, int64 [count, T], and their segments."""
        last, begin, end = first + count, first * self._T, (first + count) * self._T
        x, y = empty_int64((2, end - begin))
        x[...] = self._ids[begin:end]
        y[:-1] = x[1:]  # in less time than a second cast; the last one is among the others
        if self._has_no_loss is not None:
            np.copyto(y[:-1], IGNORE_INDEX, where=self._has_no_loss[begin + 1 : end])  # half the time of a choice
        others = slice(self._other_stops[first], self._other_stops[last])
        y[self._other_at[others] - begin] = self._others[others]
        at, to = self._segment_stops[first], self._segment_stops[last]
        segments = Segments(
            self._starts[at : to + 1] - np.int32(begin), self._pieces[at:to].copy(), self._documents[at:to].copy()
        )
        return x.reshape(count, self._T), y.reshape(count, self._T), segments


def _empty_ids(count: int, room: int, dtype: np.dtype[Any]) -> Ids:
    """Return uninitialized ids [count] in memory for `room` of them: of one size each time, so that it is reused."""
    ids: Ids = empty_int64((-(-room * dtype.itemsize // 8),)).view(dtype)[:count]
    return ids


def _spread(values: NDArray[Any], padding: list[tuple[int, int]], fill: int) -> NDArray[Any]:
    """Return values with padding in between. padding: the values before it, ascending, and its tokens."""
    if not padding:
        return values
    content, done, parts = values.data, 0, list[memoryview]()
    fills = np.full(max(size for _, size in padding), fill, dtype=values.dtype).data
    for place, size in padding:
        parts += (content[done:place], fills[:size])
        done = place
    joined = bytearray().join([*parts, content[done:]])  # in less time than numpy assignments
    return np.frombuffer(joined, dtype=values.dtype)
